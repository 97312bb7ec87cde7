#pragma once

#include "cuda/sm90/epilogue/deferred.cuh"
#include "cuda/sm90/epilogue/epilogue.cuh"
#include "cuda/sm90/epilogue/ports.cuh"

/// Epilogue that stores the tile, with an optional bias or on top of what is there.
namespace sonicmoe::cuda {

struct StoreParams {
  CUtensorMap boxes[2];        ///< of 16-bit `out`, boxes of the epilogue's tile; by part of N
  void* out[2];                ///< the matrix; its second part, where that is apart
  std::int64_t expert_stride;  ///< elements; unused where the experts share one matrix by rows
  std::int64_t row_stride;     ///< elements. Not a multiple of 8: no boxes, one element at a time
  int rows, columns;           ///< of one expert's matrix, or of a part of it (rows: unused where
                               ///< experts share one)
  const void* bias;            ///< (E, columns): with kBias
  const float* row_scores;     ///< (R): with kScores
  bool scores_bias;            ///< with kScores: the score multiplies the bias, too
  // A plain epilogue ignores these two. Without their code dW2 takes 1 to 2 % less time, so weight
  // gradients have kernels with and without.
  bool f32;         ///< the output is fp32, else the operands' type
  bool accumulate;  ///< add to what is there
};

/// Where a tile lies in its output matrix.
struct Place {
  int row, column, expert;  ///< of its first element, in the tensor map
  int rows, columns;        ///< of the matrix from there on
  std::int64_t start;       ///< offset of its first element in `out`
  std::int64_t row_stride;
  int part = 0;  ///< of N: which tensor map
};

/// The place of element (row, column) in the expert's matrix.
__device__ __forceinline__ Place in_expert(const StoreParams& e, int expert, int row, int column) {
  return {.row = row,
          .column = column,
          .expert = expert,
          .rows = e.rows - row,
          .columns = e.columns - column,
          .start = expert * e.expert_stride + row * e.row_stride + column,
          .row_stride = e.row_stride};
}

/// The output's rows are the rows of all experts, (R, columns). The next expert's rows follow.
struct AtRows {
  static constexpr bool kPlain = true;
  static constexpr bool kClips = false;
  static constexpr bool kParts = false;
  template <class Traits>
  static __device__ __forceinline__ Place place(const StoreParams& e, const Tile& tile, int) {
    const int column = tile.n_block * Traits::kTileN, row = tile.first_row + tile.m_block * kTileM;
    return {.row = row,
            .column = column,
            .expert = 0,
            .rows = tile.rows - tile.m_block * kTileM,
            .columns = e.columns - column,
            .start = row * e.row_stride + column,
            .row_stride = e.row_stride};
  }
};

/// Each expert has a matrix (M, N), whose extents the boxes clip at.
template <bool kPlain_>
struct AtMByN {
  static constexpr bool kPlain = kPlain_;
  static constexpr bool kClips = true;
  static constexpr bool kParts = false;
  template <class Traits>
  static __device__ __forceinline__ Place place(const StoreParams& e, const Tile& tile, int) {
    return in_expert(e, tile.expert, tile.m_block * kTileM, tile.n_block * Traits::kTileN);
  }
};

/// The same with N in two parts, whose columns follow each other in memory. The first has n_half
/// n blocks.
template <bool kPlain_>
struct AtMByParts {
  static constexpr bool kPlain = kPlain_;
  static constexpr bool kClips = true;
  static constexpr bool kParts = true;
  template <class Traits>
  static __device__ __forceinline__ Place place(const StoreParams& e, const Tile& tile,
                                                int n_half) {
    const int part = tile.n_block >= n_half;
    const int column = (tile.n_block - part * n_half) * Traits::kTileN;
    Place at = in_expert(e, tile.expert, tile.m_block * kTileM, column);
    at.part = part;
    at.start += part * e.columns;
    return at;
  }
};

/// Starts to bring rows from global memory, zeros where there are none; the warp waits with
/// cp.async groups and __syncwarp().
template <class T>
__device__ __forceinline__ void fetch(const WarpTile& tile, const T* from, std::int64_t row_stride,
                                      int rows, int columns) {
  const int piece = tile.lane() % 8;
  from += tile.lane() / 8 * row_stride + piece * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + tile.lane() / 8;
    copy_async_16(tile.at_piece(row, piece), from + i * 4 * row_stride,
                  row < rows && piece * 8 < columns);
  }
}

/// Stores one element at a time: any number of columns, any alignment.
template <class T>
__device__ __forceinline__ void store_singly(const WarpTile& tile, T* to, std::int64_t row_stride,
                                             int rows, int columns) {
#pragma unroll 1
  for (int i = tile.lane(); i < WarpTile::kRows * WarpTile::kColumns; i += 32) {
    const int row = i / WarpTile::kColumns, column = i % WarpTile::kColumns;
    std::uint16_t bits;
    asm volatile("ld.shared.b16 %0, [%1];"
                 : "=h"(bits)
                 : "r"(tile.at_piece(row, column / 8) + column % 8 * 2));
    if (row < rows && column < columns) {
      reinterpret_cast<std::uint16_t*>(to)[row * row_stride + column] = bits;
    }
  }
}

/// Base of epilogues without epilogue stages.
struct LoadsNothing {
  template <int kN>
  static constexpr int kEpilogueStages = 0;
  template <class Traits, class Params>
  static __device__ __forceinline__ void load(const Params&, const Tile&, int, std::uint32_t,
                                              Barrier&) {}
};

/// kBias: the accumulators start at the bias. kScores: rows are multiplied by their scores at the
/// end, and a bias comes then. A kernel that looks for a bias there takes up to 1.5 times as long
/// (docs/findings/contiguous-rows.md).
template <class At, bool kBias, bool kScores = false>
struct StoreTile : LoadsNothing {
  using Params = StoreParams;
  static constexpr bool kAdds = kBias && !kScores;
  static constexpr int kBuffers = 2;
  static constexpr int kStagingBytes = kBuffers * WarpTile::kBytes;

  /// Not in ping-pong: there the other consumer's products run meanwhile.
  template <class Traits>
  static constexpr bool kDefers = At::kPlain && !Traits::kPingpong;
  template <class Traits>
  using Deferred =
      std::conditional_t<!kDefers<Traits>, DefersNothing::Deferred<Traits>,
                         std::conditional_t<At::kParts, DeferredPart<Traits::kTileN / 64>,
                                            DeferredTile<Traits::kTileN / 64>>>;

  template <class Traits>
  static __device__ __forceinline__ bool send(const Params& e, Deferred<Traits>& deferred,
                                              std::uint32_t staging, int) {
    if constexpr (!kDefers<Traits>) {
      return false;
    } else {
      return deferred.chunks.next([&](auto index, const Fragment* fragments) {
        constexpr int chunk = decltype(index)::value;
        // A tile has a multiple of kBuffers chunks, so that each begins with staging tile 0.
        static_assert(Traits::kTileN / 64 % kBuffers == 0);
        StagingTiles<kBuffers> tiles(uniform(staging), here(static_cast<int>(threadIdx.x)) % 32,
                                     chunk);
        const int row = uniform(here(deferred.row)), rows = uniform(here(deferred.rows));
        const int column = uniform(here(deferred.column)) + chunk * 64;
        const int expert = At::kClips ? uniform(here(deferred.expert)) : 0;
        int part = 0;
        if constexpr (At::kParts) part = uniform(here(deferred.part));
        if (rows <= 0 || column >= e.columns) return tiles.skip();
        const WarpTile tile = tiles.next();
        put_all(tile, fragments);
        store<typename Traits::T>(e, tiles, tile, part, row, column, expert, rows);
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
    float scores[kScores ? Traits::kM64 : 1][2] = {};  ///< of this lane's rows, from prefetch()

    using T = typename Traits::T;
    static constexpr int kCount = Traits::kTileN / 2;

    __device__ __forceinline__ const T* bias() const {
      const T* const bias = static_cast<const T*>(e.bias);
      if (bias == nullptr) return nullptr;
      return bias + static_cast<std::int64_t>(tile.expert) * e.columns;
    }
    __device__ __forceinline__ void begin(float (&acc)[Traits::kM64][kCount]) {
      if constexpr (!kAdds) return;
      const ColumnBias<T> columns{bias(), 1, e.columns};
      columns.template start<0, Traits::kTileN>(acc, tile.n_block * Traits::kTileN);
    }

    /// The copy engine has read what the tile before left in staging.
    __device__ __forceinline__ void prefetch() {
      if constexpr (kScores) load_scores();
      if (kDefers<Traits>) return;  // send() waits
      if (threadIdx.x % 32 == 0) store_wait_read<0>();
      __syncwarp();
    }

    __device__ __forceinline__ void finish(float (&acc)[Traits::kM64][kCount],
                                           Deferred<Traits>& deferred,
                                           const EpilogueStages<Traits>&) {
      if constexpr (kScores) apply_scores(acc);
      const Place at = At::template place<Traits>(e, tile, gemm.extents.n_half);
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
      const int warp_row = uniform(t / 32) * 16;
      if constexpr (kDefers<Traits>) {
        const int row = m_first * 64 + warp_row;
        deferred.row = at.row + row;
        deferred.column = at.column;
        deferred.expert = at.expert;
        if constexpr (At::kParts) deferred.part = at.part;
        deferred.rows = at.rows - row;
        deferred.chunks.template defer<T>(acc[0]);
      } else {
        StagingTiles<kBuffers> tiles(staging, t % 32);
        static_for<Traits::kM64>([&](auto index) {
          constexpr int m = decltype(index)::value;
          const int row = (m_first + m) * 64 + warp_row;
          if (row >= at.rows) return;
          if (!At::kPlain && e.f32) {
            store_f32(at, row, t % 32, acc[m]);
          } else {
            store_16(at, row, acc[m], tiles);
          }
        });
      }
    }

    __device__ __forceinline__ void load_scores() {
      const int t = here(static_cast<int>(threadIdx.x)) % 128;
#pragma unroll
      for (int i = 0; i < 2 * Traits::kM64; ++i) {
        const int row =
            tile.m_block * kTileM + (m_first + i / 2) * 64 + t / 32 * 16 + t % 32 / 4 + i % 2 * 8;
        scores[i / 2][i % 2] = row < tile.rows ? e.row_scores[tile.first_row + row] : 0.0f;
      }
    }

    /// s acc + b2, or s (acc + b2).
    __device__ __forceinline__ void apply_scores(float (&acc)[Traits::kM64][kCount]) const {
      const T* const b2 = kBias ? bias() : nullptr;
      const int column =
          tile.n_block * Traits::kTileN + here(static_cast<int>(threadIdx.x)) % 4 * 2;
      static_for<kCount / 4>([&](auto index) {
        constexpr int j = decltype(index)::value;
        float b[2] = {};
        if (kBias && column + j * 8 < e.columns) {
          b[0] = static_cast<float>(b2[column + j * 8]);
          b[1] = static_cast<float>(b2[column + j * 8 + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4 * Traits::kM64; ++i) {
          const float s = scores[i / 4][i / 2 % 2];
          float* const a = &acc[i / 4][4 * j + i % 4];
          *a *= s;
          if (kBias) *a += e.scores_bias ? s * b[i % 2] : b[i % 2];
        }
      });
    }

    /// This warp's 16 rows from the tile's row `row` on, 64 columns at a time.
    __device__ __forceinline__ void store_16(const Place& at, int row, float (&acc)[kCount],
                                             StagingTiles<kBuffers>& tiles) const {
      const T* const out = static_cast<const T*>(e.out[0]) + at.start + row * at.row_stride;
      static_for<Traits::kTileN / 64>([&](auto index) {
        constexpr int chunk = decltype(index)::value;
        const int columns = at.columns - chunk * 64;
        if (columns <= 0) return tiles.skip();
        const WarpTile tile = tiles.next();
        put_on_top(tile, &acc[chunk * 32], !At::kPlain && e.accumulate ? out + chunk * 64 : nullptr,
                   at.row_stride, at.rows - row, columns);
        store<T>(e, tiles, tile, at.part, at.row + row, at.column + chunk * 64, at.expert,
                 at.rows - row);
      });
    }

    __device__ __forceinline__ void store_f32(const Place& at, int first, int lane,
                                              const float (&acc)[kCount]) const {
      float* const out = static_cast<float*>(e.out[0]) + at.start + first * at.row_stride;
      const int rows = at.rows - first;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + i / 2 * 8;
          const int column = j * 8 + lane % 4 * 2 + i % 2;
          if (row >= rows || column >= at.columns) continue;
          float* to = out + row * at.row_stride + column;
          *to = e.accumulate ? *to + acc[4 * j + i] : acc[4 * j + i];
        }
      }
    }
  };

 private:
  /// A filled staging tile to (row, column) of a part, of whose rows the matrix has `rows`.
  template <class T>
  static __device__ __forceinline__ void store(const Params& e, StagingTiles<kBuffers>& tiles,
                                               const WarpTile& tile, int part, int row, int column,
                                               int expert, int rows) {
    const bool boxed = At::kClips || e.row_stride % 8 == 0;
    const bool whole = At::kClips || (boxed && rows >= WarpTile::kRows);
    if (whole) fence_async_proxy();
    __syncwarp();
    if (whole) {
      if (tile.lane() == 0) store_box(&e.boxes[part], tile.address(), column, row, expert);
    } else {
      T* const out = static_cast<T*>(e.out[0]);
      if (boxed) {
        ChunkStore<T>{&e.boxes[0], out, e.row_stride, e.columns}.store_rows(tile, row, column,
                                                                            rows);
      } else {
        store_singly(tile, out + row * e.row_stride + column, e.row_stride, rows,
                     e.columns - column);
      }
      __syncwarp();
    }
    tiles.commit();
  }
};

}  // namespace sonicmoe::cuda
