// Properties of the metadata operation, over random lists and top-K ids.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

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

struct Metadata {
  Ints counts, offsets, row_tokens, row_slots, slot_rows, token_offsets, token_slots, expert_order;
  Tensor row_scores;
};

Metadata run(const MetadataDesc& desc, const Routing& routing, const Tensor& scores,
             bool wants_order = true, const std::vector<std::byte>& block_counts = {}) {
  const auto slots = static_cast<std::size_t>(desc.slots());
  Arena arena(kDevice);
  MetadataArgs args;
  Handoff handoff;
  args.slot_experts = arena.input("slot_experts", routing.experts);
  args.slot_scores = static_cast<const float*>(arena.input("slot_scores", scores, DType::f32));
  if (!block_counts.empty()) {
    handoff.block_counts = static_cast<std::uint8_t*>(const_cast<void*>(
        arena.input("block_counts", std::span<const std::byte>(block_counts), 16)));
  }
  args.counts = arena.output_int32("counts", desc.experts);
  args.offsets = arena.output_int32("offsets", desc.experts + 1);
  args.row_tokens = arena.output_int32("row_tokens", slots);
  args.row_slots = arena.output_int32("row_slots", slots);
  args.slot_rows = arena.output_int32("slot_rows", slots);
  if (!kOnCpu) handoff.next_tile_counter = arena.output_int32("next_tile_counter", 1);
  if (wants_order) args.expert_order = arena.output_int32("expert_order", desc.experts);
  if (!scores.empty()) args.row_scores = arena.output_float("row_scores", slots);
  if (desc.top_k == 0) {
    args.slot_tokens = arena.input("slot_tokens", routing.tokens);
    args.token_offsets = arena.output_int32("token_offsets", desc.tokens + 1);
    args.token_slots = arena.output_int32("token_slots", slots);
  }
  const auto plan = make_plan(desc, kDevice, kChecked);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  const std::size_t bytes = plan.value().workspace_bytes();
  const Status status = run_operation(plan.value(), args, handoff,
                                      {arena.output("workspace", bytes, 256), bytes}, {});
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(arena.damage(), "");
  if (!kOnCpu) {
    EXPECT_EQ(arena.int32("next_tile_counter"), Ints{0});
  }
  Metadata out;
  out.counts = arena.int32("counts");
  out.offsets = arena.int32("offsets");
  out.row_tokens = arena.int32("row_tokens");
  out.row_slots = arena.int32("row_slots");
  out.slot_rows = arena.int32("slot_rows");
  if (wants_order) out.expert_order = arena.int32("expert_order");
  if (!scores.empty()) out.row_scores = arena.tensor("row_scores", DType::f32);
  if (desc.top_k == 0) {
    out.token_offsets = arena.int32("token_offsets");
    out.token_slots = arena.int32("token_slots");
  }
  return out;
}

struct RandomCase {
  MetadataDesc desc;
  Routing routing;
  Tensor scores;
};

RandomCase random_case(std::uint64_t seed, bool lists) {
  const Random random(seed, 2000);
  std::uint64_t draw = 0;
  const auto below = [&](std::int64_t bound) { return random.below(draw++, bound); };
  RandomCase c;
  MetadataDesc& d = c.desc;
  d.tokens = below(5) == 0 ? below(3) : below(60);
  d.experts = 1 + below(below(4) == 0 ? 200 : 9);
  if (lists) {
    d.list_length = d.tokens == 0 ? 0 : below(150);
  } else {
    d.top_k = 1 + below(std::min<std::int64_t>(d.experts, 6));
  }
  // Narrow ranges make empty experts and duplicates, wide ones sentinels. Others are negative.
  const std::int64_t ids = 1 + below(d.experts + 3);
  const std::int64_t tokens = d.tokens == 0 ? 1 : 1 + below(d.tokens);
  for (std::int64_t s = 0; s < d.slots(); ++s) {
    c.routing.tokens.push_back(static_cast<std::int32_t>(lists ? below(tokens) : s / d.top_k));
    auto expert = static_cast<std::int32_t>(below(ids));
    if (below(12) == 0) expert = below(2) == 0 ? -1 : INT32_MIN + expert;
    c.routing.experts.push_back(expert);
    c.scores.push_back(round_to(random.uniform(1000000 + s), DType::f32));
  }
  return c;
}

void expect_properties(const RandomCase& c, const Metadata& m) {
  const MetadataDesc& d = c.desc;
  const std::int64_t slots = d.slots(), rows = m.offsets[d.experts];
  ASSERT_EQ(m.offsets[0], 0);
  std::int64_t all = 0;  // rows as if they had no capacity
  for (std::int64_t e = 0; e < d.experts; ++e) {
    ASSERT_EQ(m.counts[e], std::count(c.routing.experts.begin(), c.routing.experts.end(), e));
    all += m.counts[e];
    ASSERT_EQ(m.offsets[e + 1], std::min(all, d.rows()));
  }
  // By halves of the mean, those that are alike by id: by float, since one half may go either way.
  Ints order(d.experts);
  std::iota(order.begin(), order.end(), 0);
  const float halves =
      slots > 0 ? 2.0f * static_cast<float>(d.experts) / static_cast<float>(d.rows()) : 0.0f;
  const auto load = [&](std::int32_t e) {
    return std::floor(static_cast<float>(m.counts[e]) * halves + 0.5f);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t e, std::int32_t f) { return load(e) > load(f); });
  ASSERT_EQ(m.expert_order, order);
  // row_slots is a permutation of the slots that are no sentinels, slot_rows its inverse.
  Ints seen(m.row_slots.begin(), m.row_slots.begin() + all), expected;
  std::sort(seen.begin(), seen.end());
  for (std::int64_t s = 0; s < slots; ++s) {
    const bool sentinel = is_sentinel(c.routing.experts[s], d.experts);
    if (!sentinel) expected.push_back(static_cast<std::int32_t>(s));
    const auto row = std::find(m.row_slots.begin(), m.row_slots.begin() + all, s);
    if (sentinel || row - m.row_slots.begin() >= rows) {
      ASSERT_EQ(m.slot_rows[s], -1);
    } else {
      ASSERT_EQ(m.row_slots[m.slot_rows[s]], s);
    }
  }
  ASSERT_EQ(seen, expected);
  // Every row lies inside its expert; there, tokens ascend, and slots of one token ascend.
  for (std::int64_t e = 0; e < d.experts; ++e) {
    for (std::int64_t row = m.offsets[e]; row < m.offsets[e + 1]; ++row) {
      const std::int32_t slot = m.row_slots[row];
      ASSERT_EQ(c.routing.experts[slot], e);
      ASSERT_EQ(c.routing.tokens[slot], m.row_tokens[row]);
      ASSERT_EQ(c.scores[slot], m.row_scores[row]);
      if (row == m.offsets[e]) continue;
      ASSERT_LE(m.row_tokens[row - 1], m.row_tokens[row]);
      if (m.row_tokens[row - 1] == m.row_tokens[row]) {
        ASSERT_LT(m.row_slots[row - 1], slot);
      }
    }
  }
  for (std::int64_t row = all; row < slots; ++row) {
    ASSERT_EQ(m.row_tokens[row], 0);
    ASSERT_EQ(m.row_slots[row], -1);
    ASSERT_EQ(m.row_scores[row], 0);
  }
  if (d.top_k > 0) return;
  ASSERT_EQ(m.token_offsets[0], 0);
  ASSERT_EQ(m.token_offsets[d.tokens], rows);
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    for (std::int32_t at = m.token_offsets[t]; at < m.token_offsets[t + 1]; ++at) {
      ASSERT_EQ(c.routing.tokens[m.token_slots[at]], t);
      ASSERT_GE(m.slot_rows[m.token_slots[at]], 0);
      if (at > m.token_offsets[t]) {
        ASSERT_LT(m.token_slots[at - 1], m.token_slots[at]);
      }
    }
  }
}

TEST(Metadata, PropertiesOfLists) {
  for (std::uint64_t seed = 0; seed < 1500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomCase c = random_case(seed, true);
    expect_properties(c, run(c.desc, c.routing, c.scores));
    if (HasFatalFailure()) return;
  }
}

TEST(Metadata, PropertiesOfTopK) {
  for (std::uint64_t seed = 0; seed < 1500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomCase c = random_case(seed, false);
    expect_properties(c, run(c.desc, c.routing, c.scores));
    if (HasFatalFailure()) return;
  }
}

// Ids of the caller (T, K): sentinels on both sides, the same expert several times for a token,
// tokens without any; in the form that counts in global memory, too.
TEST(Metadata, PropertiesOfGivenIds) {
  struct Shape {
    std::int64_t tokens, experts, top_k;
  };
  for (const auto [tokens, experts, top_k] :
       {Shape{300, 128, 8}, Shape{100, 288, 1}, Shape{60, 384, 10}, Shape{50, 512, 22},
        Shape{40, 896, 10}, Shape{30, 1025, 40}, Shape{0, 512, 22}}) {
    SCOPED_TRACE(testing::Message() << "T " << tokens << " E " << experts << " K " << top_k);
    RandomCase c;
    c.desc.tokens = tokens, c.desc.experts = experts, c.desc.top_k = top_k;
    const Random random(static_cast<std::uint64_t>(experts), static_cast<std::uint64_t>(top_k));
    for (std::int64_t s = 0; s < c.desc.slots(); ++s) {
      auto expert = static_cast<std::int32_t>(random.below(s, experts));
      if (s % 7 == 3) expert = s % 2 == 0 ? -1 : INT32_MAX;
      if (s % 5 == 4 && s % top_k > 0) expert = c.routing.experts.back();
      if (s / top_k % 4 == 1) expert = static_cast<std::int32_t>(experts);
      c.routing.tokens.push_back(static_cast<std::int32_t>(s / top_k));
      c.routing.experts.push_back(expert);
      c.scores.push_back(round_to(random.uniform(1000000 + s), DType::f32));
    }
    expect_properties(c, run(c.desc, c.routing, c.scores));
    if (HasFatalFailure()) return;
  }
}

// A list in any order gives the same rows as the list sorted by token, stably.
TEST(Metadata, OrderOfListsDoesNotMatter) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    RandomCase c = random_case(seed, true);
    const Metadata unsorted = run(c.desc, c.routing, c.scores);
    std::vector<std::size_t> order(c.routing.slots());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return c.routing.tokens[a] < c.routing.tokens[b];
    });
    Routing sorted;
    Tensor scores;
    for (const std::size_t slot : order) {
      sorted.tokens.push_back(c.routing.tokens[slot]);
      sorted.experts.push_back(c.routing.experts[slot]);
      scores.push_back(c.scores[slot]);
    }
    for (const bool assume_sorted : {false, true}) {
      c.desc.assume_sorted = assume_sorted;
      const Metadata m = run(c.desc, sorted, scores);
      ASSERT_EQ(m.counts, unsorted.counts) << seed;
      ASSERT_EQ(m.offsets, unsorted.offsets) << seed;
      ASSERT_EQ(m.row_tokens, unsorted.row_tokens) << seed;
      ASSERT_EQ(m.row_scores, unsorted.row_scores) << seed;
      ASSERT_EQ(m.token_offsets, unsorted.token_offsets) << seed;
      for (std::size_t s = 0; s < order.size(); ++s) {
        ASSERT_EQ(m.slot_rows[s], unsorted.slot_rows[order[s]]) << seed;
      }
    }
  }
}

/// Slots as top_k makes them, no expert twice for a token, and its counts.
RandomCase counted_case(std::int64_t tokens, std::int64_t experts, std::int64_t k,
                        std::vector<std::byte>* counts) {
  RandomCase c;
  c.desc.tokens = tokens;
  c.desc.experts = experts;
  c.desc.top_k = k;
  const Random random(static_cast<std::uint64_t>(tokens * experts), static_cast<std::uint64_t>(k));
  const std::size_t stride = (experts + 15) / 16 * 16;
  counts->assign((tokens + 63) / 64 * stride, std::byte{0});
  for (std::int64_t t = 0; t < tokens; ++t) {
    // Of some tokens the lowest experts, so that loads differ.
    const std::int64_t first = t % 3 == 0 ? 0 : random.below(t, experts);
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t e = (first + i) % experts;
      std::byte& count = (*counts)[t / 64 * stride + e];
      count = static_cast<std::byte>(static_cast<int>(count) + 1);
      c.routing.tokens.push_back(static_cast<std::int32_t>(t));
      c.routing.experts.push_back(static_cast<std::int32_t>(e));
      c.scores.push_back(round_to(random.uniform(1000000 + t * k + i), DType::f32));
    }
  }
  return c;
}

// With top_k's counts, in one launch, as without them: blocks of one, two and four rows of counts,
// the last one not full.
TEST(Metadata, CountsOfTopK) {
  std::vector<std::byte> counts;
  for (const std::int64_t tokens : {1, 64, 65, 250, 256, 700}) {
    for (const std::int64_t experts : {1, 8, 60, 128, 256, 500, 512}) {
      for (const std::int64_t k : {1, 4, 8, 9, 16, 17, 32}) {
        if (k > experts) continue;
        SCOPED_TRACE(testing::Message() << "T " << tokens << " E " << experts << " K " << k);
        const RandomCase c = counted_case(tokens, experts, k, &counts);
        const Metadata m = run(c.desc, c.routing, c.scores, true, counts);
        expect_properties(c, m);
        if (HasFatalFailure()) return;
        if (k != 8) continue;
        const Metadata bare = run(c.desc, c.routing, {}, false, counts);
        ASSERT_EQ(bare.row_slots, m.row_slots);
      }
    }
  }
  // A thread has more rows of counts than it loads together: 102, by 16 parts.
  const RandomCase c = counted_case(6500, 512, 8, &counts);
  expect_properties(c, run(c.desc, c.routing, c.scores, true, counts));
}

// What a tool that watches every access can afford.
TEST(Metadata, CountsOfTopKQuick) {
  std::vector<std::byte> counts;
  const RandomCase c = counted_case(300, 60, 8, &counts);
  expect_properties(c, run(c.desc, c.routing, c.scores, true, counts));
}

// What is wrong with them or with the ids may be written wrongly, but nowhere else.
TEST(Metadata, WrongCountsOfTopKLeadNowhere) {
  std::vector<std::byte> counts;
  RandomCase c = counted_case(700, 128, 8, &counts);
  for (const int value : {0, 1, 255}) {
    std::fill(counts.begin(), counts.end(), static_cast<std::byte>(value));
    run(c.desc, c.routing, c.scores, true, counts);
  }
  RandomCase odd = counted_case(700, 128, 8, &counts);
  for (std::size_t slot = 0; slot < odd.routing.experts.size(); slot += 5) {
    odd.routing.experts[slot] = slot % 2 == 0 ? 128 : INT32_MAX;
  }
  run(odd.desc, odd.routing, odd.scores, true, counts);
}

// Threads then write to the same places.
TEST(Metadata, ATokenWithOneExpertTwiceLeadsNowhere) {
  std::vector<std::byte> counts;
  RandomCase c = counted_case(700, 128, 8, &counts);
  std::fill(c.routing.experts.begin(), c.routing.experts.end(), 5);
  run(c.desc, c.routing, c.scores, true, counts);
}

TEST(Metadata, ScoresAndOrderAreOptional) {
  const RandomCase c = random_case(3, true);
  const Metadata with = run(c.desc, c.routing, c.scores);
  const Metadata without = run(c.desc, c.routing, {}, false);
  EXPECT_EQ(with.row_slots, without.row_slots);
  EXPECT_TRUE(without.row_scores.empty());
}

TEST(Metadata, PropertiesOfACapacity) {
  for (std::uint64_t seed = 0; seed < 1500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomCase c = random_case(seed, false);
    if (c.desc.slots() == 0) continue;
    c.desc.row_capacity = 1 + Random(seed, 2001).below(0, c.desc.slots());
    expect_properties(c, run(c.desc, c.routing, c.scores));
    if (HasFatalFailure()) return;
  }
}

// Two popular experts come first, the larger before the other; the rest differ by less than half a
// mean of 100 and stay as they are.
TEST(Metadata, OrderOfExpertsIsByHalvesOfTheMean) {
  MetadataDesc desc;
  desc.experts = 6;
  desc.top_k = 1;
  const int counts[] = {60, 70, 160, 74, 180, 56};
  RandomCase c;
  for (int e = 0; e < 6; ++e) {
    c.routing.experts.insert(c.routing.experts.end(), counts[e], e);
    desc.tokens += counts[e];
  }
  ASSERT_EQ(desc.tokens, 600);
  EXPECT_EQ(run(desc, c.routing, Tensor(600, 1.0)).expert_order, (Ints{4, 2, 0, 1, 3, 5}));
  c.routing.experts.assign(600, 3);
  EXPECT_EQ(run(desc, c.routing, Tensor(600, 1.0)).expert_order, (Ints{3, 0, 1, 2, 4, 5}));
}

// Many experts: ranked by several blocks, and in the form that counts in global memory.
TEST(Metadata, OrderOfManyExperts) {
  for (const std::int64_t experts : {129, 1024, 1025, 3000}) {
    RandomCase c;
    c.desc.experts = experts;
    c.desc.top_k = 1;
    c.desc.tokens = 4 * experts;
    const Random random(static_cast<std::uint64_t>(experts), 1);
    for (std::int64_t t = 0; t < c.desc.tokens; ++t) {
      const std::int64_t among = 1 + random.below(2 * t, experts);  // the lower, the more popular
      c.routing.tokens.push_back(static_cast<std::int32_t>(t));
      c.routing.experts.push_back(static_cast<std::int32_t>(random.below(2 * t + 1, among)));
      c.scores.push_back(1);
    }
    expect_properties(c, run(c.desc, c.routing, c.scores));
    c.desc.row_capacity = 2 * experts;
    expect_properties(c, run(c.desc, c.routing, c.scores));
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
