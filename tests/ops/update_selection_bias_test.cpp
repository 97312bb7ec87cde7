// The selection bias after a step, bit for bit: each expert's count beside the mean, exactly.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "sonicmoe/ops.h"
#include "testkit/buffer.h"
#include "testkit/device_memory.h"
#include "testkit/inputs.h"
#include "tests/device.h"

namespace sonicmoe::testkit {
namespace {

using Ints = std::vector<std::int32_t>;
using Floats = std::vector<float>;
constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();

Floats right(const Ints& counts, Floats bias, float rate) {
  long double all = 0;  // 64 bits of mantissa: sums of 2^16 counts are exact
  for (const std::int32_t count : counts) all += count;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    const long double more = static_cast<long double>(counts.size()) * counts[e] - all;
    if (more != 0) bias[e] = bias[e] + (more < 0 ? rate : -rate);
  }
  return bias;
}

Floats some_bias(std::size_t experts) {
  Floats bias(experts);
  for (std::size_t e = 0; e < experts; ++e) bias[e] = 0.01f * static_cast<float>(e % 37) - 0.1f;
  return bias;
}

Floats read(const float* from, std::size_t experts) {
  Floats values(experts);
  copy(kDevice, values.data(), from, 4 * experts);
  return values;
}

void expect_same_bits(const Floats& got, const Floats& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t e = 0; e < got.size(); ++e) {
    ASSERT_EQ(std::memcmp(&got[e], &want[e], 4), 0) << "expert " << e << ": " << got[e];
  }
}

/// Two steps, the second one with the bias of the first.
void expect_right(const Ints& counts, float rate = 1e-3f) {
  SCOPED_TRACE("E " + std::to_string(counts.size()));
  const auto experts = static_cast<std::int64_t>(counts.size());
  const auto plan = make_plan(UpdateSelectionBiasDesc{experts}, kDevice);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  Arena arena(kDevice);
  UpdateSelectionBiasArgs args{.counts = arena.input("counts", counts),
                               .selection_bias = arena.output_float("bias", counts.size()),
                               .rate = rate};
  Floats want = some_bias(counts.size());
  copy(kDevice, args.selection_bias, want.data(), 4 * counts.size());
  for (int step = 0; step < 2; ++step) {
    ASSERT_TRUE(plan.value().run(args).ok());
    ASSERT_TRUE(synchronize(kDevice).ok());
    want = right(counts, want, rate);
    expect_same_bits(read(args.selection_bias, counts.size()), want);
  }
  EXPECT_EQ(arena.damage(), "");
}

Ints random_counts(std::size_t experts, std::uint64_t seed) {
  const Random random(seed, 3);
  Ints counts(experts);
  for (std::size_t e = 0; e < experts; ++e) {
    counts[e] = static_cast<std::int32_t>(random.below(e, 5));  // many have the mean
  }
  return counts;
}

TEST(UpdateSelectionBias, MovesEachExpertTowardsTheMean) {
  for (const std::size_t experts : {1, 2, 5, 128, 1023, 1024, 1025, 65536}) {
    expect_right(random_counts(experts, experts));
    expect_right(Ints(experts, 7));  // all have the mean
  }
}

TEST(UpdateSelectionBias, ComparesExactly) {
  expect_right({5, 5, 4});  // mean 4.67
  expect_right({0, 0, 0, 0});
  expect_right({-3, 3, 0});
  Ints close(3000, kMost);  // a mean in fp32 would be theirs
  close[17] -= 1;
  expect_right(close);
  expect_right(Ints(65536, kMost));
  expect_right({kMost, -kMost - 1, kMost});
}

TEST(UpdateSelectionBias, RatesFromZeroOn) {
  for (const float rate : {0.0f, 1e-3f, 3e38f}) expect_right({1, 2, 4, 1}, rate);
}

TEST(UpdateSelectionBias, ReplaysWithOtherCounts) {
  if (kOnCpu) return;  // CPU calls are no graph
  constexpr std::size_t kExperts = 300;
  const auto plan = make_plan(UpdateSelectionBiasDesc{kExperts}, kDevice);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  Arena arena(kDevice);
  Ints counts = random_counts(kExperts, 1);
  UpdateSelectionBiasArgs args{.counts = arena.input("counts", counts),
                               .selection_bias = arena.output_float("bias", kExperts),
                               .rate = 0.25f};
  Floats want = some_bias(kExperts);
  copy(kDevice, args.selection_bias, want.data(), 4 * kExperts);
  const OwnStream stream(kDevice);
  Graph::begin(kDevice, stream);
  const Status status = plan.value().run(args, {}, stream);
  const Graph graph(kDevice, stream);
  ASSERT_TRUE(status.ok()) << status.message();
  for (std::uint64_t step = 2; step < 5; ++step) {
    counts = random_counts(kExperts, step);
    arena.replace("counts", std::as_bytes(std::span(counts)));
    graph.launch(stream);
    ASSERT_TRUE(synchronize(kDevice).ok());
    want = right(counts, want, args.rate);
    expect_same_bits(read(args.selection_bias, kExperts), want);
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
