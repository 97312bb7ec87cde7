// Every public enum of every descriptor: a value that is no enumerator is refused by make_plan, by
// the name of its field, and never runs as another one.
#include <gtest/gtest.h>

#include <climits>
#include <string>

#include "sonicmoe/sonicmoe.h"

namespace sonicmoe {
namespace {

template <class Desc>
Desc sized() {
  Desc d;
  if constexpr (requires { d.tokens; }) d.tokens = 5;
  if constexpr (requires { d.hidden; }) d.hidden = 16;
  if constexpr (requires { d.intermediate; }) d.intermediate = 8;
  if constexpr (requires { d.experts; }) d.experts = 4;
  if constexpr (requires { d.top_k; }) d.top_k = 2;
  if constexpr (
      requires { d.rows; } && !requires { d.rows(); })
    d.rows = 10;
  if constexpr (requires { d.dtype; }) d.dtype = DType::f32;
  return d;
}
template <>
LayerDesc sized() {
  return {.tokens = 5,
          .router = {.experts = 4, .top_k = 2},
          .experts = {.hidden = 16, .intermediate = 8, .dtype = DType::f32}};
}

template <>
SendRowsDesc sized() {
  return {.tokens = 5, .hidden = 16, .ranks = 2, .dtype = DType::f32};
}

template <class Desc>
void expect_refused(Desc desc, const char* field, int value, Device device = {}) {
  const auto plan = make_plan(desc, device);
  ASSERT_FALSE(plan.ok()) << field << " " << value;
  EXPECT_EQ(plan.status().code(), StatusCode::invalid_argument) << plan.status().message();
  const std::string start = std::string(field) + ": got " + std::to_string(value) + ", allowed: ";
  EXPECT_EQ(std::string(plan.status().message()).substr(0, start.size()), start);
}

/// `select` leads to the field: [](Desc& d) -> Enum& { return d.field; }. `count`: of enumerators.
template <class Desc, class Select>
void expect_known(const char* field, int count, Select select) {
  const Desc good = sized<Desc>();
  ASSERT_TRUE(make_plan(good).ok()) << make_plan(good).status().message();
  for (const int value : {-1, count, count + 1, 31, 32, 64, INT_MIN, INT_MAX}) {
    Desc desc = good;
    auto& choice = select(desc);
    choice = static_cast<std::remove_reference_t<decltype(choice)>>(value);
    expect_refused(desc, field, value);
  }
  for (const int value : {-1, 2, INT_MAX}) {
    expect_refused(good, "device.type", value, {static_cast<DeviceType>(value), 0});
  }
}

#define EXPECT_KNOWN(Desc, message, count, path) \
  expect_known<Desc>(                            \
      message, count, [](Desc & d) -> auto& { return d.path; })

const int kActivations = static_cast<int>(activations().size());

TEST(UnknownEnum, Layer) {
  EXPECT_KNOWN(LayerDesc, "dtype", 3, experts.dtype);
  EXPECT_KNOWN(LayerDesc, "activation", kActivations, experts.activation.kind);
  EXPECT_KNOWN(LayerDesc, "w1_layout", 5, experts.w1_layout);
  EXPECT_KNOWN(LayerDesc, "router_score", 3, router.score);
  EXPECT_KNOWN(LayerDesc, "router_order", 2, router.order);
  EXPECT_KNOWN(LayerDesc, "group_score", 2, router.group_score);
  EXPECT_KNOWN(LayerDesc, "router_input", 5, router.input);
  EXPECT_KNOWN(LayerDesc, "rounding_rule", 6, rounding.rule);
  EXPECT_KNOWN(LayerDesc, "row_source", 2, experts.row_source);
  EXPECT_KNOWN(LayerDesc, "score_at", 4, experts.score_at);
  EXPECT_KNOWN(LayerDesc, "index_type", 2, experts.index_type);
  EXPECT_KNOWN(LayerDesc, "recompute", 2, experts.recompute);
}

TEST(UnknownEnum, PlansOfALayer) {
  EXPECT_KNOWN(RoutingDesc, "dtype", 3, dtype);
  EXPECT_KNOWN(RoutingDesc, "router_score", 3, score);
  EXPECT_KNOWN(RoutingDesc, "router_order", 2, order);
  EXPECT_KNOWN(RoutingDesc, "group_score", 2, group_score);
  EXPECT_KNOWN(RoutingDesc, "router_input", 5, input);
  EXPECT_KNOWN(RoutingDesc, "rounding_rule", 6, rounding.rule);
  EXPECT_KNOWN(GroupedDesc, "dtype", 3, dtype);
  EXPECT_KNOWN(GroupedDesc, "activation", kActivations, activation.kind);
  EXPECT_KNOWN(GroupedDesc, "w1_layout", 5, w1_layout);
  EXPECT_KNOWN(GroupedDesc, "row_source", 2, row_source);
  EXPECT_KNOWN(GroupedDesc, "score_at", 4, score_at);
  EXPECT_KNOWN(GroupedDesc, "index_type", 2, index_type);
  EXPECT_KNOWN(GroupedDesc, "recompute", 2, recompute);
  EXPECT_KNOWN(CombineDesc, "dtype", 3, dtype);
}

TEST(UnknownEnum, RouterGemm) {
  EXPECT_KNOWN(RouterGemmDesc, "dtype", 3, dtype);
  EXPECT_KNOWN(RouterGemmDesc, "pass", 3, pass);
}

TEST(UnknownEnum, GroupedGemm) {
  EXPECT_KNOWN(GroupedGemmDesc, "op", 6, op);
  EXPECT_KNOWN(GroupedGemmDesc, "dtype", 3, dtype);
  EXPECT_KNOWN(GroupedGemmDesc, "activation", kActivations, activation.kind);
  EXPECT_KNOWN(GroupedGemmDesc, "w1_layout", 5, w1_layout);
}

TEST(UnknownEnum, ContiguousRows) {
  EXPECT_KNOWN(SegmentsDesc, "index_type", 2, index_type);
  EXPECT_KNOWN(ZeroTailDesc, "dtype", 3, dtype);
}

TEST(UnknownEnum, SendRows) { EXPECT_KNOWN(SendRowsDesc, "dtype", 3, dtype); }

TEST(UnknownEnum, BiasGrad) {
  EXPECT_KNOWN(BiasGradDesc, "dtype", 3, dtype);
  EXPECT_KNOWN(BiasGradDesc, "activation", kActivations, activation.kind);
  EXPECT_KNOWN(BiasGradDesc, "w1_layout", 5, w1_layout);
}

TEST(UnknownEnum, OperationsOnLogits) {
  EXPECT_KNOWN(TopKDesc, "dtype", 3, dtype);
  EXPECT_KNOWN(TopKDesc, "router_score", 3, score);
  EXPECT_KNOWN(TopKDesc, "router_order", 2, order);
  EXPECT_KNOWN(TopKDesc, "group_score", 2, group_score);
  EXPECT_KNOWN(TopKDesc, "router_input", 5, input);
  EXPECT_KNOWN(ScoreGradDesc, "dtype", 3, dtype);
  EXPECT_KNOWN(ScoreGradDesc, "router_score", 3, score);
  EXPECT_KNOWN(ScoreGradDesc, "router_order", 2, order);
  EXPECT_KNOWN(ScoreGradDesc, "group_score", 2, group_score);
  EXPECT_KNOWN(ScoreGradDesc, "router_input", 5, input);
  EXPECT_KNOWN(AuxLossDesc, "dtype", 3, dtype);
  EXPECT_KNOWN(AuxLossDesc, "loss", 2, loss);
  EXPECT_KNOWN(AuxLossDesc, "score", 3, score);
  EXPECT_KNOWN(TokenRoundingDesc, "dtype", 3, dtype);
  EXPECT_KNOWN(TokenRoundingDesc, "router_order", 2, order);
  EXPECT_KNOWN(TokenRoundingDesc, "router_input", 5, input);
  EXPECT_KNOWN(TokenRoundingDesc, "rule", 6, rule);
  EXPECT_KNOWN(TokenRoundingGradDesc, "dtype", 3, dtype);
  EXPECT_KNOWN(TokenRoundingGradDesc, "router_order", 2, order);
  EXPECT_KNOWN(TokenRoundingGradDesc, "router_input", 5, input);
}

TEST(UnknownEnum, Aggregate) { EXPECT_KNOWN(AggregateDesc, "dtype", 3, dtype); }

TEST(UnknownEnum, Metadata) {
  MetadataDesc d;
  d.experts = 4;
  for (const int value : {-1, 2, INT_MAX}) {
    expect_refused(d, "device.type", value, {static_cast<DeviceType>(value), 0});
  }
}

}  // namespace
}  // namespace sonicmoe
