#pragma once

#include "cuda/device/fragment.cuh"
#include "cuda/epilogue/dispatch.cuh"
#include "cuda/sm90/grouped_gemm.cuh"

/// Epilogue of up_proj: H = acc + b1 is stored for backward (unless for inference), A = act(H) from
/// the unrounded H.
namespace sonicmoe::cuda {

struct ActivationParams {
  void* preact;                     ///< (R, 2n) as [gate | up], or (R, n); null for inference
  void* act;                        ///< (R, n)
  const void* b1[2];                ///< gate and up, or the one there is; null without
  std::int64_t bias_stride;         ///< elements from one gate to the next ...
  std::int64_t bias_expert_stride;  ///< ... and from one expert to the next
  int intermediate;
  Activation activation;
};

/// `kKind` says which activations the kernel is compiled for.
template <ActivationKind kKind>
struct StoreActivation {
  using Params = ActivationParams;

  template <class Traits, int kMBlocks, int kCount>
  static __device__ __forceinline__ void run(const Params& e, const GemmParams&, const Tile& tile,
                                             int m_first, float (&acc)[kMBlocks][kCount]) {
    visit_activation<kKind>(e.activation,
                            [&](auto fn) { run_as<decltype(fn), Traits>(e, tile, m_first, acc); });
  }

 private:
  template <class Fn, class Traits, int kMBlocks, int kCount>
  static __device__ __forceinline__ void run_as(const Params& e, const Tile& tile, int m_first,
                                                float (&acc)[kMBlocks][kCount]) {
    using T = typename Traits::T;
    constexpr bool kGated = Fn::kIsGlu;
    // With a gate the tile's left half holds gate columns, the right half the up columns of the
    // same units, so that a pair lies in one thread.
    constexpr int kUnits = kGated ? Traits::kN / 2 : Traits::kN;
    constexpr int kUp = kGated ? kCount / 2 : 0;
    const int n = e.intermediate;
    const int unit = tile.shared * kUnits;
    const int t = static_cast<int>(threadIdx.x) % 128;
    const int quad = t % 4;
    const int valid = tile.rows - tile.own * kOwn;
    const std::int64_t first = static_cast<std::int64_t>(tile.first_row) + tile.own * kOwn;
    if (e.b1[0] != nullptr) {
#pragma unroll
      for (int m = 0; m < kMBlocks; ++m) add_bias<T, kUp>(e, tile.expert, unit, quad, acc[m]);
    }
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = (m_first + m) * 64 + t / 32 * 16 + t % 32 / 4 + 8 * h;
        T* const act = static_cast<T*>(e.act) + (first + row) * n + unit;
        T* const preact = e.preact == nullptr ? nullptr
                                              : static_cast<T*>(e.preact) +
                                                    (first + row) * (kGated ? 2 * n : n) + unit;
#pragma unroll
        for (int group = 0; group < kUnits / 32; ++group) {
          Words gate, up, a;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int i = 4 * (4 * group + j) + 2 * h;
            const float g0 = acc[m][i], g1 = acc[m][i + 1];
            const float u0 = acc[m][kUp + i], u1 = acc[m][kUp + i + 1];
            gate.w[j] = Pair<T>::pack(g0, g1);
            if (kGated) up.w[j] = Pair<T>::pack(u0, u1);
            a.w[j] = Pair<T>::pack(Fn::forward(g0, u0), Fn::forward(g1, u1));
          }
          const int column = (4 * group + quad) * 8;
          const bool inside = row < valid && unit + column < n;
          if (e.preact != nullptr) {
            gate = quad_transpose(gate);
            if (inside) store_words(preact + column, gate);
            if (kGated) {
              up = quad_transpose(up);
              if (inside) store_words(preact + n + column, up);
            }
          }
          a = quad_transpose(a);
          if (inside) store_words(act + column, a);
        }
      }
    }
  }

  template <class T, int kUp, int kCount>
  static __device__ __forceinline__ void add_bias(const Params& e, int expert, int unit, int quad,
                                                  float (&acc)[kCount]) {
    constexpr int kColumns = kUp > 0 ? kUp : kCount;
#pragma unroll
    for (int half = 0; half < kCount / kColumns; ++half) {
      const T* bias = static_cast<const T*>(e.b1[half]) + expert * e.bias_expert_stride;
#pragma unroll
      for (int j = 0; j < kColumns / 4; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = unit + j * 8 + quad * 2 + i;
          if (column >= e.intermediate) continue;
          const float b = static_cast<float>(bias[column * e.bias_stride]);
          acc[half * kUp + 4 * j + i] += b;
          acc[half * kUp + 4 * j + 2 + i] += b;
        }
      }
    }
  }
};

}  // namespace sonicmoe::cuda
