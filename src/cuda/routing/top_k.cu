// Scores and ids of each token's K experts. Three kernels choose and score them:
//
// - top_few: the usual case, softmax over at most 8 entries of 16-bit logits. Up to eight tokens
//   share a warp, which takes a fraction of the instructions.
// - top_k: a token per warp, with its logits in registers.
// - top_k_slow: rows that do not fit a warp. A block per token makes K passes over the row.
//
// score_ids scores ids of the caller, a token per warp. All this is for routers that are plain();
// top_k_scored.cu has the others. top_few_scored.cu has the usual sizes of those, and of the
// softmax over all experts.
//
// No kernel here triggers the launch of metadata. Metadata has few blocks. Launched early, they
// would crowd on the multiprocessors where our blocks leave room first (docs/findings/routing.md).
#include "core/backends.h"
#include "cuda/routing/few.cuh"
#include "cuda/routing/select.cuh"
#include "cuda/routing/top_few_scored.h"
#include "cuda/routing/top_k_scored.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kWarps = 4;  // of a block of top_k

template <class T, bool kOverTopK, int kPerLane, bool kFull>
__global__ void __launch_bounds__(kWarps* kWarp, row_blocks(kPerLane))
    top_k(const T* logits, std::int64_t tokens, Route route, float* scores, std::int32_t* ids,
          std::int32_t* error_word) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  wait_for_previous();
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

constexpr int kFewThreads = 256;

/// Softmax over the top-K of 16-bit logits, for K up to kFew. kLanes lanes take token t, with at
/// most kLanes * kPerLane experts; kFull means exactly as many. Ids and scores have the bits of the
/// kernel `top_k`. count[e] in shared memory grows by one for each expert e that the token chooses.
template <class T, int kLanes, int kPerLane, bool kFull>
__device__ __forceinline__ void choose_few(const T* logits, std::int64_t t, std::int64_t tokens,
                                           const Route& route, float* scores, std::int32_t* ids,
                                           std::int32_t* error_word, std::int32_t* count) {
  const int part = lane_id() % kLanes;
  const int experts = static_cast<int>(route.experts);
  // All lanes of a warp must take part in its exchanges. Those past the last token load the last
  // token's logits.
  const T* const row = logits + min(t, tokens - 1) * route.experts;
  T logit[kPerLane];
  const auto expert_of = [&](int i) {
    return kFull ? (i / 8 * kLanes + part) * 8 + i % 8 : i * kLanes + part;
  };
  if constexpr (kFull) {
    // Loads of 16 bytes: full rows are multiples of that.
#pragma unroll
    for (int i = 0; i < kPerLane; i += 8) {
      const auto eight = *reinterpret_cast<const Eight<T>*>(row + expert_of(i));
#pragma unroll
      for (int j = 0; j < 8; ++j) logit[i + j] = eight.value[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      logit[i] = expert_of(i) < experts ? row[expert_of(i)] : from_float<T>(0.0f);
    }
  }
  if (error_word != nullptr) {
    bool wrong = false;
    bool finite = false;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float x = to_float(logit[i]);
      wrong |= !(x < INFINITY);
      finite |= (kFull || expert_of(i) < experts) && x > -INFINITY;
    }
    const unsigned lanes = ((1u << kLanes) - 1) << lane_id() / kLanes * kLanes;
    const bool any_wrong = (__ballot_sync(kAllLanes, wrong) & lanes) != 0;
    const bool any_finite = (__ballot_sync(kAllLanes, finite) & lanes) != 0;
    if ((any_wrong || !any_finite) && part == 0) report(error_word, kBadLogits);
  }

  std::uint32_t best[kFew];
  few_largest<kLanes, kPerLane>(
      [&](int i) {
        const int e = expert_of(i);
        return kFull || e < experts ? Key32::of(to_float(logit[i]), e).bits : 0;
      },
      best);

  // Lane k modulo kLanes stores entry k. Lanes without an entry compute with the largest key.
  constexpr int kEntries = (kFew + kLanes - 1) / kLanes;
  Key32 mine[kEntries];
  float score[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    mine[i].bits = best[0];
#pragma unroll
    for (int k = i * kLanes; k < kFew && k < (i + 1) * kLanes; ++k) {
      if (part == k % kLanes && k < route.top_k) mine[i].bits = best[k];
    }
    score[i] = math::softmax_term(mine[i].value(), Key32{best[0]}.value());
  }
  float sum = 0.0f;  // in stored order, as src/cpu adds
#pragma unroll
  for (int k = 0; k < kFew; ++k) {
    const float other = __shfl_sync(kAllLanes, score[k / kLanes], k % kLanes, kLanes);
    if (k < route.top_k) sum = math::add(sum, other);
  }
  if (t >= tokens) return;
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    const int k = i * kLanes + part;
    if (k >= route.top_k) break;
    scores[t * route.top_k + k] = math::div(score[i], sum);
    ids[t * route.top_k + k] = mine[i].expert();
    atomicAdd(&count[mine[i].expert()], 1);
  }
}

/// A block takes kCounted tokens. It writes row blockIdx.x of block_counts (null: none): how many
/// of its tokens have each expert, in `stride` bytes.
template <class T, int kLanes, int kPerLane, bool kFull>
__global__ void __launch_bounds__(kFewThreads)
    top_few(const T* logits, std::int64_t tokens, Route route, float* scores, std::int32_t* ids,
            std::uint8_t* block_counts, std::int32_t stride, std::int32_t* error_word) {
  __shared__ std::int32_t count[kFewExperts];
  const int thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < kFewExperts; e += kFewThreads) count[e] = 0;
  wait_for_previous();
  __syncthreads();  // count[] is 0
  const std::int64_t first = std::int64_t{blockIdx.x} * kCounted;
#pragma unroll 1
  for (int token = thread / kLanes; token < kCounted; token += kFewThreads / kLanes) {
    choose_few<T, kLanes, kPerLane, kFull>(logits, first + token, tokens, route, scores, ids,
                                           error_word, count);
  }
  if (block_counts == nullptr) return;
  __syncthreads();  // all tokens are counted
  store_counts<kFewThreads>(count, block_counts, stride);
}

/// Makes the same counts from the ids that `top_k` stored. A block makes a row.
__global__ void __launch_bounds__(kFewThreads)
    count_ids(const std::int32_t* ids, std::int64_t slots, std::int32_t slots_of_row,
              std::uint8_t* block_counts, std::int32_t stride) {
  __shared__ std::int32_t count[BlockCounts::kExperts];
  for (int e = threadIdx.x; e < stride; e += kFewThreads) count[e] = 0;
  wait_for_previous();
  __syncthreads();  // count[] is 0
  const std::int64_t first = std::int64_t{blockIdx.x} * slots_of_row;
  const std::int64_t end = min(first + slots_of_row, slots);
  for (std::int64_t i = first + threadIdx.x; i < end; i += kFewThreads) {
    atomicAdd(&count[ids[i]], 1);
  }
  __syncthreads();  // all slots are counted
  store_counts<kFewThreads>(count, block_counts, stride);
}

template <class T>
__global__ void __launch_bounds__(kSlowThreads)
    top_k_slow(const T* logits, Route route, float* scores, std::int32_t* ids,
               std::int32_t* error_word) {
  const std::int64_t t = blockIdx.x;
  wait_for_previous();
  const T* row = logits + t * route.experts;
  const RowSoftmax softmax = row_softmax(row, route.experts);  // every warp for itself
  // A NaN logit makes the sum a NaN. So does an infinite maximum, because inf - inf is a NaN.
  if (threadIdx.x == 0 && softmax.sum != softmax.sum) report(error_word, kBadLogits);
  route_slowly(route, row, softmax, scores + t * route.top_k, ids + t * route.top_k);
}

/// Scores of given ids, in their order and in the bits of src/cpu. A warp takes a token. Entries of
/// sentinels get 0.
template <class T>
__global__ void __launch_bounds__(kWarps* kWarp)
    score_ids(const T* logits, const std::int32_t* given_ids, std::int64_t tokens, Route route,
              float* scores, std::int32_t* ids, std::int32_t* error_word) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  wait_for_previous();
  if (t >= tokens) return;
  const T* const row = logits + t * route.experts;
  const std::int64_t first = t * route.top_k;
  RowSoftmax softmax{};
  bool wrong = false;  // a NaN or +inf, wherever the ids are
  bool bad = false;
  if (route.over_top_k) {
    const std::uint32_t largest = largest_at(row, route.experts, given_ids + first, route.top_k);
    softmax.max = from_order_bits(largest);
    bool finite = false;
    for (std::int64_t e = lane_id(); e < route.experts; e += kWarp) {
      const float x = to_float(row[e]);
      wrong |= !(x < INFINITY);
      finite |= x > -INFINITY;
    }
    wrong = __any_sync(kAllLanes, wrong);
    bad = wrong || !__any_sync(kAllLanes, finite) || only_negative_infinity(largest);
  } else {
    softmax = row_softmax(row, route.experts);
    bad = softmax.sum != softmax.sum;  // as in top_k_slow
  }
  if (bad && lane_id() == 0) report(error_word, kBadLogits);

  float sum = 0.0f;  // in stored order, as src/cpu adds
  for (int k0 = 0; k0 < route.top_k; k0 += kWarp) {
    const int k = k0 + lane_id();
    const int left = min(kWarp, route.top_k - k0);
    const std::int32_t e = lane_id() < left ? given_ids[first + k] : -1;
    float score = 0.0f;
    if (e >= 0 && e < route.experts) {
      const float x = to_float(row[e]);
      score = route.over_top_k ? softmax.term(x) : softmax.probability(x);
      if (wrong) score = NAN;
    }
    if (lane_id() < left) {
      scores[first + k] = score;
      ids[first + k] = e;
    }
    if (!route.normalised) continue;
    for (int l = 0; l < left; ++l) sum = math::add(sum, __shfl_sync(kAllLanes, score, l));
  }
  if (!route.normalised) return;
  for (int k = lane_id(); k < route.top_k; k += kWarp) {
    const float score = scores[first + k];  // 0 of sentinels, and of all if the sum is 0
    scores[first + k] = score == 0.0f ? 0.0f : math::div(score, sum);
  }
}

template <class T>
Status run_typed(const TopKDesc& d, const TopKArgs& a, void* memory, const Exec& exec) {
  const T* logits = static_cast<const T*>(a.logits);
  const cudaStream_t stream = stream_of(exec);
  if (d.tokens == 0) return {};
  const Route route = Route::of(d);
  if (exec.checked) {
    GivenIds over;
    if (d.takes_ids() && route.over_top_k) over = {a.given_ids, route.top_k};
    const Status s = check_logits(logits, d.tokens, d.experts, memory, stream, over,
                                  d.score == RouterScore::softmax);
    if (!s.ok()) return s;
  }
  if (d.takes_ids() && d.plain()) {
    launch_early(score_ids<T>, blocks_for(d.tokens, kWarps), kWarps * kWarp, 0, exec, logits,
                 a.given_ids, d.tokens, route, a.scores, a.ids, a.error_word);
    return launched("top_k: launch");
  }
  const BlockCounts counts = BlockCounts::of(d.tokens, d.experts, d.top_k);
  std::uint8_t* const block_counts = counts.bytes() > 0 ? exec.handoff.block_counts : nullptr;
  const auto stride = static_cast<std::int32_t>(counts.stride);
  const auto count = [&] {  // what a kernel chose that does not count itself
    if (block_counts == nullptr) return;
    launch_early(count_ids, static_cast<unsigned>(counts.rows), kFewThreads, 0, exec, a.ids,
                 d.tokens * d.top_k, static_cast<std::int32_t>(kCounted * d.top_k), block_counts,
                 stride);
  };
  if (fits_top_few_scored(d)) return run_top_few_scored(d, a, block_counts, stride, exec);
  if (!d.plain()) {
    if (Status s = run_scored_top_k(d, a, exec); !s.ok()) return s;
    count();
    return launched("top_k: launch");
  }
  if (!fits_warp_row(d.experts, d.top_k)) {
    launch_early(top_k_slow<T>, blocks_for(d.tokens, 1), kSlowThreads, 0, exec, logits, route,
                 a.scores, a.ids, a.error_word);
    return launched("top_k: launch");
  }
  if constexpr (sizeof(T) == 2) {
    if (route.over_top_k && d.top_k <= kFew && d.experts <= kFewExperts) {
      using std::integral_constant;
      const auto start = [&](auto lanes, auto per_lane) {
        constexpr int kLanes = lanes.value, kPerLane = per_lane.value;
        const bool full = d.experts == kLanes * kPerLane;
        launch_early(
            full ? top_few<T, kLanes, kPerLane, true> : top_few<T, kLanes, kPerLane, false>,
            blocks_for(d.tokens, kCounted), kFewThreads, 0, exec, logits, d.tokens, route, a.scores,
            a.ids, block_counts, stride, a.error_word);
        return launched("top_k: launch");
      };
      if (d.experts <= 64) return start(integral_constant<int, 4>{}, integral_constant<int, 16>{});
      if (d.experts <= 128) return start(integral_constant<int, 4>{}, integral_constant<int, 32>{});
      if (d.experts <= 256) return start(integral_constant<int, 8>{}, integral_constant<int, 32>{});
      return start(integral_constant<int, 16>{}, integral_constant<int, 32>{});
    }
  }
  return visit_row_size(d.experts, [&](auto per_lane) {
    constexpr int kPerLane = per_lane.value;
    const bool full = d.experts == kPerLane * kWarp;
    const auto by_logit = full ? top_k<T, true, kPerLane, true> : top_k<T, true, kPerLane, false>;
    const auto by_probability =
        full ? top_k<T, false, kPerLane, true> : top_k<T, false, kPerLane, false>;
    const auto kernel = route.over_top_k ? by_logit : by_probability;
    launch_early(kernel, blocks_for(d.tokens, kWarps), kWarps * kWarp, 0, exec, logits, d.tokens,
                 route, a.scores, a.ids, a.error_word);
    count();
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
    .op = "top_k",
    .name = "cuda.top_k",
    .arch = 80,
    .and_later = true,
    .dtypes = kLogitsTypes,
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cuda
