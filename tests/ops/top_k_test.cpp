// Choice and order of experts, value for value.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/block_counts.h"
#include "core/op_plan.h"
#include "sonicmoe/ops.h"
#include "testkit/buffer.h"
#include "testkit/grouping.h"
#include "testkit/inputs.h"
#include "tests/device.h"

namespace sonicmoe::testkit {
namespace {

using Ints = std::vector<std::int32_t>;
constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::numeric_limits<double>::quiet_NaN();

struct TopK {
  Status status;
  Ints ids;
  Tensor scores;
  std::vector<std::byte> block_counts;
  bool untouched = false;
};

/// `given`: ids of the caller, scored in place of a choice.
TopK run(const Tensor& logits, std::int64_t experts, std::int64_t k, RouterOrder order,
         bool norm = false, DType dtype = DType::f32, const Ints& given = {}) {
  TopKDesc desc;
  desc.tokens = static_cast<std::int64_t>(logits.size()) / experts;
  desc.experts = experts;
  desc.top_k = k;
  desc.dtype = dtype;
  desc.order = order;
  desc.renormalize = norm;
  if (!given.empty()) desc.input = RouterInput::logits_and_ids;
  Arena arena(kDevice);
  TopKArgs args;
  args.given_ids = arena.input("given_ids", given);
  args.logits = arena.input("logits", logits, dtype);
  args.scores = arena.output_float("scores", desc.tokens * k);
  args.ids = arena.output_int32("ids", desc.tokens * k);
  const std::size_t counted = block_counts_bytes(desc, kDevice);
  const Handoff handoff{.block_counts =
                            static_cast<std::uint8_t*>(arena.output("block_counts", counted, 16))};
  const auto plan = make_plan(desc, kDevice, kChecked);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  Arena workspace(kDevice);
  const std::size_t bytes = plan.value().workspace_bytes();
  TopK out;
  out.status = run_operation(plan.value(), args, handoff,
                             {workspace.output("workspace", bytes, 256), bytes}, {});
  EXPECT_EQ(arena.damage() + workspace.damage(), "");
  out.untouched = arena.outputs_untouched();
  out.ids = arena.int32("ids");
  out.scores = arena.tensor("scores", DType::f32);
  const auto bytes_out = arena["block_counts"].bytes();
  out.block_counts.assign(bytes_out.begin(), bytes_out.end());
  return out;
}

struct ScoredTopK {
  Ints ids;
  Tensor probabilities, scores;
};

/// Of a router that is not plain().
ScoredTopK run_scored(TopKDesc desc, const Tensor& logits, const Tensor& selection_bias = {},
                      const Tensor& expert_scale = {}, const Ints& given = {}) {
  desc.tokens = static_cast<std::int64_t>(logits.size()) / desc.experts;
  desc.dtype = DType::f32;
  desc.selection_bias = !selection_bias.empty();
  desc.expert_scale = !expert_scale.empty();
  if (!given.empty()) desc.input = RouterInput::logits_and_ids;
  Arena arena(kDevice);
  const auto floats = [&](const char* name, const Tensor& values) {
    return static_cast<const float*>(arena.input(name, values, DType::f32));
  };
  const TopKArgs args{
      .logits = floats("logits", logits),
      .given_ids = arena.input("given_ids", given),
      .selection_bias = floats("selection_bias", selection_bias),
      .expert_scale = floats("expert_scale", expert_scale),
      .scores = arena.output_float("scores", desc.tokens * desc.top_k),
      .probabilities = arena.output_float("probabilities", desc.tokens * desc.top_k),
      .ids = arena.output_int32("ids", desc.tokens * desc.top_k)};
  const auto plan = make_plan(desc, kDevice, kChecked);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  const std::size_t bytes = plan.value().workspace_bytes();
  const Status status = plan.value().run(args, {arena.output("workspace", bytes, 256), bytes});
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(arena.damage(), "");
  return {arena.int32("ids"), arena.tensor("probabilities", DType::f32),
          arena.tensor("scores", DType::f32)};
}

/// Eight fp32 roundings lie between a logit and its score: that of the logit, the exponential, sums
/// and quotients.
void expect_near(const Tensor& ours, const Tensor& expected) {
  ASSERT_EQ(ours.size(), expected.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    EXPECT_NEAR(ours[i], expected[i], 8 * 0x1p-24 * std::fabs(expected[i])) << i;
  }
}

// sigmoid(log 3) = 3/4 and so on; sqrt_softplus(log(e - 1)) = 1.
TEST(TopK, OtherScoresByHand) {
  const double log3 = std::log(3.0);
  TopKDesc desc{{.experts = 4, .top_k = 2, .score = RouterScore::sigmoid}};
  const Tensor logits = {0, log3, -log3, 2 * log3};  // 1/2, 3/4, 1/4, 9/10
  ScoredTopK out = run_scored(desc, logits);
  EXPECT_EQ(out.ids, (Ints{3, 1}));
  expect_near(out.scores, {0.9, 0.75});
  desc.order = RouterOrder::score_then_select;
  desc.renormalize = true;
  desc.eps = 0.35f;
  desc.scale = 2;
  out = run_scored(desc, logits, {}, {1, 10, 1, 3});
  expect_near(out.probabilities, {0.9, 0.75});
  expect_near(out.scores, {0.9 / 2 * 2 * 3, 0.75 / 2 * 2 * 10});
  out = run_scored(desc, logits, {0, 0, 1, -1}, {});  // 1/2, 3/4, 5/4, -1/10
  EXPECT_EQ(out.ids, (Ints{2, 1}));
  expect_near(out.probabilities, {0.25, 0.75});
  out = run_scored(desc, logits, {}, {}, {2, -1});
  EXPECT_EQ(out.ids, (Ints{2, -1}));
  expect_near(out.scores, {0.25 / 0.6 * 2, 0});
  desc = {{.experts = 3, .top_k = 3, .score = RouterScore::sqrt_softplus}};
  out = run_scored(desc, {std::log(std::exp(1.0) - 1), -kInf, std::log(std::exp(4.0) - 1)});
  EXPECT_EQ(out.ids, (Ints{2, 0, 1}));
  expect_near(out.scores, {2, 1, 0});
}

// Experts 0, 1 | 2, 3 | 4, 5.
TEST(TopK, GroupsByHand) {
  TopKDesc desc{{.experts = 6, .top_k = 2, .score = RouterScore::sigmoid, .groups = 3}};
  const Tensor logits = {5, -5, 3, 3, 4, 1};
  EXPECT_EQ(run_scored(desc, logits).ids, (Ints{0, 1}));  // the largest is 5
  desc.group_score = GroupScore::sum_of_two;
  EXPECT_EQ(run_scored(desc, logits).ids, (Ints{2, 3}));  // 6 of 0, 6, 5
  desc.kept_groups = 2;
  EXPECT_EQ(run_scored(desc, logits).ids, (Ints{4, 2}));
  // Ties go to the lower group, and in it to the lower expert.
  EXPECT_EQ(run_scored(desc, {1, 1, 1, 1, 1, 1}).ids, (Ints{0, 1}));
  desc.kept_groups = 1;
  EXPECT_EQ(run_scored(desc, {0, 0, 1, 1, 1, 1}).ids, (Ints{2, 3}));
}

TEST(TopK, LargerFirstTiesToTheLowerId) {
  const Tensor logits = {1, 3, 3, 2, 3};
  for (const RouterOrder order : {RouterOrder::select_then_score, RouterOrder::score_then_select}) {
    EXPECT_EQ(run(logits, 5, 4, order).ids, (Ints{1, 2, 4, 3}));
    EXPECT_EQ(run(logits, 5, 4, order, false, DType::bf16).ids, (Ints{1, 2, 4, 3}));
  }
}

TEST(TopK, ZerosOfBothSignsTie) {
  EXPECT_EQ(run({-0.0, 0.0, -0.0}, 3, 3, RouterOrder::select_then_score).ids, (Ints{0, 1, 2}));
  EXPECT_EQ(run({0.0, -0.0, 0.0}, 3, 3, RouterOrder::select_then_score).ids, (Ints{0, 1, 2}));
}

// Coarse logits tie all the time; torch.topk would answer otherwise for some of these tokens.
TEST(TopK, ManyTies) {
  constexpr std::int64_t kTokens = 500, kExperts = 128;
  const Random random(5, 0);
  Tensor logits(kTokens * kExperts);
  for (std::size_t i = 0; i < logits.size(); ++i) {
    logits[i] = round_to(random.normal(i), DType::bf16);
  }
  const TopK out = run(logits, kExperts, 8, RouterOrder::select_then_score, false, DType::bf16);
  EXPECT_EQ(out.ids, top_k(logits, kTokens, {.experts = kExperts, .top_k = 8}));
}

// Far below the maximum all probabilities are zero in fp32, and then ids decide, not logits.
TEST(TopK, ProbabilitiesDecideOverSoftmax) {
  const Tensor logits = {0, -200, -150};
  EXPECT_EQ(run(logits, 3, 3, RouterOrder::select_then_score).ids, (Ints{0, 2, 1}));
  EXPECT_EQ(run(logits, 3, 3, RouterOrder::score_then_select).ids, (Ints{0, 1, 2}));
}

TEST(TopK, KnownScores) {
  const double log3 = std::log(3.0);
  const Tensor logits = {0, log3, -kInf, 0};  // exp: 1, 3, 0, 1
  const auto expect = [](const TopK& out, const Ints& ids, const Tensor& scores) {
    EXPECT_EQ(out.ids, ids);
    for (std::size_t i = 0; i < scores.size(); ++i) EXPECT_NEAR(out.scores[i], scores[i], 1e-7);
  };
  expect(run(logits, 4, 2, RouterOrder::select_then_score), {1, 0}, {0.75, 0.25});
  expect(run(logits, 4, 2, RouterOrder::score_then_select), {1, 0}, {0.6, 0.2});
  expect(run(logits, 4, 2, RouterOrder::score_then_select, true), {1, 0}, {0.75, 0.25});
  expect(run(logits, 4, 4, RouterOrder::score_then_select), {1, 0, 3, 2}, {0.6, 0.2, 0.2, 0});
}

TEST(TopK, LargeLogitsDoNotOverflow) {
  const TopK out = run({3e38, 3e38, -3e38}, 3, 3, RouterOrder::select_then_score);
  EXPECT_EQ(out.scores, (Tensor{0.5, 0.5, 0}));
  EXPECT_EQ(run({1000, 0}, 2, 1, RouterOrder::score_then_select).scores, Tensor{1});
}

// All kernels of 16-bit logits over the top-K, whose choice is by the number of experts, and of the
// others; and what they count for metadata: each 64 tokens' experts, a byte each, rows filled up to
// multiples of 16.
TEST(TopK, EveryNumberOfExpertsAndItsCounts) {
  const Random random(6, 0);
  for (const std::int64_t experts : {1, 7, 8, 60, 64, 65, 96, 128, 129, 250, 256, 384, 511, 512}) {
    for (const std::int64_t k : {1, 3, 4, 8, 9, 32}) {
      if (k > experts) continue;
      const std::int64_t tokens = 1 + (k - 1) * 63 % 200;  // 1, 127, 190, 42, 105, 154
      Tensor logits(tokens * experts);
      for (std::size_t i = 0; i < logits.size(); ++i) {
        logits[i] = round_to(random.normal(i + 1000 * experts), DType::bf16);
      }
      using enum RouterOrder;
      for (const auto& [dtype, order] :
           {std::pair(DType::bf16, select_then_score), std::pair(DType::f16, select_then_score),
            std::pair(DType::f32, select_then_score), std::pair(DType::bf16, score_then_select)}) {
        if (kOnCpu && dtype == DType::f16) continue;
        SCOPED_TRACE(testing::Message() << "E " << experts << " K " << k << " " << name(dtype));
        Tensor stored = logits;
        for (double& value : stored) value = round_to(value, dtype);
        const TopK out = run(stored, experts, k, order, false, dtype);
        ASSERT_TRUE(out.status.ok()) << out.status.message();
        if (order == select_then_score) {
          ASSERT_EQ(out.ids,
                    top_k(stored, tokens, {.experts = experts, .top_k = k, .order = order}));
        }
        const std::size_t stride = (experts + 15) / 16 * 16, rows = (tokens + 63) / 64;
        ASSERT_EQ(out.block_counts.size(), kOnCpu ? 0 : rows * stride);
        if (kOnCpu) continue;
        std::vector<std::byte> expected(rows * stride);
        for (std::size_t slot = 0; slot < out.ids.size(); ++slot) {
          std::byte& count = expected[slot / k / 64 * stride + out.ids[slot]];
          count = static_cast<std::byte>(static_cast<int>(count) + 1);
        }
        ASSERT_EQ(out.block_counts, expected);
      }
    }
  }
}

TEST(TopK, KnownScoresOfGivenIds) {
  const double log3 = std::log(3.0);
  const Tensor logits = {0, log3, -kInf, 0};  // exp: 1, 3, 0, 1
  const auto expect = [&](RouterOrder order, bool norm, const Ints& ids, const Tensor& scores) {
    const TopK out =
        run(logits, 4, static_cast<std::int64_t>(ids.size()), order, norm, DType::f32, ids);
    ASSERT_TRUE(out.status.ok()) << out.status.message();
    EXPECT_EQ(out.ids, ids);
    for (std::size_t i = 0; i < scores.size(); ++i) {
      EXPECT_NEAR(out.scores[i], scores[i], 1e-7) << i;
      if (scores[i] == 0) {
        EXPECT_EQ(out.scores[i], 0) << i;
      }
    }
  };
  using enum RouterOrder;
  expect(select_then_score, false, {3, 1}, {0.25, 0.75});  // in the caller's order
  expect(score_then_select, false, {3, 1}, {0.2, 0.6});
  expect(score_then_select, true, {3, 1}, {0.25, 0.75});
  // Duplicates count twice; sentinels not at all.
  expect(select_then_score, false, {1, 1, -1, 0}, {3. / 7, 3. / 7, 0, 1. / 7});
  expect(score_then_select, false, {1, 1, 4, 0}, {0.6, 0.6, 0, 0.2});
  expect(score_then_select, true, {INT32_MIN, 1, INT32_MAX, 1}, {0, 0.5, 0, 0.5});
  for (const bool norm : {false, true}) {
    expect(score_then_select, norm, {2, -1}, {0, 0});  // of probability 0
    for (const RouterOrder order : {select_then_score, score_then_select}) {
      expect(order, norm, {-1, 4}, {0, 0});
    }
  }
}

// Scored again, the ids that top_k chose have the bits of its own scores, in every kernel.
TEST(TopK, OwnIdsGiveOwnScores) {
  const Random random(7, 0);
  for (const std::int64_t experts : {5, 64, 128, 288, 512, 896, 1025}) {
    for (const std::int64_t k : {1, 8, 22, 72}) {
      if (k > experts) continue;
      Tensor logits(9 * experts);
      for (std::size_t i = 0; i < logits.size(); ++i) {
        logits[i] = round_to(3 * random.normal(i + 1000 * experts), DType::bf16);
      }
      for (const DType dtype : kTypes) {
        for (const RouterOrder order :
             {RouterOrder::select_then_score, RouterOrder::score_then_select}) {
          for (const bool norm : {false, true}) {
            SCOPED_TRACE(testing::Message() << "E " << experts << " K " << k << " " << name(dtype)
                                            << " " << name(order) << " " << norm);
            const TopK own = run(logits, experts, k, order, norm, dtype);
            const TopK again = run(logits, experts, k, order, norm, dtype, own.ids);
            ASSERT_EQ(again.ids, own.ids);
            ASSERT_EQ(again.scores, own.scores);
            ASSERT_TRUE(again.block_counts.empty());
          }
        }
      }
    }
  }
}

TEST(TopK, RefusesGivenIdsWithoutASoftmax) {
  const Tensor logits = {0, 0, 0, 0, -kInf, -kInf};
  const TopK out =
      run(logits, 3, 2, RouterOrder::select_then_score, false, DType::f32, {1, 2, 1, 2});
  EXPECT_STREQ(out.status.message(),
               "logits: got only -inf at the ids of token 1, allowed: numbers below +inf, at least "
               "one of them finite");
  EXPECT_TRUE(out.untouched);
  const TopK nan = run({0, 0, 0, kNan, 0, 0}, 3, 2, RouterOrder::select_then_score, false,
                       DType::f32, {1, 2, -1, 3});
  EXPECT_STREQ(nan.status.message(),
               "logits: got a NaN in the row of token 1, allowed: numbers below +inf, at least one "
               "of them finite");
  EXPECT_TRUE(nan.untouched);
}

TEST(TopK, SizesWithoutCounts) {
  const auto bytes = [](std::int64_t tokens, std::int64_t experts, std::int64_t k) {
    TopKDesc desc;
    desc.tokens = tokens, desc.experts = experts, desc.top_k = k;
    return block_counts_bytes(desc, {DeviceType::cuda, 0});
  };
  EXPECT_EQ(bytes(24576, 128, 8), 384 * 128);
  EXPECT_EQ(bytes(0, 128, 8), 0);
  EXPECT_EQ(bytes(-1, 128, 8), 0);
  EXPECT_EQ(bytes(-1000, 128, -8), 0);
  EXPECT_EQ(bytes(24576, 513, 8), 0);
  EXPECT_EQ(bytes(24576, 128, 33), 0);
  EXPECT_EQ(bytes(std::int64_t{1} << 20, 128, 8), 0);
}

TEST(TopK, RefusesDataWithoutAnOrder) {
  for (const RouterOrder order : {RouterOrder::select_then_score, RouterOrder::score_then_select}) {
    const Tensor bad[] = {{0, 0, 0, 0, kNan, 0},            // NaN anywhere
                          {0, 0, 0, 0, 0, kInf},            // infinite maximum
                          {0, 0, 0, -kInf, -kInf, -kInf}};  // no finite logit
    for (const Tensor& logits : bad) {
      const TopK out = run(logits, 3, 2, order);
      EXPECT_EQ(out.status.code(), StatusCode::invalid_data);
      EXPECT_NE(std::string(out.status.message()).find("token 1"), std::string::npos)
          << out.status.message();
      EXPECT_TRUE(out.untouched);
    }
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
