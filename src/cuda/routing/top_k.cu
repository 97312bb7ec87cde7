// Scores and ids of each token's K experts, a token per warp with its logits in registers; rows
// that do not fit take a block and K passes.
#include "core/backends.h"
#include "cuda/routing/select.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kWarps = 4;  // tokens of a block

template <class T, bool kOverTopK, int kPerLane, bool kFull>
__global__ void __launch_bounds__(kWarps* kWarp, row_blocks(kPerLane))
    top_k(const T* logits, std::int64_t tokens, Route route, float* scores, std::int32_t* ids,
          std::int32_t* error_word) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (t >= tokens) return;
  const WarpRow<T, kPerLane, kFull> row(logits + t * route.experts, route.experts);
  if (error_word != nullptr && row.bad() && lane_id() == 0) report(error_word, kBadLogits);
  Chosen chosen;
  if constexpr (kOverTopK) {
    chosen = row.choose_by_logit(route);
  } else {
    float p[kPerLane];
    row.probabilities(p);
    chosen = row.choose_by_probability(route, p);
  }
  const std::int64_t at = t * route.top_k + lane_id();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane_id() + i * kWarp >= route.top_k) break;
    scores[at + i * kWarp] = chosen.score[i];
    ids[at + i * kWarp] = chosen.expert[i];
  }
}

template <class T>
__global__ void __launch_bounds__(kSlowThreads)
    top_k_slow(const T* logits, Route route, float* scores, std::int32_t* ids,
               std::int32_t* error_word) {
  const std::int64_t t = blockIdx.x;
  const T* row = logits + t * route.experts;
  const RowSoftmax softmax = row_softmax(row, route.experts);  // every warp for itself
  // A NaN makes the sum one; so does an infinite maximum, which is taken from itself.
  if (threadIdx.x == 0 && softmax.sum != softmax.sum) report(error_word, kBadLogits);
  route_slowly(route, row, softmax, scores + t * route.top_k, ids + t * route.top_k);
}

template <class T>
Status run_typed(const TopKDesc& d, const TopKArgs& a, void* memory, const Exec& exec) {
  const T* logits = static_cast<const T*>(a.logits);
  const cudaStream_t stream = stream_of(exec);
  if (d.tokens == 0) return {};
  if (exec.checked) {
    if (Status s = check_logits(logits, d.tokens, d.experts, memory, stream); !s.ok()) return s;
  }
  const Route route = Route::of(d);
  if (!fits_warp_row(d.experts, d.top_k)) {
    top_k_slow<<<blocks_for(d.tokens, 1), kSlowThreads, 0, stream>>>(logits, route, a.scores, a.ids,
                                                                     a.error_word);
    return launched("top_k: launch");
  }
  return visit_row_size(d.experts, [&](auto per_lane) {
    constexpr int kPerLane = per_lane.value;
    const bool full = d.experts == kPerLane * kWarp;
    const auto by_logit = full ? top_k<T, true, kPerLane, true> : top_k<T, true, kPerLane, false>;
    const auto by_probability =
        full ? top_k<T, false, kPerLane, true> : top_k<T, false, kPerLane, false>;
    const auto kernel = route.over_top_k ? by_logit : by_probability;
    kernel<<<blocks_for(d.tokens, kWarps), kWarps * kWarp, 0, stream>>>(
        logits, d.tokens, route, a.scores, a.ids, a.error_word);
    return launched("top_k: launch");
  });
}

std::size_t workspace(const TopKDesc&, const Exec& exec) { return exec.checked ? kCheckBytes : 0; }

Status run(const TopKDesc& desc, const TopKArgs& args, void* memory, const Exec& exec) noexcept {
  return visit_logits(
      desc.dtype, [&](auto type) { return run_typed<decltype(type)>(desc, args, memory, exec); });
}

}  // namespace

const Kernel<TopKDesc> kTopK = {
    "top_k", "cuda.top_k", DeviceType::cuda, takes_any_dtype<TopKDesc>, workspace, run};

}  // namespace sonicmoe::cuda
