// Every token first chooses its top-K experts (token choice). Then each expert whose count is not a
// multiple of the tile drops its weakest tokens or adds the best others.
// Probabilities lie expert by expert; the sign bit says that a token is routed. So the block that
// rounds an expert reads one stretch of memory and flips sign bits in it. No other block writes
// there meanwhile.
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
constexpr std::uint32_t kRouted = 0x80000000u;

struct Memory {
  std::uint32_t* marked;       // (E, T): bits of the probability, and kRouted
  float* scores;               // (T, K): of token choice
  std::int32_t* ids;           // (T, K)
  std::int32_t* chosen;        // (E): rows before rounding
  std::int32_t* goes_up;       // (E): 1 if the expert rounds up; not of nearest_scores
  std::uint32_t* words;        // (T, ceil(E/32)): bit e % 32 of word e / 32 is set if e is routed
  std::int32_t* block_starts;  // (blocks + 1): entries before each block of kTokens tokens
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
    take(&m.block_starts, blocks(d) + 1);
    return end;
  }
};

/// Token choice, a warp a token. The probabilities of the block's 8 tokens go through shared
/// memory, so that the block writes the 8 of each expert as one sector.
template <class T, int kPerLane>
__global__ void __launch_bounds__(kWarps* kWarp, kPerLane <= 8                  ? 3
                                                 : kPerLane == 32 && kArch > 90 ? 1
                                                                                : 2)
    choose_tokens(const T* logits, std::int64_t tokens, Route route, Memory m,
                  std::int32_t* error_word) {
  extern __shared__ std::uint32_t marked[];  // (E, kWarps + 1)
  constexpr int kStride = kWarps + 1;        // odd, against bank conflicts
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t first = std::int64_t{blockIdx.x} * kWarps;
  const std::int64_t t = first + warp;
  if (t < tokens) {
    const WarpRow<T, kPerLane> row(logits + t * route.experts, route.experts);
    if (error_word != nullptr && row.bad() && lane_id() == 0) report(error_word, kBadLogits);
    float p[kPerLane];
    row.probabilities(p);
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
  std::int32_t* const ids = m.ids + t * route.top_k;
  route_slowly(route, row, softmax, m.scores + t * route.top_k, ids);
  for (int k = threadIdx.x; k < route.top_k; k += kSlowThreads) {
    m.marked[ids[k] * tokens + t] |= kRouted;
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

/// Counts the rows of each expert before rounding, a block an expert.
__global__ void __launch_bounds__(kSelectThreads)
    count_chosen(std::int64_t tokens, Memory m, std::int32_t* frequency) {
  const std::int64_t expert = blockIdx.x;
  int count = 0;
  for (std::int64_t t = threadIdx.x; t < tokens; t += kSelectThreads) {
    count += static_cast<int>(m.marked[expert * tokens + t] >> 31);
  }
  count = block_sum(count);
  if (threadIdx.x != 0) return;
  m.chosen[expert] = count;
  if (frequency != nullptr) frequency[expert] = count;
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
};

/// Decides goes_up for every rule that needs counts only. The grid is one block. `balance` takes
/// one thread, because its running error needs the experts in order.
__global__ void __launch_bounds__(1024) decide(Rounding rounding, Memory m) {
  const auto candidates = [&](std::int64_t e) {
    return math::candidates(m.chosen[e], rounding.tile, rounding.tokens);
  };
  if (rounding.rule == RoundingRule::balance) {
    if (threadIdx.x != 0) return;
    std::int64_t error = 0;
    for (std::int64_t e = 0; e < rounding.experts; ++e) {
      const math::Candidates c = candidates(e);
      const bool up = c.open && math::balance_up(c, error);
      m.goes_up[e] = up;
      error += (up ? c.ceil : c.floor) - c.count;
    }
    return;
  }
  for (std::int64_t e = threadIdx.x; e < rounding.experts; e += blockDim.x) {
    const math::Candidates c = candidates(e);
    bool up = false;
    switch (rounding.rule) {
      case RoundingRule::nearest:
        up = math::nearest_up(c);
        break;
      case RoundingRule::stochastic:
        up = math::stochastic_up(c, rounding.tile, rounding.draw(e));
        break;
      case RoundingRule::up:
        up = true;
        break;
      case RoundingRule::nearest_scores:  // round_expert() decides, for it has the scores
      case RoundingRule::balance:         // above
      case RoundingRule::down:
        break;
    }
    m.goes_up[e] = c.open && up;
  }
}

/// Shared memory of the block that rounds an expert.
struct Selection {
  static constexpr int kDigitBits = 11;
  std::int32_t bins[1 << kDigitBits];
  std::int32_t token[kMaxChanging];  ///< the tokens that change, ascending
  std::uint32_t threshold;
  std::int32_t left;   ///< tokens wanted of those with the threshold's rank
  std::int32_t equal;  ///< all tokens with the threshold's rank
  std::int32_t before[kSelectThreads / kWarp];  ///< a warp's lower | equal tokens << 16
  float sum;
};

/// The tokens of one expert that could change: the routed tokens when it rounds down, the others
/// when it rounds up. Tokens change by ascending rank: the weakest of the routed, the best of the
/// others. Among equal ranks the expert adds the lower token first, and drops the higher one first.
struct Changing {
  const std::uint32_t* marked;
  std::int64_t tokens;
  bool up;
  __device__ bool is(std::uint32_t mark) const { return (mark >> 31 != 0) != up; }
  __device__ std::uint32_t rank(std::uint32_t mark) const {
    return up ? ~mark & ~kRouted : mark & ~kRouted;
  }
};

/// Puts the `wanted` tokens of lowest rank into s.token, ascending by token. A radix select finds
/// the rank of the last of them, the threshold. Then one pass in token order collects them. The
/// whole block calls this.
__device__ void select_changing(const Changing& who, int wanted, Selection& s) {
  constexpr int kBits = Selection::kDigitBits;
  std::uint32_t prefix = 0;
  int left = wanted;
  for (int shift = 2 * kBits; shift >= 0; shift -= kBits) {
    for (int b = threadIdx.x; b < 1 << kBits; b += kSelectThreads) s.bins[b] = 0;
    __syncthreads();  // all bins are 0
    for (std::int64_t t = threadIdx.x; t < who.tokens; t += kSelectThreads) {
      const std::uint32_t mark = who.marked[t];
      const std::uint32_t rank = who.rank(mark);
      const bool in_prefix = shift == 2 * kBits || rank >> (shift + kBits) == prefix;
      if (who.is(mark) && in_prefix) {
        atomicAdd(&s.bins[rank >> shift & ((1u << kBits) - 1u)], 1);
      }
    }
    __syncthreads();  // all bins are counted
    // Finds the bin of the last wanted token. A thread has two bins.
    const int pair = s.bins[2 * threadIdx.x] + s.bins[2 * threadIdx.x + 1];
    (void)exclusive_sums<kSelectThreads>(
        kSelectThreads, [&](int) { return pair; },
        [&](int i, int below) {
          const int first = s.bins[2 * i];
          if (below >= left || below + pair < left) return;
          const bool second = below + first < left;
          s.threshold = prefix << kBits | static_cast<std::uint32_t>(2 * i + second);
          s.left = left - below - (second ? first : 0);
          s.equal = second ? pair - first : first;
        });
    __syncthreads();  // the block sees what one thread has found
    prefix = s.threshold;
    left = s.left;
    __syncthreads();  // all threads have read it
  }

  const int skipped = who.up ? 0 : s.equal - left;  // tokens at the threshold that do not change
  int lower = 0;                                    // tokens below the threshold, so far
  int equal = 0;                                    // tokens at the threshold, so far
  for (std::int64_t first = 0; first < who.tokens; first += kSelectThreads) {
    const std::int64_t t = first + threadIdx.x;
    const std::uint32_t mark = t < who.tokens ? who.marked[t] : (who.up ? kRouted : 0u);
    const bool candidate = who.is(mark);
    const bool is_lower = candidate && who.rank(mark) < prefix;
    const bool is_equal = candidate && who.rank(mark) == prefix;
    const unsigned lowers = __ballot_sync(kAllLanes, is_lower);
    const unsigned equals = __ballot_sync(kAllLanes, is_equal);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (lane_id() == 0) s.before[warp] = __popc(lowers) | __popc(equals) << 16;
    __syncthreads();  // all warps have written s.before
    const int of_warp = s.before[lane_id()];
    const int warps_before = __reduce_add_sync(kAllLanes, lane_id() < warp ? of_warp : 0);
    const int all = __reduce_add_sync(kAllLanes, of_warp);
    const unsigned lanes_before = (1u << lane_id()) - 1u;
    const int my_lower = lower + (warps_before & 0xffff) + __popc(lowers & lanes_before);
    const int my_equal = equal + (warps_before >> 16) + __popc(equals & lanes_before);
    const int equal_taken = min(max(my_equal - skipped, 0), left);
    if (is_lower || (is_equal && my_equal >= skipped && my_equal - skipped < left)) {
      s.token[my_lower + equal_taken] = static_cast<std::int32_t>(t);
    }
    lower += all & 0xffff;
    equal += all >> 16;
    __syncthreads();  // all warps have read s.before and written s.token
  }
}

/// The score of an entry: that of top-K if token choice made the entry, else the probability.
__device__ float score_of(const std::int32_t* ids, const float* scores, int top_k,
                          std::int64_t expert, std::uint32_t mark) {
  for (int k = 0; k < top_k; ++k) {
    if (ids[k] == expert) return scores[k];
  }
  return math::from_bits(mark & ~kRouted);
}

/// The same as a call, for round_expert() where three copies of it spill.
__device__ __noinline__ void call_select_changing(const std::uint32_t* marked, std::int64_t tokens,
                                                  bool up, int wanted, Selection* s) {
  select_changing({marked, tokens, up}, wanted, *s);
}

/// Rounds each expert, a block an expert: flips kRouted of the tokens that change.
__global__ void __launch_bounds__(kSelectThreads)
    round_expert(Rounding rounding, int top_k, Memory m, std::int32_t* counts) {
  __shared__ Selection s;
  const std::int64_t expert = blockIdx.x;
  std::uint32_t* const marked = m.marked + expert * rounding.tokens;
  const math::Candidates c = math::candidates(m.chosen[expert], rounding.tile, rounding.tokens);
  const int to_drop = c.count - c.floor;
  const int to_add = c.ceil - c.count;
  const auto select = [&](bool up) {
    const int wanted = up ? to_add : to_drop;
    if constexpr (kArch > 90) {
      call_select_changing(marked, rounding.tokens, up, wanted, &s);
    } else {
      select_changing({marked, rounding.tokens, up}, wanted, s);
    }
  };
  // The score sum of the tokens that would change, ascending by token, as by math::lane_sum32.
  const auto changing_score = [&](bool up) {
    select(up);
    if (threadIdx.x < kWarp) {
      float sum = 0.0f;
      for (int i = lane_id(); i < (up ? to_add : to_drop); i += kWarp) {
        const std::int64_t t = s.token[i];
        sum = math::add(
            sum, score_of(m.ids + t * top_k, m.scores + t * top_k, top_k, expert, marked[t]));
      }
      sum = warp_sum(sum);
      if (lane_id() == 0) s.sum = sum;
    }
    __syncthreads();  // the block sees s.sum
    return s.sum;
  };

  bool up = m.goes_up[expert] != 0;
  if (c.open && rounding.rule == RoundingRule::nearest_scores) {
    const float dropped = changing_score(false);
    const float added = changing_score(true);
    up = math::score_up(dropped, added, rounding.draw(expert));
  }
  const int wanted = up ? to_add : to_drop;
  if (threadIdx.x == 0) counts[expert] = up ? c.ceil : c.floor;
  if (wanted == 0) return;
  select(up);
  for (int i = threadIdx.x; i < wanted; i += kSelectThreads) marked[s.token[i]] ^= kRouted;
}

/// Packs each token's routed experts into words of bits, and counts them: block_starts[b] = entries
/// of block b's tokens. A lane takes a token, because the tokens of an expert lie together.
__global__ void __launch_bounds__(kWarps* kWarp)
    count_entries(std::int64_t tokens, std::int64_t experts, Memory m) {
  __shared__ int of_warp[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t t = std::int64_t{blockIdx.x} * kTokens + lane_id();
  const std::int64_t words = Memory::words_per_token(experts);
  int entries = 0;
  for (std::int64_t w = warp; w < words && t < tokens; w += kWarps) {
    std::uint32_t word = 0;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) {
      const std::int64_t e = w * 32 + i;
      if (e < experts) word |= (m.marked[e * tokens + t] >> 31) << i;
    }
    m.words[t * words + w] = word;
    entries += __popc(word);
  }
  entries = __reduce_add_sync(kAllLanes, entries);
  if (lane_id() == 0) of_warp[warp] = entries;
  __syncthreads();  // all warps have written of_warp
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) entries += of_warp[w];
  m.block_starts[blockIdx.x] = entries;
}

/// Turns each block's count of entries into the entries before it; block_starts[blocks] = all.
__global__ void __launch_bounds__(1024) start_blocks(int blocks, std::int32_t* block_starts) {
  const int all = exclusive_sums<1024>(
      blocks, [&](int b) { return block_starts[b]; },
      [&](int b, int before) { block_starts[b] = before; });
  if (threadIdx.x == 0) block_starts[blocks] = all;
}

/// One warp writes token t's entries from position `at` on, 1024 experts at a time. It first writes
/// all of them with their probabilities as scores, as if rounding had added them. Then it writes
/// the scores of the entries that token choice made.
__device__ void write_token(std::int64_t t, std::int64_t tokens, std::int64_t experts, int top_k,
                            const Memory& m, const TokenRoundingArgs& a, std::int32_t at) {
  const std::int64_t words = Memory::words_per_token(experts);
  const unsigned lanes_before = (1u << lane_id()) - 1u;
  for (std::int64_t w0 = 0; w0 < words; w0 += kWarp) {
    const std::uint32_t mine = w0 + lane_id() < words ? m.words[t * words + w0 + lane_id()] : 0u;
    int end = __popc(mine);  // after the scan: entries up to the end of this lane's word
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, distance);
      if (lane_id() >= distance) end += before;
    }
    const int start = end - __popc(mine);
    for (unsigned left = __ballot_sync(kAllLanes, mine != 0); left != 0; left &= left - 1) {
      const int w = __ffs(static_cast<int>(left)) - 1;
      const std::uint32_t word = __shfl_sync(kAllLanes, mine, w);
      const int first = at + __shfl_sync(kAllLanes, start, w);
      if ((word >> lane_id() & 1u) == 0) continue;
      const std::int64_t e = (w0 + w) * 32 + lane_id();
      const int i = first + __popc(word & lanes_before);
      a.scores[i] = math::from_bits(m.marked[e * tokens + t] & ~kRouted);
      a.token_ids[i] = static_cast<std::int32_t>(t);
      a.expert_ids[i] = static_cast<std::int32_t>(e);
    }
    __syncwarp();  // the probabilities are written before other lanes overwrite them
    for (int k0 = 0; k0 < top_k; k0 += kWarp) {
      const int k = k0 + lane_id();
      const std::int64_t e = k < top_k ? m.ids[t * top_k + k] - w0 * 32 : -1;
      const bool here = e >= 0 && e < 1024;
      const std::uint32_t word = __shfl_sync(kAllLanes, mine, here ? static_cast<int>(e / 32) : 0);
      const int first = at + __shfl_sync(kAllLanes, start, here ? static_cast<int>(e / 32) : 0);
      if (!here || (word >> (e % 32) & 1u) == 0) continue;
      const int i = first + __popc(word & ((1u << (e % 32)) - 1u));
      a.scores[i] = m.scores[t * top_k + k];
    }
    at += __shfl_sync(kAllLanes, end, kWarp - 1);
  }
}

/// Writes the lists, a warp a token. Then all threads of the grid write the sentinels.
__global__ void __launch_bounds__(kTokens* kWarp)
    write_lists(std::int64_t tokens, std::int64_t experts, int top_k, std::int64_t capacity,
                Memory m, TokenRoundingArgs a) {
  __shared__ int entries[kTokens];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t t = std::int64_t{blockIdx.x} * kTokens + warp;
  const std::int64_t words = Memory::words_per_token(experts);
  int mine = 0;
  for (std::int64_t w = lane_id(); w < words && t < tokens; w += kWarp) {
    mine += __popc(m.words[t * words + w]);
  }
  mine = __reduce_add_sync(kAllLanes, mine);
  if (lane_id() == 0) entries[warp] = mine;
  __syncthreads();  // all warps have written entries
  const int before = __reduce_add_sync(kAllLanes, lane_id() < warp ? entries[lane_id()] : 0);
  if (t < tokens) {
    write_token(t, tokens, experts, top_k, m, a, m.block_starts[blockIdx.x] + before);
  }
  const std::int64_t threads = std::int64_t{gridDim.x} * blockDim.x;
  const std::int64_t thread = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (std::int64_t i = m.block_starts[gridDim.x] + thread; i < capacity; i += threads) {
    a.scores[i] = 0.0f;
    a.token_ids[i] = static_cast<std::int32_t>(tokens - 1);
    a.expert_ids[i] = static_cast<std::int32_t>(experts);
  }
}

template <class T>
Status choose(const TokenRoundingDesc& d, const TokenRoundingArgs& a, const Memory& m,
              cudaStream_t stream) {
  const T* logits = static_cast<const T*>(a.logits);
  const Route route = Route::of(d);
  if (!fits_warp_row(d.experts, d.top_k)) {
    choose_tokens_slowly<<<blocks_for(d.tokens, 1), kSlowThreads, 0, stream>>>(
        logits, d.tokens, route, m, a.error_word);
    return launched("token_rounding: launch");
  }
  return visit_row_size(d.experts, [&](auto per_lane) {
    const std::size_t bytes = 4 * static_cast<std::size_t>(d.experts * (kWarps + 1));
    choose_tokens<T, per_lane.value>
        <<<blocks_for(d.tokens, kWarps), kWarps * kWarp, bytes, stream>>>(logits, d.tokens, route,
                                                                          m, a.error_word);
    return launched("token_rounding: launch");
  });
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
    if (Status s = choose<T>(d, a, m, stream); !s.ok()) return s;
  }
  const unsigned experts = static_cast<unsigned>(d.experts);
  const int top_k = static_cast<int>(d.top_k);
  const Rounding rounding{d.tokens, d.experts, static_cast<std::int32_t>(d.tile), d.rule,
                          Draws{a.seed, a.offset, a.draws}};
  count_chosen<<<experts, kSelectThreads, 0, stream>>>(d.tokens, m, a.frequency);
  decide<<<1, 1024, 0, stream>>>(rounding, m);
  round_expert<<<experts, kSelectThreads, 0, stream>>>(rounding, top_k, m, a.counts);
  if (d.tokens > 0) {
    const unsigned blocks = static_cast<unsigned>(Memory::blocks(d));
    count_entries<<<blocks, kWarps * kWarp, 0, stream>>>(d.tokens, d.experts, m);
    start_blocks<<<1, 1024, 0, stream>>>(static_cast<int>(blocks), m.block_starts);
    write_lists<<<blocks, kTokens * kWarp, 0, stream>>>(d.tokens, d.experts, top_k, d.capacity(), m,
                                                        a);
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
    .run = run,
};

}  // namespace sonicmoe::cuda
