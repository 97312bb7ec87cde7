// Token rounding against an independent reference and against its promises, over random cases.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "math/rounding.h"
#include "testkit/rounding.h"
#include "tests/device.h"
#include "tests/token_rounding_cases.h"

namespace sonicmoe::testkit {
namespace {

/// What the random cases have seen, so that they cannot quietly stop covering something.
struct Coverage {
  std::int64_t up = 0, down = 0, ties = 0, clamped = 0, empty = 0;
  std::int64_t zero_probability = 0;

  void add(const TokenRoundingDesc& d, const RoundedLists& lists) {
    for (std::int64_t e = 0; e < d.experts; ++e) {
      const std::int64_t f = lists.frequency[e], rest = f % d.tile;
      up += lists.counts[e] > f;
      down += lists.counts[e] < f;
      ties += 2 * rest == d.tile;
      clamped += rest > 0 && f - rest + d.tile > d.tokens;
      empty += f == 0;
    }
    for (std::size_t i = 0; i < lists.scores.size(); ++i) {
      zero_probability += lists.expert_ids[i] < d.experts && lists.scores[i] == 0;
    }
  }
};

TEST(TokenRounding, TenThousandRandomCasesAgreeWithTheReferenceAndKeepEveryPromise) {
  // Elsewhere than on the CPU most of the time is the tests' own.
  constexpr std::int64_t kCases = kOnCpu ? 10000 : 1000;
  Coverage seen;
  for (std::int64_t number = 0; number < kCases; ++number) {
    const RoundingCase c = random_rounding_case(number);
    SCOPED_TRACE("case " + std::to_string(number) + ": " + c.text());
    const RoundingRunner runner(c.desc, c.logits, kDevice);
    Options one;
    one.threads = 1;
    const auto choice = runner.choose(one);
    ASSERT_TRUE(choice.ok()) << choice.status().message();
    const auto lists = runner.round(c.seed, c.offset, one);
    ASSERT_TRUE(lists.ok()) << lists.status().message();
    ASSERT_EQ(explain_rounding(c.desc, choice.value(), lists.value()), "");
    const RoundedLists expected = round_tokens(c.desc, choice.value(), c.seed, c.offset);
    ASSERT_EQ(first_difference(expected, lists.value()), "");

    Options several;
    several.threads = std::array{2, 3, 7}[number % 3];
    const auto again = runner.round(c.seed, c.offset, several);
    ASSERT_TRUE(again.ok()) << again.status().message();
    ASSERT_EQ(first_difference(lists.value(), again.value()), "") << several.threads << " threads";
    seen.add(c.desc, lists.value());
  }
  EXPECT_GT(seen.up, kCases);
  EXPECT_GT(seen.down, kCases);
  EXPECT_GT(seen.ties, kCases / 20);
  EXPECT_GT(seen.clamped, kCases);
  EXPECT_GT(seen.empty, kCases);
  EXPECT_GT(seen.zero_probability, kCases);
}

/// Sizes at which a backend may take another way: an expert's tokens no longer fit into a block's
/// shared memory, a row of logits no longer fits a warp, a token has more entries than a warp
/// lanes.
TEST(TokenRounding, ManyTokensOrExperts) {
  struct Size {
    std::int64_t tokens, experts, top_k, tile;
  };
  constexpr Size kSizes[] = {{12289, 40, 3, 128}, {33000, 9, 2, 1024}, {65536, 5, 2, 128},
                             {200, 1024, 40, 16}, {150, 2100, 5, 8},   {70, 300, 80, 32}};
  std::uint64_t number = 0;
  for (const Size& size : kSizes) {
    for (int rule = 0; rule < 6; ++rule) {
      TokenRoundingDesc d;
      d.tokens = size.tokens;
      d.experts = size.experts;
      d.top_k = size.top_k;
      d.tile = size.tile;
      d.rule = static_cast<RoundingRule>(rule);
      const RoundingCase c = plain_rounding_case(++number, d);
      SCOPED_TRACE(c.text());
      const RoundingRunner runner(c.desc, c.logits, kDevice);
      const auto choice = runner.choose();
      ASSERT_TRUE(choice.ok()) << choice.status().message();
      const auto lists = runner.round(c.seed, c.offset);
      ASSERT_TRUE(lists.ok()) << lists.status().message();
      const RoundedLists expected = round_tokens(c.desc, choice.value(), c.seed, c.offset);
      ASSERT_EQ(first_difference(expected, lists.value()), "");
    }
  }
}

TEST(TokenRounding, TileOneIsPlainTopK) {
  for (std::uint64_t number = 0; number < 200; ++number) {
    RoundingCase c = random_rounding_case(number);
    c.desc.tile = 1;
    SCOPED_TRACE(c.text());
    const RoundingRunner runner(c.desc, c.logits, kDevice);
    const auto choice = runner.choose();
    const auto lists = runner.round(c.seed, c.offset);
    ASSERT_TRUE(choice.ok() && lists.ok());
    const std::int64_t K = c.desc.top_k;
    ASSERT_EQ(lists.value().scores.size(), choice.value().scores.size());
    for (std::int64_t i = 0; i < c.desc.tokens * K; ++i) {
      // Entry i of the lists is one of its token's K, by expert id.
      const std::int64_t t = i / K;
      std::vector<std::pair<std::int32_t, float>> token;
      for (std::int64_t slot = t * K; slot < (t + 1) * K; ++slot) {
        token.emplace_back(choice.value().ids[slot], choice.value().scores[slot]);
      }
      std::sort(token.begin(), token.end());
      ASSERT_EQ(lists.value().token_ids[i], t);
      ASSERT_EQ(lists.value().expert_ids[i], token[i % K].first);
      ASSERT_EQ(math::bits(lists.value().scores[i]), math::bits(token[i % K].second));
    }
  }
}

/// Eight tokens, three experts, K = 1, tile 4. Tokens 0-2 choose expert 0, tokens 3 and 4 expert 1,
/// the others expert 2; so f = 3, 2, 3. A token's second choice is the expert after.
struct ByHand {
  static constexpr double kLogits[8][3] = {
      {9, 1, 0}, {8, 3, 0}, {7, 2, 0},  // chose 0
      {0, 6, 1}, {0, 5, 3},             // chose 1
      {1, 0, 9}, {4, 0, 8}, {2, 0, 9},  // chose 2
  };
  static TokenRoundingDesc desc(RoundingRule rule) {
    TokenRoundingDesc d;
    d.tokens = 8;
    d.experts = 3;
    d.top_k = 1;
    d.dtype = DType::f32;
    d.rule = rule;
    d.tile = 4;
    return d;
  }
  static RoundedLists round(RoundingRule rule) {
    Tensor logits;
    for (const auto& row : kLogits) logits.insert(logits.end(), row, row + 3);
    const RoundingRunner runner(desc(rule), encode(logits, DType::f32), kDevice);
    auto lists = runner.round(0, 0);
    EXPECT_TRUE(lists.ok()) << lists.status().message();
    return lists.value();
  }
  /// Tokens of one expert.
  static std::vector<std::int32_t> tokens(const RoundedLists& lists, std::int32_t expert) {
    std::vector<std::int32_t> out;
    for (std::size_t i = 0; i < lists.token_ids.size(); ++i) {
      if (lists.expert_ids[i] == expert) out.push_back(lists.token_ids[i]);
    }
    return out;
  }
};

using Ints = std::vector<std::int32_t>;

TEST(TokenRoundingByHand, Nearest) {
  const RoundedLists lists = ByHand::round(RoundingRule::nearest);
  EXPECT_EQ(lists.frequency, (Ints{3, 2, 3}));
  EXPECT_EQ(lists.counts, (Ints{4, 0, 4}));  // 2 is a tie: down
  // Token 6 has the best probability of expert 0 among those that chose another, token 4 of 2.
  EXPECT_EQ(ByHand::tokens(lists, 0), (Ints{0, 1, 2, 6}));
  EXPECT_EQ(ByHand::tokens(lists, 2), (Ints{4, 5, 6, 7}));
}

TEST(TokenRoundingByHand, Up) {
  const RoundedLists lists = ByHand::round(RoundingRule::up);
  EXPECT_EQ(lists.counts, (Ints{4, 4, 4}));
  EXPECT_EQ(ByHand::tokens(lists, 1), (Ints{1, 2, 3, 4}));
  // min(T E, T K + min(E, T K)(tile - 1)) = min(24, 17) entries, of which 12 are used.
  ASSERT_EQ(lists.scores.size(), 17u);
  EXPECT_EQ(lists.expert_ids, (Ints{0, 0, 1, 0, 1, 1, 1, 2, 2, 0, 2, 2, 3, 3, 3, 3, 3}));
  EXPECT_EQ(lists.token_ids, (Ints{0, 1, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 7, 7, 7, 7, 7}));
  // Chosen entries carry top-1's score, 1; added ones their probability, here e^(3-8).
  EXPECT_EQ(lists.scores[1], 1.0f);
  EXPECT_NEAR(lists.scores[2], std::exp(-5.0) / (1 + std::exp(-5.0) + std::exp(-8.0)), 1e-8);
  EXPECT_EQ(lists.scores[12], 0.0f);
}

TEST(TokenRoundingByHand, Down) {
  const RoundedLists lists = ByHand::round(RoundingRule::down);
  EXPECT_EQ(lists.counts, (Ints{0, 0, 0}));
  EXPECT_EQ(lists.frequency, (Ints{3, 2, 3}));
}

TEST(TokenRoundingByHand, Balance) {
  // Expert 0: |+1| < |-3|, up, z = 1. Expert 1: |2+1| < |-2+1| is false, down, z = -1.
  // Expert 2: |1-1| < |-3-1|, up, z = 0.
  const RoundedLists lists = ByHand::round(RoundingRule::balance);
  EXPECT_EQ(lists.counts, (Ints{4, 0, 4}));
}

TEST(TokenRoundingByHand, CeilPastTheTokensTakesFloor) {
  TokenRoundingDesc d = ByHand::desc(RoundingRule::up);
  d.tile = 9;
  const RoundingRunner runner(d, encode(Tensor(24, 0.5), DType::f32), kDevice);
  const auto lists = runner.round(0, 0);
  ASSERT_TRUE(lists.ok());
  EXPECT_EQ(lists.value().frequency, (Ints{8, 0, 0}));
  EXPECT_EQ(lists.value().counts, (Ints{0, 0, 0}));
}

TEST(RoundingDecisions, StochasticGoesUpForExactlyItsShareOfDraws) {
  for (const std::int32_t tile : {2, 3, 128, 1000, 1024}) {
    for (std::int32_t rest = 1; rest < tile; ++rest) {
      const math::Candidates c = math::candidates(5 * tile + rest, tile, 100 * tile);
      ASSERT_TRUE(c.open);
      // The last draw that goes up is the largest below rest/tile of 2^32.
      const std::uint64_t share = (std::uint64_t{1} << 32) * static_cast<std::uint64_t>(rest);
      const auto last = static_cast<std::uint32_t>((share - 1) / static_cast<std::uint64_t>(tile));
      ASSERT_TRUE(math::stochastic_up(c, tile, 0));
      ASSERT_TRUE(math::stochastic_up(c, tile, last));
      ASSERT_FALSE(math::stochastic_up(c, tile, last + 1));
      ASSERT_FALSE(math::stochastic_up(c, tile, 0xffffffffu));
    }
  }
}

TEST(RoundingDecisions, CountsAtTheirLimit) {
  constexpr std::int32_t kMost = INT32_MAX;
  for (const std::int32_t tile : {2, 3, 128, 1000, 1024}) {
    const math::Candidates last = math::candidates(kMost, tile, kMost);
    EXPECT_EQ(last.floor, kMost / tile * tile) << tile;
    EXPECT_FALSE(last.open) << tile;
    EXPECT_GE(last.ceil, last.count) << tile;
    const math::Candidates before = math::candidates(last.floor - 1, tile, kMost);
    EXPECT_EQ(before.ceil, last.floor) << tile;
    EXPECT_TRUE(before.open) << tile;
  }
}

TEST(RoundingDecisions, ScoresAtTheirLimits) {
  EXPECT_FALSE(math::score_up(0.0f, 0.0f, 0));           // nothing to gain or lose: down
  EXPECT_FALSE(math::score_up(0.0f, 1.0f, 0));           // never
  EXPECT_TRUE(math::score_up(1.0f, 0.0f, 0xffffffffu));  // always
  EXPECT_TRUE(math::score_up(1.0f, 1.0f, 0x7fffffffu));  // half
  EXPECT_FALSE(math::score_up(1.0f, 1.0f, 0x80000000u));
}

TEST(RoundingRules, NamesRoundTrip) {
  for (int i = 0; i < 6; ++i) {
    const auto rule = static_cast<RoundingRule>(i);
    RoundingRule parsed = RoundingRule::nearest;
    EXPECT_TRUE(parse(name(rule), &parsed));
    EXPECT_EQ(parsed, rule);
  }
  const std::pair<const char*, RoundingRule> published[] = {{"nr", RoundingRule::nearest},
                                                            {"sr", RoundingRule::stochastic},
                                                            {"nr_s", RoundingRule::nearest_scores}};
  for (const auto& [word, rule] : published) {
    RoundingRule parsed = RoundingRule::balance;
    EXPECT_TRUE(parse(word, &parsed));
    EXPECT_EQ(parsed, rule);
    const auto layer = parse_layer(std::string("rounding_rule=") + word);
    ASSERT_TRUE(layer.ok());
    EXPECT_EQ(layer->rounding.rule, rule);
  }
  RoundingRule untouched = RoundingRule::balance;
  EXPECT_FALSE(parse("sideways", &untouched));
  EXPECT_EQ(untouched, RoundingRule::balance);
}

}  // namespace
}  // namespace sonicmoe::testkit
