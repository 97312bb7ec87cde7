// What fuzzing found, so that it stays found. Some of it shows only under the sanitizers.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "sonicmoe/ops.h"

namespace sonicmoe {
namespace {

// tokens * top_k was computed, and overflowed, although tokens had been refused already.
TEST(FuzzFinds, ProductsOfRefusedSizes) {
  const auto aggregate = make_plan(
      AggregateDesc{.tokens = INT64_MIN, .rows = 1, .hidden = 8, .top_k = 96, .dtype = DType::f32});
  EXPECT_STREQ(aggregate.status().message(),
               "tokens: got -9223372036854775808, allowed: 0 to 2147483647");
  const auto score_grad =
      make_plan(ScoreGradDesc{{.experts = 8, .top_k = 2}, INT64_MAX, 1, DType::f32});
  EXPECT_STREQ(score_grad.status().message(),
               "tokens: got 9223372036854775807, allowed: 0 to 2147483647");
}

TEST(FuzzFinds, RowsOfRouterModesAreExact) {
  const auto plan = make_plan(ScoreGradDesc{{.experts = 8, .top_k = 2}, 5, 11, DType::f32});
  EXPECT_STREQ(plan.status().message(), "rows: got 11, allowed: 10");
}

// A zero byte after a whole name ended the comparison early, and the byte behind the name was read.
TEST(FuzzFinds, ZeroBytesInNamesOfKernels) {
  for (const std::size_t length : {3, 12, 13, 14, 20, 200}) {
    std::string kernel = "cpu.metadata";
    kernel.resize(length, '\0');
    const auto plan =
        make_plan(MetadataDesc{.tokens = 5, .experts = 8, .top_k = 2}, {}, {.kernel = kernel});
    EXPECT_EQ(plan.ok(), length <= 12) << length;
    if (plan.ok()) continue;
    EXPECT_STREQ(plan.status().message(),
                 "kernel: got a name with a zero byte, allowed: a name or backend of "
                 "sonicmoe::kernels()");
  }
  const std::string backend("cpu\0", 4);
  EXPECT_FALSE(
      make_plan(MetadataDesc{.tokens = 5, .experts = 8, .top_k = 2}, {}, {.kernel = backend}).ok());
}

}  // namespace
}  // namespace sonicmoe
