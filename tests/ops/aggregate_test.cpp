// Sums over a token's rows, bit by bit: in both forms of slots, with scores, the router's part of
// dX, an addend, and what of it the layer does not use together.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "sonicmoe/ops.h"
#include "testkit/buffer.h"
#include "tests/device.h"

namespace sonicmoe::testkit {
namespace {

/// Of a call; what is empty is null.
struct Inputs {
  Tensor rows = {};
  std::vector<std::int32_t> slot_rows = {}, token_offsets = {}, token_slots = {};
  Tensor scores = {}, addend = {};
  std::vector<std::int32_t> slot_experts = {};
  Tensor dlogits = {}, router_w = {};
};

/// What the call gives; the same when it is repeated, and with the addend in `out`.
Tensor run(const AggregateDesc& desc, const Inputs& in) {
  Arena arena(kDevice);
  AggregateArgs args;
  args.rows = arena.input("rows", in.rows, desc.dtype);
  args.slot_rows = arena.input("slot_rows", in.slot_rows);
  args.token_offsets = arena.input("token_offsets", in.token_offsets);
  args.token_slots = arena.input("token_slots", in.token_slots);
  args.slot_scores = static_cast<const float*>(arena.input("scores", in.scores, DType::f32));
  args.addend = arena.input("addend", in.addend, desc.dtype);
  args.slot_experts = arena.input("slot_experts", in.slot_experts);
  args.dlogits = arena.input("dlogits", in.dlogits, desc.dtype);
  args.router_w = arena.input("router_w", in.router_w, desc.dtype);
  args.out = arena.output("out", desc.tokens * desc.hidden, desc.dtype);
  const auto plan = make_plan(desc, kDevice, kChecked);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  const auto call = [&] {
    const Status status = plan.value().run(args, {});
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(arena.damage(), "");
    return arena.tensor("out", desc.dtype);
  };
  const Tensor out = call();
  EXPECT_EQ(call(), out);
  if (args.addend != nullptr) {
    arena["out"].put(encode(in.addend, desc.dtype));
    args.addend = args.out;
    EXPECT_EQ(call(), out);
  }
  return out;
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
  // Token 0 has rows 3 and 0, token 1 row 2 and a slot without row.
  Inputs in{.rows = filled({1, 10, 100, 1000}), .slot_rows = {3, 0, 2, -1}};
  EXPECT_EQ(run(desc, in), filled({1001, 100}));
  in.scores = {2, 3, 5, 7};
  in.addend = filled({0.5, 0.25});
  EXPECT_EQ(run(desc, in), filled({2003.5, 500.25}));
}

TEST(Aggregate, ListsWithScoresAndAddend) {
  AggregateDesc desc;
  desc.tokens = 3;
  desc.rows = 4;
  desc.hidden = 8;
  desc.dtype = DType::bf16;
  // Token 0 has slots 1 and 3, token 1 none, token 2 slot 0; slot 2 is a sentinel.
  EXPECT_EQ(run(desc, {.rows = filled({1, 2, 4, 8}),
                       .slot_rows = {0, 1, -1, 2},
                       .token_offsets = {0, 2, 2, 3},
                       .token_slots = {1, 3, 0, -1},
                       .scores = {2, 3, 5, 7},
                       .addend = filled({1, 1, 1})}),
            filled({35, 1, 3}));
}

/// K slots a token, with and without scores, the router's part and an addend, and lists of as many
/// or none: small integers, so that every order gives the same sum. Of the experts that a token
/// does not have, gradients and, where nobody has them, weights are NaN.
void expect_sums(std::int64_t tokens, std::int64_t hidden, std::int64_t experts, std::int64_t top_k,
                 DType dtype = kTypes[0]) {
  SCOPED_TRACE(testing::Message() << "T " << tokens << " d " << hidden << " E " << experts << " K "
                                  << top_k);
  AggregateDesc desc;
  desc.tokens = tokens;
  desc.rows = tokens * top_k;
  desc.hidden = hidden;
  desc.top_k = top_k;
  desc.dtype = dtype;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Tensor rows(desc.rows * hidden), dlogits(tokens * experts, nan), scores(desc.rows);
  Tensor router_w(experts * hidden, nan);
  Tensor plain(tokens * hidden, 0.0), weighted = plain, routed = plain;
  std::vector<std::int32_t> slot_rows(desc.rows), slot_experts(desc.rows);
  for (std::int64_t slot = 0; slot < desc.rows; ++slot) {
    const std::int64_t t = slot / top_k;
    // Neighbouring slots have different experts, of which the last one has nobody.
    const std::int64_t e = (t * 5 + slot % top_k) % (experts - 1);
    // 7919 is prime, and no divisor of the number of rows.
    slot_rows[slot] = static_cast<std::int32_t>((slot * 7919) % desc.rows);
    slot_experts[slot] = static_cast<std::int32_t>(e);
    if (slot % 11 == 3)
      slot_experts[slot] = slot % 2 == 0 ? -1 : static_cast<std::int32_t>(experts);
    scores[slot] = static_cast<double>(slot % 3);
    dlogits[t * experts + e] = static_cast<double>(slot % 5) - 2;
    for (std::int64_t j = 0; j < hidden; ++j) {
      rows[slot * hidden + j] = static_cast<double>((slot * 3 + j) % 7);
      router_w[e * hidden + j] = static_cast<double>((e + j * 2) % 5) - 2;
    }
  }
  for (std::int64_t slot = 0; slot < desc.rows; ++slot) {
    const std::int64_t t = slot / top_k, e = slot_experts[slot];
    const bool has_row = slot % 13 != 5, has_expert = e >= 0 && e < experts;
    for (std::int64_t j = 0; j < hidden; ++j) {
      const std::int64_t at = t * hidden + j;
      const double value = has_row ? rows[slot_rows[slot] * hidden + j] : 0.0;
      plain[at] += value;
      if (has_row) weighted[at] += scores[slot] * value;
      routed[at] += value;
      if (has_expert) routed[at] += dlogits[t * experts + e] * router_w[e * hidden + j];
    }
    if (!has_row) {
      slot_rows[slot] = -1;
      scores[slot] = nan;  // of no account
    }
  }
  const auto rounded = [&](Tensor values) {
    for (double& value : values) value = round_to(value, desc.dtype);
    return values;
  };
  const auto expect = [&](const Inputs& in, const Tensor& expected) {
    EXPECT_EQ(run(desc, in), rounded(expected));
    Inputs more = in;
    more.addend = rounded(expected);
    Tensor sum = expected;
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += more.addend[i];
    EXPECT_EQ(run(desc, more), rounded(sum));
  };
  Inputs in{.rows = rows, .slot_rows = slot_rows};
  expect(in, plain);
  in.scores = scores;
  expect(in, weighted);

  // The same slots in lists, every third token without any.
  Inputs lists{.rows = rows, .slot_rows = slot_rows, .token_offsets = {0}, .token_slots = {}};
  Tensor plain_lists = plain, weighted_lists = weighted;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; t % 3 != 1 && k < top_k; ++k) {
      lists.token_slots.push_back(static_cast<std::int32_t>(t * top_k + k));
    }
    lists.token_offsets.push_back(static_cast<std::int32_t>(lists.token_slots.size()));
    if (t % 3 != 1) continue;
    std::fill_n(plain_lists.begin() + t * hidden, hidden, 0.0);
    std::fill_n(weighted_lists.begin() + t * hidden, hidden, 0.0);
  }
  lists.token_slots.resize(desc.rows, -1);
  desc.top_k = 0;
  expect(lists, plain_lists);
  lists.scores = scores;
  expect(lists, weighted_lists);

  // All slots of each token, in the order of the slots.
  lists.token_slots = {};
  for (std::int64_t t = 0; t <= tokens; ++t) {
    lists.token_offsets[t] = static_cast<std::int32_t>(t * top_k);
  }
  expect(lists, weighted);
  lists.scores = {};
  expect(lists, plain);

  desc.top_k = top_k;
  desc.experts = experts;
  in.scores = {};
  in.slot_experts = slot_experts;
  in.dlogits = dlogits;
  in.router_w = router_w;
  expect(in, routed);
}

TEST(Aggregate, SumsOfTopKSlots) {
  // A few lanes of columns; as many as a warp takes, and a few more; several times that.
  for (const std::int64_t hidden : {8, 72, 256, 264, 512, 2064}) {
    // Groups of two, four and eight slots: part of one, all of it, several.
    for (const std::int64_t top_k : {1, 2, 3, 4, 5, 8, 10, 12, 13, 16, 17}) {
      expect_sums(37, hidden, 40, top_k);
    }
  }
  // Rows of two blocks, and not quite.
  for (const std::int64_t hidden : {4088, 4096, 4104}) {
    for (const std::int64_t top_k : {2, 4, 5, 16}) expect_sums(37, hidden, 40, top_k);
  }
  // As many slots as there may be with a router.
  for (const std::int64_t hidden : {8, 16, 264}) expect_sums(37, hidden, 300, 64);
}

// So many tokens that a warp, of which 4,224 may be at work, goes round its ring twice and more.
TEST(Aggregate, SumsOfManyTokens) {
  for (const std::int64_t top_k : {1, 2}) expect_sums(40001, 8, 20, top_k);
  for (const std::int64_t top_k : {3, 4, 5, 9}) expect_sums(20001, 8, 20, top_k);
  expect_sums(7001, 520, 20, 3);
}

// So many rows, and so many weights, that a block keeps those of its section of the columns (of 132
// multiprocessors): one part of thirteen, of which the last is not whole.
TEST(Aggregate, SumsWithWeightsKept) {
  for (const std::int64_t top_k : {2, 4, 8}) expect_sums(980 / top_k, 3080, 22, top_k);
}

// The same, and a warp goes round its ring; two parts of fourteen; weights beside which there is no
// place for all warps. Too much for a sanitizer.
TEST(AggregateAtLength, SumsWithWeightsKept) {
  expect_sums(1500, 3080, 22, 1);
  expect_sums(1500, 3080, 22, 2);
  expect_sums(1000, 3080, 22, 3);
  expect_sums(400, 3080, 22, 8, kTypes[1]);
  expect_sums(350, 3080, 22, 17);
  expect_sums(450, 3528, 40, 8);
  expect_sums(2100, 776, 198, 17);
}

// In fp32 a 2^24 swallows a 1: another order, or groups of slots added up by themselves, give
// another result.
TEST(Aggregate, AddsInSlotOrder) {
  for (const std::int32_t top_k : {3, 4, 5, 8, 10, 12, 13, 16, 17}) {
    SCOPED_TRACE(top_k);
    AggregateDesc desc;
    desc.tokens = 1;
    desc.rows = top_k;
    desc.hidden = 8;
    desc.dtype = kTypes[0];
    constexpr double kBig = 0x1p24;
    Tensor swallowed(top_k, 1.0), kept(top_k, 1.0);
    swallowed.front() = kBig, swallowed.back() = -kBig;
    kept[top_k - 2] = kBig, kept[top_k - 1] = -kBig;
    const double left = static_cast<float>(kBig + (top_k - 2)) - kBig;
    for (const bool scored : {false, true}) {
      for (const bool listed : {false, true}) {
        const auto sum = [&](const Tensor& values) {
          Inputs in{.rows = filled(values)};
          for (std::int32_t i = 0; i < top_k; ++i) in.slot_rows.push_back(i);
          if (scored) in.scores = Tensor(top_k, 1.0);
          if (listed) {
            in.token_offsets = {0, top_k};
            in.token_slots = in.slot_rows;
          }
          desc.top_k = listed ? 0 : top_k;
          return run(desc, in);
        };
        EXPECT_EQ(sum(swallowed), filled({0}));
        EXPECT_EQ(sum(kept), filled({left}));
      }
    }
  }
}

/// The same slots for every token, slot k with expert k: the values given are those of the first
/// two slots and of the last, of their rows and of their experts' weights. In fp32 a 2^24 swallows
/// a 1: another order gives another result.
Inputs first_two_and_last(const AggregateDesc& desc, const Tensor& rows, const Tensor& terms) {
  const auto slots = [&](const Tensor& values, std::int64_t count) {
    Tensor out(count * desc.hidden);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t k = i % desc.top_k;
      const double value = k < 2 ? values[k] : k + 1 == desc.top_k ? values[2] : 0.0;
      std::fill_n(out.begin() + i * desc.hidden, desc.hidden, value);
    }
    return out;
  };
  Inputs in{.rows = slots(rows, desc.rows),
            .dlogits = Tensor(desc.tokens * desc.experts, 1.0),
            .router_w = slots(terms, desc.top_k)};
  in.router_w.resize(desc.experts * desc.hidden);
  for (std::int64_t slot = 0; slot < desc.rows; ++slot) {
    in.slot_rows.push_back(static_cast<std::int32_t>(slot));
    in.slot_experts.push_back(static_cast<std::int32_t>(slot % desc.top_k));
  }
  return in;
}
constexpr double kBig = 0x1p24;

// The rows in slot order, + the router's terms in slot order, a sum of their own, + the addend.
TEST(Aggregate, RoutersPartIsASumOfItsOwn) {
  for (const std::int64_t top_k : {3, 4, 5, 8, 9, 64}) {
    SCOPED_TRACE(top_k);
    AggregateDesc desc;
    desc.tokens = 1;
    desc.rows = desc.experts = desc.top_k = top_k;
    desc.hidden = 8;
    desc.dtype = kTypes[0];
    const auto sum = [&](const Tensor& rows, const Tensor& terms) {
      Inputs in = first_two_and_last(desc, rows, terms);
      in.addend = filled({0.5});
      return run(desc, in);
    };
    // Terms onto the rows, or rows onto the terms; slot by slot, or a group of slots after another.
    EXPECT_EQ(sum({1, 0, 0}, {kBig, 0, -kBig}), filled({1.5}));
    EXPECT_EQ(sum({kBig, 0, -kBig}, {1, 0, 0}), filled({1.5}));
    // Either sum in another order.
    EXPECT_EQ(sum({kBig, 1, -kBig}, {0, 0, 0}), filled({0.5}));
    EXPECT_EQ(sum({0, 0, 0}, {kBig, 1, -kBig}), filled({0.5}));
    // The addend onto one of them.
    EXPECT_EQ(sum({kBig, 0, 0}, {-kBig, 0, 0}), filled({0.5}));
  }
}

TEST(Aggregate, RoutersPartIsASumOfItsOwnWithWeightsKept) {
  AggregateDesc desc;
  desc.tokens = 330;
  desc.top_k = 3;
  desc.rows = desc.tokens * desc.top_k;
  desc.hidden = 3080;
  desc.experts = 22;
  desc.dtype = kTypes[0];
  const Tensor big = {kBig, 0, -kBig}, one = {1, 0, 0}, ones(desc.tokens * desc.hidden, 1.0);
  EXPECT_EQ(run(desc, first_two_and_last(desc, one, big)), ones);
  EXPECT_EQ(run(desc, first_two_and_last(desc, big, one)), ones);
}

// No rows, a term that underflows to -0 and one without an expert give +0 on every backend.
TEST(Aggregate, RoutersPartOfNothingIsPlusZero) {
  AggregateDesc desc;
  desc.tokens = 1;
  desc.rows = desc.top_k = 2;
  desc.hidden = 8;
  desc.dtype = DType::bf16;
  desc.experts = 2;
  for (const double out : run(desc, {.rows = filled({1, 1}),
                                    .slot_rows = {-1, -1},
                                    .slot_experts = {1, 2},
                                    .dlogits = {1, -0x1p-100},
                                    .router_w = filled({1, 0x1p-100})})) {
    EXPECT_TRUE(out == 0 && !std::signbit(out)) << out;
  }
}

// A product that underflows is -0, and stays it beside slots without a row, whatever their scores.
TEST(Aggregate, WeightedSumMayBeMinusZero) {
  for (const std::int64_t top_k : {1, 2, 3, 4, 5, 8, 10, 13, 17}) {
    SCOPED_TRACE(top_k);
    AggregateDesc desc;
    desc.tokens = 1;
    desc.rows = desc.top_k = top_k;
    desc.hidden = 8;
    desc.dtype = DType::bf16;
    Inputs in{.rows = filled(Tensor(top_k, -0x1p-100)), .slot_rows = {0}};
    in.slot_rows.resize(top_k, -1);
    in.scores.assign(top_k, std::numeric_limits<double>::quiet_NaN());
    in.scores[0] = 0x1p-100;
    for (const double out : run(desc, in)) EXPECT_TRUE(out == 0 && std::signbit(out)) << out;
  }
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
  Inputs in{.rows = filled({1, 0x1p-8, 0x1p-8}), .slot_rows = {0, 1, 2}};
  EXPECT_EQ(run(desc, in), filled({1 + 0x1p-7}));
  // Slot order, not row order: 2^24 + 1 - 2^24 is 0 in fp32, 2^24 - 2^24 + 1 is 1.
  desc.dtype = kTypes[0];
  in.rows = filled({0x1p24, 1, -0x1p24});
  EXPECT_EQ(run(desc, in), filled({0}));
  in.slot_rows = {0, 2, 1};
  EXPECT_EQ(run(desc, in), filled({1}));
}

}  // namespace
}  // namespace sonicmoe::testkit
