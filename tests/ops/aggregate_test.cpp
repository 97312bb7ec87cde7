// What the layer does not use: scores together with an addend, in both forms of slots.
#include <gtest/gtest.h>

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
