#pragma once

#include "math/router_score.h"

/// The bits of math:: functions in fewer instructions, for arguments that routers have. Without
/// branches the compiler overlaps the experts of a lane.
///
/// A `quick` function is for arguments where nothing overflows or underflows. For a logit they lie
/// between -kFarLogit and kFarLogit. An `any` function takes every float.
namespace sonicmoe::cuda {

using math::kFarLogit;

/// math::exp in two parts: p is its e^r, and `shifted` is k plus a shift. The factor 2^k is
/// missing.
struct ExpParts {
  float p, shifted;

  static SONICMOE_HD ExpParts of(float x, float shift) {
    const float shifted = math::fma(x, 0x1.715476p+0f, shift);
    const float k = math::sub(shifted, shift);
    float r = math::fma(k, -0x1.62e4p-1f, x);
    r = math::fma(k, -0x1.7f7d1cp-20f, r);
    float q = 0x1.6a23cep-10f;
    q = math::fma(q, r, 0x1.123a20p-7f);
    q = math::fma(q, r, 0x1.5558f2p-5f);
    q = math::fma(q, r, 0x1.555492p-3f);
    q = math::fma(q, r, 0x1.fffffcp-2f);
    return {math::add(1.0f, math::fma(q, math::mul(r, r), r)), shifted};
  }
  /// p times two to the number in the low bits of `shifted`, where that is a normal number.
  SONICMOE_HD float scaled() const {
    return math::from_bits(math::bits(p) + (math::bits(shifted) << 23));
  }
};
inline constexpr float kExpShift = 12582912.0f;

/// math::exp(x) for -kFarLogit <= x <= kFarLogit.
SONICMOE_HD float quick_exp(float x) { return ExpParts::of(x, kExpShift).scaled(); }

/// math::exp(x) for x <= 0; any number where x is a NaN.
SONICMOE_HD float exp_of_negative(float x) {
  // 64 more than in math::exp, so p gets the factor 2^(k + 64) by one addition: k is at least -150,
  // so that is a normal number. The last product alone rounds, as it does there.
  return math::mul(ExpParts::of(math::at_least(x, -104.0f), kExpShift + 64.0f).scaled(), 0x1p-64f);
}

/// A better 1 / d from a guess that is good to about 2^-23.
SONICMOE_HD float refined(float d, float guess) {
  return math::fma(math::fma(-d, guess, 1.0f), guess, guess);
}
/// math::div(1, d) by the steps that the compiler takes where nothing can overflow or underflow:
/// for d from 1 to 2^96.
SONICMOE_HD float quick_inverse(float d) { return refined(d, math::fast_reciprocal(d)); }
/// math::div(n, d) alike, for d from 1 to 2^20 and n from kLeastQuotient to 2^20. Where d is 1 or
/// 2, n may be any smaller number. `inverse` comes from refined(), and must be 1 / d rounded: from
/// a neighbour of that a quotient can come out wrong.
inline constexpr float kLeastQuotient = 0x1p-60f;
/// Logits of a row that differ by no more have a quick softmax: e^-41 is above kLeastQuotient.
inline constexpr float kQuickRange = 41.0f;
SONICMOE_HD float quotient(float n, float d, float inverse) {
  const float q = math::mul(n, inverse);
  return math::fma(math::fma(-d, q, n), inverse, q);
}

/// math::router_sigmoid.
SONICMOE_HD float quick_sigmoid(float z) { return quick_inverse(math::add(1.0f, quick_exp(-z))); }
SONICMOE_HD float any_sigmoid(float z) {
  // Above kFarLogit the sigmoid is 1, as it is there.
  const float p = quick_sigmoid(math::at_most(math::at_least(z, -kFarLogit), kFarLogit));
  return math::unless_bad(z, z < -kFarLogit ? exp_of_negative(z) : p);
}

/// math::log1p. Where x is below 2^-23 the divisor is 2.
SONICMOE_HD float quick_log1p(float x) {
  const float d = math::add(2.0f, x);
  const float s = quotient(x, d, refined(d, math::fast_reciprocal(d)));
  const float s2 = math::mul(s, s);
  float q = 1.0f / 15;
  q = math::fma(q, s2, 1.0f / 13);
  q = math::fma(q, s2, 1.0f / 11);
  q = math::fma(q, s2, 1.0f / 9);
  q = math::fma(q, s2, 1.0f / 7);
  q = math::fma(q, s2, 1.0f / 5);
  q = math::fma(q, s2, 1.0f / 3);
  const float twice = math::add(s, s);
  return math::fma(math::mul(q, s2), twice, twice);
}
/// A guess of 1 / sqrt(x), good to about 2^-23.
SONICMOE_HD float guess_rsqrt(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / math::sqrt(x);
#endif
}
/// math::sqrt(x) for finite x from 2^-100 on, by the steps that the compiler takes there.
SONICMOE_HD float quick_sqrt(float x) {
  const float guess = guess_rsqrt(x);
  const float root = math::mul(x, guess);
  const float half = math::mul(guess, 0.5f);
  return math::fma(math::fma(-root, root, x), half, root);
}

/// math::sqrt_softplus.
SONICMOE_HD float quick_sqrt_softplus(float z) {
  const float rest = quick_log1p(quick_exp(-__builtin_fabsf(z)));
  return quick_sqrt(math::add(math::at_least(z, 0.0f), rest));
}
SONICMOE_HD float any_sqrt_softplus(float z) {
  const float rest = quick_log1p(exp_of_negative(-__builtin_fabsf(z)));
  const float x = math::add(math::at_least(z, 0.0f), rest);
  // A small x is scaled by 2^64, and its root back by 2^-32.
  const bool small = x < 0x1p-64f;
  const float root = quick_sqrt(small ? math::mul(x, 0x1p64f) : x);
  return math::unless_bad(z, x == 0.0f ? x : small ? math::mul(root, 0x1p-32f) : root);
}

}  // namespace sonicmoe::cuda
