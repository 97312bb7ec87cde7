// Bit for bit: every kernel of the six GEMM operations on integer-coded inputs.
#include "tests/ops/gemm_exact.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <span>

#include "core/kernel.h"
#include "cuda/sm90/tile_choice.h"
#include "sonicmoe/info.h"

namespace sonicmoe::testkit {
namespace {

// Odd sizes; more than two of the CPU's cache blocks along rows, d and n; odd numbers of CUDA's
// tiles, with a last one that is partly used, along all three; of 256 columns with one, two and
// three chunks of 64 past the end, and a CTA of a pair without a tile.
std::vector<Shape> shapes() {
  std::vector<Shape> all = {
      {61, 72, 40, 7, 200}, {900, 16, 24, 2, 2300}, {9, 1032, 16, 3, 25}, {9, 16, 1032, 3, 25}};
  if (!kOnCpu) {
    all.push_back({40, 392, 648, 3, 60});
    all.push_back({300, 584, 328, 5, 900});
  }
  return all;
}

/// Sentinels, duplicates, an expert without rows, all of it unsorted.
Routing routing(const Shape& shape) {
  const Random random(shape.tokens, 77);
  Routing lists;
  for (std::int64_t i = 0; i < shape.list_length; ++i) {
    lists.tokens.push_back(static_cast<std::int32_t>(random.below(2 * i, shape.tokens)));
    auto expert = static_cast<std::int32_t>(random.below(2 * i + 1, shape.experts + 1));
    if (expert == 1) expert = 0;
    lists.experts.push_back(expert);
  }
  return lists;
}

class ExactGemm : public testing::TestWithParam<KernelInfo> {};

bool runs_as(const KernelInfo& kernel, GemmOp op, const ExpertsDesc& experts);

/// `desc` with gathered and with contiguous rows, where this kernel runs them. `turn` decides where
/// the scores of contiguous rows enter.
std::vector<LayerDesc> by_source(const KernelInfo& kernel, GemmOp op, LayerDesc desc, int turn) {
  std::vector<LayerDesc> runs;
  for (const RowSource source : {RowSource::gathered, RowSource::contiguous}) {
    constexpr ScoreAt kScores[] = {ScoreAt::none, ScoreAt::before_down, ScoreAt::after_down};
    desc.experts.row_source = source;
    desc.experts.score_at =
        source == RowSource::gathered ? ScoreAt::combine : kScores[turn % std::size(kScores)];
    if (runs_as(kernel, op, desc.experts)) runs.push_back(desc);
  }
  return runs;
}

/// The same with each of kKernelLayouts.
std::vector<LayerDesc> by_layout_and_source(const KernelInfo& kernel, GemmOp op, LayerDesc desc) {
  std::vector<LayerDesc> runs;
  for (const W1Layout layout : kKernelLayouts) {
    desc.experts.w1_layout = layout;
    const int turn = 1 + static_cast<int>(layout);
    std::ranges::copy(by_source(kernel, op, desc, turn), std::back_inserter(runs));
  }
  return runs;
}

/// False if this kernel is not for these experts, or not for this processor.
bool runs_as(const KernelInfo& kernel, GemmOp op, const ExpertsDesc& experts) {
  GroupedGemmDesc probe{{experts}};
  probe.op = op;
  probe.experts = 1;
  Options options;
  options.kernel = kernel.name;
  const auto plan = make_plan(probe, kDevice, options);
  if (!plan.ok()) {
    EXPECT_EQ(plan.status().code(), StatusCode::unsupported) << plan.status().message();
  }
  return plan.ok();
}

TEST_P(ExactGemm, EveryActivationAndLayout) {
  const KernelInfo& kernel = GetParam();
  const GemmOp op = op_of(kernel);
  int runs = 0;
  for (const DType dtype : kTypes) {
    const int before = runs;
    const std::vector<Shape> all = shapes();
    for (int s = 0; s < std::ssize(all); ++s) {
      const Shape& shape = all[s];
      LayerDesc desc = layer_of(shape, dtype);
      const std::vector<ActivationSpec> activations = exact_activations(op);
      for (int a = 0; a < std::ssize(activations); ++a) {
        desc.experts.activation = activations[a];
        for (const W1Layout layout : layouts(desc.experts.activation)) {
          // The CPU's code is the same at each shape, CUDA has a kernel for each activation.
          // Fifths, because biases and scores below go by halves and thirds of the same sum.
          if (kOnCpu && s > 0 && (a + static_cast<int>(layout) + s) % 5 > 1) continue;
          desc.experts.w1_layout = layout;
          desc.experts.bias = (a + static_cast<int>(layout)) % 2 == 0;
          desc.experts.dpreact_in_workspace =
              (a + static_cast<int>(layout) / 2) % 2 == 0;  // else over H
          for (const LayerDesc& with : by_source(kernel, op, desc, a + static_cast<int>(layout))) {
            SCOPED_TRACE(to_string(with) + " n=" + std::to_string(shape.intermediate));
            const GemmInputs inputs = integer_inputs(with, routing(shape), a);
            expect_exact(op, with, inputs, kernel.name);
            if (op == GemmOp::up_proj) {
              LayerDesc inference = with;
              inference.experts.inference = true;
              expect_exact(op, inference, inputs, kernel.name);
            }
            ++runs;
            if (HasFatalFailure()) return;
          }
        }
      }
    }
    EXPECT_TRUE(kOnCpu || runs > before) << name(dtype);
  }
  if (runs == 0) GTEST_SKIP() << "nothing that this kernel runs on this processor";
}

// The portable kernels take tiles in groups of 16 m blocks: here with several groups and n blocks,
// for rows, for the columns of dW1 and for those of dW2.
TEST_P(ExactGemm, SeveralGroupsOfTiles) {
  const KernelInfo& kernel = GetParam();
  const GemmOp op = op_of(kernel);
  int runs = 0;
  for (const Shape& shape :
       {Shape{900, 264, 136, 2, 4300}, Shape{40, 264, 1160, 3, 60}, Shape{40, 2120, 264, 3, 60}}) {
    for (const LayerDesc& with : by_source(kernel, op, layer_of(shape, DType::bf16), 1)) {
      SCOPED_TRACE(to_string(with));
      expect_exact(op, with, integer_inputs(with, routing(shape), 1), kernel.name);
      ++runs;
    }
  }
  if (runs == 0) GTEST_SKIP() << "nothing that this kernel runs on this processor";
}

// A CTA of CUDA's goes through several tiles, whole and partial ones, with fewer k blocks than
// chunks of a tile and with more. What it stores of one tile must leave shared memory before the
// next tile comes there, and what it defers must leave beside the next tile.
TEST_P(ExactGemm, SeveralTilesInTurn) {
  if (kOnCpu) GTEST_SKIP() << "has no CTAs";
  const KernelInfo& kernel = GetParam();
  const GemmOp op = op_of(kernel);
  const std::vector<ActivationSpec> activations =
      activates(op) ? exact_activations() : std::vector{ActivationSpec{}};
  int runs = 0;
  for (const Shape& shape : {Shape{2000, 16, 264, 90, 14850}, Shape{1000, 264, 72, 90, 9000}}) {
    for (int a = 0; a < std::ssize(activations); ++a) {
      for (const W1Layout layout : kKernelLayouts) {
        for (const bool bias : {false, true}) {
          LayerDesc desc = layer_of(shape, DType::bf16);
          desc.experts.activation = activations[a];
          desc.experts.w1_layout = layout;
          desc.experts.bias = bias;
          // Transposed weights have biases in turn.
          const bool in_turn = bias == ((a + static_cast<int>(layout)) % 2 == 0);
          if (desc.experts.transposed() && !in_turn) continue;
          for (const LayerDesc& with : by_source(kernel, op, desc, a + bias)) {
            SCOPED_TRACE(to_string(with));
            expect_exact(op, with, integer_inputs(with, routing(shape), a), kernel.name);
            if (HasFatalFailure()) return;
            ++runs;
          }
        }
      }
    }
  }
  EXPECT_GT(runs, 0);
}

class ExactActivation : public ExactGemm {
 protected:
  /// f(layer) for each type and activation that this kernel runs.
  template <class F>
  void for_layers(const Shape& shape, F&& f) {
    int runs = 0;
    for (const DType dtype : kTypes) {
      for (const ActivationSpec& activation : exact_activations()) {
        LayerDesc desc = layer_of(shape, dtype);
        desc.experts.activation = activation;
        for (const W1Layout layout : {W1Layout::interleaved, W1Layout::transposed_interleaved}) {
          desc.experts.w1_layout = layout;
          for (const LayerDesc& with : by_source(GetParam(), op_of(GetParam()), desc, runs)) {
            SCOPED_TRACE(to_string(with));
            f(with);
            if (HasFatalFailure()) return;
            ++runs;
          }
        }
      }
    }
    if (runs == 0) GTEST_SKIP() << "nothing that this kernel runs on this processor";
  }
};

/// Runs an operation with NaN in the rows of the bad experts, and compares those of the others.
template <class IsBad>
void expect_no_others(const KernelInfo& kernel, const LayerDesc& desc, const Routing& lists,
                      const std::vector<std::int64_t>& first, const IsBad& is_bad) {
  const GemmOp op = op_of(kernel);
  GemmInputs inputs = integer_inputs(desc, lists, 5);
  const LayerTensors expected = oracle_gemm(op, desc, inputs, Precision::rounded);
  for (Tensor* gathered : {&inputs.x, &inputs.dout}) {
    std::fill(gathered->begin() + 32 * desc.experts.hidden, gathered->end(),
              std::numeric_limits<double>::quiet_NaN());
  }
  const GemmRun run = run_kernel(op, desc, inputs, kernel.name);
  ASSERT_EQ(run.failure, "");
  int compared = 0;
  for (const GemmOutput& output : kGemmOutputs) {
    const Tensor ours = without_traces(run.tensors.*output.member);
    const Tensor right = without_traces(expected.*output.member);
    ASSERT_EQ(ours.size(), right.size()) << output.name;
    const std::size_t width = right.size() / static_cast<std::size_t>(desc.router.list_length);
    for (std::size_t e = 0; width > 0 && e + 1 < first.size(); ++e) {
      if (is_bad(e)) continue;
      const std::size_t at = static_cast<std::size_t>(first[e]) * width;
      const std::size_t size = static_cast<std::size_t>(first[e + 1] - first[e]) * width;
      const Check check = same_values(output.name, std::span(ours).subspan(at, size),
                                      std::span(right).subspan(at, size));
      ASSERT_TRUE(check.pass) << check.tensor << " of expert " << e << ", " << size / width
                              << " rows: " << check.note;
      ++compared;
    }
  }
  EXPECT_GT(compared, 0);
}

// Where an expert's last tile has no rows, CUDA multiplies what the tile before left in shared
// memory: another expert's rows, of which nothing may come through.
TEST_P(ExactActivation, RowsOfOthersMayBeNaN) {
  constexpr int kCounts[] = {1, 31, 32, 33, 63, 64, 65, 96, 97, 127, 129, 130, 161, 255, 257};
  const KernelInfo& kernel = GetParam();
  const GemmOp op = op_of(kernel);
  // Pairs of CTAs take every 66th tile, or few more: with a period of five each has both sorts.
  const auto is_bad = [](auto expert) { return expert % 5 < 2; };
  LayerDesc desc;
  desc.tokens = 64;
  desc.experts.hidden = 136;
  desc.experts.intermediate = 72;
  desc.router.experts = kOnCpu ? 20 : 300;
  desc.experts.dtype = DType::bf16;
  desc.router.input = RouterInput::lists;
  const Random random(1, 2);
  const auto [lists, first] = counted(
      desc.router.experts,
      [&](auto e) {
        return is_bad(e) ? 256 : kCounts[static_cast<std::size_t>(e) % std::size(kCounts)];
      },
      // The last 32 tokens are the bad ones.
      [&](auto i, auto e) { return random.below(i, 32) + (is_bad(e) ? 32 : 0); });
  desc.router.list_length = first.back();
  const std::vector<LayerDesc> runs = by_layout_and_source(kernel, op, desc);
  if (runs.empty()) GTEST_SKIP() << "nothing that this kernel runs on this processor";
  for (const LayerDesc& with : runs) {
    SCOPED_TRACE(to_string(with));
    expect_no_others(kernel, with, lists, first, is_bad);
  }
}

/// Rounded normal numbers, instead of integers that come through anything.
Tensor uneven(std::size_t size, DType type, std::uint64_t seed) {
  const Random random(seed, 5);
  Tensor values(size);
  for (std::size_t i = 0; i < size; ++i) values[i] = round_to(random.normal(i), type);
  return values;
}

/// W1 of one expert, for an x of ones in four columns: every A lies within an fp32 rounding or two
/// of the middle between two numbers of 16 bits, so that it shows by which of two ways of the same
/// accuracy it was computed.
void put_on_midpoints(const LayerDesc& desc, GemmInputs* inputs) {
  const bool gated = is_glu(desc.experts.activation);
  const Random random(7, 6);
  const double step =
      desc.experts.dtype == DType::bf16 ? 0x1p-7 : 0x1p-10;  // of numbers from 1 to 2
  const auto silu = [](double h) { return h / (1 + std::exp(-h)); };
  std::fill(inputs->x.begin(), inputs->x.end(), 1);
  std::fill(inputs->w1.begin(), inputs->w1.end(), 0);
  // Three numbers of 16 bits add up to one of fp32.
  const auto put = [&](std::int64_t row, double value) {
    for (int i = 1; i <= 3; ++i) {
      const double part = round_to(value, desc.experts.dtype);
      inputs->w1[row * desc.experts.hidden + i] = part;
      value -= part;
    }
  };
  for (std::int64_t j = 0; j < desc.experts.intermediate; ++j) {
    const double middle = round_to(1 + random.uniform(2 * j) * 0.9, desc.experts.dtype) + step / 2;
    if (gated) {
      const double gate = round_to(0.5 + random.uniform(2 * j + 1), desc.experts.dtype);
      inputs->w1[j * desc.experts.hidden] = gate;
      put(desc.experts.intermediate + j, middle / silu(gate));
    } else {
      double h = middle;  // Newton's method; silu rises there
      for (int i = 0; i < 50; ++i) {
        const double s = 1 / (1 + std::exp(-h));
        h -= (silu(h) - middle) / (s + h * s * (1 - s));
      }
      put(j, h);
    }
  }
}

// What a token's row becomes depends on nothing but the token and the expert: not on where among
// the expert's rows it lies.
TEST_P(ExactActivation, RowsOfOneTokenAreAlike) {
  if (GetParam().name.starts_with("cpu.")) {
    GTEST_SKIP() << "OpenBLAS sums rows at an edge differently on some processors (Zen 5)";
  }
  const GemmOp op = op_of(GetParam());
  constexpr std::int64_t kRows = 300;
  for_layers({3, 136, 1032, 1, kRows}, [&](const LayerDesc& desc) {
    Routing lists;
    lists.tokens.assign(kRows, 1);
    lists.experts.assign(kRows, 0);
    GemmInputs inputs = integer_inputs(desc, lists, 3);
    std::uint64_t seed = 0;
    for (Tensor* values : {&inputs.x, &inputs.dout, &inputs.w1, &inputs.w2, &inputs.preact}) {
      *values = uneven(values->size(), desc.experts.dtype, ++seed);
    }
    const bool silu = desc.experts.activation.kind == Activation::swiglu ||
                      desc.experts.activation.kind == Activation::silu;
    if (op == GemmOp::up_proj && silu && desc.experts.dtype != DType::f32)
      put_on_midpoints(desc, &inputs);
    const std::int64_t width = desc.experts.preact_width();
    for (std::int64_t i = width; i < kRows * width; ++i) {
      inputs.preact[i] = inputs.preact[i - width];
    }
    std::fill(inputs.slot_scores.begin(), inputs.slot_scores.end(), 0.7);
    const GemmRun run = run_kernel(op, desc, inputs, GetParam().name);
    ASSERT_EQ(run.failure, "");
    for (const GemmOutput& output : kGemmOutputs) {
      const Tensor& ours = run.tensors.*output.member;
      const std::size_t columns = ours.size() / kRows;
      for (std::size_t i = columns; i < ours.size(); ++i) {
        ASSERT_EQ(ours[i], ours[i % columns])
            << output.name << " row " << i / columns << " column " << i % columns;
      }
    }
  });
}

// Gates that no model has, but that numbers of 16 bits may be: what they let through is nearly 0.
TEST_P(ExactActivation, GatesMayBeFarBelowZero) {
  constexpr std::int32_t kTokens = 20;
  for_layers({kTokens, 16, 136, 1, kTokens}, [&](const LayerDesc& desc) {
    const auto [lists, first] = counted(
        1, [&](auto) { return kTokens; }, [](auto i, auto) { return i; });
    GemmInputs inputs = integer_inputs(desc, lists, 4);
    // All gates of token t are one number from -80 to -63000, its up parts are t.
    std::fill(inputs.x.begin(), inputs.x.end(), 0);
    std::fill(inputs.w1.begin(), inputs.w1.end(), 0);
    const std::int64_t width = desc.experts.preact_width();
    for (std::int64_t j = 0; j < width; ++j) {
      const bool gate = j < desc.experts.intermediate;
      inputs.w1[j * desc.experts.hidden + (gate ? 0 : 1)] = 1;
      for (std::int64_t t = 0; t < kTokens; ++t) {
        const double number = -80 * std::pow(1.42, static_cast<double>(t));
        inputs.x[t * desc.experts.hidden] = round_to(number, desc.experts.dtype);
        inputs.x[t * desc.experts.hidden + 1] = static_cast<double>(t);
        inputs.preact[t * width + j] = inputs.x[t * desc.experts.hidden + (gate ? 0 : 1)];
      }
    }
    const GemmRun run = run_kernel(op_of(GetParam()), desc, inputs, GetParam().name);
    ASSERT_EQ(run.failure, "");
    std::size_t small = 0;
    for (const Tensor* ours : {&run.tensors.act, &run.tensors.dpreact, &run.tensors.scaled_act,
                               &run.tensors.row_dscores}) {
      for (const double value : *ours) ASSERT_LT(std::fabs(value), kTrace);
      small += ours->size();
    }
    EXPECT_GE(small, static_cast<std::size_t>(kTokens * desc.experts.intermediate));
  });
}

// Where the tensor that rows come from is larger than L2 and there are tiles enough, CTAs begin one
// after the other. (Those of up_proj with contiguous rows begin together.)
TEST_P(ExactActivation, StartsApart) {
  if (kOnCpu) GTEST_SKIP() << "has no CTAs";
  const DeviceTraits device = device_traits(kDevice);
  const GemmOp op = op_of(GetParam());
  const auto starts_apart = [&](const Shape& shape, std::int64_t read, std::int64_t rows) {
    const double rounds = cuda::rounds(device, rows, shape.experts, 1);
    return cuda::start_spread(device, read * shape.hidden * 2, rounds, 1000) > 0;
  };
  const Shape gathered = {3'200'000, 8, 8, 4, 140'000};
  ASSERT_TRUE(starts_apart(gathered, gathered.tokens, gathered.list_length));
  const Shape contiguous = {500, 144, 8, 4, 250'000};
  const std::int64_t owned = contiguous.list_length * 3 / 4;  // at least: a fifth has no expert
  ASSERT_TRUE(starts_apart(contiguous, owned, owned));
  int runs = 0;
  for (const RowSource source : {RowSource::gathered, RowSource::contiguous}) {
    const Shape& shape = source == RowSource::gathered ? gathered : contiguous;
    for (const LayerDesc& desc : by_source(GetParam(), op, layer_of(shape, DType::bf16), 1)) {
      if (desc.experts.row_source != source) continue;
      expect_exact(op, desc, integer_inputs(desc, routing(shape), 1), GetParam().name);
      ++runs;
    }
  }
  EXPECT_GT(runs, 0);
}

/// What the gradients of the weights are added to: small integers, all different nearby.
Tensor before(std::size_t size) {
  Tensor values(size);
  for (std::size_t i = 0; i < size; ++i) values[i] = static_cast<double>(i * 7 % 29) - 14;
  return values;
}

class ExactWeightGradient : public ExactGemm {
 protected:
  /// The gradient that this kernel makes.
  static const Tensor& gradient(const LayerTensors& tensors) {
    return op_of(GetParam()) == GemmOp::up_proj_wgrad ? tensors.dw1 : tensors.dw2;
  }
  /// Part `e` of `experts` is the same in both.
  static void expect_same_expert(const Tensor& ours, const Tensor& right, std::size_t e,
                                 std::size_t experts) {
    const std::size_t size = right.size() / experts;
    ASSERT_EQ(ours.size(), right.size());
    const Check check = same_values("dw", std::span(ours).subspan(e * size, size),
                                    std::span(right).subspan(e * size, size));
    EXPECT_TRUE(check.pass) << "expert " << e << ": " << check.note;
  }
};

TEST_P(ExactWeightGradient, OverwritesOrAccumulates) {
  const KernelInfo& kernel = GetParam();
  const GemmOp op = op_of(kernel);
  int runs = 0;
  for (const DType dtype : kTypes) {
    for (const W1Layout layout : layouts(Activation::swiglu)) {
      // The second has several pieces of every tile.
      for (int mode = 0; mode < 8; ++mode) {
        const Shape shape = mode < 4 ? shapes().front() : shapes().back();
        LayerDesc base = layer_of(shape, dtype);
        base.experts.w1_layout = layout;
        base.experts.f32_weight_grads = mode % 2 == 1;
        base.experts.accumulate_weight_grads = mode / 2 % 2 == 1;
        for (const LayerDesc& desc : by_source(kernel, op, base, mode)) {
          SCOPED_TRACE(to_string(desc));
          GemmInputs inputs = integer_inputs(desc, routing(shape), 5);
          // Sums of integers are exact; they are rounded once, after what was there is added.
          const LayerTensors exact = oracle_gemm(op, desc, inputs, Precision::exact);
          Tensor expected = gradient(exact);
          const Tensor old = before(expected.size());
          (op == GemmOp::up_proj_wgrad ? inputs.dw1 : inputs.dw2) = old;
          if (desc.experts.accumulate_weight_grads) {
            for (std::size_t i = 0; i < old.size(); ++i) expected[i] += old[i];
          }
          const DType stored = desc.experts.f32_weight_grads ? DType::f32 : dtype;
          expected = decode(encode(expected, stored), stored);
          const GemmRun run = run_kernel(op, desc, inputs, kernel.name);
          ASSERT_EQ(run.failure, "");
          const Check check = same_values("dw", gradient(run.tensors), expected);
          ASSERT_TRUE(check.pass) << check.note;
          ++runs;
        }
      }
    }
  }
  if (runs == 0) GTEST_SKIP() << "nothing that this kernel runs on this processor";
}

// CUDA multiplies 64 rows at a time, of the last ones as many times 16 as there are, and the rows
// that follow are another expert's.
TEST_P(ExactWeightGradient, AnyNumberOfRows) {
  constexpr int kCounts[] = {0,  1,  15, 16, 17, 31,  32,  33,  47, 48,
                             49, 63, 64, 65, 80, 112, 128, 129, 0};
  const KernelInfo& kernel = GetParam();
  const GemmOp op = op_of(kernel);
  LayerDesc desc;
  desc.tokens = 50;
  desc.experts.hidden = 72;
  desc.experts.intermediate = 136;
  desc.router.experts = static_cast<std::int64_t>(std::size(kCounts));
  desc.router.input = RouterInput::lists;
  const Random random(1, 2);
  const auto [lists, first] = counted(
      desc.router.experts, [&](auto e) { return kCounts[static_cast<std::size_t>(e)]; },
      [&](auto i, auto) { return random.below(i, desc.tokens); });
  desc.router.list_length = first.back();
  int runs = 0;
  for (const DType dtype : kTypes) {
    desc.experts.dtype = dtype;
    for (const bool f32 : {false, true}) {  // on CUDA a kernel of its own
      desc.experts.f32_weight_grads = f32;
      for (const LayerDesc& with : by_layout_and_source(kernel, op, desc)) {
        SCOPED_TRACE(to_string(with));
        const GemmInputs clean = integer_inputs(with, lists, 3);
        const LayerTensors expected = oracle_gemm(op, with, clean, Precision::rounded);
        for (std::size_t bad = 0; bad < 2; ++bad) {  // every other expert has nothing but NaN
          GemmInputs inputs = clean;
          for (std::size_t e = bad; e + 1 < first.size(); e += 2) {
            for (Tensor* rows : {&inputs.dpreact, &inputs.scaled_act}) {
              const auto width = static_cast<std::int64_t>(rows->size()) / desc.router.list_length;
              std::fill(rows->begin() + first[e] * width, rows->begin() + first[e + 1] * width,
                        std::numeric_limits<double>::quiet_NaN());
            }
          }
          const GemmRun run = run_kernel(op, with, inputs, kernel.name);
          ASSERT_EQ(run.failure, "");
          for (std::size_t e = 1 - bad; e < std::size(kCounts); e += 2) {
            SCOPED_TRACE(std::to_string(kCounts[e]) + " rows");
            expect_same_expert(gradient(run.tensors), gradient(expected), e, std::size(kCounts));
          }
        }
        ++runs;
      }
    }
  }
  if (runs == 0) GTEST_SKIP() << "nothing that this kernel runs on this processor";
}

// The order of the experts decides nothing; what is no expert there is skipped, and experts that
// are missing keep what they had.
TEST_P(ExactWeightGradient, AnyOrderOfExperts) {
  const KernelInfo& kernel = GetParam();
  const GemmOp op = op_of(kernel);
  const Shape shape = {40, 264, 136, 70, 1500};  // three windows of the walk
  LayerDesc desc = layer_of(shape, kTypes[0]);
  if (!runs_as(kernel, op, desc.experts)) {
    GTEST_SKIP() << "nothing that this kernel runs on this processor";
  }
  for (const W1Layout layout : {W1Layout::interleaved, W1Layout::transposed}) {
    SCOPED_TRACE(name(layout));
    desc.experts.w1_layout = layout;
    GemmInputs inputs = integer_inputs(desc, routing(shape), 4);
    const LayerTensors expected = oracle_gemm(op, desc, inputs, Precision::rounded);
    const Tensor& right = gradient(expected);
    const std::size_t size = right.size() / 70;
    const auto run = [&](const std::vector<std::int32_t>& order) {
      inputs.expert_order = order;
      const GemmRun done = run_kernel(op, desc, inputs, kernel.name);
      EXPECT_EQ(done.failure, "");
      return gradient(done.tensors);
    };
    std::vector<std::int32_t> order(70);
    for (int step : {0, 1, 69, 27}) {  // not given, ascending, descending, mixed
      for (int e = 0; e < 70; ++e) order[e] = e * step % 70;
      const Tensor ours = run(step == 0 ? std::vector<std::int32_t>() : order);
      for (std::size_t e = 0; e < 70; ++e) expect_same_expert(ours, right, e, 70);
    }
    if (kOnCpu) continue;  // it does not read the order
    for (const int missing : {0, 31, 32, 69}) {
      for (const std::int32_t none : {-1, 70, INT32_MIN, INT32_MAX}) {
        std::vector<std::int32_t> some = order;
        some[missing] = none;
        const Tensor ours = run(some);
        for (std::size_t e = 0; e < 70; ++e) {
          if (static_cast<std::int32_t>(e) != order[missing]) {
            expect_same_expert(ours, right, e, 70);
          } else {
            for (std::size_t i = 0; i < size; ++i) ASSERT_TRUE(std::isnan(ours[e * size + i]));
          }
        }
      }
    }
  }
}

// Few runs, which a tool that watches every access can afford: with a gate, a bias and a part of a
// tile, and without a gate, with tiles that are full.
TEST_P(ExactGemm, Quick) {
  if (kOnCpu) GTEST_SKIP() << "the sanitizers of the CPU run the tests above";
  const GemmOp op = op_of(GetParam());
  int runs = 0;
  for (const bool gated : {true, false}) {
    const Shape shape = gated ? shapes().front() : Shape{140, 16, 264, 1, 300};
    LayerDesc desc = layer_of(shape, kTypes[0]);
    if (!gated) desc.experts.activation = Activation::relu_sq;
    for (const W1Layout layout : {W1Layout::interleaved, W1Layout::transposed_interleaved}) {
      desc.experts.w1_layout = layout;
      for (LayerDesc with : by_source(GetParam(), op, desc, gated ? 2 : 1)) {
        SCOPED_TRACE(to_string(with));
        LayerDesc biased = with;
        biased.experts.bias = gated;
        if (runs_as(GetParam(), op, biased.experts)) with = biased;
        expect_exact(op, with, integer_inputs(with, routing(shape), 1), GetParam().name);
        ++runs;
      }
    }
  }
  EXPECT_GT(runs, 0);
}

constexpr GemmOp kWithActivation[] = {GemmOp::up_proj, GemmOp::down_proj_dgrad};
constexpr GemmOp kWeightGradients[] = {GemmOp::down_proj_wgrad, GemmOp::up_proj_wgrad};
INSTANTIATE_TEST_SUITE_P(Kernels, ExactGemm, testing::ValuesIn(kernels_for(kGemmOps)), kLabel);
INSTANTIATE_TEST_SUITE_P(Kernels, ExactActivation, testing::ValuesIn(kernels_for(kWithActivation)),
                         kLabel);
INSTANTIATE_TEST_SUITE_P(Kernels, ExactWeightGradient,
                         testing::ValuesIn(kernels_for(kWeightGradients)), kLabel);

TEST(ExactGemm, EveryOperationHasAKernel) {
  for (const GemmOp op : kGemmOps) {
    bool found = false;
    for (const KernelInfo& kernel : kernels_for(kGemmOps)) found = found || kernel.op == name(op);
    EXPECT_TRUE(found) << name(op);
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
