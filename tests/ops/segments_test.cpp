// Which rows the experts own: counts, offsets or both, good and bad ones. And zeros elsewhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/op_plan.h"
#include "math/load_class.h"
#include "sonicmoe/ops.h"
#include "testkit/buffer.h"
#include "testkit/device_memory.h"
#include "testkit/inputs.h"
#include "tests/device.h"

namespace sonicmoe::testkit {
namespace {

using Ints = std::vector<std::int32_t>;
using Longs = std::vector<std::int64_t>;

struct Given {
  std::int64_t rows, experts;
  std::optional<Longs> counts, offsets;
  std::int64_t expected_rows = 0;
};
struct Found {
  Status status;
  Ints begins, ends, expert_order;
  std::int32_t error_word = 0;
  bool untouched = false;
};

template <class Index>
std::vector<std::byte> as_index(const Longs& values) {
  std::vector<Index> narrow(values.begin(), values.end());
  const auto bytes = std::as_bytes(std::span(narrow));
  return {bytes.begin(), bytes.end()};
}

Found run(const Given& given, IndexType type, bool checked) {
  const auto plan = make_plan(SegmentsDesc{given.rows, given.experts, type, given.expected_rows},
                              kDevice, {.checked = checked});
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  Arena arena(kDevice);
  SegmentsArgs args;
  const auto input = [&](const char* name, const std::optional<Longs>& values) -> const void* {
    if (!values) return nullptr;
    const bool wide = type == IndexType::i64;
    const auto bytes = wide ? as_index<std::int64_t>(*values) : as_index<std::int32_t>(*values);
    return arena.input(name, std::span<const std::byte>(bytes), wide ? 8 : 4);
  };
  args.counts = input("counts", given.counts);
  args.row_offsets = input("row_offsets", given.offsets);
  args.begins = arena.output_int32("begins", given.experts);
  args.ends = arena.output_int32("ends", given.experts);
  args.expert_order = arena.output_int32("expert_order", given.experts);
  args.error_word = arena.output_int32("error_word", 1);
  const std::int32_t none = 0;
  arena["error_word"].put(std::as_bytes(std::span(&none, 1)));
  Handoff handoff;
  if (!kOnCpu) handoff.next_tile_counter = arena.output_int32("next_tile_counter", 1);
  const std::size_t bytes = plan.value().workspace_bytes();
  Found found;
  found.status = run_operation(plan.value(), args, handoff,
                               {arena.output("workspace", bytes, 256), bytes}, {});
  if (found.status.ok()) found.status = synchronize(kDevice);
  EXPECT_EQ(arena.damage(), "");
  found.untouched =
      arena["begins"].untouched() && arena["ends"].untouched() && arena["expert_order"].untouched();
  found.begins = arena.int32("begins");
  found.ends = arena.int32("ends");
  found.expert_order = arena.int32("expert_order");
  found.error_word = arena.int32("error_word")[0];
  if (!kOnCpu && found.status.ok()) {
    EXPECT_EQ(arena.int32("next_tile_counter"), Ints{0});
  }
  return found;
}

/// What an unchecked call does with any numbers, one expert after the other.
Found expected(const Given& given) {
  Found out;
  std::int64_t reached = 0, summed = 0;
  const auto within = [&](std::int64_t value) {
    if (value >= 0 && value <= given.rows) return value;
    out.error_word = kBadCounts;
    return value < 0 ? std::int64_t{0} : given.rows;
  };
  for (std::int64_t e = 0; e < given.experts; ++e) {
    std::int64_t begin = summed, count = 0;
    if (given.offsets) begin = within((*given.offsets)[e]);
    if (given.counts) {
      count = within((*given.counts)[e]);
    } else {
      count = std::max<std::int64_t>(within((*given.offsets)[e + 1]) - begin, 0);
    }
    summed = std::min(summed + count, given.rows);
    if (count > given.rows - begin) out.error_word = kBadCounts, count = given.rows - begin;
    const std::int64_t end = begin + count;
    if (begin < reached) out.error_word = kBadCounts, begin = reached;
    reached = std::max(reached, end);
    out.begins.push_back(static_cast<std::int32_t>(begin));
    out.ends.push_back(static_cast<std::int32_t>(std::max(begin, end)));
  }
  const math::LoadClass load(given.experts,
                             given.expected_rows > 0 ? given.expected_rows : given.rows);
  out.expert_order.resize(given.experts);
  std::iota(out.expert_order.begin(), out.expert_order.end(), 0);
  std::ranges::stable_sort(out.expert_order, std::greater<>(),
                           [&](std::int32_t e) { return load(out.ends[e] - out.begins[e]); });
  return out;
}

void expect_found(const Given& given, IndexType type, bool checked) {
  const Found ours = run(given, type, checked), right = expected(given);
  ASSERT_TRUE(ours.status.ok()) << ours.status.message();
  EXPECT_EQ(ours.begins, right.begins);
  EXPECT_EQ(ours.ends, right.ends);
  EXPECT_EQ(ours.expert_order, right.expert_order);
  EXPECT_EQ(ours.error_word, right.error_word);
}

/// Random counts, some of them 0, and offsets with gaps between the segments.
Given random_given(std::int64_t experts, std::uint64_t seed, bool gaps) {
  const Random random(seed, 9);
  Given given{0, experts, Longs(), Longs()};
  std::int64_t next = gaps ? 3 : 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int64_t count = random.below(2 * e, 3) == 0 ? 0 : random.below(2 * e + 1, 40);
    given.counts->push_back(count);
    given.offsets->push_back(next);
    next += count + (gaps ? random.below(2 * e + 1, 5) : 0);
  }
  given.offsets->push_back(next);
  given.rows = next + 7;
  return given;
}

TEST(Segments, FromCountsOrOffsetsOrBoth) {
  std::uint64_t seed = 0;
  for (const std::int64_t experts : {1, 2, 31, 33, 288, 896, 1023, 1024, 1025, 3000, 65536}) {
    for (const IndexType type : {IndexType::i32, IndexType::i64}) {
      SCOPED_TRACE(std::to_string(experts) + " " + name(type));
      Given dense = random_given(experts, ++seed, false);
      expect_found(dense, type, true);
      const auto offsets = std::exchange(dense.offsets, {});
      expect_found(dense, type, true);
      dense.offsets = offsets, dense.counts.reset(), dense.expected_rows = 5 * experts;
      expect_found(dense, type, true);
      expect_found(random_given(experts, ++seed, true), type, true);
    }
  }
  expect_found({0, 3, Longs{0, 0, 0}, {}}, IndexType::i64, true);
  expect_found({INT32_MAX, 2, Longs{INT32_MAX - 1, 1}, {}}, IndexType::i32, true);
}

// Numbers that describe no segments: CPU calls and checked calls refuse them and write nothing,
// other calls make segments of them that lie inside the rows and share none.
TEST(Segments, WrongNumbers) {
  struct Wrong {
    Given given;
    const char* message;
  };
  constexpr std::int64_t kFar = INT64_MAX;
  const Wrong all[] = {
      {{10, 3, Longs{4, -1, 2}, {}},
       "counts: got -1 at position 1, allowed: 0 to 6, the rows from row 4 on"},
      {{10, 3, Longs{4, 7, 2}, {}},
       "counts: got 7 at position 1, allowed: 0 to 6, the rows from row 4 on"},
      {{10, 3, {}, Longs{0, 5, 4, 8}},
       "row_offsets: got 4 at position 2, allowed: 5, the end of the rows before, to 10, the "
       "number of rows"},
      {{10, 3, {}, Longs{-3, 5, 6, 8}},
       "row_offsets: got -3 at position 0, allowed: 0, the end of the rows before, to 10, the "
       "number of rows"},
      {{10, 2, {}, Longs{0, 5, 11}},
       "row_offsets: got 11 at position 2, allowed: 5, the end of the rows before, to 10, the "
       "number of rows"},
      {{10, 3, Longs{3, 3, 3}, Longs{0, 2, 7, 10}},
       "row_offsets: got 2 at position 1, allowed: 3, the end of the rows before, to 10, the "
       "number of rows"},
      {{10, 3, Longs{3, 3, 3}, Longs{0, 4, 8, 10}},
       "counts: got 3 at position 2, allowed: 0 to 2, the rows from row 8 on"},
  };
  for (const Wrong& wrong : all) {
    for (const IndexType type : {IndexType::i32, IndexType::i64}) {
      SCOPED_TRACE(wrong.message);
      const Found refused = run(wrong.given, type, true);
      EXPECT_EQ(refused.status.code(), StatusCode::invalid_data);
      EXPECT_STREQ(refused.status.message(), wrong.message);
      EXPECT_TRUE(refused.untouched);
      if (!kOnCpu) expect_found(wrong.given, type, false);
    }
  }
  if (kOnCpu) return;
  for (const Given& far : {Given{10, 4, Longs{kFar, -kFar, kFar, 1}, {}},
                           Given{10, 3, {}, Longs{kFar, -kFar, 3, kFar}},
                           Given{10, 3, Longs{kFar, kFar, -kFar}, Longs{-kFar, kFar, 2, 0}}}) {
    expect_found(far, IndexType::i64, false);
  }
  const Random random(5, 5);
  for (std::uint64_t seed = 0; seed < 40; ++seed) {  // any numbers, many experts
    Given any{1 + random.below(4 * seed, 5000), 1 + random.below(4 * seed + 1, 2000), {}, {}};
    const auto numbers = [&](std::int64_t count, std::uint64_t stream) {
      Longs values;
      const Random each(seed, stream);
      for (std::int64_t i = 0; i < count; ++i) values.push_back(each.below(i, 6000) - 500);
      return values;
    };
    if (seed % 3 != 0) any.counts = numbers(any.experts, 1);
    if (seed % 3 != 1) any.offsets = numbers(any.experts + 1, 2);
    expect_found(any, seed % 2 == 0 ? IndexType::i32 : IndexType::i64, false);
  }
}

TEST(ZeroTail, ClearsRowsThatNoExpertOwns) {
  for (const std::int64_t experts : {1, 5, 300}) {
    for (const DType type : kTypes) {
      for (int tensors = 1; tensors < 4; ++tensors) {
        const Given given = random_given(experts, experts, true);
        const Found segments = expected(given);
        constexpr std::int64_t kHidden = 264;
        Arena arena(kDevice);
        ZeroTailArgs args;
        args.begins = arena.input("begins", segments.begins);
        args.ends = arena.input("ends", segments.ends);
        if (tensors & 1) args.rows = arena.output("rows", given.rows * kHidden, type);
        if (tensors & 2) args.values = arena.output_float("values", given.rows);
        const auto plan = make_plan(ZeroTailDesc{given.rows, kHidden, experts, type}, kDevice);
        ASSERT_TRUE(plan.ok()) << plan.status().message();
        ASSERT_TRUE(plan.value().run(args).ok());
        ASSERT_TRUE(synchronize(kDevice).ok());
        EXPECT_EQ(arena.damage(), "");
        const auto expect_cleared = [&](const char* name, std::size_t row_bytes) {
          const auto bytes = arena[name].bytes();
          const GuardedBuffer poison(bytes.size());
          std::vector<std::byte> right(poison.bytes().begin(), poison.bytes().end());
          std::int64_t from = 0;
          const auto clear = [&](std::int64_t begin, std::int64_t end) {
            std::fill_n(&right[begin * row_bytes], (end - begin) * row_bytes, std::byte{0});
          };
          for (std::int64_t e = 0; e < experts; ++e) {
            clear(from, segments.begins[e]);
            from = segments.ends[e];
          }
          clear(from, given.rows);
          EXPECT_TRUE(std::ranges::equal(bytes, right)) << name;
        };
        if (tensors & 1) expect_cleared("rows", kHidden * size_of(type));
        if (tensors & 2) expect_cleared("values", 4);
      }
    }
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
