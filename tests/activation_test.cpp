// The table of activations: names, the text form, defaults and refusals; and that the objects that
// compute agree with it.
#include "math/activation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/activation_table.h"
#include "sonicmoe/sonicmoe.h"

namespace sonicmoe {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Compilers write a value that is no enumerator as a number.
template <auto value>
consteval bool is_enumerator() {
  const std::string_view name = __PRETTY_FUNCTION__;
  return name.find("value = sonicmoe::Activation::") != std::string_view::npos;
}
constexpr int kRows = std::size(kActivationTable);
static_assert(is_enumerator<static_cast<Activation>(kRows - 1)>(), "a row too many");
static_assert(!is_enumerator<static_cast<Activation>(kRows)>(), "an enumerator without a row");

/// Rows with every kind of parameter.
constexpr ActivationParameter kClamped[] = {
    {&ActivationSpec::alpha, 1.702f, Allowed::finite},
    {&ActivationSpec::limit, 7.0f, Allowed::positive_or_inf}};
constexpr ActivationParameter kScaled[] = {{&ActivationSpec::alpha, 4.0f, Allowed::positive},
                                           {&ActivationSpec::beta, 25.0f, Allowed::positive}};
constexpr ActivationParameter kLimited[] = {
    {&ActivationSpec::limit, kInf, Allowed::positive_or_inf}};
constexpr ActivationRow kTable[] = {{Activation::swiglu, "swiglu", true, kLimited},
                                    {Activation::geglu, "clamped", true, kClamped},
                                    {Activation::reglu, "clamped_more", true, kScaled},
                                    {Activation::relu, "relu", false}};

ActivationSpec spec_of(Activation kind, float alpha, float beta, float limit) {
  ActivationSpec spec = kind;
  spec.alpha = alpha, spec.beta = beta, spec.limit = limit;
  return spec;
}

TEST(Activations, EveryEnumeratorHasOneRowAndOneName) {
  std::set<std::string> names;
  ASSERT_EQ(activations().size(), std::size(kActivationTable));
  for (int i = 0; i < kRows; ++i) {
    EXPECT_EQ(activations()[i], static_cast<Activation>(i));
    EXPECT_EQ(find_row(static_cast<Activation>(i), kActivationTable), &kActivationTable[i]);
    EXPECT_STREQ(name(static_cast<Activation>(i)), kActivationTable[i].name);
    names.insert(kActivationTable[i].name);
  }
  EXPECT_EQ(names.size(), activations().size());
  for (const int value : {-1, kRows}) {
    EXPECT_STREQ(name(static_cast<Activation>(value)), "?");
    EXPECT_FALSE(is_glu(static_cast<Activation>(value)));
  }
}

// A parameter is listed once, and its default is allowed.
TEST(Activations, DefaultsAreAllowed) {
  for (const Activation kind : activations()) {
    const ActivationSpec spec = kind;
    EXPECT_EQ(spec.kind, kind);
    EXPECT_EQ(refusal(spec), "");
    const ActivationRow& row = *find_row(kind, kActivationTable);
    EXPECT_EQ(spec, defaults(row));
    for (const ActivationParameter& parameter : row.parameters) {
      EXPECT_EQ(spec.*parameter.member, parameter.initial) << row.name;
    }
  }
  EXPECT_EQ(ActivationSpec{}, ActivationSpec(Activation::swiglu));
  EXPECT_EQ(ExpertsDesc{}.activation, Activation::swiglu);
  EXPECT_EQ(defaults(kTable[1]), spec_of(Activation::geglu, 1.702f, 1, 7));
  EXPECT_EQ(defaults(kTable[2]), spec_of(Activation::reglu, 4, 25, kInf));
  EXPECT_EQ(defaults(kTable[3]), ActivationSpec(Activation::relu));
}

TEST(Activations, ObjectsAgreeWithTheTable) {
  for (const Activation kind : activations()) {
    math::visit_activation(kind, [&](auto fn) {
      using Fn = decltype(fn);
      EXPECT_EQ(Fn::kIsGlu, is_glu(kind)) << name(kind);
      EXPECT_EQ(is_glu(ActivationSpec(kind)), is_glu(kind));
      const ActivationRow& row = *find_row(kind, kActivationTable);
      // QuickGEGLU is another activation's object with fixed parameters.
      EXPECT_TRUE(std::is_empty_v<Fn> || !row.parameters.empty() || kind == Activation::quick_geglu)
          << name(kind);
      const float a = fn.forward(0.75f, -2.0f);
      EXPECT_FLOAT_EQ(fn.backward(0.75f, -2.0f, 1.0f).act, a) << name(kind);
      EXPECT_NEAR(fn.forward_by_newton(0.75f, -2.0f), a, 1e-6f) << name(kind);
    });
  }
}

TEST(Activations, TextShowsWhatIsNotTheDefault) {
  EXPECT_EQ(to_string(ActivationSpec{}), "swiglu");
  EXPECT_EQ(to_string(ActivationSpec(Activation::gelu_tanh)), "gelu_tanh");
  EXPECT_EQ(to_string(ActivationSpec(static_cast<Activation>(99))), "?");
  EXPECT_EQ(to_string(spec_of(Activation::relu, 2, 1, kInf)), "relu(alpha=2)");
  EXPECT_EQ(to_string(defaults(kTable[1]), kTable), "clamped");
  EXPECT_EQ(to_string(spec_of(Activation::swiglu, 1, 1, 10), kTable), "swiglu(limit=10)");
  EXPECT_EQ(to_string(spec_of(Activation::geglu, 1.5f, 1, kInf), kTable),
            "clamped(alpha=1.5,limit=inf)");
  EXPECT_EQ(to_string(spec_of(Activation::reglu, 0.1f, 1e10f, -7), kTable),
            "clamped_more(alpha=0.1,beta=1e+10,limit=-7)");
}

TEST(Activations, TextIsReadBackAsTheSame) {
  for (const Activation kind : activations()) {
    ActivationSpec parsed = static_cast<Activation>(-1);
    EXPECT_TRUE(parse(name(kind), &parsed));
    EXPECT_EQ(parsed, ActivationSpec(kind));
    EXPECT_EQ(to_string(parsed), name(kind));
  }
  const float values[] = {1.702f, 7, 0, -0.1f, 1 / 3.0f, 1e-45f, 3.4028235e38f, kInf, -kInf};
  for (const ActivationRow& row : kTable) {
    for (const float a : values) {
      for (const float b : values) {
        const ActivationSpec spec = spec_of(row.kind, a, b, a);
        ActivationSpec parsed;
        EXPECT_TRUE(parse(to_string(spec, kTable), kTable, &parsed)) << to_string(spec, kTable);
        EXPECT_EQ(parsed, spec) << to_string(spec, kTable);
      }
    }
  }
}

TEST(Activations, ParsingKnowsWhatIsNoActivation) {
  ActivationSpec spec;
  EXPECT_TRUE(parse("clamped(limit=3,alpha=2)", kTable, &spec));  // in any order
  EXPECT_EQ(spec, spec_of(Activation::geglu, 2, 1, 3));
  EXPECT_TRUE(parse("clamped(limit=nan)", kTable, &spec));  // which refusal() is for
  EXPECT_TRUE(std::isnan(spec.limit));
  const ActivationSpec before = spec = Activation::relu;
  for (const char* text : {"",
                           "SwiGLU",
                           " swiglu",
                           "swiglu ",
                           "swiglu(",
                           "swiglu()",
                           "swiglu)",
                           "swiglu(limit)",
                           "swiglu(limit=)",
                           "swiglu(limit=7",
                           "swiglu(limit=7))",
                           "swiglu(limit=7,)",
                           "swiglu(limit=7 )",
                           "swiglu(limit= 7)",
                           "swiglu(limit=7,limit=7)",
                           "swiglu(gamma=7)",
                           "swiglu(=7)",
                           "swiglu(limit=1e99)",
                           "swiglu(limit=7;alpha=1)",
                           "swiglu(limit,alpha=1)",
                           "(limit=7)",
                           "clamped_m",
                           "?",
                           "swiglu(limit=7)x"}) {
    EXPECT_FALSE(parse(text, kTable, &spec)) << text;
    EXPECT_FALSE(parse(text, &spec)) << text;
    EXPECT_EQ(spec, before) << text;
  }
}

TEST(Activations, RefusalsNameTheParameter) {
  const auto refused = [](Activation kind, float alpha, float beta, float limit) {
    return refusal(spec_of(kind, alpha, beta, limit), kTable);
  };
  EXPECT_EQ(refused(Activation::swiglu, 1, 1, kInf), "");
  EXPECT_EQ(refused(Activation::swiglu, 1, 1, 10), "");
  EXPECT_EQ(refused(Activation::swiglu, 2, 1, kInf),
            "activation.alpha: got 2, allowed: 1 (swiglu has no alpha)");
  EXPECT_EQ(refused(Activation::swiglu, 1, kNan, kInf),
            "activation.beta: got nan, allowed: 1 (swiglu has no beta)");
  EXPECT_EQ(refused(Activation::relu, 1, 1, 7),
            "activation.limit: got 7, allowed: inf (relu has no limit)");
  EXPECT_EQ(refused(Activation::geglu, -2, 1, 1e-30f), "");
  EXPECT_EQ(refused(Activation::geglu, kInf, 1, 7),
            "activation.alpha: got inf, allowed: finite numbers");
  for (const float limit : {0.0f, -1.0f, kNan}) {
    const std::string text = refused(Activation::geglu, 1, 1, limit);
    EXPECT_TRUE(text.ends_with(", allowed: numbers above 0, or inf")) << text;
  }
  EXPECT_EQ(refused(Activation::reglu, 0.5f, 3, kInf), "");
  for (const float beta : {0.0f, -1.0f, kInf, kNan}) {
    const std::string text = refused(Activation::reglu, 4, beta, kInf);
    EXPECT_TRUE(text.ends_with(", allowed: finite numbers above 0")) << text;
  }
  EXPECT_EQ(refused(Activation::silu, 1, 1, kInf),
            "activation: got 8, allowed: swiglu, clamped, clamped_more, relu");
}

TEST(Activations, LimitsAndScalesArePositive) {
  const auto refused = [](const char* text) {
    ActivationSpec spec;
    EXPECT_TRUE(parse(text, &spec)) << text;
    return refusal(spec);
  };
  for (const char* text :
       {"swiglu(limit=7)", "swiglu(limit=inf)", "swiglu_clamp_after(limit=1e-3)",
        "swiglu_oai(alpha=-2,limit=inf)", "swiglu_oai(alpha=0)", "situ_glu(alpha=1,beta=2)"}) {
    EXPECT_EQ(refused(text), "") << text;
  }
  const std::string limit = "activation.limit: got ",
                    positive = ", allowed: numbers above 0, or inf";
  EXPECT_EQ(refused("swiglu(limit=0)"), limit + "0" + positive);
  EXPECT_EQ(refused("swiglu_clamp_after(limit=-7)"), limit + "-7" + positive);
  EXPECT_EQ(refused("swiglu_oai(limit=nan)"), limit + "nan" + positive);
  EXPECT_EQ(refused("swiglu_oai(alpha=inf)"), "activation.alpha: got inf, allowed: finite numbers");
  EXPECT_EQ(refused("situ_glu(alpha=0)"),
            "activation.alpha: got 0, allowed: finite numbers above 0");
  EXPECT_EQ(refused("situ_glu(beta=inf)"),
            "activation.beta: got inf, allowed: finite numbers above 0");
  EXPECT_EQ(refused("situ_glu(limit=7)"),
            "activation.limit: got 7, allowed: inf (situ_glu has no limit)");
  EXPECT_EQ(refused("quick_geglu(alpha=2)"),
            "activation.alpha: got 2, allowed: 1 (quick_geglu has no alpha)");
}

// Every descriptor with an activation asks the table.
TEST(Activations, PlansRefuseParametersThatTheKindLacks) {
  const auto message = [](auto desc, ExpertsDesc* experts, float limit) {
    experts->hidden = experts->intermediate = 8;
    experts->dtype = DType::f32;
    experts->activation.limit = limit;
    return std::string(make_plan(*desc).status().message());
  };
  LayerDesc layer{.router = {.experts = 1, .top_k = 1}};
  GroupedGemmDesc gemm;
  BiasGradDesc bias_grad;
  gemm.experts = bias_grad.experts = 1;
  layer.experts.activation = Activation::geglu;
  gemm.activation = bias_grad.activation = Activation::geglu;
  const char* const text = "activation.limit: got 7, allowed: inf (geglu has no limit)";
  EXPECT_EQ(message(&layer, &layer.experts, kInf), "");
  EXPECT_EQ(message(&layer, &layer.experts, 7), text);
  EXPECT_EQ(message(&gemm, &gemm, kInf), "");
  EXPECT_EQ(message(&gemm, &gemm, 7), text);
  EXPECT_EQ(message(&bias_grad, &bias_grad, kInf), "");
  EXPECT_EQ(message(&bias_grad, &bias_grad, 7), text);
}

}  // namespace
}  // namespace sonicmoe
