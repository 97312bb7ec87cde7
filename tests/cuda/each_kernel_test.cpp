// Every compiled kernel of the matrix products, forced one by one, inside whole layers: the fp64
// oracle, the same bits again, a graph with other routing. (tests/ops/gemm_exact_test.cpp has their
// exact integers.)
#include <string>
#include <vector>

#include "sonicmoe/info.h"
#include "testkit/run.h"
#include "tests/cuda/replay.h"
#include "tests/test_names.h"

namespace sonicmoe::testkit {
namespace {

/// Whole and partial tiles along every axis, experts without rows, sentinels, all layouts, biases,
/// gates and none.
constexpr const char* kCases[] = {"tiles/bias",
                                  "tiles/relu_sq",
                                  "tiles/separate",
                                  "tiles/transposed",
                                  "tiles/transposed_interleaved-bias",
                                  "tiles/relu_sq-transposed",
                                  "given/hostile-bias-swiglu",
                                  "given/tile_counts",
                                  "shape/empty_ends",
                                  "activation/swiglu-concatenated-bias",
                                  "router/topk_over_softmax_norm-one_expert"};
constexpr const char* kReplayed[] = {"tiles/separate", "tiles/transposed_interleaved-bias",
                                     "given/hostile-bias-swiglu",
                                     "activation/swiglu-concatenated-bias"};

class EachKernel : public testing::TestWithParam<KernelInfo> {
 protected:
  static Options forced() {
    Options options;
    options.kernel = GetParam().name;
    return options;
  }

  /// f(case) for each that this kernel can run, at least `least` of each type: whole layers, and
  /// their experts alone on contiguous rows. The plan names the kernel.
  template <class Names, class F>
  void for_cases(const Names& names, std::size_t least, F&& f) {
    for (const DType type : kTypes) {
      std::size_t runs = 0;
      for (const auto& name : names) {
        constexpr ScoreAt kScores[] = {ScoreAt::before_down, ScoreAt::none, ScoreAt::after_down};
        const Case& layer = case_named(name, type);
        const Case rows = as_rows(layer, kScores[runs % std::size(kScores)]);
        for (const Case& c : {layer, rows}) {
          const Result<std::string> plan = explain(c.desc, kDevice, forced());
          if (!plan.ok()) {
            ASSERT_EQ(plan.status().code(), StatusCode::unsupported) << plan.status().message();
            continue;
          }
          ASSERT_NE(plan->find(GetParam().name + ": runs"), std::string::npos) << plan.value();
          SCOPED_TRACE(std::string(name) + ", " + to_string(c.desc));
          f(c);
          if (HasFatalFailure()) return;
          ++runs;
        }
      }
      EXPECT_GE(runs, least) << name(type);
    }
  }
};

TEST_P(EachKernel, AgreesWithTheOracle) {
  for_cases(kCases, std::size(kCases) / 2, [](const Case& c) {
    const Report report = check_layer(c, kDevice, forced());
    EXPECT_TRUE(report.pass()) << report.text();
  });
}

/// In wide tiles each activation is a kernel of its own.
class EachActivation : public EachKernel {};

TEST_P(EachActivation, AgreesWithTheOracle) {
  const std::vector<std::string> names = activation_case_names();
  for_cases(names, names.size(), [](const Case& c) {
    const Report report = check_layer(c, kDevice, forced());
    EXPECT_TRUE(report.pass()) << report.text();
  });
}

TEST_P(EachKernel, SameBitsAgain) {
  for_cases(kCases, std::size(kCases) / 2, [](const Case& c) {
    const Problem problem = make_problem(c);
    const LayerRun first = run_layer(problem, kDevice, forced());
    ASSERT_TRUE(first.status.ok()) << first.status.message();
    EXPECT_EQ(first_difference(first, run_layer(problem, kDevice, forced())), "");
  });
}

TEST_P(EachKernel, ReplaysWithOtherRouting) {
  for_cases(kReplayed, 2, [](const Case& c) {
    if (c.desc.experts.gathers()) {
      expect_replays(c, GetParam().name);
    } else {
      expect_rows_replay(c, GetParam().name);
    }
  });
}

std::set<std::string> products() {
  std::set<std::string> ops = {"router_gemm"};
  for (const GemmOp op : kGemmOps) ops.insert(name(op));
  return ops;
}

INSTANTIATE_TEST_SUITE_P(Kernels, EachKernel, testing::ValuesIn(kernels_of(kDevice, products())),
                         [](const auto& param) { return label_of(param.param.name); });
INSTANTIATE_TEST_SUITE_P(Kernels, EachActivation,
                         testing::ValuesIn(kernels_of(kDevice, {"up_proj", "down_proj_dgrad"})),
                         [](const auto& param) { return label_of(param.param.name); });

}  // namespace
}  // namespace sonicmoe::testkit
