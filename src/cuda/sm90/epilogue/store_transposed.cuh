#pragma once

#include "cuda/device/warpgroup_tile.cuh"
#include "cuda/sm90/epilogue/store_tile.cuh"

/// Epilogue for outputs in which M of the products is contiguous: it stores the transposed tile, or
/// adds it to what is there. With the wider operand as N, wgmma reads 80 KiB of shared memory a k
/// block. The other way round it would read 96, which is more than it has time for.
namespace sonicmoe::cuda {

/// Each expert has a matrix (N, M), or two, one after the other along N. 16-bit outputs leave
/// through `boxes` of 64 x 64, clipped at their extents.
template <bool kPlain>
struct StoreTransposed : LoadsNothing {
  using Params = StoreParams;
  static constexpr bool kAdds = false;
  static constexpr int kBuffers = 2;  // of a warpgroup; a warp has a quarter of each
  static constexpr int kStagingBytes = kBuffers * WarpgroupTile::kBytes / 4;

  template <class Traits>
  using Deferred = std::conditional_t<kPlain, DeferredPart<Traits::kTileN / 64>,
                                      DefersNothing::Deferred<Traits>>;

  /// All warps of a warpgroup together.
  template <class Traits>
  static __device__ __forceinline__ bool send(const Params& e, Deferred<Traits>& deferred,
                                              std::uint32_t staging, int consumer) {
    if constexpr (!kPlain) {
      return false;
    } else {
      return deferred.chunks.next([&](auto index, const Fragment* fragments) {
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
        const int part = uniform(here(deferred.part)), expert = uniform(here(deferred.expert));
        const int row = uniform(here(deferred.row)) + chunk * 64,
                  column = uniform(here(deferred.column));
        put_all(tile, fragments);
        fence_async_proxy();
        // Past the barrier all warps have filled this tile, and the copy engine has read the other
        // one, from which the chunk before left.
        everyone_once_read();
        if (warp == 0 && lane == 0) {
          store_box(&e.boxes[part], tile.address(), column, row, expert);
          store_commit();
        }
      });
    }
  }

  template <class Traits>
  struct Run {
    const Params& e;
    const GemmParams& gemm;
    const Tile& tile;
    int m_first;
    std::uint32_t staging;

    using T = typename Traits::T;
    static constexpr int kCount = Traits::kTileN / 2;

    static_assert(!Traits::kRowsAreM && Traits::kM64 == 1);

    __device__ __forceinline__ void begin(float (&)[1][kCount]) {}
    /// The copy engine has read what the tile before left in staging.
    __device__ __forceinline__ void prefetch() {
      if (kPlain) return;  // send() waits
      if (threadIdx.x % 128 == 0) store_wait_read<0>();
      everyone();
    }

    __device__ __forceinline__ void finish(float (&acc)[1][kCount], Deferred<Traits>& deferred,
                                           const EpilogueStages<Traits>&) {
      const int n_half = gemm.extents.n_half;
      const int part = tile.n_block >= n_half;
      const int row = (tile.n_block - part * n_half) * Traits::kTileN;
      const int column = tile.m_block * kTileM + m_first * 64;
      if (column >= e.columns) return;
      const Place at = in_expert(e, tile.expert, row, column);
      if constexpr (kPlain) {
        deferred.part = part;
        deferred.row = at.row;
        deferred.column = at.column;
        deferred.expert = at.expert;
        deferred.rows = at.rows;
        deferred.chunks.template defer<T>(acc[0]);
      } else if (e.f32) {
        store_f32(static_cast<float*>(e.out[part]) + at.start, at, acc[0]);
      } else {
        store_16(static_cast<T*>(e.out[part]) + at.start, &e.boxes[part], at, acc[0]);
      }
    }

    /// All warps of the warpgroup arrive and wait.
    __device__ __forceinline__ void everyone() const { named_barrier(2 + m_first, 128); }

    /// Together with the other warps of the warpgroup, 64 rows of the output at a time.
    __device__ __forceinline__ void store_16(const T* out, const CUtensorMap* map, const Place& at,
                                             float (&acc)[kCount]) const {
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int warp = t / 32;
      static_for<Traits::kTileN / 64>([&](auto index) {
        constexpr int chunk = decltype(index)::value;
        const int rows = at.rows - chunk * 64;
        if (rows <= 0) return;
        const WarpgroupTile tile = staging_tile(staging, chunk, warp, t % 32);
        put_on_top(tile, &acc[chunk * 32],
                   e.accumulate ? out + chunk * 64 * at.row_stride : nullptr, at.row_stride, rows,
                   at.columns);
        fence_async_proxy();
        // Past the barrier all warps have filled this tile, and the copy engine has read the other
        // one, from which the chunk before left.
        if (t == 0) store_wait_read<0>();
        everyone();
        if (t == 0) {
          store_box(map, tile.address(), at.column, at.row + chunk * 64, at.expert);
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
          *to = e.accumulate ? *to + acc[4 * j + i] : acc[4 * j + i];
        }
      }
    }
  };

 private:
  /// The warpgroup's tile for a chunk, from the address of this warp's part of staging.
  static __device__ __forceinline__ WarpgroupTile staging_tile(std::uint32_t staging, int chunk,
                                                               int warp, int lane) {
    const std::uint32_t first = staging - warp * kStagingBytes;
    return {first + chunk % kBuffers * WarpgroupTile::kBytes, warp, lane};
  }
};

}  // namespace sonicmoe::cuda
