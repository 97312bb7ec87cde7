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

}  // namespace
}  // namespace sonicmoe::verify
