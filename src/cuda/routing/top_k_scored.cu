// Experts and scores where the router is not RouterDesc::plain(): other scores than the softmax,
// biases, groups and scales. Three kernels make them, as in top_k.cu: a token per warp with its
// logits in registers, a block per token for rows that do not fit a warp, and a warp per token for
// ids of the caller. A warp then turns a token's ids into scores, by the same code for all.
// top_few_scored.cu has a faster kernel for the usual sizes.
#include "cuda/routing/scored_route.cuh"
#include "cuda/routing/select.cuh"
#include "cuda/routing/top_k_scored.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kWarps = 4;                      // of a block, where a warp takes a token
constexpr std::size_t kMostShared = 48 << 10;  // bytes of a block that need no permission

/// Group g's value; value_of(e) is that of an expert. A NaN is larger than any number.
template <class ValueOf>
__device__ float group_value(const ScoredRoute& route, int g, ValueOf value_of) {
  std::uint32_t first = 0, second = 0;
  for (int i = 0; i < route.group_size; ++i) {
    const std::uint32_t v = order_bits(value_of(g * route.group_size + i));
    second = max(second, min(first, v));
    first = max(first, v);
  }
  const float largest = from_order_bits(first);
  return route.two ? math::add(largest, from_order_bits(second)) : largest;
}

/// Is group g among the best? Ties go to the lower group.
__device__ bool group_stays(const ScoredRoute& route, int g, const float* group_values) {
  const float own = group_values[g];
  int better = 0;
  for (int other = 0; other < route.groups; ++other) {
    const float v = group_values[other];
    better += v > own || (v == own && other < g);
  }
  return better < route.kept_groups;
}

/// Writes p and the scores of a token's ids. All lanes of a warp call it. Lane l has written
/// ids[l], ids[l + 32], ... itself, or an earlier kernel has. Sentinels take no part and get 0. All
/// others get NaNs if the row is `spoilt`, wherever its bad logits are.
template <class T>
__device__ void weigh(const ScoredRoute& route, const T* row, RowSoftmax softmax,
                      const std::int32_t* ids, float* probabilities, float* scores, bool spoilt) {
  if (route.over_top_k) {
    softmax.max = from_order_bits(largest_at(row, route.experts, ids, route.top_k));
  }
  float sum = 0.0f;  // in stored order, as src/cpu adds
  for (int k0 = 0; k0 < route.top_k; k0 += kWarp) {
    const int left = min(kWarp, route.top_k - k0);
    const int k = k0 + lane_id();
    const std::int32_t e = lane_id() < left ? ids[k] : -1;
    float p = 0.0f;
    if (e >= 0 && e < route.experts) {
      const float z = to_float(row[e]);
      p = route.over_top_k ? softmax.term(z) : route.p(z, softmax);
      if (spoilt) p = NAN;
    }
    if (lane_id() < left) probabilities[k] = p;
#pragma unroll 4
    for (int l = 0; l < left; ++l) sum = math::add(sum, __shfl_sync(kAllLanes, p, l));
  }
  const float divisor = route.weights.divisor(sum);
  for (int k = lane_id(); k < route.top_k; k += kWarp) {
    const std::int32_t e = ids[k];
    float p = probabilities[k];
    if (route.over_top_k) {
      p = p == 0.0f ? 0.0f : math::div(p, sum);  // 0 of sentinels, and of all if the sum is 0
      probabilities[k] = p;
    }
    float score = 0.0f;
    if (e >= 0 && e < route.experts) {
      const float own = route.expert_scale == nullptr ? 1.0f : route.expert_scale[e];
      score = route.weights.scaled(route.weights.weight(p, divisor), own);
    }
    scores[k] = score;
  }
}

/// Place of expert e's value in shared memory: an empty one after each 32, so that lanes that walk
/// groups of 32 experts meet different banks.
__device__ __forceinline__ int padded(int e) { return e + e / kWarp; }
/// Floats of shared memory that a warp needs for its groups.
constexpr int group_floats(int experts, int groups) {
  return experts + experts / kWarp + 1 + 2 * groups;
}

template <class T, int kPerLane>
__global__ void __launch_bounds__(kWarps* kWarp, row_blocks(kPerLane))
    top_k_scored(const T* logits, std::int64_t tokens, ScoredRoute route, float* scores,
                 float* probabilities, std::int32_t* ids, std::int32_t* error_word) {
  extern __shared__ float of_warps[];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t t = std::int64_t{blockIdx.x} * kWarps + warp;
  wait_for_previous();
  if (t >= tokens) return;
  using Row = WarpRow<T, kPerLane>;
  const T* const from = logits + t * route.experts;
  const Row row(from, route.experts);
  const bool bad = row.bad(route.softmax());
  if (bad && lane_id() == 0) report(error_word, kBadLogits);
  RowSoftmax softmax{};
  if (route.over_all()) softmax = row.softmax();
  float value[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    value[j] = row.has(j) ? route.value(to_float(row.logit[j]), softmax, Row::expert(j)) : 0.0f;
  }
  unsigned out = 0;  // bit j: the group of expert(j) is out
  if (route.groups > 1) {
    float* const values = of_warps + warp * group_floats(route.experts, route.groups);
    float* const group_values = values + padded(route.experts) + 1;
    float* const stays = group_values + route.groups;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (row.has(j)) values[padded(Row::expert(j))] = value[j];
    }
    __syncwarp();  // all values are stored
    for (int g = lane_id(); g < route.groups; g += kWarp) {
      group_values[g] = group_value(route, g, [&](int e) { return values[padded(e)]; });
    }
    __syncwarp();  // all groups have their value
    for (int g = lane_id(); g < route.groups; g += kWarp) {
      stays[g] = group_stays(route, g, group_values) ? 1.0f : 0.0f;
    }
    __syncwarp();  // all groups are judged
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (row.has(j) && stays[Row::expert(j) / route.group_size] == 0.0f) out |= 1u << j;
    }
  }
  Key64 mine[2];
  row.template largest<Key64>(
      route.top_k,
      [&](int j) { return (out >> j & 1) != 0 ? Key64{} : Key64::of(value[j], Row::expert(j)); },
      mine);
  const std::int64_t first = t * route.top_k;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int k = lane_id() + i * kWarp;
    if (k < route.top_k) ids[first + k] = mine[i].expert();
  }
  weigh(route, from, softmax, ids + first, probabilities + first, scores + first, bad);
}

/// Is a row of logits one that check_logits would refuse? All threads of a block call it.
template <class T>
__device__ bool block_bad(const ScoredRoute& route, const T* row) {
  bool wrong = false, finite = !route.softmax();
  for (std::int64_t e = threadIdx.x; e < route.experts; e += kSlowThreads) {
    const float x = to_float(row[e]);
    wrong |= !(x < INFINITY);
    finite |= x > -INFINITY;
  }
  wrong = __syncthreads_or(wrong);
  return !__syncthreads_or(finite) || wrong;
}

template <class T>
__global__ void __launch_bounds__(kSlowThreads)
    top_k_scored_slow(const T* logits, ScoredRoute route, float* scores, float* probabilities,
                      std::int32_t* ids, std::int32_t* error_word) {
  __shared__ float group_values[kMaxGroups];
  __shared__ bool stays[kMaxGroups];
  const std::int64_t t = blockIdx.x, first = t * route.top_k;
  wait_for_previous();
  const T* const row = logits + t * route.experts;
  const bool bad = block_bad(route, row);
  if (bad && threadIdx.x == 0) report(error_word, kBadLogits);
  RowSoftmax softmax{};
  if (route.over_all()) softmax = row_softmax(row, route.experts);  // every warp for itself
  const auto value = [&](std::int64_t e) { return route.value(to_float(row[e]), softmax, e); };
  if (route.groups > 1) {
    for (int g = threadIdx.x; g < route.groups; g += kSlowThreads) {
      group_values[g] = group_value(route, g, value);
    }
    __syncthreads();  // all groups have their value
    for (int g = threadIdx.x; g < route.groups; g += kSlowThreads) {
      stays[g] = group_stays(route, g, group_values);
    }
    __syncthreads();  // all groups are judged
  }
  Key64 last{~std::uint64_t{0}};
  for (int k = 0; k < route.top_k; ++k) {
    Key64 best;
    for (std::int64_t e = threadIdx.x; e < route.experts; e += kSlowThreads) {
      if (route.groups > 1 && !stays[e / route.group_size]) continue;
      const Key64 key = Key64::of(value(e), e);
      if (key.bits < last.bits && key.bits > best.bits) best = key;
    }
    last = block_max(best);
    if (static_cast<int>(threadIdx.x) == k % kWarp) ids[first + k] = last.expert();
  }
  if (threadIdx.x < kWarp) {
    weigh(route, row, softmax, ids + first, probabilities + first, scores + first, bad);
  }
}

/// Scores of given ids, in their order.
template <class T>
__global__ void __launch_bounds__(kWarps* kWarp)
    score_ids_scored(const T* logits, const std::int32_t* given_ids, std::int64_t tokens,
                     ScoredRoute route, float* scores, float* probabilities, std::int32_t* ids,
                     std::int32_t* error_word) {
  const std::int64_t t = std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  wait_for_previous();
  if (t >= tokens) return;
  const T* const row = logits + t * route.experts;
  const std::int64_t first = t * route.top_k;
  RowSoftmax softmax{};
  if (route.over_all()) softmax = row_softmax(row, route.experts);
  bool wrong = false, finite = !route.softmax();
  for (std::int64_t e = lane_id(); e < route.experts; e += kWarp) {
    const float x = to_float(row[e]);
    wrong |= !(x < INFINITY);
    finite |= x > -INFINITY;
  }
  wrong = __any_sync(kAllLanes, wrong);
  const bool no_id = route.over_top_k && only_negative_infinity(largest_at(
                                             row, route.experts, given_ids + first, route.top_k));
  if ((wrong || !__any_sync(kAllLanes, finite) || no_id) && lane_id() == 0) {
    report(error_word, kBadLogits);
  }
  for (int k = lane_id(); k < route.top_k; k += kWarp) ids[first + k] = given_ids[first + k];
  weigh(route, row, softmax, ids + first, probabilities + first, scores + first, wrong);
}

template <class T>
Status run_typed(const TopKDesc& d, const TopKArgs& a, const Exec& exec) {
  const T* const logits = static_cast<const T*>(a.logits);
  const ScoredRoute route = ScoredRoute::of(d, a);
  const int floats = route.groups > 1 ? kWarps * group_floats(route.experts, route.groups) : 0;
  const std::size_t shared = 4 * static_cast<std::size_t>(floats);
  if (d.takes_ids()) {
    launch_early(score_ids_scored<T>, blocks_for(d.tokens, kWarps), kWarps * kWarp, 0, exec, logits,
                 a.given_ids, d.tokens, route, a.scores, a.probabilities, a.ids, a.error_word);
  } else if (!fits_warp_row(d.experts, d.top_k) || shared > kMostShared) {
    launch_early(top_k_scored_slow<T>, blocks_for(d.tokens, 1), kSlowThreads, 0, exec, logits,
                 route, a.scores, a.probabilities, a.ids, a.error_word);
  } else {
    return visit_row_size(d.experts, [&](auto per_lane) {
      launch_early(top_k_scored<T, per_lane.value>, blocks_for(d.tokens, kWarps), kWarps * kWarp,
                   shared, exec, logits, d.tokens, route, a.scores, a.probabilities, a.ids,
                   a.error_word);
      return launched("top_k: launch");
    });
  }
  return launched("top_k: launch");
}

}  // namespace

Status run_scored_top_k(const TopKDesc& desc, const TopKArgs& args, const Exec& exec) {
  return visit_logits(desc.dtype,
                      [&](auto type) { return run_typed<decltype(type)>(desc, args, exec); });
}

}  // namespace sonicmoe::cuda
