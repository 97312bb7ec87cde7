#pragma once

#include "cuda/device/warp_tile.cuh"

/// Ports of epilogues to memory: ChunkStore and ColumnBias; row_reduce.cuh has RowReduce.
namespace sonicmoe::cuda {

/// Stores chunks of 16 rows x 64 columns of a 16-bit matrix, a warp each, from a WarpTile. Between
/// filling the tile and storing it, the warp calls order_before_copy_engine(). A whole chunk leaves
/// as a box. The last rows of an expert leave under predicates, since behind them lies the next
/// expert.
template <class T>
struct ChunkStore {
  const CUtensorMap* boxes;  ///< of the matrix, 64 x 16; clips at its last row and column
  T* matrix;
  std::int64_t row_stride;  ///< elements, a multiple of 8
  int columns;              ///< of the matrix, a multiple of 8

  /// Called by lane 0: the chunk at (row, column). The box joins its next group of stores.
  __device__ __forceinline__ void send(const WarpTile& tile, int row, int column) const {
    store_box(boxes, tile.address(), column, row, 0);
  }
  /// The first `rows` rows of the chunk; columns past the matrix are left out.
  __device__ __forceinline__ void store_rows(const WarpTile& tile, int row, int column,
                                             int rows) const {
    tile.store(matrix + std::int64_t{row} * row_stride + column, row_stride, rows,
               columns - column);
  }
};

/// H or dH (R, W), a chunk of 64 units at a time, in parts of 64 columns. Part 0 has the gates (or
/// all there is), part 1 the ups. Where gates and ups alternate, each part has the pairs of 32
/// units.
template <class T, bool kGated, bool kAlternates>
struct PreactParts {
  static constexpr int kCount = kGated ? 2 : 1;
  const CUtensorMap (&boxes)[2];  ///< by part; where they alternate: boxes[0] of all columns
  T* matrix;
  int n;

  __device__ __forceinline__ const CUtensorMap* map(int part) const {
    return &boxes[kAlternates ? 0 : part];
  }
  /// The part's first column in its map, for the chunk that begins with unit `unit`.
  static __device__ __forceinline__ int column(int part, int unit) {
    return kAlternates ? 2 * unit + 64 * part : unit;
  }
  /// As ChunkStore::send() and store_rows(), for all parts of the chunk.
  __device__ __forceinline__ void send(const WarpTile (&tiles)[2], int row, int unit) const {
    static_for<kCount>([&](auto index) {
      constexpr int part = decltype(index)::value;
      store(part).send(tiles[part], row, column(part, unit));
    });
  }
  __device__ __forceinline__ void store_rows(const WarpTile (&tiles)[2], int row, int unit,
                                             int rows) const {
    static_for<kCount>([&](auto index) {
      constexpr int part = decltype(index)::value;
      store(part).store_rows(tiles[part], row, column(part, unit), rows);
    });
  }

 private:
  __device__ __forceinline__ ChunkStore<T> store(int part) const {
    const std::int64_t width = kGated ? 2 * n : n;
    if constexpr (kAlternates) return {map(part), matrix, width, 2 * n};
    return {map(part), matrix + part * n, width, n};
  }
};

/// Adds a bias of the columns by starting the accumulators at it, which costs no registers.
template <class T>
struct ColumnBias {
  const T* bias;  ///< of column 0, or null: zeros
  std::int64_t stride;
  int columns;  ///< of the matrix, a multiple of 8

  /// Starts acc[m][kFirst] and on: kColumns columns of a tile, from the matrix's `column` on. It
  /// sets element by element, since accumulators set in a branch would serialise wgmma.
  template <int kFirst, int kColumns, int kM64, int kCount>
  __device__ __forceinline__ void start(float (&acc)[kM64][kCount], int column) const {
    column += here(static_cast<int>(threadIdx.x)) % 4 * 2;
    static_for<kColumns / 8>([&](auto index) {
      constexpr int j = decltype(index)::value;
      const bool inside = bias != nullptr && column + j * 8 < columns;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float b = inside ? static_cast<float>(bias[(column + j * 8 + i) * stride]) : 0.0f;
        static_for<kM64>([&](auto block) {
          float* a = &acc[decltype(block)::value][kFirst + 4 * j + i];
          a[0] = a[2] = b;
        });
      }
    });
  }
};

}  // namespace sonicmoe::cuda
