// The scalar functions that CPU and GPU share, against fp64.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "math/activation.h"
#include "math/convert.h"
#include "math/exp.h"
#include "math/softmax.h"
#include "testkit/numbers.h"

namespace sonicmoe {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

/// |value - exact| in units of the last place of a float near `exact`.
double ulps(double value, double exact) {
  const double magnitude = std::fmax(std::fabs(exact), std::numeric_limits<float>::min());
  return std::fabs(value - exact) / std::ldexp(1.0, std::ilogb(magnitude) - 23);
}

/// Calls f with about `count` floats from `low` to `high`, evenly spaced in value, and their
/// neighbours.
template <class F>
void sweep(float low, float high, int count, F f) {
  for (int i = 0; i <= count; ++i) {
    const auto x = static_cast<float>(low + (static_cast<double>(high) - low) * i / count);
    f(x);
    f(std::nextafter(x, kInf));
  }
}

TEST(Exp, WithinItsBoundWhereTheResultIsNormal) {
  double worst = 0;
  sweep(-87.33f, 88.72f, 2000000, [&](float x) {
    worst = std::fmax(worst, ulps(math::exp(x), std::exp(static_cast<double>(x))));
  });
  EXPECT_LE(worst, 1.01);  // 1.0086 over all floats
}

TEST(Exp, Ends) {
  EXPECT_EQ(math::exp(0.0f), 1.0f);
  EXPECT_EQ(math::exp(-0.0f), 1.0f);
  EXPECT_EQ(math::exp(-kInf), 0.0f);
  EXPECT_EQ(math::exp(kInf), kInf);
  EXPECT_EQ(math::exp(89.0f), kInf);
  EXPECT_EQ(math::exp(-104.0f), 0.0f);
  EXPECT_TRUE(std::isnan(math::exp(kNan)));
  // Denormal results lose bits, but not by much.
  sweep(-103.0f, -87.4f, 10000,
        [](float x) { ASSERT_NEAR(math::exp(x), std::exp(static_cast<double>(x)), 0x1p-149); });
}

TEST(Exp, RisesMonotonically) {
  float last = 0;
  for (float x = -20; x < 20; x += 0x1p-12f) {
    const float y = math::exp(x);
    ASSERT_GE(y, last) << x;
    last = y;
  }
}

TEST(Sigmoid, StaysFiniteAtTheEnds) {
  EXPECT_EQ(math::sigmoid(0.0f), 0.5f);
  EXPECT_EQ(math::sigmoid(1000.0f), 1.0f);
  EXPECT_EQ(math::sigmoid(-1000.0f), 0.0f);
  EXPECT_TRUE(std::isnan(math::sigmoid(kNan)));
}

TEST(Sigmoid, ByNewtonIsClose) {
  double worst = 0;
  for (const int exponent : {0, 1, 63, 124}) {
    sweep(1.0f, 2.0f, 100000, [&](float m) {
      const float d = std::ldexp(m, exponent);
      worst = std::fmax(worst, std::fabs(static_cast<double>(math::reciprocal_by_newton(d)) *
                                             static_cast<double>(d) -
                                         1));
    });
  }
  EXPECT_LE(worst, 0x1p-23);
  EXPECT_EQ(math::reciprocal_by_newton(1.0f), 1.0f);  // so that a gate that is open changes nothing
  sweep(-86.6f, 86.6f, 100000, [](float x) {
    const double exact = 1 / (1 + std::exp(-static_cast<double>(x)));
    ASSERT_NEAR(math::sigmoid_by_newton(x), exact, 0x1p-22 * exact) << x;
  });
  EXPECT_EQ(math::sigmoid_by_newton(kInf), 1.0f);
}

// Every exponent and every pattern of the bits that rounding looks at.
TEST(Convert, Bf16RoundsAsTheOracleDoes) {
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float value = math::from_bits(high << 16 | low);
      const float rounded = math::to_float(math::from_float<math::Bf16>(value));
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(rounded));
      } else {
        ASSERT_EQ(rounded, testkit::round_to(value, DType::bf16)) << value;
        ASSERT_EQ(std::signbit(rounded), std::signbit(value)) << value;
      }
    }
  }
}

/// A function and its derivative in fp64.
struct Reference {
  double (*value)(double);
  double (*slope)(double);
};

double cdf(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }
double tanh_gate(double x) {
  return 1 / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

const Reference kSilu = {[](double x) { return x / (1 + std::exp(-x)); },
                         [](double x) {
                           const double s = 1 / (1 + std::exp(-x));
                           return s + x * s * (1 - s);
                         }};
const Reference kGelu = {
    [](double x) { return x * cdf(x); },
    [](double x) { return cdf(x) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI); }};
const Reference kGeluTanh = {[](double x) { return x * tanh_gate(x); },
                             [](double x) {
                               const double s = tanh_gate(x);
                               const double inner =
                                   2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
                               return s + x * s * (1 - s) * inner;
                             }};

/// Errors are measured against max(|x|, 1) times 2^-24, the size of one rounding of the largest
/// intermediate: near a zero of the function only the absolute error can be small.
template <class F>
void expect_close(const Reference& reference, double roundings) {
  double value_error = 0, slope_error = 0;
  sweep(-30.0f, 30.0f, 200000, [&](float x) {
    const math::ValueSlope both = F::both(x);
    ASSERT_EQ(both.value, F::value(x)) << x;
    const double unit = std::fmax(std::fabs(x), 1) * 0x1p-24;
    value_error = std::fmax(value_error, std::fabs(both.value - reference.value(x)) / unit);
    slope_error = std::fmax(slope_error, std::fabs(both.slope - reference.slope(x)) / unit);
  });
  EXPECT_LE(value_error, roundings);
  EXPECT_LE(slope_error, roundings);
}

TEST(Activation, Silu) { expect_close<math::Silu>(kSilu, 6); }
TEST(Activation, Gelu) { expect_close<math::Gelu>(kGelu, 6); }
TEST(Activation, GeluTanh) { expect_close<math::GeluTanh>(kGeluTanh, 12); }

TEST(Activation, Relu) {
  EXPECT_EQ(math::Relu::both(2.0f).value, 2.0f);
  EXPECT_EQ(math::Relu::both(2.0f).slope, 1.0f);
  EXPECT_EQ(math::Relu::both(0.0f).slope, 0.0f);
  EXPECT_EQ(math::Relu::both(-2.0f).value, 0.0f);
  EXPECT_EQ(math::ReluSq::both(3.0f).value, 9.0f);
  EXPECT_EQ(math::ReluSq::both(3.0f).slope, 6.0f);
  EXPECT_EQ(math::ReluSq::both(-3.0f).slope, 0.0f);
}

TEST(Activation, GatesMultiplyTheUpPart) {
  constexpr math::Gated<math::Silu> swiglu{};
  const float value = math::Silu::value(1.5f);
  EXPECT_EQ(swiglu.forward(1.5f, -2.0f), value * -2.0f);
  const math::Gradients g = swiglu.backward(1.5f, -2.0f, 4.0f);
  EXPECT_EQ(g.act, value * -2.0f);
  EXPECT_EQ(g.dup, 4.0f * value);
  EXPECT_FLOAT_EQ(g.dgate, 4.0f * -2.0f * math::Silu::both(1.5f).slope);
  constexpr math::Plain<math::Silu> silu{};
  EXPECT_EQ(silu.forward(1.5f, kNan), value);  // there is no up part
  EXPECT_EQ(silu.backward(1.5f, kNan, 4.0f).dup, 0.0f);
}

TEST(Activation, ByNewtonIsTheSameFunction) {
  constexpr math::Gated<math::Silu> swiglu{};
  constexpr math::Plain<math::Silu> silu{};
  sweep(-86.6f, 86.6f, 100000, [&](float x) {
    const double exact = kSilu.value(x);
    ASSERT_NEAR(silu.forward_by_newton(x, kNan), exact, 0x1p-21 * std::fabs(exact) + 0x1p-149);
    ASSERT_EQ(swiglu.forward_by_newton(x, -2.0f), -2.0f * silu.forward_by_newton(x, 0.0f));
  });
  for (const float x : {-86.7f, -88.0f, -1000.0f, -1e30f, -3e38f, -kInf}) {
    EXPECT_LE(silu.forward_by_newton(x, 0.0f), 0.0f);
    EXPECT_GT(silu.forward_by_newton(x, 0.0f), -0x1p-118f);
  }
  EXPECT_TRUE(std::isnan(swiglu.forward_by_newton(kNan, 1.0f)));
  EXPECT_EQ(swiglu.forward_by_newton(kInf, 1.0f), kInf);
  // No reciprocal, or none that has another way.
  constexpr math::Gated<math::Relu> reglu{};
  EXPECT_EQ(reglu.forward_by_newton(3.0f, 2.0f), 6.0f);
  constexpr math::Plain<math::Gelu> gelu{};
  EXPECT_EQ(gelu.forward_by_newton(0.7f, kNan), gelu.forward(0.7f, kNan));
}

// The documented order, written out: 32 lanes, then pairs at distance 16, 8, 4, 2, 1.
TEST(LaneSum, AddsInTheDocumentedOrder) {
  for (const int n : {0, 1, 5, 31, 32, 33, 100, 128}) {
    const auto term = [](int i) { return static_cast<float>(std::sin(i + 1.0)) * (1 << i % 20); };
    float lanes[32] = {};
    for (int i = 0; i < n; ++i) lanes[i % 32] += term(i);
    for (const int distance : {16, 8, 4, 2, 1}) {
      for (int l = 0; l < 32; ++l)
        lanes[l] = lanes[l] + (l + distance < 32 ? lanes[l + distance] : 0);
    }
    EXPECT_EQ(math::lane_sum32(n, term), lanes[0]) << n;
  }
}

}  // namespace
}  // namespace sonicmoe
