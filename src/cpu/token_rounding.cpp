// Each token first chooses its top-K experts (token choice, TC). Then each expert whose count is no
// multiple of the tile drops its weakest TC tokens or adds the best others. An expert selects only
// among the tokens that can change.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>

#include "core/backends.h"
#include "cpu/routing.h"
#include "math/philox.h"
#include "math/rounding.h"

namespace sonicmoe::cpu {
namespace {

/// A bit for each (token, expert) pair says whether it is routed: (T, ceil(E/64)) words.
class Membership {
 public:
  Membership(std::uint64_t* words, std::int64_t experts)
      : words_(words), per_token_((experts + 63) / 64) {}
  std::int64_t words_per_token() const { return per_token_; }
  std::uint64_t* row(std::int64_t t) const { return words_ + t * per_token_; }
  bool has(std::int64_t t, std::int64_t e) const { return row(t)[e / 64] >> (e % 64) & 1; }
  void set(std::int64_t t, std::int64_t e) const { row(t)[e / 64] |= bit(e); }
  /// Threads round different experts at the same time, and experts share words. They flip different
  /// bits, so the order does not matter. has_shared() reads while other experts flip.
  void flip(std::int64_t t, std::int64_t e) const {
    std::atomic_ref<std::uint64_t>(row(t)[e / 64]).fetch_xor(bit(e), std::memory_order_relaxed);
  }
  bool has_shared(std::int64_t t, std::int64_t e) const {
    return std::atomic_ref<std::uint64_t>(row(t)[e / 64]).load(std::memory_order_relaxed) >>
               (e % 64) &
           1;
  }

 private:
  static std::uint64_t bit(std::int64_t e) { return std::uint64_t{1} << (e % 64); }
  std::uint64_t* words_;
  std::int64_t per_token_;
};

struct Memory {
  Membership members;
  std::uint64_t* keys;          // (threads, T): order keys of one expert's tokens
  float* probabilities;         // (E, T)
  float* scores;                // (T, K)
  float* rows;                  // (threads, E)
  std::int32_t* ids;            // (T, K)
  std::int32_t* token_offsets;  // (T+1)

  static std::size_t layout(const TokenRoundingDesc& d, int threads, void* base, Memory* out) {
    const std::size_t words = static_cast<std::size_t>(d.tokens * ((d.experts + 63) / 64));
    const std::size_t keys = static_cast<std::size_t>(threads * d.tokens);
    const std::size_t probabilities = static_cast<std::size_t>(d.tokens * d.experts);
    const std::size_t chosen = static_cast<std::size_t>(d.tokens * d.top_k);
    const std::size_t rows = static_cast<std::size_t>(threads * d.experts);
    if (out != nullptr) {
      std::uint64_t* u64 = static_cast<std::uint64_t*>(base);
      out->members = Membership(u64, d.experts);
      out->keys = u64 + words;
      out->probabilities = reinterpret_cast<float*>(out->keys + keys);
      out->scores = out->probabilities + probabilities;
      out->rows = out->scores + chosen;
      out->ids = reinterpret_cast<std::int32_t*>(out->rows + rows);
      out->token_offsets = out->ids + chosen;
    }
    return 8 * (words + keys) +
           4 * (probabilities + 2 * chosen + rows + static_cast<std::size_t>(d.tokens) + 1);
  }
};

/// A token's key. Ascending keys are the order inside an expert: probability descending, then lower
/// token id. A probability is not negative, so its bits ascend with it; a NaN's lie above.
std::uint64_t order_key(float probability, std::int64_t token) {
  return std::uint64_t{~std::bit_cast<std::uint32_t>(probability)} << 32 |
         static_cast<std::uint32_t>(token);
}
std::int64_t token_of(std::uint64_t key) { return static_cast<std::uint32_t>(key); }

/// Writes ids, scores, membership bits and probabilities (the full softmax) of every token. Bad
/// logits make both of the token NaN, which ranks before all numbers. Returns whether there are
/// any.
template <class T>
bool choose_tokens(const TokenRoundingDesc& d, const T* logits, const Memory& m, int threads) {
  std::atomic<bool> any_bad{false};
  parallel_ranges(threads, d.tokens, kTokensPerPiece,
                  [&](int thread, std::int64_t begin, std::int64_t end) {
                    float* row = m.rows + thread * d.experts;
                    for (std::int64_t t = begin; t < end; ++t) {
                      std::int32_t* ids = m.ids + t * d.top_k;
                      float* scores = m.scores + t * d.top_k;
                      float max = load_row(logits + t * d.experts, d.experts, row);
                      const bool bad = bad_logits(max, row, d.experts, t, {}, true) != nullptr;
                      if (bad) max = tame_row(d.experts, row);
                      route_token(d, max, true, row, scores, ids);
                      if (bad) {
                        constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
                        std::fill_n(row, d.experts, kNan);
                        std::fill_n(scores, d.top_k, kNan);
                        any_bad = true;
                      }
                      std::fill_n(m.members.row(t), m.members.words_per_token(), 0);
                      for (std::int64_t k = 0; k < d.top_k; ++k) m.members.set(t, ids[k]);
                      for (std::int64_t e = 0; e < d.experts; ++e)
                        m.probabilities[e * d.tokens + t] = row[e];
                    }
                  });
  return any_bad;
}

/// Finds the `wanted` tokens of an expert that rounding would change: the last TC tokens (down) or
/// the first other tokens (up). Returns their keys, in ascending token order, as a part of `keys`.
/// `keys` is T words of scratch.
std::uint64_t* changing(const TokenRoundingDesc& d, const Memory& m, std::int64_t expert, bool up,
                        std::int64_t wanted, std::uint64_t* keys) {
  const float* p = m.probabilities + expert * d.tokens;
  std::int64_t found = 0;
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    if (m.members.has_shared(t, expert) != up) keys[found++] = order_key(p[t], t);
  }
  std::uint64_t* first = up ? keys : keys + (found - wanted);
  std::nth_element(keys, up ? keys + wanted : first, keys + found);
  std::sort(first, first + wanted,
            [](std::uint64_t a, std::uint64_t b) { return token_of(a) < token_of(b); });
  return first;
}

/// The token-choice score if the token chose the expert, else the full-softmax probability.
float score_of(const TokenRoundingDesc& d, const Memory& m, std::int64_t token,
               std::int64_t expert) {
  for (std::int64_t s = token * d.top_k; s < (token + 1) * d.top_k; ++s) {
    if (m.ids[s] == expert) return m.scores[s];
  }
  return m.probabilities[expert * d.tokens + token];
}

/// The sum of the scores of the tokens that would change. math::lane_sum32() adds them in ascending
/// token order.
float changing_score(const TokenRoundingDesc& d, const Memory& m, std::int64_t expert, bool up,
                     std::int64_t wanted, std::uint64_t* keys) {
  const std::uint64_t* first = changing(d, m, expert, up, wanted, keys);
  return math::lane_sum32(static_cast<int>(wanted),
                          [&](int i) { return score_of(d, m, token_of(first[i]), expert); });
}

/// Rounds one expert: sets its count and flips the bits of the tokens that change. `up` is the
/// result of decide(). For nearest_scores this function decides itself.
void round_expert(const TokenRoundingDesc& d, const TokenRoundingArgs& a, const Memory& m,
                  const math::Candidates& c, std::int64_t expert, bool up, std::uint64_t* keys) {
  if (c.open && d.rule == RoundingRule::nearest_scores) {
    const float dropped = changing_score(d, m, expert, false, c.count - c.floor, keys);
    const float added = changing_score(d, m, expert, true, c.ceil - c.count, keys);
    up = math::score_up(dropped, added,
                        math::philox(a.seed, a.offset, static_cast<std::uint64_t>(expert)));
  }
  const std::int64_t wanted = up ? c.ceil - c.count : c.count - c.floor;
  a.counts[expert] = up ? c.ceil : c.floor;
  if (wanted == 0) return;
  const std::uint64_t* first = changing(d, m, expert, up, wanted, keys);
  for (std::int64_t i = 0; i < wanted; ++i) m.members.flip(token_of(first[i]), expert);
}

/// True to round up, by every rule that needs counts only. `error` is for balance_up().
bool decide(const TokenRoundingDesc& d, const TokenRoundingArgs& a, const math::Candidates& c,
            std::int64_t expert, std::int64_t error) {
  if (!c.open) return false;
  switch (d.rule) {
    case RoundingRule::nearest:
      return math::nearest_up(c);
    case RoundingRule::stochastic:
      return math::stochastic_up(
          c, static_cast<std::int32_t>(d.tile),
          math::philox(a.seed, a.offset, static_cast<std::uint64_t>(expert)));
    case RoundingRule::nearest_scores:
      return false;  // round_expert() decides
    case RoundingRule::balance:
      return math::balance_up(c, error);
    case RoundingRule::up:
      return true;
    case RoundingRule::down:
      return false;
  }
  return false;
}

void write_lists(const TokenRoundingDesc& d, const TokenRoundingArgs& a, const Memory& m,
                 int threads) {
  m.token_offsets[0] = 0;
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    std::int32_t entries = 0;
    for (std::int64_t w = 0; w < m.members.words_per_token(); ++w) {
      entries += std::popcount(m.members.row(t)[w]);
    }
    m.token_offsets[t + 1] = m.token_offsets[t] + entries;
  }
  parallel_ranges(threads, d.tokens, kTokensPerPiece,
                  [&](int, std::int64_t begin, std::int64_t end) {
                    for (std::int64_t t = begin; t < end; ++t) {
                      std::int64_t at = m.token_offsets[t];
                      for (std::int64_t e = 0; e < d.experts; ++e) {
                        if (!m.members.has(t, e)) continue;
                        a.scores[at] = score_of(d, m, t, e);
                        a.token_ids[at] = static_cast<std::int32_t>(t);
                        a.expert_ids[at++] = static_cast<std::int32_t>(e);
                      }
                    }
                  });
  for (std::int64_t i = m.token_offsets[d.tokens]; i < d.capacity(); ++i) {
    a.scores[i] = 0.0f;
    a.token_ids[i] = static_cast<std::int32_t>(d.tokens - 1);
    a.expert_ids[i] = static_cast<std::int32_t>(d.experts);
  }
}

template <class T>
Status run_typed(const TokenRoundingDesc& d, const TokenRoundingArgs& a, void* workspace,
                 int threads) {
  Memory m{Membership(nullptr, d.experts), {}, {}, {}, {}, {}, {}};
  Memory::layout(d, threads, workspace, &m);
  const T* logits = static_cast<const T*>(a.logits);
  if (a.error_word == nullptr) {
    const Status status = check_logits(logits, d.tokens, d.experts, m.rows, threads);
    if (!status.ok()) return status;
  }
  if (choose_tokens(d, logits, m, threads)) *a.error_word |= kBadLogits;
  // counts[e] holds f until round_expert() replaces it.
  std::fill_n(a.counts, d.experts, 0);
  for (std::int64_t s = 0; s < d.tokens * d.top_k; ++s) ++a.counts[m.ids[s]];
  if (a.frequency != nullptr) std::copy_n(a.counts, d.experts, a.frequency);
  std::int64_t error = 0;
  const auto tile = static_cast<std::int32_t>(d.tile);
  std::int32_t* goes_up = reinterpret_cast<std::int32_t*>(m.rows);  // (E); rows is free by now
  // In one thread, because the running error needs the experts in order.
  for (std::int64_t e = 0; e < d.experts; ++e) {
    const math::Candidates c = math::candidates(a.counts[e], tile, d.tokens);
    const bool up = decide(d, a, c, e, error);
    goes_up[e] = up;
    error += (up ? c.ceil : c.floor) - c.count;
  }
  parallel_for(threads, d.experts, [&](int thread, std::int64_t e) {
    const math::Candidates c = math::candidates(a.counts[e], tile, d.tokens);
    round_expert(d, a, m, c, e, goes_up[e] != 0, m.keys + thread * d.tokens);
  });
  write_lists(d, a, m, threads);
  return {};
}

std::size_t workspace(const TokenRoundingDesc& d, const Exec& exec) {
  return Memory::layout(d, exec.threads, nullptr, nullptr);
}

Status run(const TokenRoundingDesc& d, const TokenRoundingArgs& args, void* memory,
           const Exec& exec) noexcept {
  TokenRoundingArgs a = args;
  if (a.draws != nullptr) {
    a.seed = a.draws[0];
    a.offset = a.draws[1];
  }
  return visit_dtype(
      d.dtype, [&](auto type) { return run_typed<decltype(type)>(d, a, memory, exec.threads); });
}

}  // namespace

const Kernel<TokenRoundingDesc> kTokenRounding = {
    .op = "token_rounding",
    .name = "cpu.token_rounding",
    .dtypes = kStorageTypes,
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cpu
