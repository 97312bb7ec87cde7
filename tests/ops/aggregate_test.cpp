// What the layer does not use: scores together with an addend, in both forms of slots. And the
// router's part of dX, bit by bit.
#include <gtest/gtest.h>

#include <limits>

#include "sonicmoe/ops.h"
#include "tests/device.h"
#include "verify/buffer.h"

namespace sonicmoe::verify {
namespace {

Tensor run(const AggregateDesc& desc, const Tensor& rows, const std::vector<std::int32_t>& slots,
           const std::vector<std::int32_t>& token_offsets,
           const std::vector<std::int32_t>& token_slots, const Tensor& scores,
           const Tensor& addend) {
  Arena arena(kDevice);
  AggregateArgs args;
  args.rows = arena.input("rows", rows, desc.dtype);
  args.slot_rows = arena.input("slot_rows", slots);
  args.token_offsets = arena.input("token_offsets", token_offsets);
  args.token_slots = arena.input("token_slots", token_slots);
  args.slot_scores = static_cast<const float*>(arena.input("scores", scores, DType::f32));
  args.addend = arena.input("addend", addend, desc.dtype);
  args.out = arena.output("out", desc.tokens * desc.hidden, desc.dtype);
  const auto plan = make_plan(desc, kDevice, kChecked);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  const std::size_t bytes = plan.value().workspace_bytes();
  const Status status = plan.value().run(args, {arena.output("workspace", bytes, 256), bytes});
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(arena.damage(), "");
  return arena.tensor("out", desc.dtype);
}

Tensor filled(const Tensor& row_values) {  // each value eight times
  Tensor out;
  for (const double v : row_values) out.insert(out.end(), 8, round_to(v, kTypes[0]));
  return out;
}

TEST(Aggregate, TopKSlotsWithScoresAndAddend) {
  AggregateDesc desc;
  desc.tokens = 2;
  desc.rows = 4;
  desc.hidden = 8;
  desc.top_k = 2;
  desc.dtype = kTypes[0];
  const Tensor rows = filled({1, 10, 100, 1000});
  // Token 0 has rows 3 and 0, token 1 row 2 and a slot without row.
  EXPECT_EQ(run(desc, rows, {3, 0, 2, -1}, {}, {}, {2, 3, 5, 7}, filled({0.5, 0.25})),
            filled({2003.5, 500.25}));
  EXPECT_EQ(run(desc, rows, {3, 0, 2, -1}, {}, {}, {}, {}), filled({1001, 100}));
}

TEST(Aggregate, ListsWithScoresAndAddend) {
  AggregateDesc desc;
  desc.tokens = 3;
  desc.rows = 4;
  desc.hidden = 8;
  desc.dtype = DType::bf16;
  const Tensor rows = filled({1, 2, 4, 8});
  // Token 0 has slots 1 and 3, token 1 none, token 2 slot 0; slot 2 is a sentinel.
  EXPECT_EQ(
      run(desc, rows, {0, 1, -1, 2}, {0, 2, 2, 3}, {1, 3, 0, -1}, {2, 3, 5, 7}, filled({1, 1, 1})),
      filled({35, 1, 3}));
}

/// The router's part: K slots a token, small integers, so that every order gives the same sum. Of
/// the experts that a token does not have, gradients and, where nobody has them, weights are NaN.
void expect_routed(std::int64_t hidden, std::int64_t experts, std::int64_t top_k) {
  constexpr std::int64_t kTokens = 37;
  SCOPED_TRACE(testing::Message() << "d " << hidden << " E " << experts << " K " << top_k);
  AggregateDesc desc;
  desc.tokens = kTokens;
  desc.rows = kTokens * top_k;
  desc.hidden = hidden;
  desc.top_k = top_k;
  desc.dtype = kTypes[0];
  desc.experts = experts;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Tensor rows(desc.rows * hidden), dlogits(kTokens * experts, nan);
  Tensor router_w(experts * hidden, nan), expected(kTokens * hidden, 0.0);
  std::vector<std::int32_t> slot_rows(desc.rows), slot_experts(desc.rows);
  for (std::int64_t slot = 0; slot < desc.rows; ++slot) {
    const std::int64_t t = slot / top_k;
    // Neighbouring slots have different experts, of which the last one has nobody.
    const std::int64_t e = (t * 5 + slot % top_k) % (experts - 1);
    slot_rows[slot] = static_cast<std::int32_t>((slot * 7) % desc.rows);
    slot_experts[slot] = static_cast<std::int32_t>(e);
    if (slot % 11 == 3)
      slot_experts[slot] = slot % 2 == 0 ? -1 : static_cast<std::int32_t>(experts);
    dlogits[t * experts + e] = static_cast<double>(slot % 5) - 2;
    for (std::int64_t j = 0; j < hidden; ++j) {
      rows[slot * hidden + j] = static_cast<double>((slot * 3 + j) % 4);
      router_w[e * hidden + j] = static_cast<double>((e + j * 2) % 5) - 2;
    }
  }
  for (std::int64_t slot = 0; slot < desc.rows; ++slot) {
    const std::int64_t t = slot / top_k, e = slot_experts[slot];
    for (std::int64_t j = 0; j < hidden; ++j) {
      double& sum = expected[t * hidden + j];
      if (slot % 13 != 5) sum += rows[slot_rows[slot] * hidden + j];
      if (e >= 0 && e < experts) {
        sum += dlogits[t * experts + e] * router_w[e * hidden + j];
      }
    }
    if (slot % 13 == 5) slot_rows[slot] = -1;
  }
  const auto rounded = [&](Tensor values) {
    for (double& value : values) value = round_to(value, desc.dtype);
    return values;
  };

  Arena arena(kDevice);
  AggregateArgs args;
  args.rows = arena.input("rows", rows, desc.dtype);
  args.slot_rows = arena.input("slot_rows", slot_rows);
  args.slot_experts = arena.input("slot_experts", slot_experts);
  args.dlogits = arena.input("dlogits", dlogits, desc.dtype);
  args.router_w = arena.input("router_w", router_w, desc.dtype);
  args.out = arena.output("out", kTokens * hidden, desc.dtype);
  const auto plan = make_plan(desc, kDevice, kChecked);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const auto run = [&] {
    EXPECT_TRUE(plan.value().run(args, {}).ok());
    EXPECT_EQ(arena.damage(), "");
    return arena.tensor("out", desc.dtype);
  };
  EXPECT_EQ(run(), rounded(expected));
  EXPECT_EQ(run(), rounded(expected));
  // Onto what is there.
  args.addend = args.out;
  const Tensor before = rounded(expected);
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += before[i];
  EXPECT_EQ(run(), rounded(expected));
}

TEST(Aggregate, RoutersPart) {
  // One thread of columns; several turns of threads; several blocks of columns, the last not full.
  for (const std::int64_t hidden : {8, 72, 512, 2064}) {
    for (const std::int64_t top_k : {1, 4, 5, 8, 17}) expect_routed(hidden, 40, top_k);
  }
  // As many entries as there may be, and so many tokens a block that they would not fit.
  for (const std::int64_t hidden : {8, 16, 264}) expect_routed(hidden, 300, 64);
}

// The router's terms follow the rows, in slot order: 2^24 + 1 - 2^24 is 0 in fp32.
TEST(Aggregate, RoutersPartComesAfterTheRows) {
  AggregateDesc desc;
  desc.tokens = 1;
  desc.rows = 2;
  desc.hidden = 8;
  desc.top_k = 2;
  desc.dtype = kTypes[0];
  desc.experts = 3;
  const auto sum = [&](const std::vector<std::int32_t>& experts, const Tensor& gradients) {
    Arena arena(kDevice);
    AggregateArgs args;
    args.rows = arena.input("rows", filled({1, 0}), desc.dtype);
    args.slot_rows = arena.input("slot_rows", {0, 1});
    args.slot_experts = arena.input("slot_experts", experts);
    args.dlogits = arena.input("dlogits", gradients, desc.dtype);
    args.router_w = arena.input("router_w", filled({0x1p12, -0x1p12, 1}), desc.dtype);
    args.addend = arena.input("addend", filled({0.5}), desc.dtype);
    args.out = arena.output("out", desc.hidden, desc.dtype);
    EXPECT_TRUE(make_plan(desc, kDevice, kChecked).value().run(args, {}).ok());
    return arena.tensor("out", desc.dtype);
  };
  EXPECT_EQ(sum({0, 1}, {0x1p12, 0x1p12, 7}), filled({0.5}));
  EXPECT_EQ(sum({0, 2}, {2, 7, 3}), filled({8196.5}));
}

// The sum is made in fp32, in slot order, and rounded once: 1 + 2^-8 + 2^-8 is 1 + 2^-7 in bf16,
// while rounding after each addition would give 1.
TEST(Aggregate, RoundsOnce) {
  AggregateDesc desc;
  desc.tokens = 1;
  desc.rows = 3;
  desc.hidden = 8;
  desc.top_k = 3;
  desc.dtype = DType::bf16;
  EXPECT_EQ(run(desc, filled({1, 0x1p-8, 0x1p-8}), {0, 1, 2}, {}, {}, {}, {}),
            filled({1 + 0x1p-7}));
  // Slot order, not row order: 2^24 + 1 - 2^24 is 0 in fp32, 2^24 - 2^24 + 1 is 1.
  desc.dtype = kTypes[0];
  EXPECT_EQ(run(desc, filled({0x1p24, 1, -0x1p24}), {0, 1, 2}, {}, {}, {}, {}), filled({0}));
  EXPECT_EQ(run(desc, filled({0x1p24, 1, -0x1p24}), {0, 2, 1}, {}, {}, {}, {}), filled({1}));
}

}  // namespace
}  // namespace sonicmoe::verify
