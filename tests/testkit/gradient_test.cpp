// The oracle's own backward, validated by finite differences of its forward in fp64: of the whole
// layer, with the routing held fixed, for every input element by element.
#include <gtest/gtest.h>

#include <cmath>

#include "testkit/inputs.h"
#include "testkit/oracle.h"
#include "tests/test_names.h"

namespace sonicmoe::testkit {
namespace {

double dot(const Tensor& a, const Tensor& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// A layer whose loss is <dout, o> + <q, logits> + aux_loss(logits).
struct Fixture {
  Problem problem;
  Tensor q;  // empty without logits
  Routing routing;
  std::vector<std::int32_t> counts;

  explicit Fixture(const Case& c) : problem(make_problem(c)), q(problem.dlogits) {
    routing = own_routing(problem, Precision::exact);
    counts = group(routing, c.desc.tokens, c.desc.router.experts).counts;
  }

  Oracle oracle() const { return Oracle(problem.desc, Precision::exact); }

  double loss() const {
    const LayerTensors out = oracle_forward(problem, routing, Precision::exact);
    double value = dot(problem.dout, out.o);
    if (!q.empty()) value += dot(q, out.logits) + oracle().aux_loss(out.logits, counts);
    return value;
  }

  LayerTensors gradients() {
    LayerTensors out = oracle_forward(problem, routing, Precision::exact);
    if (!q.empty()) {
      const Tensor aux = oracle().aux_loss_grad(out.logits, counts, 1);
      for (std::size_t i = 0; i < q.size(); ++i) problem.dlogits[i] = q[i] + aux[i];
    }
    oracle_backward(problem, routing, Precision::exact, &out);
    return out;
  }

  /// Central differences over every element of an input. With h = 1e-5 the truncation is about
  /// h^2 = 1e-10 and the rounding 1e-16 |loss| / h = 1e-10 of a gradient of size one; 1e-7 is a
  /// safe bound, and a wrong term is far above it.
  void expect_gradient(const char* name, Tensor* input, const Tensor& gradient) {
    constexpr double h = 1e-5;
    Tensor numeric(input->size());
    for (std::size_t i = 0; i < input->size(); ++i) {
      const double value = (*input)[i];
      (*input)[i] = value + h;
      const double above = loss();
      (*input)[i] = value - h;
      const double below = loss();
      (*input)[i] = value;
      numeric[i] = (above - below) / (2 * h);
    }
    const ErrorNorm error = error_norm(gradient, numeric);
    EXPECT_GT(error.norm, 0) << name;
    EXPECT_LE(error.error, 1e-7 * std::fmax(error.norm, 1)) << name;
  }
};

LayerDesc tiny(const ActivationSpec& activation, RouterOrder router, bool norm,
               RouterInput input = RouterInput::projection) {
  LayerDesc desc;
  desc.tokens = 5;
  desc.experts.hidden = 8;
  desc.experts.intermediate = 8;
  desc.router.experts = 3;
  desc.router.input = input;
  desc.router.top_k = desc.router.takes_lists() ? 0 : 2;
  desc.router.list_length = desc.router.takes_lists() ? 14 : 0;
  desc.experts.dtype = DType::f32;
  desc.experts.activation = activation;
  desc.router.order = router;
  desc.router.renormalize = norm;
  desc.experts.bias = true;
  return desc;
}

std::vector<Case> cases() {
  std::vector<LayerDesc> descs;
  for (const NamedActivation& activation : tested_activations()) {
    descs.push_back(tiny(activation.spec, RouterOrder::select_then_score, false));
  }
  descs.push_back(tiny(Activation::swiglu, RouterOrder::score_then_select, false));
  descs.push_back(tiny(Activation::swiglu, RouterOrder::score_then_select, true));
  constexpr RouterOrder kFirst = RouterOrder::select_then_score;
  for (const RouterInput input : {RouterInput::ids_and_weights, RouterInput::lists}) {
    descs.push_back(tiny(Activation::swiglu, kFirst, false, input));
  }
  descs.push_back(tiny(Activation::gelu, kFirst, false, RouterInput::lists));
  for (const RouterInput input : {RouterInput::logits, RouterInput::logits_and_ids}) {
    descs.push_back(tiny(Activation::swiglu, kFirst, false, input));
    descs.push_back(tiny(Activation::swiglu, RouterOrder::score_then_select, false, input));
    descs.push_back(tiny(Activation::swiglu, RouterOrder::score_then_select, true, input));
  }
  for (const RouterScore score :
       {RouterScore::softmax, RouterScore::sigmoid, RouterScore::sqrt_softplus}) {
    for (const RouterOrder order : {kFirst, RouterOrder::score_then_select}) {
      for (const bool norm : {false, true}) {
        LayerDesc desc = tiny(Activation::swiglu, order, norm);
        desc.router.score = score;
        desc.router.scale = 1.5f;
        desc.router.expert_scale = desc.router.logit_bias = desc.router.selection_bias = true;
        if (norm && !desc.router.over_top_k()) desc.router.eps = 0.25f;
        descs.push_back(desc);
      }
    }
  }
  for (const RouterScore score : {RouterScore::softmax, RouterScore::sigmoid}) {
    descs.push_back(tiny(Activation::swiglu, RouterOrder::score_then_select, true,
                         RouterInput::logits_and_ids));
    descs.back().router.score = score;
    descs.back().router.scale = 0.5f;
  }
  descs.push_back(descs[0]);
  descs.back().experts.bias = false;
  std::vector<Case> out;
  for (const LayerDesc& desc : descs) {
    Case c;
    c.name = label_of(to_string(desc.experts.activation)) + "_" + name(desc.router.input) + "_" +
             name(desc.router.order) + (desc.router.renormalize ? "_norm" : "") +
             (desc.experts.bias ? "_bias" : "");
    if (!desc.router.plain()) c.name += std::string("_") + name(desc.router.score) + "_scaled";
    c.desc = desc;
    c.outside_dlogits = true;
    c.seed = out.size() + 1;
    if (!desc.router.chooses()) c.routing = RoutingKind::hostile;
    out.push_back(std::move(c));
  }
  return out;
}

class OracleGradient : public testing::TestWithParam<Case> {};

TEST_P(OracleGradient, AgreesWithFiniteDifferences) {
  Fixture fixture(GetParam());
  const LayerTensors g = fixture.gradients();
  Problem& p = fixture.problem;
  fixture.expect_gradient("x", &p.x, g.dx);
  fixture.expect_gradient("w1", &p.w1, g.dw1);
  fixture.expect_gradient("w2", &p.w2, g.dw2);
  if (p.desc.experts.bias) {
    fixture.expect_gradient("b1", &p.b1, g.db1);
    fixture.expect_gradient("b2", &p.b2, g.db2);
  }
  if (!p.desc.router.has_logits()) {
    fixture.expect_gradient("scores", &p.list_scores, g.dscores);
  } else if (!p.desc.router.projects()) {
    fixture.expect_gradient("logits", &p.logits, g.dlogits);
  } else {
    fixture.expect_gradient("router_w", &p.router_w, g.drouter_w);
  }
  if (p.desc.router.logit_bias) {
    fixture.expect_gradient("logit_bias", &p.logit_bias, g.dlogit_bias);
  }
  if (p.desc.router.expert_scale) {
    fixture.expect_gradient("expert_scale", &p.expert_scale, g.dexpert_scale);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, OracleGradient, testing::ValuesIn(cases()),
                         [](const auto& param_info) { return param_info.param.name; });

TEST(AuxLoss, KnownValues) {
  LayerDesc desc = tiny(Activation::swiglu, RouterOrder::select_then_score, false);
  desc.tokens = 2;
  const Oracle oracle(desc, Precision::exact);
  const Tensor even(6, 0.5);
  EXPECT_NEAR(oracle.aux_loss(even, {1, 1, 2}), 1.0, 1e-15);  // P even: 1 whatever the counts
  const Tensor sure = {0, -1000, -1000, 0, -1000, -1000};
  EXPECT_NEAR(oracle.aux_loss(sure, {4, 0, 0}), 3.0, 1e-15);  // everything on one expert: E
  EXPECT_EQ(oracle.aux_loss(even, {0, 0, 0}), 0.0);
  desc.tokens = 0;
  EXPECT_EQ(Oracle(desc, Precision::exact).aux_loss({}, {0, 0, 0}), 0.0);
}

// A layer small enough to do by hand: one expert, relu, so o = s (relu(x w1 + b1) w2 + b2).
TEST(Oracle, OneRowByHand) {
  LayerDesc desc =
      tiny(Activation::relu, RouterOrder::select_then_score, false, RouterInput::lists);
  desc.tokens = 1;
  desc.router.experts = 1;
  desc.router.list_length = 1;
  Problem p;
  p.desc = desc;
  p.x.assign(8, 0);
  p.x[0] = 2;
  p.w1.assign(64, 0);
  p.w1[0] = 3;  // h_0 = 2 * 3 + 1
  p.w1[8] = -3;
  p.b1.assign(8, 1);
  p.w2.assign(64, 0);
  p.w2[0] = 10;  // o_0 = 0.5 (7 * 10 + 4)
  p.b2.assign(8, 4);
  p.dout.assign(8, 0);
  p.dout[0] = 1;
  p.lists = {{0}, {0}};
  p.list_scores = {0.5};
  LayerTensors out = oracle_forward(p, p.lists, Precision::exact);
  EXPECT_EQ(out.preact, (Tensor{7, -5, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(out.o, (Tensor{37, 2, 2, 2, 2, 2, 2, 2}));
  oracle_backward(p, p.lists, Precision::exact, &out);
  EXPECT_EQ(out.dscores, Tensor{74});
  EXPECT_EQ(out.dw2[0], 3.5);
  EXPECT_EQ(out.db2[0], 0.5);
  EXPECT_EQ(out.dw1[0], 10);
  EXPECT_EQ(out.db1, (Tensor{5, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(out.dx[0], 15);
}

// Rounding happens at the documented points and only there.
TEST(Oracle, RoundedModeRoundsWhatIsStored) {
  const Problem p = make_problem(*find_case("activation/swiglu-interleaved-bias/bf16"));
  const Routing routing = own_routing(p, Precision::rounded);
  LayerTensors t = oracle_forward(p, routing, Precision::rounded);
  oracle_backward(p, routing, Precision::rounded, &t);
  const auto expect_type = [](const char* name, const Tensor& values, DType type) {
    for (const double v : values) ASSERT_EQ(v, round_to(v, type)) << name;
  };
  expect_type("logits", t.logits, DType::bf16);
  expect_type("scores", t.scores, DType::f32);
  expect_type("preact", t.preact, DType::bf16);
  expect_type("act", t.act, DType::bf16);
  expect_type("expert_out", t.expert_out, DType::bf16);
  expect_type("o", t.o, DType::bf16);
  expect_type("dpreact", t.dpreact, DType::bf16);
  expect_type("scaled_act", t.scaled_act, DType::bf16);
  expect_type("row_dscores", t.row_dscores, DType::f32);
  expect_type("dx_rows", t.dx_rows, DType::bf16);
  expect_type("dlogits", t.dlogits, DType::bf16);
  expect_type("dw1", t.dw1, DType::bf16);
  expect_type("db2", t.db2, DType::bf16);
  EXPECT_NE(round_to(t.scores[0], DType::bf16), t.scores[0]);
  EXPECT_NE(round_to(t.row_dscores[0], DType::bf16), t.row_dscores[0]);

  // A comes from H before it is rounded, A' and dS from H after.
  const Grouping g = group(routing, p.desc.tokens, p.desc.router.experts);
  const LayerTensors exact = [&] {
    LayerTensors out;
    auto up = Oracle(p.desc, Precision::exact).up_proj(g, p.x, p.w1, p.b1);
    out.act = std::move(up.act);
    return out;
  }();
  for (std::size_t i = 0; i < exact.act.size(); ++i) {
    ASSERT_EQ(t.act[i], round_to(exact.act[i], DType::bf16));
  }
}

// Five roundings to bf16, each of relative size 2^-9 / sqrt(3), lie between x and o.
TEST(Oracle, RoundedAndPlainAreAsFarFromExactAsTheirRoundings) {
  const Problem p = make_problem(*find_case("shape/large/bf16"));
  const Routing routing = own_routing(p, Precision::rounded);
  const Tensor exact = oracle_forward(p, routing, Precision::exact).o;
  for (const Precision precision : {Precision::rounded, Precision::plain}) {
    const ErrorNorm e = error_norm(oracle_forward(p, routing, precision).o, exact);
    EXPECT_GT(e.error / e.norm, 0x1p-10);
    EXPECT_LT(e.error / e.norm, 5 * 0x1p-9);
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
