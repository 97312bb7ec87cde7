// The whole layer against the oracle, over the case list.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "testkit/run.h"
#include "tests/device.h"
#include "tests/test_names.h"

namespace sonicmoe::testkit {
namespace {

class Layer : public testing::TestWithParam<Case> {};

TEST_P(Layer, AgreesWithTheOracle) {
  const Report report = check_layer(GetParam(), kDevice);
  EXPECT_TRUE(report.pass()) << report.text() << repro_command(GetParam(), 0, kDevice);
}

TEST_P(Layer, OperationsAgreeWithTheOracle) {
  for (const Report& report : check_ops(GetParam(), kDevice)) {
    EXPECT_TRUE(report.pass()) << report.text() << repro_command(GetParam(), 0, kDevice);
  }
}

TEST_P(Layer, SameBitsForAnyNumberOfThreadsAndAgain) {
  const Problem problem = make_problem(GetParam());
  const auto run = [&](int threads) {
    Options options;
    options.threads = threads;
    return run_layer(problem, kDevice, options);
  };
  const LayerRun first = run(1);
  ASSERT_TRUE(first.status.ok()) << first.status.message();
  for (const int threads : kOnCpu ? std::vector{1, 2, 3, 7} : std::vector{1}) {
    EXPECT_EQ(first_difference(first, run(threads)), "")
        << threads << " threads, " << repro_command(GetParam(), threads, kDevice);
  }
}

#if !SONICMOE_TEST_CUDA
// The list takes the plain kernels only where the processor lacks instructions; named, they run
// everywhere.
TEST_P(Layer, PlainKernelsAgreeWithTheOracle) {
  Options plain;
  plain.kernel = "cpu";
  const Report report = check_layer(GetParam(), {}, plain);
  EXPECT_TRUE(report.pass()) << report.text();
  const Problem problem = make_problem(GetParam());
  plain.threads = 1;
  const LayerRun first = run_layer(problem, {}, plain);
  plain.threads = 3;
  EXPECT_EQ(first_difference(first, run_layer(problem, {}, plain)), "");
}
#endif

INSTANTIATE_TEST_SUITE_P(Cases, Layer, testing::ValuesIn(full_cases(kDevice)), test_name);

/// A desc drawn at random, within the sizes that a test can afford.
Case random_case(std::uint64_t seed) {
  const Random random(seed, 1000);
  std::uint64_t draw = 0;
  const auto below = [&](std::int64_t bound) { return random.below(draw++, bound); };
  LayerDesc d;
  d.tokens = below(4) == 0 ? below(3) : below(150);
  d.experts.hidden = 8 * (1 + below(14));
  d.experts.intermediate = 8 * (1 + below(14));
  d.router.experts = 1 + below(below(3) == 0 ? 40 : 9);
  d.experts.dtype = kTypes[below(2)];
  static const std::vector<NamedActivation> activations = tested_activations();
  d.experts.activation = activations[below(std::ssize(activations))].spec;
  d.experts.w1_layout = static_cast<W1Layout>(below(5));
  if (d.experts.w1_layout == W1Layout::separate && !is_glu(d.experts.activation)) {
    d.experts.w1_layout = W1Layout::concatenated;
  }
  d.experts.bias = below(2) == 0;
  d.experts.inference = below(8) == 0;
  d.router.input = static_cast<RouterInput>(below(5));
  Case c;
  c.name = "random";
  c.seed = seed;
  constexpr RoutingKind kKinds[] = {RoutingKind::random, RoutingKind::ties, RoutingKind::empty_ends,
                                    RoutingKind::one_expert, RoutingKind::hostile};
  c.routing = kKinds[below(5)];
  if (d.router.takes_lists()) {
    d.router.list_length = d.tokens == 0 ? 0 : below(300);
    d.router.assume_sorted = below(3) == 0;
  } else {
    d.router.top_k = 1 + below(std::min<std::int64_t>(d.router.experts, 8));
  }
  if (d.router.has_logits()) {
    d.router.order = static_cast<RouterOrder>(below(2));
    d.router.renormalize = below(2) == 0;
    c.outside_dlogits = below(2) == 0;
  }
  c.desc = d;
  return c;
}

TEST(Layers, RandomOnesAgreeWithTheOracle) {
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    const Case c = random_case(seed);
    const Report report = check_layer(c, kDevice);
    EXPECT_TRUE(report.pass()) << "seed " << seed << "\n" << report.text();
  }
}

// A list in any order gives the same bits as the list sorted by token, stably.
TEST(Layers, OrderOfListsDoesNotMatter) {
  for (const char* name : {"given/hostile-bias-swiglu", "given/hostile-bias-gelu"}) {
    const Problem p = make_problem(case_named(name, kTypes[0]));
    std::vector<std::size_t> order(p.lists.slots());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, {}, [&](std::size_t slot) { return p.lists.tokens[slot]; });
    Problem sorted = p;
    sorted.desc.router.assume_sorted = true;
    for (std::size_t s = 0; s < order.size(); ++s) {
      sorted.lists.tokens[s] = p.lists.tokens[order[s]];
      sorted.lists.experts[s] = p.lists.experts[order[s]];
      sorted.list_scores[s] = p.list_scores[order[s]];
    }
    const LayerRun a = run_layer(p, kDevice);
    LayerRun b = run_layer(sorted, kDevice);
    ASSERT_TRUE(a.status.ok() && b.status.ok());
    for (std::size_t s = 0; s < order.size(); ++s) {
      EXPECT_EQ(b.tensors.dscores[s], a.tensors.dscores[order[s]]);
    }
    b.routing = a.routing;  // what differs by design
    b.tensors.scores = a.tensors.scores;
    b.tensors.dscores = a.tensors.dscores;
    EXPECT_EQ(first_difference(a, b), "");
  }
}

// What the layer's own router makes, handed over at each step: the same bits from there on.
TEST(Layers, EveryInputGivesTheBitsOfTheRouterItReplaces) {
  for (const char* name : {"router/softmax_over_topk-ties", "router/topk_over_softmax-bias",
                           "router/topk_over_softmax_norm-e40_k8"}) {
    for (const DType type : kTypes) {
      Case c = case_named(name, type);
      c.outside_dlogits = false;
      Problem p = make_problem(c);
      const LayerRun own = run_layer(p, kDevice);
      ASSERT_TRUE(own.status.ok()) << own.status.message();
      p.router_w.clear();
      LayerRun by_logits;
      for (const RouterInput input :
           {RouterInput::logits, RouterInput::logits_and_ids, RouterInput::ids_and_weights}) {
        SCOPED_TRACE(std::string(name) + " " + sonicmoe::name(type) + " " + sonicmoe::name(input));
        p.desc.router.input = input;
        if (input == RouterInput::logits) p.logits = own.tensors.logits;
        if (p.desc.router.takes_ids()) p.lists = own.routing;
        if (input == RouterInput::ids_and_weights) {
          p.logits.clear();
          p.list_scores = own.tensors.scores;
          p.desc.router.order = RouterOrder::select_then_score;
          p.desc.router.renormalize = false;
        }
        LayerRun run = run_layer(p, kDevice);
        ASSERT_TRUE(run.status.ok()) << run.status.message();
        EXPECT_EQ(run.damage, "");
        if (input == RouterInput::logits) by_logits = run;
        if (input == RouterInput::logits_and_ids) {
          EXPECT_TRUE(same_values("dlogits", run.tensors.dlogits, by_logits.tensors.dlogits).pass);
        }
        EXPECT_EQ(run.tensors.dx, by_logits.tensors.dx);
        // The rest is the same, but for what only some inputs have.
        run.tensors.logits = own.tensors.logits;
        run.tensors.dx = own.tensors.dx;
        run.tensors.drouter_w = own.tensors.drouter_w;
        run.tensors.dlogits = own.tensors.dlogits;
        run.tensors.dscores = own.tensors.dscores;
        EXPECT_EQ(first_difference(run, own), "");
      }
    }
  }
}

Tensor rounded_to_type(Tensor values, DType type) {
  for (double& v : values) v = round_to(v, type);
  return values;
}

Tensor normal_numbers(std::size_t size, std::uint64_t stream) {
  const Random random(3, stream);
  Tensor values(size);
  for (std::size_t i = 0; i < size; ++i) values[i] = random.normal(i);
  return values;
}

/// `sum` is old + gradient, a sum in fp32 that is rounded once more if it is stored in 16 bits. So
/// where the gradient is zero, nothing changes.
void expect_added(const char* name, const Tensor& sum, const Tensor& old, const Tensor& gradient,
                  DType stored) {
  ASSERT_EQ(sum.size(), gradient.size()) << name;
  for (std::size_t i = 0; i < sum.size(); ++i) {
    const double exact = old[i] + gradient[i];
    const double slack = stored == DType::f32 ? 0 : 0x1p-24 * std::fabs(exact);
    ASSERT_GE(sum[i], round_to(exact - slack, stored)) << name << " " << i;
    ASSERT_LE(sum[i], round_to(exact + slack, stored)) << name << " " << i;
  }
}

// The two flags concern dw1 and dw2 and nothing else: the gradients of biases and router stay in
// the storage type and are overwritten (run_layer poisons them before).
TEST(Layers, WeightGradientsInFp32AndAccumulated) {
  std::vector<std::string> names = {"activation/swiglu-interleaved",
                                    "activation/swiglu-concatenated-bias",
                                    "activation/geglu-separate-bias",
                                    "activation/swiglu-transposed_interleaved-bias",
                                    "activation/relu_sq-bias",
                                    "router/topk_over_softmax-empty_ends",
                                    "router/softmax_over_topk-t0",
                                    "shape/long",
                                    "shape/empty_ends",
                                    "given/hostile-bias-gelu",
                                    "given/hostile-bias-transposed",
                                    "given/sentinels_only",
                                    "input/logits_and_ids-topk_over_softmax-hostile",
                                    "input/ids_and_weights-hostile-bias",
                                    "rounding/nearest-softmax_over_topk"};
  if (!kOnCpu)
    names.insert(names.end(),
                 {"tiles/separate", "tiles/transposed", "tiles/relu_sq", "tiles/long"});
  for (const std::string& name : names) {
    for (const DType type : kTypes) {
      Problem p = make_problem(case_named(name, type));
      const LayerRun plain = run_layer(p, kDevice);
      ASSERT_TRUE(plain.status.ok()) << plain.status.message();
      // Twice the same bits; whatever is not dw1 or dw2 has the bits of the plain run.
      const auto run = [&](bool f32, bool accumulate) {
        SCOPED_TRACE(name + " " + sonicmoe::name(type) + (f32 ? " f32" : "") +
                     (accumulate ? " accumulate" : ""));
        p.desc.experts.f32_weight_grads = f32;
        p.desc.experts.accumulate_weight_grads = accumulate;
        const LayerRun once = run_layer(p, kDevice);
        EXPECT_STREQ(once.status.message(), "");
        EXPECT_EQ(once.damage, "");
        EXPECT_EQ(first_difference(once, run_layer(p, kDevice)), "");
        LayerRun others = once;
        others.tensors.dw1 = plain.tensors.dw1;
        others.tensors.dw2 = plain.tensors.dw2;
        EXPECT_EQ(first_difference(others, plain), "");
        return once.tensors;
      };
      const LayerTensors wide = run(true, false);
      EXPECT_TRUE(same_values("dw1", rounded_to_type(wide.dw1, type), plain.tensors.dw1).pass)
          << name;
      EXPECT_TRUE(same_values("dw2", rounded_to_type(wide.dw2, type), plain.tensors.dw2).pass)
          << name;
      for (const DType stored : {type, DType::f32}) {
        p.dw1 = rounded_to_type(normal_numbers(wide.dw1.size(), 1), stored);
        p.dw2 = rounded_to_type(normal_numbers(wide.dw2.size(), 2), stored);
        const LayerTensors sums = run(stored == DType::f32, true);
        SCOPED_TRACE(name + " " + sonicmoe::name(type) + " to " + sonicmoe::name(stored));
        expect_added("dw1", sums.dw1, p.dw1, wide.dw1, stored);
        expect_added("dw2", sums.dw2, p.dw2, wide.dw2, stored);
      }
    }
  }
}

// dH over H: the same bits as in the workspace, which is smaller by it. (run_layer passes preact.)
TEST(Layers, DpreactMayTakeThePlaceOfPreact) {
  std::vector<std::string> names = {
      "activation/swiglu-interleaved", "activation/geglu-separate-bias",
      "activation/swiglu-transposed",  "activation/swiglu-transposed_interleaved",
      "activation/relu_sq-bias",       "router/topk_over_softmax-empty_ends",
      "router/softmax_over_topk-t0",   "shape/long",
      "given/hostile-bias-gelu",       "given/tile_counts",
      "given/sentinels_only",          "rounding/nearest-softmax_over_topk"};
  if (!kOnCpu)
    names.insert(names.end(),
                 {"tiles/separate", "tiles/transposed", "tiles/relu_sq", "tiles/long"});
  for (const std::string& name : names) {
    for (const DType type : kTypes) {
      SCOPED_TRACE(name + " " + sonicmoe::name(type));
      Problem p = make_problem(case_named(name, type));
      const LayerRun apart = run_layer(p, kDevice);
      const std::size_t bytes = make_plan(p.desc, kDevice).value().backward_workspace_bytes();
      p.desc.experts.dpreact_in_workspace = false;
      const LayerRun over = run_layer(p, kDevice);
      ASSERT_STREQ(over.status.message(), "");
      EXPECT_EQ(over.damage, "");
      EXPECT_EQ(first_difference(over, apart), "");
      const LayerPlan plan = make_plan(p.desc, kDevice).value();
      EXPECT_GE(bytes, plan.backward_workspace_bytes() + plan.saved_bytes().preact);
    }
  }
}

// Backward may be asked for any of these gradients: they have the bits that they have among all,
// and what is accumulated, too.
TEST(Layers, OnlyWantedGradientsAreMade) {
  std::vector<std::string> names = {"activation/swiglu-separate-bias",
                                    "activation/swiglu-transposed_interleaved-bias",
                                    "router/topk_over_softmax-empty_ends",
                                    "router/topk_over_softmax-dlogits",
                                    "router/softmax_over_topk-dlogits",
                                    "router/softmax_over_topk-t0",
                                    "shape/long",
                                    "given/hostile-bias-gelu",
                                    "given/sentinels_only",
                                    "input/logits-topk_over_softmax",
                                    "input/ids_and_weights-hostile-bias",
                                    "rounding/nearest-softmax_over_topk"};
  if (!kOnCpu)
    names.insert(names.end(),
                 {"tiles/separate", "tiles/transposed", "tiles/relu_sq", "tiles/long"});
  for (const std::string& name : names) {
    Problem p = make_problem(case_named(name, kTypes[0]));
    for (const bool accumulate : {false, true}) {
      p.desc.experts.accumulate_weight_grads = accumulate;
      p.desc.experts.dpreact_in_workspace = !accumulate;
      p.wanted = {};
      if (accumulate) {
        p.dw1 = rounded_to_type(normal_numbers(p.w1.size(), 1), kTypes[0]);
        p.dw2 = rounded_to_type(normal_numbers(p.w2.size(), 2), kTypes[0]);
      }
      const LayerRun all = run_layer(p, kDevice);
      ASSERT_STREQ(all.status.message(), "") << name;
      for (int wanted = 0; wanted < 15; ++wanted) {
        SCOPED_TRACE(name + " " + std::to_string(wanted));
        p.wanted = {.dx = (wanted & 1) != 0,
                    .drouter_w = (wanted & 2) != 0,
                    .dw1 = (wanted & 4) != 0,
                    .dw2 = (wanted & 8) != 0};
        LayerRun some = run_layer(p, kDevice);
        ASSERT_STREQ(some.status.message(), "");
        EXPECT_EQ(some.damage, "");
        // What was not wanted is empty.
        if (!p.wanted.dx) some.tensors.dx = all.tensors.dx;
        if (!p.wanted.drouter_w) some.tensors.drouter_w = all.tensors.drouter_w;
        if (!p.wanted.dw1) some.tensors.dw1 = all.tensors.dw1;
        if (!p.wanted.dw2) some.tensors.dw2 = all.tensors.dw2;
        EXPECT_EQ(first_difference(some, all), "");
      }
    }
  }
}

// The oracle rounds where a backend must and nowhere else, so that a backend's error is its error
// up to the order of fp32 sums: nothing is rounded twice or too early.
TEST(Layers, Bf16ErrorIsThatOfTheDocumentedRoundings) {
  for (const NamedActivation& activation : tested_activations()) {
    SCOPED_TRACE(activation.name);
    Case c = *find_case("shape/large/bf16");
    c.desc.experts.activation = activation.spec;
    const Problem p = make_problem(c);
    const LayerRun run = run_layer(p, kDevice);
    ASSERT_TRUE(run.status.ok()) << run.status.message();
    const auto layer = [&](Precision precision) {
      LayerTensors out = oracle_forward(p, run.routing, precision);
      oracle_backward(p, run.routing, precision, &out);
      return out;
    };
    const LayerTensors exact = layer(Precision::exact), rounded = layer(Precision::rounded);
    // Beyond a limit the slope is 0: the order of a sum may round an H to the limit's other side,
    // and an element of the gradient comes or goes.
    const double factor = std::isfinite(activation.spec.limit) ? 1.05 : 1.01;
    for (const auto member : {&LayerTensors::o, &LayerTensors::dx, &LayerTensors::dw1,
                              &LayerTensors::dw2, &LayerTensors::drouter_w}) {
      EXPECT_LE(error_norm(run.tensors.*member, exact.*member).error,
                factor * error_norm(rounded.*member, exact.*member).error);
    }
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
