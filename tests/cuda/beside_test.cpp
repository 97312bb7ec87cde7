// Handoff::overlap_previous moves work in time and must not move a bit: whoever waits for an
// operation that began early has waited for all that it ran beside, in a stream and in a graph.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/op_plan.h"
#include "sonicmoe/ops.h"
#include "testkit/buffer.h"
#include "testkit/device_memory.h"
#include "testkit/grouping.h"
#include "testkit/inputs.h"
#include "tests/device.h"

namespace sonicmoe::testkit {
namespace {

struct Shape {
  std::int64_t tokens, slots, hidden, intermediate, experts;
};
/// Over two tiles a multiprocessor in every product, so that an operation is still at work on most
/// of them when the first are free for the next.
constexpr Shape kLarge{4096, 16384, 264, 264, 48};
/// Fewer tiles than multiprocessors: the next operation finds free ones at once.
constexpr Shape kSmall{50, 200, 72, 40, 7};
/// With all rows in one expert, dW2 is one pair of tiles with 256 k blocks one after the other,
/// while dX~ has 6 k blocks a tile and all multiprocessors but two for it. d > n: dX~ covers all of
/// A'.
constexpr Shape kLong{4096, 16384, 256, 136, 3};
/// Rows that dW1 is made of, where it is to end long before the dW2 that it began beside.
constexpr std::int64_t kFewRows = 40;
constexpr std::int64_t kAllRows = std::numeric_limits<std::int32_t>::max();

/// Experts with from none to about twice the mean number of rows, a few without any in between, and
/// sentinels.
Routing ragged(const Shape& shape, std::uint64_t seed) {
  const Random random(seed, 23);
  Routing lists;
  for (std::int64_t i = 0; i < shape.slots; ++i) {
    const auto draw = [&](int k, std::int64_t bound) { return random.below(4 * i + k, bound); };
    std::int64_t expert = std::min(draw(0, shape.experts), draw(1, shape.experts));
    if (expert % 5 == 2) --expert;
    if (draw(2, 32) == 0) expert = shape.experts;
    lists.tokens.push_back(static_cast<std::int32_t>(draw(3, shape.tokens)));
    lists.experts.push_back(static_cast<std::int32_t>(expert));
  }
  return lists;
}

/// All rows in one expert; none at all if that is a sentinel.
Routing all_to(const Shape& shape, std::int64_t expert) {
  Routing lists = ragged(shape, 99);
  std::ranges::fill(lists.experts, static_cast<std::int32_t>(expert));
  return lists;
}

/// bf16, 0.5 to 2 in size, of both signs and with all mantissas: sums of them are rounded, so that
/// every operand that is not the right one shows.
std::vector<std::byte> numbers(std::int64_t count, std::uint64_t stream) {
  const Random random(5, stream);
  std::vector<std::byte> bytes(count * 2);
  for (std::size_t at = 0; at < bytes.size(); at += 8) {
    const std::uint64_t four = (random.bits(at) & 0x80ff80ff80ff80ff) | 0x3f003f003f003f00;
    std::memcpy(&bytes[at], &four, 8);
  }
  return bytes;
}

/// No NaN and so no poison: what nobody wrote must not pass for the expected result. bf16 and fp32
/// (`size` bytes) have the same exponent in their last two bytes.
bool finite(std::span<const std::byte> bits, std::size_t size) {
  for (std::size_t end = size; end <= bits.size(); end += size) {
    std::uint16_t high;
    std::memcpy(&high, &bits[end - 2], 2);
    if ((high & 0x7f80) == 0x7f80) return false;
  }
  return true;
}

enum class DxRows {
  own,              ///< in memory of its own, which ExpertsPlan has
  over_scaled_act,  ///< as in LayerPlan's workspace: over A', which dW2 must not need any more
};

/// The bits of what backward hands on, by name.
using Results = std::map<std::string, std::vector<std::byte>>;

/// LayerPlan's backward from dO to dX~, as operations: dH and A', the gradients of the scores, then
/// dW2 and dW1, each promised to run beside what is before it, then dX~, which waits. With memory
/// of its own dX~ runs beside what is before it, too, and zero_tail beside dX~.
class Backward {
 public:
  /// dW1 is made of the first `dw1_rows` rows.
  Backward(const Shape& s, DxRows where, std::int64_t dw1_rows = kAllRows)
      : shape_(s), where_(where), dw1_rows_(dw1_rows) {
    const std::int64_t R = s.slots, d = s.hidden, n = s.intermediate, E = s.experts;
    args_.x = arena_.input("x", numbers(s.tokens * d, 1));
    args_.dout = arena_.input("dout", numbers(s.tokens * d, 2));
    args_.w1 = arena_.input("w1", numbers(E * 2 * n * d, 3));
    args_.w2 = arena_.input("w2", numbers(E * d * n, 4));
    args_.preact = const_cast<void*>(arena_.input("preact", numbers(R * 2 * n, 5)));
    const Random random(5, 6);
    Tensor scores(R);
    for (std::int64_t r = 0; r < R; ++r) scores[r] = static_cast<double>(random.below(r, 16)) / 8;
    args_.row_scores = static_cast<const float*>(arena_.input("row_scores", scores, DType::f32));
    args_.offsets = arena_.input("offsets", std::vector<std::int32_t>(E + 1));
    dw1_offsets_ = arena_.input("dw1_offsets", std::vector<std::int32_t>(E + 1));
    args_.row_tokens = arena_.input("row_tokens", std::vector<std::int32_t>(R));
    score_args_.slot_rows = arena_.input("slot_rows", std::vector<std::int32_t>(R));

    args_.dpreact = output("dpreact", R * 2 * n * 2);
    args_.row_dscores = static_cast<float*>(output("row_dscores", R * 4));
    score_args_.row_dscores = args_.row_dscores;
    score_args_.dscores = static_cast<float*>(output("dscores", R * 4));
    args_.dw1 = output("dw1", E * 2 * n * d * 2);
    args_.dw2 = output("dw2", E * d * n * 2);
    if (where == DxRows::over_scaled_act) {
      args_.scaled_act = args_.dx_rows = output("dx_rows", R * std::max(n, d) * 2);
    } else {
      args_.scaled_act = output("scaled_act", R * n * 2);
      args_.dx_rows = output("dx_rows", R * d * 2);
    }
    std::size_t largest = 0;
    for (const auto& [memory, bytes] : outputs_) largest = std::max(largest, bytes);
    poison_ = arena_.output("poison", largest);
    const std::size_t bytes =
        std::max(down_proj_dgrad_.workspace_bytes(), up_proj_dgrad_.workspace_bytes());
    workspace_ = {arena_.output("workspace", bytes, 256), bytes};
    tile_counter_ = arena_.output_int32("tile_counter", 1);
  }

  void route(const Routing& routing) {
    const Grouping g = group(routing, shape_.tokens, shape_.experts);
    rows_ = g.rows();
    std::vector<std::int32_t> dw1_offsets = g.offsets, row_tokens = g.row_tokens;
    for (std::int32_t& offset : dw1_offsets) {
      offset = static_cast<std::int32_t>(std::min<std::int64_t>(offset, dw1_rows_));
    }
    row_tokens.resize(shape_.slots, std::numeric_limits<std::int32_t>::max());  // read by nobody
    arena_.replace("offsets", std::as_bytes(std::span(g.offsets)));
    arena_.replace("dw1_offsets", std::as_bytes(std::span(dw1_offsets)));
    arena_.replace("row_tokens", std::as_bytes(std::span(row_tokens)));
    arena_.replace("slot_rows", std::as_bytes(std::span(g.slot_rows)));
  }

  /// Everything that is written becomes NaN, what is handed on between operations included: else
  /// what the round before left there would do for whoever comes too early. In the order of the
  /// stream, so that the host gets ahead of the device, and every operation is in the queue before
  /// the one before it ends.
  void poison(Stream stream) const {
    for (const auto& [memory, bytes] : outputs_) {
      check(sonicmoe::copy(memory, poison_, bytes, Exec{.device = kDevice, .stream = stream}));
    }
  }

  /// What each operation gives without promises, when all before it has ended.
  Results one_by_one() const {
    poison({});
    const auto wait = [] { check(synchronize(kDevice)); };
    wait();
    down_proj_dgrad({}), wait();
    score_grad({}), wait();
    down_proj_wgrad({}, false), wait();
    up_proj_wgrad({}, false, args_.dw1), wait();
    up_proj_dgrad({}, false), wait();
    zero_tail({}, false), wait();
    Results all;
    for (const char* name : kResults) {
      const auto bits = result(name);
      EXPECT_TRUE(finite(bits, name == std::string("dscores") ? 4 : 2)) << name;
      all[name].assign(bits.begin(), bits.end());
    }
    return all;
  }

  /// Up to dW1; once more into `dw1_again`, beside the first, unless null.
  void start_weights(Stream stream, void* dw1_again = nullptr) const {
    down_proj_dgrad(stream);
    score_grad(stream);
    down_proj_wgrad(stream, true);
    up_proj_wgrad(stream, true, args_.dw1);
    if (dw1_again != nullptr) up_proj_wgrad(stream, true, dw1_again);
  }
  void start(Stream stream, void* dw1_again = nullptr) const {
    start_weights(stream, dw1_again);
    up_proj_dgrad(stream, where_ == DxRows::own);
    zero_tail(stream, true);
  }

  /// Names of the results that have other bits; waits for them.
  std::string difference(const Results& expected) const {
    if (const Status status = synchronize(kDevice); !status.ok()) return status.message();
    std::string names;
    for (const auto& [name, bits] : expected) {
      const auto ours = result(name);
      const bool same = ours.size() == bits.size() &&
                        (bits.empty() || std::memcmp(ours.data(), bits.data(), bits.size()) == 0);
      if (!same) names += name + " ";
    }
    return names;
  }

  const void* dw2() const { return args_.dw2; }
  std::size_t dw1_bytes() const {
    return shape_.experts * 2 * shape_.intermediate * shape_.hidden * 2;
  }
  std::string damage() const { return arena_.damage(); }

 private:
  static constexpr const char* kResults[] = {"dscores", "dw2", "dw1", "dx_rows"};

  static void check(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }

  void* output(const char* name, std::size_t bytes) {
    return outputs_.emplace_back(arena_.output(name, bytes, 256), bytes).first;
  }

  std::span<const std::byte> result(const std::string& name) const {
    const std::span<const std::byte> bits = arena_[name].bytes();
    if (name != "dx_rows" || where_ == DxRows::own) return bits;
    return bits.first(rows_ * shape_.hidden * 2);
  }

  OpPlan<GroupedGemmDesc> product(GemmOp op) const {
    GroupedGemmDesc desc;
    desc.op = op;
    desc.tokens = shape_.tokens;
    desc.rows = shape_.slots;
    desc.hidden = shape_.hidden;
    desc.intermediate = shape_.intermediate;
    desc.experts = shape_.experts;
    return make_plan(desc, kDevice).value();
  }
  OpPlan<ScoreGradDesc> to_slots() const {
    ScoreGradDesc desc;
    desc.tokens = shape_.tokens;
    desc.experts = shape_.experts;
    desc.rows = shape_.slots;
    desc.input = RouterInput::lists;
    return make_plan(desc, kDevice).value();
  }

  /// Without workspace, which two operations beside each other could not share. Only dX~ asks for
  /// some, for a tile counter of its own.
  template <class Plan>
  static void run(const Plan& plan, const typename Plan::Args& args, Stream stream,
                  const Handoff& handoff = {}) {
    check(run_operation(plan, args, handoff, {}, stream));
  }
  void down_proj_dgrad(Stream stream) const {
    check(run_operation(down_proj_dgrad_, args_, {.next_tile_counter = tile_counter_}, workspace_,
                        stream));
  }
  void score_grad(Stream stream) const { run(score_grad_, score_args_, stream); }
  void up_proj_dgrad(Stream stream, bool beside) const {
    const Handoff handoff{.tile_counter = tile_counter_, .overlap_previous = beside};
    check(run_operation(up_proj_dgrad_, args_, handoff, workspace_, stream));
  }
  void zero_tail(Stream stream, bool beside) const {
    if (where_ != DxRows::own) return;
    run(zero_tail_, {args_.offsets, args_.offsets + 1, args_.dx_rows, nullptr}, stream,
        {.overlap_previous = beside});
  }
  void down_proj_wgrad(Stream stream, bool beside) const {
    run(down_proj_wgrad_, args_, stream, {.overlap_previous = beside});
  }
  void up_proj_wgrad(Stream stream, bool beside, void* dw1) const {
    GroupedGemmArgs args = args_;
    args.offsets = dw1_offsets_;
    args.dw1 = dw1;
    run(up_proj_wgrad_, args, stream, {.overlap_previous = beside});
  }

  Shape shape_;
  DxRows where_;
  std::int64_t dw1_rows_;
  std::size_t rows_ = 0;  // in use
  Arena arena_{kDevice};
  std::vector<std::pair<void*, std::size_t>> outputs_;
  const void* poison_ = nullptr;  // as much as the largest of them
  GroupedGemmArgs args_;          // of all five: each takes what it needs
  ScoreGradArgs score_args_;
  const std::int32_t* dw1_offsets_ = nullptr;
  Workspace workspace_;
  std::int32_t* tile_counter_ = nullptr;  // of dX~; dgrad resets it
  OpPlan<GroupedGemmDesc> down_proj_dgrad_ = product(GemmOp::down_proj_dgrad);
  OpPlan<ScoreGradDesc> score_grad_ = to_slots();
  OpPlan<GroupedGemmDesc> down_proj_wgrad_ = product(GemmOp::down_proj_wgrad);
  OpPlan<GroupedGemmDesc> up_proj_wgrad_ = product(GemmOp::up_proj_wgrad);
  OpPlan<GroupedGemmDesc> up_proj_dgrad_ = product(GemmOp::up_proj_dgrad);
  OpPlan<ZeroTailDesc> zero_tail_ =
      make_plan(ZeroTailDesc{shape_.slots, shape_.hidden, shape_.experts}, kDevice).value();
};

void expect_same_bits(const Shape& shape, DxRows where, int rounds) {
  SCOPED_TRACE(where == DxRows::own ? "dX~ in memory of its own" : "dX~ over A'");
  Backward backward(shape, where);
  backward.route(ragged(shape, 1));
  const Results expected = backward.one_by_one();
  const OwnStream stream(kDevice);
  for (int round = 0; round < rounds; ++round) {
    backward.poison(stream);
    backward.start(stream);
    ASSERT_EQ(backward.difference(expected), "") << "round " << round;
  }
  EXPECT_EQ(backward.damage(), "");
}

// Caught over A': dX~ that begins to store while dW2 still reads, which gets rows of dX~. Caught: a
// weight gradient that begins before the dgrad that its A' or dH comes from has ended, because an
// operation in between let it start too early (NaN).
TEST(Beside, LargeShape) {
  expect_same_bits(kLarge, DxRows::own, 5);
  expect_same_bits(kLarge, DxRows::over_scaled_act, 20);
}

// The same where most multiprocessors have nothing to do, so that whatever may begin does.
TEST(Beside, SmallShape) {
  expect_same_bits(kSmall, DxRows::own, 20);
  expect_same_bits(kSmall, DxRows::over_scaled_act, 20);
}

void expect_same_replays(const Shape& shape, DxRows where, std::span<const Routing> routings,
                         int rounds) {
  Backward backward(shape, where);
  backward.route(routings.front());
  (void)backward.one_by_one();  // loads the kernels
  const OwnStream stream(kDevice);
  Graph::begin(kDevice, stream);
  backward.start(stream);
  const Graph graph(kDevice, stream);
  for (std::size_t i = 0; i < routings.size(); ++i) {
    backward.route(routings[i]);
    const Results expected = backward.one_by_one();
    for (int round = 0; round < rounds; ++round) {
      backward.poison(stream);
      graph.launch(stream);
      ASSERT_EQ(backward.difference(expected), "") << "routing " << i << ", round " << round;
    }
  }
  EXPECT_EQ(backward.damage(), "");
}

// Caught: what the two above do, with no host between the operations; edges that a graph does not
// keep as the stream had them; and a weight gradient, which begins without waiting, that takes
// offsets or ids from before the replay (other bits, or an address out of range).
TEST(Beside, GraphWithOtherRouting) {
  const Routing large[] = {ragged(kLarge, 2), ragged(kLarge, 3), all_to(kLarge, 20)};
  const Routing small[] = {ragged(kSmall, 2), all_to(kSmall, kSmall.experts), ragged(kSmall, 3),
                           all_to(kSmall, 0), ragged(kSmall, 4)};
  for (const DxRows where : {DxRows::over_scaled_act, DxRows::own}) {
    expect_same_replays(kLarge, where, large, 3);
    expect_same_replays(kSmall, where, small, 20);
  }
}

// dW2 is at work on two multiprocessors long after the dW1 beside it has nothing more to do. To be
// caught: an operation that began early and whose end does not imply that of what it ran beside.
// dX~ waits for dW1 alone, and would be over A' while dW2 has most of that still to read. Two dW1:
// it must also pass through an operation that itself began beside one that did. (On an H200 kernels
// that never wait pass this, too: a grid seems to end only after those that it depends on. That is
// not promised.)
TEST(Beside, EndImpliesAllBefore) {
  Backward backward(kLong, DxRows::over_scaled_act, kFewRows);
  backward.route(all_to(kLong, 1));
  const Results expected = backward.one_by_one();
  Arena again(kDevice);
  const OwnStream stream(kDevice);
  for (void* const dw1_again :
       {static_cast<void*>(nullptr), again.output("dw1", backward.dw1_bytes())}) {
    SCOPED_TRACE(dw1_again == nullptr ? "dW1 once" : "dW1 twice");
    Graph::begin(kDevice, stream);
    backward.start(stream, dw1_again);
    const Graph graph(kDevice, stream);
    for (int round = 0; round < 5; ++round) {
      backward.poison(stream);
      backward.start(stream, dw1_again);
      ASSERT_EQ(backward.difference(expected), "") << "stream, round " << round;
      backward.poison(stream);
      graph.launch(stream);
      ASSERT_EQ(backward.difference(expected), "") << "graph, round " << round;
    }
  }
  EXPECT_EQ(backward.damage() + again.damage(), "");
}

// The same of what is no kernel of ours: a copy on the device, in a stream and in a graph (whose
// only edge is from the kernel before), and one to the host, both right after dW1 or zero_tail.
// To be caught: NaN in place of the dW2 that is not there yet.
TEST(Beside, CopiesSeeAllBefore) {
  Backward backward(kLong, DxRows::own, kFewRows);
  backward.route(all_to(kLong, 1));
  const std::vector<std::byte> expected = backward.one_by_one().at("dw2");
  Arena copies(kDevice);
  void* const copied = copies.output("dw2", expected.size());
  const OwnStream stream(kDevice);
  bool all = false;  // up to zero_tail, else to dW1
  const auto start_on = [&](Stream on) { all ? backward.start(on) : backward.start_weights(on); };
  const auto start = [&] {
    start_on(stream);
    const Status status = sonicmoe::copy(copied, backward.dw2(), expected.size(),
                                         Exec{.device = kDevice, .stream = stream});
    ASSERT_TRUE(status.ok()) << status.message();
  };
  const auto expect_copied = [&] {
    const Status status = synchronize(kDevice);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(std::ranges::equal(copies["dw2"].bytes(), expected));
  };
  for (const bool upto_zero_tail : {false, true}) {
    all = upto_zero_tail;
    Graph::begin(kDevice, stream);
    start();
    const Graph graph(kDevice, stream);
    for (int round = 0; round < 5; ++round) {
      SCOPED_TRACE(round);
      copies["dw2"].poison();
      backward.poison(stream);
      start();
      expect_copied();

      copies["dw2"].poison();
      backward.poison(stream);
      graph.launch(stream);
      expect_copied();

      // Nothing waits between but the copy itself, in the order of the default stream.
      std::vector<std::byte> host(expected.size());
      backward.poison({});
      start_on({});
      copy(kDevice, host.data(), backward.dw2(), host.size());
      EXPECT_TRUE(std::ranges::equal(host, expected));
    }
  }
  EXPECT_EQ(backward.damage() + copies.damage(), "");
}

}  // namespace
}  // namespace sonicmoe::testkit
