// The two stochastic rules: the generator, and that the draws have the probabilities promised. All
// seeds are fixed, so the outcome is the same on every run; limits are 4 or 5 standard deviations.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "math/philox.h"
#include "testkit/rounding.h"
#include "tests/token_rounding_cases.h"

namespace sonicmoe::testkit {
namespace {

using Words = std::array<std::uint32_t, 4>;

// From the known-answer file of the Random123 library.
TEST(Philox, KnownAnswers) {
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32_10({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, LibraryGivesTheFirstWord) {
  EXPECT_EQ(math::philox(0, 0, 0), 0x6627e8d5u);
  EXPECT_EQ(math::philox(~0ull, ~0ull, ~0ull), 0x408f276du);
  EXPECT_EQ(math::philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e), 0xd16cfe09u);
}

constexpr std::int64_t kDraws = 4000;

struct Draw {
  std::uint64_t seed, offset;
};

/// How often each expert went up, and how many did in each draw.
struct Tally {
  std::vector<double> probability;  // (E): by the definition
  std::vector<std::int64_t> ups;    // (E)
  std::vector<double> totals;       // (draws)
};

RoundingRunner make_runner(RoundingRule rule) {
  TokenRoundingDesc d;
  d.tokens = 150;
  d.experts = 24;
  d.top_k = 3;
  d.tile = 16;
  d.rule = rule;
  const RoundingCase c = plain_rounding_case(1, d);
  return RoundingRunner(c.desc, c.logits);
}

std::vector<bool> went_up(const RoundingRunner& runner, Draw draw) {
  Options options;
  options.threads = 1;
  const auto lists = runner.round(draw.seed, draw.offset, options);
  EXPECT_TRUE(lists.ok()) << lists.status().message();
  std::vector<bool> out;
  for (std::int64_t e = 0; e < runner.desc().experts; ++e) {
    out.push_back(lists.value().counts[e] > lists.value().frequency[e]);
  }
  return out;
}

Tally tally(RoundingRule rule, const std::function<Draw(std::uint64_t)>& draw) {
  const RoundingRunner runner = make_runner(rule);
  const auto choice = runner.choose();
  Tally out{up_probabilities(runner.desc(), choice.value()), {}, {}};
  out.ups.assign(runner.desc().experts, 0);
  for (std::uint64_t i = 0; i < kDraws; ++i) {
    const std::vector<bool> ups = went_up(runner, draw(i));
    for (std::size_t e = 0; e < ups.size(); ++e) out.ups[e] += ups[e];
    out.totals.push_back(static_cast<double>(std::count(ups.begin(), ups.end(), true)));
  }
  return out;
}

/// Sum over the experts that can go both ways of (ups - N p)^2 / (N p (1 - p)).
struct ChiSquare {
  double value = 0;
  double degrees = 0;
  /// Wilson and Hilferty: (chi^2 / n)^(1/3) is nearly normal. In standard deviations.
  double deviation() const {
    const double variance = 2 / (9 * degrees);
    return (std::cbrt(value / degrees) - (1 - variance)) / std::sqrt(variance);
  }
};

ChiSquare chi_square(const Tally& tally, double shift = 0) {
  ChiSquare out;
  for (std::size_t e = 0; e < tally.ups.size(); ++e) {
    const double p = tally.probability[e] + shift;
    if (tally.probability[e] <= 0 || p >= 1) continue;
    const double excess = static_cast<double>(tally.ups[e]) - kDraws * p;
    out.value += excess * excess / (kDraws * p * (1 - p));
    ++out.degrees;
  }
  return out;
}

double mean(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value;
  return sum / static_cast<double>(x.size());
}

void expect_the_probabilities_promised(RoundingRule rule,
                                       const std::function<Draw(std::uint64_t)>& draw) {
  const Tally t = tally(rule, draw);
  const ChiSquare found = chi_square(t);
  EXPECT_GE(found.degrees, 15);
  EXPECT_LT(std::fabs(found.deviation()), 4) << "chi-square " << found.value;
  // The test sees a probability that is off by 0.03.
  EXPECT_GT(chi_square(t, 0.03).deviation(), 8);

  // Experts are independent: the variance of the number that go up is the sum of p (1 - p). The
  // sample variance of N nearly normal numbers scatters by sqrt(2 / N) of itself.
  double variance = 0;
  for (const double p : t.probability) variance += p * (1 - p);
  const double average = mean(t.totals);
  double square = 0, next = 0;
  for (std::size_t i = 0; i < t.totals.size(); ++i) {
    square += (t.totals[i] - average) * (t.totals[i] - average);
    if (i > 0) next += (t.totals[i] - average) * (t.totals[i - 1] - average);
  }
  EXPECT_NEAR(square / kDraws / variance, 1, 5 * std::sqrt(2.0 / kDraws));
  // So are draws that follow each other: their correlation scatters by 1 / sqrt(N).
  EXPECT_NEAR(next / square, 0, 5 / std::sqrt(1.0 * kDraws));
}

TEST(StochasticRounding, CountsByOffset) {
  expect_the_probabilities_promised(RoundingRule::stochastic, [](std::uint64_t i) {
    return Draw{7, i};
  });
}

TEST(StochasticRounding, CountsBySeed) {
  expect_the_probabilities_promised(RoundingRule::stochastic, [](std::uint64_t i) {
    return Draw{i, 7};
  });
}

TEST(StochasticRounding, ScoresByOffset) {
  expect_the_probabilities_promised(RoundingRule::nearest_scores, [](std::uint64_t i) {
    return Draw{7, i};
  });
}

TEST(StochasticRounding, ScoresBySeed) {
  expect_the_probabilities_promised(RoundingRule::nearest_scores, [](std::uint64_t i) {
    return Draw{i, 7};
  });
}

TEST(StochasticRounding, SameSeedAndOffsetSameDrawAnotherAnother) {
  TokenRoundingDesc d;
  d.tokens = 64;
  d.experts = 300;
  d.top_k = 20;
  d.tile = 8;
  for (const RoundingRule rule : {RoundingRule::stochastic, RoundingRule::nearest_scores}) {
    d.rule = rule;
    const RoundingCase c = plain_rounding_case(3, d);
    const RoundingRunner runner(c.desc, c.logits);
    const auto choice = runner.choose();
    double expected = 0, variance = 0;  // of the number of experts on which two draws differ
    for (const double p : up_probabilities(c.desc, choice.value())) {
      const double differ = 2 * p * (1 - p);
      expected += differ;
      variance += differ * (1 - differ);
    }
    ASSERT_GT(expected, 50);
    constexpr std::uint64_t kHigh = std::uint64_t{1} << 32;  // every bit of both counts
    const std::vector<bool> first = went_up(runner, {5, 9});
    EXPECT_EQ(first, went_up(runner, {5, 9}));
    for (const Draw other :
         {Draw{6, 9}, Draw{5, 10}, Draw{9, 5}, Draw{5 + kHigh, 9}, Draw{5, 9 + kHigh}}) {
      const std::vector<bool> second = went_up(runner, other);
      double differ = 0;
      for (std::size_t e = 0; e < first.size(); ++e) differ += first[e] != second[e];
      EXPECT_NEAR(differ, expected, 5 * std::sqrt(variance))
          << name(rule) << ", seed " << other.seed << ", offset " << other.offset;
    }
  }
}

TEST(StochasticRounding, OtherRulesDoNotDraw) {
  for (const RoundingRule rule :
       {RoundingRule::nearest, RoundingRule::balance, RoundingRule::up, RoundingRule::down}) {
    const RoundingRunner runner = make_runner(rule);
    EXPECT_EQ(went_up(runner, {1, 2}), went_up(runner, {3, 4})) << name(rule);
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
