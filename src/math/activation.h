#pragma once

#include <cmath>
#include <limits>

#include "math/exp.h"
#include "math/ieee.h"
#include "sonicmoe/types.h"

/// Activations as scalar function objects, usable on host and device.
///
/// The members of an activation object are its parameters. An activation without parameters is an
/// empty object, so kernels carry nothing for it. Most activations are made of a function f of one
/// variable:
///
///     without a gate   a = f(h)
///     with a gate      h = [g, u], a = f(g) u, da/dg = f'(g) u, da/du = f(g)
namespace sonicmoe::math {

struct ValueSlope {
  float value;
  float slope;
};

struct Silu {  // x sigmoid(x)
  static SONICMOE_HD float value(float x) { return x * sigmoid(x); }
  /// value() by sigmoid_by_newton(), which needs x >= -86.6. Any x below that, -inf included, gives
  /// about -2^-118. There value() is closer to 0, but a NaN at -inf.
  static SONICMOE_HD float value_by_newton(float x) {
    x = at_least(x, -86.6f);
    return x * sigmoid_by_newton(x);
  }
  static SONICMOE_HD ValueSlope both(float x) {
    const float s = sigmoid(x);
    const float v = x * s;
    return {v, fma(v, 1.0f - s, s)};
  }
};

struct Gelu {  // x Phi(x), where Phi is the standard normal distribution function
  struct Normal {
    float cdf, pdf;
  };
#if defined(__CUDA_ARCH__)
  /// Formula 7.1.26 of Abramowitz and Stegun, for z >= 0:
  ///
  ///     erfc(z) = t poly(t) exp(-z^2), t = 1 / (1 + 0.3275911 z)
  ///
  /// Its error is at most 1.5e-7. It has no branches, and kernels inline it in many places. With
  /// z = |x| / sqrt(2) the density uses the same exponential.
  static SONICMOE_HD Normal normal(float x) {
    const float z = fabsf(x) * 0.70710678118654752f;
    const float t = fast_reciprocal(fma(z, 0.3275911f, 1.0f));
    const float e = fast_exp(-(z * z));
    float q = 1.061405429f;
    q = fma(q, t, -1.453152027f);
    q = fma(q, t, 1.421413741f);
    q = fma(q, t, -0.284496736f);
    q = fma(q, t, 0.254829592f);
    const float tail = 0.5f * q * t * e;
    return {x < 0.0f ? tail : 1.0f - tail, 0.39894228040143268f * e};
  }
#else
  static SONICMOE_HD Normal normal(float x) {
    return {0.5f * erfcf(x * -0.70710678118654752f), 0.39894228040143268f * exp(-0.5f * x * x)};
  }
#endif
  static SONICMOE_HD float value(float x) { return x * normal(x).cdf; }
  static SONICMOE_HD ValueSlope both(float x) {
    const Normal n = normal(x);
    return {x * n.cdf, n.cdf + x * n.pdf};
  }
};

/// x/2 (1 + tanh(c (x + 0.044715 x^3))) with c = sqrt(2/pi). (1 + tanh t)/2 is sigmoid(2t).
struct GeluTanh {
  static constexpr float kTwoC = 1.5957691216057308f;
  static SONICMOE_HD float gate(float x) { return sigmoid(kTwoC * x * (1.0f + 0.044715f * x * x)); }
  static SONICMOE_HD float value(float x) { return x * gate(x); }
  static SONICMOE_HD ValueSlope both(float x) {
    const float s = gate(x);
    const float inner_slope = kTwoC * (1.0f + 3.0f * 0.044715f * x * x);
    return {x * s, s + x * s * (1.0f - s) * inner_slope};
  }
};

struct Relu {  // max(x, 0), slope 0 at 0
  static SONICMOE_HD float value(float x) { return x > 0.0f ? x : 0.0f; }
  static SONICMOE_HD ValueSlope both(float x) { return {value(x), x > 0.0f ? 1.0f : 0.0f}; }
};

struct ReluSq {  // max(x, 0)^2
  static SONICMOE_HD float value(float x) {
    const float r = Relu::value(x);
    return r * r;
  }
  static SONICMOE_HD ValueSlope both(float x) {
    const float r = Relu::value(x);
    return {r * r, 2.0f * r};
  }
};

struct Gradients {
  float act;    // a, recomputed
  float dgate;  // dL/dg, or dL/dh without a gate
  float dup;    // dL/du; 0 without a gate
};

/// a = f(g) u. F is a base class, so an empty F makes an empty activation.
///
/// An activation of another form is a class of its own with the same members.
template <class F>
struct Gated : F {
  static constexpr bool kIsGlu = true;
  SONICMOE_HD float forward(float gate, float up) const { return F::value(gate) * up; }
  /// forward(), but with F::value_by_newton() if F has one. up_proj on a GPU uses it for three
  /// units of four, because the special function unit limits its epilogue
  /// (docs/findings/archive/sigmoid.md).
  SONICMOE_HD float forward_by_newton(float gate, float up) const {
    if constexpr (requires { F::value_by_newton(gate); }) {
      return F::value_by_newton(gate) * up;
    } else {
      return forward(gate, up);
    }
  }
  /// `da` is the gradient of a.
  SONICMOE_HD Gradients backward(float gate, float up, float da) const {
    const ValueSlope f = F::both(gate);
    return {f.value * up, da * up * f.slope, da * f.value};
  }
};

/// a = f(h). `gate` is h; forward() and backward() ignore `up`.
template <class F>
struct Plain : F {
  static constexpr bool kIsGlu = false;
  SONICMOE_HD float forward(float gate, float /*up*/) const { return F::value(gate); }
  SONICMOE_HD float forward_by_newton(float gate, float up) const {
    if constexpr (requires { F::value_by_newton(gate); }) {
      return F::value_by_newton(gate);
    } else {
      return forward(gate, up);
    }
  }
  SONICMOE_HD Gradients backward(float gate, float /*up*/, float da) const {
    const ValueSlope f = F::both(gate);
    return {f.value, da * f.slope, 0.0f};
  }
};

SONICMOE_HD float clamp(float x, float limit) { return at_least(at_most(x, limit), -limit); }

struct ScaledSilu {  // x sigmoid(alpha x)
  float alpha;
  float exponent;  ///< e^(-alpha x) = 2^(exponent x)

  static SONICMOE_HD ScaledSilu of(float alpha) {
    // Finite for every alpha, so that x = 0 has the sigmoid 1/2.
    return {alpha, clamp(-1.44269504f * alpha, std::numeric_limits<float>::max())};
  }
  SONICMOE_HD float value(float x) const { return x * fast_reciprocal(inverse_sigmoid(x)); }
  SONICMOE_HD float value_by_newton(float x) const {
    return x * reciprocal_by_newton(inverse_sigmoid(x));
  }
  SONICMOE_HD ValueSlope both(float x) const {
    const float s = fast_reciprocal(inverse_sigmoid(x)), v = x * s;
    return {v, fma(v, fma(-alpha, s, alpha), s)};
  }

 private:
  SONICMOE_HD float inverse_sigmoid(float x) const {
#if defined(__CUDA_ARCH__)
    return add(1.0f, fast_exp2(exponent * x));
#else
    return add(1.0f, fast_exp(-(alpha * x)));
#endif
  }
};

/// a = f(g) (u + kOffset), where f is a ScaledSilu.
template <int kOffset>
struct OffsetGlu {
  static_assert(kOffset == 0 || kOffset == 1);
  ScaledSilu silu;

  SONICMOE_HD Gradients backward(float gate, float up, float da) const {
    const ValueSlope f = silu.both(gate);
    if constexpr (kOffset == 0) return {f.value * up, da * up * f.slope, da * f.value};
    return {fma(f.value, up, f.value), fma(da, up, da) * f.slope, da * f.value};
  }
};

/// a = g' sigmoid(alpha g') (u' + offset) with g' = min(g, limit) and u' = clamp(u, -limit, limit).
/// At the limit the slopes of min and clamp are 1, beyond it 0. alpha = 1 and offset = 0 are exact.
struct ClampedGlu {
  static constexpr bool kIsGlu = true;
  static constexpr bool kClampsGate = true;
  float limit;
  ScaledSilu silu;
  float offset;                   ///< 0 or 1
  float newton_low, newton_high;  ///< gates where sigmoid_by_newton() works: alpha g >= -86.6

  static SONICMOE_HD ClampedGlu of(float limit, float alpha = 1.0f, float offset = 0.0f) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float bound = -86.6f / alpha;
    return {limit, ScaledSilu::of(alpha), offset, alpha > 0.0f ? bound : -kInf,
            alpha < 0.0f ? at_most(limit, bound) : limit};
  }

  SONICMOE_HD float forward(float gate, float up) const {
    return silu.value(at_most(gate, limit)) * (clamp(up, limit) + offset);
  }
  /// A gate out of sigmoid_by_newton()'s range counts as the last one inside: see
  /// Silu::value_by_newton().
  SONICMOE_HD float forward_by_newton(float gate, float up) const {
    const float g = at_least(at_most(gate, newton_high), newton_low);
    return silu.value_by_newton(g) * (clamp(up, limit) + offset);
  }
  SONICMOE_HD Gradients backward(float gate, float up, float da) const {
    const float u = clamp(up, limit) + offset;
    const ValueSlope f = silu.both(at_most(gate, limit));
    return {f.value * u, gate > limit ? 0.0f : da * u * f.slope,
            fabsf(up) > limit ? 0.0f : da * f.value};
  }
  /// Calls f with the function of g' and u'.
  template <class F>
  SONICMOE_HD void visit_inside(F&& f) const {
    offset == 0.0f ? f(OffsetGlu<0>{silu}) : f(OffsetGlu<1>{silu});
  }
};

/// a = min(silu(g), limit) u. dgate is right where silu(g) is within the limit.
struct SiluAtMost {
  float limit;

  SONICMOE_HD Gradients backward(float gate, float up, float da) const {
    const float s = sigmoid(gate);
    const float v = at_most(gate * s, limit);
    return {v * up, da * up * fma(v, 1.0f - s, s), da * v};
  }
};

/// a = min(silu(g), limit) clamp(u, -limit, limit), with slopes as in ClampedGlu.
struct GluClampedAfter {
  static constexpr bool kIsGlu = true;
  static constexpr bool kClampsGate = false;
  float limit;
  float last_gate;  ///< where silu(g) is the limit

  static SONICMOE_HD GluClampedAfter of(float limit) { return {limit, inverse(limit)}; }

  SONICMOE_HD float forward(float gate, float up) const {
    return at_most(Silu::value(gate), limit) * clamp(up, limit);
  }
  SONICMOE_HD float forward_by_newton(float gate, float up) const {
    return at_most(Silu::value_by_newton(gate), limit) * clamp(up, limit);
  }
  SONICMOE_HD Gradients backward(float gate, float up, float da) const {
    const ValueSlope f = Silu::both(gate);
    const float v = at_most(f.value, limit), u = clamp(up, limit);
    return {v * u, f.value > limit ? 0.0f : da * u * f.slope, fabsf(up) > limit ? 0.0f : da * v};
  }
  /// Calls f with the function of gates up to last_gate, and of clamp(u, -limit, limit).
  template <class F>
  SONICMOE_HD void visit_inside(F&& f) const {
    f(SiluAtMost{limit});
  }

 private:
  /// g >= 0 with silu(g) = y.
  static SONICMOE_HD float inverse(float y) {
    // A step divides the error by e at least, for the slope is -y e^-g, and g >= y.
    float g = y;
    for (int i = 0; i < 20; ++i) g = y * (1.0f + exp(-g));
    return g;
  }
};

/// a = alpha tanh(g / alpha) sigmoid(g) beta tanh(u / beta).
struct SituGlu {
  static constexpr bool kIsGlu = true;
  float alpha, beta;
  float gate_scale, up_scale;  ///< 1 / alpha and 1 / beta

  static SONICMOE_HD SituGlu of(float alpha, float beta) {
    // The bound keeps the inverse of the smallest scales finite, so that a gate of 0 gives 0.
    constexpr float kLargest = std::numeric_limits<float>::max();
    return {alpha, beta, at_most(1.0f / alpha, kLargest), at_most(1.0f / beta, kLargest)};
  }

  SONICMOE_HD float forward(float gate, float up) const {
    return alpha * fast_tanh(gate * gate_scale) * gate_sigmoid(gate) *
           (beta * fast_tanh(up * up_scale));
  }
  SONICMOE_HD float forward_by_newton(float gate, float up) const { return forward(gate, up); }
  SONICMOE_HD Gradients backward(float gate, float up, float da) const {
    const float s = gate_sigmoid(gate);
    const float tanh_g = fast_tanh(gate * gate_scale), tanh_u = fast_tanh(up * up_scale);
    const float g = alpha * tanh_g, u = beta * tanh_u, v = g * s;
    // d(g s) = (1 - tanh^2) s + g s (1 - s)
    const float slope = s * fma(g, 1.0f - s, fma(-tanh_g, tanh_g, 1.0f));
    return {v * u, da * u * slope, da * v * fma(-tanh_u, tanh_u, 1.0f)};
  }

 private:
  /// On Hopper by a tanh as well, for the special function unit limits the epilogues. There its
  /// absolute error is at most 2^-17, as much as the sigmoid itself from gates of -12 on.
  static SONICMOE_HD float gate_sigmoid(float gate) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    return fma(0.5f, fast_tanh(0.5f * gate), 0.5f);
#else
    return sigmoid(gate);
#endif
  }
};

/// visit_activation() of a kind whose object has no members. Kernels that choose an activation at
/// run time carry its kind alone, and call this.
template <class F>
SONICMOE_HD auto visit_without_members(Activation kind, F&& f) {
  switch (kind) {
    case Activation::swiglu:
      return f(Gated<Silu>{});
    case Activation::geglu:
      return f(Gated<Gelu>{});
    case Activation::geglu_tanh:
      return f(Gated<GeluTanh>{});
    case Activation::reglu:
      return f(Gated<Relu>{});
    case Activation::relu:
      return f(Plain<Relu>{});
    case Activation::relu_sq:
      return f(Plain<ReluSq>{});
    case Activation::gelu:
      return f(Plain<Gelu>{});
    case Activation::gelu_tanh:
      return f(Plain<GeluTanh>{});
    case Activation::silu:
    case Activation::swiglu_clamp_after:  // these four have members, so nobody asks for them here
    case Activation::swiglu_oai:
    case Activation::situ_glu:
    case Activation::quick_geglu:
      break;
  }
  return f(Plain<Silu>{});
}

/// Calls f with the object that computes an activation and returns f's result. An enumerator
/// without a case does not compile. make_plan() refuses a value that is no enumerator.
template <class F>
SONICMOE_HD auto visit_activation(const ActivationSpec& spec, F&& f) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  switch (spec.kind) {
    case Activation::swiglu:
      if (spec.limit < kInf) return f(ClampedGlu::of(spec.limit));
      break;
    case Activation::swiglu_clamp_after:
      return f(GluClampedAfter::of(spec.limit));
    case Activation::swiglu_oai:
      return f(ClampedGlu::of(spec.limit, spec.alpha, 1.0f));
    case Activation::situ_glu:
      return f(SituGlu::of(spec.alpha, spec.beta));
    case Activation::quick_geglu:
      return f(ClampedGlu::of(kInf, 1.702f));
    case Activation::geglu:
    case Activation::geglu_tanh:
    case Activation::reglu:
    case Activation::relu:
    case Activation::relu_sq:
    case Activation::gelu:
    case Activation::gelu_tanh:
    case Activation::silu:
      break;
  }
  return visit_without_members(spec.kind, f);
}

}  // namespace sonicmoe::math
