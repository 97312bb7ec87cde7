#pragma once

#include "cuda/device/warp_tile.cuh"
#include "cuda/epilogue/store_tile.cuh"
#include "cuda/sm90/grouped_gemm.cuh"

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
  static constexpr int kWarpBytes = kTiles * WarpgroupTile::kBytes / 4;
  template <int kN>
  static constexpr int kBlocks = 0;

  template <class Traits>
  class Run {
   public:
    using T = typename Traits::T;
    static constexpr int kCount = Traits::kN / 2;

    static_assert(!Traits::kRows && Traits::kMBlocks == 1);

    __device__ __forceinline__ Run(const Params& e, const GemmParams& p, const Tile& tile,
                                   int m_first, std::uint32_t staging)
        : e_(e), p_(p), tile_(tile), m_first_(m_first), staging_(staging) {}

    __device__ __forceinline__ void begin(float (&)[1][kCount]) {}
    /// Beside the main loop: the copy engine has read what the tile before has left in staging.
    __device__ __forceinline__ void prefetch() {
      if (threadIdx.x % 128 == 0) store_wait_read<0>();
      everyone();
    }

    __device__ __forceinline__ void finish(float (&acc)[1][kCount], const EpilogueBlocks<Traits>&) {
      const int half = tile_.shared >= p_.shared_half;
      const int row = (tile_.shared - half * p_.shared_half) * Traits::kN;
      const int column = tile_.own * kOwn + m_first_ * 64;
      if (column >= e_.columns) return;
      const Place at = in_expert(e_, tile_, row, column);
      if (!kPlain && e_.f32) {
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
      static_for<Traits::kN / 64>([&](auto index) {
        constexpr int chunk = decltype(index)::value;
        const int rows = at.rows - chunk * 64;
        if (rows <= 0) return;
        const WarpgroupTile tile(
            staging_ - warp * kWarpBytes + chunk % kTiles * WarpgroupTile::kBytes, warp, t % 32);
        fill<chunk>(tile, acc,
                    !kPlain && e_.accumulate ? out + chunk * 64 * at.row_stride : nullptr,
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
};

}  // namespace sonicmoe::cuda
