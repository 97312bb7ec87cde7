// Bit for bit, too: tiles that are dealt, those that come in halves, and tall ones.
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

// Where sums are long and tiles are many, CUDA deals the tiles of 256 columns to whoever is free:
// each is drawn once, but for the first of each pair of CTAs, which in the end draws one past the
// last.
class ExactDealt : public testing::TestWithParam<KernelInfo> {
 protected:
  struct Dealt {
    std::int64_t hidden, intermediate, experts;
    int across;  ///< tiles to a stripe of 128 rows
    std::int64_t tiles = 0;
  };
  bool gathers() const {
    return op_of(GetParam()) == GemmOp::up_proj || op_of(GetParam()) == GemmOp::down_proj_dgrad;
  }
  /// With as few k blocks as are dealt with a counter that is given.
  Dealt shortest() const {
    if (gathers()) return {1536, 8, 600, 1};
    return {8, op_of(GetParam()) == GemmOp::down_proj ? 768 : 384, 600, 1};
  }
  /// Operands with as many tiles for a pair of CTAs as `least`, for a counter that is `given` or
  /// one in the workspace. Sets dealt->tiles.
  std::pair<LayerDesc, HandedInputs> operands(Dealt* dealt, int least, bool given) {
    const GemmOp op = op_of(GetParam());
    Shape shape = {400, dealt->hidden, dealt->intermediate, dealt->experts, 0};
    const int every = dealt->across == 1 ? 20 : 60;
    const Random random(1, 2);
    const auto [lists, first] = counted(
        shape.experts, [&](auto e) { return e % every == 0 ? 300 : static_cast<int>(e % 4); },
        [&](auto i, auto) { return random.below(i, shape.tokens); });
    shape.list_length = first.back();
    const std::int64_t sums = gathers()                 ? shape.hidden
                              : op == GemmOp::down_proj ? shape.intermediate
                                                        : 2 * shape.intermediate;
    EXPECT_TRUE(cuda::deals(cuda::rounds(traits(), shape.list_length, shape.experts, dealt->across),
                            static_cast<int>(sums / 64), gathers(), given));
    for (std::size_t e = 0; e + 1 < first.size(); ++e) {
      dealt->tiles += cuda::pair_tiles(cuda::tiles(first[e + 1] - first[e], 128), dealt->across);
    }
    EXPECT_GT(dealt->tiles, least * cuda::pairs_of(traits()));
    const LayerDesc desc = layer_of(shape, DType::bf16);
    return {desc, integer_inputs(desc, lists, 3)};
  }
};

TEST_P(ExactDealt, AllTiles) {
  const GemmOp op = op_of(GetParam());
  // More tiles for a pair of CTAs than there are places for numbers (16); pairs that go apart, with
  // a tile for each and with a tile for one.
  std::vector<Dealt> all = {{8, 1024, 1400, 1}, {520, 512, 270, 3}};
  if (op == GemmOp::down_proj) all[1].intermediate = 1024;
  if (gathers()) all = {{2048, 8, 1400, 1}, {2048, op == GemmOp::up_proj ? 264 : 520, 270, 3}};
  for (Dealt& dealt : all) {
    const auto [desc, inputs] = operands(&dealt, dealt.across == 1 ? 17 : 4, false);
    const HandedRun run = expect_exact(op, desc, inputs, GetParam().name);
    std::int32_t drawn = 0;  // the last word
    ASSERT_GE(run.workspace.size(), sizeof drawn);
    std::memcpy(&drawn, run.workspace.data() + run.workspace.size() - sizeof drawn, sizeof drawn);
    EXPECT_EQ(drawn, dealt.tiles);
  }
}

TEST_P(ExactDealt, CountsWhereItIsTold) {
  Dealt dealt = shortest();
  auto [desc, inputs] = operands(&dealt, 7, true);
  inputs.tile_counter = 0;
  const HandedRun run = expect_exact(op_of(GetParam()), desc, inputs, GetParam().name);
  EXPECT_EQ(run.tile_counter, dealt.tiles);
  const GuardedBuffer poison(run.workspace.size());  // nothing else in the workspace
  EXPECT_TRUE(std::ranges::equal(run.workspace, poison.bytes()));
}

// A count that no operation leaves: every pair of CTAs has the one tile that it does not draw.
TEST_P(ExactDealt, WrongCountLeadsNowhere) {
  Dealt dealt = shortest();
  auto [desc, inputs] = operands(&dealt, 7, true);
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

// Where the last round of up_proj's tiles of 256 columns is at most half full, they come in halves
// of 64 rows, among them such as have some or all of their rows in one half.
class ExactHalved : public testing::TestWithParam<KernelInfo> {
 protected:
  /// Of experts in turn: 260 in the mean.
  static constexpr int kCounts[] = {300, 64,  1,   700, 65,  0,   128, 129,
                                    513, 191, 192, 256, 448, 257, 320, 600};
  static int rows_of(std::int64_t e) { return kCounts[e % std::size(kCounts)]; }
  static std::int64_t tiles_of(std::int64_t experts, int across) {
    std::int64_t all = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      all += cuda::pair_tiles(cuda::tiles(rows_of(e), 128), across);
    }
    return all;
  }
  struct Halved {
    std::int64_t hidden;
    std::int64_t experts;      ///< at least
    int across;                ///< tiles to a stripe of 128 rows
    std::int64_t least, most;  ///< tiles in the last round
  };
  /// What was run, and how many tiles that has.
  std::pair<HandedRun, std::int64_t> expect_exact_with(const Halved& halved) {
    Shape shape = {400, halved.hidden, 128 * (halved.across - 1) + 8, halved.experts, 0};
    const auto tiles = [&] { return tiles_of(shape.experts, halved.across); };
    const auto last = [&] { return tiles() % cuda::pairs_of(traits()); };
    while (last() < halved.least || last() > halved.most) ++shape.experts;
    const Random random(3, 4);
    const auto [lists, first] = counted(
        shape.experts, rows_of, [&](auto i, auto) { return random.below(i, shape.tokens); });
    shape.list_length = first.back();
    EXPECT_TRUE(
        cuda::halves_last(cuda::rounds(traits(), shape.list_length, shape.experts, halved.across),
                          shape.list_length, shape.experts));
    const LayerDesc desc = layer_of(shape, DType::bf16);
    HandedInputs inputs = integer_inputs(desc, lists, 3);
    inputs.tile_counter = 0;
    return {expect_exact(op_of(GetParam()), desc, inputs, GetParam().name), tiles()};
  }
};

TEST_P(ExactHalved, ByStride) {
  for (const int across : {1, 2}) {
    for (const auto& [least, most] : {std::pair(1, 4), {15, 20}, {29, 33}, {34, 65}}) {
      SCOPED_TRACE(std::to_string(across) + ", " + std::to_string(least));
      expect_exact_with({16, across == 1 ? 200 : 100, across, least, most});
      if (HasFatalFailure()) return;
    }
  }
}

// Dealt: every half is drawn.
TEST_P(ExactHalved, Dealt) {
  const auto [halved, some] = expect_exact_with({1536, 320, 1, 15, 33});
  EXPECT_EQ(halved.tile_counter, some + some % cuda::pairs_of(traits()));
  const auto [whole, others] = expect_exact_with({1536, 320, 1, 34, 65});
  EXPECT_EQ(whole.tile_counter, others);
}

// Tiles of 192 rows are 128 high in an expert's last pair, where that is enough, and in the last
// experts. Where a pair goes apart its stripe is as high as the others.
class ExactTall : public testing::TestWithParam<KernelInfo> {
 protected:
  static constexpr int kCounts[] = {0,   1,   64,  65,  128, 129, 191, 192, 193, 255, 256, 257,
                                    319, 320, 321, 383, 384, 385, 448, 449, 512, 513, 577, 700};
  struct Tall {
    std::int64_t hidden, experts;
    int across;
    int every = 1;  ///< among so many experts one with more than three rows
    DType dtype = DType::bf16;
  };
  /// What was run with a counter that is `given` or one in the workspace, and how many tiles that
  /// has. They are dealt, if `dealt`.
  std::pair<HandedRun, std::int64_t> expect_exact_with(const Tall& tall, bool given, bool dealt) {
    Shape shape = {400, tall.hidden, 128 * (tall.across - 1) + 8, tall.experts, 0};
    const auto rows_of = [&](std::int64_t e) {
      if (e % tall.every != 0) return static_cast<int>(e % 4);
      return kCounts[e / tall.every % std::size(kCounts)];
    };
    const Random random(3, tall.across);
    const auto [lists, first] = counted(
        shape.experts, rows_of, [&](auto i, auto) { return random.below(i, shape.tokens); });
    shape.list_length = first.back();
    const int low_from = cuda::low_from(traits(), shape.list_length, tall.experts, tall.across);
    EXPECT_LT(low_from, tall.experts);
    const double rounds = cuda::rounds(traits(), shape.list_length, tall.experts, tall.across, 192);
    EXPECT_EQ(cuda::deals(rounds, cuda::tiles(tall.hidden, 64), true, given), dealt);
    std::int64_t tiles = 0;
    for (std::int64_t e = 0; e < tall.experts; ++e) {
      tiles += cuda::pair_tiles(cuda::tiles(rows_of(e), e < low_from ? 192 : 128), tall.across);
    }
    const LayerDesc desc = layer_of(shape, tall.dtype);
    HandedInputs inputs = integer_inputs(desc, lists, 3);
    if (given) inputs.tile_counter = 0;
    return {expect_exact(GemmOp::up_proj, desc, inputs, GetParam().name), tiles};
  }
};

TEST_P(ExactTall, EveryNumberOfRows) {
  // The last eighth of the experts is low: of the counts, others with 112 than with 100.
  for (const Tall& tall :
       {Tall{72, 100, 1}, {72, 112, 1}, {72, 100, 2, 1, DType::f16}, {72, 112, 3}}) {
    SCOPED_TRACE(std::to_string(tall.across) + ", " + std::to_string(tall.experts));
    const auto [run, tiles] = expect_exact_with(tall, true, false);
    EXPECT_EQ(run.tile_counter, 0);
    if (HasFatalFailure()) return;
  }
}

// Whole pairs, and pairs that go apart.
TEST_P(ExactTall, Dealt) {
  const auto [run, tiles] = expect_exact_with({1536, 600, 1}, true, true);
  EXPECT_EQ(run.tile_counter, tiles);
  const auto [apart, others] = expect_exact_with({2048, 330, 3, 15}, false, true);
  std::int32_t drawn = 0;  // the last word
  ASSERT_GE(apart.workspace.size(), sizeof drawn);
  std::memcpy(&drawn, apart.workspace.data() + apart.workspace.size() - sizeof drawn, sizeof drawn);
  EXPECT_EQ(drawn, others);
}

/// Of CUDA, with tiles that may be dealt.
std::vector<KernelInfo> dealt_kernels() {
  constexpr GemmOp kOps[] = {GemmOp::up_proj, GemmOp::down_proj, GemmOp::down_proj_dgrad,
                             GemmOp::up_proj_dgrad};
  std::vector<KernelInfo> kernels = kernels_for(kOps);
  std::erase_if(kernels, [](const KernelInfo& k) { return !k.name.ends_with(".128x256"); });
  return kernels;
}

/// Of those, with tiles that may come in halves.
std::vector<KernelInfo> halved_kernels() {
  std::vector<KernelInfo> kernels = dealt_kernels();
  std::erase_if(kernels, [](const KernelInfo& k) { return k.op != name(GemmOp::up_proj); });
  return kernels;
}

std::vector<KernelInfo> tall_kernels() {
  constexpr GemmOp kOps[] = {GemmOp::up_proj};
  std::vector<KernelInfo> kernels = kernels_for(kOps);
  std::erase_if(kernels, [](const KernelInfo& k) { return !k.name.ends_with(".192x256"); });
  return kernels;
}

INSTANTIATE_TEST_SUITE_P(Kernels, ExactDealt, testing::ValuesIn(dealt_kernels()), kLabel);
INSTANTIATE_TEST_SUITE_P(Kernels, ExactTall, testing::ValuesIn(tall_kernels()), kLabel);
INSTANTIATE_TEST_SUITE_P(Kernels, ExactHalved, testing::ValuesIn(halved_kernels()), kLabel);

}  // namespace
}  // namespace sonicmoe::testkit
