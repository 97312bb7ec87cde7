// Every loss on the logits with every option, by the oracle; the layer's own loss, plain, is also
// among the operations that layer_test checks.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "sonicmoe/ops.h"
#include "testkit/inputs.h"
#include "testkit/run.h"
#include "tests/device.h"

namespace sonicmoe::testkit {
namespace {

using Ints = std::vector<std::int32_t>;
using Mask = std::vector<std::uint8_t>;
constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kDloss = 96;  // large, for gradients that fp16 does not lose

struct Inputs {
  Tensor logits;
  Ints counts;
  Mask mask;
};

std::vector<DType> types() {
  std::vector<DType> all(kTypes.begin(), kTypes.end());
  if (!kOnCpu) all.push_back(DType::f32);
  return all;
}

/// The losses and their options. z has neither scores nor sequences.
std::vector<AuxLossDesc> losses(std::int64_t tokens, std::int64_t experts,
                                const std::vector<std::int64_t>& sequences = {1, 3}) {
  std::vector<AuxLossDesc> all;
  for (const bool masked : {false, true}) {
    AuxLossDesc d{.tokens = tokens, .experts = experts, .masked = masked};
    d.loss = RouterLoss::z;
    all.push_back(d);
    d.loss = RouterLoss::balance;
    for (const auto score :
         {RouterScore::softmax, RouterScore::sigmoid, RouterScore::sqrt_softplus}) {
      for (const std::int64_t b : sequences) {
        d.score = score;
        d.sequences = b;
        all.push_back(d);
      }
    }
  }
  return all;
}

std::string text(const AuxLossDesc& d) {
  return std::string(name(d.loss)) + " " + name(d.score) + " " + name(d.dtype) + " T " +
         std::to_string(d.tokens) + " E " + std::to_string(d.experts) + " B " +
         std::to_string(d.sequences) + (d.masked ? " masked" : "");
}

/// Logits of a few units, counts from 0 to 6, and a mask that leaves two of five tokens out.
Inputs inputs_of(const AuxLossDesc& d) {
  Inputs in;
  const Random random(7, static_cast<std::uint64_t>(d.tokens + d.experts));
  for (std::int64_t i = 0; i < d.tokens * d.experts; ++i) {
    in.logits.push_back(round_to(2 * random.normal(i), d.dtype));
  }
  if (d.loss == RouterLoss::balance) {
    for (std::int64_t i = 0; i < d.sequences * d.experts; ++i) {
      in.counts.push_back(static_cast<std::int32_t>((i * i + i / 5) % 7));
    }
    in.counts.front() = 3;  // a sequence of one expert is not without counts
  }
  for (std::int64_t t = 0; t < d.tokens && d.masked; ++t) {
    in.mask.push_back(t % 5 < 2 ? 0 : t % 3 == 0 ? 255 : 1);
  }
  return in;
}

/// The loss, or with d.backward its gradient.
Tensor run(const AuxLossDesc& d, const Inputs& in, const Options& options = {}) {
  const auto plan = make_plan(d, kDevice, options);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  Arena arena(kDevice);
  AuxLossArgs args;
  args.logits = arena.input("logits", in.logits, d.dtype);
  args.counts = arena.input("counts", in.counts);
  args.token_mask = static_cast<const std::uint8_t*>(
      arena.input("token_mask", std::as_bytes(std::span(in.mask)), 1));
  if (d.backward) {
    args.dloss = static_cast<const float*>(arena.input("dloss", {kDloss}, DType::f32));
    args.dlogits = arena.output("dlogits", in.logits.size(), d.dtype);
  } else {
    args.loss = arena.output_float("loss", 1);
  }
  Arena scratch(kDevice);
  const std::size_t bytes = plan.value().workspace_bytes();
  const Status status = plan.value().run(args, {scratch.output("workspace", bytes, 256), bytes});
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(arena.damage() + scratch.damage(), "");
  return d.backward ? arena.tensor("dlogits", d.dtype) : arena.tensor("loss", DType::f32);
}

AuxLossDesc backward(AuxLossDesc d) {
  d.backward = true;
  return d;
}

void expect_pass(const Check& check) {
  EXPECT_TRUE(check.pass) << check.tensor << ": error " << check.error << ", bound " << check.bound
                          << " " << check.note;
}

/// Loss and gradient by the 2x rule.
void expect_right(const AuxLossDesc& d, const Inputs& in) {
  SCOPED_TRACE(text(d));
  const Oracle exact({}, Precision::exact), plain({}, Precision::plain);
  expect_pass(two_times_rule("loss", run(d, in),
                             Tensor{exact.aux_loss(d, in.logits, in.counts, in.mask)},
                             Tensor{plain.aux_loss(d, in.logits, in.counts, in.mask)}));
  const auto gradient = [&](const Oracle& oracle, bool magnitudes) {
    return oracle.aux_loss_grad(d, in.logits, in.counts, in.mask, kDloss, magnitudes);
  };
  // 1 - e^(-p^2) of the slope is right to 2^-20 on the GPU: see one_minus_exp2.
  const bool approximate = !kOnCpu && d.score == RouterScore::sqrt_softplus;
  expect_pass(two_times_rule("dlogits", run(backward(d), in), gradient(exact, false),
                             gradient(plain, false), {},
                             {.relative = approximate ? 0x1p-20 : 0,
                              .absolute = cancellation_allowance(gradient(exact, true))}));
}

TEST(AuxLoss, TwoTimesRule) {
  // One chunk of tokens and several; experts in one part of a warp, in several, in several blocks.
  for (const auto& [tokens, experts] :
       {std::pair<std::int64_t, std::int64_t>{3, 1}, {12, 5}, {699, 64}, {2100, 130}, {36, 1100}}) {
    for (AuxLossDesc d : losses(tokens, experts)) {
      for (const DType dtype : types()) {
        d.dtype = dtype;
        expect_right(d, inputs_of(d));
      }
    }
  }
}

TEST(AuxLoss, ManySequences) {
  // So many that each has one chunk, down to one token.
  for (AuxLossDesc d : losses(1200, 6, {40, 100, 600, 1200})) {
    d.dtype = types().front();
    expect_right(d, inputs_of(d));
  }
}

TEST(AuxLoss, KnownValues) {
  AuxLossDesc d{.tokens = 2, .experts = 3, .dtype = DType::f32};
  for (const auto score :
       {RouterScore::softmax, RouterScore::sigmoid, RouterScore::sqrt_softplus}) {
    d.score = score;
    // Equal shares: 1 whatever the counts.
    EXPECT_NEAR(run(d, {Tensor(6, 0.5), {1, 1, 2}, {}})[0], 1, 0x1p-22);
    // All shares and choices on one expert: E.
    const Tensor sure = {40, -kInf, -kInf, 40, -kInf, -kInf};
    EXPECT_EQ(run(d, {sure, {4, 0, 0}, {}})[0], 3);
    // The first sequence as before, the second with choices where no share is: 3 and 0.
    d.sequences = 2;
    EXPECT_EQ(run(d, {sure, {4, 0, 0, 0, 0, 4}, {}})[0], 1.5);
    d.sequences = 1;
  }
  d.loss = RouterLoss::z;
  d.score = RouterScore::softmax;
  EXPECT_NEAR(run(d, {Tensor(6, 0.0), {}, {}})[0], std::log(3) * std::log(3), 0x1p-21);
}

/// The oracle's own gradient against differences of its loss, extrapolated from two steps. What is
/// left is below their difference; the loss's rounding adds a few of its units over the step.
TEST(AuxLoss, OracleGradient) {
  for (AuxLossDesc d : losses(12, 5)) {
    SCOPED_TRACE(text(d));
    const Inputs in = inputs_of(d);
    const Oracle oracle({}, Precision::exact);
    const Tensor gradient = oracle.aux_loss_grad(d, in.logits, in.counts, in.mask, 1);
    const double step = 1e-3;
    double allowed = 0, compared = 0;
    for (std::size_t i = 0; i < in.logits.size(); ++i) {
      const auto loss_at = [&](double shift) {
        Tensor moved = in.logits;
        moved[i] += shift;
        return oracle.aux_loss(d, moved, in.counts, in.mask);
      };
      const auto difference = [&](double h) { return (loss_at(h) - loss_at(-h)) / (2 * h); };
      const double near = difference(step), far = difference(2 * step);
      const double limit = std::fabs(near - far) + 64 * 0x1p-53 * std::fabs(loss_at(0)) / step;
      EXPECT_NEAR(gradient[i], (4 * near - far) / 3, limit) << i;
      allowed += limit;
      compared += std::fabs(gradient[i]);
    }
    EXPECT_LT(allowed, 1e-4 * compared);  // the comparison means something
  }
}

TEST(AuxLoss, MaskedTokensAreNotRead) {
  for (AuxLossDesc d : losses(699, 20)) {
    if (!d.masked) continue;
    SCOPED_TRACE(text(d));
    d.dtype = types().front();
    const Inputs in = inputs_of(d);
    Inputs spoiled = in;
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      if (in.mask[t] != 0) continue;
      for (std::int64_t e = 0; e < d.experts; ++e) {
        spoiled.logits[t * d.experts + e] = e % 2 == 0 ? kNan : kInf;
      }
    }
    EXPECT_EQ(run(d, spoiled), run(d, in));
    const Tensor gradient = run(backward(d), spoiled);
    EXPECT_EQ(gradient, run(backward(d), in));
    for (std::int64_t t = 0; t < d.tokens; ++t) {
      if (in.mask[t] != 0) continue;
      for (std::int64_t e = 0; e < d.experts; ++e) ASSERT_EQ(gradient[t * d.experts + e], 0);
    }
  }
}

/// A mean over nothing: the loss and its gradient are 0, whatever the logits are.
void expect_nothing(const AuxLossDesc& d, Inputs in) {
  SCOPED_TRACE(text(d));
  EXPECT_EQ(run(d, in), Tensor{0});
  EXPECT_EQ(run(backward(d), in), Tensor(in.logits.size(), 0.0));
}

TEST(AuxLoss, NothingCounts) {
  for (AuxLossDesc d : losses(30, 6)) {
    d.dtype = types().front();
    Inputs in = inputs_of(d);
    if (d.masked) {  // with and without choices of tokens that do not count
      in.mask.assign(d.tokens, 0);
      in.logits.assign(in.logits.size(), kNan);
      expect_nothing(d, in);
    }
    if (d.loss == RouterLoss::balance) {
      in.counts.assign(in.counts.size(), 0);
      expect_nothing(d, in);
    }
  }
  for (AuxLossDesc d : losses(0, 6, {1})) {
    d.dtype = types().front();
    expect_nothing(d, inputs_of(d));
  }
}

TEST(AuxLoss, SequencesWithoutCountsAreLeftOut) {
  for (AuxLossDesc d : losses(48, 6, {3})) {
    if (d.loss != RouterLoss::balance) continue;
    d.dtype = types().front();
    Inputs in = inputs_of(d);
    std::fill_n(in.counts.begin() + 6, 6, 0);
    expect_right(d, in);
    const double loss = run(d, in)[0];
    const Tensor gradient = run(backward(d), in);
    std::fill_n(in.logits.begin() + 16 * 6, 16 * 6, kNan);
    EXPECT_EQ(run(d, in), Tensor{loss});
    EXPECT_EQ(run(backward(d), in), gradient);
    for (std::int64_t i = 16 * 6; i < 32 * 6; ++i) ASSERT_EQ(gradient[i], 0);
  }
}

TEST(AuxLoss, LogitsOfMinusInfinity) {
  for (AuxLossDesc d : losses(48, 6)) {
    for (const DType dtype : types()) {
      d.dtype = dtype;
      Inputs in = inputs_of(d);
      for (std::size_t i = 0; i < in.logits.size(); ++i) {
        if (i % 4 == 1) in.logits[i] = -kInf;
      }
      expect_right(d, in);
      if (d.score == RouterScore::softmax) continue;
      // Rows without a score: q is 0, and they get no gradient.
      std::fill_n(in.logits.begin() + 3 * 6, 6, -kInf);
      expect_right(d, in);
      std::fill_n(in.logits.begin(), 16 * 6, -kInf);  // with three sequences: all of one's rows
      expect_right(d, in);
      in.logits.assign(in.logits.size(), -kInf);
      expect_nothing(d, in);
    }
  }
}

TEST(AuxLoss, ResultsDoNotDependOnThreads) {
  for (AuxLossDesc d : losses(699, 20)) {
    SCOPED_TRACE(text(d));
    d.dtype = types().front();
    const Inputs in = inputs_of(d);
    const Options one{.threads = 1, .kernel = ""}, three{.threads = 3, .kernel = ""};
    EXPECT_EQ(run(d, in, one), run(d, in, three));
    EXPECT_EQ(run(backward(d), in, one), run(backward(d), in, three));
  }
}

}  // namespace
}  // namespace sonicmoe::testkit
