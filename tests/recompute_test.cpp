// Recompute::preact: backward makes H again. The same bits everywhere, and nothing kept of H.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "testkit/run.h"
#include "tests/plain_layer.h"
#include "tests/test_names.h"

namespace sonicmoe::testkit {
namespace {

/// The problem's run with H recomputed. run_layer() hands over no H, in poisoned workspaces.
LayerRun recomputed(Problem p, bool dpreact_in_workspace = true) {
  p.desc.experts.recompute = Recompute::preact;
  p.desc.experts.dpreact_in_workspace = dpreact_in_workspace;
  return run_layer(p, kDevice);
}

void expect_same(LayerRun again, const LayerRun& kept) {
  ASSERT_STREQ(again.status.message(), "");
  EXPECT_EQ(again.damage, "");
  EXPECT_TRUE(again.tensors.preact.empty());
  again.tensors.preact = kept.tensors.preact;
  EXPECT_EQ(first_difference(again, kept), "");
}

class RecomputeOf : public testing::TestWithParam<Case> {};

TEST_P(RecomputeOf, PreactGivesTheSameBits) {
  Problem p = make_problem(GetParam());
  p.desc.experts.recompute = Recompute::none;
  const LayerRun kept = run_layer(p, kDevice);
  ASSERT_STREQ(kept.status.message(), "");
  expect_same(recomputed(p, GetParam().seed / 2 % 2 == 0), kept);
}

/// Those that have a backward.
std::vector<Case> trained_cases() {
  std::vector<Case> cases = full_cases(kDevice);
  std::erase_if(cases, [](const Case& c) { return c.desc.experts.inference; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, RecomputeOf, testing::ValuesIn(trained_cases()), test_name);

const std::vector<std::string> kSomeCases = {"activation/swiglu-separate-bias",
                                             "activation/swiglu-transposed_interleaved-bias",
                                             "router/topk_over_softmax-dlogits",
                                             "given/hostile-bias-gelu",
                                             "given/sentinels_only",
                                             "rows/before_down-bias-hostile",
                                             "rounding/nearest-softmax_over_topk"};

// dS and, with biases, their gradients come out whatever else is wanted; they need H, too.
TEST(Recompute, OnlyWantedGradients) {
  for (const std::string& name : kSomeCases) {
    Problem p = make_problem(case_named(name, kTypes[0]));
    for (int wanted = 0; wanted < 8; ++wanted) {
      SCOPED_TRACE(name + " " + std::to_string(wanted));
      p.wanted = {.dx = (wanted & 1) != 0,
                  .drouter_w = (wanted & 1) != 0,
                  .dw1 = (wanted & 2) != 0,
                  .dw2 = (wanted & 4) != 0};
      expect_same(recomputed(p), run_layer(p, kDevice));
    }
  }
}

TEST(Recompute, AccumulatedWeightGradients) {
  for (const std::string& name : kSomeCases) {
    SCOPED_TRACE(name);
    Problem p = make_problem(case_named(name, kTypes[1]));
    p.desc.experts.f32_weight_grads = p.desc.experts.accumulate_weight_grads = true;
    p.dw1 = p.w1;
    p.dw2 = p.w2;
    expect_same(recomputed(p), run_layer(p, kDevice));
  }
}

// H takes the place that dH has anyhow, and A that of A': the workspace grows by what up_proj wants
// for itself at most.
TEST(Recompute, KeepsNoPreactAndNoMoreWorkspace) {
  for (const std::string& name : kSomeCases) {
    SCOPED_TRACE(name);
    LayerDesc desc = case_named(name, kTypes[0]).desc;
    if (!desc.experts.gathers()) continue;
    for (const bool in_workspace : {true, false}) {
      desc.experts.dpreact_in_workspace = in_workspace;
      desc.experts.recompute = Recompute::none;
      const LayerPlan kept = make_plan(desc, kDevice).value();
      desc.experts.recompute = Recompute::preact;
      const LayerPlan again = make_plan(desc, kDevice).value();
      SavedBytes saved = kept.saved_bytes();
      EXPECT_EQ(saved.preact > 0, desc.rows() > 0);
      saved.preact = 0;
      EXPECT_EQ(again.saved_bytes().total(), saved.total());
      EXPECT_EQ(again.saved_bytes().preact, 0u);
      const auto up_proj = make_plan(GroupedGemmDesc{{desc.grouped()}, GemmOp::up_proj}, kDevice);
      const std::size_t own = up_proj.value().workspace_bytes();
      EXPECT_LE(again.backward_workspace_bytes(), kept.backward_workspace_bytes() + own + 256);
      EXPECT_EQ(again.forward_workspace_bytes(), kept.forward_workspace_bytes());
      EXPECT_NE(again.explain().find("preact 0, "), std::string::npos) << again.explain();
      EXPECT_NE(again.explain().find("recompute=preact"), std::string::npos);
    }
  }
}

TEST(Recompute, IsBackwardsFirstOperation) {
  LayerDesc desc = case_named(kSomeCases[0], kTypes[0]).desc;
  const auto forward = make_plan(desc, kDevice).value().forward_operations();
  auto expected = make_plan(desc, kDevice).value().backward_operations();
  expected.insert(expected.begin(), "up_proj_recompute");
  desc.experts.recompute = Recompute::preact;
  const LayerPlan plan = make_plan(desc, kDevice).value();
  const auto strings = [](const std::vector<const char*>& names) {
    return std::vector<std::string>(names.begin(), names.end());
  };
  EXPECT_EQ(strings(plan.backward_operations()), strings(expected));
  EXPECT_EQ(strings(plan.forward_operations()), strings(forward));
  desc.experts.inference = true;
  EXPECT_TRUE(make_plan(desc, kDevice).value().backward_operations().empty());
}

// As with every pointer that a plan does not use, `preact` is not looked at, let alone followed.
TEST(Recompute, IgnoresPreact) {
  Case c = case_named("activation/swiglu-interleaved", kTypes[0]);
  c.desc.experts.recompute = Recompute::preact;
  PlainLayer layer(c, 1);
  void* const wild = reinterpret_cast<void*>(0x7);  // neither mapped nor aligned
  layer.forward.preact = wild;
  layer.backward.preact = layer.backward.b1 = layer.backward.b1_up = wild;
  layer.backward.dpreact = wild;
  EXPECT_TRUE(layer.plan.forward(layer.forward, layer.workspace).ok());
  EXPECT_TRUE(layer.plan.backward(layer.backward, layer.workspace).ok());
}

}  // namespace
}  // namespace sonicmoe::testkit
