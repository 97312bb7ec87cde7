// Per expert: db1 = column sums of dH, db2 = column sums of s dO. Per row, the b2 term of dS:
// row_dscores += <dO, b2>. Where b2 gets no score, s is 1 and row_dscores stays as it is.
//
// Blocks sum the chunks of an expert's rows in parallel, each row after row. A last kernel adds an
// expert's chunks in order. One read of dO serves both db2 and dS.
#include <algorithm>
#include <bit>

#include "core/backends.h"
#include "core/segments.h"
#include "cuda/device/warp.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kChunk = 128;    // most rows of a chunk, all of one expert
constexpr int kInFlight = 8;   // rows that a thread loads before it adds the first
constexpr int kThreads = 512;  // most threads of a block; each owns 8 columns at a time
constexpr int kMaxWarps = kThreads / kWarp;

/// first_chunk[e] = number of chunks of the experts before e; first_chunk[E] = number of all.
__global__ void __launch_bounds__(1024)
    cut_rows(const std::int32_t* begins, const std::int32_t* ends, int experts,
             std::int32_t* first_chunk) {
  const auto chunks = [&](int e) {
    const std::int32_t rows = ends[e] - begins[e];
    return rows / kChunk + (rows % kChunk > 0);  // no overflow at 2^31 - 1 rows
  };
  const std::int32_t all =
      exclusive_sums<1024>(experts, chunks, [&](int e, std::int32_t sum) { first_chunk[e] = sum; });
  if (threadIdx.x == 0) first_chunk[experts] = all;
}

/// The expert whose rows chunk c holds.
__device__ int expert_of(const std::int32_t* first_chunk, int experts, std::int32_t c) {
  int low = 0;  // first_chunk[low] <= c < first_chunk[high]
  int high = experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_chunk[middle] <= c) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Sums each of 8 rows over a warp; lane 4 i gets the sum of row i. Every step halves the rows that
/// a lane holds, so this takes 9 shuffles.
__device__ float sum_rows(float (&row)[kInFlight]) {
#pragma unroll
  for (int rows = kInFlight / 2, distance = 16; rows > 0; rows /= 2, distance /= 2) {
    const bool upper = (lane_id() & distance) != 0;
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      const float mine = upper ? row[i + rows] : row[i];
      const float theirs = upper ? row[i] : row[i + rows];
      row[i] = mine + __shfl_xor_sync(kAllLanes, theirs, distance);
    }
  }
  row[0] += __shfl_xor_sync(kAllLanes, row[0], 2);
  return row[0] + __shfl_xor_sync(kAllLanes, row[0], 1);
}

struct Rows {
  const std::int32_t* begins;
  const std::int32_t* ends;
  const std::int32_t* first_chunk;
  const std::int32_t* row_tokens;  ///< null: rows of dO are contiguous
  const float* row_scores;         ///< null: b2 gets no score
  int experts;
};

/// partial[c][j] = sum of column j over the rows of chunk c. With kOutput the rows are those of dO,
/// by token and weighted by s, and the kernel also adds <dO, b2> to row_dscores, if given. Else
/// they are rows of dH, in place.
///
/// For dH the blocks (c, y) divide the columns. For dO one block takes all columns, because the
/// products with b2 run over all of them.
template <class T, bool kOutput>
__global__ void __launch_bounds__(kThreads)
    sum_chunk(Rows rows, const T* data, std::int64_t width, const T* b2, float* row_dscores,
              float* partial) {
  __shared__ std::int32_t token[kChunk];
  __shared__ float score[kChunk];
  __shared__ float product[kMaxWarps][kChunk];
  const std::int32_t chunk = static_cast<std::int32_t>(blockIdx.x);
  if (chunk >= rows.first_chunk[rows.experts]) return;
  const int expert = expert_of(rows.first_chunk, rows.experts, chunk);
  const std::int64_t begin =
      rows.begins[expert] + std::int64_t{chunk - rows.first_chunk[expert]} * kChunk;
  const int count = static_cast<int>(min(std::int64_t{kChunk}, rows.ends[expert] - begin));
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if constexpr (kOutput) {
    for (int r = threadIdx.x; r < count; r += blockDim.x) {
      token[r] = rows.row_tokens != nullptr ? rows.row_tokens[begin + r]
                                            : static_cast<std::int32_t>(begin + r);
      score[r] = rows.row_scores != nullptr ? rows.row_scores[begin + r] : 1.0f;
    }
    for (int r = lane_id(); r < kChunk; r += kWarp) product[warp][r] = 0.0f;
    __syncthreads();  // the block sees token, score and product
  }

  // evict_normal: evict_first takes 5 and 10 % longer at two shapes (docs/findings/sums.md).
  const std::uint64_t policy = l2_policy(false);
  const std::int64_t step = std::int64_t{blockDim.x} * 8 * gridDim.y;
  for (std::int64_t j0 = std::int64_t{blockIdx.y} * blockDim.x * 8; j0 < width; j0 += step) {
    const std::int64_t j = j0 + threadIdx.x * 8;
    const bool inside = j < width;
    float bias[8] = {};
    if (kOutput && inside && row_dscores != nullptr) {
      const auto part = std::bit_cast<Eight<T>>(load_once(b2 + expert * width + j, true, policy));
#pragma unroll
      for (int c = 0; c < 8; ++c) bias[c] = to_float(part.value[c]);
    }
    float sum[8] = {};
    for (int first = 0; first < count; first += kInFlight) {
      Eight<T> part[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const bool wanted = inside && first + i < count;
        const std::int64_t row = !wanted ? 0 : kOutput ? token[first + i] : begin + first + i;
        part[i] = std::bit_cast<Eight<T>>(load_once(data + row * width + j, wanted, policy));
      }
      float dot[kInFlight] = {};
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const float s = kOutput && first + i < count ? score[first + i] : 0.0f;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float x = to_float(part[i].value[c]);
          sum[c] = kOutput ? math::fma(s, x, sum[c]) : math::add(sum[c], x);
          if constexpr (kOutput) dot[i] = math::fma(x, bias[c], dot[i]);
        }
      }
      if constexpr (kOutput) {
        const float of_row = sum_rows(dot);
        if (lane_id() % 4 == 0) product[warp][first + lane_id() / 4] += of_row;
      }
    }
    if (!inside) continue;
    float4* const to = reinterpret_cast<float4*>(partial + chunk * width + j);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  }

  if constexpr (kOutput) {
    if (row_dscores == nullptr) return;
    __syncthreads();  // all warps' products are complete
    for (int r = threadIdx.x; r < count; r += blockDim.x) {
      float sum = 0.0f;
      for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) sum += product[w][r];
      row_dscores[begin + r] += sum;
    }
  }
}

/// Maps column j of H to its element of expert e's db1. Pointers and strides describe W1's layout.
template <class T>
struct Db1 {
  T* gate;
  T* up;
  std::int64_t n;
  std::int64_t per_expert;
  std::int64_t stride;
  __device__ T* at(std::int64_t expert, std::int64_t j) const {
    T* half = j < n ? gate : up;
    return half + expert * per_expert + (j < n ? j : j - n) * stride;
  }
};

/// Adds the partial sums of an expert's chunks in order, a thread a column: of db1, then of db2.
template <class T>
__global__ void __launch_bounds__(256)
    sum_chunks(const std::int32_t* first_chunk, const float* partial1, std::int64_t width1,
               Db1<T> db1, const float* partial2, std::int64_t width2, T* db2) {
  const std::int64_t expert = blockIdx.x;
  const std::int64_t column = std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (column >= width1 + width2) return;
  const bool first = column < width1;
  const std::int64_t j = first ? column : column - width1;
  const float* const partial = first ? partial1 : partial2;
  const std::int64_t width = first ? width1 : width2;
  float sum = 0.0f;
#pragma unroll 8
  for (std::int32_t c = first_chunk[expert]; c < first_chunk[expert + 1]; ++c) {
    sum += partial[c * width + j];
  }
  *(first ? db1.at(expert, j) : db2 + expert * width2 + j) = from_float<T>(sum);
}

std::int64_t preact_width(const BiasGradDesc& d) {
  return is_glu(d.activation) ? 2 * d.intermediate : d.intermediate;
}

/// The most chunks that there can be: an expert has at most one chunk that is not full.
std::int64_t max_chunks(const BiasGradDesc& d) {
  return d.rows / kChunk + std::min(d.experts, d.rows);
}

template <class T>
Db1<T> layout_of(const BiasGradDesc& d, const BiasGradArgs& a) {
  T* const gate = static_cast<T*>(a.db1);
  const std::int64_t n = d.intermediate;
  if (!is_glu(d.activation)) return {gate, nullptr, n, n, 1};
  switch (d.w1_layout) {
    case W1Layout::interleaved:
      return {gate, gate + 1, n, 2 * n, 2};
    case W1Layout::concatenated:
    case W1Layout::transposed:
    case W1Layout::transposed_interleaved:  // as the columns of H alternate
      return {gate, gate + n, n, 2 * n, 1};
    case W1Layout::separate:
      break;
  }
  return {gate, static_cast<T*>(a.db1_up), n, n, 1};
}

struct Memory {
  float* partial1;            // (chunks, W)
  float* partial2;            // (chunks, d)
  std::int32_t* first_chunk;  // (E+1)

  static std::size_t bytes(const BiasGradDesc& d, const Exec&) {
    const std::int64_t columns = preact_width(d) + d.hidden;
    return 4 * static_cast<std::size_t>(max_chunks(d) * columns + d.experts + 1);
  }
  Memory(const BiasGradDesc& d, void* memory)
      : partial1(static_cast<float*>(memory)),
        partial2(partial1 + max_chunks(d) * preact_width(d)),
        first_chunk(reinterpret_cast<std::int32_t*>(partial2 + max_chunks(d) * d.hidden)) {}
};

/// Threads for a row of `width` columns, 8 a thread: whole warps, at most `most` threads.
unsigned threads_for(std::int64_t width, std::int64_t most) {
  const std::int64_t warps = (width / 8 + kWarp - 1) / kWarp;
  return static_cast<unsigned>(std::min(most, warps * kWarp));
}

template <class T>
Status run_typed(const BiasGradDesc& d, const BiasGradArgs& a, void* memory, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  const Memory m(d, memory);
  const std::int64_t width = preact_width(d);
  const int experts = static_cast<int>(d.experts);
  const unsigned chunks = static_cast<unsigned>(max_chunks(d));
  const bool scored = d.scores_bias();
  const Rows rows{.begins = a.offsets,
                  .ends = row_ends(a),
                  .first_chunk = m.first_chunk,
                  .row_tokens = d.gathers() ? a.row_tokens : nullptr,
                  .row_scores = scored ? a.row_scores : nullptr,
                  .experts = experts};
  cut_rows<<<1, 1024, 0, stream>>>(rows.begins, rows.ends, experts, m.first_chunk);
  if (chunks > 0) {
    sum_chunk<T, true><<<chunks, threads_for(d.hidden, kThreads), 0, stream>>>(
        rows, static_cast<const T*>(a.dout), d.hidden, static_cast<const T*>(a.b2),
        scored ? a.row_dscores : nullptr, m.partial2);
    const unsigned threads = threads_for(width, 128);
    const dim3 grid(chunks, std::min(blocks_for(width, threads * 8), 65535u));
    sum_chunk<T, false><<<grid, threads, 0, stream>>>(rows, static_cast<const T*>(a.dpreact), width,
                                                      nullptr, nullptr, m.partial1);
  }
  const dim3 grid(static_cast<unsigned>(experts), blocks_for(width + d.hidden, 256));
  sum_chunks<<<grid, 256, 0, stream>>>(m.first_chunk, m.partial1, width, layout_of<T>(d, a),
                                       m.partial2, d.hidden, static_cast<T*>(a.db2));
  return launched("bias_grad: launch");
}

Status run(const BiasGradDesc& d, const BiasGradArgs& a, void* memory, const Exec& exec) noexcept {
  return visit_storage(d.dtype,
                       [&](auto type) { return run_typed<decltype(type)>(d, a, memory, exec); });
}

}  // namespace

const Kernel<BiasGradDesc> kBiasGrad = {
    .op = "bias_grad",
    .name = "cuda.bias_grad",
    .arch = 80,
    .and_later = true,
    .dtypes = kStorageTypes,
    .workspace = Memory::bytes,
    .run = run,
};

}  // namespace sonicmoe::cuda
