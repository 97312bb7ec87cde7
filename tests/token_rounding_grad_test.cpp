// The gradient of rounded scores: fp64 oracle by finite differences, library by the oracle, and in
// fp32 by finite differences of its own forward.
#include <gtest/gtest.h>

#include <cmath>

#include "testkit/inputs.h"
#include "testkit/rounding.h"
#include "tests/device.h"
#include "tests/token_rounding_cases.h"

namespace sonicmoe::testkit {
namespace {

Tensor normal_tensor(std::uint64_t seed, std::uint64_t stream, std::size_t size) {
  const Random random(seed, stream);
  Tensor out(size);
  for (std::size_t i = 0; i < size; ++i) out[i] = round_to(random.normal(i), DType::f32);
  return out;
}

double dot(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Logits, what plain routing makes of them, what rounding does, and a gradient of the scores.
struct Rounding {
  RoundingCase c;
  RoundingRunner runner;
  TokenChoice choice;
  RoundedLists lists;
  Tensor dscores;
  std::string text;

  explicit Rounding(const RoundingCase& from)
      : c(from), runner(from.desc, from.logits, kDevice), text(from.text()) {
    auto chosen = runner.choose();
    auto rounded = runner.round(c.seed, c.offset);
    EXPECT_TRUE(chosen.ok() && rounded.ok()) << text;
    choice = chosen.value();
    lists = rounded.value();
    dscores = normal_tensor(c.seed, 5, lists.scores.size());
  }
};

TokenRoundingDesc small_desc(std::uint64_t number) {
  const Random random(number, 4);
  TokenRoundingDesc d;
  d.rule = static_cast<RoundingRule>(number % 6);
  d.order = static_cast<RouterOrder>(random.below(0, 2));
  d.renormalize = random.below(1, 2) == 0;
  d.tokens = 8 + random.below(2, 8);
  d.experts = 2 + random.below(3, 6);
  d.top_k = 1 + random.below(4, std::min<std::int64_t>(3, d.experts));
  d.tile = 4;
  return d;
}

// With h = 2^-13 the third-order term is below 16/6 h^2 = 4e-8 of sum |g| s, see below, and fp64
// noise 2^-52 / h = 2e-12 of it.
TEST(TokenRoundingGrad, OracleAgreesWithFiniteDifferences) {
  constexpr double h = 0x1p-13;
  for (std::uint64_t number = 0; number < 120; ++number) {
    const Rounding s(plain_rounding_case(number, small_desc(number)));
    const Tensor logits = s.runner.logits();
    const Tensor v = normal_tensor(number, 6, logits.size());
    const auto at = [&](double step) {
      Tensor moved = logits;
      for (std::size_t i = 0; i < v.size(); ++i) moved[i] += step * v[i] / 4;  // |v/4| < 1
      return rounded_scores(s.c.desc, moved, s.choice.ids, s.lists);
    };
    const RoundedScoresGrad grad =
        rounded_scores_grad(s.c.desc, logits, s.choice.ids, s.lists, s.dscores);
    const double slope = (dot(s.dscores, at(h)) - dot(s.dscores, at(-h))) / (2 * h);
    double mass = 0;
    const Tensor scores = at(0);
    for (std::size_t i = 0; i < scores.size(); ++i) mass += std::fabs(s.dscores[i]) * scores[i];
    EXPECT_NEAR(dot(grad.value, v) / 4, slope, 5e-8 * mass) << number << ": " << s.text;
  }
}

/// Where the library's fp32 arithmetic may end up, for one element. With u = 2^-24, D the largest
/// distance of a logit from its row's maximum (e^-104 is 0 in fp32):
/// - a term e^(x-max) is off by D u from the subtraction and 1.6 u from exp;
/// - a sum of E terms in 32 lanes adds E/32 + 5 roundings, one of K in order K; each division 1; so
///   a probability or score is off by at most eps = (4 D + 2 (E/32 + 6) + K + 12) u, relatively,
///   and by 2^-148 where it underflows;
/// - inner = sum g p has E fma's: off by (E u + eps) sum |g| p;
/// - so p (g - inner) is off by (2 eps + (E + 4) u) p (|g| + sum |g| p), which is `magnitude`;
/// - two such terms and dlogits_in are added, and the result is stored.
double bound(const TokenRoundingDesc& d, double range, double exact, double magnitude,
             double outside, double largest) {
  constexpr double u = 0x1p-24;
  const double E = static_cast<double>(d.experts), K = static_cast<double>(d.top_k);
  const double eps = (4 * std::min(range, 104.0) + 2 * (E / 32 + 6) + K + 12) * u;
  const double fp32 = (2 * eps + (E + 4) * u) * magnitude +
                      2 * u * (magnitude + std::fabs(outside)) + 0x1p-148 * (E + K) * (1 + largest);
  const double storage = d.dtype == DType::bf16 ? 0x1p-8 : u;
  return fp32 + storage * (std::fabs(exact) + fp32) +
         (d.dtype == DType::bf16 ? 0x1p-134 : 0x1p-150);
}

void expect_agrees_with_the_oracle(const Rounding& s, bool outside) {
  const TokenRoundingDesc& d = s.c.desc;
  const Tensor logits = s.runner.logits();
  Tensor dlogits_in;
  if (outside) {
    dlogits_in = decode(encode(normal_tensor(s.c.seed, 7, logits.size()), d.dtype), d.dtype);
  }
  Tensor given = s.dscores;
  for (std::size_t i = 0; i < given.size(); ++i) {  // what sentinels carry must not matter
    if (s.lists.expert_ids[i] >= d.experts) given[i] = std::nan("");
  }
  const auto ours = s.runner.gradient(s.lists, given, dlogits_in);
  ASSERT_TRUE(ours.ok()) << ours.status().message();
  const RoundedScoresGrad exact = rounded_scores_grad(d, logits, s.choice.ids, s.lists, s.dscores);
  double largest = 0;
  for (const double g : s.dscores) largest = std::max(largest, std::fabs(g));
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    double max = -HUGE_VAL, min = HUGE_VAL;
    for (std::int64_t e = 0; e < d.experts; ++e) {
      max = std::max(max, logits[t * d.experts + e]);
      min = std::min(min, logits[t * d.experts + e]);
    }
    for (std::int64_t i = t * d.experts; i < (t + 1) * d.experts; ++i) {
      const double in = outside ? dlogits_in[i] : 0;
      const double expected = exact.value[i] + in;
      ASSERT_NEAR(ours.value()[i], expected,
                  bound(d, max - min, expected, exact.magnitude[i], in, largest))
          << "token " << t << ", expert " << i % d.experts;
    }
  }
  Options several;
  several.threads = 3;
  const auto again = s.runner.gradient(s.lists, given, dlogits_in, several, true);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again.value(), ours.value());
}

TEST(TokenRoundingGrad, LibraryAgreesWithTheOracleOnPlainCases) {
  for (std::uint64_t number = 0; number < 300; ++number) {
    const Rounding s(plain_rounding_case(number, small_desc(number)));
    SCOPED_TRACE(std::to_string(number) + ": " + s.text);
    expect_agrees_with_the_oracle(s, number % 2 == 0);
    if (HasFatalFailure()) return;
  }
}

TEST(TokenRoundingGrad, LibraryAgreesWithTheOracleOnRandomCases) {
  int run = 0;
  for (std::uint64_t number = 0; number < 800; ++number) {
    const RoundingCase c = random_rounding_case(number);
    if (c.desc.tokens * c.desc.experts * c.desc.experts > 60000) continue;  // the oracle is slow
    ++run;
    const Rounding s(c);
    SCOPED_TRACE(std::to_string(number) + ": " + s.text);
    expect_agrees_with_the_oracle(s, number % 2 == 0);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(run, 200);
}

// Moves the logits by h = 2^-7 along v, |v| <= 1, and rounds again: where the same entries come
// out, the scores' slope is the gradient. A score s moves with third derivative at most
// s (8 + 3*2 + 2) = 16 s (its logarithm's slope v_e - mean v lies within 2, the variance of v
// within 1 and its third central moment within 2), hence 16/6 h^2 for the step; and fp32 scores are
// off by eps (see above, D < 20), hence eps / h.
TEST(TokenRoundingGrad, LibraryAgreesWithFiniteDifferencesOfItsOwnScores) {
  constexpr double h = 0x1p-7;
  int compared = 0;
  for (std::uint64_t number = 0; number < 400 && compared < 100; ++number) {
    const Rounding s(plain_rounding_case(number, small_desc(number)));
    const Tensor logits = s.runner.logits();
    const Random random(number, 8);
    Tensor v(logits.size());
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<double>(random.below(i, 3) - 1);
    // Logits are multiples of 2^-8, so the moved ones are exact in fp32.
    const auto at = [&](double step) {
      Tensor moved = logits;
      for (std::size_t i = 0; i < v.size(); ++i) moved[i] += step * v[i];
      return RoundingRunner(s.c.desc, encode(moved, DType::f32), kDevice)
          .round(s.c.seed, s.c.offset);
    };
    const auto ahead = at(h), behind = at(-h);
    ASSERT_TRUE(ahead.ok() && behind.ok());
    const auto same_entries = [&](const RoundedLists& lists) {
      return lists.token_ids == s.lists.token_ids && lists.expert_ids == s.lists.expert_ids;
    };
    if (!same_entries(ahead.value()) || !same_entries(behind.value())) continue;
    ++compared;
    const auto grad = s.runner.gradient(s.lists, s.dscores, {});
    ASSERT_TRUE(grad.ok());
    double slope = 0, mass = 0;
    for (std::size_t i = 0; i < s.dscores.size(); ++i) {
      slope +=
          s.dscores[i] * (ahead.value().scores[i] - static_cast<double>(behind.value().scores[i]));
      mass += std::fabs(s.dscores[i]) * s.lists.scores[i];
    }
    const double eps = (4 * 20 + 2 * 7 + 3 + 12) * 0x1p-24;
    EXPECT_NEAR(dot(grad.value(), v), slope / (2 * h), (16.0 / 6 * h * h + 2 * eps / h) * mass)
        << number << ": " << s.text;
  }
  EXPECT_EQ(compared, 100);
}

// fp32 scores against fp64 softmax, so that neither bits nor gradients rest on the library alone.
TEST(TokenRoundingGrad, ScoresAgreeWithTheOracle) {
  for (std::uint64_t number = 0; number < 300; ++number) {
    const Rounding s(plain_rounding_case(number, small_desc(number)));
    const Tensor exact = rounded_scores(s.c.desc, s.runner.logits(), s.choice.ids, s.lists);
    const double eps = (4 * 20 + 2 * 7 + 3 + 12) * 0x1p-24;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      ASSERT_NEAR(s.lists.scores[i], exact[i], eps * exact[i]) << number << ": " << s.text;
    }
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
