// The last weight gradient and the aggregation of dX at the same time, on parts of the chip.
#include <gtest/gtest.h>

#include <algorithm>

#include "sonicmoe/layer.h"
#include "sonicmoe/ops.h"
#include "tests/device.h"
#include "verify/buffer.h"
#include "verify/device_memory.h"
#include "verify/inputs.h"

namespace sonicmoe::verify {
namespace {

constexpr std::int64_t kTokens = 3000, kHidden = 264, kIntermediate = 392, kExperts = 5, kTopK = 2;
constexpr std::int64_t kRows = kTokens * kTopK;

Tensor noise(std::int64_t size, std::int64_t seed) {
  const Random random(size, seed);
  Tensor out(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) {
    out[static_cast<std::size_t>(i)] = static_cast<double>(random.below(i, 255) - 127) / 64;
  }
  return out;
}

struct Outputs {
  Tensor dw1, dx, after;
};

/// Both operations, then one that reads dW1 as rows: it must find the gradient finished.
Outputs run(DType dtype, bool lists, std::int64_t spared) {
  Arena arena(kDevice);
  std::vector<std::int32_t> offsets = {0, 100, 100, 2500, 5990, kRows};
  std::vector<std::int32_t> row_tokens, slot_rows, token_offsets, token_slots;
  for (std::int32_t i = 0; i < kRows; ++i) {
    row_tokens.push_back(static_cast<std::int32_t>(i * 7919LL % kTokens));
    slot_rows.push_back(i % 11 == 0 ? -1 : static_cast<std::int32_t>(i * 4799LL % kRows));
    token_slots.push_back(i);
  }
  // As lists: tokens without slots, and with more than are looked up at once.
  // In turns of five, which no stride of a thread is a multiple of.
  constexpr std::int32_t kCounts[] = {0, 9, 1, 0, 0};
  std::int32_t sum_of_counts = 0;
  for (std::int64_t t = 0; t <= kTokens; ++t) {
    token_offsets.push_back(sum_of_counts);
    sum_of_counts += kCounts[t % 5];
  }

  GroupedGemmDesc gemm;
  gemm.op = GemmOp::up_proj_wgrad;
  gemm.tokens = kTokens, gemm.rows = kRows, gemm.hidden = kHidden;
  gemm.intermediate = kIntermediate, gemm.experts = kExperts, gemm.dtype = dtype;
  gemm.spare_multiprocessors = spared;
  GroupedGemmArgs gemm_args;
  gemm_args.offsets = arena.input("offsets", offsets);
  gemm_args.row_tokens = arena.input("row_tokens", row_tokens);
  gemm_args.x = arena.input("x", noise(kTokens * kHidden, 1), dtype);
  gemm_args.dpreact =
      const_cast<void*>(arena.input("dpreact", noise(kRows * 2 * kIntermediate, 2), dtype));
  const std::int64_t weights = kExperts * 2 * kIntermediate * kHidden;
  gemm_args.dw1 = arena.output("dw1", weights, dtype);

  AggregateDesc sum;
  sum.tokens = kTokens, sum.rows = kRows, sum.hidden = kHidden, sum.dtype = dtype;
  sum.top_k = lists ? 0 : kTopK;
  sum.multiprocessors = spared;
  AggregateArgs sum_args;
  sum_args.rows = arena.input("rows", noise(kRows * kHidden, 3), dtype);
  sum_args.slot_rows = arena.input("slot_rows", slot_rows);
  sum_args.token_offsets = arena.input("token_offsets", token_offsets);
  sum_args.token_slots = arena.input("token_slots", token_slots);
  sum_args.addend = arena.input("addend", noise(kTokens * kHidden, 4), dtype);
  sum_args.out = arena.output("dx", kTokens * kHidden, dtype);

  AggregateDesc next;
  next.tokens = next.rows = kExperts * 2 * kIntermediate, next.hidden = kHidden, next.top_k = 1;
  next.dtype = dtype;
  AggregateArgs next_args;
  next_args.rows = gemm_args.dw1;
  std::vector<std::int32_t> backwards;
  for (std::int32_t i = 0; i < next.rows; ++i) {
    backwards.push_back(static_cast<std::int32_t>(next.rows) - 1 - i);
  }
  next_args.slot_rows = arena.input("backwards", backwards);
  next_args.out = arena.output("after", weights, dtype);

  const OwnStream stream(kDevice);
  const auto gemm_plan = make_plan(gemm, kDevice);
  const auto sum_plan = make_plan(sum, kDevice), next_plan = make_plan(next, kDevice);
  EXPECT_TRUE(gemm_plan.ok()) << gemm_plan.status().message();
  EXPECT_TRUE(sum_plan.ok()) << sum_plan.status().message();
  EXPECT_TRUE(next_plan.ok()) << next_plan.status().message();
  EXPECT_TRUE(gemm_plan->run(gemm_args, {}, stream).ok());
  EXPECT_TRUE(sum_plan->run(sum_args, {}, stream).ok());
  EXPECT_TRUE(next_plan->run(next_args, {}, stream).ok());
  const Status status = synchronize(kDevice);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(arena.damage(), "");
  return {arena.tensor("dw1", dtype), arena.tensor("dx", dtype), arena.tensor("after", dtype)};
}

class Beside : public testing::TestWithParam<int> {};

TEST_P(Beside, SameBitsAsOneAfterTheOther) {
  for (const DType dtype : kTypes) {
    for (const bool lists : {false, true}) {
      const Outputs expected = run(dtype, lists, 0);
      const Outputs both = run(dtype, lists, GetParam());
      EXPECT_EQ(both.dw1, expected.dw1);
      EXPECT_EQ(both.dx, expected.dx);
      EXPECT_EQ(both.after, expected.after);
      Tensor rows_backwards;
      for (std::size_t at = expected.dw1.size(); at > 0; at -= kHidden) {
        rows_backwards.insert(rows_backwards.end(), expected.dw1.begin() + (at - kHidden),
                              expected.dw1.begin() + at);
      }
      EXPECT_EQ(both.after, rows_backwards);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Spared, Beside, testing::Values(1, 2, 14, 64));

// Or the cases of that name would test something else.
TEST(Beside, LayersUseIt) {
  for (const DType dtype : kTypes) {
    for (const char* name : {"beside/topk", "beside/given", "beside/wide"}) {
      const auto plan = make_plan(case_named(name, dtype).desc, kDevice);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      EXPECT_NE(plan->explain().find("dx is summed beside up_proj_wgrad"), std::string::npos)
          << plan->explain();
    }
  }
}

// Of the shapes alone: even, more where there is less to multiply.
TEST(Beside, ShareGrowsWithTheAggregation) {
  GroupedGemmDesc gemm;
  gemm.op = GemmOp::up_proj_wgrad;
  gemm.tokens = 24576, gemm.rows = 8 * gemm.tokens, gemm.hidden = 1536, gemm.experts = 128;
  AggregateDesc sum;
  sum.tokens = gemm.tokens, sum.rows = gemm.rows, sum.hidden = gemm.hidden, sum.top_k = 8;
  std::int64_t before = 64;
  for (const std::int64_t intermediate : {64, 256, 1024, 4096}) {
    gemm.intermediate = intermediate;
    const std::int64_t spared = multiprocessors_beside(gemm, sum, kDevice);
    EXPECT_EQ(spared % 2, 0);
    EXPECT_LE(spared, before) << intermediate;
    if (intermediate <= 256) {
      EXPECT_GT(spared, 0) << intermediate;
    }
    before = spared;
  }
  sum.tokens = sum.rows = 0;
  EXPECT_EQ(multiprocessors_beside(gemm, sum, kDevice), 0);
  EXPECT_EQ(multiprocessors_beside(gemm, sum, {}), 0) << "on the CPU";
}

}  // namespace
}  // namespace sonicmoe::verify
