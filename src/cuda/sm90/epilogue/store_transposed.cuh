#pragma once

#include "cuda/device/warp_tile.cuh"
#include "cuda/sm90/epilogue/store_tile.cuh"
#include "cuda/sm90/pipeline.cuh"

/// Epilogue for outputs in which the own axis is contiguous, though it is M of the products: stores
/// the transposed tile, or adds it to what is there. With the wider operand as N, wgmma reads 80
/// KiB of shared memory a k block; with the narrower one 96, which is more than it has time for.
namespace sonicmoe::cuda {

/// Each expert has a matrix (shared axis, own axis), or two, one after the other along the shared
/// axis. 16-bit outputs leave through `boxes` of 64 x 64, clipped at their extents.
template <bool kPlain>
struct StoreTransposed {
  using Params = StoreParams;
  static constexpr bool kAdds = false;
  static constexpr int kTiles = 2;  // of a warpgroup; a warp has a quarter of each
  static constexpr int kStagingBytes = kTiles * WarpgroupTile::kBytes / 4;
  template <int kTileN>
  static constexpr int kRingStages = 0;

  template <class Traits>
  struct DeferredHalf : DeferredTile<Traits::kTileN / 64> {
    int half;  ///< which tensor map
  };
  template <class Traits>
  using Deferred =
      std::conditional_t<kPlain, DeferredHalf<Traits>, DefersNothing::Deferred<Traits>>;

  /// Sends the next chunk of a held tile, all warps of a warpgroup together; false if there is
  /// none.
  template <class Traits>
  static __device__ __forceinline__ bool send(const Params& e, Deferred<Traits>& deferred,
                                              std::uint32_t staging, int consumer) {
    if constexpr (!kPlain) {
      return false;
    } else {
      return deferred.chunks.next([&](auto index, const Fragment* blocks) {
        constexpr int chunk = decltype(index)::value;
        if (deferred.rows <= chunk * 64) return;
        const int t = here(static_cast<int>(threadIdx.x)) % 128;
        const int warp = uniform(t / 32), lane = t % 32;
        const auto everyone_once_read = [&] {
          if (warp == 0 && lane == 0) store_wait_read<0>();
          named_barrier(2 + consumer, 128);
        };
        // The tile before may have ended with any chunk.
        if (chunk == 0) everyone_once_read();
        const WarpgroupTile tile = staging_tile(uniform(staging), chunk, warp, lane);
        const int half = uniform(here(deferred.half)), expert = uniform(here(deferred.expert));
        const int row = uniform(here(deferred.row)) + chunk * 64,
                  column = uniform(here(deferred.column));
        put_all(tile, blocks);
        fence_async_proxy();
        // Past the barrier this tile is full, and the other one, which the chunk before left
        // through, is free.
        everyone_once_read();
        if (warp == 0 && lane == 0) {
          store_box(&e.boxes[half], tile.address(), column, row, expert);
          store_commit();
        }
      });
    }
  }

  template <class Traits>
  class Run {
   public:
    using T = typename Traits::T;
    static constexpr int kCount = Traits::kTileN / 2;

    static_assert(!Traits::kRows && Traits::kM64 == 1);

    __device__ __forceinline__ Run(const Params& e, const GemmParams& p, const Tile& tile,
                                   int m_first, std::uint32_t staging)
        : e_(e), p_(p), tile_(tile), m_first_(m_first), staging_(staging) {}

    __device__ __forceinline__ void begin(float (&)[1][kCount]) {}
    /// Beside the main loop: the copy engine has read what the tile before has left in staging.
    __device__ __forceinline__ void prefetch() {
      if (kPlain) return;  // send() waits
      if (threadIdx.x % 128 == 0) store_wait_read<0>();
      everyone();
    }

    __device__ __forceinline__ void finish(float (&acc)[1][kCount], Deferred<Traits>& deferred,
                                           const EpilogueStages<Traits>&) {
      const int half = tile_.n_block >= p_.n_half;
      const int row = (tile_.n_block - half * p_.n_half) * Traits::kTileN;
      const int column = tile_.m_block * kTileM + m_first_ * 64;
      if (column >= e_.columns) return;
      const Place at = in_expert(e_, tile_, row, column);
      if constexpr (kPlain) {
        deferred.half = half;
        deferred.template defer<T>(acc[0], at, 0);
      } else if (e_.f32) {
        store_f32(static_cast<float*>(e_.out[half]) + at.start, at, acc[0]);
      } else {
        store_16(static_cast<T*>(e_.out[half]) + at.start, &e_.boxes[half], at, acc[0]);
      }
    }

   private:
    /// All warps of the warpgroup are here.
    __device__ __forceinline__ void everyone() const { named_barrier(2 + m_first_, 128); }

    /// Together with the other warps of the warpgroup, 64 rows of the output at a time.
    __device__ __forceinline__ void store_16(const T* out, const CUtensorMap* map, const Place& at,
                                             float (&acc)[kCount]) const {
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int warp = t / 32;
      static_for<Traits::kTileN / 64>([&](auto index) {
        constexpr int chunk = decltype(index)::value;
        const int rows = at.rows - chunk * 64;
        if (rows <= 0) return;
        const WarpgroupTile tile = staging_tile(staging_, chunk, warp, t % 32);
        fill<chunk>(tile, acc, e_.accumulate ? out + chunk * 64 * at.row_stride : nullptr,
                    at.row_stride, rows, at.columns);
        fence_async_proxy();
        // Past the barrier this tile is full, and the other one, which the chunk before left
        // through, is free.
        if (t == 0) store_wait_read<0>();
        everyone();
        if (t == 0) {
          store_box(map, tile.address(), at.column0, at.row0 + chunk * 64, at.expert0);
          store_commit();
        }
      });
    }

    __device__ __forceinline__ void store_f32(float* out, const Place& at,
                                              const float (&acc)[kCount]) const {
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int lane = t % 32;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = j * 8 + lane % 4 * 2 + i % 2;
          const int column = t / 32 * 16 + lane / 4 + i / 2 * 8;
          if (row >= at.rows || column >= at.columns) continue;
          float* to = out + row * at.row_stride + column;
          *to = e_.accumulate ? *to + acc[4 * j + i] : acc[4 * j + i];
        }
      }
    }

    const Params& e_;
    const GemmParams& p_;
    const Tile& tile_;
    int m_first_;
    std::uint32_t staging_;
  };

 private:
  /// From the address of the warp's part of staging, where the chunk's tile of the warpgroup lies.
  static __device__ __forceinline__ WarpgroupTile staging_tile(std::uint32_t staging, int chunk,
                                                               int warp, int lane) {
    const std::uint32_t first = staging - warp * kStagingBytes;
    return {first + chunk % kTiles * WarpgroupTile::kBytes, warp, lane};
  }
};

}  // namespace sonicmoe::cuda
