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

TEST(OneMinusExp2, KeepsItsRelativeAccuracy) {
  EXPECT_EQ(math::one_minus_exp2(0.0f), 0.0f);
  EXPECT_EQ(math::one_minus_exp2(30.0f), 1.0f);
  EXPECT_EQ(math::one_minus_exp2(3e38f), 1.0f);
  EXPECT_EQ(math::one_minus_exp2(kInf), 1.0f);
  EXPECT_TRUE(std::isnan(math::one_minus_exp2(kNan)));
  double worst = 0;
  const auto check = [&](float t) {
    const double exact = -std::expm1(-t * std::log(2.0));
    worst = std::fmax(worst, std::fabs(math::one_minus_exp2(t) / exact - 1));
  };
  sweep(1e-6f, 40.0f, 400000, check);
  for (float t = 1e-30f; t < 1; t *= 1.01f) check(t);
  EXPECT_LE(worst, 0x1p-23);
}

/// An activation with parameters in fp64, inside its limits and beyond; slopes by differences.
struct Parametrized {
  ActivationSpec spec;
  double (*value)(const ActivationSpec& spec, double gate, double up);
};

ActivationSpec spec_of(Activation kind, float alpha, float beta, float limit) {
  ActivationSpec spec = kind;
  spec.alpha = alpha, spec.beta = beta, spec.limit = limit;
  return spec;
}

double clamped(double x, double limit) { return std::fmin(std::fmax(x, -limit), limit); }

const Parametrized kParametrized[] = {
    {spec_of(Activation::swiglu, 1, 1, 1.5f),
     [](const ActivationSpec& s, double g, double u) {
       return kSilu.value(std::fmin(g, s.limit)) * clamped(u, s.limit);
     }},
    {spec_of(Activation::swiglu_clamp_after, 1, 1, 1.5f),
     [](const ActivationSpec& s, double g, double u) {
       return std::fmin(kSilu.value(g), s.limit) * clamped(u, s.limit);
     }},
    {spec_of(Activation::swiglu_oai, 1.702f, 1, 7),
     [](const ActivationSpec& s, double g, double u) {
       const double c = std::fmin(g, s.limit);
       return c / (1 + std::exp(-s.alpha * c)) * (clamped(u, s.limit) + 1);
     }},
    {spec_of(Activation::swiglu_oai, -0.5f, 1, 3),
     [](const ActivationSpec& s, double g, double u) {
       const double c = std::fmin(g, s.limit);
       return c / (1 + std::exp(-s.alpha * c)) * (clamped(u, s.limit) + 1);
     }},
    {spec_of(Activation::situ_glu, 4, 25, kInf),
     [](const ActivationSpec& s, double g, double u) {
       return s.alpha * std::tanh(g / s.alpha) / (1 + std::exp(-g)) * s.beta *
              std::tanh(u / s.beta);
     }},
    {spec_of(Activation::situ_glu, 1000, 0.01f, kInf),
     [](const ActivationSpec& s, double g, double u) {
       return s.alpha * std::tanh(g / s.alpha) / (1 + std::exp(-g)) * s.beta *
              std::tanh(u / s.beta);
     }},
    {Activation::quick_geglu,
     [](const ActivationSpec&, double g, double u) { return g / (1 + std::exp(-1.702 * g)) * u; }}};

TEST(Activation, ParametersAgreeWithFp64) {
  constexpr double h = 1e-6;
  for (const Parametrized& p : kParametrized) {
    SCOPED_TRACE(to_string(p.spec));
    math::visit_activation(p.spec, [&](auto fn) {
      for (float g = -30; g <= 30; g += 0.37f) {
        for (float u = -30; u <= 30; u += 0.41f) {
          const auto value = [&](double gate, double up) { return p.value(p.spec, gate, up); };
          // The exponential turns a rounding of its argument into a relative error.
          const double exact = value(g, u);
          const double small = (0x1p-21 + 0x1p-23 * std::fabs(g)) * std::fabs(exact) + 1e-30;
          ASSERT_NEAR(fn.forward(g, u), exact, small) << g << " " << u;
          ASSERT_NEAR(fn.forward_by_newton(g, u), exact, small) << g << " " << u;
          const math::Gradients r = fn.backward(g, u, 2.0f);
          ASSERT_NEAR(r.act, exact, small) << g << " " << u;
          const double dgate = (value(g + h, u) - value(g - h, u)) / h;
          const double dup = (value(g, u + h) - value(g, u - h)) / h;
          // Of differences, and of 1 - tanh^2 at up to 1,000 times the scale.
          const double noise = 1e-6 * (1 + std::fabs(g) * (1 + std::fabs(u)) + std::fabs(exact));
          ASSERT_NEAR(r.dgate, dgate, noise + 1e-6 * std::fabs(dgate)) << g << " " << u;
          ASSERT_NEAR(r.dup, dup, noise + 1e-6 * std::fabs(dup)) << g << " " << u;
        }
      }
    });
  }
}

// The slopes of min and clamp: 1 at the limit, 0 beyond it, whatever the gradient is.
TEST(Activation, SlopesAtTheLimit) {
  const float above = std::nextafter(2.0f, 3.0f);
  for (const Activation kind : {Activation::swiglu, Activation::swiglu_oai}) {
    math::visit_activation(spec_of(kind, kind == Activation::swiglu ? 1 : 3, 1, 2), [&](auto fn) {
      EXPECT_GT(fn.backward(2.0f, 2.0f, 1.0f).dgate, 0.5f);
      EXPECT_GT(fn.backward(2.0f, 2.0f, 1.0f).dup, 1.0f);
      EXPECT_GT(fn.backward(2.0f, -2.0f, 1.0f).dup, 1.0f);
      EXPECT_EQ(fn.backward(above, 2.0f, kInf).dgate, 0.0f);
      EXPECT_GT(fn.backward(above, 2.0f, 1.0f).dup, 1.0f);
      EXPECT_EQ(fn.backward(2.0f, above, kNan).dup, 0.0f);
      EXPECT_EQ(fn.backward(2.0f, -above, kInf).dup, 0.0f);
    });
  }
  const auto after = math::GluClampedAfter::of(40.0f);  // silu(40) is 40
  EXPECT_EQ(after.backward(40.0f, 40.0f, 2.0f).dgate, 80.0f);
  EXPECT_EQ(after.backward(40.0f, -40.0f, 2.0f).dup, 80.0f);
  EXPECT_EQ(after.backward(41.0f, 2.0f, kInf).dgate, 0.0f);
  EXPECT_EQ(after.backward(41.0f, 2.0f, 2.0f).dup, 80.0f);
  EXPECT_EQ(after.backward(2.0f, 41.0f, kInf).dup, 0.0f);
}

TEST(Activation, ParametersAtTheEndsOfTheRange) {
  for (const Parametrized& p : kParametrized) {
    SCOPED_TRACE(to_string(p.spec));
    math::visit_activation(p.spec, [&](auto fn) {
      EXPECT_TRUE(std::isnan(fn.forward(kNan, 1.0f)) && std::isnan(fn.forward(1.0f, kNan)));
      EXPECT_TRUE(std::isnan(fn.forward_by_newton(kNan, 1.0f)));
      EXPECT_TRUE(std::isnan(fn.forward_by_newton(1.0f, kNan)));
      EXPECT_TRUE(std::isnan(fn.backward(kNan, 1.0f, 1.0f).dgate));
      EXPECT_TRUE(std::isnan(fn.backward(1.0f, kNan, 1.0f).dgate));
      for (const float g : {-3e38f, -1e30f, -1000.0f, -88.0f, 88.0f, 1000.0f, 3e38f, kInf}) {
        for (const float u : {-30.0f, 0.5f, 30.0f}) {
          const double exact = p.value(p.spec, g, u);
          if (std::fabs(exact) > 3e38) continue;
          const double small = 0x1p-21 * std::fabs(exact) + 1e-30;
          EXPECT_NEAR(fn.forward(g, u), exact, small) << g << " " << u;
          EXPECT_NEAR(fn.forward_by_newton(g, u), exact, small) << g << " " << u;
          if (g < 1e30) {
            EXPECT_TRUE(std::isfinite(fn.backward(g, u, 1.0f).dgate)) << g << " " << u;
          }
        }
      }
      if (p.spec.limit < kInf || p.spec.kind == Activation::situ_glu) {
        EXPECT_TRUE(std::isfinite(fn.forward(kInf, kInf)));
        EXPECT_TRUE(std::isfinite(fn.forward_by_newton(kInf, -kInf)));
        EXPECT_EQ(fn.backward(kInf, kInf, 1.0f).dgate, 0.0f);
        EXPECT_EQ(fn.backward(kInf, -kInf, 1.0f).dup, 0.0f);
      }
    });
  }
  // Scales at the ends of the range make a sign and the identity.
  const math::SituGlu sign = math::SituGlu::of(1e-45f, 1e-45f);
  EXPECT_EQ(sign.forward(0.0f, 1.0f), 0.0f);
  EXPECT_EQ(sign.forward(1.0f, 0.0f), 0.0f);
  const math::SituGlu identity = math::SituGlu::of(1e30f, 1e30f);
  EXPECT_NEAR(identity.forward(1.5f, -2.0f), -2 * kSilu.value(1.5), 1e-6);
  EXPECT_NEAR(identity.forward_by_newton(1.5f, -2.0f), -2 * kSilu.value(1.5), 1e-6);
  for (const float x : {1e-4f, 1e-2f, 100.0f, 1e5f}) {
    const double exact = x * kSilu.value(x);
    EXPECT_NEAR(identity.forward(x, x), exact, 1e-6 * exact) << x;
    EXPECT_NEAR(identity.backward(x, x, 1.0f).dup, kSilu.value(x), 1e-6 * kSilu.value(x)) << x;
  }
}

// Without a limit it is the object, and so the kernel, that it always was.
TEST(Activation, NoLimitIsSwiglu) {
  const auto is_swiglu = [](auto fn) {
    return std::is_same_v<decltype(fn), math::Gated<math::Silu>>;
  };
  EXPECT_TRUE(math::visit_activation(Activation::swiglu, is_swiglu));
  EXPECT_FALSE(math::visit_activation(spec_of(Activation::swiglu, 1, 1, 3e38f), is_swiglu));
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
