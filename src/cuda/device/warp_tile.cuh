#pragma once

#include "cuda/device/fragment.cuh"
#include "cuda/device/ptx.cuh"

/// A tile in shared memory between a warp's accumulators and rows in global memory.
namespace sonicmoe::cuda {

/// 16 rows x 64 columns of 16-bit values in shared memory, private to a warp. A row is a line of
/// 128 bytes whose 16-byte pieces lie at piece ^ (row % 8), the copy engine's swizzle. So neither
/// fragments nor rows have bank conflicts. A warp needs __syncwarp() between accesses by fragments
/// and accesses by rows.
class WarpTile {
 public:
  static constexpr int kRows = 16;
  static constexpr int kColumns = 64;
  static constexpr int kBytes = kRows * 128;

  __device__ __forceinline__ WarpTile(std::uint32_t address, int lane)
      : address_(address), lane_(lane) {
    // Lane l addresses row l%16 of a fragment, in its left or right half.
    const std::uint32_t row = static_cast<std::uint32_t>(lane) % 16;
    fragment_ = address + row * 128;
    half_ = static_cast<std::uint32_t>(lane) / 16;
    key_ = row % 8;
  }

  __device__ __forceinline__ std::uint32_t address() const { return address_; }
  __device__ __forceinline__ int lane() const { return lane_; }
  /// Address of 16-byte piece `piece` of row `row`.
  __device__ __forceinline__ std::uint32_t at_piece(int row, int piece) const {
    return address_ + row * 128 + ((piece ^ (row % 8)) * 16);
  }

  /// Fragment `i` of four along the columns.
  __device__ __forceinline__ void put(int i, const Fragment& b) const {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at(i)),
                 "r"(b.w[0]), "r"(b.w[1]), "r"(b.w[2]), "r"(b.w[3])
                 : "memory");
  }
  __device__ __forceinline__ Fragment get(int i) const {
    Fragment b;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b.w[0]), "=r"(b.w[1]), "=r"(b.w[2]), "=r"(b.w[3])
                 : "r"(at(i))
                 : "memory");
    return b;
  }

  /// Stores rows to global memory, 128 bytes at a time. `to` is the place of the tile's first
  /// element, 16-byte aligned; `rows` and `columns`, a multiple of 8, are what the matrix has from
  /// there on. Nothing past them is written.
  template <class T>
  __device__ __forceinline__ void store(T* to, std::int64_t row_stride, int rows,
                                        int columns) const {
    // Addresses are computed for every tile again: kept, they would take too many registers.
    const int lane = here(lane_);
    const int piece = lane % 8;
    if (piece * 8 >= columns) return;
    to += lane / 8 * row_stride + piece * 8;
#pragma unroll 1
    for (int row = lane / 8; row < min(rows, kRows); row += 4) {
      *reinterpret_cast<uint4*>(to) = load_shared(at_piece(row, piece));
      to += 4 * row_stride;
    }
  }

 private:
  __device__ __forceinline__ std::uint32_t at(int i) const {
    return fragment_ + (((2 * i + half_) ^ key_) * 16);
  }
  std::uint32_t address_, fragment_, half_, key_;
  int lane_;
};

}  // namespace sonicmoe::cuda
