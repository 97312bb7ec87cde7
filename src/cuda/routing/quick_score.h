#pragma once

#include "math/router_score.h"

/// The bits of math:: functions in fewer instructions, for arguments that routers have. Without
/// branches the compiler overlaps the experts of a lane.
namespace sonicmoe::cuda {

/// math::exp(x) for x <= 0; any number where x is a NaN.
SONICMOE_HD float exp_of_negative(float x) {
  x = math::at_least(x, -104.0f);
  // 64 more than in math::exp, so p gets the factor 2^(k + 64) by one addition: k is at least -150,
  // so that is a normal number. The last product alone rounds, as it does there.
  constexpr float kShift = 12582912.0f + 64.0f;
  const float shifted = math::fma(x, 0x1.715476p+0f, kShift);
  const float k = math::sub(shifted, kShift);
  float r = math::fma(k, -0x1.62e4p-1f, x);
  r = math::fma(k, -0x1.7f7d1cp-20f, r);
  float q = 0x1.6a23cep-10f;
  q = math::fma(q, r, 0x1.123a20p-7f);
  q = math::fma(q, r, 0x1.5558f2p-5f);
  q = math::fma(q, r, 0x1.555492p-3f);
  q = math::fma(q, r, 0x1.fffffcp-2f);
  const float p = math::add(1.0f, math::fma(q, math::mul(r, r), r));
  const float scaled = math::from_bits(math::bits(p) + (math::bits(shifted) << 23));
  return math::mul(scaled, 0x1p-64f);
}

/// A better 1 / d from a guess that is good to about 2^-23.
SONICMOE_HD float refined(float d, float guess) {
  return math::fma(math::fma(-d, guess, 1.0f), guess, guess);
}
/// math::div(n, d) by the steps that the compiler takes where nothing can overflow or underflow:
/// for d from 1 to 2^20 and n from kLeastQuotient to 2^20. Where d is 1 or 2, n may be any smaller
/// number. `inverse` comes from refined().
inline constexpr float kLeastQuotient = 0x1p-60f;
SONICMOE_HD float quotient(float n, float d, float inverse) {
  const float q = math::mul(n, inverse);
  return math::fma(math::fma(-d, q, n), inverse, q);
}

/// math::router_sigmoid; a NaN stays one. Where e is below 2^-24 the divisor is 1, so no e is too
/// small.
SONICMOE_HD float quick_sigmoid(float z) {
  const float e = exp_of_negative(-__builtin_fabsf(z));
  const float d = math::add(1.0f, e);
  const float p = quotient(z < 0.0f ? e : 1.0f, d, refined(d, math::fast_reciprocal(d)));
  return z != z ? z : p;
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
/// The square of math::sqrt_softplus.
SONICMOE_HD float quick_softplus(float z) {
  const float rest = quick_log1p(exp_of_negative(-__builtin_fabsf(z)));
  return z < 0.0f ? rest : math::add(z, rest);
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
/// math::sqrt(x) for finite x from kLeastQuickSqrt on, by the steps that the compiler takes there.
inline constexpr float kLeastQuickSqrt = 0x1p-100f;
SONICMOE_HD float quick_sqrt(float x, float guess) {
  const float root = math::mul(x, guess);
  const float half = math::mul(guess, 0.5f);
  return math::fma(math::fma(-root, root, x), half, root);
}

}  // namespace sonicmoe::cuda
