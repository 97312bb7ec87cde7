#pragma once

#include <type_traits>

#include "cuda/routing/quick_score.h"
#include "cuda/routing/routing.cuh"

/// Chooses a token's K experts, larger value first and ties to the lower expert id, and makes their
/// scores.
///
/// One integer key holds a value and its expert: [bits that ascend with the value | expert, counted
/// down]. So the largest key is the next expert, with ties broken. No bit of the value is lost. The
/// upper 19 bits of a float hold any bf16 or fp16 logit, and the lower 13 hold the expert. An fp32
/// value takes a key of 64 bits. The expert's bits are never all 0, so a key of 0 means no expert.
namespace sonicmoe::cuda {

/// The fields of a descriptor that decide a token's experts and scores.
struct Route {
  std::int64_t experts;
  int top_k;
  bool over_top_k;  ///< true: softmax over the top-K; false: top-K over the softmax
  bool normalised;  ///< the K scores are divided by their sum

  static Route of(const RouterDesc& d) {
    return {d.experts, static_cast<int>(d.top_k), d.over_top_k(), d.normalised()};
  }
};

/// Key of a bf16 or fp16 logit and an expert id below kExperts.
struct Key32 {
  std::uint32_t bits = 0;

  static __device__ Key32 of(float x, int expert) {
    // The mask cuts only zeros: bf16 and fp16 have at most 10 bits of mantissa, subnormal numbers
    // included.
    return {(order_bits(x) & ~kExperts) | (kExperts - static_cast<unsigned>(expert))};
  }
  __device__ float value() const {
    // order_bits() inverts all bits of a negative value, so its lowest 13 bits were ones.
    return from_order_bits(bits >> 31 ? bits & ~kExperts : bits | kExperts);
  }
  __device__ std::int32_t expert() const {
    return static_cast<std::int32_t>(kExperts - (bits & kExperts));
  }

 private:
  static constexpr std::uint32_t kExperts = (1u << 13) - 1;
};

/// Key of an fp32 value and an expert id.
struct Key64 {
  std::uint64_t bits = 0;

  static __device__ Key64 of(float x, std::int64_t expert) {
    return {std::uint64_t{order_bits(x)} << 32 | (kFirst - static_cast<unsigned>(expert))};
  }
  __device__ float value() const { return from_order_bits(static_cast<std::uint32_t>(bits >> 32)); }
  __device__ std::int32_t expert() const {
    return static_cast<std::int32_t>(kFirst - static_cast<std::uint32_t>(bits));
  }

 private:
  // Not all ones: a block's search begins below a bound of all ones, and the key of a NaN at expert
  // 0 must lie below that, too.
  static constexpr std::uint32_t kFirst = 0xfffffffe;
};

__device__ __forceinline__ Key32 warp_max(Key32 key) {
  return {__reduce_max_sync(kAllLanes, key.bits)};
}
__device__ __forceinline__ Key64 warp_max(Key64 key) {
  const std::uint32_t high = static_cast<std::uint32_t>(key.bits >> 32);
  const std::uint32_t top = __reduce_max_sync(kAllLanes, high);
  const std::uint32_t low = high == top ? static_cast<std::uint32_t>(key.bits) : 0u;
  return {std::uint64_t{top} << 32 | __reduce_max_sync(kAllLanes, low)};
}

/// The kDepth largest keys of a lane, in descending order. The experts are spread over 32 lanes, so
/// few tokens take more than kDepth keys from one lane. For those tokens the warp builds its lists
/// again.
template <class Key>
struct LaneKeys {
  static constexpr int kDepth = 4;
  Key key[kDepth];
  bool more = true;  ///< the lane has keys that are not in the list

  /// Makes the list from those of key_of(0) .. key_of(kPerLane - 1) that are at most `bound`. With
  /// kPerLane <= kDepth the list holds all of them, and `bound` has no effect.
  template <int kPerLane, class KeyOf>
  __device__ void build(KeyOf key_of, Key bound) {
#pragma unroll
    for (int first = 0; first < kPerLane; first += kDepth) {
      LaneKeys four;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (first + i < kPerLane) four.key[i] = key_of(first + i);
        if (kPerLane > kDepth && four.key[i].bits > bound.bits) four.key[i] = Key{};
      }
      four.order(0, 1), four.order(2, 3), four.order(0, 2), four.order(1, 3), four.order(1, 2);
      if (first == 0) {
        *this = four;
      } else {
        merge(four);
      }
    }
    more = kPerLane > kDepth && key[kDepth - 1].bits != 0;
  }

  /// Returns the warp's largest key to all lanes and removes it from its list.
  __device__ Key take() {
    const Key best = warp_max(key[0]);
    if (key[0].bits == best.bits) {
#pragma unroll
      for (int i = 0; i + 1 < kDepth; ++i) key[i] = key[i + 1];
      key[kDepth - 1] = Key{};
    }
    return best;
  }
  /// True in all lanes if a lane has an empty list, but more keys: its next key is unknown.
  __device__ bool used_up() const { return __any_sync(kAllLanes, more && key[0].bits == 0); }

 private:
  __device__ void order(int a, int b) {
    const bool swap = key[a].bits < key[b].bits;
    const Key larger = swap ? key[b] : key[a];
    key[b] = swap ? key[a] : key[b];
    key[a] = larger;
  }
  /// Keeps the four largest keys of two descending lists. The first loop takes them, as a bitonic
  /// sequence; the exchanges sort it.
  __device__ void merge(const LaneKeys& other) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const Key theirs = other.key[kDepth - 1 - i];
      if (theirs.bits > key[i].bits) key[i] = theirs;
    }
    order(0, 2), order(1, 3), order(0, 1), order(2, 3);
  }
};

/// A lane's part of a token's K entries, one token per warp: entries k = lane and k = lane + 32.
struct Chosen {
  std::int32_t expert[2];
  float score[2];
};

/// A token's logits in the registers of a warp: lane l holds experts l, l + kWarp, ... There are at
/// most kWarp * kPerLane experts, exactly as many with kFull, and at most kWarpRowTopK entries.
template <class T, int kPerLane_, bool kFull = false>
struct WarpRow {
  static constexpr int kPerLane = kPerLane_;
  T logit[kPerLane];
  int experts;

  __device__ WarpRow(const T* logits, std::int64_t count) : experts(static_cast<int>(count)) {
    const T* mine = logits + lane_id();
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) logit[j] = has(j) ? mine[j * kWarp] : from_float<T>(0.0f);
  }
  static __device__ int expert(int j) { return j * kWarp + lane_id(); }
  __device__ bool has(int j) const { return kFull || expert(j) < experts; }

  /// True in every lane if check_logits would refuse the row: a NaN or +inf, or for a softmax no
  /// finite logit.
  __device__ bool bad(bool softmax = true) const {
    bool wrong = false;
    bool finite = false;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const float x = to_float(logit[j]);
      wrong |= !(x < INFINITY);
      finite |= has(j) && x > -INFINITY;
    }
    wrong = __any_sync(kAllLanes, wrong);
    return wrong || (softmax && !__any_sync(kAllLanes, finite));
  }

  /// The largest logit, or a NaN if there is one.
  __device__ float max() const {
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (has(j)) largest = math::at_least(largest, to_float(logit[j]));
    }
    return from_order_bits(__reduce_max_sync(kAllLanes, order_bits(largest)));
  }

  /// Maximum and sum of the softmax over all experts, as in probabilities().
  __device__ RowSoftmax softmax() const {
    const float largest = max();
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      sum = math::add(sum, has(j) ? math::softmax_term(to_float(logit[j]), largest) : 0.0f);
    }
    return {largest, warp_sum(sum)};
  }

  /// The softmax over all experts, in the bits of src/cpu (math::lane_sum32 gives the order of the
  /// sum). p[j] has no meaning where !has(j). All are NaNs where bad().
  __device__ void probabilities(float (&p)[kPerLane]) const {
    const float largest = max();
    float least = largest;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (has(j)) least = math::at_most(least, to_float(logit[j]));
    }
    if (__all_sync(kAllLanes, math::sub(largest, least) <= kQuickRange)) {
      const float sum = terms(p, [&](float z) { return quick_exp(math::sub(z, largest)); });
      const float inverse = refined(sum, math::fast_reciprocal(sum));
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) p[j] = quotient(p[j], sum, inverse);
    } else {
      const float sum = terms(p, [&](float z) { return math::softmax_term(z, largest); });
      // Where !has(j) the lane divides sum by sum: a zero would send the whole warp down the slow
      // path of the division.
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) p[j] = math::div(has(j) ? p[j] : sum, sum);
    }
  }

  /// Experts and scores of softmax over the top-K.
  __device__ Chosen choose_by_logit(const Route& route) const {
    using Key = std::conditional_t<sizeof(T) == 2, Key32, Key64>;
    return choose<Key>(route, [&](int j) { return Key::of(to_float(logit[j]), expert(j)); });
  }
  /// Experts and scores of top-K over the softmax; p comes from probabilities().
  __device__ Chosen choose_by_probability(const Route& route, const float (&p)[kPerLane]) const {
    return choose<Key64>(route, [&](int j) { return Key64::of(p[j], expert(j)); });
  }

  /// The K largest keys, in descending order: lane k has entries k and k + kWarp. key_of(j) is that
  /// of expert(j), or a key of 0 if it takes no part.
  template <class Key, class KeyOf>
  __device__ void largest(int top_k, KeyOf key_of, Key (&mine)[2]) const {
    const auto key = [&](int j) { return has(j) ? key_of(j) : Key{}; };
    LaneKeys<Key> keys;
    Key bound;
    bound.bits = ~bound.bits;
    constexpr bool kAll = kPerLane <= keys.kDepth;  // a list holds all keys of its lane
    if constexpr (kAll) keys.template build<kPerLane>(key, bound);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int left = min(top_k - i * kWarp, kWarp);
#pragma unroll(kAll ? 4 : 1)
      for (int k = 0; k < left; ++k) {
        if (!kAll && keys.used_up()) keys.template build<kPerLane>(key, bound);
        const Key next = keys.take();
        bound.bits = next.bits - 1;
        if (k == lane_id()) mine[i] = next;
      }
    }
  }

 private:
  /// Writes the term of each logit, and returns their sum.
  template <class Term>
  __device__ float terms(float (&p)[kPerLane], Term term) const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      p[j] = has(j) ? term(to_float(logit[j])) : 0.0f;
      sum = math::add(sum, p[j]);
    }
    return warp_sum(sum);
  }

  template <class Key, class KeyOf>
  __device__ Chosen choose(const Route& route, KeyOf key_of) const {
    Key mine[2];
    largest(route.top_k, key_of, mine);
    const float max = __shfl_sync(kAllLanes, mine[0].value(), 0);
    Chosen c{};
    float sum = 0.0f;  // in stored order, as src/cpu adds
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int left = min(route.top_k - i * kWarp, kWarp);
      if (left <= 0) break;
      c.expert[i] = mine[i].expert();
      c.score[i] = lane_id() < left ? mine[i].value() : max;  // a NaN takes the slow path
      if (route.over_top_k) c.score[i] = math::softmax_term(c.score[i], max);
      if (!route.normalised) continue;
#pragma unroll 4
      for (int k = 0; k < left; ++k) sum = math::add(sum, __shfl_sync(kAllLanes, c.score[i], k));
    }
    if (route.normalised) c.score[0] = math::div(c.score[0], sum);
    if (route.normalised && route.top_k > kWarp) c.score[1] = math::div(c.score[1], sum);
    return c;
  }
};

/// The largest E and K that WarpRow takes.
inline constexpr std::int64_t kWarpRowExperts = 1024;
inline constexpr std::int64_t kWarpRowTopK = 64;

inline bool fits_warp_row(std::int64_t experts, std::int64_t top_k) {
  return experts <= kWarpRowExperts && top_k <= kWarpRowTopK;
}

/// Blocks of four warps that a multiprocessor should hold, for __launch_bounds__. They bound a
/// thread's registers, which hold keys and probabilities.
constexpr int row_blocks(int per_lane) { return per_lane <= 8 ? 6 : per_lane <= 16 ? 5 : 3; }

/// Calls f with the kPerLane of the smallest WarpRow that holds a row, as an integral constant.
template <class F>
Status visit_row_size(std::int64_t experts, F&& f) {
  using std::integral_constant;
  if (experts <= 64) return f(integral_constant<int, 2>{});
  if (experts <= 128) return f(integral_constant<int, 4>{});
  if (experts <= 256) return f(integral_constant<int, 8>{});
  if (experts <= 512) return f(integral_constant<int, 16>{});
  return f(integral_constant<int, 32>{});
}

inline constexpr int kSlowThreads = 256;

/// Returns the largest key of a block of kSlowThreads to all its threads, which all call it.
__device__ inline Key64 block_max(Key64 key) {
  __shared__ std::uint64_t of_warp[kSlowThreads / kWarp];
  key = warp_max(key);
  __syncthreads();  // every thread has read of_warp of the call before
  if (lane_id() == 0) of_warp[threadIdx.x / kWarp] = key.bits;
  __syncthreads();  // of_warp is complete
  for (int w = 0; w < kSlowThreads / kWarp; ++w) {
    if (of_warp[w] > key.bits) key.bits = of_warp[w];
  }
  return key;
}

/// Routes a token with any E and K by K passes over its row. Each pass finds the largest key below
/// the one before. All threads of a block of kSlowThreads call it. It writes the K scores and ids,
/// which the whole block may read afterwards.
template <class T>
__device__ void route_slowly(const Route& route, const T* logits, const RowSoftmax& softmax,
                             float* scores, std::int32_t* ids) {
  Key64 last{~std::uint64_t{0}};
  float sum = 0.0f;
  for (int k = 0; k < route.top_k; ++k) {
    Key64 best;
    for (std::int64_t e = threadIdx.x; e < route.experts; e += kSlowThreads) {
      const float x = to_float(logits[e]);
      const Key64 key = Key64::of(route.over_top_k ? x : softmax.probability(x), e);
      if (key.bits < last.bits && key.bits > best.bits) best = key;
    }
    last = block_max(best);
    if (threadIdx.x == 0) {
      const float value = last.value();
      const float score = route.over_top_k ? softmax.term(value) : value;
      sum = math::add(sum, score);
      scores[k] = score;
      ids[k] = last.expert();
    }
  }
  if (route.normalised && threadIdx.x == 0) {
    for (int k = 0; k < route.top_k; ++k) scores[k] = math::div(scores[k], sum);
  }
  __syncthreads();  // every thread sees the scores and ids that thread 0 wrote
}

}  // namespace sonicmoe::cuda
