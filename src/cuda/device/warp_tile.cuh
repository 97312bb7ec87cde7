#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/device/ptx.cuh"

/// Between accumulator fragments and rows in global memory, one warp at a time.
namespace sonicmoe::cuda {

/// f(index) with decltype(index)::value = 0, 1, ...: known to the compiler, whatever the body, for
/// accumulators must never be indexed at run time.
template <int kCount, class F>
__device__ __forceinline__ void static_for(F&& f) {
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
    (f(std::integral_constant<int, kIndices>{}), ...);
  }
  (std::make_integer_sequence<int, kCount>{});
}

template <class T>
struct Pair;  // two T in a word

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
  static __device__ __forceinline__ float2 unpack(std::uint32_t word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    std::uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
  static __device__ __forceinline__ float2 unpack(std::uint32_t word) {
    float2 out;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(out.x), "=f"(out.y)
        : "r"(word));
    return out;
  }
};

/// The words of a 16 x 16 block as a warp holds them in an accumulator, lane l: [0] row l/4,
/// columns 2 (l%4) + {0, 1}; [1] eight rows below; [2], [3] eight columns to the right of those.
struct Fragment {
  std::uint32_t w[4];
};

/// A value that the compiler takes for new: what is computed from it is computed here, and does not
/// sit in registers through the main loop.
__device__ __forceinline__ int here(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// 16 rows x 64 columns of 16-bit values in shared memory, private to a warp. A row is a line of
/// 128 bytes, its 16-byte pieces permuted by piece ^ (row % 8), so that columns of pieces
/// (fragments) and rows (global memory) are both accessed without bank conflicts. Rows go to and
/// from global memory 128 bytes at a time, each under its own predicate: nothing is read or written
/// past the last row of an expert, or past the last column.
///
/// The caller puts __syncwarp() between accesses by fragments and accesses by rows.
class WarpTile {
 public:
  static constexpr int kRows = 16;
  static constexpr int kColumns = 64;
  static constexpr int kBytes = kRows * 128;

  __device__ __forceinline__ WarpTile(std::uint32_t address, int lane)
      : address_(address), lane_(lane) {
    // Fragments: lane l addresses row l%16 of the block, in its left or right half.
    const std::uint32_t row = static_cast<std::uint32_t>(lane) % 16;
    fragment_ = address + row * 128;
    half_ = static_cast<std::uint32_t>(lane) / 16;
    key_ = row % 8;
  }

  __device__ __forceinline__ std::uint32_t address() const { return address_; }

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

  /// Tile to global memory: `to` is the tile's first element, `rows` and `columns` are what is left
  /// of the matrix from there on (columns a multiple of 8, rows of the matrix aligned to 16 bytes).
  template <class T>
  __device__ __forceinline__ void store(T* to, std::int64_t row_stride, int rows,
                                        int columns) const {
    // Computed here, again for every tile: kept between tiles, the addresses of all rows of all
    // tensors would not leave enough registers.
    const int lane = here(lane_);
    const int piece = lane % 8;
    if (piece * 8 >= columns) return;
    to += lane / 8 * row_stride + piece * 8;
#pragma unroll 1
    for (int row = lane / 8; row < min(rows, kRows); row += 4) {
      *reinterpret_cast<uint4*>(to) = read(row, piece);
      to += 4 * row_stride;
    }
  }

  /// Any number of columns, any alignment: one element at a time.
  template <class T>
  __device__ __forceinline__ void store_singly(T* to, std::int64_t row_stride, int rows,
                                               int columns) const {
#pragma unroll 1
    for (int i = lane_; i < kRows * kColumns; i += 32) {
      const int row = i / kColumns, column = i % kColumns;
      std::uint16_t bits;
      asm volatile("ld.shared.b16 %0, [%1];"
                   : "=h"(bits)
                   : "r"(address_ + row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2));
      if (row < rows && column < columns) {
        reinterpret_cast<std::uint16_t*>(to)[row * row_stride + column] = bits;
      }
    }
  }

  /// Starts to bring rows from global memory, zeros where there are none; the warp waits with
  /// cp.async groups and __syncwarp().
  template <class T>
  __device__ __forceinline__ void fetch(const T* from, std::int64_t row_stride, int rows,
                                        int columns) const {
    const int piece = lane_ % 8;
    from += lane_ / 8 * row_stride + piece * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane_ / 8;
      copy_async_16(address_ + row * 128 + ((piece ^ (row % 8)) * 16), from + i * 4 * row_stride,
                    row < rows && piece * 8 < columns);
    }
  }

 private:
  __device__ __forceinline__ std::uint32_t at(int i) const {
    return fragment_ + (((2 * i + half_) ^ key_) * 16);
  }
  __device__ __forceinline__ uint4 read(int row, int piece) const {
    return load_shared(address_ + row * 128 + ((piece ^ (row % 8)) * 16));
  }

  std::uint32_t address_, fragment_, half_, key_;
  int lane_;
};

/// 64 rows x 64 columns of 16-bit values in shared memory, which a warpgroup fills together from
/// transposed accumulators: warp w has rows 16 w to 16 w + 15 of those, columns here. Lines and
/// their permutation as in WarpTile.
class WarpgroupTile {
 public:
  static constexpr int kRows = 64;
  static constexpr int kBytes = kRows * 128;

  __device__ __forceinline__ WarpgroupTile(std::uint32_t address, int warp, int lane)
      : address_(address), warp_(warp), lane_(lane) {
    // Lane l addresses line l%8 of the l/8th matrix of a block: rows of the accumulators and 8
    // further down, columns and 8 further on.
    fragment_ =
        address + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
  }

  __device__ __forceinline__ std::uint32_t address() const { return address_; }

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

  /// Starts to bring this warp's columns from global memory, zeros past the last row or column
  /// (columns a multiple of 8); the warp waits with cp.async groups and __syncwarp().
  template <class T>
  __device__ __forceinline__ void fetch(const T* from, std::int64_t row_stride, int rows,
                                        int columns) const {
    const int piece = 2 * warp_ + lane_ % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 16 + lane_ / 2;
      copy_async_16(address_ + row * 128 + ((piece ^ (row % 8)) * 16),
                    from + row * row_stride + piece * 8, row < rows && piece * 8 < columns);
    }
  }

 private:
  std::uint32_t address_, fragment_;
  int warp_, lane_;
};

/// A box of a tensor map.
struct Box {
  const CUtensorMap* map;
  int column, row, expert;
};

/// A warp's staging tiles, filled and sent away in turn, one group of stores for each: next()
/// counts those. A new one either goes on where the groups before have ended (`turn`), or begins
/// once the copy engine has read everything.
template <int kTiles>
class Staging {
 public:
  /// `turn`: which tile is next.
  __device__ __forceinline__ Staging(std::uint32_t address, int lane, int turn = 0)
      : address_(address), lane_(lane), turn_(turn) {}
  /// The next tile, once the copy engine has read what it deferred.
  __device__ __forceinline__ WarpTile next() {
    if (lane_ == 0) store_wait_read<kTiles - 1>();
    __syncwarp();
    return WarpTile(address_ + turn_++ % kTiles * WarpTile::kBytes, lane_);
  }
  /// Sends a filled tile to `box` if it is `whole`, else calls by_rows().
  template <class F>
  __device__ __forceinline__ void send(const WarpTile& tile, const Box& box, bool whole,
                                       F&& by_rows) {
    if (whole) fence_async_proxy();
    __syncwarp();
    if (!whole) {
      by_rows();
      __syncwarp();
    } else if (lane_ == 0) {
      store_box(box.map, tile.address(), box.column, box.row, box.expert);
    }
    if (lane_ == 0) store_commit();  // empty or not: next() counts groups
  }
  /// Leaves the next tile out.
  __device__ __forceinline__ void skip() {
    if (lane_ == 0) store_commit();
    ++turn_;
  }

 private:
  std::uint32_t address_;
  int lane_;
  int turn_;
};

/// A tile rounded to 16 bits that waits in registers until the next one's products are under way:
/// 64 columns a chunk. So tensor cores do not wait for stores, and these have a tile's time to
/// leave.
template <int kChunks>
class DeferredChunks {
 public:
  /// When none is left of the tile before.
  template <class T>
  __device__ __forceinline__ void defer(const float (&acc)[kChunks * 32]) {
#pragma unroll
    for (int i = 0; i < kChunks * 16; ++i) {
      blocks_[i / 4].w[i % 4] = Pair<T>::pack(acc[2 * i], acc[2 * i + 1]);
    }
    next_ = 0;
  }
  /// Calls send(chunk, blocks) with the number of the next chunk, known to the compiler, and its
  /// four blocks; false if there is none.
  template <class F>
  __device__ __forceinline__ bool next(F&& send) {
    if (next_ >= kChunks) return false;
    static_for<kChunks>([&](auto chunk) {
      if (next_ == decltype(chunk)::value) send(chunk, &blocks_[decltype(chunk)::value * 4]);
    });
    ++next_;
    return true;
  }

 private:
  Fragment blocks_[kChunks * 4];
  int next_ = kChunks;
};

/// The four blocks of a chunk into a staging tile, a warp's or a warpgroup's.
template <class Tile>
__device__ __forceinline__ void put_all(const Tile& tile, const Fragment* blocks) {
#pragma unroll
  for (int i = 0; i < 4; ++i) tile.put(i, blocks[i]);
}

/// Of epilogues that store a tile at once.
struct DefersNothing {
  template <class Traits>
  struct Deferred {};
  template <class Traits, class Params>
  static __device__ __forceinline__ bool send(const Params&, Deferred<Traits>&, std::uint32_t,
                                              int) {
    return false;
  }
};

/// Sum over the four lanes of a quad, the same in each, in one order.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  x += __shfl_xor_sync(~0u, x, 2);
  return x;
}

}  // namespace sonicmoe::cuda
