// Switch load-balancing loss and its gradient to the logits:
//   E sum_e (P_e / sum P)(f_e / sum f),
// where P_e sums the probabilities of expert e over the tokens, and f_e is its count. Sums over
// tokens are fp64. Sizes alone fix their order: a warp adds its tokens, a block its warps, and
// sum_stretches the blocks.
#include <algorithm>

#include "core/backends.h"
#include "cuda/routing/routing.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr std::int64_t kMaxBlocks = 256;  // stretches of tokens, at most

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance >>= 1) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

/// Sum over a block of 1024 threads. All of them call it and get the sum.
__device__ double block_sum(double x) {
  __shared__ double of_warp[kWarp];
  x = warp_sum(x);
  __syncthreads();  // every thread has read of_warp of the call before
  if (lane_id() == 0) of_warp[threadIdx.x / kWarp] = x;
  __syncthreads();  // of_warp is complete
  return warp_sum(of_warp[lane_id()]);
}

/// partial[x][e] = sum of the probabilities of expert e over stretch x of the tokens. Block (x, y)
/// takes the y-th kWarp * kPerLane experts.
template <class T, int kPerLane>
__global__ void __launch_bounds__(kThreads)
    sum_probabilities(const T* logits, std::int64_t tokens, std::int64_t experts,
                      std::int64_t stretch, double* partial) {
  __shared__ double sums[kWarp * kPerLane];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t first = std::int64_t{blockIdx.y} * kWarp * kPerLane + lane_id();
  const std::int64_t begin = blockIdx.x * stretch;
  const std::int64_t end = min(begin + stretch, tokens);
  double sum[kPerLane] = {};
  for (std::int64_t t = begin + warp; t < end; t += kWarps) {
    const T* row = logits + t * experts;
    const RowSoftmax softmax = row_softmax(row, experts);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const std::int64_t e = first + j * kWarp;
      if (e < experts) sum[j] += softmax.probability(to_float(row[e]));
    }
  }
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int at = j * kWarp + lane_id();
        sums[at] = w == 0 ? sum[j] : sums[at] + sum[j];
      }
    }
    __syncthreads();  // warp w's part is added before the next warp's
  }
  for (int at = threadIdx.x; at < kWarp * kPerLane; at += kThreads) {
    const std::int64_t e = first - lane_id() + at;
    if (e < experts) partial[blockIdx.x * experts + e] = sums[at];
  }
}

/// prob_sums[e] = sum of partial[x][e] over the stretches x. A block takes kWarp experts.
__global__ void __launch_bounds__(kWarp* kWarp)
    sum_stretches(const double* partial, std::int64_t stretches, std::int64_t experts,
                  double* prob_sums) {
  __shared__ double sums[kWarp][kWarp + 1];
  const std::int64_t e = std::int64_t{blockIdx.x} * kWarp + threadIdx.x;
  double sum = 0.0;
  for (std::int64_t x = threadIdx.y; x < stretches && e < experts; x += kWarp) {
    sum += partial[x * experts + e];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();                                 // sums[][] is complete
  sum = warp_sum(sums[threadIdx.x][threadIdx.y]);  // warp y sums column y, an expert
  const std::int64_t summed = std::int64_t{blockIdx.x} * kWarp + threadIdx.y;
  if (threadIdx.x == 0 && summed < experts) prob_sums[summed] = sum;
}

/// Without dloss: writes the loss. With dloss (backward): replaces P_e in prob_sums by the slope
/// dL/dP_e, dloss times
///   E (f_e / sum f - weighted / total) / total,
/// with weighted = sum_e P_e f_e / sum f and total = sum_e P_e. Without tokens or counts the result
/// is 0.
__global__ void __launch_bounds__(kWarp* kWarp)
    finish(double* prob_sums, const std::int32_t* counts, std::int64_t tokens, std::int64_t experts,
           const float* dloss, float* loss) {
  double counted = 0.0;
  double total = 0.0;
  for (std::int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    counted += counts[e];
    total += prob_sums[e];
  }
  counted = block_sum(counted);
  total = block_sum(total);
  const bool empty = tokens == 0 || counted == 0.0;
  double weighted = 0.0;
  for (std::int64_t e = threadIdx.x; e < experts && !empty; e += blockDim.x) {
    weighted += prob_sums[e] * (counts[e] / counted);
  }
  weighted = block_sum(weighted);
  const double scale = static_cast<double>(experts);
  if (dloss == nullptr) {
    if (threadIdx.x == 0) *loss = empty ? 0.0f : static_cast<float>(scale * weighted / total);
    return;
  }
  for (std::int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    const double slope = *dloss * scale * (counts[e] / counted - weighted / total) / total;
    prob_sums[e] = empty ? 0.0 : slope;
  }
}

/// dlogit_e = p_e (slope_e - sum_j p_j slope_j). A warp takes a token.
template <class T>
__global__ void __launch_bounds__(kThreads)
    logit_gradients(const T* logits, const double* slope, std::int64_t tokens, std::int64_t experts,
                    T* dlogits) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (t >= tokens) return;
  const T* row = logits + t * experts;
  const RowSoftmax softmax = row_softmax(row, experts);
  double inner = 0.0;
  for (std::int64_t e = lane_id(); e < experts; e += kWarp) {
    inner += softmax.probability(to_float(row[e])) * slope[e];
  }
  inner = warp_sum(inner);
  for (std::int64_t e = lane_id(); e < experts; e += kWarp) {
    const double p = softmax.probability(to_float(row[e]));
    dlogits[t * experts + e] = from_float<T>(static_cast<float>(p * (slope[e] - inner)));
  }
}

std::int64_t stretches(const AuxLossDesc& d) {
  return std::clamp<std::int64_t>((d.tokens + kWarps - 1) / kWarps, 1, kMaxBlocks);
}

template <class T>
Status run_typed(const AuxLossDesc& d, const AuxLossArgs& a, void* memory, const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  const T* logits = static_cast<const T*>(a.logits);
  double* const prob_sums = static_cast<double*>(memory);
  double* const partial = prob_sums + d.experts;
  const std::int64_t parts = stretches(d);
  const std::int64_t stretch = (d.tokens + parts - 1) / parts;
  const int per_lane = d.experts <= 128 ? 4 : 32;
  const auto sum = per_lane == 4 ? sum_probabilities<T, 4> : sum_probabilities<T, 32>;
  const dim3 grid(static_cast<unsigned>(parts), blocks_for(d.experts, per_lane * kWarp));
  sum<<<grid, kThreads, 0, stream>>>(logits, d.tokens, d.experts, stretch, partial);
  sum_stretches<<<blocks_for(d.experts, kWarp), dim3(kWarp, kWarp), 0, stream>>>(
      partial, parts, d.experts, prob_sums);
  finish<<<1, kWarp * kWarp, 0, stream>>>(prob_sums, a.counts, d.tokens, d.experts,
                                          d.backward ? a.dloss : nullptr, a.loss);
  if (d.backward && d.tokens > 0) {
    logit_gradients<<<blocks_for(d.tokens, kWarps), kThreads, 0, stream>>>(
        logits, prob_sums, d.tokens, d.experts, static_cast<T*>(a.dlogits));
  }
  return launched("aux_loss: launch");
}

std::size_t workspace(const AuxLossDesc& d, const Exec&) {
  return 8 * static_cast<std::size_t>(d.experts * (1 + stretches(d)));
}

Status run(const AuxLossDesc& d, const AuxLossArgs& a, void* memory, const Exec& exec) noexcept {
  return visit_logits(d.dtype,
                      [&](auto type) { return run_typed<decltype(type)>(d, a, memory, exec); });
}

}  // namespace

const Kernel<AuxLossDesc> kAuxLoss = {
    .op = "aux_loss",
    .name = "sm90.aux_loss",
    .arch = 90,
    .dtypes = kLogitsTypes,
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cuda
