#include "core/kernel.h"
#include "cuda/sm90/tile_choice.h"
#include "testkit/run.h"
#include "tests/cuda/replay.h"
#include "tests/test_names.h"

namespace sonicmoe::testkit {
namespace {

TEST(Graph, ReplaysWithOtherRouting) {
  for (const DType type : kTypes) {
    for (const char* name :
         {"activation/swiglu-interleaved-bias", "activation/geglu-separate",
          "router/topk_over_softmax-bias", "given/hostile", "given/hostile-sorted",
          "router/sqrt_softplus-dlogits", "router/deepseek_v3-f32_router",
          "router/deepseek_v3-f32_logits-logits", "router/f32_logits", "router/f32_router",
          "rounding/stochastic-topk_over_softmax", "shape/large", "tiles/e60", "sums/given",
          "input/logits-softmax_over_topk-dlogits",
          "input/logits_and_ids-topk_over_softmax-hostile", "input/ids_and_weights-hostile-bias",
          "recompute/separate-bias", "recompute/given-hostile"}) {
      expect_replays(case_named(name, type));
    }
  }
}

TEST(Graph, ReplaysExpertsAloneWithOtherCounts) {
  for (const DType type : kTypes) {
    for (const char* name :
         {"rows/none-bias-hostile", "rows/before_down", "rows/tile_counts",
          "rows/after_down-bias-hostile", "rows/e288", "recompute/rows-bias-hostile"}) {
      expect_rows_replay(case_named(name, type));
    }
  }
}

// With dynamic scheduling (ExactDynamic), whose counters the layer has to reset each time: a call
// without a graph, on poison, agrees with the oracle, and replays on poison agree with such calls.
TEST(Graph, SchedulesDynamicallyAgain) {
  if (!made_for_hopper()) GTEST_SKIP() << "the portable kernels schedule in one way";
  Case c = case_named("given/hostile", DType::bf16);
  c.desc.tokens = 300;
  c.desc.router.experts = 600;
  c.desc.router.list_length = 1000;
  const double rounds =
      cuda::rounds(device_traits(kDevice), c.desc.rows(), c.desc.router.experts, 1);
  ASSERT_TRUE(cuda::schedules_dynamically(rounds, 32, true, false));
  for (const std::string kernel : {"up_proj.128x256", "down_proj.128x256",
                                   "down_proj_dgrad.128x256", "up_proj_dgrad.128x256"}) {
    const bool gathers = kernel.starts_with("up_proj.") || kernel.starts_with("down_proj_dgrad");
    c.desc.experts.hidden = gathers ? 2048 : 8;
    c.desc.experts.intermediate = gathers ? 8 : 1024;
    Options options;
    options.kernel = "sm90." + kernel;
    const Report report = check_layer(c, kDevice, options);
    EXPECT_TRUE(report.pass()) << report.text();
    expect_replays(c, options.kernel);
    // The experts alone have counters of their own.
    Case rows = as_rows(c, ScoreAt::before_down);
    rows.desc.experts.zero_tail = true;
    const Report alone = check_layer(rows, kDevice, options);
    EXPECT_TRUE(alone.pass()) << alone.text();
    expect_rows_replay(rows, options.kernel);
    if (!gathers) continue;
    // up_proj_recompute and dgrad reset their counters in the same scratch.
    Case again = c;
    again.desc.experts.recompute = Recompute::preact;
    const Report made_again = check_layer(again, kDevice, options);
    EXPECT_TRUE(made_again.pass()) << made_again.text();
    expect_replays(again, options.kernel);
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
