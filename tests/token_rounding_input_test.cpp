// What token rounding refuses, word by word, and that it writes nothing then.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "testkit/buffer.h"
#include "testkit/rounding.h"

namespace sonicmoe::testkit {
namespace {

constexpr std::int64_t T = 5, E = 4, K = 2;

TokenRoundingDesc good_desc() {
  TokenRoundingDesc d;
  d.tokens = T;
  d.experts = E;
  d.top_k = K;
  d.dtype = DType::f32;
  d.tile = 2;
  return d;
}

TokenRoundingGradDesc good_grad_desc() {
  TokenRoundingGradDesc d;
  d.tokens = T;
  d.experts = E;
  d.top_k = K;
  d.dtype = DType::f32;
  d.list_length = 3;
  return d;
}

template <class Desc>
struct BadDesc {
  std::function<void(Desc&)> spoil;
  StatusCode code;
  const char* message;
};

template <class Desc>
void expect_refused(Desc desc, const std::vector<BadDesc<Desc>>& table) {
  ASSERT_TRUE(make_plan(desc).ok());
  for (const BadDesc<Desc>& bad : table) {
    Desc spoiled = desc;
    bad.spoil(spoiled);
    const auto plan = make_plan(spoiled);
    ASSERT_FALSE(plan.ok()) << bad.message;
    EXPECT_EQ(plan.status().code(), bad.code) << bad.message;
    EXPECT_STREQ(plan.status().message(), bad.message);
  }
}

constexpr StatusCode kArgument = StatusCode::invalid_argument;
constexpr StatusCode kData = StatusCode::invalid_data;

/// What both descriptors have in common.
template <class Desc>
std::vector<BadDesc<Desc>> common() {
  return {
      {[](Desc& d) { d.tokens = -1; }, kArgument, "tokens: got -1, allowed: 0 to 2147483647"},
      {[](Desc& d) { d.experts = 0; }, kArgument, "experts: got 0, allowed: 1 to 65536"},
      {[](Desc& d) { d.experts = 65537; }, kArgument, "experts: got 65537, allowed: 1 to 65536"},
      {[](Desc& d) { d.top_k = 0; }, kArgument, "top_k: got 0, allowed: 1 to experts (4)"},
      {[](Desc& d) { d.top_k = 5; }, kArgument, "top_k: got 5, allowed: 1 to experts (4)"},
      {[](Desc& d) { d.tokens = 1 << 30; }, kArgument,
       "tokens * top_k: got 2147483648, allowed: at most 2147483647"},
      {[](Desc& d) { d.input = RouterInput::lists; }, kArgument,
       "router_input: got lists, allowed: projection, logits"},
      {[](Desc& d) { d.input = RouterInput::logits_and_ids; }, kArgument,
       "router_input: got logits_and_ids, allowed: projection, logits"},
      {[](Desc& d) { d.order = static_cast<RouterOrder>(3); }, kArgument,
       "router_order: got 3, allowed: select_then_score, score_then_select"},
      {[](Desc& d) { d.dtype = static_cast<DType>(9); }, kArgument,
       "dtype: got 9, allowed: f32, bf16, f16"},
      {[](Desc& d) { d.dtype = DType::f16; }, StatusCode::unsupported,
       "dtype: got f16, allowed: f32, bf16 (on the CPU)"},
  };
}

TEST(TokenRoundingInput, BadDescriptors) {
  using Desc = TokenRoundingDesc;
  expect_refused(good_desc(), common<Desc>());
  constexpr const char* kRules =
      ", allowed: nearest, stochastic, nearest_scores, balance, up, down";
  const std::string six = std::string("rule: got 6") + kRules;
  const std::string minus = std::string("rule: got -1") + kRules;
  expect_refused<Desc>(
      good_desc(),
      {
          {[](Desc& d) { d.tile = 0; }, kArgument, "tile: got 0, allowed: 1 to 1024"},
          {[](Desc& d) { d.tile = -128; }, kArgument, "tile: got -128, allowed: 1 to 1024"},
          {[](Desc& d) { d.tile = 1025; }, kArgument, "tile: got 1025, allowed: 1 to 1024"},
          {[](Desc& d) { d.rule = static_cast<RoundingRule>(6); }, kArgument, six.c_str()},
          {[](Desc& d) { d.rule = static_cast<RoundingRule>(-1); }, kArgument, minus.c_str()},
          // T K fits, and so would T E for fewer experts, but the padding does not.
          {[](Desc& d) {
             d.tokens = 8421376;
             d.experts = 300;
             d.top_k = 255;
             d.tile = 1024;
           },
           kArgument, "capacity: got 2147757780, allowed: 0 to 2147483647"},
      });
}

TEST(TokenRoundingInput, BadGradientDescriptors) {
  using Desc = TokenRoundingGradDesc;
  expect_refused(good_grad_desc(), common<Desc>());
  expect_refused<Desc>(good_grad_desc(), {{[](Desc& d) { d.list_length = -1; }, kArgument,
                                           "list_length: got -1, allowed: 0 to 2147483647"}});
}

/// One call in guarded memory. `spoil` may replace pointers; outputs must stay as they were.
class Forward {
 public:
  Forward(const TokenRoundingDesc& desc, const Tensor& logits) : desc_(desc) {
    args_.logits = arena_.input("logits", logits, desc.dtype);
    args_.scores = arena_.output_float("scores", desc.capacity());
    args_.token_ids = arena_.output_int32("token_ids", desc.capacity());
    args_.expert_ids = arena_.output_int32("expert_ids", desc.capacity());
    args_.counts = arena_.output_int32("counts", desc.experts);
    args_.frequency = arena_.output_int32("frequency", desc.experts);
  }
  Status run(const std::function<void(TokenRoundingArgs&)>& spoil = {}, int threads = 1) {
    Options options;
    options.threads = threads;
    const auto plan = make_plan(desc_, {}, options);
    Arena scratch;
    const std::size_t bytes = plan.value().workspace_bytes();
    TokenRoundingArgs args = args_;
    if (spoil) spoil(args);
    const Status status = plan.value().run(args, {scratch.output("workspace", bytes, 256), bytes});
    EXPECT_EQ(arena_.damage() + scratch.damage(), "");
    EXPECT_EQ(arena_.outputs_untouched(), !status.ok()) << status.message();
    return status;
  }

 private:
  TokenRoundingDesc desc_;
  Arena arena_;
  TokenRoundingArgs args_;
};

void expect_status(const Status& status, StatusCode code, const std::string& message) {
  EXPECT_EQ(status.code(), code) << message;
  EXPECT_EQ(status.message(), message);
}

TEST(TokenRoundingInput, BadPointers) {
  using Args = TokenRoundingArgs;
  Forward call(good_desc(), Tensor(T * E, 1.0));
  const std::string allowed = "got null, allowed: a pointer to ";
  expect_status(call.run([](Args& a) { a.logits = nullptr; }), kArgument,
                "logits: " + allowed + "(T, E)");
  expect_status(call.run([](Args& a) { a.scores = nullptr; }), kArgument,
                "scores: " + allowed + "(capacity) float");
  expect_status(call.run([](Args& a) { a.token_ids = nullptr; }), kArgument,
                "token_ids: " + allowed + "(capacity) int32");
  expect_status(call.run([](Args& a) { a.expert_ids = nullptr; }), kArgument,
                "expert_ids: " + allowed + "(capacity) int32");
  expect_status(call.run([](Args& a) { a.counts = nullptr; }), kArgument,
                "counts: " + allowed + "(E) int32");
  const Status odd =
      call.run([](Args& a) { a.logits = static_cast<const std::byte*>(a.logits) + 2; });
  EXPECT_EQ(odd.code(), kArgument);
  EXPECT_NE(std::string(odd.message()).find("allowed: multiples of 4 bytes"), std::string::npos);
  EXPECT_TRUE(call.run([](Args& a) { a.frequency = nullptr; }).ok());
}

TEST(TokenRoundingInput, SmallWorkspace) {
  const auto plan = make_plan(good_desc());
  const std::string wanted = std::to_string(plan.value().workspace_bytes());
  Arena arena;
  TokenRoundingArgs args;
  args.logits = arena.input("logits", Tensor(T * E, 1.0), DType::f32);
  args.scores = arena.output_float("scores", good_desc().capacity());
  args.token_ids = arena.output_int32("token_ids", good_desc().capacity());
  args.expert_ids = arena.output_int32("expert_ids", good_desc().capacity());
  args.counts = arena.output_int32("counts", E);
  expect_status(plan.value().run(args), kArgument,
                "workspace: got 0 bytes, allowed: at least " + wanted);
  EXPECT_TRUE(arena.outputs_untouched());
}

TEST(TokenRoundingInput, BadLogits) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const std::string allowed = ", allowed: numbers below +inf, at least one of them finite";
  TokenRoundingDesc d = good_desc();
  d.tokens = 300;  // several pieces of work
  for (const DType type : {DType::f32, DType::bf16}) {
    d.dtype = type;
    const auto run = [&](const std::function<void(Tensor&)>& spoil, int threads) {
      Tensor logits(d.tokens * E, 0.5);
      spoil(logits);
      return Forward(d, logits).run({}, threads);
    };
    for (const int threads : {1, 3, 7}) {
      expect_status(run([](Tensor& x) { x[3 * E + 1] = kNan; }, threads), kData,
                    "logits: got a NaN in the row of token 3" + allowed);
      expect_status(run([](Tensor& x) { x[299 * E] = kInf; }, threads), kData,
                    "logits: got +inf in the row of token 299" + allowed);
      expect_status(run([](Tensor& x) { std::fill_n(&x[70 * E], E, -kInf); }, threads), kData,
                    "logits: got only -inf in the row of token 70" + allowed);
      // The first of several, whichever thread finds it.
      expect_status(run([](Tensor& x) { x[100 * E] = x[200 * E] = x[299 * E] = kNan; }, threads),
                    kData, "logits: got a NaN in the row of token 100" + allowed);
    }
  }
}

TEST(TokenRoundingInput, NoTokensNeedNoTensors) {
  TokenRoundingDesc d = good_desc();
  d.tokens = 0;
  EXPECT_EQ(d.capacity(), 0);
  Forward call(d, {});
  EXPECT_TRUE(call.run([](TokenRoundingArgs& a) {
                    EXPECT_EQ(a.logits, nullptr);
                    EXPECT_EQ(a.scores, nullptr);
                  })
                  .ok());
}

/// The same for the gradient.
class Backward {
 public:
  Backward(const std::vector<std::int32_t>& tokens, const std::vector<std::int32_t>& experts) {
    args_.logits = arena_.input("logits", Tensor(T * E, 1.0), DType::f32);
    args_.token_ids = arena_.input("token_ids", tokens);
    args_.expert_ids = arena_.input("expert_ids", experts);
    args_.dscores =
        static_cast<const float*>(arena_.input("dscores", Tensor(tokens.size(), 1.0), DType::f32));
    args_.dlogits = arena_.output("dlogits", T * E, DType::f32);
  }
  Status run(const std::function<void(TokenRoundingGradArgs&)>& spoil = {}) {
    const auto plan = make_plan(good_grad_desc());
    Arena scratch;
    const std::size_t bytes = plan.value().workspace_bytes();
    TokenRoundingGradArgs args = args_;
    if (spoil) spoil(args);
    const Status status = plan.value().run(args, {scratch.output("workspace", bytes, 256), bytes});
    EXPECT_EQ(arena_.damage() + scratch.damage(), "");
    EXPECT_EQ(arena_.outputs_untouched(), !status.ok()) << status.message();
    return status;
  }

 private:
  Arena arena_;
  TokenRoundingGradArgs args_;
};

TEST(TokenRoundingInput, BadGradientPointers) {
  using Args = TokenRoundingGradArgs;
  Backward call({0, 1, 4}, {0, 1, 4});
  const std::string allowed = "got null, allowed: a pointer to ";
  expect_status(call.run([](Args& a) { a.logits = nullptr; }), kArgument,
                "logits: " + allowed + "(T, E)");
  expect_status(call.run([](Args& a) { a.token_ids = nullptr; }), kArgument,
                "token_ids: " + allowed + "(capacity) int32");
  expect_status(call.run([](Args& a) { a.expert_ids = nullptr; }), kArgument,
                "expert_ids: " + allowed + "(capacity) int32");
  expect_status(call.run([](Args& a) { a.dscores = nullptr; }), kArgument,
                "dscores: " + allowed + "(capacity) float");
  expect_status(call.run([](Args& a) { a.dlogits = nullptr; }), kArgument,
                "dlogits: " + allowed + "(T, E)");
  const auto unaligned = [](Args& a) {
    const auto* const bytes = reinterpret_cast<const char*>(a.token_ids);
    a.token_offsets = reinterpret_cast<const std::int32_t*>(bytes + 1);
  };
  EXPECT_EQ(std::string(call.run(unaligned).message()).find("token_offsets: got "), 0u);
  EXPECT_TRUE(call.run().ok());
}

TEST(TokenRoundingInput, BadGradientLists) {
  const auto message = [](const char* got) {
    return std::string("token_ids: got ") + got + ", allowed: tokens that ascend and are below 5";
  };
  expect_status(Backward({-1, 1, 2}, {0, 0, 0}).run(), kData, message("-1 at position 0"));
  expect_status(Backward({0, 1, 5}, {0, 0, 3}).run(), kData, message("5 at position 2"));
  expect_status(Backward({0, 2, 1}, {0, 0, 0}).run(), kData, message("1 at position 2"));
  EXPECT_TRUE(Backward({0, 1, 2}, {0, -7, 0}).run().ok());  // a sentinel
}

}  // namespace
}  // namespace sonicmoe::testkit
