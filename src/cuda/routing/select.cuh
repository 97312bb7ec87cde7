#pragma once

#include <type_traits>

#include "cuda/routing/routing.cuh"

/// A token's K experts: larger value first, ties to the lower expert id; and their scores.
///
/// A value and its expert travel as one integer key, [bits that ascend with the value | ~expert],
/// so the largest key is the next expert with ties broken. No bit of the value is lost: a 16-bit
/// logit and an expert below 2^16 fill 32 bits, an fp32 value takes 64. Key 0 means none.
namespace sonicmoe::cuda {

/// What of a descriptor decides a token's experts and scores.
struct Route {
  std::int64_t experts;
  int top_k;
  bool over_top_k;  ///< softmax over the top-K; else top-K over the softmax
  bool normalised;  ///< the K values are divided by their sum

  template <class Desc>
  static Route of(const Desc& d) {
    const bool over_top_k = d.mode == RouterMode::softmax_over_topk;
    return {d.experts, static_cast<int>(d.top_k), over_top_k, over_top_k || d.norm_topk_probs};
  }
};

template <class T>
__device__ __forceinline__ unsigned raw_bits(T x) {
  if constexpr (std::is_same_v<T, __half>) return __half_as_ushort(x);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __bfloat16_as_ushort(x);
}
template <class T>
__device__ __forceinline__ T from_raw_bits(unsigned bits) {
  const unsigned short u = static_cast<unsigned short>(bits);
  if constexpr (std::is_same_v<T, __half>) return __ushort_as_half(u);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __ushort_as_bfloat16(u);
}

template <class T>
struct Key32 {  // of a 16-bit logit
  std::uint32_t bits = 0;

  static __device__ Key32 of(T x, std::int64_t expert) {
    const float value = to_float(x);
    const unsigned raw = value == 0.0f ? 0u : raw_bits(x);  // -0 is +0
    const unsigned ordered = value != value ? 1u : raw ^ (raw >> 15 ? 0xffffu : 0x8000u);
    return {ordered << 16 | (0xffffu - static_cast<unsigned>(expert))};
  }
  __device__ float value() const {
    const unsigned ordered = bits >> 16;
    return to_float(from_raw_bits<T>(ordered ^ (ordered >> 15 ? 0x8000u : 0xffffu)));
  }
  __device__ std::int32_t expert() const {
    return static_cast<std::int32_t>(0xffffu - (bits & 0xffffu));
  }
};

struct Key64 {  // of a value in fp32
  std::uint64_t bits = 0;

  static __device__ Key64 of(float x, std::int64_t expert) {
    return {std::uint64_t{order_bits(x)} << 32 | (0xffffffffu - static_cast<unsigned>(expert))};
  }
  __device__ float value() const { return from_order_bits(static_cast<std::uint32_t>(bits >> 32)); }
  __device__ std::int32_t expert() const {
    return static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(bits));
  }
};

template <class T>
__device__ __forceinline__ Key32<T> warp_max(Key32<T> key) {
  return {__reduce_max_sync(kAllLanes, key.bits)};
}
__device__ __forceinline__ Key64 warp_max(Key64 key) {
  const std::uint32_t high = static_cast<std::uint32_t>(key.bits >> 32);
  const std::uint32_t top = __reduce_max_sync(kAllLanes, high);
  const std::uint32_t low = high == top ? static_cast<std::uint32_t>(key.bits) : 0u;
  return {std::uint64_t{top} << 32 | __reduce_max_sync(kAllLanes, low)};
}

/// A lane's keys as kGroups lists of kDepth, each in descending order, so that the largest is the
/// head of a list and taking it shifts that list alone.
template <class Key, int kGroups, int kDepth>
struct LaneKeys {
  Key key[kGroups * kDepth];

  __device__ void sort() {
    static_assert(kDepth == 1 || kDepth == 2 || kDepth == 4);
#pragma unroll
    for (int g = 0; g < kGroups * kDepth; g += kDepth) {
      if constexpr (kDepth == 2) order(g, g + 1);
      if constexpr (kDepth == 4) {
        order(g, g + 1), order(g + 2, g + 3), order(g, g + 2), order(g + 1, g + 3);
        order(g + 1, g + 2);
      }
    }
  }

  /// The largest key of the warp, which is then gone.
  __device__ Key take() {
    Key best = key[0];
#pragma unroll
    for (int g = 1; g < kGroups; ++g) {
      if (key[g * kDepth].bits > best.bits) best = key[g * kDepth];
    }
    best = warp_max(best);
#pragma unroll
    for (int g = 0; g < kGroups * kDepth; g += kDepth) {
      if (key[g].bits == best.bits) {
#pragma unroll
        for (int i = 0; i + 1 < kDepth; ++i) key[g + i] = key[g + i + 1];
        key[g + kDepth - 1] = Key{};
      }
    }
    return best;
  }

 private:
  __device__ void order(int a, int b) {
    const bool swap = key[a].bits < key[b].bits;
    const Key larger = swap ? key[b] : key[a];
    key[b] = swap ? key[a] : key[b];
    key[a] = larger;
  }
};

/// Entries k = lane and k = lane + 32 of a token's K, one token per warp.
struct Chosen {
  std::int32_t expert[2];
  float score[2];
};

/// A token's logits in a warp: lane l holds experts l, l + 32, ... For at most 32 * kGroups *
/// kDepth experts and 64 entries.
template <class T, int kGroups, int kDepth>
struct WarpRow {
  static constexpr int kPerLane = kGroups * kDepth;
  T logit[kPerLane];
  std::int64_t experts;

  __device__ WarpRow(const T* logits, std::int64_t count) : experts(count) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      logit[j] = has(j) ? logits[expert(j)] : from_float<T>(0.0f);
    }
  }
  __device__ std::int64_t expert(int j) const { return j * kWarp + lane_id(); }
  __device__ bool has(int j) const { return expert(j) < experts; }

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

  /// The softmax over all experts, in the bits of src/cpu: see math::lane_sum32.
  __device__ void probabilities(float (&p)[kPerLane]) const {
    const float largest = max();
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      p[j] = has(j) ? math::softmax_term(to_float(logit[j]), largest) : 0.0f;
      sum = math::add(sum, p[j]);
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) p[j] = math::div(p[j], sum);
  }

  /// Entries of softmax over the top-K.
  __device__ Chosen choose_by_logit(const Route& route) const {
    using Key = std::conditional_t<sizeof(T) == 2, Key32<T>, Key64>;
    LaneKeys<Key, kGroups, kDepth> keys;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (has(j)) keys.key[j] = Key::of(logit[j], expert(j));
    }
    return choose(keys, route);
  }
  /// Entries of top-K over the softmax.
  __device__ Chosen choose_by_probability(const Route& route, const float (&p)[kPerLane]) const {
    LaneKeys<Key64, kGroups, kDepth> keys;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (has(j)) keys.key[j] = Key64::of(p[j], expert(j));
    }
    return choose(keys, route);
  }

 private:
  template <class Keys>
  static __device__ Chosen choose(Keys& keys, const Route& route) {
    keys.sort();
    decltype(keys.take()) mine[2];
    float max = 0.0f;
    for (int k = 0; k < route.top_k; ++k) {
      const auto best = keys.take();
      if (k == 0) max = best.value();
      if (k == lane_id()) mine[0] = best;
      if (k == lane_id() + kWarp) mine[1] = best;
    }
    Chosen c;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      c.expert[i] = mine[i].expert();
      c.score[i] = mine[i].value();
      if (route.over_top_k) c.score[i] = math::softmax_term(c.score[i], max);
    }
    if (!route.normalised) return c;
    float sum = 0.0f;  // in stored order
    for (int k = 0; k < route.top_k; ++k) {
      sum = math::add(sum, __shfl_sync(kAllLanes, k < kWarp ? c.score[0] : c.score[1], k % kWarp));
    }
    c.score[0] = math::div(c.score[0], sum);
    c.score[1] = math::div(c.score[1], sum);
    return c;
  }
};

/// Largest sizes that WarpRow takes.
inline constexpr std::int64_t kWarpRowExperts = 1024;
inline constexpr std::int64_t kWarpRowTopK = 64;

inline bool fits_warp_row(std::int64_t experts, std::int64_t top_k) {
  return experts <= kWarpRowExperts && top_k <= kWarpRowTopK;
}

/// f(Groups, Depth) as integral constants, for the smallest WarpRow that holds a row.
template <class F>
Status visit_row_size(std::int64_t experts, F&& f) {
  using std::integral_constant;
  if (experts <= 64) return f(integral_constant<int, 1>{}, integral_constant<int, 2>{});
  if (experts <= 128) return f(integral_constant<int, 1>{}, integral_constant<int, 4>{});
  if (experts <= 256) return f(integral_constant<int, 2>{}, integral_constant<int, 4>{});
  if (experts <= 512) return f(integral_constant<int, 4>{}, integral_constant<int, 4>{});
  return f(integral_constant<int, 8>{}, integral_constant<int, 4>{});
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
/// largest key below the last. `probability_of(e)` is asked in the mode that ranks probabilities.
/// Writes scores and ids; returns the last key taken, so that an expert is among the K if its key
/// is not below it. The whole block calls it.
template <class T>
__device__ Key64 route_slowly(const Route& route, const T* logits, const RowSoftmax& softmax,
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
  return last;
}

}  // namespace sonicmoe::cuda
