// top_few_scored: the usual cases of top_k_scored.cu, and the softmax over all experts, for at most
// 8 entries. As in top_few (top_k.cu) several tokens share a warp.
//
// A token's lanes make the values of all experts and sort them without ids, so a key is one
// register. The K-th largest value then says which experts are chosen. They go to shared memory,
// and a lane each (or two) weighs them.
#include <limits>

#include "cuda/device/fragment.cuh"
#include "cuda/routing/few.cuh"
#include "cuda/routing/quick_score.h"
#include "cuda/routing/scored_route.cuh"
#include "cuda/routing/top_few_scored.h"

namespace sonicmoe::cuda {
namespace {

/// What chooses, before the bias.
enum class By { logit, softmax, sigmoid, sqrt_softplus };

By chooser(const TopKDesc& d) {
  if (d.order == RouterOrder::select_then_score) return By::logit;
  if (d.score == RouterScore::softmax) return By::softmax;
  return d.score == RouterScore::sigmoid ? By::sigmoid : By::sqrt_softplus;
}

constexpr int kMostGroups = 32;

/// Experts lie in blocks of 32, and four lanes, the columns, hold eight of each block. Column c has
/// the residues 8c .. 8c + 7 of math::lane_sum32. The kLanes / 4 rows of lanes hold kChunks
/// neighbouring blocks each.
constexpr int kBlock = 32;
constexpr int kColumns = 4;

template <int kLanes_, int kPerLane_>
struct Layout {
  static constexpr int kLanes = kLanes_, kPerLane = kPerLane_;
  static constexpr int kExperts = kLanes * kPerLane;
  static constexpr int kChunks = kPerLane / 8;
  static constexpr int kRows = kLanes / kColumns;
  static constexpr int kThreads = kCounted * kLanes;  // of a block
  static_assert(kExperts <= kThreads);
  static constexpr int kEntries = (kFew + kLanes - 1) / kLanes;  // of a lane

  int part = lane_id() % kLanes;
  int column = part % kColumns;
  int row = part / kColumns;
  int first = row * kChunks * kBlock + column * 8;

  __device__ int expert(int i) const { return first + i / 8 * kBlock + i % 8; }
  /// Place of expert e's bias in shared memory. The rows of lanes meet different banks.
  static __device__ int padded(int e) { return e + e / (kChunks * kBlock) * 4; }
};

struct FewArgs {
  const void* logits;
  DType dtype;
  std::int64_t tokens;
  float* scores;
  float* probabilities;  ///< or null
  std::int32_t* ids;
  std::int32_t* error_word;  ///< or null
};

struct alignas(16) Shared {
  std::int32_t count[kFewExperts];
  float bias[kFewExperts + 16];         ///< padded()
  std::uint64_t key[kCounted][kFew];    ///< of the chosen: [value | ~expert]
  float p[kCounted][kFew];              ///< in stored order
  std::int32_t chosen[kCounted][kFew];  ///< in any order
  float group_values[kCounted][kMostGroups + 1];
  bool bad[kCounted];  ///< RowState::bad
};

/// As order_bits(), of a sum that is not -0.
__device__ __forceinline__ std::uint32_t order_bits_of_sum(float x) {
  const std::uint32_t u = math::bits(x);
  return u ^ (static_cast<std::uint32_t>(static_cast<std::int32_t>(u) >> 31) | 0x80000000u);
}

/// Calls f(p) with the logits at element `at` in their type. The type is no template parameter: a
/// branch for each token costs less than kernels for each type.
template <class F>
__device__ __forceinline__ void visit_row(const FewArgs& a, std::int64_t at, F f) {
  switch (a.dtype) {
    case DType::bf16:
      return f(static_cast<const __nv_bfloat16*>(a.logits) + at);
    case DType::f16:
      return f(static_cast<const __half*>(a.logits) + at);
    case DType::f32:
      return f(static_cast<const float*>(a.logits) + at);
  }
}

/// Loads eight logits, 16 bytes at a time.
template <class T>
__device__ __forceinline__ void load_eight(const T* from, float* z) {
  const auto eight = *reinterpret_cast<const Eight<T>*>(from);
#pragma unroll
  for (int i = 0; i < 8; ++i) z[i] = to_float(eight.value[i]);
}
__device__ __forceinline__ void load_eight(const float* from, float* z) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const auto four = *reinterpret_cast<const float4*>(from + i);
    z[i] = four.x, z[i + 1] = four.y, z[i + 2] = four.z, z[i + 3] = four.w;
  }
}

/// Place of token t's logits. All lanes of a warp must take part in its exchanges, so those past
/// the last token take the last token's logits.
template <class L>
__device__ __forceinline__ std::int64_t first_logit(const FewArgs& a, std::int64_t t) {
  return min(t, a.tokens - 1) * L::kExperts;
}

/// Sum of a token's terms in the order of math::lane_sum32, in all its lanes. Each row of lanes
/// goes on with the sums of the row before; only those of the last row are complete.
template <class L>
__device__ __forceinline__ float sum_of_terms(const float (&term)[L::kPerLane]) {
  float sum[8] = {};
#pragma unroll
  for (int row = 0; row < L::kRows; ++row) {
#pragma unroll
    for (int i = 0; i < 8 && row > 0; ++i) {
      sum[i] = __shfl_up_sync(kAllLanes, sum[i], kColumns, L::kLanes);
    }
#pragma unroll
    for (int i = 0; i < L::kPerLane; ++i) sum[i % 8] = math::add(sum[i % 8], term[i]);
  }
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {  // 16 and 8 residues
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum[i] = math::add(sum[i], __shfl_xor_sync(kAllLanes, sum[i], distance));
    }
  }
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) {
#pragma unroll
    for (int i = 0; i < distance; ++i) sum[i] = math::add(sum[i], sum[i + distance]);
  }
  return __shfl_sync(kAllLanes, sum[0], L::kLanes - 1, L::kLanes);
}

/// What chooses: values, or the quotients of terms by their sum. Equal quotients choose alike,
/// whatever their terms.
template <By kBy>
struct Chooser {
  float sum = 0.0f;  ///< of the terms; 0: values choose

  /// The next term, one last bit up or down, if it has the same quotient, else `term`. No third one
  /// has it: divided by the sum, terms lie more than half an ulp of the quotient apart, as the
  /// sum's significand is below 2.
  __device__ __forceinline__ float alike(float term, int bit) const {
    if (kBy != By::softmax || sum == 0.0f) return term;
    const float inverse = refined(sum, math::fast_reciprocal(sum));
    const float next = math::from_bits(math::bits(term) + bit);
    return quotient(next, sum, inverse) == quotient(term, sum, inverse) ? next : term;
  }
};

/// What a token's logits say besides its scores.
struct RowState {
  bool bad;            ///< a NaN or +inf is among them, or a softmax has nothing finite
  bool terms;          ///< By::softmax: scores are left as terms of its sum
  RowSoftmax softmax;  ///< of By::softmax
};

/// As `in` of any lane of the token.
template <class L>
__device__ __forceinline__ bool any_of_token(bool in) {
  const unsigned lanes = (L::kLanes == kWarp ? 0u : 1u << L::kLanes % kWarp) - 1u;
  return (__ballot_sync(kAllLanes, in) >> lane_id() / L::kLanes * L::kLanes & lanes) != 0;
}

template <By kBy>
__device__ __forceinline__ float quick_score(float z) {
  if constexpr (kBy == By::sigmoid) return quick_sigmoid(z);
  if constexpr (kBy == By::sqrt_softplus) return quick_sqrt_softplus(z);
  return z;
}
template <By kBy>
__device__ __forceinline__ float any_score(float z) {
  if constexpr (kBy == By::sigmoid) return any_sigmoid(z);
  if constexpr (kBy == By::sqrt_softplus) return any_sqrt_softplus(z);
  return z;
}

/// Replaces each value by f of it. A loop, for f is long: two values leave the front each turn, and
/// their results join the end.
template <int kValues, class F>
__device__ __forceinline__ void replace_each(float (&value)[kValues], F f) {
  constexpr int kTurn = 2, kRest = kValues - kTurn;
#pragma unroll 1
  for (int turn = 0; turn < kValues / kTurn; ++turn) {
    float result[kTurn];
#pragma unroll
    for (int i = 0; i < kTurn; ++i) result[i] = f(value[i]);
#pragma unroll
    for (int i = 0; i < kRest; ++i) value[i] = value[i + kTurn];
#pragma unroll
    for (int i = 0; i < kTurn; ++i) value[kRest + i] = result[i];
  }
}

/// Turns a lane's logits into scores, in the bits of math::router_score and RowSoftmax. A bad logit
/// scores 0, so that no NaN is left. With a softmax its whole row does. Where nothing but the order
/// of its scores counts, a softmax is left without its division.
template <By kBy, class L>
__device__ __forceinline__ RowState score_all(const ScoredRoute& route, float (&z)[L::kPerLane]) {
  RowState row{};
  if constexpr (kBy == By::softmax) {
    float largest = z[0], least = z[0];  // or a NaN, if there is one
#pragma unroll
    for (int i = 1; i < L::kPerLane; ++i) {
      largest = math::at_least(largest, z[i]);
      least = math::at_most(least, z[i]);
    }
#pragma unroll
    for (int distance = 1; distance < L::kLanes; distance *= 2) {
      largest = math::at_least(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    row.bad = !(largest < INFINITY) || largest == -INFINITY;
    const bool quick = __all_sync(kAllLanes, math::sub(largest, least) <= kQuickRange);
    if (quick) {
#pragma unroll
      for (int i = 0; i < L::kPerLane; ++i) z[i] = quick_exp(math::sub(z[i], largest));
    } else {
      replace_each(z, [&](float logit) { return exp_of_negative(math::sub(logit, largest)); });
    }
    const float sum = sum_of_terms<L>(z);
    if (quick) {
      row.terms = route.groups == 1 && route.selection_bias == nullptr;
      if (!row.terms) {
        const float inverse = refined(sum, math::fast_reciprocal(sum));
#pragma unroll
        for (int i = 0; i < L::kPerLane; ++i) z[i] = quotient(z[i], sum, inverse);
      }
    } else {
      replace_each(z, [&](float term) { return row.bad ? 0.0f : math::div(term, sum); });
    }
    row.softmax = {largest, sum};
  } else {
    constexpr bool kLogits = kBy == By::logit;
    float largest = kLogits ? z[0] : fabsf(z[0]);  // or a NaN
#pragma unroll
    for (int i = 1; i < L::kPerLane; ++i) {
      largest = math::at_least(largest, kLogits ? z[i] : fabsf(z[i]));
    }
    if (__all_sync(kAllLanes, largest < (kLogits ? INFINITY : kFarLogit))) {
#pragma unroll
      for (int i = 0; i < L::kPerLane; ++i) z[i] = quick_score<kBy>(z[i]);
    } else {
      bool wrong = false;
      replace_each(z, [&](float logit) {
        const bool good = logit < INFINITY;
        wrong |= !good;
        return good ? any_score<kBy>(logit) : 0.0f;
      });
      row.bad = any_of_token<L>(wrong);
    }
    if (kLogits && route.softmax()) {  // a row of -inf is bad, too
      row.bad |= !any_of_token<L>(largest > -INFINITY);
    }
  }
  return row;
}

/// The two largest of some values.
struct TwoLargest {
  float first, second;

  __device__ __forceinline__ void add(float other_first, float other_second) {
    second = fmaxf(fminf(first, other_first), fmaxf(second, other_second));
    first = fmaxf(first, other_first);
  }
};

/// Decides which groups stay where equal ones compete for the last places: the lower groups do.
/// group[q] is the value of the group of the lane's chunk q, and stay[q] the decision.
template <class L>
__device__ __forceinline__ void drop_tied_groups(const L& own, const ScoredRoute& route,
                                                 int columns, const float (&group)[L::kChunks],
                                                 float* group_values, bool (&stay)[L::kChunks]) {
  const int shift = 31 - __clz(route.group_size);
  if (own.column % columns == 0) {
#pragma unroll
    for (int q = 0; q < L::kChunks; ++q) group_values[own.expert(8 * q) >> shift] = group[q];
  }
  __syncwarp();  // all groups have their value
#pragma unroll
  for (int q = 0; q < L::kChunks; ++q) {
    const int g = own.expert(8 * q) >> shift;
    int better = 0;
#pragma unroll 1
    for (int other = 0; other < route.groups; ++other) {
      const float theirs = group_values[other];
      better += theirs > group[q] || (theirs == group[q] && other < g);
    }
    stay[q] = better < route.kept_groups;
  }
}

/// Sets the values of experts whose group does not stay to -inf. Returns a bit for each of the
/// others. group_values is the token's. A value of +inf becomes a NaN, which meets -inf and other
/// NaNs alone until all values of its chunk are sorted, and then loses against every number.
template <class L>
__device__ __forceinline__ unsigned drop_groups(const L& own, const ScoredRoute& route,
                                                float* group_values, float (&value)[L::kPerLane]) {
  constexpr int kChunks = L::kChunks;
  TwoLargest two[kChunks];
#pragma unroll
  for (int q = 0; q < kChunks; ++q) {
    const float* const v = value + 8 * q;
    two[q] = {fmaxf(v[0], v[1]), fminf(v[0], v[1])};
#pragma unroll
    for (int i = 2; i < 8; i += 2) two[q].add(fmaxf(v[i], v[i + 1]), fminf(v[i], v[i + 1]));
  }
  const int columns = min(kColumns, route.group_size / 8);  // of a group
#pragma unroll
  for (int distance = 1; distance < kColumns; distance *= 2) {
    if (distance >= columns) break;
#pragma unroll
    for (int q = 0; q < kChunks; ++q) {
      const float first = __shfl_xor_sync(kAllLanes, two[q].first, distance);
      const float second = __shfl_xor_sync(kAllLanes, two[q].second, distance);
      two[q].add(first, second);
    }
  }
  const bool pairs = route.group_size > kBlock;  // of chunks, which are a group
  float group[kChunks];                          // the values of the chunks' groups
#pragma unroll
  for (int q = 0; q < kChunks; q += 2) {
    if (pairs) {
      two[q].add(two[q + 1].first, two[q + 1].second);
      two[q + 1] = two[q];
    }
  }
#pragma unroll
  for (int q = 0; q < kChunks; ++q) {
    group[q] = two[q].first;
    if (route.two) group[q] = math::add(group[q], two[q].second);
  }
  // How many groups are better than that of chunk q: as floats, which add up in other units than
  // those that compare. Lanes at multiples of `columns` have the others.
  float better[kChunks] = {};
  const float odd = pairs ? 0.0f : 1.0f;  // counted with the chunk before it
  const auto compare = [&](const float(&theirs)[kChunks]) {
#pragma unroll
    for (int other = 0; other < kChunks; ++other) {
#pragma unroll
      for (int q = 0; q < kChunks; ++q) {
        if (theirs[other] > group[q]) better[q] += other % 2 == 1 ? odd : 1.0f;
      }
    }
  };
  compare(group);
#pragma unroll 1
  for (int distance = columns; distance < L::kLanes; distance += columns) {
    float theirs[kChunks];
#pragma unroll
    for (int q = 0; q < kChunks; ++q) {
      theirs[q] = __shfl_xor_sync(kAllLanes, group[q], distance);
    }
    compare(theirs);
  }
  bool stay[kChunks];
  int staying = 0;
#pragma unroll
  for (int q = 0; q < kChunks; ++q) {
    stay[q] = better[q] < static_cast<float>(route.kept_groups);
    staying += stay[q] && !(q % 2 == 1 && pairs);
  }
#pragma unroll 1
  for (int distance = columns; distance < L::kLanes; distance *= 2) {
    staying += __shfl_xor_sync(kAllLanes, staying, distance);
  }
  if (__any_sync(kAllLanes, staying != route.kept_groups)) {
    drop_tied_groups(own, route, columns, group, group_values, stay);
  }
  unsigned stays = 0;
#pragma unroll
  for (int q = 0; q < kChunks; ++q) {
    if (stay[q]) stays |= 0xffu << 8 * q;
    const float penalty = stay[q] ? 0.0f : -INFINITY;
#pragma unroll
    for (int i = 8 * q; i < 8 * q + 8; ++i) value[i] = math::add(value[i], penalty);
  }
  return stays;
}

/// Of the experts that a token's lanes mark by bits, the `left` with the lowest ids.
template <class L>
__device__ unsigned lowest_marked(const L& own, unsigned marked, int left) {
  // Byte q counts marks in chunk q.
  std::uint32_t mine = 0;
#pragma unroll
  for (int q = 0; q < L::kChunks; ++q) {
    mine |= static_cast<std::uint32_t>(__popc(marked & 0xffu << 8 * q)) << 8 * q;
  }
  std::uint32_t upto = mine;  // of the columns up to this one
#pragma unroll
  for (int distance = 1; distance < kColumns; distance *= 2) {
    const std::uint32_t before = __shfl_up_sync(kAllLanes, upto, distance, kColumns);
    if (own.column >= distance) upto += before;
  }
  const std::uint32_t of_row = __shfl_sync(kAllLanes, upto, kColumns - 1, kColumns);
  const auto total = static_cast<int>(of_row * 0x01010101u >> 24);  // at most 128
#pragma unroll
  for (int row = 0; row + 1 < L::kRows; ++row) {
    const int theirs = __shfl_sync(kAllLanes, total, row * kColumns, L::kLanes);
    if (row < own.row) left -= theirs;
  }
  unsigned kept = 0;
#pragma unroll
  for (int q = 0; q < L::kChunks; ++q) {
    unsigned chunk = marked >> 8 * q & 0xff;
    const int stay = left - static_cast<int>((upto - mine) >> 8 * q & 0xff);
    if (stay <= 0) chunk = 0;
    while (__popc(chunk) > stay && chunk != 0) chunk ^= 1u << (31 - __clz(chunk));
    kept |= chunk << 8 * q;
    left -= static_cast<int>(of_row >> 8 * q & 0xff);
  }
  return kept;
}

/// How many marks the lanes of a token have up to this lane.
template <class L>
__device__ __forceinline__ int marks_upto(const L& own, unsigned marked) {
  int upto = __popc(marked);
#pragma unroll
  for (int distance = 1; distance < L::kLanes; distance *= 2) {
    const int before = __shfl_up_sync(kAllLanes, upto, distance, L::kLanes);
    if (own.part >= distance) upto += before;
  }
  return upto;
}

/// Marks the K largest values of a token, ties to the lower expert id, and stores their experts.
/// Takes none but experts whose bit is in `stays`. Values that `chooser` finds alike are equal.
template <By kBy, class L>
__device__ __forceinline__ void choose(const L& own, int top_k, const float (&value)[L::kPerLane],
                                       const Chooser<kBy>& chooser, unsigned stays,
                                       std::int32_t* chosen) {
  float best[kFew];
  few_largest<L::kLanes, L::kPerLane>([&](int i) { return value[i]; }, best, top_k < kFew);
  float last = best[0];
  if (top_k < kFew) {
#pragma unroll
    for (int k = 1; k < kFew; ++k) last = k < top_k ? best[k] : last;
  } else {
#pragma unroll
    for (int k = 1; k < kFew; ++k) last = fminf(last, best[k]);
  }
  const float least = chooser.alike(last, -1);
  // Bits are added up as floats, 16 at a time, in other units than those that compare.
  unsigned marked = 0;
#pragma unroll
  for (int half = 0; half < L::kPerLane / 16; ++half) {
    float bits = 0x1p23f;  // then its low bits are an integer
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (value[16 * half + i] >= least) bits += static_cast<float>(1 << i);
    }
    marked |= (math::bits(bits) & 0xffffu) << 16 * half;
  }
  marked &= stays;
  int upto = marks_upto(own, marked);
  const int all = __shfl_sync(kAllLanes, upto, L::kLanes - 1, L::kLanes);
  if (__any_sync(kAllLanes, all != top_k)) {  // more experts have the K-th value
    const float most = chooser.alike(last, 1);
    int left = top_k;
#pragma unroll
    for (int k = 0; k < kFew; ++k) left -= best[k] > most;
    unsigned tied = 0;
#pragma unroll
    for (int i = 0; i < L::kPerLane; ++i) {
      if (value[i] <= most) tied |= 1u << i;
    }
    tied &= marked;
    marked = (marked & ~tied) | lowest_marked(own, tied, left);
    upto = marks_upto(own, marked);
  }
  std::int32_t* to = chosen + upto - __popc(marked);
  for (; marked != 0; marked &= marked - 1) *to++ = own.expert(__ffs(marked) - 1);
}

/// The score of a chosen expert, and what chose it before the bias.
struct Scored {
  float p, v;
};
template <By kBy>
__device__ __forceinline__ Scored score_of(const ScoredRoute& route, float z,
                                           const RowSoftmax& softmax) {
  if constexpr (kBy == By::logit) {
    return {route.softmax() ? z : math::router_score(route.score, z), z};
  } else if constexpr (kBy == By::softmax) {
    const float p = softmax.probability(z);
    return {p, p};
  } else {
    const bool quick = __all_sync(kAllLanes, fabsf(z) < kFarLogit);
    const float p = quick ? quick_score<kBy>(z) : any_score<kBy>(z);
    return {p, p};
  }
}

/// The token that is the block's number `token`.
__device__ __forceinline__ std::int64_t token_id(int token) {
  return std::int64_t{blockIdx.x} * kCounted + token;
}

/// Routes the block's number `token`, with the logits of the lane's experts. count[e] grows by one
/// for each expert e that it chooses.
template <By kBy, class L>
__device__ __forceinline__ void route_few(const L& own, const FewArgs& a, const ScoredRoute& route,
                                          float (&z)[L::kPerLane], int token, Shared* shared) {
  const RowState row = score_all<kBy, L>(route, z);
  if (row.bad && own.part == 0) report(a.error_word, kBadLogits);
  shared->bad[token] = row.bad;
  if (kBy == By::logit || route.selection_bias != nullptr) {
#pragma unroll
    for (int i = 0; i < L::kPerLane; i += 4) {
      const auto bias = *reinterpret_cast<const float4*>(shared->bias + L::padded(own.first) +
                                                         i / 8 * kBlock + i % 8);
      z[i] = math::add(z[i], bias.x);
      z[i + 1] = math::add(z[i + 1], bias.y);
      z[i + 2] = math::add(z[i + 2], bias.z);
      z[i + 3] = math::add(z[i + 3], bias.w);
    }
  }
  unsigned stays = ~0u;
  if (route.groups > 1) stays = drop_groups(own, route, shared->group_values[token], z);
  std::int32_t* const chosen = shared->chosen[token];
  choose(own, route.top_k, z, Chooser<kBy>{row.terms ? row.softmax.sum : 0.0f}, stays, chosen);
  __syncwarp();  // all chosen are stored

  const std::int64_t t = token_id(here(token));
  // Lane k modulo kLanes weighs the chosen number k, and stores it at its rank. Lanes without one
  // compute with the first.
  std::int32_t e[L::kEntries];
  float p[L::kEntries], x[L::kEntries];
  std::uint64_t key[L::kEntries];
#pragma unroll
  for (int i = 0; i < L::kEntries; ++i) {
    const int k = i * L::kLanes + own.part;
    e[i] = chosen[k < route.top_k ? k : 0];
    visit_row(a, first_logit<L>(a, t) + e[i], [&](const auto* from) { x[i] = to_float(*from); });
    if (shared->bad[token]) x[i] = NAN;  // makes NaNs of all scores
  }
#pragma unroll
  for (int i = 0; i < L::kEntries; ++i) {
    const int k = i * L::kLanes + own.part;
    const Scored scored = score_of<kBy>(route, x[i], row.softmax);
    p[i] = scored.p;
    const float v = math::add(scored.v, shared->bias[L::padded(e[i])]);
    key[i] = std::uint64_t{order_bits_of_sum(v)} << 32 | ~static_cast<std::uint32_t>(e[i]);
    if (k < kFew) shared->key[token][k] = k < route.top_k ? key[i] : 0;
  }
  if (kBy == By::logit && route.over_top_k) {
    float most = p[0];
#pragma unroll
    for (int i = 1; i < L::kEntries; ++i) most = fmaxf(most, p[i]);
#pragma unroll
    for (int distance = 1; distance < L::kLanes; distance *= 2) {
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, distance));
    }
#pragma unroll
    for (int i = 0; i < L::kEntries; ++i) p[i] = math::softmax_term(p[i], most);
  }
  __syncwarp();  // all keys are stored
  int rank[L::kEntries] = {};
#pragma unroll
  for (int other = 0; other < kFew; other += 2) {
    const auto two = *reinterpret_cast<const ulonglong2*>(&shared->key[token][other]);
#pragma unroll
    for (int i = 0; i < L::kEntries; ++i) rank[i] += (two.x > key[i]) + (two.y > key[i]);
  }
#pragma unroll
  for (int i = 0; i < L::kEntries; ++i) {
    const int k = i * L::kLanes + own.part;
    if (k >= route.top_k) rank[i] = k;
    if (k < kFew) shared->p[token][rank[i]] = k < route.top_k ? p[i] : 0.0f;
  }
  __syncwarp();      // p is stored
  float sum = 0.0f;  // in stored order, as src/cpu adds; entries from K on are zeros
#pragma unroll
  for (int k = 0; k < kFew; k += 4) {
    const auto four = *reinterpret_cast<const float4*>(&shared->p[token][k]);
    sum = math::add(math::add(math::add(math::add(sum, four.x), four.y), four.z), four.w);
  }
  if (t >= a.tokens) return;
  const float divisor = route.weights.divisor(sum);
#pragma unroll
  for (int i = 0; i < L::kEntries; ++i) {
    if (i * L::kLanes + own.part >= route.top_k) break;
    const std::int64_t to = t * route.top_k + rank[i];
    if (kBy == By::logit && route.over_top_k) p[i] = sum == 0.0f ? 0.0f : math::div(p[i], sum);
    if (a.probabilities != nullptr) a.probabilities[to] = p[i];
    const float scale = route.expert_scale == nullptr ? 1.0f : route.expert_scale[e[i]];
    a.scores[to] = route.weights.scaled(route.weights.weight(p[i], divisor), scale);
    a.ids[to] = e[i];
    atomicAdd(&shared->count[e[i]], 1);
  }
}

/// A block takes kCounted tokens. It writes row blockIdx.x of block_counts (null: none).
template <By kBy, class L>
__global__ void __launch_bounds__(L::kThreads, 1024 / L::kThreads)
    top_few_scored(FewArgs args, ScoredRoute route, std::uint8_t* block_counts,
                   std::int32_t stride) {
  __shared__ Shared shared;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < L::kExperts) shared.count[thread] = 0;
  const L own;
  const int token = thread / L::kLanes;
  wait_for_previous();
  const bool has_bias = thread < L::kExperts && route.selection_bias != nullptr;
  const float bias = has_bias ? route.selection_bias[thread] : 0.0f;
  float z[L::kPerLane];
  visit_row(args, first_logit<L>(args, token_id(token)) + own.first, [&](const auto* from) {
#pragma unroll
    for (int q = 0; q < L::kChunks; ++q) load_eight(from + q * kBlock, z + 8 * q);
  });
  // Sorts take no NaN: neither one of the caller's, nor that of a logit of -inf plus +inf.
  constexpr float kMost = kBy == By::logit ? std::numeric_limits<float>::max() : INFINITY;
  // Plus 0, so that no sum with it is -0.
  if (thread < L::kExperts) shared.bias[L::padded(thread)] = math::add(fminf(bias, kMost), 0.0f);
  __syncthreads();  // count[] is 0 and bias[] is complete
  route_few<kBy>(own, args, route, z, token, &shared);
  if (block_counts == nullptr) return;
  __syncthreads();  // all tokens are counted
  store_counts<L::kThreads>(shared.count, block_counts, stride);
}

}  // namespace

bool fits_top_few_scored(const TopKDesc& d) {
  if (d.takes_ids() || d.top_k < 1 || d.top_k > kFew) return false;
  if (d.experts != 64 && d.experts != 128 && d.experts != 256 && d.experts != 512) return false;
  // Of 16 bits, top_few chooses by logits alone in less time.
  if (d.plain()) return !d.over_top_k() || d.dtype == DType::f32;
  const std::int64_t of_group = d.experts / d.groups;
  return d.groups == 1 ||
         (d.groups <= kMostGroups && (of_group == 16 || of_group == 32 || of_group == 64));
}

Status run_top_few_scored(const TopKDesc& d, const TopKArgs& a, std::uint8_t* block_counts,
                          std::int32_t stride, const Exec& exec) {
  const ScoredRoute route = ScoredRoute::of(d, a);
  const FewArgs args{.logits = a.logits,
                     .dtype = d.dtype,
                     .tokens = d.tokens,
                     .scores = a.scores,
                     .probabilities = d.keeps_probabilities() ? a.probabilities : nullptr,
                     .ids = a.ids,
                     .error_word = a.error_word};
  const auto start = [&]<class L>(L*) {
    const auto with = [&](auto kernel) {
      launch_early(kernel, blocks_for(d.tokens, kCounted), L::kThreads, 0, exec, args, route,
                   block_counts, stride);
      return launched("top_k: launch");
    };
    switch (chooser(d)) {
      case By::softmax:
        return with(top_few_scored<By::softmax, L>);
      case By::sigmoid:
        return with(top_few_scored<By::sigmoid, L>);
      case By::sqrt_softplus:
        return with(top_few_scored<By::sqrt_softplus, L>);
      case By::logit:
        break;
    }
    return with(top_few_scored<By::logit, L>);
  };
  switch (d.experts) {
    case 64:
      return start(static_cast<Layout<4, 16>*>(nullptr));
    case 128:
      return start(static_cast<Layout<4, 32>*>(nullptr));
    case 256:
      return start(static_cast<Layout<8, 32>*>(nullptr));
    default:
      return start(static_cast<Layout<16, 32>*>(nullptr));
  }
}

}  // namespace sonicmoe::cuda
