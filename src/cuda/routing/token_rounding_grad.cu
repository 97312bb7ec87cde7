// Takes the gradients of the rounded lists' scores to dlogits. Entries that top-K chose carry its
// score; entries that rounding added carry their full-softmax probability. A warp takes a token and
// routes it again. A row that does not fit a warp takes a block.
#include <algorithm>

#include "core/backends.h"
#include "cuda/routing/select.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kWarps = 4;                  // of a block, a token each
constexpr std::int64_t kSlowBlocks = 264;  // most blocks, each with a row of scratch

/// The lists; `tokens` ascends.
struct Entries {
  const std::int32_t* tokens;
  const std::int32_t* experts;
  const std::int32_t* offsets;  ///< (T+1), or null
  const float* dscores;
  std::int64_t length;

  /// The position of the first entry whose token is t or higher; `length` if there is none; with
  /// offsets, the end of the entries.
  __device__ std::int64_t first(std::int64_t t) const {
    if (offsets != nullptr) return max(0, min(offsets[t], static_cast<std::int32_t>(length)));
    std::int64_t low = 0;
    std::int64_t high = length;
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (tokens[middle] < t) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  /// `threads` threads write the gradients of entries begin to end - 1 into row[0 .. count), which
  /// holds zeros. They leave out the sentinels, whose expert is not in [0, count).
  __device__ void scatter(std::int64_t begin, std::int64_t end, std::int64_t count, float* row,
                          int thread, int threads) const {
    for (std::int64_t i = begin + thread; i < end; i += threads) {
      const std::int32_t e = experts[i];
      if (e >= 0 && e < count) row[e] = dscores[i];
    }
  }
};

/// own_softmax: the top-K scores are not probabilities of the full softmax, but a softmax over the
/// token's K experts. Their gradients go through that softmax alone; the full softmax gets zeros
/// for these experts.
template <class T, int kPerLane>
__global__ void __launch_bounds__(kWarps* kWarp, row_blocks(kPerLane) - 1)
    token_rounding_grad(const T* logits, std::int64_t tokens, Route route, bool own_softmax,
                        Entries entries, const T* dlogits_in, T* dlogits) {
  extern __shared__ float rows[];  // (kWarps, E)
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t t = std::int64_t{blockIdx.x} * kWarps + warp;
  wait_for_previous();
  if (t >= tokens) return;
  const int experts = static_cast<int>(route.experts);
  // Each __syncwarp() below shows a step's writes to `gradient` to all lanes before the next step.
  float* const gradient = rows + warp * experts;

  const std::int64_t bound = entries.first(t + lane_id() % 2);
  const std::int64_t begin = __shfl_sync(kAllLanes, bound, 0);
  const std::int64_t end = __shfl_sync(kAllLanes, bound, 1);
  for (int e = lane_id(); e < experts; e += kWarp) gradient[e] = 0.0f;
  __syncwarp();
  entries.scatter(begin, end, experts, gradient, lane_id(), kWarp);
  __syncwarp();

  const WarpRow<T, kPerLane> row(logits + t * route.experts, route.experts);
  float p[kPerLane];
  row.probabilities(p);
  Chosen chosen{};
  float top[2] = {};  // gradients of this lane's top-K scores
  float inner_top_k = 0.0f;
  if (own_softmax) {
    chosen = route.over_top_k ? row.choose_by_logit(route) : row.choose_by_probability(route, p);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int left = min(route.top_k - i * kWarp, kWarp);
      if (lane_id() < left) {
        top[i] = gradient[chosen.expert[i]];
        gradient[chosen.expert[i]] = 0.0f;
      }
      for (int k = 0; k < left; ++k) {
        inner_top_k = math::fma(__shfl_sync(kAllLanes, top[i], k),
                                __shfl_sync(kAllLanes, chosen.score[i], k), inner_top_k);
      }
    }
    __syncwarp();
  }
  float inner = 0.0f;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    if (row.has(j)) inner = math::fma(gradient[row.expert(j)], p[j], inner);
  }
  inner = warp_sum(inner);
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    if (!row.has(j)) continue;
    float& g = gradient[row.expert(j)];
    g = math::mul(p[j], math::sub(g, inner));
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!own_softmax || lane_id() + i * kWarp >= route.top_k) continue;
    float& g = gradient[chosen.expert[i]];
    g = math::add(g, math::mul(chosen.score[i], math::sub(top[i], inner_top_k)));
  }
  __syncwarp();
  for (int e = lane_id(); e < experts; e += kWarp) {
    const std::int64_t at = t * route.experts + e;
    const float outside = dlogits_in == nullptr ? 0.0f : to_float(dlogits_in[at]);
    dlogits[at] = from_float<T>(math::add(gradient[e], outside));
  }
}

/// The scratch row of a block, in the workspace.
struct SlowRow {
  float* gradient;    // (E)
  float* scores;      // (K)
  float* top;         // (K): gradients of the scores
  std::int32_t* ids;  // (K)

  static std::int64_t words(std::int64_t experts, std::int64_t top_k) {
    return experts + 3 * top_k;
  }
  __device__ SlowRow(float* memory, const Route& route)
      : gradient(memory + blockIdx.x * (route.experts + 3 * std::int64_t{route.top_k})),
        scores(gradient + route.experts),
        top(scores + route.top_k),
        ids(reinterpret_cast<std::int32_t*>(top + route.top_k)) {}
};

/// Sum over a block of kSlowThreads; every thread gets it.
__device__ float slow_block_sum(float x) {
  __shared__ float of_warp[kSlowThreads / kWarp];
  x = warp_sum(x);
  __syncthreads();  // all warps have read the previous call's of_warp
  if (lane_id() == 0) of_warp[threadIdx.x / kWarp] = x;
  __syncthreads();  // all warps have written of_warp
  float sum = 0.0f;
  for (int w = 0; w < kSlowThreads / kWarp; ++w) sum = math::add(sum, of_warp[w]);
  return sum;
}

/// The same for any number of experts and entries; a block takes every gridDim.x-th token.
template <class T>
__global__ void __launch_bounds__(kSlowThreads, 1)
    token_rounding_grad_slow(const T* logits, std::int64_t tokens, Route route, bool own_softmax,
                             Entries entries, const T* dlogits_in, T* dlogits, float* memory) {
  // Each __syncthreads() below shows a step's accesses to the scratch row to the whole block before
  // the next step.
  const SlowRow r(memory, route);
  const int thread = static_cast<int>(threadIdx.x);
  for (std::int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
    const T* row = logits + t * route.experts;
    const RowSoftmax softmax = row_softmax(row, route.experts);
    for (std::int64_t e = thread; e < route.experts; e += kSlowThreads) r.gradient[e] = 0.0f;
    __syncthreads();
    entries.scatter(entries.first(t), entries.first(t + 1), route.experts, r.gradient, thread,
                    kSlowThreads);
    if (own_softmax) route_slowly(route, row, softmax, r.scores, r.ids);
    __syncthreads();
    float inner_top_k = 0.0f;  // every thread adds the same terms, in stored order
    for (int k = 0; own_softmax && k < route.top_k; ++k) {
      inner_top_k = math::fma(r.gradient[r.ids[k]], r.scores[k], inner_top_k);
    }
    __syncthreads();
    for (int k = thread; own_softmax && k < route.top_k; k += kSlowThreads) {
      r.top[k] = r.gradient[r.ids[k]];
      r.gradient[r.ids[k]] = 0.0f;
    }
    __syncthreads();
    float inner = 0.0f;
    for (std::int64_t e = thread; e < route.experts; e += kSlowThreads) {
      inner = math::fma(r.gradient[e], softmax.probability(to_float(row[e])), inner);
    }
    inner = slow_block_sum(inner);
    for (std::int64_t e = thread; e < route.experts; e += kSlowThreads) {
      const float p = softmax.probability(to_float(row[e]));
      r.gradient[e] = math::mul(p, math::sub(r.gradient[e], inner));
    }
    __syncthreads();
    for (int k = thread; own_softmax && k < route.top_k; k += kSlowThreads) {
      float& g = r.gradient[r.ids[k]];
      g = math::add(g, math::mul(r.scores[k], math::sub(r.top[k], inner_top_k)));
    }
    __syncthreads();
    for (std::int64_t e = thread; e < route.experts; e += kSlowThreads) {
      const std::int64_t at = t * route.experts + e;
      const float outside = dlogits_in == nullptr ? 0.0f : to_float(dlogits_in[at]);
      dlogits[at] = from_float<T>(math::add(r.gradient[e], outside));
    }
    __syncthreads();
  }
}

/// Lowers *first to the position of the first entry that check_entries() refuses.
__global__ void find_bad_entries(Entries entries, std::int64_t tokens, unsigned long long* first) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= entries.length) return;
  const std::int32_t low = i == 0 ? 0 : entries.tokens[i - 1];
  const std::int32_t t = entries.tokens[i];
  if (t < low || t >= tokens) atomicMin(first, static_cast<unsigned long long>(i));
}

Status check_entries(const TokenRoundingGradDesc& d, const Entries& entries, void* scratch,
                     cudaStream_t stream) {
  if (d.list_length == 0) return {};
  std::uint64_t position = 0;
  const auto launch = [&](unsigned long long* first) {
    find_bad_entries<<<blocks_for(d.list_length, 256), 256, 0, stream>>>(entries, d.tokens, first);
  };
  constexpr const char* kWhat = "token_rounding_grad: check";
  if (Status s = first_bad(scratch, stream, kWhat, &position, launch); !s.ok()) return s;
  if (position == ~std::uint64_t{0}) return {};
  std::int32_t bad = 0;
  cudaError_t error =
      cudaMemcpyAsync(&bad, entries.tokens + position, 4, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return to_status(error, kWhat);
  return Status::error(StatusCode::invalid_data,
                       "token_ids: got %d at position %lld, allowed: tokens that ascend and are "
                       "below %lld",
                       bad, static_cast<long long>(position), static_cast<long long>(d.tokens));
}

template <class T>
Status run_typed(const TokenRoundingGradDesc& d, const TokenRoundingGradArgs& a, void* memory,
                 const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  const Entries entries{a.token_ids, a.expert_ids, a.token_offsets, a.dscores, d.list_length};
  if (exec.checked) {
    if (Status s = check_entries(d, entries, memory, stream); !s.ok()) return s;
  }
  if (d.tokens == 0) return {};
  const T* logits = static_cast<const T*>(a.logits);
  const T* dlogits_in = static_cast<const T*>(a.dlogits_in);
  T* const dlogits = static_cast<T*>(a.dlogits);
  const Route route = Route::of(d);
  const bool own_softmax = d.normalised();
  if (!fits_warp_row(d.experts, d.top_k)) {
    const unsigned blocks = static_cast<unsigned>(std::min(d.tokens, kSlowBlocks));
    token_rounding_grad_slow<<<blocks, kSlowThreads, 0, stream>>>(
        logits, d.tokens, route, own_softmax, entries, dlogits_in, dlogits,
        static_cast<float*>(memory));
    return launched("token_rounding_grad: launch");
  }
  return visit_row_size(d.experts, [&](auto per_lane) {
    const std::size_t bytes = 4 * static_cast<std::size_t>(d.experts * kWarps);
    launch_early(token_rounding_grad<T, per_lane.value>, blocks_for(d.tokens, kWarps),
                 kWarps * kWarp, bytes, exec, logits, d.tokens, route, own_softmax, entries,
                 dlogits_in, dlogits);
    return launched("token_rounding_grad: launch");
  });
}

std::size_t workspace(const TokenRoundingGradDesc& d, const Exec& exec) {
  std::size_t bytes = exec.checked ? kCheckBytes : 0;
  if (!fits_warp_row(d.experts, d.top_k)) {
    const std::int64_t blocks = std::min(d.tokens, kSlowBlocks);
    bytes =
        std::max(bytes, 4 * static_cast<std::size_t>(blocks * SlowRow::words(d.experts, d.top_k)));
  }
  return bytes;
}

Status run(const TokenRoundingGradDesc& d, const TokenRoundingGradArgs& a, void* memory,
           const Exec& exec) noexcept {
  return visit_logits(d.dtype,
                      [&](auto type) { return run_typed<decltype(type)>(d, a, memory, exec); });
}

}  // namespace

const Kernel<TokenRoundingGradDesc> kTokenRoundingGrad = {
    .op = "token_rounding_grad",
    .name = "cuda.token_rounding_grad",
    .arch = 80,
    .and_later = true,
    .dtypes = kLogitsTypes,
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cuda
