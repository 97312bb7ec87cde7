#pragma once

#include "cuda/device/warp_tile.cuh"
#include "cuda/sm90/epilogue/ports.cuh"

/// Deferred stores: a tile waits in registers and leaves beside the next tile's products.
namespace sonicmoe::cuda {

/// A warp's staging tiles, used round robin, with one group of stores for each. Lane 0 commits a
/// group for every tile, an empty one too, since next() counts groups.
template <int kBuffers>
class StagingTiles {
 public:
  /// `next`: the tile that comes next. 0 if the copy engine has read all earlier stores.
  __device__ __forceinline__ StagingTiles(std::uint32_t address, int lane, int next = 0)
      : address_(address), lane_(lane), next_(next) {}
  /// The next tile, once the copy engine has read what it held.
  __device__ __forceinline__ WarpTile next() {
    if (lane_ == 0) store_wait_read<kBuffers - 1>();
    __syncwarp();
    return WarpTile(address_ + next_++ % kBuffers * WarpTile::kBytes, lane_);
  }
  /// Ends the tile's group.
  __device__ __forceinline__ void commit() {
    if (lane_ == 0) store_commit();
  }
  /// Leaves the next tile out.
  __device__ __forceinline__ void skip() {
    commit();
    ++next_;
  }

 private:
  std::uint32_t address_;
  int lane_;
  int next_;
};

/// A tile rounded to 16 bits that waits in registers, in chunks of 64 columns. So tensor cores do
/// not wait for stores, and stores have a tile's time to leave
/// (docs/findings/archive/held-tiles.md).
template <int kChunks>
class DeferredChunks {
 public:
  /// Called when no chunk of the tile before is left.
  template <class T>
  __device__ __forceinline__ void defer(const float (&acc)[kChunks * 32]) {
#pragma unroll
    for (int i = 0; i < kChunks * 4; ++i) fragments_[i] = rounded<T>(acc + 8 * i);
    next_ = 0;
  }
  /// Calls send(index, fragments) with the next chunk's index, known to the compiler, and its four
  /// fragments; false if there is none.
  template <class F>
  __device__ __forceinline__ bool next(F&& send) {
    if (next_ >= kChunks) return false;
    static_for<kChunks>([&](auto chunk) {
      if (next_ == decltype(chunk)::value) send(chunk, &fragments_[decltype(chunk)::value * 4]);
    });
    ++next_;
    return true;
  }

 private:
  Fragment fragments_[kChunks * 4];
  int next_ = kChunks;
};

/// The four fragments of a chunk into a staging tile, a warp's or a warpgroup's.
template <class StagedTile>
__device__ __forceinline__ void put_all(const StagedTile& tile, const Fragment* fragments) {
#pragma unroll
  for (int i = 0; i < 4; ++i) tile.put(i, fragments[i]);
}

/// A deferred tile, and where this warp's or warpgroup's part of it goes.
template <int kChunks>
struct DeferredTile {
  DeferredChunks<kChunks> chunks;
  int row, column, expert;  ///< in the tensor map
  int rows;                 ///< of the matrix from `row` on
};
/// The same where an expert's matrix has two parts.
template <int kChunks>
struct DeferredPart : DeferredTile<kChunks> {
  int part;  ///< which tensor map
};

/// Rounded accumulators of 64 columns, acc[0] to acc[31], into a staging tile. Unless `old` is null
/// they are first added to what is there, in fp32. `rows` and `columns` are what the matrix has
/// from `old` on.
template <class T, class StagedTile>
__device__ __forceinline__ void put_on_top(const StagedTile& tile, float* acc, const T* old,
                                           std::int64_t row_stride, int rows, int columns) {
  if (old != nullptr) {
    fetch(tile, old, row_stride, rows, columns);
    copy_async_commit();
    copy_async_wait<0>();
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float* a = acc + 8 * i;
    if (old != nullptr) {
      const Fragment before = tile.get(i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = Pair<T>::unpack(before.w[j]);
        a[2 * j] += pair.x;
        a[2 * j + 1] += pair.y;
      }
    }
    tile.put(i, rounded<T>(a));
  }
}

}  // namespace sonicmoe::cuda
