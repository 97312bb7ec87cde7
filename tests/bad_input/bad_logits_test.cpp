// Bad logits with an error word on the CPU: their tokens get valid ids and NaN, the others what
// they get without them.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "sonicmoe/ops.h"
#include "sonicmoe/token_rounding.h"
#include "testkit/buffer.h"
#include "testkit/inputs.h"

namespace sonicmoe::testkit {
namespace {

constexpr std::int64_t T = 150, E = 16, K = 3;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor logits_of_all() {
  Tensor logits(T * E);
  for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = Random(1, 2).normal(i);
  return logits;
}

/// Spoils some tokens and returns them.
std::set<std::int64_t> spoil(Tensor* logits, bool softmax) {
  std::set<std::int64_t> bad = {3, 70, 149};
  (*logits)[3 * E + 5] = kNan;
  (*logits)[70 * E] = kInf;
  std::fill_n(logits->begin() + 149 * E, E, kNan);
  if (softmax) {
    std::fill_n(logits->begin() + 100 * E, E, -kInf);
    bad.insert(100);
  }
  return bad;
}

struct Routed {
  Tensor scores;
  std::vector<std::int32_t> ids;
  std::int32_t error_word;
};

Routed top_k(const TopKDesc& desc, const Tensor& logits) {
  const auto plan = make_plan(desc);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  Arena arena;
  const std::size_t bytes = plan.value().workspace_bytes();
  std::int32_t error_word = kBadTokenId;  // another call's
  const Tensor bias(E, 0.25);
  TopKArgs args{.logits = arena.input("logits", logits, DType::f32),
                .scores = arena.output_float("scores", T * K),
                .probabilities = arena.output_float("probabilities", T * K),
                .ids = arena.output_int32("ids", T * K),
                .error_word = &error_word};
  if (desc.selection_bias) {
    args.selection_bias = static_cast<const float*>(arena.input("bias", bias, DType::f32));
  }
  const Status status = plan.value().run(args, {arena.output("workspace", bytes, 256), bytes});
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(arena.damage(), "");
  return {arena.tensor("scores", DType::f32), arena.int32("ids"), error_word};
}

TEST(BadLogits, OfTopKSpoilTheirTokensAlone) {
  for (const RouterScore score :
       {RouterScore::softmax, RouterScore::sigmoid, RouterScore::sqrt_softplus}) {
    for (const RouterOrder order :
         {RouterOrder::select_then_score, RouterOrder::score_then_select}) {
      for (const std::int64_t groups : {1, 4}) {
        TopKDesc desc;
        desc.tokens = T, desc.experts = E, desc.top_k = K, desc.dtype = DType::f32;
        desc.score = score, desc.order = order;
        desc.groups = groups, desc.kept_groups = (groups + 1) / 2;
        desc.selection_bias = groups > 1;
        Tensor logits = logits_of_all();
        const Routed good = top_k(desc, logits);
        EXPECT_EQ(good.error_word, kBadTokenId);
        const auto bad = spoil(&logits, score == RouterScore::softmax);
        const Routed routed = top_k(desc, logits);
        EXPECT_EQ(routed.error_word, kBadTokenId | kBadLogits);
        for (std::int64_t t = 0; t < T; ++t) {
          std::set<std::int32_t> ids;
          for (std::int64_t i = t * K; i < (t + 1) * K; ++i) {
            ASSERT_TRUE(routed.ids[i] >= 0 && routed.ids[i] < E);
            ids.insert(routed.ids[i]);
            if (bad.contains(t)) {
              EXPECT_TRUE(std::isnan(routed.scores[i])) << "token " << t;
            } else {
              EXPECT_EQ(routed.ids[i], good.ids[i]);
              EXPECT_EQ(routed.scores[i], good.scores[i]);
            }
          }
          EXPECT_EQ(std::ssize(ids), K);
        }
      }
    }
  }
}

TEST(BadLogits, OfTokenRoundingSpoilTheirTokensAlone) {
  for (const RoundingRule rule : {RoundingRule::nearest, RoundingRule::nearest_scores}) {
    TokenRoundingDesc desc;
    desc.tokens = T, desc.experts = E, desc.top_k = K, desc.dtype = DType::f32;
    desc.rule = rule, desc.tile = 8;
    Tensor logits = logits_of_all();
    const auto bad = spoil(&logits, true);
    const auto plan = make_plan(desc);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    Arena arena;
    const std::size_t bytes = plan.value().workspace_bytes();
    std::int32_t error_word = 0;
    const TokenRoundingArgs args{.logits = arena.input("logits", logits, DType::f32),
                                 .scores = arena.output_float("scores", desc.capacity()),
                                 .token_ids = arena.output_int32("token_ids", desc.capacity()),
                                 .expert_ids = arena.output_int32("expert_ids", desc.capacity()),
                                 .counts = arena.output_int32("counts", E),
                                 .error_word = &error_word};
    const Status status = plan.value().run(args, {arena.output("workspace", bytes, 256), bytes});
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(arena.damage(), "");
    EXPECT_EQ(error_word, kBadLogits);
    const Tensor scores = arena.tensor("scores", DType::f32);
    const auto tokens = arena.int32("token_ids"), experts = arena.int32("expert_ids");
    std::int64_t spoilt = 0;
    for (std::size_t i = 0; i < scores.size() && experts[i] < E; ++i) {
      EXPECT_EQ(std::isnan(scores[i]), bad.contains(tokens[i])) << "token " << tokens[i];
      spoilt += std::isnan(scores[i]);
    }
    EXPECT_GT(spoilt, 0);
    for (const std::int32_t count : arena.int32("counts")) EXPECT_EQ(count % 8, 0);
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
