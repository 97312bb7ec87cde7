#pragma once

#include "cuda/device/fragment.cuh"
#include "cuda/epilogue/dispatch.cuh"
#include "cuda/sm90/grouped_gemm.cuh"

/// Epilogue of down_proj_dgrad. The accumulators are dA' (unscaled). With H read back and A
/// computed from it again: dH = dAct(s dA', H), A' = s A, and the tile's part of dS = <dA', A>.
namespace sonicmoe::cuda {

struct ActivationGradParams {
  const void* preact;       ///< (R, 2n) as [gate | up], or (R, n)
  void* dpreact;            ///< the same shape
  void* scaled_act;         ///< (R, n)
  const float* row_scores;  ///< (R)
  float* dscores;           ///< (shared tiles, R): one partial sum for each tile along n
  std::int64_t capacity;    ///< R
  int intermediate;
  Activation activation;
};

template <ActivationKind kKind>
struct StoreActivationGrad {
  using Params = ActivationGradParams;

  template <class Traits, int kMBlocks, int kCount>
  static __device__ __forceinline__ void run(const Params& e, const GemmParams&, const Tile& tile,
                                             int m_first, float (&acc)[kMBlocks][kCount]) {
    visit_activation<kKind>(e.activation,
                            [&](auto fn) { run_as<decltype(fn), Traits>(e, tile, m_first, acc); });
  }

 private:
  struct Preact {
    Words gate, up;
  };

  template <class T, bool kGated>
  static __device__ __forceinline__ Preact load(const T* row, int column, int n, bool inside) {
    Preact h = {};
    if (inside) {
      h.gate = load_words(row + column);
      if (kGated) h.up = load_words(row + n + column);
    }
    return h;
  }

  template <class Fn, class Traits, int kMBlocks, int kCount>
  static __device__ __forceinline__ void run_as(const Params& e, const Tile& tile, int m_first,
                                                float (&acc)[kMBlocks][kCount]) {
    using T = typename Traits::T;
    constexpr bool kGated = Fn::kIsGlu;
    constexpr int kGroups = Traits::kN / 32;
    const int n = e.intermediate;
    const int width = kGated ? 2 * n : n;
    const int unit = tile.shared * Traits::kN;
    const int t = static_cast<int>(threadIdx.x) % 128;
    const int quad = t % 4;
    const int valid = tile.rows - tile.own * kOwn;
    const std::int64_t first = static_cast<std::int64_t>(tile.first_row) + tile.own * kOwn;
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = (m_first + m) * 64 + t / 32 * 16 + t % 32 / 4 + 8 * h;
        const bool row_inside = row < valid;
        const T* const preact = static_cast<const T*>(e.preact) + (first + row) * width + unit;
        T* const dpreact = static_cast<T*>(e.dpreact) + (first + row) * width + unit;
        T* const scaled = static_cast<T*>(e.scaled_act) + (first + row) * n + unit;
        const float score = row_inside ? e.row_scores[first + row] : 0.0f;
        float dot = 0.0f;
        // H of the next group is on its way while this one is computed.
        Preact next = load<T, kGated>(preact, quad * 8, n, row_inside && unit + quad * 8 < n);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int column = (4 * group + quad) * 8;
          const bool inside = row_inside && unit + column < n;
          const Preact now = next;
          if (group + 1 < kGroups) {
            next = load<T, kGated>(preact, column + 32, n, row_inside && unit + column + 32 < n);
          }
          const Words gate = quad_transpose(now.gate);
          const Words up = kGated ? quad_transpose(now.up) : Words{};
          Words dgate, dup, a;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int i = 4 * (4 * group + j) + 2 * h;
            const float2 g = Pair<T>::unpack(gate.w[j]);
            const float2 u = Pair<T>::unpack(up.w[j]);
            const math::Gradients r0 = Fn::backward(g.x, u.x, score * acc[m][i]);
            const math::Gradients r1 = Fn::backward(g.y, u.y, score * acc[m][i + 1]);
            dot += acc[m][i] * r0.act;
            dot += acc[m][i + 1] * r1.act;
            dgate.w[j] = Pair<T>::pack(r0.dgate, r1.dgate);
            if (kGated) dup.w[j] = Pair<T>::pack(r0.dup, r1.dup);
            a.w[j] = Pair<T>::pack(score * r0.act, score * r1.act);
          }
          dgate = quad_transpose(dgate);
          if (inside) store_words(dpreact + column, dgate);
          if (kGated) {
            dup = quad_transpose(dup);
            if (inside) store_words(dpreact + n + column, dup);
          }
          a = quad_transpose(a);
          if (inside) store_words(scaled + column, a);
        }
        // Columns past n have zero weights and zero H, so they add act(0) * 0.
        dot = quad_sum(dot);
        if (row_inside && quad == 0) e.dscores[tile.shared * e.capacity + first + row] = dot;
      }
    }
  }
};

}  // namespace sonicmoe::cuda
