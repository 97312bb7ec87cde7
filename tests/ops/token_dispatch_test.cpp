// Which tokens go to which ranks, beside a search of each rank for its tokens; and sending them.
#include "sonicmoe/token_dispatch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "testkit/buffer.h"
#include "testkit/device_memory.h"
#include "testkit/inputs.h"
#include "tests/device.h"

namespace sonicmoe::testkit {
namespace {

using Ints = std::vector<std::int32_t>;
constexpr const char* kOutputs[] = {"numbers", "row_tokens", "choices", "token_rows",
                                    "score_places"};

/// A call with arrays of its own.
struct Call {
  explicit Call(const TokenDispatchDesc& d, const Ints& ids)
      : desc(d), plan(make_plan(d, kDevice)), arena(kDevice) {
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    args.ids = arena.input("ids", ids);
    const std::vector<double> scores = scores_of(ids.size());
    args.scores = static_cast<const float*>(arena.input("scores", scores, DType::f32));
    args.numbers = arena.output_int32("numbers", 2 * d.ranks + 2);
    args.row_tokens = arena.output_int32("row_tokens", d.rows());
    args.choices = arena.output_int32("choices", 2 * d.rows() * d.columns());
    args.token_rows = arena.output_int32("token_rows", d.tokens * d.ranks);
    args.score_places = arena.output_int32("score_places", d.tokens * d.top_k);
    const std::size_t bytes = plan.value().workspace_bytes();
    workspace = {arena.output("workspace", bytes, 256), bytes};
  }
  /// Each score is another one.
  static std::vector<double> scores_of(std::size_t count) {
    std::vector<double> scores(count);
    for (std::size_t i = 0; i < count; ++i) scores[i] = static_cast<double>(i) + 0.5;
    return scores;
  }
  void run(Stream stream = {}) {
    const Status status = plan.value().run(args, workspace, stream);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  TokenDispatchDesc desc;
  Result<OpPlan<TokenDispatchDesc>> plan;
  Arena arena;
  TokenDispatchArgs args;
  Workspace workspace;
};

struct Right {
  Ints numbers, row_tokens, choices, token_rows, score_places;
  std::int64_t used = 0;  ///< the rows that packed ones fill
};

/// Rank by rank, token by token, from the definition.
Right expected(const TokenDispatchDesc& d, const Ints& ids) {
  const std::vector<double> scores = Call::scores_of(ids.size());
  const std::int64_t columns = d.columns();
  Right r;
  r.row_tokens.assign(d.rows(), 0);
  r.token_rows.assign(d.tokens * d.ranks, -1);
  r.score_places.assign(d.tokens * d.top_k, 0);
  for (std::int64_t row = 0; row < d.rows(); ++row) {
    r.choices.insert(r.choices.end(), columns, -1);
    r.choices.insert(r.choices.end(), columns, 0);
  }
  Ints pairs;
  for (std::int64_t rank = 0; rank < d.ranks; ++rank) {
    std::int32_t rows = 0, of_rank = 0;
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      std::int64_t taken = 0;
      const std::int64_t row = d.packed ? r.used : rank * d.tokens + rows;
      for (std::int64_t k = 0; k < d.top_k && taken < columns; ++k) {
        const std::int64_t choice = t * d.top_k + k, id = ids[choice] - rank * d.experts;
        if (id < 0 || id >= d.experts) continue;
        r.choices[2 * columns * row + taken] = static_cast<std::int32_t>(id);
        r.choices[2 * columns * row + columns + taken] =
            std::bit_cast<std::int32_t>(static_cast<float>(scores[choice]));
        r.score_places[choice] = static_cast<std::int32_t>(1 + columns * row + taken);
        ++taken;
      }
      if (taken == 0) continue;
      r.row_tokens[row] = static_cast<std::int32_t>(t);
      r.token_rows[t * d.ranks + rank] = static_cast<std::int32_t>(row);
      ++rows, ++r.used;
      of_rank += static_cast<std::int32_t>(taken);
    }
    r.numbers.push_back(rows);
    pairs.push_back(of_rank);
  }
  r.numbers.insert(r.numbers.end(), pairs.begin(), pairs.end());
  r.numbers.push_back(static_cast<std::int32_t>(d.experts));
  r.numbers.push_back(static_cast<std::int32_t>(d.tokens));
  return r;
}

void expect_dispatched(const Arena& arena, const TokenDispatchDesc& d, const Ints& ids) {
  Right right = expected(d, ids);
  EXPECT_EQ(arena.damage(), "");
  EXPECT_EQ(arena.int32("numbers"), right.numbers);
  EXPECT_EQ(arena.int32("row_tokens"), right.row_tokens);
  EXPECT_EQ(arena.int32("token_rows"), right.token_rows);
  EXPECT_EQ(arena.int32("score_places"), right.score_places);
  Ints choices = arena.int32("choices");
  if (d.packed) {  // those behind the last row are undefined
    choices.resize(2 * d.columns() * right.used);
    right.choices.resize(choices.size());
  }
  EXPECT_EQ(choices, right.choices);
}

enum class Ids { any, sentinels, one_rank, hostile };

/// Different ids in a token, some of them sentinels; or no choices; or all of the last rank; or any
/// numbers at all, repeated ones too.
Ints ids_of(const TokenDispatchDesc& d, Ids kind, std::uint64_t seed) {
  const Random random(seed, 3);
  const std::int64_t all = d.experts * d.ranks;
  Ints ids;
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    const std::int64_t first = random.below(2 * t, all), step = 1 + random.below(2 * t + 1, 3);
    for (std::int64_t k = 0; k < d.top_k; ++k) {
      const std::uint64_t draw = t * d.top_k + k;
      std::int64_t id = first + step * k;  // from `all` on: sentinels
      if (kind == Ids::sentinels) id = draw % 2 == 0 ? -1 - (t % 5) : all + t;
      if (kind == Ids::one_rank) id = all - 1 - k % d.experts;
      if (kind == Ids::hostile) {
        const std::int64_t far[] = {INT32_MIN, INT32_MAX, -1, all, all - 1, 0};
        const std::int64_t which = Random(seed, 4).below(draw, 12);
        id = which < 6 ? far[which] : Random(seed, 5).below(draw, all);
      }
      ids.push_back(static_cast<std::int32_t>(id));
    }
  }
  return ids;
}

// Sizes: T, e, P, K. A block of the CUDA kernel has 256 tokens.
constexpr std::int64_t kSizes[][4] = {{0, 4, 2, 2},      {1, 1, 1, 1},      {5, 1, 3, 2},
                                      {255, 4, 2, 2},    {256, 8, 4, 8},    {257, 2, 8, 6},
                                      {1000, 64, 2, 8},  {1000, 3, 33, 22}, {3000, 16, 8, 10},
                                      {700, 1, 1024, 4}, {20000, 2, 5, 3}};

template <class F>
void for_each_call(F&& f) {
  std::uint64_t seed = 0;
  for (const auto& [tokens, experts, ranks, top_k] : kSizes) {
    for (const bool packed : {false, true}) {
      for (const Ids kind : {Ids::any, Ids::sentinels, Ids::one_rank, Ids::hostile}) {
        const TokenDispatchDesc d{tokens, experts, ranks, top_k, packed};
        SCOPED_TRACE(std::to_string(tokens) + " " + std::to_string(experts) + " " +
                     std::to_string(ranks) + " " + std::to_string(top_k) +
                     (packed ? " packed " : " ") + std::to_string(static_cast<int>(kind)));
        f(d, ids_of(d, kind, ++seed));
      }
    }
  }
}

TEST(TokenDispatch, SendsEachTokenOnceToEachRank) {
  for_each_call([](const TokenDispatchDesc& d, const Ints& ids) {
    Call call(d, ids);
    call.run();
    ASSERT_TRUE(synchronize(kDevice).ok());
    expect_dispatched(call.arena, d, ids);
  });
}

#if SONICMOE_TEST_CUDA
TEST(TokenDispatch, ReplaysWithOtherIds) {
  const OwnStream stream(kDevice);
  for (const bool packed : {false, true}) {
    const TokenDispatchDesc d{3000, 16, 8, 10, packed};
    Call call(d, ids_of(d, Ids::any, 1));
    call.run(stream);
    ASSERT_TRUE(synchronize(kDevice).ok());
    Graph::begin(kDevice, stream);
    call.run(stream);
    const Graph graph(kDevice, stream);
    for (const Ids kind : {Ids::hostile, Ids::sentinels, Ids::one_rank}) {
      const Ints ids = ids_of(d, kind, 50);
      call.arena.replace("ids", std::as_bytes(std::span(ids)));
      for (const char* name : kOutputs) call.arena[name].poison();
      call.arena["workspace"].poison();
      graph.launch(stream);
      ASSERT_TRUE(synchronize(kDevice).ok());
      expect_dispatched(call.arena, d, ids);
    }
  }
}
#endif

TEST(TokenDispatch, RefusesSizes) {
  const auto expect = [](const TokenDispatchDesc& desc, const char* text) {
    EXPECT_STREQ(make_plan(desc, kDevice).status().message(), text);
  };
  expect({-1, 4, 2, 2}, "tokens: got -1, allowed: 0 to 2147483647");
  expect({8, 0, 2, 2}, "experts: got 0, allowed: 1 to 65536");
  expect({8, 4, 0, 2}, "ranks: got 0, allowed: 1 to 1024");
  expect({8, 4, 1025, 2}, "ranks: got 1025, allowed: 1 to 1024");
  expect({8, 4, 2, 0}, "top_k: got 0, allowed: 1 to 65536");
  expect({8, 1 << 15, 4, 2}, "experts * ranks: got 131072, allowed: 1 to 65536");
  expect({1 << 28, 4, 2, 8}, "tokens * top_k: got 2147483648, allowed: at most 2147483647");
  expect({1 << 24, 8, 64, 8},
         "rows * min(top_k, experts): got 8589934592, allowed: 0 to 2147483646");
}

TEST(TokenDispatch, RefusesPointers) {
  const TokenDispatchDesc d{16, 4, 2, 2};
  Call call(d, ids_of(d, Ids::any, 1));
  const auto expect_refused = [&](const char* name, auto TokenDispatchArgs::*member) {
    TokenDispatchArgs args = call.args;
    args.*member = nullptr;
    const std::string null = call.plan.value().run(args, call.workspace).message();
    EXPECT_TRUE(null.starts_with(std::string(name) + ": got null, allowed: ")) << null;
    auto* const bytes = reinterpret_cast<const char*>(call.args.*member) + 2;
    std::memcpy(&(args.*member), &bytes, sizeof bytes);
    const std::string odd = call.plan.value().run(args, call.workspace).message();
    EXPECT_TRUE(odd.starts_with(std::string(name) + ": got address ")) << odd;
  };
  expect_refused("ids", &TokenDispatchArgs::ids);
  expect_refused("scores", &TokenDispatchArgs::scores);
  expect_refused("numbers", &TokenDispatchArgs::numbers);
  expect_refused("row_tokens", &TokenDispatchArgs::row_tokens);
  expect_refused("choices", &TokenDispatchArgs::choices);
  expect_refused("token_rows", &TokenDispatchArgs::token_rows);
  expect_refused("score_places", &TokenDispatchArgs::score_places);
  for (const char* name : kOutputs) EXPECT_TRUE(call.arena[name].untouched()) << name;
}

/// A call of send_rows that writes to memory of this device for every rank.
struct SendCall {
  SendCall(const SendRowsDesc& d, const Ints& row_tokens, const Ints& counts)
      : plan(make_plan(d, kDevice)), arena(kDevice) {
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    std::vector<double> x(d.tokens * d.hidden);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(i % 251);
    args.x = arena.input("x", x, d.dtype);
    args.row_tokens = arena.input("row_tokens", row_tokens);
    args.counts = arena.input("counts", counts);
    for (std::int64_t rank = 0; rank < d.ranks; ++rank) {
      to.push_back(arena.output(target(rank), d.tokens * d.hidden, d.dtype));
    }
    args.to = to.data();
  }
  static std::string target(std::int64_t rank) { return "to rank " + std::to_string(rank); }

  Result<OpPlan<SendRowsDesc>> plan;
  Arena arena;
  std::vector<void*> to;
  SendRowsArgs args;
};

TEST(SendRows, WritesTheRowsThatExist) {
  for (const auto& [tokens, ranks, hidden] : {std::array<std::int64_t, 3>{0, 2, 8},
                                              {1, 1, 8},
                                              {7, 3, 264},
                                              {300, 5, 1000},
                                              {40, 128, 16}}) {
    for (const DType type : kTypes) {
      SCOPED_TRACE(std::to_string(tokens) + " " + std::to_string(ranks) + " " + name(type));
      const SendRowsDesc d{tokens, hidden, ranks, type};
      const Random random(tokens + ranks, 7);
      Ints row_tokens, counts;
      for (std::int64_t i = 0; i < tokens * ranks; ++i) {  // -1 and T are out of range
        row_tokens.push_back(static_cast<std::int32_t>(random.below(i, tokens + 2)) - 1);
      }
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const std::int64_t any[] = {tokens, 0, tokens + 5, -3, tokens / 2};
        counts.push_back(static_cast<std::int32_t>(any[rank % 5]));
      }
      SendCall call(d, row_tokens, counts);
      ASSERT_TRUE(call.plan.value().run(call.args).ok());
      ASSERT_TRUE(synchronize(kDevice).ok());
      EXPECT_EQ(call.arena.damage(), "");
      const std::size_t row_bytes = d.hidden * size_of(type);
      const auto x = call.arena["x"].bytes();
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const auto bytes = call.arena[SendCall::target(rank)].bytes();
        const GuardedBuffer poison(bytes.size());
        std::vector<std::byte> right(poison.bytes().begin(), poison.bytes().end());
        for (std::int64_t i = 0; i < std::min<std::int64_t>(counts[rank], tokens); ++i) {
          const std::int64_t token = row_tokens[rank * tokens + i];
          if (token < 0 || token >= tokens) continue;
          std::copy_n(&x[token * row_bytes], row_bytes, &right[i * row_bytes]);
        }
        EXPECT_TRUE(std::ranges::equal(bytes, right)) << "rank " << rank;
      }
    }
  }
}

TEST(SendRows, Refuses) {
  const auto refusal = [](const SendRowsDesc& desc) {
    return std::string(make_plan(desc, kDevice).status().message());
  };
  EXPECT_EQ(refusal({8, 12, 2, kTypes[0]}),
            "hidden: got 12, allowed: multiples of 8 from 8 to 1048576");
  EXPECT_EQ(refusal({8, 16, 129, kTypes[0]}), "ranks: got 129, allowed: 1 to 128");
  EXPECT_EQ(refusal({1 << 30, 16, 2, kTypes[0]}),
            "tokens * ranks: got 2147483648, allowed: 0 to 2147483647");
  const SendRowsDesc d{4, 16, 2, kTypes[0]};
  SendCall call(d, Ints(8), Ints(2));
  const auto run = [&] { return std::string(call.plan.value().run(call.args).message()); };
  call.to[1] = nullptr;
  EXPECT_EQ(run(), "to: got null, allowed: a pointer to (T, d) of each rank");
  call.args.to = nullptr;
  EXPECT_EQ(run(), "to: got null, allowed: a pointer to (P) pointers");
  call.args.counts = nullptr;
  EXPECT_EQ(run(), "counts: got null, allowed: a pointer to (P) int32");
  call.args.row_tokens = nullptr;
  EXPECT_EQ(run(), "row_tokens: got null, allowed: a pointer to (P T) int32");
  call.args.x = nullptr;
  EXPECT_EQ(run(), "x: got null, allowed: a pointer to (T, d)");
  EXPECT_TRUE(call.arena.outputs_untouched());
}

}  // namespace
}  // namespace sonicmoe::testkit
