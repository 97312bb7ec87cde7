#include "testkit/grouping.h"

#include <gtest/gtest.h>

namespace sonicmoe::testkit {
namespace {

using Ints = std::vector<std::int32_t>;

TEST(Grouping, OrdersByExpertThenTokenThenSlot) {
  // Slots:            0  1  2  3  4  5
  const Routing lists{{2, 0, 2, 1, 2, 0}, {1, 1, 0, 9, 1, 0}};  // expert 9 of 3 is a sentinel
  const Grouping g = group(lists, 3, 3);
  EXPECT_EQ(g.counts, (Ints{2, 3, 0}));
  EXPECT_EQ(g.offsets, (Ints{0, 2, 5, 5}));
  EXPECT_EQ(g.row_slots, (Ints{5, 2, 1, 0, 4}));
  EXPECT_EQ(g.row_tokens, (Ints{0, 2, 0, 2, 2}));
  EXPECT_EQ(g.slot_rows, (Ints{3, 2, 1, -1, 4, 0}));
  EXPECT_EQ(g.token_offsets, (Ints{0, 2, 2, 5}));
  EXPECT_EQ(g.token_slots, (Ints{1, 5, 0, 2, 4}));
}

TEST(TopK, DescendingWithTiesToTheLowerId) {
  const Tensor logits = {1, 3, 3, 2, 3,  //
                         0, 0, 0, 0, 0};
  EXPECT_EQ(top_k(logits, 2, {.experts = 5, .top_k = 4, .order = RouterOrder::select_then_score}),
            (Ints{1, 2, 4, 3, 0, 1, 2, 3}));
  EXPECT_EQ(top_k(logits, 2, {.experts = 5, .top_k = 4, .order = RouterOrder::score_then_select}),
            (Ints{1, 2, 4, 3, 0, 1, 2, 3}));
}

TEST(TopK, ProbabilitiesCanTieWhereLogitsDoNot) {
  // Far below the maximum two logits give the same (zero) probability in fp32.
  const Tensor logits = {0, -200, -150};
  EXPECT_EQ(top_k(logits, 1, {.experts = 3, .top_k = 3, .order = RouterOrder::select_then_score}),
            (Ints{0, 2, 1}));
  EXPECT_EQ(top_k(logits, 1, {.experts = 3, .top_k = 3, .order = RouterOrder::score_then_select}),
            (Ints{0, 1, 2}));
}

TEST(ExplainTopK, AcceptsOnlyRightAnswers) {
  const Tensor logits = {1, 3, 3, 2};
  const auto explain = [&](const Ints& ids, RouterOrder order) {
    return explain_top_k(
        ids, logits, 1,
        {.experts = 4, .top_k = static_cast<std::int64_t>(ids.size()), .order = order});
  };
  for (const RouterOrder order : {RouterOrder::select_then_score, RouterOrder::score_then_select}) {
    EXPECT_EQ(explain({1, 2, 3}, order), "");
    EXPECT_EQ(explain({2, 1, 3}, order), "token 0, rank 0: expert 2 chosen before 1");
    EXPECT_EQ(explain({1, 2, 0}, order), "token 0, rank 2: expert 0 chosen before 3");
    EXPECT_EQ(explain({1, 1, 3}, order), "token 0, rank 1: expert 1 chosen twice");
    EXPECT_EQ(explain({1, 4}, order), "token 0, rank 1: id 4");
    EXPECT_EQ(explain({1, -1}, order), "token 0, rank 1: id -1");
  }
}

TEST(ExplainTopK, LeavesTheOrderOfNearlyEqualProbabilitiesOpen) {
  const Tensor logits = {1, 1 + 0x1p-22, -1};
  for (const Ints& ids : {Ints{0, 1}, Ints{1, 0}}) {
    EXPECT_EQ(explain_top_k(ids, logits, 1,
                            {.experts = 3, .top_k = 2, .order = RouterOrder::score_then_select}),
              "");
  }
  EXPECT_NE(explain_top_k({0, 1}, logits, 1,
                          {.experts = 3, .top_k = 2, .order = RouterOrder::select_then_score}),
            "");
}

}  // namespace
}  // namespace sonicmoe::testkit
