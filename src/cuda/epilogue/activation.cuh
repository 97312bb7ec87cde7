#pragma once

#include "cuda/device/warp_tile.cuh"
#include "cuda/epilogue/dispatch.cuh"
#include "cuda/sm90/grouped_gemm.cuh"

/// Epilogue of up_proj: H = acc + b1 is stored for backward (unless for inference), A = act(H) from
/// the unrounded H.
namespace sonicmoe::cuda {

struct ActivationParams {
  CUtensorMap preact_boxes[2];  ///< H: gate and up, or the one there is, (1, R, n) in 64 x 16
  CUtensorMap act_boxes;
  void* preact;  ///< (R, 2n) as [gate | up], or (R, n); null for inference
  void* act;     ///< (R, n)
  bool biased;
  const void* b1[2];                ///< gate and up, or the one there is, if biased
  std::int64_t bias_stride;         ///< elements from one gate to the next ...
  std::int64_t bias_expert_stride;  ///< ... and from one expert to the next
  int intermediate;
  Activation activation;
};

/// `kKind` says which activations the kernel is compiled for, `kBias` whether there may be a bias.
template <ActivationKind kKind, bool kBias>
struct StoreActivation {
  using Params = ActivationParams;
  static constexpr int kTiles = 2;
  static constexpr int kWarpBytes = kTiles * WarpTile::kBytes;
  static constexpr int kWarpBarriers = 0;

  template <class Traits>
  class Run {
   public:
    using T = typename Traits::T;
    static constexpr int kCount = Traits::kN / 2;
    static constexpr bool kGated = kKind != ActivationKind::plain;
    // With a gate the tile's left half holds gate columns, the right half the up columns of the
    // same units, so that a pair lies in one thread.
    static constexpr int kUnits = kGated ? Traits::kN / 2 : Traits::kN;
    static constexpr int kUp = kGated ? kCount / 2 : 0;

    __device__ __forceinline__ Run(const Params& e, const GemmParams&, const Tile& tile,
                                   int m_first, const WarpMemory& memory)
        : e_(e), tile_(tile), m_first_(m_first), staging_(memory.staging) {}

    /// The biases go where the sums begin, which costs no registers beside them. Element by
    /// element, for accumulators set in a branch would serialise wgmma.
    __device__ __forceinline__ void begin(float (&acc)[Traits::kMBlocks][kCount]) {
      if constexpr (!kBias) {
        static_for<Traits::kMBlocks>([&](auto block) { clear(acc[decltype(block)::value]); });
        return;
      }
      const int unit = tile_.shared * kUnits + here(static_cast<int>(threadIdx.x)) % 4 * 2;
      static_for<kGated ? 2 : 1>([&](auto part) {
        constexpr int half = decltype(part)::value;
        const T* const bias =
            static_cast<const T*>(e_.b1[half]) + tile_.expert * e_.bias_expert_stride;
        static_for<kUnits / 8>([&](auto index) {
          constexpr int j = decltype(index)::value;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = unit + j * 8 + i;
            const float b = e_.biased && column < e_.intermediate
                                ? static_cast<float>(bias[column * e_.bias_stride])
                                : 0.0f;
            static_for<Traits::kMBlocks>([&](auto block) {
              float* a = &acc[decltype(block)::value][half * kUp + 4 * j + i];
              a[0] = a[2] = b;
            });
          }
        });
      });
    }

    __device__ __forceinline__ void prefetch() {}

    __device__ __forceinline__ void finish(float (&acc)[Traits::kMBlocks][kCount]) {
      visit_activation<kKind>(e_.activation, [&](auto fn) { finish_as<decltype(fn)>(acc); });
    }

   private:
    template <class Fn>
    __device__ __forceinline__ void finish_as(float (&acc)[Traits::kMBlocks][kCount]) {
      const int n = e_.intermediate;
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int unit = tile_.shared * kUnits;
      const int valid = tile_.rows - tile_.own * kOwn;
      const std::int64_t first = static_cast<std::int64_t>(tile_.first_row) + tile_.own * kOwn;
      const std::int64_t width = kGated ? 2 * n : n;
#pragma unroll
      for (int m = 0; m < Traits::kMBlocks; ++m) {
        const int row = (m_first_ + m) * 64 + t / 32 * 16;
        const int rows = valid - row;
        if (rows <= 0) break;
        const bool whole = rows >= WarpTile::kRows;
        Staging<kTiles> staging(staging_, t % 32);
        const auto store = [&](const Block(&blocks)[4], const CUtensorMap* map, int chunk, void* to,
                               std::int64_t stride) {
          const WarpTile tile = staging.next();
#pragma unroll
          for (int i = 0; i < 4; ++i) tile.put(i, blocks[i]);
          const int column = unit + chunk * 64;
          staging.send(tile, {map, column, tile_.first_row + tile_.own * kOwn + row, 0}, whole,
                       [&] {
                         tile.store(static_cast<T*>(to) + (first + row) * stride + column, stride,
                                    rows, n - column);
                       });
        };
#pragma unroll
        for (int chunk = 0; chunk < kUnits / 64; ++chunk) {
          if (unit + chunk * 64 >= n) break;
          Block blocks[4];
          if (e_.preact != nullptr) {
            pack(&acc[m][chunk * 32], blocks);
            store(blocks, &e_.preact_boxes[0], chunk, e_.preact, width);
            if (kGated) {
              pack(&acc[m][kUp + chunk * 32], blocks);
              store(blocks, &e_.preact_boxes[1], chunk, static_cast<T*>(e_.preact) + n, width);
            }
          }
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            const float* gate = &acc[m][chunk * 32 + 2 * i];
            const float* up = &acc[m][kUp + chunk * 32 + 2 * i];
            blocks[i / 4].w[i % 4] =
                Pair<T>::pack(Fn::forward(gate[0], up[0]), Fn::forward(gate[1], up[1]));
          }
          store(blocks, &e_.act_boxes, chunk, e_.act, n);
        }
      }
    }

    static __device__ __forceinline__ void pack(const float* acc, Block (&blocks)[4]) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        blocks[i / 4].w[i % 4] = Pair<T>::pack(acc[2 * i], acc[2 * i + 1]);
      }
    }

    const Params& e_;
    const Tile& tile_;
    int m_first_;
    std::uint32_t staging_;
  };
};

}  // namespace sonicmoe::cuda
