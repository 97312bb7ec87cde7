#pragma once

#include "cuda/device/warp_tile.cuh"
#include "cuda/sm90/pipeline.cuh"

/// Epilogue that stores the tile, with an optional bias or on top of what is there.
namespace sonicmoe::cuda {

/// Where a tile lies in its output matrix.
struct Place {
  std::int64_t start;  ///< offset of the tile's first element
  std::int64_t row_stride;
  int rows, columns;           ///< of the matrix from there on
  int column0, row0, expert0;  ///< in the tensor map
};

struct StoreParams {
  CUtensorMap boxes[2];  ///< of 16-bit `out`, boxes of the epilogue's tile
  bool boxed;            ///< by rows: these start at multiples of 16 bytes, and there are boxes
  void* out[2];          ///< the matrix; its second half, where the shared axis has two
  std::int64_t expert_stride;  ///< elements; 0 where the experts share one matrix by rows
  std::int64_t row_stride;
  int rows, columns;  ///< of one expert's matrix (rows: not where experts share one)
  bool biased;
  const void* bias;  ///< (E, columns) if biased
  bool f32;          ///< the output's type, else the operands'; a plain epilogue does not look
  bool accumulate;   ///< add to what is there; a plain epilogue does not look
};

// A plain epilogue writes the operands' type over what is there. For weight gradients it is a
// kernel of its own: without the code for the others in between, dW2 takes 1 to 2 % less time.

/// Rows of the output are the expert's grouped rows.
struct AtRows {
  static constexpr bool kPlain = true;
  static constexpr bool kClips = false;  // other rows follow in the same matrix
  template <class Traits>
  static __device__ __forceinline__ Place place(const StoreParams& e, const Tile& tile) {
    const int column = tile.n_block * Traits::kTileN;
    const int row = tile.m_block * kTileM;
    return {(static_cast<std::int64_t>(tile.first_row) + row) * e.row_stride + column,
            e.row_stride,
            tile.rows - row,
            e.columns - column,
            column,
            tile.first_row + row,
            0};
  }
};

/// Element (row, column) of the matrix of the tile's expert.
__device__ __forceinline__ Place in_expert(const StoreParams& e, const Tile& tile, int row,
                                           int column) {
  return {tile.expert * e.expert_stride + row * e.row_stride + column,
          e.row_stride,
          e.rows - row,
          e.columns - column,
          column,
          row,
          tile.expert};
}

/// Each expert has a matrix (own axis, shared axis).
template <bool kPlain_>
struct AtMByN {
  static constexpr bool kPlain = kPlain_;
  static constexpr bool kClips = true;  // at the map's extents
  template <class Traits>
  static __device__ __forceinline__ Place place(const StoreParams& e, const Tile& tile) {
    const int row = tile.m_block * kTileM;
    const int column = tile.n_block * Traits::kTileN;
    return in_expert(e, tile, row, column);
  }
};

/// Columns 64 kChunk to 64 kChunk + 63 of the accumulators into a staging tile; unless `old` is
/// null, on top of what is there, in fp32 before the one rounding. `rows` and `columns` are what is
/// left of the matrix from `old` on.
template <int kChunk, class T, class Staged, int kCount>
__device__ __forceinline__ void fill(const Staged& tile, float (&acc)[kCount], const T* old,
                                     std::int64_t row_stride, int rows, int columns) {
  if (old != nullptr) {
    tile.fetch(old, row_stride, rows, columns);
    copy_async_commit();
    copy_async_wait<0>();
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float* a = &acc[(kChunk * 4 + i) * 8];
    if (old != nullptr) {
      const Fragment before = tile.get(i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = Pair<T>::unpack(before.w[j]);
        a[2 * j] += pair.x;
        a[2 * j + 1] += pair.y;
      }
    }
    Fragment b;
#pragma unroll
    for (int j = 0; j < 4; ++j) b.w[j] = Pair<T>::pack(a[2 * j], a[2 * j + 1]);
    tile.put(i, b);
  }
}

/// A tile that waits to be stored, and where this warp's or warpgroup's part of it goes.
template <int kChunks>
struct DeferredTile {
  DeferredChunks<kChunks> chunks;
  int row, column, expert;  ///< in the tensor map
  int rows;                 ///< left of the matrix from `row` on
  /// `first`: the part's first row in the tile.
  template <class T>
  __device__ __forceinline__ void defer(const float (&acc)[kChunks * 32], const Place& at,
                                        int first) {
    row = at.row0 + first;
    column = at.column0;
    expert = at.expert0;
    rows = at.rows - first;
    chunks.template defer<T>(acc);
  }
};

template <class At, bool kBias>
struct StoreTile {
  using Params = StoreParams;
  static constexpr bool kAdds = kBias;  ///< to what begin() puts into the accumulators
  static constexpr int kTiles = 2;
  static constexpr int kStagingBytes = kTiles * WarpTile::kBytes;
  template <int kTileN>
  static constexpr int kRingStages = 0;

  /// Whether a tile is held in registers until the next one's products. In ping-pong the other
  /// warpgroup's run meanwhile, and wider tiles leave no registers.
  template <class Traits>
  static constexpr bool kDefers = At::kPlain && !Traits::kPingpong;
  template <class Traits>
  using Deferred = std::conditional_t<kDefers<Traits>, DeferredTile<Traits::kTileN / 64>,
                                      DefersNothing::Deferred<Traits>>;

  /// Sends the next chunk of a held tile, one warp at a time; false if there is none.
  template <class Traits>
  static __device__ __forceinline__ bool send(const Params& e, Deferred<Traits>& deferred,
                                              std::uint32_t staging_address, int) {
    if constexpr (!kDefers<Traits>) {
      return false;
    } else {
      return deferred.chunks.next([&](auto index, const Fragment* blocks) {
        constexpr int chunk = decltype(index)::value;
        // One group of stores a chunk, so that a tile's first comes after the last of the one
        // before.
        static_assert(Traits::kTileN / 64 % kTiles == 0);
        Staging<kTiles> staging(uniform(staging_address), here(static_cast<int>(threadIdx.x)) % 32,
                                chunk);
        const int row = uniform(here(deferred.row)), rows = uniform(here(deferred.rows));
        const int column = uniform(here(deferred.column)) + chunk * 64;
        const int expert = At::kClips ? uniform(here(deferred.expert)) : 0;
        if (rows <= 0 || column >= e.columns) return staging.skip();
        const WarpTile tile = staging.next();
        put_all(tile, blocks);
        store_chunk(e, staging, tile, {&e.boxes[0], column, row, expert},
                    static_cast<typename Traits::T*>(e.out[0]) + row * e.row_stride + column, rows,
                    e.columns - column);
      });
    }
  }

  template <class Traits>
  class Run {
   public:
    using T = typename Traits::T;
    static constexpr int kCount = Traits::kTileN / 2;

    __device__ __forceinline__ Run(const Params& e, const GemmParams&, const Tile& tile,
                                   int m_first, std::uint32_t staging)
        : e_(e), tile_(tile), m_first_(m_first), staging_(staging) {}

    /// The bias goes where the sums begin, which costs no registers beside them.
    __device__ __forceinline__ void begin(float (&acc)[Traits::kM64][kCount]) {
      if constexpr (!kBias) return;
      const int column =
          tile_.n_block * Traits::kTileN + here(static_cast<int>(threadIdx.x)) % 4 * 2;
      const T* const bias = static_cast<const T*>(e_.bias) +
                            static_cast<std::int64_t>(tile_.expert) * e_.columns + column;
      static_for<Traits::kTileN / 8>([&](auto index) {
        constexpr int j = decltype(index)::value;
        // Columns are even: multiples of 8.
        const bool inside = e_.biased && column + j * 8 < e_.columns;
        const float low = inside ? static_cast<float>(bias[j * 8]) : 0.0f;
        const float high = inside ? static_cast<float>(bias[j * 8 + 1]) : 0.0f;
        static_for<Traits::kM64>([&](auto block) {
          float* a = &acc[decltype(block)::value][4 * j];
          a[0] = a[2] = low;
          a[1] = a[3] = high;
        });
      });
    }

    /// Beside the main loop: the copy engine has read what the tile before has left in staging.
    __device__ __forceinline__ void prefetch() {
      if (kDefers<Traits>) return;  // send() waits
      if (threadIdx.x % 32 == 0) store_wait_read<0>();
      __syncwarp();
    }

    __device__ __forceinline__ void finish(float (&acc)[Traits::kM64][kCount],
                                           Deferred<Traits>& deferred,
                                           const EpilogueStages<Traits>&) {
      const Place at = At::template place<Traits>(e_, tile_);
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      if constexpr (kDefers<Traits>) {
        deferred.template defer<T>(acc[0], at, m_first_ * 64 + uniform(t / 32) * 16);
      } else {
        Staging<kTiles> staging(staging_, t % 32);
        static_for<Traits::kM64>([&](auto index) {
          constexpr int m = decltype(index)::value;
          const int row = (m_first_ + m) * 64 + uniform(t / 32) * 16;
          if (row < at.rows) {
            const std::int64_t start = at.start + row * at.row_stride;
            if (!At::kPlain && e_.f32) {
              store_f32(static_cast<float*>(e_.out[0]) + start, at, at.rows - row, t % 32, acc[m]);
            } else {
              store_16(static_cast<T*>(e_.out[0]) + start, at, row, acc[m], staging);
            }
          }
        });
      }
    }

   private:
    /// 16 rows of this warp, from the tile's row `row` on, 64 columns at a time.
    __device__ __forceinline__ void store_16(T* out, const Place& at, int row, float (&acc)[kCount],
                                             Staging<kTiles>& staging) const {
      const int rows = at.rows - row;
      static_for<Traits::kTileN / 64>([&](auto index) {
        constexpr int chunk = decltype(index)::value;
        const int columns = at.columns - chunk * 64;
        if (columns <= 0) return staging.skip();
        const WarpTile tile = staging.next();
        fill<chunk>(tile, acc, !At::kPlain && e_.accumulate ? out + chunk * 64 : nullptr,
                    at.row_stride, rows, columns);
        store_chunk(e_, staging, tile,
                    {&e_.boxes[0], at.column0 + chunk * 64, at.row0 + row, at.expert0},
                    out + chunk * 64, rows, columns);
      });
    }

    __device__ __forceinline__ void store_f32(float* out, const Place& at, int rows, int lane,
                                              const float (&acc)[kCount]) const {
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + i / 2 * 8;
          const int column = j * 8 + lane % 4 * 2 + i % 2;
          if (row >= rows || column >= at.columns) continue;
          float* to = out + row * at.row_stride + column;
          *to = e_.accumulate ? *to + acc[4 * j + i] : acc[4 * j + i];
        }
      }
    }

    const Params& e_;
    const Tile& tile_;
    int m_first_;
    std::uint32_t staging_;
  };

 private:
  /// A filled staging tile: as `box`, or by rows from `out` on where that would reach past the
  /// expert's last row. `rows` and `columns` are what is left of the matrix.
  template <class T>
  static __device__ __forceinline__ void store_chunk(const Params& e, Staging<kTiles>& staging,
                                                     const WarpTile& tile, const Box& box, T* out,
                                                     int rows, int columns) {
    const bool whole = At::kClips || (e.boxed && rows >= WarpTile::kRows);
    staging.send(tile, box, whole, [&] {
      // Sixteen bytes at a time need rows that start at multiples of that.
      if (e.row_stride % 8 == 0) {
        tile.store(out, e.row_stride, rows, columns);
      } else {
        tile.store_singly(out, e.row_stride, rows, columns);
      }
    });
  }
};

}  // namespace sonicmoe::cuda
