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

namespace sonicmoe::testkit {
namespace {

DeviceTraits traits() { return device_traits(kDevice); }

// Where sums are long and tiles are many, CUDA schedules the tiles of 256 columns dynamically.
// Pairs of CTAs draw each tile once, except for a pair's first tile; at its end each pair draws one
// number past the last tile.
class ExactDynamic : public testing::TestWithParam<KernelInfo> {
 protected:
  struct Operands {
    std::int64_t hidden, intermediate, experts;
    int across;  ///< n blocks: tiles of an m block
    std::int64_t tiles = 0;
  };
  bool gathers() const {
    return op_of(GetParam()) == GemmOp::up_proj || op_of(GetParam()) == GemmOp::down_proj_dgrad;
  }
  /// With as few k blocks as dynamic scheduling takes with a given counter.
  Operands shortest() const {
    if (gathers()) return {1536, 8, 600, 1};
    return {8, op_of(GetParam()) == GemmOp::down_proj ? 768 : 384, 600, 1};
  }
  /// Operands with as many tiles for a pair of CTAs as `least`, for a counter that is `given` or
  /// one in the workspace. Sets o->tiles.
  std::pair<LayerDesc, HandedInputs> operands(Operands* o, int least, bool given) {
    const GemmOp op = op_of(GetParam());
    Shape shape = {400, o->hidden, o->intermediate, o->experts, 0};
    const int every = o->across == 1 ? 20 : 60;
    const Random random(1, 2);
    const auto [lists, first] = counted(
        shape.experts, [&](auto e) { return e % every == 0 ? 300 : static_cast<int>(e % 4); },
        [&](auto i, auto) { return random.below(i, shape.tokens); });
    shape.list_length = first.back();
    const std::int64_t sums = gathers()                 ? shape.hidden
                              : op == GemmOp::down_proj ? shape.intermediate
                                                        : 2 * shape.intermediate;
    EXPECT_TRUE(cuda::schedules_dynamically(
        cuda::rounds(traits(), shape.list_length, shape.experts, o->across),
        static_cast<int>(sums / 64), gathers(), given));
    for (std::size_t e = 0; e + 1 < first.size(); ++e) {
      o->tiles += cuda::pair_tiles(cuda::tiles(first[e + 1] - first[e], 128), o->across);
    }
    EXPECT_GT(o->tiles, least * cuda::pairs_of(traits()));
    const LayerDesc desc = layer_of(shape, DType::bf16);
    return {desc, integer_inputs(desc, lists, 3)};
  }
};

TEST_P(ExactDynamic, AllTiles) {
  const GemmOp op = op_of(GetParam());
  // More tiles for a pair of CTAs than there are places for numbers (16); pairs that split along
  // n, with a tile for each CTA and with a tile for one.
  std::vector<Operands> all = {{8, 1024, 1400, 1}, {520, 512, 270, 3}};
  if (op == GemmOp::down_proj) all[1].intermediate = 1024;
  if (gathers()) all = {{2048, 8, 1400, 1}, {2048, op == GemmOp::up_proj ? 264 : 520, 270, 3}};
  for (Operands& o : all) {
    const auto [desc, inputs] = operands(&o, o.across == 1 ? 17 : 4, false);
    const HandedRun run = expect_exact(op, desc, inputs, GetParam().name);
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
  const HandedRun run = expect_exact(op_of(GetParam()), desc, inputs, GetParam().name);
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
    const HandedRun run = run_kernel(op_of(GetParam()), desc, inputs, GetParam().name);
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
  const GemmOp op = op_of(GetParam());
  for (const Case& c : {Case{1, false, 100, DType::f16}, Case{3, false, 100, DType::bf16},
                        Case{1, true, 480, DType::f16}}) {
    SCOPED_TRACE(std::to_string(c.across) + (c.dynamic ? " dynamic" : " static"));
    const Operands sums = shortest();
    Shape shape = {400, 72, 72, c.experts, 0};
    const std::int64_t width = 256 * (c.across - 1) + 8;
    (gathers() ? shape.intermediate : shape.hidden) = op == GemmOp::up_proj ? width / 2 + 4 : width;
    if (c.dynamic)
      (gathers() ? shape.hidden : shape.intermediate) = std::max(sums.hidden, sums.intermediate);
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
    LayerDesc desc = layer_of(shape, c.dtype);
    desc.experts.bias = c.dynamic;
    HandedInputs inputs = integer_inputs(desc, lists, 3);
    inputs.tile_counter = 0;
    const HandedRun run = expect_exact(op, desc, inputs, GetParam().name);
    EXPECT_EQ(run.tile_counter, c.dynamic ? tiles : 0);
    if (HasFatalFailure()) return;
  }
}

/// Of CUDA, with tiles that may be scheduled dynamically.
std::vector<KernelInfo> dynamic_kernels() {
  constexpr GemmOp kOps[] = {GemmOp::up_proj, GemmOp::down_proj, GemmOp::down_proj_dgrad,
                             GemmOp::up_proj_dgrad};
  std::vector<KernelInfo> kernels = kernels_for(kOps);
  std::erase_if(kernels, [](const KernelInfo& k) { return !k.name.ends_with(".128x256"); });
  return kernels;
}

INSTANTIATE_TEST_SUITE_P(Kernels, ExactDynamic, testing::ValuesIn(dynamic_kernels()), kLabel);

}  // namespace
}  // namespace sonicmoe::testkit
