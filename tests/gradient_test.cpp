// The library's own gradients against finite differences of its own forward, in fp32: no oracle in
// between.
#include <gtest/gtest.h>

#include <cmath>

#include "testkit/run.h"
#include "tests/test_names.h"

namespace sonicmoe::testkit {
namespace {

double dot(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Routings that do not jump when an input moves a little: lists, ids, or every expert chosen.
std::vector<Case> cases() {
  std::vector<Case> out;
  const auto add = [&](const std::string& name, RouterInput input, RouterOrder order,
                       const ActivationSpec& activation) {
    Case c;
    LayerDesc& d = c.desc;
    d.tokens = 40;
    d.experts.hidden = 32;
    d.experts.intermediate = 24;
    d.router.experts = 4;
    d.experts.dtype = DType::f32;
    d.experts.activation = activation;
    d.router.input = input;
    d.router.order = order;
    d.experts.bias = true;
    if (!d.router.chooses()) c.routing = RoutingKind::hostile;
    if (d.router.takes_lists()) {
      d.router.list_length = 150;
    } else {
      d.router.top_k = 4;
    }
    c.outside_dlogits = d.router.has_logits();
    c.name = name;
    c.seed = out.size() + 1;
    out.push_back(c);
  };
  constexpr RouterOrder kModes[] = {RouterOrder::select_then_score, RouterOrder::score_then_select};
  for (const NamedActivation& activation : tested_activations()) {
    add("given_" + activation.name, RouterInput::lists, kModes[0], activation.spec);
  }
  add("ids_and_weights", RouterInput::ids_and_weights, kModes[0], Activation::swiglu);
  for (const RouterInput input :
       {RouterInput::projection, RouterInput::logits, RouterInput::logits_and_ids}) {
    for (const RouterOrder order : kModes) {
      add(std::string(name(input)) + "_" + name(order), input, order, Activation::swiglu);
    }
    add(std::string(name(input)) + "_norm", input, kModes[1], Activation::swiglu);
    out.back().desc.router.renormalize = true;
  }
  for (const RouterScore score :
       {RouterScore::softmax, RouterScore::sigmoid, RouterScore::sqrt_softplus}) {
    for (const bool norm : {false, true}) {
      add(std::string("scaled_") + name(score) + (norm ? "_norm" : ""), RouterInput::projection,
          kModes[1], Activation::swiglu);
      RouterDesc& router = out.back().desc.router;
      router.score = score;
      router.renormalize = norm;
      router.eps = norm ? 0.25f : 0.0f;
      router.scale = 4.0f;
      router.logit_bias = router.expert_scale = true;
    }
  }
  // Without a loss on the logits, dX's sum adds the router's part.
  add("softmax_over_topk_alone", RouterInput::projection, kModes[0], Activation::swiglu);
  out.back().outside_dlogits = false;
  return out;
}

double loss(const Problem& problem) {
  const LayerRun run = run_layer(problem);
  EXPECT_TRUE(run.status.ok()) << run.status.message();
  return dot(problem.dout, run.tensors.o) + dot(problem.dlogits, run.tensors.logits);
}

class LayerGradient : public testing::TestWithParam<Case> {};

// Moves every element of one input by +-h, signs at random, so that the slope is a random sum of
// all its gradients, of size ||gradient||. With h = 2^-13:
// - the outputs' rounding, 2^-24 of each of them, makes a noise of 2^-24 ||dout|| / h = 0.02, and
//   gradients have norms of 5 and more: 0.4 %;
// - a kink of relu inside the step spoils an element of the gradient by half; a pre-activation of
//   size one moves by sqrt(d) h = 7e-4, so 0.06 % of the elements, sqrt(0.0006) / 2 = 1 % in norm;
// - the truncation is of order h^2.
// A wrong or missing term is a good part of ||gradient||, so that 4 % of it is safe on both sides.
TEST_P(LayerGradient, AgreesWithFiniteDifferences) {
  constexpr double h = 0x1p-13;
  Problem problem = make_problem(GetParam());
  const LayerRun run = run_layer(problem);
  ASSERT_TRUE(run.status.ok()) << run.status.message();
  const LayerTensors& g = run.tensors;
  const auto expect = [&](const char* name, Tensor* input, const Tensor& gradient) {
    ASSERT_EQ(input->size(), gradient.size()) << name;
    const double norm = std::sqrt(dot(gradient, gradient));
    EXPECT_GT(norm, 5) << name;
    const Tensor start = *input;
    for (std::uint64_t direction = 0; direction < 3; ++direction) {
      const Random random(direction, 3000);
      Tensor above = start, below = start;
      double slope = 0, numeric = 0;
      for (std::size_t i = 0; i < start.size(); ++i) {
        const double sign = random.below(i, 2) == 0 ? 1 : -1;
        // What fp32 makes of the step, so that its rounding does not count as an error.
        above[i] = round_to(start[i] + sign * h, DType::f32);
        below[i] = round_to(start[i] - sign * h, DType::f32);
        slope += gradient[i] * (above[i] - below[i]) / (2 * h);
      }
      *input = above;
      numeric += loss(problem);
      *input = below;
      numeric -= loss(problem);
      *input = start;
      EXPECT_NEAR(numeric / (2 * h), slope, 0.04 * norm) << name;
    }
  };
  expect("x", &problem.x, g.dx);
  expect("w1", &problem.w1, g.dw1);
  expect("b1", &problem.b1, g.db1);
  expect("w2", &problem.w2, g.dw2);
  expect("b2", &problem.b2, g.db2);
  if (!problem.desc.router.has_logits()) {
    expect("scores", &problem.list_scores, g.dscores);
  } else if (!problem.desc.router.projects()) {
    expect("logits", &problem.logits, g.dlogits);
  } else {
    expect("router_w", &problem.router_w, g.drouter_w);
  }
  if (problem.desc.router.logit_bias) expect("logit_bias", &problem.logit_bias, g.dlogit_bias);
  if (problem.desc.router.expert_scale) {
    expect("expert_scale", &problem.expert_scale, g.dexpert_scale);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, LayerGradient, testing::ValuesIn(cases()), test_name);

}  // namespace
}  // namespace sonicmoe::testkit
