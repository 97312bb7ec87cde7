#include "cuda/sm90/tile_choice.h"
#include "tests/cuda/replay.h"

namespace sonicmoe::verify {
namespace {

TEST(Graph, ReplaysWithOtherRouting) {
  for (const DType type : kTypes) {
    for (const char* name :
         {"activation/swiglu-interleaved-bias", "activation/geglu-separate",
          "router/topk_over_softmax-bias", "given/hostile", "given/hostile-sorted",
          "rounding/stochastic-topk_over_softmax", "shape/large", "tiles/e60", "sums/given"}) {
      expect_replays(case_named(name, type));
    }
  }
}

// With tiles that are dealt (ExactDealt), whose counter every replay has to clear.
TEST(Graph, DealsAgain) {
  Case c = case_named("given/hostile", DType::bf16);
  c.desc.tokens = 300;
  c.desc.experts = 600;
  c.desc.list_length = 1000;
  for (const bool gathers : {true, false}) {
    c.desc.hidden = gathers ? 2048 : 8;
    c.desc.intermediate = gathers ? 8 : 1024;
    ASSERT_TRUE(cuda::deals(cuda::rounds(c.desc.rows(), c.desc.experts, 1), 32, gathers));
    expect_replays(c, gathers ? "cuda.up_proj.128x256" : "cuda.up_proj_dgrad.128x256");
  }
}

}  // namespace
}  // namespace sonicmoe::verify
