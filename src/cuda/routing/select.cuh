#pragma once

#include <type_traits>

#include "cuda/routing/routing.cuh"

/// A token's K experts: larger value first, ties to the lower expert id; and their scores.
///
/// A value and its expert travel as one integer key, [bits that ascend with the value | expert,
/// counted down], so the largest key is the next expert with ties broken. No bit of the value is
/// lost: a 16-bit logit fits the upper 19 bits of a float and leaves 13 for the expert, an fp32
/// value takes a 64-bit key. The part of the expert keeps keys from being 0, which means none.
namespace sonicmoe::cuda {

/// What of a descriptor decides a token's experts and scores.
struct Route {
  std::int64_t experts;
  int top_k;
  bool over_top_k;  ///< softmax over the top-K; else top-K over the softmax
  bool normalised;  ///< the K values are divided by their sum

  static Route of(const RouterDesc& d) {
    return {d.experts, static_cast<int>(d.top_k), d.over_top_k(), d.normalised()};
  }
};

struct Key32 {  // of a 16-bit logit, for experts below 2^13
  std::uint32_t bits = 0;

  static __device__ Key32 of(float x, int expert) {
    // bf16 and fp16, subnormal numbers included, have no more than 10 bits of mantissa.
    return {(order_bits(x) & ~kExperts) | (kExperts - static_cast<unsigned>(expert))};
  }
  __device__ float value() const {
    // Below zero all bits are turned, those that were cut off too.
    return from_order_bits(bits >> 31 ? bits & ~kExperts : bits | kExperts);
  }
  __device__ std::int32_t expert() const {
    return static_cast<std::int32_t>(kExperts - (bits & kExperts));
  }

 private:
  static constexpr std::uint32_t kExperts = (1u << 13) - 1;
};

struct Key64 {  // of a value in fp32
  std::uint64_t bits = 0;

  static __device__ Key64 of(float x, std::int64_t expert) {
    return {std::uint64_t{order_bits(x)} << 32 | (kFirst - static_cast<unsigned>(expert))};
  }
  __device__ float value() const { return from_order_bits(static_cast<std::uint32_t>(bits >> 32)); }
  __device__ std::int32_t expert() const {
    return static_cast<std::int32_t>(kFirst - static_cast<std::uint32_t>(bits));
  }

 private:
  // Not all ones: the key of a NaN of expert 0 must lie below the bound that a search begins with,
  // or there would be one key too few where K = E. (Key32 has no bit to spare for that; it is
  // searched with a bound only where E > 128, and K is at most 64 there.)
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

/// The kDepth largest keys of a lane in descending order: with the experts spread over 32 lanes,
/// few tokens need more of one lane, and those build the list again.
template <class Key>
struct LaneKeys {
  static constexpr int kDepth = 4;
  Key key[kDepth];
  bool more = true;  ///< the lane has keys that are not in the list

  /// From key_of(0) .. key_of(kPerLane - 1), those below `bound`.
  template <int kPerLane, class KeyOf>
  __device__ void build(KeyOf key_of, Key bound) {
#pragma unroll
    for (int first = 0; first < kPerLane; first += kDepth) {
      LaneKeys four;
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (first + i < kPerLane) four.key[i] = key_of(first + i);
        if (kPerLane > kDepth && four.key[i].bits >= bound.bits) four.key[i] = Key{};
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

  /// The largest key of the warp, which is then gone.
  __device__ Key take() {
    const Key best = warp_max(key[0]);
    if (key[0].bits == best.bits) {
#pragma unroll
      for (int i = 0; i + 1 < kDepth; ++i) key[i] = key[i + 1];
      key[kDepth - 1] = Key{};
    }
    return best;
  }
  __device__ bool used_up() const { return __any_sync(kAllLanes, more && key[0].bits == 0); }

 private:
  __device__ void order(int a, int b) {
    const bool swap = key[a].bits < key[b].bits;
    const Key larger = swap ? key[b] : key[a];
    key[b] = swap ? key[a] : key[b];
    key[a] = larger;
  }
  /// The largest four of two lists: first of either end, then into order (they rise and fall).
  __device__ void merge(const LaneKeys& other) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const Key theirs = other.key[kDepth - 1 - i];
      if (theirs.bits > key[i].bits) key[i] = theirs;
    }
    order(0, 2), order(1, 3), order(0, 1), order(2, 3);
  }
};

/// Entries k = lane and k = lane + 32 of a token's K, one token per warp.
struct Chosen {
  std::int32_t expert[2];
  float score[2];
};

/// A token's logits in a warp: lane l holds experts l, l + 32, ... For at most 32 * kPerLane
/// experts and 64 entries.
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

  /// True in every lane if the row would be refused: a NaN, or no finite maximum.
  __device__ bool bad() const {
    bool wrong = false;
    bool finite = false;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const float x = to_float(logit[j]);
      wrong |= !(x < INFINITY);
      finite |= has(j) && x > -INFINITY;
    }
    return __any_sync(kAllLanes, wrong) || !__any_sync(kAllLanes, finite);
  }

  __device__ float max() const {
    std::uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (has(j)) largest = ::max(largest, order_bits(to_float(logit[j])));
    }
    return from_order_bits(__reduce_max_sync(kAllLanes, largest));
  }

  /// The softmax over all experts, in the bits of src/cpu: see math::lane_sum32. Meaningless where
  /// !has(j).
  __device__ void probabilities(float (&p)[kPerLane]) const {
    const float largest = max();
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      p[j] = has(j) ? math::softmax_term(to_float(logit[j]), largest) : 0.0f;
      sum = math::add(sum, p[j]);
    }
    sum = warp_sum(sum);
    // A zero would send the whole warp down the slow path of the division.
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) p[j] = math::div(has(j) ? p[j] : sum, sum);
  }

  /// Entries of softmax over the top-K.
  __device__ Chosen choose_by_logit(const Route& route) const {
    using Key = std::conditional_t<sizeof(T) == 2, Key32, Key64>;
    return choose<Key>(route, [&](int j) { return Key::of(to_float(logit[j]), expert(j)); });
  }
  /// Entries of top-K over the softmax.
  __device__ Chosen choose_by_probability(const Route& route, const float (&p)[kPerLane]) const {
    return choose<Key64>(route, [&](int j) { return Key64::of(p[j], expert(j)); });
  }

 private:
  template <class Key, class KeyOf>
  __device__ Chosen choose(const Route& route, KeyOf key_of) const {
    const auto key = [&](int j) { return has(j) ? key_of(j) : Key{}; };
    Key mine[2];
    LaneKeys<Key> keys;
    Key last;
    last.bits = ~last.bits;
    constexpr bool kAll = kPerLane <= keys.kDepth;  // the list holds all keys of a lane
    if constexpr (kAll) keys.template build<kPerLane>(key, last);
    float max = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int left = min(route.top_k - i * kWarp, kWarp);
#pragma unroll(kAll ? 4 : 1)
      for (int k = 0; k < left; ++k) {
        if (!kAll && keys.used_up()) keys.template build<kPerLane>(key, last);
        last = keys.take();
        if (k == lane_id()) mine[i] = last;
      }
      if (i == 0) max = __shfl_sync(kAllLanes, mine[0].value(), 0);
    }
    Chosen c{};
    float sum = 0.0f;  // in stored order
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int left = min(route.top_k - i * kWarp, kWarp);
      if (left <= 0) break;
      c.expert[i] = mine[i].expert();
      c.score[i] = lane_id() < left ? mine[i].value() : max;  // no lane divides by way of a NaN
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

/// Largest sizes that WarpRow takes.
inline constexpr std::int64_t kWarpRowExperts = 1024;
inline constexpr std::int64_t kWarpRowTopK = 64;

inline bool fits_warp_row(std::int64_t experts, std::int64_t top_k) {
  return experts <= kWarpRowExperts && top_k <= kWarpRowTopK;
}

/// Blocks of four warps that a processor should hold: registers for the keys and the probabilities.
constexpr int row_blocks(int per_lane) { return per_lane <= 8 ? 6 : per_lane <= 16 ? 5 : 3; }

/// f(kPerLane) as an integral constant, for the smallest WarpRow that holds a row.
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

/// The largest key of a block of kSlowThreads.
__device__ inline Key64 block_max(Key64 key) {
  __shared__ std::uint64_t of_warp[kSlowThreads / kWarp];
  key = warp_max(key);
  __syncthreads();  // the last result has been read
  if (lane_id() == 0) of_warp[threadIdx.x / kWarp] = key.bits;
  __syncthreads();
  for (int w = 0; w < kSlowThreads / kWarp; ++w) {
    if (of_warp[w] > key.bits) key.bits = of_warp[w];
  }
  return key;
}

/// Any number of experts and entries, a block per token: K passes over the row, each for the
/// largest key below the last. Writes scores and ids, for the whole block to read. The whole block
/// calls it.
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
  __syncthreads();
}

}  // namespace sonicmoe::cuda
