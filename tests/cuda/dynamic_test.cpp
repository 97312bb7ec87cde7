// Bit for bit, too: tiles that are scheduled dynamically.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "core/kernel.h"
#include "cuda/sm90/tile_choice.h"
#include "testkit/buffer.h"
#include "tests/ops/gemm_exact.h"
#include "tests/test_names.h"

namespace sonicmoe::testkit {
namespace {

DeviceTraits traits() { return device_traits(kDevice); }

// Where sums are long and tiles are many, CUDA schedules the tiles of 256 columns dynamically.
// Pairs of CTAs draw each tile once, except for a pair's first tile; at its end each pair draws one
// number past the last tile.
struct Scheduled {
  KernelInfo kernel;
  RowSource source;
  std::string name;  ///< the kernel's, and the source unless gathered
};
class ExactDynamic : public testing::TestWithParam<Scheduled> {
 protected:
  static const std::string& kernel() { return GetParam().kernel.name; }
  static GemmOp op() { return op_of(GetParam().kernel); }
  struct Operands {
    std::int64_t hidden, intermediate, experts;
    int across;  ///< n blocks: tiles of an m block
    std::int64_t tiles = 0;
  };
  /// Is operand A x or dO, whose rows may be gathered?
  bool reads_tokens() const { return op() == GemmOp::up_proj || op() == GemmOp::down_proj_dgrad; }
  bool gathers() const { return reads_tokens() && GetParam().source == RowSource::gathered; }
  static LayerDesc layer_for(const Shape& shape, DType dtype) {
    LayerDesc desc = layer_of(shape, dtype);
    desc.experts.row_source = GetParam().source;
    if (!desc.experts.gathers()) desc.experts.score_at = ScoreAt::before_down;
    return desc;
  }
  /// With as few k blocks as dynamic scheduling takes with a given counter.
  Operands shortest() const {
    if (reads_tokens()) return {gathers() ? 1536 : 768, 8, 600, 1};
    return {8, op() == GemmOp::down_proj ? 768 : 384, 600, 1};
  }
  /// Operands with as many tiles for a pair of CTAs as `least`, for a counter that is `given` or
  /// one in the workspace. Sets o->tiles.
  std::pair<LayerDesc, HandedInputs> operands(Operands* o, int least, bool given) {
    Shape shape = {400, o->hidden, o->intermediate, o->experts, 0};
    const int every = o->across == 1 ? 20 : 60;
    const Random random(1, 2);
    const auto [lists, first] = counted(
        shape.experts, [&](auto e) { return e % every == 0 ? 300 : static_cast<int>(e % 4); },
        [&](auto i, auto) { return random.below(i, shape.tokens); });
    shape.list_length = first.back();
    const std::int64_t sums = reads_tokens()              ? shape.hidden
                              : op() == GemmOp::down_proj ? shape.intermediate
                                                          : 2 * shape.intermediate;
    EXPECT_TRUE(cuda::schedules_dynamically(
        cuda::rounds(traits(), shape.list_length, shape.experts, o->across),
        static_cast<int>(sums / 64), gathers(), given));
    for (std::size_t e = 0; e + 1 < first.size(); ++e) {
      o->tiles += cuda::pair_tiles(cuda::tiles(first[e + 1] - first[e], 128), o->across);
    }
    EXPECT_GT(o->tiles, least * cuda::pairs_of(traits()));
    const LayerDesc desc = layer_for(shape, DType::bf16);
    return {desc, integer_inputs(desc, lists, 3)};
  }
};

TEST_P(ExactDynamic, AllTiles) {
  // More tiles for a pair of CTAs than there are places for numbers (16); pairs that split along
  // n, with a tile for each CTA and with a tile for one.
  std::vector<Operands> all = {{8, 1024, 1400, 1}, {520, 512, 270, 3}};
  if (op() == GemmOp::down_proj) all[1].intermediate = 1024;
  if (reads_tokens())
    all = {{2048, 8, 1400, 1}, {2048, op() == GemmOp::up_proj ? 264 : 520, 270, 3}};
  for (Operands& o : all) {
    const auto [desc, inputs] = operands(&o, o.across == 1 ? 17 : 4, false);
    const HandedRun run = expect_exact(op(), desc, inputs, kernel());
    std::int32_t drawn = 0;  // the last word
    ASSERT_GE(run.workspace.size(), sizeof drawn);
    std::memcpy(&drawn, run.workspace.data() + run.workspace.size() - sizeof drawn, sizeof drawn);
    EXPECT_EQ(drawn, o.tiles);
  }
}

TEST_P(ExactDynamic, CountsInTheGivenCounter) {
  Operands o = shortest();
  auto [desc, inputs] = operands(&o, 7, true);
  inputs.tile_counter = 0;
  const HandedRun run = expect_exact(op(), desc, inputs, kernel());
  EXPECT_EQ(run.tile_counter, o.tiles);
  const GuardedBuffer poison(run.workspace.size());  // nothing else in the workspace
  EXPECT_TRUE(std::ranges::equal(run.workspace, poison.bytes()));
}

// A count that no operation leaves: every pair of CTAs has the one tile that it does not draw.
TEST_P(ExactDynamic, WrongCountLeadsNowhere) {
  Operands o = shortest();
  auto [desc, inputs] = operands(&o, 7, true);
  for (const std::int32_t wrong : {-1'000'000, INT32_MAX - 5, INT32_MIN}) {
    SCOPED_TRACE(wrong);
    inputs.tile_counter = wrong;
    const HandedRun run = run_kernel(op(), desc, inputs, kernel());
    ASSERT_EQ(run.failure, "");
    const std::uint32_t drawn =
        static_cast<std::uint32_t>(run.tile_counter) - static_cast<std::uint32_t>(wrong);
    ASSERT_GT(drawn, 0u);
    ASSERT_LE(drawn, static_cast<std::uint32_t>(cuda::pairs_of(traits())));
  }
}

// Experts with every number of rows around a tile's 128 and a consumer's 64, so that pairs of CTAs
// split tiles along n. Statically with one tile across and with three, and one expert that has more
// pairs of m blocks than a group; dynamically in fp16 and with a bias.
TEST_P(ExactDynamic, EveryNumberOfRows) {
  static constexpr int kCounts[] = {0,   1,   63,  64,  65,  127, 128, 129, 191, 192, 193,  255,
                                    256, 257, 319, 320, 321, 383, 384, 385, 448, 449, 2500, 700};
  struct Case {
    int across;
    bool dynamic;
    std::int64_t experts;
    DType dtype;
  };
  for (const Case& c : {Case{1, false, 100, DType::f16}, Case{3, false, 100, DType::bf16},
                        Case{1, true, 480, DType::f16}}) {
    SCOPED_TRACE(std::to_string(c.across) + (c.dynamic ? " dynamic" : " static"));
    const Operands sums = shortest();
    Shape shape = {400, 72, 72, c.experts, 0};
    const std::int64_t width = 256 * (c.across - 1) + 8;
    (reads_tokens() ? shape.intermediate : shape.hidden) =
        op() == GemmOp::up_proj ? width / 2 + 4 : width;
    if (c.dynamic)
      (reads_tokens() ? shape.hidden : shape.intermediate) =
          std::max(sums.hidden, sums.intermediate);
    const auto rows_of = [&](auto e) {
      // One expert with many rows; the CPU computes them all, too.
      const int rows = kCounts[e % std::size(kCounts)];
      return rows == 2500 && (c.across == 1 || e >= 24) ? 200 : rows;
    };
    const Random random(3, c.across);
    const auto [lists, first] = counted(
        shape.experts, rows_of, [&](auto i, auto) { return random.below(i, shape.tokens); });
    shape.list_length = first.back();
    std::int64_t tiles = 0;
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      tiles += cuda::pair_tiles(cuda::tiles(rows_of(e), 128), c.across);
    }
    LayerDesc desc = layer_for(shape, c.dtype);
    desc.experts.bias = c.dynamic;
    HandedInputs inputs = integer_inputs(desc, lists, 3);
    inputs.tile_counter = 0;
    const HandedRun run = expect_exact(op(), desc, inputs, kernel());
    EXPECT_EQ(run.tile_counter, c.dynamic ? tiles : 0);
    if (HasFatalFailure()) return;
  }
}

/// Of CUDA, with tiles that may be scheduled dynamically; the operations that differ with
/// contiguous rows for those, too.
std::vector<Scheduled> dynamic_kernels() {
  constexpr GemmOp kOps[] = {GemmOp::up_proj, GemmOp::down_proj, GemmOp::down_proj_dgrad,
                             GemmOp::up_proj_dgrad};
  std::vector<Scheduled> all;
  for (const KernelInfo& kernel : kernels_for(kOps)) {
    if (!kernel.name.starts_with("sm90.") || !kernel.name.ends_with(".128x256")) continue;
    all.push_back({kernel, RowSource::gathered, kernel.name});
    if (op_of(kernel) == GemmOp::up_proj_dgrad) continue;
    all.push_back({kernel, RowSource::contiguous, kernel.name + ".contiguous"});
  }
  return all;
}

TEST(ExactDynamicKernels, AreThoseMadeForHopper) {
  EXPECT_EQ(dynamic_kernels().empty(), !made_for_hopper());
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ExactDynamic);
INSTANTIATE_TEST_SUITE_P(Kernels, ExactDynamic, testing::ValuesIn(dynamic_kernels()), kLabel);

}  // namespace
}  // namespace sonicmoe::testkit
