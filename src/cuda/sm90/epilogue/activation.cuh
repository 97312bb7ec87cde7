#pragma once

#include "cuda/device/warp_tile.cuh"
#include "cuda/sm90/epilogue/dispatch.cuh"
#include "cuda/sm90/pipeline.cuh"

/// Epilogue of up_proj: H = acc + b1 is stored for backward (unless for inference), A = act(H) from
/// the unrounded H.
namespace sonicmoe::cuda {

template <class Activations>
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
  Activations activations;
};

/// Rounded accumulators of a chunk of 64 columns.
template <class T>
__device__ __forceinline__ void put_rounded(const WarpTile& tile, const float* acc) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Fragment block;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      block.w[j] = Pair<T>::pack(acc[8 * i + 2 * j], acc[8 * i + 2 * j + 1]);
    }
    tile.put(i, block);
  }
}

/// A of block `i` of a chunk, whose ups are kUp accumulators further than its gates.
template <class T, int kUp, class Fn>
__device__ __forceinline__ Fragment activate(const Fn& fn, const float* acc, int i) {
  Fragment block;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float* g = &acc[8 * i + 2 * j];
    const float* u = &acc[kUp + 8 * i + 2 * j];
    // One reciprocal of four is left to the special function unit: it is slower with an exponential
    // and a reciprocal than the rest of the multiprocessor with all else. Which one goes by the
    // column, so that equal rows have equal bits (j % 2 is a half of the rows, j / 2 of the
    // columns).
    block.w[j] = Pair<T>::pack(fn.forward_by_newton(g[0], u[0]),
                               j < 2 ? fn.forward(g[1], u[1]) : fn.forward_by_newton(g[1], u[1]));
  }
  return block;
}

/// `kBias`: there may be one.
template <class Activations, bool kBias>
struct StoreActivation : DefersNothing {
  using Params = ActivationParams<Activations>;
  static constexpr bool kAdds = kBias;  ///< to what begin() puts into the accumulators
  static constexpr bool kGated = Activations::kGated;
  /// Units (columns of A) of a tile that is kTileN wide. With a gate the tile's left half holds
  /// gate columns, the right half the up columns of the same units, so that a pair lies in one
  /// thread.
  template <int kTileN>
  static constexpr int kUnits = kGated ? kTileN / 2 : kTileN;
  static constexpr int kActTiles = 2;
  static constexpr int kStagingBytes = kActTiles * WarpTile::kBytes;
  /// The stages that a chunk's H leaves from.
  template <int kTileN>
  static constexpr int kRingStages = kUnits<kTileN> / 64;

  /// Nothing comes into the epilogue's stages.
  template <class Traits>
  static __device__ __forceinline__ void load(const Params&, const Tile&, int, std::uint32_t,
                                              std::uint32_t full) {
    mbarrier_arrive(full);
  }

  template <class Traits>
  class Run {
   public:
    using T = typename Traits::T;
    static constexpr int kCount = Traits::kTileN / 2;
    static constexpr int kUnits = StoreActivation::kUnits<Traits::kTileN>;
    static constexpr int kUp = kGated ? kCount / 2 : 0;

    static_assert(Traits::kM64 == 1);

    __device__ __forceinline__ Run(const Params& e, const GemmParams&, const Tile& tile,
                                   int m_first, std::uint32_t staging)
        : e_(e), tile_(tile), m_first_(m_first), staging_(staging) {}

    /// The biases go where the sums begin, which costs no registers beside them. Element by
    /// element, for accumulators set in a branch would serialise wgmma.
    __device__ __forceinline__ void begin(float (&acc)[Traits::kM64][kCount]) {
      if constexpr (!kBias) return;
      const int unit = tile_.n_block * kUnits + here(static_cast<int>(threadIdx.x)) % 4 * 2;
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
            static_for<Traits::kM64>([&](auto block) {
              float* a = &acc[decltype(block)::value][half * kUp + 4 * j + i];
              a[0] = a[2] = b;
            });
          }
        });
      });
    }

    __device__ __forceinline__ void prefetch() {}

    __device__ __forceinline__ void finish(float (&acc)[Traits::kM64][kCount], Deferred<Traits>&,
                                           const EpilogueStages<Traits>& stages) {
      e_.activations.visit([&](const auto& fn) { finish_as(fn, acc[0], stages); });
    }

   private:
    template <class Fn>
    __device__ __forceinline__ void finish_as(const Fn& fn, float (&acc)[kCount],
                                              const EpilogueStages<Traits>& stages) {
      const int n = e_.intermediate;
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int lane = t % 32;
      const int row = m_first_ * 64 + uniform(t / 32) * 16;  // this warp's first, in the tile
      const int rows = tile_.rows - tile_.m_block * kTileM - row;
      const int at = tile_.first_row + tile_.m_block * kTileM + row;
      const bool whole = rows >= WarpTile::kRows;
      static_for<kUnits / 64>([&](auto index) {
        constexpr int chunk = decltype(index)::value;
        const int unit = tile_.n_block * kUnits + chunk * 64;
        const std::uint32_t stage = uniform(stages.wait(chunk)) + row * kLineBytes;
        const WarpTile gate(stage + stages.place(0), lane), up(stage + stages.place(1), lane);
        const WarpTile act(staging_ + chunk % kActTiles * WarpTile::kBytes, lane);
        const bool keeps = e_.preact != nullptr;
        if (keeps) {
          // Stores of H before A's. (The compiler still puts the arithmetic of both before them.)
          put_rounded<T>(gate, &acc[chunk * 32]);
          if (kGated) put_rounded<T>(up, &acc[kUp + chunk * 32]);
          fence_async_proxy();
          __syncwarp();
          if (whole && lane == 0) {
            store_box(&e_.preact_boxes[0], gate.address(), unit, at, 0);
            if (kGated) store_box(&e_.preact_boxes[1], up.address(), unit, at, 0);
          }
          __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          act.put(i, activate<T, kUp>(fn, &acc[chunk * 32], i));
        }
        if (chunk > 0) {
          // By now the stores of the chunk before have been read.
          if (lane == 0) store_wait_read<0>();
          __syncwarp();
          stages.give_back(chunk - 1);
        }
        fence_async_proxy();
        __syncwarp();
        if (whole && lane == 0) store_box(&e_.act_boxes, act.address(), unit, at, 0);
        if (!whole) {
          const std::int64_t width = kGated ? 2 * n : n;
          if (keeps) {
            T* const preact = static_cast<T*>(e_.preact) + at * width + unit;
            gate.store(preact, width, rows, n - unit);
            if (kGated) up.store(preact + n, width, rows, n - unit);
          }
          act.store(static_cast<T*>(e_.act) + std::int64_t{at} * n + unit, n, rows, n - unit);
          // Read before the copy engine writes there.
          fence_async_proxy();
          __syncwarp();
        }
        if (lane == 0) store_commit();
      });
    }

    const Params& e_;
    const Tile& tile_;
    int m_first_;
    std::uint32_t staging_;
  };
};

}  // namespace sonicmoe::cuda
