// From row_dscores to dlogits, bit by bit: small integers, of which every step is exact.
#include <gtest/gtest.h>

#include <cmath>

#include "sonicmoe/ops.h"
#include "testkit/buffer.h"
#include "tests/device.h"

namespace sonicmoe::testkit {
namespace {

/// dlogits of tokens that have top_k experts each, with and without dlogits_in, beside it and in
/// its place. Signs of zero count. Some experts are out of range, and skipped. `repeats`: ids of
/// the caller, of which some repeat.
void expect_exact(std::int64_t tokens, std::int64_t experts, std::int64_t top_k, DType dtype,
                  bool repeats = false) {
  SCOPED_TRACE(testing::Message() << "T " << tokens << " E " << experts << " K " << top_k << " "
                                  << name(dtype) << (repeats ? " repeats" : ""));
  ScoreGradDesc desc;
  desc.tokens = tokens;
  desc.experts = experts;
  desc.top_k = top_k;
  desc.rows = tokens * top_k;
  desc.dtype = dtype;
  if (repeats) desc.input = RouterInput::logits_and_ids;
  std::vector<std::int32_t> slot_rows(desc.rows), slot_experts(desc.rows);
  Tensor row_dscores(desc.rows), scores(desc.rows), dlogits_in(tokens * experts);
  for (std::int64_t i = 0; i < tokens * experts; ++i) {
    dlogits_in[i] = i % 5 == 3 ? -0.0 : static_cast<double>(i % 29) - 14;
  }
  Tensor expected(tokens * experts, 0.0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    double inner = 0;
    Tensor gradients(top_k);
    for (std::int64_t k = 0; k < top_k; ++k) {
      const std::int64_t slot = t * top_k + k;
      const bool has_row = slot % 7 != 3;
      // Every row belongs to one slot.
      slot_rows[slot] = has_row ? static_cast<std::int32_t>(desc.rows - 1 - slot) : -1;
      row_dscores[desc.rows - 1 - slot] = static_cast<double>((slot * 5 + t) % 7) - 3;
      gradients[k] = has_row ? row_dscores[desc.rows - 1 - slot] : 0;
      scores[slot] = static_cast<double>((slot + t) % 3);
      slot_experts[slot] = static_cast<std::int32_t>((t * 3 + (repeats ? k / 3 : k)) % experts);
      inner += gradients[k] * scores[slot];
    }
    for (std::int64_t k = 0; k < top_k; ++k) {
      const std::int64_t slot = t * top_k + k;
      if (slot % 17 == 4) {
        slot_experts[slot] = slot % 2 == 0 ? -1 : static_cast<std::int32_t>(experts);
      } else {
        double& sum = expected[t * experts + slot_experts[slot]];
        const double gradient = scores[slot] * (gradients[k] - inner);
        sum = repeats ? sum + gradient : gradient;
      }
    }
  }
  const auto run = [&](bool adds, bool in_place) {
    Arena arena(kDevice);
    ScoreGradArgs args;
    args.row_dscores =
        static_cast<const float*>(arena.input("row_dscores", row_dscores, DType::f32));
    args.slot_rows = arena.input("slot_rows", slot_rows);
    args.slot_scores = static_cast<const float*>(arena.input("scores", scores, DType::f32));
    args.slot_experts = arena.input("slot_experts", slot_experts);
    if (adds) args.dlogits_in = arena.input("dlogits_in", dlogits_in, dtype);
    args.dlogits = arena.output("dlogits", dlogits_in.size(), dtype);
    if (in_place) {
      arena["dlogits"].put(encode(dlogits_in, dtype));
      args.dlogits_in = args.dlogits;
    }
    const auto plan = make_plan(desc, kDevice, Options{});
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    Arena scratch(kDevice);
    const std::size_t bytes = plan.value().workspace_bytes();
    const Status status = plan.value().run(args, {scratch.output("workspace", bytes, 256), bytes});
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(arena.damage() + scratch.damage(), "");
    return arena.tensor("dlogits", dtype);
  };
  const auto rounded = [&](Tensor values) {
    for (double& value : values) value = round_to(value, dtype);
    return values;
  };
  const auto expect = [&](const Tensor& got, const Tensor& sums) {
    EXPECT_EQ(got, rounded(sums));
    for (std::size_t i = 0; i < sums.size(); ++i) {
      ASSERT_EQ(std::signbit(got[i]), std::signbit(sums[i])) << i;
    }
  };
  Tensor sums = expected;
  for (double& sum : sums) sum += 0.0;
  expect(run(false, false), sums);
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = expected[i] + dlogits_in[i];
  expect(run(true, false), sums);
  expect(run(false, true), sums);
}

TEST(ScoreGrad, SoftmaxOverTopKIsExact) {
  std::vector<DType> types(kTypes.begin(), kTypes.end());
  if (!kOnCpu) types.push_back(DType::f32);
  for (const DType dtype : types) {
    // Entries of a token in 4, 8 and 16 lanes, or in a warp of its own; tokens that leave part of a
    // warp and of a block without one.
    for (const std::int64_t top_k : {1, 3, 4, 5, 8, 11, 16, 17, 40}) {
      for (const std::int64_t tokens : {1, 67}) expect_exact(tokens, 64, top_k, dtype);
    }
    // A warp's rows that are whole pieces of 16 bytes, and not; that fill shared memory with more
    // lanes a token; that do not fit at all, in one turn or in several.
    for (const std::int64_t experts :
         {3, 5, 8, 12, 60, 61, 62, 100, 256, 500, 512, 1000, 1536, 1544, 3000}) {
      for (const std::int64_t top_k : {2, 7, 16}) {
        if (top_k <= experts) expect_exact(35, experts, top_k, dtype);
      }
    }
  }
}

// Entries in one turn of a warp and in several, rows in one tile and in several.
TEST(ScoreGrad, RepeatedIdsAdd) {
  for (const DType dtype : kTypes) {
    for (const auto& [experts, top_k] : {std::pair<std::int64_t, std::int64_t>{8, 8},
                                         {64, 1},
                                         {64, 40},
                                         {128, 8},
                                         {512, 22},
                                         {1100, 70}}) {
      expect_exact(35, experts, top_k, dtype, true);
    }
  }
}

// Scores of very low logits. The gradient of such a sigmoid is beyond fp32, that of its logit not.
TEST(ScoreGrad, TinyScoresRenormalise) {
  for (const auto& [score, p] : {std::pair{RouterScore::sigmoid, 0x1p-120},
                                 std::pair{RouterScore::sqrt_softplus, 0x1p-72}}) {
    ScoreGradDesc desc;
    desc.tokens = 1;
    desc.experts = 8;
    desc.top_k = desc.rows = 2;
    desc.dtype = DType::bf16;
    desc.score = score;
    desc.order = RouterOrder::score_then_select;
    desc.renormalize = true;
    Arena arena(kDevice);
    const auto floats = [&](const char* name, const Tensor& values) {
      return static_cast<const float*>(arena.input(name, values, DType::f32));
    };
    ScoreGradArgs args;
    args.row_dscores = floats("row_dscores", {65536, -65536});
    args.slot_rows = arena.input("slot_rows", std::vector<std::int32_t>{0, 1});
    args.slot_experts = arena.input("slot_experts", std::vector<std::int32_t>{5, 2});
    args.slot_probabilities = floats("probabilities", {p, p});
    args.dlogits = arena.output("dlogits", 8, DType::bf16);
    const auto plan = make_plan(desc, kDevice, Options{});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    Arena scratch(kDevice);
    const std::size_t bytes = plan.value().workspace_bytes();
    const Status status = plan.value().run(args, {scratch.output("workspace", bytes, 256), bytes});
    ASSERT_TRUE(status.ok()) << status.message();
    // Weights are 1/2 and their gradients add up to 0, so dlogit is g dp/dz / (2 p). For so small a
    // p the slope dp/dz of a sigmoid is p, and that of sqrt(log(1 + e^z)) is p / 2.
    const double expected = score == RouterScore::sigmoid ? 32768 : 16384;
    EXPECT_EQ(arena.tensor("dlogits", DType::bf16),
              (Tensor{0, 0, -expected, 0, 0, expected, 0, 0}));
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
