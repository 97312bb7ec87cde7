// The whole layer against the oracle, over the case list.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/device.h"
#include "tests/test_names.h"
#include "verify/run.h"

namespace sonicmoe::verify {
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
  d.hidden = 8 * (1 + below(14));
  d.intermediate = 8 * (1 + below(14));
  d.experts = 1 + below(below(3) == 0 ? 40 : 9);
  d.dtype = kTypes[below(2)];
  d.activation = static_cast<Activation>(below(9));
  d.w1_layout = static_cast<W1Layout>(below(is_glu(d.activation) ? 3 : 2));
  d.bias = below(2) == 0;
  d.inference = below(8) == 0;
  d.router = static_cast<RouterMode>(below(3));
  Case c;
  c.name = "random";
  c.seed = seed;
  constexpr RoutingKind kKinds[] = {RoutingKind::random, RoutingKind::ties, RoutingKind::empty_ends,
                                    RoutingKind::one_expert, RoutingKind::hostile};
  c.routing = kKinds[below(5)];
  if (d.router == RouterMode::given) {
    d.list_length = d.tokens == 0 ? 0 : below(300);
    d.assume_sorted = below(3) == 0;
  } else {
    d.top_k = 1 + below(std::min<std::int64_t>(d.experts, 8));
    d.norm_topk_probs = below(2) == 0;
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
    sorted.desc.assume_sorted = true;
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

// The oracle rounds where a backend must and nowhere else, so that a backend's error is its error
// up to the order of fp32 sums: nothing is rounded twice or too early.
TEST(Layers, Bf16ErrorIsThatOfTheDocumentedRoundings) {
  const Case c = *find_case("shape/large/bf16");
  const Problem p = make_problem(c);
  const LayerRun run = run_layer(p, kDevice);
  ASSERT_TRUE(run.status.ok()) << run.status.message();
  const auto layer = [&](Precision precision) {
    LayerTensors out = oracle_forward(p, run.routing, precision);
    oracle_backward(p, run.routing, precision, &out);
    return out;
  };
  const LayerTensors exact = layer(Precision::exact), rounded = layer(Precision::rounded);
  for (const auto member : {&LayerTensors::o, &LayerTensors::dx, &LayerTensors::dw1,
                            &LayerTensors::dw2, &LayerTensors::drouter_w}) {
    EXPECT_LE(error_norm(run.tensors.*member, exact.*member).error,
              1.01 * error_norm(rounded.*member, exact.*member).error);
  }
}

}  // namespace
}  // namespace sonicmoe::verify
