// Every token first chooses its top-K experts (token choice). Then each expert whose count is not a
// multiple of the tile drops its weakest tokens or adds the best others.
// Probabilities lie expert by expert; the sign bit says that token choice routed the token. So the
// block that rounds an expert reads one stretch of memory. Which tokens are routed at the end is
// kept by token, a bit an expert: the few that change flip their bit.
#include "core/backends.h"
#include "cuda/routing/select.cuh"
#include "math/philox.h"
#include "math/rounding.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kWarps = 8;             // of a block that routes, a token each
constexpr int kTokens = 32;           // of a block that writes lists, a warp each
constexpr int kSelectThreads = 1024;  // of the block that rounds an expert
constexpr int kMaxChanging = 1024;    // the largest tile; fewer tokens of an expert change
constexpr int kBlocks = kArch == 80 || kArch == 90 ? 2 : 1;  // that a multiprocessor should hold
constexpr std::uint32_t kRouted = 0x80000000u;

struct Memory {
  std::uint32_t* marked;  // (E, T): bits of the probability, and kRouted if the token chose e
  float* scores;          // (T, K): of token choice
  std::int32_t* ids;      // (T, K)
  std::int32_t* chosen;   // (E): rows before rounding; of the rule balance alone
  std::int32_t* goes_up;  // (E): 1 if the expert rounds up; likewise
  std::uint32_t* words;   // (T, ceil(E/32)): bit e % 32 of word e / 32 is set if e is routed
  std::int32_t* added;  // (blocks): entries that rounding adds to kTokens tokens, less the dropped
  void* check;

  static __host__ __device__ std::int64_t words_per_token(std::int64_t experts) {
    return (experts + 31) / 32;
  }
  static std::int64_t blocks(const TokenRoundingDesc& d) {
    return (d.tokens + kTokens - 1) / kTokens;
  }
  static std::size_t layout(const TokenRoundingDesc& d, void* base, Memory* out) {
    char* const at = static_cast<char*>(base);
    std::size_t end = kCheckBytes;
    const auto take = [&](auto* array, std::int64_t count) {
      if (out != nullptr)
        *array = reinterpret_cast<std::remove_pointer_t<decltype(array)>>(at + end);
      end += 4 * static_cast<std::size_t>(count);
    };
    Memory unused;
    Memory& m = out == nullptr ? unused : *out;
    m.check = base;
    take(&m.marked, d.tokens * d.experts);
    take(&m.scores, d.tokens * d.top_k);
    take(&m.ids, d.tokens * d.top_k);
    take(&m.chosen, d.experts);
    take(&m.goes_up, d.experts);
    take(&m.words, d.tokens * words_per_token(d.experts));
    take(&m.added, blocks(d));
    return end;
  }
};

/// Word lane_id() of the bits of a token's K experts. A warp calls it; E is at most 1024.
__device__ std::uint32_t word_of_lane(const Chosen& chosen, int top_k) {
  std::uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < min(top_k - i * kWarp, kWarp); ++k) {
      const std::int32_t e = __shfl_sync(kAllLanes, chosen.expert[i], k);
      if (e / 32 == lane_id()) word |= 1u << (e % 32);
    }
  }
  return word;
}

/// Token choice, a warp a token. The probabilities of the block's 8 tokens go through shared
/// memory, so that the block writes the 8 of each expert as one sector. kFull: E = 32 kPerLane.
template <class T, int kPerLane, bool kFull>
__global__ void __launch_bounds__(kWarps* kWarp, kPerLane <= 8                   ? 3
                                                 : kPerLane == 32 && kArch != 90 ? 1
                                                                                 : 2)
    choose_tokens(const T* logits, std::int64_t tokens, Route route, Memory m,
                  std::int32_t* error_word) {
  extern __shared__ std::uint32_t marked[];  // (E, kWarps + 1)
  constexpr int kStride = kWarps + 1;        // odd, against bank conflicts
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t first = std::int64_t{blockIdx.x} * kWarps;
  const std::int64_t t = first + warp;
  wait_for_previous();
  if (threadIdx.x == 0 && first % kTokens == 0) m.added[first / kTokens] = 0;
  if (t < tokens) {
    const WarpRow<T, kPerLane, kFull> row(logits + t * route.experts, route.experts);
    float p[kPerLane];
    row.probabilities(p);
    if (error_word != nullptr && lane_id() == 0 && p[0] != p[0]) report(error_word, kBadLogits);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (row.has(j)) marked[row.expert(j) * kStride + warp] = math::bits(p[j]) & ~kRouted;
    }
    const Chosen chosen =
        route.over_top_k ? row.choose_by_logit(route) : row.choose_by_probability(route, p);
    __syncwarp();  // all lanes see the token's probabilities, and may set kRouted
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = lane_id() + i * kWarp;
      if (k >= route.top_k) continue;
      m.scores[t * route.top_k + k] = chosen.score[i];
      m.ids[t * route.top_k + k] = chosen.expert[i];
      marked[chosen.expert[i] * kStride + warp] |= kRouted;
    }
    const std::int64_t words = Memory::words_per_token(route.experts);
    if (const std::uint32_t word = word_of_lane(chosen, route.top_k); lane_id() < words) {
      m.words[t * words + lane_id()] = word;
    }
  }
  __syncthreads();  // all warps' tokens are complete
  const int cells = static_cast<int>(route.experts) * kWarps;
  for (int i = threadIdx.x; i < cells; i += blockDim.x) {
    const int e = i / kWarps;
    const std::int64_t token = first + i % kWarps;
    if (token < tokens) m.marked[e * tokens + token] = marked[e * kStride + i % kWarps];
  }
}

/// Token choice for any number of experts and entries, a block a token.
template <class T>
__global__ void __launch_bounds__(kSlowThreads)
    choose_tokens_slowly(const T* logits, std::int64_t tokens, Route route, Memory m,
                         std::int32_t* error_word) {
  const std::int64_t t = blockIdx.x;
  const T* row = logits + t * route.experts;
  const RowSoftmax softmax = row_softmax(row, route.experts);
  if (threadIdx.x == 0 && softmax.sum != softmax.sum) report(error_word, kBadLogits);
  for (std::int64_t e = threadIdx.x; e < route.experts; e += kSlowThreads) {
    const float p = softmax.probability(to_float(row[e]));
    m.marked[e * tokens + t] = math::bits(p) & ~kRouted;
  }
  const std::int64_t words = Memory::words_per_token(route.experts);
  for (std::int64_t w = threadIdx.x; w < words; w += kSlowThreads) m.words[t * words + w] = 0;
  if (threadIdx.x == 0 && t % kTokens == 0) m.added[t / kTokens] = 0;
  std::int32_t* const ids = m.ids + t * route.top_k;
  route_slowly(route, row, softmax, m.scores + t * route.top_k, ids);
  for (int k = threadIdx.x; k < route.top_k; k += kSlowThreads) {
    m.marked[ids[k] * tokens + t] |= kRouted;
    atomicOr(&m.words[t * words + ids[k] / 32], 1u << (ids[k] % 32));
  }
}

/// Sum over a block of kSelectThreads; every thread gets it.
__device__ int block_sum(int x) {
  __shared__ int of_warp[kSelectThreads / kWarp];
  x = __reduce_add_sync(kAllLanes, x);
  __syncthreads();  // all warps have read the previous call's of_warp
  if (lane_id() == 0) of_warp[threadIdx.x / kWarp] = x;
  __syncthreads();  // all warps have written of_warp
  return __reduce_add_sync(kAllLanes, of_warp[lane_id()]);
}

/// Calls f(t, marks[t]) for all tokens; every thread of the block takes some. Four loads of a
/// thread are in flight.
template <class F>
__device__ __forceinline__ void for_each_mark(const std::uint32_t* marks, unsigned tokens, F f) {
  constexpr unsigned kTogether = 4;
  for (unsigned first = threadIdx.x; first < tokens; first += kTogether * kSelectThreads) {
    std::uint32_t mark[kTogether];
#pragma unroll
    for (unsigned j = 0; j < kTogether; ++j) {
      const unsigned t = first + j * kSelectThreads;
      mark[j] = t < tokens ? marks[t] : 0;
    }
#pragma unroll
    for (unsigned j = 0; j < kTogether; ++j) {
      const unsigned t = first + j * kSelectThreads;
      if (t < tokens) f(t, mark[j]);
    }
  }
}

/// The same for marks in shared memory, at a multiple of 16 bytes.
template <class F>
__device__ __forceinline__ void for_each_held(const std::uint32_t* marks, unsigned tokens, F f) {
  for (unsigned t = 4 * threadIdx.x; t + 3 < tokens; t += 4 * kSelectThreads) {
    const uint4 mark = *reinterpret_cast<const uint4*>(marks + t);
    f(t, mark.x), f(t + 1, mark.y), f(t + 2, mark.z), f(t + 3, mark.w);
  }
  if (const unsigned t = tokens / 4 * 4 + threadIdx.x; t < tokens) f(t, marks[t]);
}

/// The draws of a call.
struct Draws {
  std::uint64_t seed;
  std::uint64_t offset;
  const std::uint64_t* memory;  ///< (2) seed and offset on the device, instead of both; or null
  __device__ std::uint32_t operator()(std::int64_t expert) const {
    const bool inside = memory != nullptr;
    return math::philox(inside ? memory[0] : seed, inside ? memory[1] : offset,
                        static_cast<std::uint64_t>(expert));
  }
};

struct Rounding {
  std::int64_t tokens;
  std::int64_t experts;
  std::int32_t tile;
  RoundingRule rule;
  Draws draw;

  __device__ math::Candidates candidates(std::int32_t count) const {
    return math::candidates(count, tile, tokens);
  }
};

/// For the rule balance: counts the rows of each expert before rounding, a block an expert.
__global__ void __launch_bounds__(kSelectThreads) count_chosen(std::int64_t tokens, Memory m) {
  const std::int64_t expert = blockIdx.x;
  int count = 0;
  for_each_mark(m.marked + expert * tokens, static_cast<unsigned>(tokens),
                [&](unsigned, std::uint32_t mark) { count += static_cast<int>(mark >> 31); });
  count = block_sum(count);
  if (threadIdx.x == 0) m.chosen[expert] = count;
}

/// Decides the rule balance, in one block. The running error needs the experts in order, so one
/// thread adds them up.
__global__ void __launch_bounds__(kSelectThreads) balance(Rounding rounding, Memory m) {
  __shared__ math::Candidates of[kSelectThreads];
  std::int64_t error = 0;
  for (std::int64_t first = 0; first < rounding.experts; first += kSelectThreads) {
    const std::int64_t mine = first + threadIdx.x;
    if (mine < rounding.experts) of[threadIdx.x] = rounding.candidates(m.chosen[mine]);
    __syncthreads();  // all of `of` is written
    const std::int64_t left = rounding.experts - first;
    const int count = static_cast<int>(left < kSelectThreads ? left : kSelectThreads);
    for (int i = 0; threadIdx.x == 0 && i < count; ++i) {
      const math::Candidates c = of[i];
      const bool up = c.open && math::balance_up(c, error);
      m.goes_up[first + i] = up;
      error += (up ? c.ceil : c.floor) - c.count;
    }
    __syncthreads();  // the thread has read `of`
  }
}

/// Whether an expert rounds up. Of nearest_scores this says nothing: round_expert() has the scores.
__device__ bool goes_up(const Rounding& rounding, const math::Candidates& c, const Memory& m,
                        std::int64_t expert) {
  if (!c.open) return false;
  switch (rounding.rule) {
    case RoundingRule::nearest:
      return math::nearest_up(c);
    case RoundingRule::stochastic:
      return math::stochastic_up(c, rounding.tile, rounding.draw(expert));
    case RoundingRule::up:
      return true;
    case RoundingRule::balance:
      return m.goes_up[expert] != 0;
    case RoundingRule::nearest_scores:
    case RoundingRule::down:
      break;
  }
  return false;
}

/// Which tokens of an expert may change: the routed ones when it rounds down, the others when it
/// rounds up. They change by ascending key: the weakest of the routed, the best of the others.
/// Among equal keys the expert drops the higher token first, and adds the lower one first.
enum Direction { kDown, kUp };

/// Below 2^31 for a token that may change, else not.
__device__ __forceinline__ std::uint32_t key_of(std::uint32_t mark, Direction to) {
  return mark ^ (to == kUp ? ~kRouted : kRouted);
}
__device__ __forceinline__ Direction direction_of(std::uint32_t mark) {
  return mark < kRouted ? kUp : kDown;
}

/// Shared memory of the block that rounds an expert, beside the marks.
struct Selection {
  static constexpr int kBins = 1 << 11;
  static constexpr int kFirstShift = 20;  // of 31 bits of a key; then 9 and 0
  /// Of each direction: how many keys have a digit. The scores come when the bins are done with.
  union {
    std::int32_t bins[2][kBins];
    float scores[2][kBins];
  };
  std::int32_t token[2][kMaxChanging];  ///< the tokens that change, ascending
  std::int32_t of_warp[2][kSelectThreads / kWarp];
  std::uint32_t digit;  ///< of the last token that changes
  std::int32_t below;   ///< keys below those that have it
  std::int32_t equal;   ///< keys that have it
  float sum[2];         ///< of the scores of token[]
};

/// Finds the digit where the wanted-th key of bins[to] lies. The whole block calls this, and may
/// read s.digit, s.below and s.equal afterwards.
__device__ __forceinline__ void find_digit(Selection& s, Direction to, int wanted) {
  static_assert(Selection::kBins == 2 * kSelectThreads, "a thread has two bins");
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int first = s.bins[to][2 * threadIdx.x];
  const int both = first + s.bins[to][2 * threadIdx.x + 1];
  int end = both;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int before = __shfl_up_sync(kAllLanes, end, distance);
    if (lane_id() >= distance) end += before;
  }
  if (lane_id() == kWarp - 1) s.of_warp[0][warp] = end;
  __syncthreads();  // all warps have written of_warp
  end += __reduce_add_sync(kAllLanes, lane_id() < warp ? s.of_warp[0][lane_id()] : 0);
  const int below = end - both;
  if (below < wanted && wanted <= end) {
    const bool second = below + first < wanted;
    s.digit = 2 * threadIdx.x + second;
    s.below = below + (second ? first : 0);
    s.equal = second ? both - first : first;
  }
  __syncthreads();  // the block sees what one thread has found
}

/// Puts the `wanted` tokens of lowest key into s.token[to], ascending by token; bins[to] has the
/// counts of the first digit. A radix select finds the key of the last of them, the threshold. Then
/// each warp collects from its stretch of tokens. The whole block calls this. `for_each` calls a
/// function with all tokens and their marks.
template <class ForEach>
__device__ __forceinline__ void select_changing(const std::uint32_t* marks, unsigned tokens,
                                                Direction to, int wanted, Selection& s,
                                                ForEach for_each) {
  find_digit(s, to, wanted);
  std::uint32_t threshold = s.digit;
  int left = wanted - s.below;
  int shift = Selection::kFirstShift;
#pragma unroll 1
  while (shift > 0) {
    const int next = max(shift - 11, 0);
    for (int b = threadIdx.x; b < Selection::kBins; b += kSelectThreads) s.bins[to][b] = 0;
    __syncthreads();  // all bins are 0, and all threads have read what find_digit() found
    for_each([&](unsigned, std::uint32_t mark) {
      const std::uint32_t key = key_of(mark, to);
      if (key >> shift == threshold) {
        atomicAdd(&s.bins[to][key >> next & ((1u << (shift - next)) - 1u)], 1);
      }
    });
    __syncthreads();  // all bins are counted
    find_digit(s, to, left);
    threshold = threshold << (shift - next) | s.digit;
    left -= s.below;
    shift = next;
  }
  const int skipped = to == kUp ? 0 : s.equal - left;  // keys at the threshold that do not change

  const unsigned stretch = (tokens + kSelectThreads - 1) / kSelectThreads * kWarp;
  const unsigned warp = threadIdx.x / kWarp;
  const unsigned begin = min(warp * stretch, tokens);
  const unsigned end = min(begin + stretch, tokens);
  int lower = 0;
  int equal = 0;
#pragma unroll 4
  for (unsigned t = begin + lane_id(); t < end; t += kWarp) {
    const std::uint32_t key = key_of(marks[t], to);
    lower += key < threshold;
    equal += key == threshold;
  }
  lower = __reduce_add_sync(kAllLanes, lower);
  equal = __reduce_add_sync(kAllLanes, equal);
  if (lane_id() == 0) {
    s.of_warp[0][warp] = lower;
    s.of_warp[1][warp] = equal;
  }
  __syncthreads();  // all warps have written of_warp
  if (lower + equal == 0) return;
  const bool before = lane_id() < static_cast<int>(warp);
  lower = __reduce_add_sync(kAllLanes, before ? s.of_warp[0][lane_id()] : 0);
  equal = __reduce_add_sync(kAllLanes, before ? s.of_warp[1][lane_id()] : 0);
  for (unsigned first = begin; first < end; first += kWarp) {
    const unsigned t = first + lane_id();
    const std::uint32_t key = t < end ? key_of(marks[t], to) : ~0u;
    const unsigned lowers = __ballot_sync(kAllLanes, key < threshold);
    const unsigned equals = __ballot_sync(kAllLanes, key == threshold);
    if ((lowers | equals) == 0) continue;
    const unsigned lanes_before = (1u << lane_id()) - 1u;
    const int my_lower = lower + __popc(lowers & lanes_before);
    const int my_equal = equal + __popc(equals & lanes_before) - skipped;
    if (key < threshold || (key == threshold && my_equal >= 0 && my_equal < left)) {
      s.token[to][my_lower + min(max(my_equal, 0), left)] = static_cast<std::int32_t>(t);
    }
    lower += __popc(lowers);
    equal += __popc(equals);
  }
}

/// The score of token t's entry of `expert`: that of top-K if the token chose it, else the
/// probability.
__device__ float score_of(const Memory& m, int top_k, std::int64_t expert, std::int64_t t,
                          std::uint32_t mark) {
  if (mark < kRouted) return math::from_bits(mark);
  const std::int32_t* const ids = m.ids + t * top_k;
  float score = 0.0f;
#pragma unroll 4
  for (int k = 0; k < top_k; ++k) {
    if (ids[k] == expert) score = m.scores[t * top_k + k];
  }
  return score;
}

/// Rounds each expert, a block an expert. The block keeps the marks of its expert in shared memory
/// with kHeld, (T) words; else it reads them again for each pass.
template <bool kHeld>
__global__ void __launch_bounds__(kSelectThreads, kHeld ? kBlocks : 1)
    round_expert(Rounding rounding, int top_k, Memory m, std::int32_t* counts,
                 std::int32_t* frequency) {
  extern __shared__ __align__(16) std::uint32_t held[];
  __shared__ Selection s;
  const std::int64_t expert = blockIdx.x;
  const unsigned tokens = static_cast<unsigned>(rounding.tokens);
  const std::uint32_t* const stored = m.marked + expert * rounding.tokens;
  const std::uint32_t* marks = stored;
  if constexpr (kHeld) marks = held;
  const auto for_each = [&](auto f) {
    if constexpr (kHeld) {
      for_each_held(marks, tokens, f);
    } else {
      for_each_mark(marks, tokens, f);
    }
  };

  for (int b = threadIdx.x; b < Selection::kBins; b += kSelectThreads) {
    s.bins[kDown][b] = 0;
    s.bins[kUp][b] = 0;
  }
  wait_for_previous();
  __syncthreads();  // all bins are 0
  int count = 0;
  for_each_mark(stored, tokens, [&](unsigned t, std::uint32_t mark) {
    if constexpr (kHeld) held[t] = mark;
    count += static_cast<int>(mark >> 31);
    const Direction to = direction_of(mark);
    atomicAdd(&s.bins[to][key_of(mark, to) >> Selection::kFirstShift], 1);
  });
  count = block_sum(count);  // and the block sees `held` and the bins
  const math::Candidates c = rounding.candidates(count);
  const bool weighs = c.open && rounding.rule == RoundingRule::nearest_scores;
  bool up = goes_up(rounding, c, m, expert);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Direction to = i == 0 ? kDown : kUp;
    const int wanted = to == kUp ? c.ceil - c.count : c.count - c.floor;
    if (wanted == 0 || !(weighs || (to == kUp) == up)) continue;
    select_changing(marks, tokens, to, wanted, s, for_each);
    __syncthreads();  // s.token is complete
    if (!weighs) break;
    if (const int j = threadIdx.x; j < wanted) {
      const std::int32_t t = s.token[to][j];
      s.scores[to][j] = score_of(m, top_k, expert, t, marks[t]);
    }
    __syncthreads();  // all scores are written
    if (threadIdx.x < kWarp) {
      // Ascending by token, as by math::lane_sum32.
      float sum = 0.0f;
      for (int j = lane_id(); j < wanted; j += kWarp) sum = math::add(sum, s.scores[to][j]);
      sum = warp_sum(sum);
      if (lane_id() == 0) s.sum[to] = sum;
    }
  }
  __syncthreads();  // the block sees s.sum
  if (weighs) up = math::score_up(s.sum[kDown], s.sum[kUp], rounding.draw(expert));
  if (threadIdx.x == 0) {
    counts[expert] = up ? c.ceil : c.floor;
    if (frequency != nullptr) frequency[expert] = count;
  }
  const std::int64_t words = Memory::words_per_token(rounding.experts);
  const int changing = up ? c.ceil - c.count : c.count - c.floor;
  for (int i = threadIdx.x; i < changing; i += kSelectThreads) {
    const std::int64_t t = s.token[up ? kUp : kDown][i];
    atomicXor(&m.words[t * words + expert / 32], 1u << (expert % 32));
    atomicAdd(&m.added[t / kTokens], up ? 1 : -1);
  }
}

/// What a warp writes of 256 experts: its token's entries, ascending by expert.
struct Entries {
  static constexpr int kWords = 8;
  std::int32_t choice[32 * kWords];  ///< its place among the K that the token chose, or -1
  std::uint8_t expert[32 * kWords];  ///< less the first of the 256
};

/// One warp writes token t's entries from position `at` on, 256 experts at a time.
__device__ void write_token(int t, std::int64_t tokens, int words, int top_k, const Memory& m,
                            const TokenRoundingArgs& a, int at, Entries& entries) {
  constexpr int kWords = Entries::kWords;
  const std::uint32_t* const own_words = m.words + std::int64_t{t} * words;
  const std::int64_t first_choice = std::int64_t{t} * top_k;
#pragma unroll 1
  for (int w0 = 0; w0 < words; w0 += kWords) {
    const bool mine = lane_id() < kWords && w0 + lane_id() < words;
    const std::uint32_t word = mine ? own_words[w0 + lane_id()] : 0u;
    int end = __popc(word);  // after the scan: entries up to the end of this lane's word
#pragma unroll
    for (int distance = 1; distance < kWords; distance *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, distance);
      if (lane_id() >= distance) end += before;
    }
    const int start = end - __popc(word);
#pragma unroll 2
    for (int w = 0; w < kWords; ++w) {
      const std::uint32_t bits = __shfl_sync(kAllLanes, word, w);
      const int i = __shfl_sync(kAllLanes, start, w) + __popc(bits & ((1u << lane_id()) - 1u));
      if ((bits >> lane_id() & 1u) == 0) continue;
      entries.expert[i] = static_cast<std::uint8_t>(w * 32 + lane_id());
      entries.choice[i] = -1;
    }
    __syncwarp();  // before other lanes overwrite `choice`
#pragma unroll 1
    for (int k0 = 0; k0 < top_k; k0 += kWarp) {
      const int k = k0 + lane_id();
      const int e = k < top_k ? m.ids[first_choice + k] - w0 * 32 : -1;
      const bool here = e >= 0 && e < 32 * kWords;
      const int lane = here ? e / 32 : 0;
      const std::uint32_t bits = __shfl_sync(kAllLanes, word, lane);
      const std::uint32_t bit = 1u << (e & 31);
      const int i = __shfl_sync(kAllLanes, start, lane) + __popc(bits & (bit - 1u));
      if (here && (bits & bit) != 0) entries.choice[i] = k;
    }
    __syncwarp();  // the entries are complete
    const int count = __shfl_sync(kAllLanes, end, kWords - 1);
#pragma unroll 1
    for (int i = lane_id(); i < count; i += kWarp) {
      const int e = w0 * 32 + entries.expert[i];
      const int k = entries.choice[i];
      a.scores[at + i] =
          k >= 0 ? m.scores[first_choice + k] : math::from_bits(m.marked[e * tokens + t]);
      a.token_ids[at + i] = t;
      a.expert_ids[at + i] = e;
    }
    at += count;
    __syncwarp();  // the entries are read before the next 256 experts
  }
}

/// Writes the lists, a warp a token. Then all threads of the grid write the sentinels.
///
/// Every block adds up all of m.added. That grows with the square of T: at 2^20 tokens it reads 4
/// GB.
__global__ void __launch_bounds__(kTokens* kWarp, kBlocks)
    write_lists(std::int64_t tokens, std::int64_t experts, int top_k, std::int64_t capacity,
                Memory m, TokenRoundingArgs a, std::int32_t* token_offsets) {
  static_assert(kTokens == kWarp, "a lane reads the count of each warp");
  __shared__ Entries entries[kTokens];
  __shared__ std::int32_t entries_of[kTokens];      // of each token
  __shared__ std::int32_t added_before[kTokens];    // of each warp's part of the blocks before this
  __shared__ std::int32_t added_anywhere[kTokens];  // and of all blocks
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t t = std::int64_t{blockIdx.x} * kTokens + warp;
  const int words = static_cast<int>(Memory::words_per_token(experts));
  wait_for_previous();
  int mine = 0;
  for (int w = lane_id(); w < words && t < tokens; w += kWarp) {
    mine += __popc(m.words[t * words + w]);
  }
  int before = 0;
  int anywhere = 0;
  for (unsigned b = threadIdx.x; b < gridDim.x; b += blockDim.x) {
    const int added = m.added[b];
    if (b < blockIdx.x) before += added;
    anywhere += added;
  }
  mine = __reduce_add_sync(kAllLanes, mine);
  before = __reduce_add_sync(kAllLanes, before);
  anywhere = __reduce_add_sync(kAllLanes, anywhere);
  if (lane_id() == 0) {
    entries_of[warp] = mine;
    added_before[warp] = before;
    added_anywhere[warp] = anywhere;
  }
  __syncthreads();  // all warps have written the three
  before = __reduce_add_sync(
      kAllLanes, added_before[lane_id()] + (lane_id() < warp ? entries_of[lane_id()] : 0));
  if (t < tokens) {
    const int chosen_before = static_cast<int>(blockIdx.x) * kTokens * top_k;
    if (token_offsets != nullptr && lane_id() == 0) token_offsets[t] = chosen_before + before;
    write_token(static_cast<int>(t), tokens, words, top_k, m, a, chosen_before + before,
                entries[warp]);
  }
  anywhere = __reduce_add_sync(kAllLanes, added_anywhere[lane_id()]);
  const std::int64_t all = tokens * top_k + anywhere;
  const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t thread = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (token_offsets != nullptr && thread == 0) token_offsets[tokens] = static_cast<int>(all);
#pragma unroll 1
  for (std::int64_t i = all + thread; i < capacity; i += threads) {
    a.scores[i] = 0.0f;
    a.token_ids[i] = static_cast<std::int32_t>(tokens - 1);
    a.expert_ids[i] = static_cast<std::int32_t>(experts);
  }
}

template <class T>
Status choose(const TokenRoundingDesc& d, const TokenRoundingArgs& a, const Memory& m,
              const Exec& exec) {
  const T* logits = static_cast<const T*>(a.logits);
  const Route route = Route::of(d);
  if (!fits_warp_row(d.experts, d.top_k)) {
    choose_tokens_slowly<<<blocks_for(d.tokens, 1), kSlowThreads, 0, stream_of(exec)>>>(
        logits, d.tokens, route, m, a.error_word);
    return launched("token_rounding: launch");
  }
  return visit_row_size(d.experts, [&](auto per_lane) {
    const std::size_t bytes = 4 * static_cast<std::size_t>(d.experts * (kWarps + 1));
    constexpr int kPerLane = per_lane.value;
    const auto kernel = d.experts == kPerLane * kWarp ? choose_tokens<T, kPerLane, true>
                                                      : choose_tokens<T, kPerLane, false>;
    launch_early(kernel, blocks_for(d.tokens, kWarps), kWarps * kWarp, bytes, exec, logits,
                 d.tokens, route, m, a.error_word);
    return launched("token_rounding: launch");
  });
}

/// Shared memory of a block of round_expert() beside the marks, that of sums over the block too.
constexpr int kBesideMarks = sizeof(Selection) + 1024;

Status prepare(const TokenRoundingDesc&, const Exec& exec) {
  return allow_shared_memory(round_expert<true>, exec.traits.block_shared_bytes - kBesideMarks);
}

Status round_experts(const Rounding& rounding, int top_k, const Memory& m,
                     const TokenRoundingArgs& a, const Exec& exec) {
  const unsigned experts = static_cast<unsigned>(rounding.experts);
  const std::int64_t bytes = 4 * rounding.tokens;
  if (bytes + kBesideMarks > exec.traits.block_shared_bytes) {
    launch_early(round_expert<false>, experts, kSelectThreads, 0, exec, rounding, top_k, m,
                 a.counts, a.frequency);
    return launched("token_rounding: launch");
  }
  launch_early(round_expert<true>, experts, kSelectThreads, static_cast<std::size_t>(bytes), exec,
               rounding, top_k, m, a.counts, a.frequency);
  return launched("token_rounding: launch");
}

template <class T>
Status run_typed(const TokenRoundingDesc& d, const TokenRoundingArgs& a, void* memory,
                 const Exec& exec) {
  const cudaStream_t stream = stream_of(exec);
  Memory m;
  Memory::layout(d, memory, &m);
  if (exec.checked) {
    const T* logits = static_cast<const T*>(a.logits);
    if (Status s = check_logits(logits, d.tokens, d.experts, m.check, stream); !s.ok()) return s;
  }
  if (d.tokens > 0) {
    if (Status s = choose<T>(d, a, m, exec); !s.ok()) return s;
  }
  const unsigned experts = static_cast<unsigned>(d.experts);
  const int top_k = static_cast<int>(d.top_k);
  const Rounding rounding{d.tokens, d.experts, static_cast<std::int32_t>(d.tile), d.rule,
                          Draws{a.seed, a.offset, a.draws}};
  if (d.rule == RoundingRule::balance) {
    count_chosen<<<experts, kSelectThreads, 0, stream>>>(d.tokens, m);
    balance<<<1, kSelectThreads, 0, stream>>>(rounding, m);
  }
  if (Status s = round_experts(rounding, top_k, m, a, exec); !s.ok()) return s;
  if (d.tokens > 0) {
    const unsigned blocks = static_cast<unsigned>(Memory::blocks(d));
    launch_early(write_lists, blocks, kTokens * kWarp, 0, exec, d.tokens, d.experts, top_k,
                 d.capacity(), m, a, exec.handoff.token_offsets);
  } else if (exec.handoff.token_offsets != nullptr) {
    const cudaError_t error = cudaMemsetAsync(exec.handoff.token_offsets, 0, 4, stream);
    if (error != cudaSuccess) return to_status(error, "token_rounding: token offsets");
  }
  return launched("token_rounding: launch");
}

std::size_t workspace(const TokenRoundingDesc& d, const Exec&) {
  return Memory::layout(d, nullptr, nullptr);
}

Status run(const TokenRoundingDesc& d, const TokenRoundingArgs& a, void* memory,
           const Exec& exec) noexcept {
  return visit_logits(d.dtype,
                      [&](auto type) { return run_typed<decltype(type)>(d, a, memory, exec); });
}

}  // namespace

const Kernel<TokenRoundingDesc> kTokenRounding = {
    .op = "token_rounding",
    .name = "cuda.token_rounding",
    .arch = 80,
    .and_later = true,
    .dtypes = kLogitsTypes,
    .workspace = workspace,
    .prepare = prepare,
    .run = run,
};

}  // namespace sonicmoe::cuda
