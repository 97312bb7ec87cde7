#include "testkit/rounding.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <tuple>

namespace sonicmoe::testkit {
namespace {

/// Everything about one expert before a decision is taken.
struct Expert {
  std::int64_t count, floor, ceil;
  bool open;                         // up and down are both possible
  std::vector<std::int32_t> ranked;  // every token, best first: the chosen ones, then the others
};

class Experts {
 public:
  Experts(const TokenRoundingDesc& desc, const TokenChoice& choice)
      : desc_(desc),
        choice_(choice),
        chosen_(desc.tokens * desc.experts),
        scores_(choice.probabilities) {
    for (std::int64_t slot = 0; slot < desc.tokens * desc.top_k; ++slot) {
      const std::int64_t pair = slot / desc.top_k * desc.experts + choice.ids[slot];
      chosen_[pair] = true;
      scores_[pair] = choice.scores[slot];
    }
  }

  bool chosen(std::int64_t t, std::int64_t e) const { return chosen_[t * desc_.experts + e]; }
  float probability(std::int64_t t, std::int64_t e) const {
    return choice_.probabilities[t * desc_.experts + e];
  }
  float score(std::int64_t t, std::int64_t e) const { return scores_[t * desc_.experts + e]; }

  Expert operator[](std::int64_t e) const {
    Expert x;
    x.count = 0;
    for (std::int64_t t = 0; t < desc_.tokens; ++t) x.count += chosen(t, e);
    x.floor = x.count - x.count % desc_.tile;
    x.ceil = x.count % desc_.tile == 0 ? x.count : x.floor + desc_.tile;
    x.open = x.ceil > x.floor && x.ceil <= desc_.tokens;
    x.ranked.resize(desc_.tokens);
    std::iota(x.ranked.begin(), x.ranked.end(), 0);
    std::sort(x.ranked.begin(), x.ranked.end(), [&](std::int32_t a, std::int32_t b) {
      return std::tuple(!chosen(a, e), -probability(a, e), a) <
             std::tuple(!chosen(b, e), -probability(b, e), b);
    });
    return x;
  }

  /// Scores of the tokens ranked [begin, end), by ascending token.
  std::vector<float> scores(const Expert& x, std::int64_t e, std::int64_t begin,
                            std::int64_t end) const {
    std::vector<std::int32_t> tokens(x.ranked.begin() + begin, x.ranked.begin() + end);
    std::sort(tokens.begin(), tokens.end());
    std::vector<float> out;
    for (const std::int32_t t : tokens) out.push_back(score(t, e));
    return out;
  }

 private:
  const TokenRoundingDesc& desc_;
  const TokenChoice& choice_;
  std::vector<bool> chosen_;   // (T, E): by top-K
  std::vector<float> scores_;  // (T, E): of the pair, if it is routed
};

/// The documented order of sums: term i goes to lane i mod 32, then lanes fold in halves.
float lane_sum(const std::vector<float>& terms) {
  std::array<float, 32> lanes{};
  for (std::size_t i = 0; i < terms.size(); ++i) lanes[i % 32] += terms[i];
  for (std::size_t half = 16; half > 0; half /= 2) {
    for (std::size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

double sum(const std::vector<float>& terms) {
  return std::accumulate(terms.begin(), terms.end(), 0.0);
}

std::uint32_t draw(std::uint64_t seed, std::uint64_t offset, std::int64_t expert) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  return philox4x32_10({low(offset), high(offset), low(expert), 0}, {low(seed), high(seed)})[0];
}

bool goes_up(const TokenRoundingDesc& desc, const Experts& experts, const Expert& x, std::int64_t e,
             std::int64_t error, std::uint32_t random) {
  const std::int64_t up = x.ceil - x.count, down = x.count - x.floor;
  switch (desc.rule) {
    case RoundingRule::nearest:
      return up < down;
    case RoundingRule::stochastic:
      return random * static_cast<std::uint64_t>(desc.tile) < static_cast<std::uint64_t>(down)
                                                                  << 32;
    case RoundingRule::nearest_scores: {
      const float dropped = lane_sum(experts.scores(x, e, x.floor, x.count));
      const float added = lane_sum(experts.scores(x, e, x.count, x.ceil));
      const float uniform = static_cast<float>(random / 256) / 16777216.0f;
      const float total = dropped + added;
      return uniform * total < dropped;
    }
    case RoundingRule::balance:
      return std::abs(error + up) < std::abs(error - down);
    case RoundingRule::up:
      return true;
    case RoundingRule::down:
      return false;
  }
  return false;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace

std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> counter,
                                           std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = 0xD2511F53ull * counter[0], b = 0xCD9E8D57ull * counter[2];
    counter = {
        static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
        static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

std::string first_difference(const RoundedLists& a, const RoundedLists& b) {
  if (!same_bits(a.frequency, b.frequency)) return "frequency";
  if (!same_bits(a.counts, b.counts)) return "counts";
  if (!same_bits(a.token_ids, b.token_ids)) return "token_ids";
  if (!same_bits(a.expert_ids, b.expert_ids)) return "expert_ids";
  if (!same_bits(a.scores, b.scores)) return "scores";
  return "";
}

RoundedLists round_tokens(const TokenRoundingDesc& desc, const TokenChoice& choice,
                          std::uint64_t seed, std::uint64_t offset) {
  const Experts experts(desc, choice);
  RoundedLists out;
  std::vector<std::pair<std::int32_t, std::int32_t>> entries;  // (token, expert)
  std::int64_t error = 0;
  for (std::int64_t e = 0; e < desc.experts; ++e) {
    const Expert x = experts[e];
    const bool up = x.open && goes_up(desc, experts, x, e, error, draw(seed, offset, e));
    const std::int64_t count = up ? x.ceil : x.floor;
    error += count - x.count;
    out.frequency.push_back(static_cast<std::int32_t>(x.count));
    out.counts.push_back(static_cast<std::int32_t>(count));
    for (std::int64_t rank = 0; rank < count; ++rank) {
      entries.emplace_back(x.ranked[rank], static_cast<std::int32_t>(e));
    }
  }
  std::sort(entries.begin(), entries.end());
  for (const auto& [t, e] : entries) {
    out.token_ids.push_back(t);
    out.expert_ids.push_back(e);
    out.scores.push_back(experts.score(t, e));
  }
  out.token_ids.resize(desc.capacity(), static_cast<std::int32_t>(desc.tokens - 1));
  out.expert_ids.resize(desc.capacity(), static_cast<std::int32_t>(desc.experts));
  out.scores.resize(desc.capacity(), 0.0f);
  return out;
}

std::vector<double> up_probabilities(const TokenRoundingDesc& desc, const TokenChoice& choice) {
  const Experts experts(desc, choice);
  std::vector<double> out(desc.experts, 0.0);
  for (std::int64_t e = 0; e < desc.experts; ++e) {
    const Expert x = experts[e];
    if (!x.open) continue;
    if (desc.rule == RoundingRule::stochastic) {
      out[e] = static_cast<double>(x.count - x.floor) / static_cast<double>(desc.tile);
    } else if (desc.rule == RoundingRule::nearest_scores) {
      const double floor_best = sum(experts.scores(x, e, 0, x.floor));
      const double ceil_best = sum(experts.scores(x, e, 0, x.ceil));
      out[e] = (sum(experts.scores(x, e, 0, x.count)) - floor_best) / (ceil_best - floor_best);
    }
  }
  return out;
}

std::string explain_rounding(const TokenRoundingDesc& desc, const TokenChoice& choice,
                             const RoundedLists& lists) {
  const std::int64_t T = desc.tokens, E = desc.experts, K = desc.top_k, tile = desc.tile;
  const auto say = [](const char* what, std::int64_t e, std::int64_t value) {
    return std::string(what) + ": " + std::to_string(value) + ", expert " + std::to_string(e);
  };
  std::vector<std::int64_t> chosen(E, 0), kept(E, 0), added(E, 0);
  for (const std::int32_t e : choice.ids) ++chosen[e];

  std::int64_t entries = 0;
  std::int64_t last = -1;
  for (; entries < desc.capacity() && lists.expert_ids[entries] != E; ++entries) {
    const std::int64_t t = lists.token_ids[entries], e = lists.expert_ids[entries];
    if (t < 0 || t >= T || e < 0 || e > E) return say("no such token", e, t);
    if (t * E + e <= last) return say("not by token, then expert, at token", e, t);
    last = t * E + e;
    const auto begin = choice.ids.begin() + t * K;
    const auto found = std::find(begin, begin + K, e);
    const bool is_chosen = found != begin + K;
    ++(is_chosen ? kept : added)[e];
    const float score =
        is_chosen ? choice.scores[found - choice.ids.begin()] : choice.probabilities[t * E + e];
    if (std::memcmp(&lists.scores[entries], &score, sizeof score) != 0) {
      return say("another score than plain routing's at token", e, t);
    }
  }
  for (; entries < desc.capacity(); ++entries) {
    const bool padding = lists.expert_ids[entries] == E && lists.token_ids[entries] == T - 1 &&
                         lists.scores[entries] == 0;
    if (!padding) return say("no sentinel at position", E, entries);
  }

  std::int64_t error = 0;
  bool clamped = false;
  for (std::int64_t e = 0; e < E; ++e) {
    const std::int64_t f = chosen[e], count = lists.counts[e];
    const std::int64_t deviation = count - f;
    const bool clamps = f % tile != 0 && f - f % tile + tile > T;
    if (lists.frequency[e] != f) return say("wrong frequency", e, lists.frequency[e]);
    if (kept[e] + added[e] != count) return say("count and list differ", e, count);
    if (count % tile != 0) return say("not a multiple of the tile", e, count);
    if (std::abs(deviation) >= tile) return say("deviation of a tile or more", e, deviation);
    if (f % tile == 0 && deviation != 0) return say("changed a multiple of the tile", e, count);
    if (clamps && deviation > 0) return say("ceil above T, yet not floor", e, count);
    if (kept[e] < f && added[e] > 0) return say("chosen tokens dropped for others", e, added[e]);
    if (desc.rule == RoundingRule::up && !clamps && kept[e] < f) return say("UP drops", e, count);
    if (desc.rule == RoundingRule::down && added[e] > 0) return say("DOWN adds", e, count);
    if (desc.rule == RoundingRule::nearest && !clamps && 2 * std::abs(deviation) > tile) {
      return say("not the nearest multiple", e, count);
    }
    if (desc.rule == RoundingRule::nearest && 2 * deviation == tile) return say("tie up", e, count);
    error += deviation;
    clamped = clamped || clamps;
    if (desc.rule == RoundingRule::balance && !clamped && 2 * std::abs(error) > tile) {
      return say("balance lost, sum of deviations", e, error);
    }
    if (tile == 1 && (kept[e] != f || added[e] != 0)) return say("tile 1 changed", e, count);
  }
  return "";
}

}  // namespace sonicmoe::testkit
