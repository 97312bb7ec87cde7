#pragma once

#include "cuda/device/fragment.cuh"
#include "cuda/device/ptx.cuh"

/// A tile in shared memory between a warpgroup's accumulators and a transposed output.
namespace sonicmoe::cuda {

/// 64 rows x 64 columns of 16-bit values in shared memory, which a warpgroup fills together from
/// transposed accumulators: their rows 16 w to 16 w + 15, of warp w, are columns here. Lines and
/// swizzle are WarpTile's.
class WarpgroupTile {
 public:
  static constexpr int kRows = 64;
  static constexpr int kBytes = kRows * 128;

  __device__ __forceinline__ WarpgroupTile(std::uint32_t address, int warp, int lane)
      : address_(address), warp_(warp), lane_(lane) {
    // Lane l addresses line l%8 of matrix l/8 of a fragment. Matrices: the accumulators' first
    // eight rows, eight more; then the same for eight more columns.
    fragment_ =
        address + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
  }

  __device__ __forceinline__ std::uint32_t address() const { return address_; }
  __device__ __forceinline__ int warp() const { return warp_; }
  __device__ __forceinline__ int lane() const { return lane_; }

  /// Fragment `i` of four: columns 16 i to 16 i + 15 of the accumulators, rows here.
  __device__ __forceinline__ void put(int i, const Fragment& b) const {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     fragment_ + i * 16 * 128),
                 "r"(b.w[0]), "r"(b.w[1]), "r"(b.w[2]), "r"(b.w[3])
                 : "memory");
  }
  __device__ __forceinline__ Fragment get(int i) const {
    Fragment b;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b.w[0]), "=r"(b.w[1]), "=r"(b.w[2]), "=r"(b.w[3])
                 : "r"(fragment_ + i * 16 * 128)
                 : "memory");
    return b;
  }

 private:
  std::uint32_t address_, fragment_;
  int warp_, lane_;
};

/// Starts to bring this warp's columns from global memory, zeros past the last row or column
/// (columns a multiple of 8); the warp waits with cp.async groups and __syncwarp().
template <class T>
__device__ __forceinline__ void fetch(const WarpgroupTile& tile, const T* from,
                                      std::int64_t row_stride, int rows, int columns) {
  const int piece = 2 * tile.warp() + tile.lane() % 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 16 + tile.lane() / 2;
    copy_async_16(tile.address() + row * 128 + ((piece ^ (row % 8)) * 16),
                  from + row * row_stride + piece * 8, row < rows && piece * 8 < columns);
  }
}

}  // namespace sonicmoe::cuda
