#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/device/fragment.cuh"
#include "cuda/device/warp.cuh"

/// What the router's products with fp32 tensors need beside the product: 16-bit parts of matrices,
/// and sums of columns.
namespace sonicmoe::cuda {

/// 16-bit parts of an fp32 number v, with which v is about big + small * kDown, and
/// big + (small + tiny * kDown) * kDown to fp32's precision.
enum class Part {
  big,       ///< v, rounded
  big_down,  ///< big * kDown, the factor of another number's small part
  small,     ///< (v - big) * kUp
  tiny,      ///< (that - its rounding) * kUp
  rest,      ///< v - big, for a factor that is not small itself
};

/// fp16 has few exponents: without a factor most small parts would be subnormal. A power of two
/// costs no bits.
template <class T>
inline constexpr float kUp = std::is_same_v<T, __half> ? 0x1p11f : 1.0f;
template <class T>
inline constexpr float kDown = 1.0f / kUp<T>;

/// The part in fp32, before its rounding to T.
template <class T, Part kPart>
__device__ __forceinline__ float part_of(float v) {
  const float big = to_float(from_float<T>(v));
  if constexpr (kPart == Part::big) return big;
  if constexpr (kPart == Part::big_down) return math::mul(big, kDown<T>);
  const float rest = math::sub(v, big);
  if (!isfinite(rest)) return 0.0f;  // infinity stays infinity
  if constexpr (kPart == Part::rest) return rest;
  const float small = math::mul(rest, kUp<T>);
  if constexpr (kPart == Part::small) return small;
  return math::mul(math::sub(small, to_float(from_float<T>(small))), kUp<T>);
}

/// A matrix and its parts. Part i of element (row, column) goes to i * part_stride +
/// row / 16 * block_stride + row % 16 * row_stride + column. Strides are multiples of 8 elements.
struct SplitShape {
  std::int64_t rows;        ///< of the matrix
  int columns;              ///< of the matrix
  std::int64_t split_rows;  ///< of its parts: the matrix and zeros
  int split_columns;        ///< of its parts, a multiple of 8: the matrix and zeros
  std::int64_t row_stride;
  std::int64_t part_stride;
  std::int64_t block_stride = 16 * row_stride;
};

inline constexpr int kSplitThreads = 256;

/// The parts kParts of all elements, in this order. A thread takes eight columns of a row.
template <class From, class T, Part... kParts>
__global__ void __launch_bounds__(kSplitThreads)
    split(const From* from, const __grid_constant__ SplitShape s, T* to) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kSplitThreads + threadIdx.x;
  const int pieces = s.split_columns / 8;
  const std::int64_t row = i / pieces;
  const int column = static_cast<int>(i % pieces) * 8;
  wait_for_previous();
  if (row >= s.split_rows) return;
  float v[8] = {};
  if (row < s.rows) {
    const From* const eight = from + row * s.columns + column;
    if (s.columns % 8 == 0) {  // all rows start at multiples of 16 bytes
      const auto loaded = *reinterpret_cast<const Eight<From>*>(eight);
#pragma unroll
      for (int c = 0; c < 8; ++c) v[c] = to_float(loaded.value[c]);
    } else {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (column + c < s.columns) v[c] = to_float(eight[c]);
      }
    }
  }
  T* at = to + row / 16 * s.block_stride + row % 16 * s.row_stride + column;
  const auto store = [&](auto part) {
    constexpr Part kPart = decltype(part)::value;
    std::uint32_t word[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      word[c] = Pair<T>::pack(part_of<T, kPart>(v[2 * c]), part_of<T, kPart>(v[2 * c + 1]));
    }
    *reinterpret_cast<uint4*>(at) = {word[0], word[1], word[2], word[3]};
    at += s.part_stride;
  };
  (store(std::integral_constant<Part, kParts>{}), ...);
}

template <class T, Part... kParts, class From>
static void launch_split(const From* from, const SplitShape& s, T* to, const Exec& exec) {
  launch_early(split<From, T, kParts...>,
               blocks_for(s.split_rows * (s.split_columns / 8), kSplitThreads), kSplitThreads, 0,
               exec, from, s, to);
}

/// to[s] = the sums of the columns over rows s * stretch to (s + 1) * stretch - 1. A block takes 32
/// columns of a stretch. Each warp adds every 32nd row, and one adds the warps' sums in order.
template <class From>
__global__ void __launch_bounds__(kWarp* kWarp)
    sum_columns(const From* from, std::int64_t rows, int columns, std::int64_t stretch, float* to) {
  __shared__ float of_warp[kWarp][kWarp];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = lane_id();
  const int column = static_cast<int>(blockIdx.y) * kWarp + lane;
  const std::int64_t begin = blockIdx.x * stretch, end = min(begin + stretch, rows);
  wait_for_previous();
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 4
    for (std::int64_t row = begin + warp; row < end; row += kWarp) {
      sum = math::add(sum, to_float(from[row * columns + column]));
    }
  }
  of_warp[warp][lane] = sum;
  __syncthreads();  // all warps have written their sums
  if (warp > 0 || column >= columns) return;
#pragma unroll
  for (int w = 1; w < kWarp; ++w) sum = math::add(sum, of_warp[w][lane]);
  to[std::int64_t{blockIdx.x} * columns + column] = sum;
}

/// Stretches of rows whose sums another kernel adds. They depend on the shape alone, and so do the
/// bits of the sums.
struct Stretches {
  std::int64_t rows;  ///< of each
  std::int64_t count;
};
inline Stretches stretches_of(std::int64_t rows) {
  constexpr std::int64_t kLeastRows = 128, kMostStretches = 256;
  const std::int64_t each = std::max((rows + kMostStretches - 1) / kMostStretches, kLeastRows);
  return {each, (rows + each - 1) / each};
}

/// sums (columns) = the sums of the columns of `from` (rows, columns). `memory` has a row of fp32
/// sums for each stretch.
template <class From>
static void launch_column_sums(const From* from, std::int64_t rows, std::int64_t columns,
                               float* memory, float* sums, const Exec& exec) {
  const Stretches stretches = stretches_of(rows);
  const int width = static_cast<int>(columns);
  const unsigned across = blocks_for(columns, kWarp);
  if (stretches.count > 0) {
    launch_early(sum_columns<From>, dim3(static_cast<unsigned>(stretches.count), across),
                 kWarp * kWarp, 0, exec, from, rows, width, stretches.rows, memory);
  }
  launch_early(sum_columns<float>, dim3(1, across), kWarp * kWarp, 0, exec, memory, stretches.count,
               width, std::max<std::int64_t>(stretches.count, 1), sums);
}

}  // namespace sonicmoe::cuda
