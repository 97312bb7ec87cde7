// What unchecked calls say of bad data, and that it spoils nothing but its own token.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/op_plan.h"
#include "sonicmoe/ops.h"
#include "testkit/buffer.h"
#include "testkit/cases.h"
#include "testkit/device_memory.h"
#include "testkit/inputs.h"
#include "testkit/rounding.h"
#include "tests/device.h"
#include "tests/plain_layer.h"

namespace sonicmoe::testkit {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct TopKOutputs {
  std::int32_t error_word = 0;
  std::vector<std::int32_t> ids;  // (T, K)
  std::vector<std::byte> scores;  // (T, K), fp32
};

/// Ids 0 to K - 1 for every token, but for a sentinel in the middle.
std::vector<std::int32_t> first_ids(const TopKDesc& desc) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < desc.tokens * desc.top_k; ++i) {
    const auto k = static_cast<std::int32_t>(i % desc.top_k);
    ids.push_back(k == desc.top_k / 2 ? -1 : k);
  }
  return ids;
}

/// One call, run any number of times in the same guarded memory.
class UncheckedTopK {
 public:
  UncheckedTopK(const TopKDesc& desc, const Tensor& logits) : plan_(make_plan(desc, kDevice)) {
    EXPECT_TRUE(plan_.ok()) << plan_.status().message();
    args_.logits = arena_.input("logits", logits, desc.dtype);
    if (desc.takes_ids()) args_.given_ids = arena_.input("given_ids", first_ids(desc));
    args_.scores = arena_.output_float("scores", desc.tokens * desc.top_k);
    args_.probabilities = arena_.output_float("probabilities", desc.tokens * desc.top_k);
    args_.ids = arena_.output_int32("ids", desc.tokens * desc.top_k);
    args_.error_word = arena_.output_int32("error_word", 1);
    const std::size_t bytes = plan_.ok() ? plan_.value().workspace_bytes() : 0;
    workspace_ = {arena_.output("workspace", bytes, 256), bytes};
  }

  /// `logits` as the library stores them; the error word holds `word` before.
  TopKOutputs run(std::span<const std::byte> logits, std::int32_t word) {
    arena_.replace("logits", logits);
    arena_["scores"].poison();
    arena_["ids"].poison();
    arena_["error_word"].put(std::as_bytes(std::span(&word, 1)));
    Status status = plan_.value().run(args_, workspace_);
    if (status.ok()) status = synchronize(kDevice);
    EXPECT_TRUE(status.ok()) << status.message();
    const auto scores = arena_["scores"].bytes();
    return {arena_.int32("error_word")[0], arena_.int32("ids"), {scores.begin(), scores.end()}};
  }

  std::string damage() const { return arena_.damage(); }
  bool planned() const { return plan_.ok(); }

 private:
  Result<OpPlan<TopKDesc>> plan_;
  Arena arena_{kDevice};
  TopKArgs args_;
  Workspace workspace_;
};

/// K different experts for every token.
bool valid(const TopKDesc& desc, const std::vector<std::int32_t>& ids) {
  for (std::int64_t t = 0; t < desc.tokens; ++t) {
    const auto own = std::span(ids).subspan(t * desc.top_k, desc.top_k);
    const std::set<std::int32_t> different(own.begin(), own.end());
    if (std::ssize(different) != desc.top_k) return false;
    if (*different.begin() < 0 || *different.rbegin() >= desc.experts) return false;
  }
  return true;
}

/// The same bits for all tokens but one.
template <class T>
bool same_but_for(std::int64_t token, std::int64_t tokens, const std::vector<T>& a,
                  const std::vector<T>& b) {
  if (a.size() != b.size()) return false;
  const auto each = static_cast<std::int64_t>(a.size()) / tokens;
  return std::equal(a.begin(), a.begin() + token * each, b.begin()) &&
         std::equal(a.begin() + (token + 1) * each, a.end(), b.begin() + (token + 1) * each);
}

/// Rows that a checked call refuses.
struct BadRow {
  const char* what;
  void (*spoil)(std::span<double> row);
};
constexpr std::string_view kOnlyNegative = "only -inf";
constexpr BadRow kBadRows[] = {
    {"NaN first", [](std::span<double> row) { row.front() = kNan; }},
    {"NaN last", [](std::span<double> row) { row.back() = kNan; }},
    {"NaN with a sign", [](std::span<double> row) { row[row.size() / 2] = -kNan; }},
    {"only NaN", [](std::span<double> row) { std::ranges::fill(row, kNan); }},
    {"+inf first", [](std::span<double> row) { row.front() = kInf; }},
    {"+inf last", [](std::span<double> row) { row.back() = kInf; }},
    {"only -inf", [](std::span<double> row) { std::ranges::fill(row, -kInf); }}};

/// Every fifth row has but one finite number, others a few -inf and a large one.
Tensor good_logits(const TopKDesc& desc) {
  const Random random(desc.tokens * 10000 + desc.experts, 17);
  Tensor logits(desc.tokens * desc.experts);
  for (std::int64_t t = 0; t < desc.tokens; ++t) {
    const std::int64_t one = random.below(logits.size() + t, desc.experts);
    for (std::int64_t e = 0; e < desc.experts; ++e) {
      const std::int64_t i = t * desc.experts + e;
      const bool infinite = t % 5 == 2 || random.bits(2 * logits.size() + i) % 8 == 0;
      logits[i] = infinite ? -kInf : 2 * random.normal(i);
    }
    logits[t * desc.experts + one] = t % 5 == 3 ? 60000 : 1;
  }
  return logits;
}

void expect_reports(const TopKDesc& desc) {
  SCOPED_TRACE(testing::Message() << "T " << desc.tokens << ", E " << desc.experts << ", K "
                                  << desc.top_k << ", " << name(desc.dtype) << ", "
                                  << name(desc.order));
  const Tensor logits = good_logits(desc);
  const std::vector<std::byte> good = encode(logits, desc.dtype);
  UncheckedTopK top_k(desc, logits);
  ASSERT_TRUE(top_k.planned());
  const TopKOutputs expected = top_k.run(good, 0);
  ASSERT_EQ(expected.error_word, 0);
  ASSERT_TRUE(valid(desc, expected.ids));
  for (const BadRow& bad : kBadRows) {
    // A softmax alone needs a finite logit.
    if (bad.what == kOnlyNegative && desc.score != RouterScore::softmax) continue;
    for (const std::int64_t token : std::set<std::int64_t>{0, desc.tokens / 2, desc.tokens - 1}) {
      SCOPED_TRACE(testing::Message() << bad.what << ", token " << token);
      const auto begin = logits.begin() + token * desc.experts;
      Tensor row(begin, begin + desc.experts);
      bad.spoil(row);
      const std::vector<std::byte> spoilt = encode(row, desc.dtype);
      std::vector<std::byte> stored = good;
      std::ranges::copy(spoilt, stored.begin() + token * std::ssize(spoilt));
      // What another call reported stays.
      const TopKOutputs got = top_k.run(stored, kBadTokenId);
      ASSERT_EQ(got.error_word, kBadTokenId | kBadLogits);
      ASSERT_TRUE(valid(desc, got.ids));
      ASSERT_TRUE(same_but_for(token, desc.tokens, got.ids, expected.ids));
      ASSERT_TRUE(same_but_for(token, desc.tokens, got.scores, expected.scores));
      const Tensor scores = decode(got.scores, DType::f32);
      const auto own = std::span(scores).subspan(token * desc.top_k, desc.top_k);
      ASSERT_TRUE(std::ranges::any_of(own, [](double score) { return std::isnan(score); }));
    }
  }
  EXPECT_EQ(top_k.damage(), "");
}

// All kernels: few entries of 16 bits, a token per warp (K = 16, fp32, top-K over softmax), and a
// token per thread block (1025 experts, or 72 of 72). One, part of, and more than one warp and
// thread block.
TEST(ErrorWord, TopKReportsBadLogits) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    for (const RouterOrder order :
         {RouterOrder::select_then_score, RouterOrder::score_then_select}) {
      for (const std::int64_t E : {8, 60, 72, 128, 129, 256, 512, 1025}) {
        for (const std::int64_t K : {1, 8, 16, 72}) {
          if (K > E || (K == 72) != (E == 72)) continue;
          for (const std::int64_t T : {1, 15, 17, 67}) {
            TopKDesc desc;
            desc.tokens = T;
            desc.experts = E;
            desc.top_k = K;
            desc.dtype = type;
            desc.order = order;
            desc.renormalize = K == 8 && order == RouterOrder::score_then_select;
            expect_reports(desc);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// A NaN spoils all scores of its token, which are renormalised, and no others.
TEST(ErrorWord, ANaNOfASigmoidStays) {
  for (const std::int64_t E : {60, 64, 128, 256, 512, 1040}) {
    for (const std::int64_t groups : {1, 4}) {
      TopKDesc desc;
      desc.tokens = 5;
      desc.experts = E;
      desc.top_k = 2;
      desc.score = RouterScore::sigmoid;
      desc.order = RouterOrder::score_then_select;
      desc.renormalize = true;
      desc.groups = groups;
      desc.kept_groups = groups == 1 ? 1 : 2;
      if (groups > 1) desc.group_score = GroupScore::sum_of_two;
      Tensor logits = good_logits(desc);
      logits[E + E / 2] = kNan;
      UncheckedTopK top_k(desc, logits);
      const TopKOutputs out = top_k.run(encode(logits, desc.dtype), 0);
      ASSERT_TRUE(valid(desc, out.ids));
      const Tensor scores = decode(out.scores, DType::f32);
      for (std::size_t i = 0; i < scores.size(); ++i) {
        EXPECT_EQ(std::isnan(scores[i]), i / 2 == 1) << "E " << E << ", groups " << groups;
      }
    }
  }
}

// A bad logit makes NaNs of its token's scores, wherever the ids are, but not of the sentinel's.
TEST(ErrorWord, BadLogitsSpoilScoresOfGivenIds) {
  for (const RouterScore score :
       {RouterScore::softmax, RouterScore::sigmoid, RouterScore::sqrt_softplus}) {
    for (const RouterOrder order :
         {RouterOrder::select_then_score, RouterOrder::score_then_select}) {
      for (const float scale : {1.0f, 2.0f}) {
        TopKDesc desc;
        desc.tokens = 9;
        desc.experts = 70;
        desc.top_k = 4;
        desc.input = RouterInput::logits_and_ids;
        desc.score = score;
        desc.order = order;
        desc.scale = scale;
        Tensor logits(desc.tokens * desc.experts);
        for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = Random(1, 18).normal(i);
        UncheckedTopK top_k(desc, logits);
        ASSERT_TRUE(top_k.planned());
        const TopKOutputs good = top_k.run(encode(logits, desc.dtype), 0);
        ASSERT_EQ(good.error_word, 0);
        for (const double value : {kNan, kInf}) {
          for (const std::int64_t e : {0, 1, 5, 69}) {  // experts 0 and 1 are among the ids
            Tensor spoilt = logits;
            spoilt[3 * desc.experts + e] = value;
            const TopKOutputs got = top_k.run(encode(spoilt, desc.dtype), 0);
            ASSERT_EQ(got.error_word, kBadLogits);
            ASSERT_TRUE(same_but_for(3, desc.tokens, got.scores, good.scores));
            const Tensor scores = decode(got.scores, DType::f32);
            for (std::int64_t k = 0; k < desc.top_k; ++k) {
              ASSERT_EQ(std::isnan(scores[3 * desc.top_k + k]), k != desc.top_k / 2)
                  << name(score) << ", " << name(order) << ", expert " << e << ", entry " << k;
            }
          }
        }
        EXPECT_EQ(top_k.damage(), "");
      }
    }
  }
}

// The kernels of routers that are not plain(): a warp and a thread block a token.
TEST(ErrorWord, ScoredTopKReportsBadLogits) {
  for (const DType type : {DType::bf16, DType::f32}) {
    for (const RouterScore score :
         {RouterScore::softmax, RouterScore::sigmoid, RouterScore::sqrt_softplus}) {
      for (const std::int64_t E : {8, 64, 72, 128, 256, 512, 1040}) {
        for (const std::int64_t groups : {1, 4}) {
          TopKDesc desc;
          desc.tokens = 17;
          desc.experts = E;
          desc.top_k = 4;
          desc.dtype = type;
          desc.score = score;
          desc.order =
              groups == 1 ? RouterOrder::select_then_score : RouterOrder::score_then_select;
          desc.scale = 2;
          desc.groups = groups;
          desc.kept_groups = groups == 1 ? 1 : 3;
          for (const bool renormalize : {false, true}) {
            desc.renormalize = renormalize;
            expect_reports(desc);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// A token per warp, and a token per thread block with all experts chosen, where a NaN of the first
// expert was once taken for none. What a bad row makes of the counts is open; that they are counts
// is not.
TEST(ErrorWord, TokenRoundingSurvivesBadLogits) {
  struct Shape {
    std::int64_t experts, top_k;
  };
  for (const auto [E, K] : {Shape{60, 8}, Shape{72, 72}}) {
    for (const RouterOrder order :
         {RouterOrder::select_then_score, RouterOrder::score_then_select}) {
      for (const BadRow& bad : kBadRows) {
        SCOPED_TRACE(testing::Message()
                     << bad.what << ", E " << E << ", K " << K << ", " << name(order));
        TokenRoundingDesc d;
        d.tokens = 67, d.experts = E, d.top_k = K, d.order = order, d.tile = 16;
        Tensor logits = good_logits({{.experts = E}, d.tokens});
        for (const std::int64_t token : {0, 5}) {
          bad.spoil(std::span(logits).subspan(token * E, E));
        }
        const RoundingRunner runner(d, encode(logits, d.dtype), kDevice);
        const auto lists = runner.round(0, 0);
        ASSERT_TRUE(lists.ok()) << lists.status().message();
        std::int64_t entries = 0;
        for (const std::int32_t count : lists.value().counts) {
          ASSERT_TRUE(count >= 0 && count <= d.tokens && count % d.tile == 0) << count;
          entries += count;
        }
        for (std::int64_t i = 0; i < d.capacity(); ++i) {
          const std::int32_t expert = lists.value().expert_ids[i];
          ASSERT_TRUE(i < entries ? expert >= 0 && expert < E : expert == E) << i << ": " << expert;
        }
        const auto dlogits = runner.gradient(lists.value(), Tensor(d.capacity(), 1.0), {});
        ASSERT_TRUE(dlogits.ok()) << dlogits.status().message();
        for (std::int64_t i = 0; i < d.tokens * E; ++i) {  // other tokens' are numbers
          const std::int64_t token = i / E;
          const bool spoilt = token == 0 || token == 5;
          ASSERT_TRUE(spoilt || std::isfinite(dlogits.value()[i])) << token;
        }
      }
    }
  }
}

/// The error word of an unchecked layer after forward.
std::int32_t forward_says(PlainLayer* layer) {
  const std::int32_t none = 0;
  if (layer->forward.error_word == nullptr) {
    layer->forward.error_word = layer->arena.output_int32("error_word", 1);
  }
  layer->arena["error_word"].put(std::as_bytes(std::span(&none, 1)));
  Status status = layer->plan.forward(layer->forward, layer->workspace);
  if (status.ok()) status = synchronize(kDevice);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(layer->arena.damage(), "");
  return layer->arena.int32("error_word")[0];
}

LayerDesc small_layer() {
  LayerDesc d;
  d.tokens = 67, d.experts.hidden = 64, d.experts.intermediate = 32, d.router.experts = 8,
  d.router.top_k = 2;
  d.experts.dtype = DType::bf16;
  return d;
}

TEST(ErrorWord, LayersReportBadLogits) {
  for (const std::int64_t tile : {0, 16}) {
    for (const RouterOrder order :
         {RouterOrder::select_then_score, RouterOrder::score_then_select}) {
      for (const bool all : {false, true}) {  // of 72: a token per thread block
        SCOPED_TRACE(testing::Message() << "tile " << tile << ", " << name(order) << ", " << all);
        LayerDesc d = small_layer();
        if (all) d.router.experts = d.router.top_k = 72;
        d.router.order = order;
        d.rounding.tile = tile;
        PlainLayer layer(custom_case(d, 3), 1, false);
        EXPECT_EQ(forward_says(&layer), 0);
        Tensor x = layer.problem.x;
        x[5 * d.experts.hidden] = kNan;
        layer.arena.replace("x", encode(x, d.experts.dtype));
        EXPECT_EQ(forward_says(&layer), kBadLogits);
      }
    }
  }
}

TEST(ErrorWord, LayersReportBadLists) {
  LayerDesc d = small_layer();
  d.router.input = RouterInput::lists;
  d.router.top_k = 0;
  d.router.list_length = 134;
  // An expert id out of range is a sentinel.
  for (const auto& [list, bit] : {std::pair("list_tokens", kBadTokenId), {"list_experts", 0}}) {
    PlainLayer layer(custom_case(d, 3), 1, false);
    EXPECT_EQ(forward_says(&layer), 0);
    std::vector<std::int32_t> ids = layer.arena.int32(list);
    ids[77] = -1;
    layer.arena.replace(list, std::as_bytes(std::span(ids)));
    EXPECT_EQ(forward_says(&layer), bit) << list;
  }
}

/// Every form of metadata. `counted`: with top_k's counts of the good ids.
struct MetadataCall {
  MetadataDesc desc;
  std::vector<std::int32_t> experts, tokens;  // of each slot; tokens: lists only
  std::vector<std::byte> counts;
};

/// The rows that were made, and the error word, which held `word` before.
std::pair<std::vector<std::int32_t>, std::int32_t> run(const MetadataCall& call,
                                                       std::int32_t word) {
  const MetadataDesc& d = call.desc;
  Arena arena(kDevice);
  MetadataArgs args;
  args.slot_experts = arena.input("slot_experts", call.experts);
  args.slot_tokens = arena.input("slot_tokens", call.tokens);
  const Handoff handoff{.block_counts = static_cast<std::uint8_t*>(const_cast<void*>(
                            arena.input("block_counts", std::span<const std::byte>(call.counts))))};
  args.counts = arena.output_int32("counts", d.experts);
  args.offsets = arena.output_int32("offsets", d.experts + 1);
  args.row_tokens = arena.output_int32("row_tokens", d.slots());
  args.row_slots = arena.output_int32("row_slots", d.slots());
  args.slot_rows = arena.output_int32("slot_rows", d.slots());
  if (d.top_k == 0) {
    args.token_offsets = arena.output_int32("token_offsets", d.tokens + 1);
    args.token_slots = arena.output_int32("token_slots", d.slots());
  }
  args.error_word = arena.output_int32("error_word", 1);
  arena["error_word"].put(std::as_bytes(std::span(&word, 1)));
  const auto plan = make_plan(d, kDevice);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  const std::size_t bytes = plan.value().workspace_bytes();
  Status status = run_operation(plan.value(), args, handoff,
                                {arena.output("workspace", bytes, 256), bytes}, {});
  if (status.ok()) status = synchronize(kDevice);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(arena.damage(), "");
  return {arena.int32("row_slots"), arena.int32("error_word")[0]};
}

// A bad token id is skipped as a sentinel would be, whose id is no error, below 0 or above E.
// (Counts were made with the good ids, so that a row more is expected than there is.)
TEST(ErrorWord, MetadataReportsBadIds) {
  constexpr std::int32_t kTokens = 150, kExperts = 60, kTopK = 4;
  MetadataCall top_k;
  top_k.desc.tokens = kTokens, top_k.desc.experts = kExperts, top_k.desc.top_k = kTopK;
  MetadataCall lists = top_k;
  lists.desc.top_k = 0, lists.desc.list_length = kTokens * kTopK;
  MetadataCall counted = top_k;
  counted.counts.assign(3 * 64, std::byte{0});  // of every 64 tokens, 60 experts filled up to 64
  for (std::int32_t slot = 0; slot < kTokens * kTopK; ++slot) {
    const std::int32_t token = slot / kTopK, expert = (token * 7 + slot) % kExperts;
    for (MetadataCall* call : {&top_k, &lists, &counted}) call->experts.push_back(expert);
    lists.tokens.push_back(token);
    std::byte& count = counted.counts[token / 64 * 64 + expert];
    count = static_cast<std::byte>(static_cast<int>(count) + 1);
  }
  for (MetadataCall* call : {&top_k, &lists, &counted}) {
    const MetadataCall good = *call;
    const auto [rows, none] = run(good, kBadLogits);
    EXPECT_EQ(none, kBadLogits);
    for (const std::size_t slot : {0, 77, kTokens * kTopK - 1}) {
      *call = good;
      call->experts[slot] = kExperts;
      const auto [without, sentinel] = run(*call, 0);
      EXPECT_EQ(sentinel, 0);
      for (const std::int32_t id : {-1, INT32_MIN}) {
        call->experts[slot] = id;
        const auto [ours, word] = run(*call, kBadLogits);
        EXPECT_EQ(word, kBadLogits) << "slot " << slot << ", expert " << id;
        EXPECT_EQ(ours, without) << "slot " << slot << ", expert " << id;
      }
      if (call->tokens.empty()) continue;
      call->experts = good.experts;
      for (const std::int32_t id : {-1, kTokens, INT32_MIN, INT32_MAX}) {
        call->tokens[slot] = id;
        const auto [ours, word] = run(*call, 0);
        EXPECT_EQ(word, kBadTokenId) << "slot " << slot << ", token " << id;
        EXPECT_EQ(ours, without) << "slot " << slot << ", token " << id;
      }
    }
    *call = good;
    EXPECT_EQ(run(*call, 0), std::pair(rows, 0));
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
