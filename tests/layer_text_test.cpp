// The text form of a description.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "sonicmoe/layer.h"

namespace sonicmoe {
namespace {

std::string refusal(const std::string& text) {
  const auto layer = parse_layer(text);
  EXPECT_FALSE(layer.ok()) << text;
  return layer.status().message();
}

TEST(LayerText, LeavesOutWhatALayerHasOfItself) {
  EXPECT_EQ(to_string(LayerDesc{}), "");
  LayerDesc d;
  d.tokens = 4096;
  d.router = {.experts = 32, .top_k = 4, .order = RouterOrder::score_then_select};
  d.experts = {.hidden = 512, .intermediate = 256, .activation = Activation::geglu};
  d.rounding = {.tile = 128, .rule = RoundingRule::balance};
  EXPECT_EQ(to_string(d),
            "tokens=4096 hidden=512 intermediate=256 experts=32 top_k=4 activation=geglu "
            "router_order=score_then_select rounding_tile=128 rounding_rule=balance");
  EXPECT_EQ(parse_layer(to_string(d)).value(), d);
}

TEST(LayerText, EveryFieldChangesTheTextAndComesBack) {
  std::set<std::string> keys;
  for (const LayerField& field : layer_fields()) {
    SCOPED_TRACE(field.key);
    EXPECT_TRUE(keys.insert(field.key).second);
    EXPECT_NE(std::string(field.help), "");
    EXPECT_EQ(layer_field(LayerDesc{}, field.key), field.initial);
    // The last of its values, or the other one.
    std::string value = field.allowed.substr(field.allowed.rfind(' ') + 1);
    if (field.allowed == "an integer") value = "-9223372036854775808";
    if (field.allowed == "a number") value = "2.3e-38";
    if (value == field.initial) value = field.allowed.substr(0, field.allowed.find(','));
    const std::string text = std::string(field.key) + "=" + value;
    const auto layer = parse_layer(text);
    ASSERT_TRUE(layer.ok()) << layer.status().message();
    EXPECT_NE(layer.value(), LayerDesc{});
    EXPECT_EQ(to_string(layer.value()), text);
    EXPECT_EQ(layer_field(layer.value(), field.key), value);
  }
  EXPECT_EQ(layer_field(LayerDesc{}, "no such key"), "");
}

TEST(LayerText, ReadsItemsInAnyOrderAndOddSpaces) {
  const auto layer = parse_layer("  top_k=2   experts=8 ");
  ASSERT_TRUE(layer.ok()) << layer.status().message();
  EXPECT_EQ(layer.value().router.top_k, 2);
  EXPECT_EQ(layer.value().router.experts, 8);
  EXPECT_EQ(parse_layer("").value(), LayerDesc{});
  EXPECT_EQ(parse_layer("bias=false").value(), LayerDesc{});
}

TEST(LayerText, RefusesByName) {
  EXPECT_EQ(refusal("topk=2"),
            "layer: got 'topk=2', allowed: KEY=VALUE with a key of layer_fields(): tokens, hidden, "
            "...");
  EXPECT_EQ(refusal("bias"),
            "layer: got 'bias', allowed: KEY=VALUE with a key of layer_fields(): tokens, hidden, "
            "...");
  EXPECT_EQ(refusal("top_k=2 experts=8 top_k=2"), "layer: got top_k twice, allowed: once");
  EXPECT_EQ(refusal("tokens=x"), "tokens: got 'x', allowed: an integer");
  EXPECT_EQ(refusal("tokens=9223372036854775808"),
            "tokens: got '9223372036854775808', allowed: an integer");
  EXPECT_EQ(refusal("tokens="), "tokens: got '', allowed: an integer");
  EXPECT_EQ(refusal("bias=1"), "bias: got '1', allowed: true, false");
  EXPECT_EQ(refusal("router_order=0"),
            "router_order: got '0', allowed: select_then_score, score_then_select");
  EXPECT_EQ(refusal("router_order=given"),
            "router_order: got 'given', allowed: select_then_score, score_then_select");
  EXPECT_EQ(refusal("router_input=ids"),
            "router_input: got 'ids', allowed: projection, logits, logits_and_ids, "
            "ids_and_weights, lists");
  EXPECT_EQ(
      refusal("activation=swiglu(7)"),
      "activation: got 'swiglu(7)', allowed: swiglu, geglu, geglu_tanh, reglu, relu, relu_sq, "
      "gelu, gelu_tanh, silu, swiglu_clamp_after, swiglu_oai, situ_glu, quick_geglu");
  EXPECT_EQ(refusal("tokens=" + std::string(300, '7')),
            "tokens: got '" + std::string(60, '7') + "...', allowed: an integer");
}

// An enum's value without a name is written as its number, which nothing reads as a name.
TEST(LayerText, NamelessValuesDoNotComeBack) {
  LayerDesc d;
  d.experts.dtype = static_cast<DType>(7);
  EXPECT_EQ(to_string(d), "dtype=7");
  EXPECT_EQ(refusal("dtype=7"), "dtype: got '7', allowed: f32, bf16, f16");
}

}  // namespace
}  // namespace sonicmoe
