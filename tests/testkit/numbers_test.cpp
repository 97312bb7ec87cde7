#include "testkit/numbers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "testkit/run.h"

namespace sonicmoe::testkit {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::numeric_limits<double>::quiet_NaN();

/// Every finite value of a 16-bit type that is not negative, ascending.
Tensor all_values(DType type) {
  const int infinity = type == DType::bf16 ? 0x7f80 : 0x7c00;
  std::vector<std::uint16_t> bits(infinity);
  std::iota(bits.begin(), bits.end(), std::uint16_t{0});
  return decode(std::as_bytes(std::span(bits)), type);
}

class SixteenBit : public testing::TestWithParam<DType> {};

TEST_P(SixteenBit, KnownValues) {
  const Tensor values = all_values(GetParam());
  const bool bf16 = GetParam() == DType::bf16;
  EXPECT_EQ(values[0], 0.0);
  EXPECT_EQ(values[1], bf16 ? 0x1p-133 : 0x1p-24);
  EXPECT_EQ(values[bf16 ? 0x3f80 : 0x3c00], 1.0);
  EXPECT_EQ(values.back(), bf16 ? 0x1.fep127 : 65504.0);
}

TEST_P(SixteenBit, EncodeIsTheInverseOfDecode) {
  const Tensor values = all_values(GetParam());
  const std::vector<std::byte> bytes = encode(values, GetParam());
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, &bytes[2 * i], 2);
    ASSERT_EQ(bits, i);
  }
}

TEST_P(SixteenBit, RoundsToTheNearestAndTiesToEven) {
  const Tensor values = all_values(GetParam());
  for (std::size_t i = 0; i + 1 < values.size(); ++i) {
    const double low = values[i], high = values[i + 1], middle = (low + high) / 2;
    ASSERT_EQ(round_to(middle, GetParam()), i % 2 == 0 ? low : high);
    ASSERT_EQ(round_to(std::nextafter(middle, 0), GetParam()), low);
    ASSERT_EQ(round_to(std::nextafter(middle, kInf), GetParam()), high);
    ASSERT_EQ(round_to(-middle, GetParam()), i % 2 == 0 ? -low : -high);
  }
}

TEST_P(SixteenBit, OverflowsToInfinityFromHalfASpacingPastTheLargest) {
  const Tensor values = all_values(GetParam());
  const double max = values.back(), spacing = max - values[values.size() - 2];
  EXPECT_EQ(round_to(std::nextafter(max + spacing / 2, 0), GetParam()), max);
  EXPECT_EQ(round_to(max + spacing / 2, GetParam()), kInf);
  EXPECT_EQ(round_to(-kInf, GetParam()), -kInf);
  EXPECT_TRUE(std::isnan(round_to(kNan, GetParam())));
  EXPECT_TRUE(std::isnan(decode(encode({kNan}, GetParam()), GetParam())[0]));
  EXPECT_EQ(decode(encode({-kInf}, GetParam()), GetParam())[0], -kInf);
}

INSTANTIATE_TEST_SUITE_P(Types, SixteenBit, testing::Values(DType::bf16, DType::f16),
                         [](const auto& param_info) { return name(param_info.param); });

TEST(Numbers, SinglePrecisionRoundsAsTheProcessorDoes) {
  for (const double base : {1.0, 3.3e-39, 7.1e37, 1e-45, 3.5e38}) {
    for (int i = 0; i < 1000; ++i) {
      const double value = -base * (1 + i * 0x1.234567p-20);
      ASSERT_EQ(round_to(value, DType::f32), static_cast<double>(static_cast<float>(value)));
    }
  }
}

TEST(TwoTimesRule, AcceptsTwiceThePlainErrorAndNoMore) {
  const Tensor exact = {1, 2, 3, 4}, plain = {1.01, 2, 3, 4};
  EXPECT_TRUE(two_times_rule("t", Tensor{1, 2, 3, 4.0199}, exact, plain).pass);
  EXPECT_FALSE(two_times_rule("t", Tensor{1, 2, 3, 4.0201}, exact, plain).pass);
}

TEST(TwoTimesRule, NanNeverPasses) {
  const Tensor exact = {1, 2}, nan = {1, kNan};
  EXPECT_FALSE(two_times_rule("t", nan, exact, exact).pass);
  EXPECT_FALSE(two_times_rule("t", nan, exact, nan).pass);
  EXPECT_FALSE(two_times_rule("t", exact, exact, nan).pass);
  EXPECT_FALSE(two_times_rule("t", Tensor{kInf, 2}, exact, exact).pass);
}

TEST(TwoTimesRule, JudgesEachBlockByItself) {
  // A wrong small expert hides in the norm of a large one.
  const Tensor exact = {1000, 1, 1}, plain = {1010, 1, 1}, ours = {1000, 9, 1};
  EXPECT_TRUE(two_times_rule("t", ours, exact, plain).pass);
  const std::vector<std::size_t> ends = {1, 2, 3};
  // The share of an even spread is 10 / sqrt(3) for each block, so twice that is allowed.
  EXPECT_TRUE(two_times_rule("t", ours, exact, plain, ends).pass);
  const Check check = two_times_rule("t", Tensor{1000, 14, 1}, exact, plain, ends);
  EXPECT_FALSE(check.pass);
  EXPECT_EQ(check.note, "block 1");
}

TEST(TwoTimesRule, ZerosMustBeZerosWhereThePlainLoopHasThem) {
  const Tensor zero = {0, 0};
  EXPECT_TRUE(two_times_rule("t", zero, zero, zero).pass);
  EXPECT_FALSE(two_times_rule("t", Tensor{0, 1e-30}, zero, zero).pass);
}

TEST(TwoTimesRule, ErrorsThatRepeatScatterAsFewDo) {
  const Tensor exact(400, 1.0);
  const Slack four{.independent = 4};
  // Bounds of 4.8 roundings of each element for 400 errors, of 12 for 4, and of 20 for 1 at least.
  const Tensor unlucky(400, 1 + 8 * 0x1p-24), wrong(400, 1 + 13 * 0x1p-24);
  EXPECT_FALSE(two_times_rule("t", unlucky, exact, exact).pass);
  EXPECT_TRUE(two_times_rule("t", unlucky, exact, exact, {}, four).pass);
  EXPECT_FALSE(two_times_rule("t", wrong, exact, exact, {}, four).pass);
  // More than there are elements: no less slack than without.
  EXPECT_TRUE(two_times_rule("t", Tensor{1 + 19 * 0x1p-24}, Tensor{1}, Tensor{1}, {}, four).pass);
  // A block has its share of them.
  const std::vector<std::size_t> ends = {100, 400};
  Tensor block = exact;
  std::fill_n(block.begin(), 100, 1 + 19 * 0x1p-24);
  EXPECT_TRUE(two_times_rule("t", block, exact, exact, ends, four).pass);
  block[7] = 1 + 80 * 0x1p-24;
  EXPECT_FALSE(two_times_rule("t", block, exact, exact, ends, four).pass);
}

TEST(TwoTimesRule, TermsThatCancelLeaveTheirRoundings) {
  // 300 - 300 and 400 - 399: in fp32 the terms are known to 2^-16 or so, and so is the result.
  const Tensor exact = {0, 1}, magnitudes = {600, 799};
  const Tensor ours = {0x1p-16, 1 - 0x1p-16}, wrong = {0x1p-11, 1};
  const Slack slack{.absolute = cancellation_allowance(magnitudes)};
  EXPECT_DOUBLE_EQ(slack.absolute, 4 * 0x1p-24 * std::hypot(600, 799));
  EXPECT_FALSE(two_times_rule("t", ours, exact, exact).pass);
  EXPECT_TRUE(two_times_rule("t", ours, exact, exact, {}, slack).pass);
  EXPECT_FALSE(two_times_rule("t", wrong, exact, exact, {}, slack).pass);
}

TEST(TwoTimesRule, RefusesOtherSizes) {
  EXPECT_FALSE(two_times_rule("t", Tensor{1}, Tensor{1, 2}, Tensor{1, 2}).pass);
  EXPECT_FALSE(same_values("t", Tensor{1}, Tensor{1, 2}).pass);
}

TEST(SameValues, NamesTheFirstDifference) {
  EXPECT_TRUE(same_values("t", Tensor{1, -0.0}, Tensor{1, 0}).pass);
  const Check check = same_values("t", Tensor{1, 2, 9}, Tensor{1, 3, 4});
  EXPECT_FALSE(check.pass);
  EXPECT_EQ(check.error, 5);
  EXPECT_EQ(check.note, "element 1 is 2.000000, not 3.000000");
  EXPECT_FALSE(same_values("t", Tensor{kNan}, Tensor{kNan}).pass);
}

TEST(RouterSlack, OneErrorOfATokenFollowsFromTheOthers) {
  Grouping g;
  g.row_slots.resize(12);
  EXPECT_EQ(router_slack(g, 4).independent, 8);
  EXPECT_EQ(router_slack(g, 12).independent, 1);  // and none would be as many as there are elements
}

// Weights of experts in parts of their own, empty ones too; or together until they have rows
// enough.
TEST(ExpertEnds, FewRowsGoTogether) {
  Grouping g;
  g.counts = {3, 0, 20, 5, 5, 7, 1};
  g.offsets = {0, 3, 3, 23, 28, 33, 40, 41};
  g.row_slots.resize(41);
  using Ends = std::vector<std::size_t>;
  EXPECT_EQ(expert_ends(g, 70, true), (Ends{10, 20, 30, 40, 50, 60, 70}));
  EXPECT_EQ(expert_ends(g, 82, false), (Ends{6, 6, 46, 56, 66, 80, 82}));
  EXPECT_EQ(expert_ends(g, 70, true, 16), (Ends{30, 60, 70}));
  EXPECT_EQ(expert_ends(g, 70, true, 100), (Ends{70}));
}

}  // namespace
}  // namespace sonicmoe::testkit
