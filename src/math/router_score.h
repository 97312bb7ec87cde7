#pragma once

#include <limits>

#include "math/exp.h"
#include "math/ieee.h"
#include "sonicmoe/types.h"

/// Scores of logits that need no sum over experts, with the same bits on every backend: they decide
/// where tokens go.
namespace sonicmoe::math {

/// The correctly rounded square root of x >= 0.
SONICMOE_HD float sqrt(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

/// log(1 + x) for 0 <= x <= 1 or a NaN; relative error at most 2^-22.
///
/// 2 atanh(s) with s = x / (2 + x) <= 1/3. The series of atanh, up to s^15, leaves less than 2^-28.
SONICMOE_HD float log1p(float x) {
  const float s = div(x, add(2.0f, x));
  const float s2 = mul(s, s);
  float q = 1.0f / 15;
  q = fma(q, s2, 1.0f / 13);
  q = fma(q, s2, 1.0f / 11);
  q = fma(q, s2, 1.0f / 9);
  q = fma(q, s2, 1.0f / 7);
  q = fma(q, s2, 1.0f / 5);
  q = fma(q, s2, 1.0f / 3);
  const float twice = add(s, s);
  return fma(mul(q, s2), twice, twice);
}

/// p for a logit z, or a NaN where z is bad: a NaN or +inf.
SONICMOE_HD float unless_bad(float z, float p) {
  return z < std::numeric_limits<float>::infinity() ? p : std::numeric_limits<float>::quiet_NaN();
}

/// Below -kFarLogit a sigmoid is e^z. There e^-z could be infinite.
inline constexpr float kFarLogit = 64.0f;
/// 1 / (1 + e^-z).
SONICMOE_HD float router_sigmoid(float z) {
  return unless_bad(z, z < -kFarLogit ? exp(z) : div(1.0f, add(1.0f, exp(-z))));
}

/// sqrt(log(1 + e^z)) (DeepSeek-V4).
SONICMOE_HD float sqrt_softplus(float z) {
  const float rest = log1p(exp(z < 0.0f ? z : -z));
  return unless_bad(z, math::sqrt(z < 0.0f ? rest : add(z, rest)));
}

/// dp/dz of sqrt_softplus, from p alone: e^z = e^(p^2) - 1, so sigmoid(z) = 1 - e^(-p^2), which is
/// p^2 for a small p.
SONICMOE_HD float sqrt_softplus_slope(float p) {
  const float sigmoid = one_minus_exp2(mul(mul(p, p), 1.44269504f));
  return p < 0x1p-12f ? mul(0.5f, p) : div(sigmoid, add(p, p));
}

/// The score of a logit where no softmax makes it.
SONICMOE_HD float router_score(RouterScore score, float z) {
  switch (score) {
    case RouterScore::sigmoid:
      return router_sigmoid(z);
    case RouterScore::sqrt_softplus:
      return sqrt_softplus(z);
    case RouterScore::softmax:
      break;
  }
  return z;
}

/// What the gradient of a score p is multiplied with on its way to the logit; the softmax besides
/// subtracts a sum.
SONICMOE_HD float router_slope(RouterScore score, float p) {
  switch (score) {
    case RouterScore::sigmoid:
      return mul(p, sub(1.0f, p));
    case RouterScore::sqrt_softplus:
      return sqrt_softplus_slope(p);
    case RouterScore::softmax:
      break;
  }
  return p;
}

/// Scales of a token's K weights, and their gradients; the terms are in RouterDesc and
/// ScoreGradArgs. A backend walks the K entries, in stored order.
struct RouterWeights {
  bool renormalize;
  float eps;
  float scale;

  SONICMOE_HD float divisor(float sum) const { return add(sum, eps); }
  /// w of p.
  SONICMOE_HD float weight(float p, float divisor) const {
    if (!renormalize) return p;
    return divisor == 0.0f ? 0.0f : div(p, divisor);
  }
  /// The logit's gradient is gradient() times factor(). h is the gradient of w, `inner` sums the
  /// products of both, and `slope` is that of p, by router_slope(). factor() has the divisor, since
  /// slope and divisor are tiny together.
  SONICMOE_HD float gradient(float h, float inner, float divisor) const {
    if (!renormalize) return h;
    return divisor == 0.0f ? 0.0f : sub(h, inner);
  }
  SONICMOE_HD float factor(float slope, float divisor) const { return weight(slope, divisor); }
  SONICMOE_HD float scaled(float w, float expert_scale) const {
    return mul(mul(w, scale), expert_scale);
  }
};

}  // namespace sonicmoe::math
