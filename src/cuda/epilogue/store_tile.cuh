#pragma once

#include "cuda/device/fragment.cuh"
#include "cuda/sm90/grouped_gemm.cuh"

/// Epilogue that stores the tile, with an optional bias or on top of what is there.
namespace sonicmoe::cuda {

/// Where a tile lies in its output matrix.
struct Place {
  std::int64_t start;  ///< offset of the tile's first element
  std::int64_t row_stride;
  int rows, columns;  ///< of the matrix from there on
  int first_column;   ///< in the matrix: the bias starts there
};

struct StoreParams {
  void* out[2];                ///< the matrix; its second half, where the shared axis has two
  std::int64_t expert_stride;  ///< elements; 0 where the experts share one matrix by rows
  std::int64_t row_stride;
  int rows, columns;  ///< of one expert's matrix (rows: not where experts share one)
  const void* bias;   ///< (E, columns) or null
  bool f32;           ///< the output's type, else the operands'
  bool accumulate;    ///< add to what is there
};

/// Rows of the output are the expert's grouped rows.
struct AtRows {
  template <class Traits>
  static __device__ Place place(const StoreParams& e, const GemmParams&, const Tile& tile, int*) {
    const int column = tile.shared * Traits::kN;
    const int row = tile.own * kOwn;
    return {(static_cast<std::int64_t>(tile.first_row) + row) * e.row_stride + column, e.row_stride,
            tile.rows - row, e.columns - column, column};
  }
};

/// Each expert has a matrix (own axis, shared axis).
struct AtOwnByShared {
  template <class Traits>
  static __device__ Place place(const StoreParams& e, const GemmParams&, const Tile& tile, int*) {
    const int row = tile.own * kOwn;
    const int column = tile.shared * Traits::kN;
    return {tile.expert * e.expert_stride + row * e.row_stride + column, e.row_stride, e.rows - row,
            e.columns - column, column};
  }
};

/// Each expert has a matrix (shared axis, own axis), or two.
struct AtSharedByOwn {
  template <class Traits>
  static __device__ Place place(const StoreParams& e, const GemmParams& p, const Tile& tile,
                                int* half) {
    *half = tile.shared >= p.shared_half;
    const int row = (tile.shared - *half * p.shared_half) * Traits::kM;
    const int column = tile.own * kOwn;
    return {tile.expert * e.expert_stride + row * e.row_stride + column, e.row_stride, e.rows - row,
            e.columns - column, column};
  }
};

template <class T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}

template <class At>
struct StoreTile {
  using Params = StoreParams;

  template <class Traits, int kMBlocks, int kCount>
  static __device__ __forceinline__ void run(const Params& e, const GemmParams& p, const Tile& tile,
                                             int m_first, float (&acc)[kMBlocks][kCount]) {
    using T = typename Traits::T;
    int half = 0;
    const Place at = At::template place<Traits>(e, p, tile, &half);
    const int t = static_cast<int>(threadIdx.x) % 128;
    const int quad = t % 4;
    const T* bias = e.bias == nullptr
                        ? nullptr
                        : static_cast<const T*>(e.bias) +
                              static_cast<std::int64_t>(tile.expert) * e.columns + at.first_column;
#pragma unroll
    for (int m = 0; m < kMBlocks; ++m) {
      const int row = (m_first + m) * 64 + t / 32 * 16 + t % 32 / 4;
      if (bias != nullptr) add_bias(acc[m], bias, at.columns, quad);
      if (e.f32) {
        store_f32(static_cast<float*>(e.out[half]) + at.start, at, row, quad, e.accumulate, acc[m]);
      } else {
        store_16(static_cast<T*>(e.out[half]) + at.start, at, row, quad, e.accumulate, acc[m]);
      }
    }
  }

 private:
  template <class T, int kCount>
  static __device__ __forceinline__ void add_bias(float (&acc)[kCount], const T* bias, int columns,
                                                  int quad) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int column = j * 8 + quad * 2;
      if (column >= columns) continue;  // columns are even: multiples of 8
      const float low = to_float(bias[column]);
      const float high = to_float(bias[column + 1]);
      acc[4 * j] += low;
      acc[4 * j + 1] += high;
      acc[4 * j + 2] += low;
      acc[4 * j + 3] += high;
    }
  }

  template <class T, int kCount>
  static __device__ __forceinline__ void store_16(T* out, const Place& at, int row, int quad,
                                                  bool accumulate, const float (&acc)[kCount]) {
    // Sixteen bytes at a time need rows that start at multiples of that.
    const bool vectors = at.row_stride % 8 == 0;
#pragma unroll
    for (int group = 0; group < kCount / 16; ++group) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Words words;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int i = 4 * (4 * group + j) + 2 * h;
          words.w[j] = Pair<T>::pack(acc[i], acc[i + 1]);
        }
        const int r = row + 8 * h;
        const int column = (4 * group + quad) * 8;
        if (accumulate) {
          // In fp32, before the one rounding: fetch, bring to fragment order, add, pack.
          Words old = {};
          if (r < at.rows && column < at.columns) {
            old = load_words(out + r * at.row_stride + column);
          }
          old = quad_transpose(old);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int i = 4 * (4 * group + j) + 2 * h;
            const float2 before = Pair<T>::unpack(old.w[j]);
            words.w[j] = Pair<T>::pack(acc[i] + before.x, acc[i + 1] + before.y);
          }
        }
        words = quad_transpose(words);
        if (r >= at.rows || column >= at.columns) continue;
        T* to = out + r * at.row_stride + column;
        if (vectors) {
          store_words(to, words);
        } else {
          store_single(to, words, at.columns - column);
        }
      }
    }
  }

  template <class T>
  static __device__ __forceinline__ void store_single(T* to, const Words& words, int count) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto bits = static_cast<unsigned short>(words.w[i / 2] >> (i % 2 * 16));
      if (i < count) reinterpret_cast<unsigned short*>(to)[i] = bits;
    }
  }

  template <int kCount>
  static __device__ __forceinline__ void store_f32(float* out, const Place& at, int row, int quad,
                                                   bool accumulate, const float (&acc)[kCount]) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int r = row + 8 * h;
          const int column = j * 8 + quad * 2 + i;
          if (r >= at.rows || column >= at.columns) continue;
          float* to = out + r * at.row_stride + column;
          const float value = acc[4 * j + 2 * h + i];
          *to = accumulate ? *to + value : value;
        }
      }
    }
  }
};

}  // namespace sonicmoe::cuda
