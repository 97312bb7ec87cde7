#pragma once

#include "math/ieee.h"

namespace sonicmoe::math {

/// e^x in fp32, the same bits on every backend; relative error at most 0.72 * 2^-23 where the
/// result is normal. -inf gives 0, +inf gives inf, NaN stays NaN.
///
/// x = k ln2 + r with |r| <= ln2/2, and e^r = 1 + (r + r^2 q(r)). q is a minimax polynomial of
/// degree 4 that we fitted for the relative error of e^r (3.1e-9 before rounding).
SONICMOE_HD float exp(float x) {
  // Beyond these bounds the result is 0 or inf anyway. Within them k fits 9 bits. A NaN compares
  // false with both bounds and stays.
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  // Adding 1.5 * 2^23 leaves x / ln2, rounded to nearest, in the low mantissa bits.
  constexpr float kShift = 12582912.0f;
  const float shifted = fma(x, 0x1.715476p+0f, kShift);
  const float k = sub(shifted, kShift);
  float r = fma(k, -0x1.62e4p-1f, x);  // 15 bits of ln2, so k times it is exact
  r = fma(k, -0x1.7f7d1cp-20f, r);     // the rest of ln2
  float q = 0x1.6a23cep-10f;
  q = fma(q, r, 0x1.123a20p-7f);
  q = fma(q, r, 0x1.5558f2p-5f);
  q = fma(q, r, 0x1.555492p-3f);
  q = fma(q, r, 0x1.fffffcp-2f);
  const float p = add(1.0f, fma(q, mul(r, r), r));
  // 2^k takes two factors: k runs from -150 to 128, further than one exponent field reaches. For a
  // NaN, n has arbitrary bits; unsigned arithmetic keeps them harmless.
  const std::uint32_t n = bits(shifted) - 0x4b400000u + 256u;  // k + 256
  const std::uint32_t half = n >> 1;                           // floor(k/2) + 128
  const float s1 = from_bits((half - 1u) << 23);
  const float s2 = from_bits((n - half - 1u) << 23);
  return mul(mul(p, s1), s2);
}

// The next functions serve activations. Unlike scores, activations may have other bits on
// another backend, so the GPU uses its special function unit. Its relative error is a few units of
// 2^-22. At the ends of the range it gives 0 and inf, as it should.

#if defined(__CUDA_ARCH__)
SONICMOE_HD float fast_exp2(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
  return e;
}
#endif
SONICMOE_HD float fast_exp(float x) {
#if defined(__CUDA_ARCH__)
  return fast_exp2(x * 1.44269504f);
#else
  return exp(x);
#endif
}
SONICMOE_HD float fast_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return div(1.0f, x);
#endif
}
/// 1 / d for 1 <= d <= 2^125 without a division, with a relative error of at most 2^-23. 1 / 1 is
/// exactly 1.
///
/// The first guess negates d's exponent and is good to 5 %. The first step cubes the guess's error,
/// and the second, Newton's, squares the remaining error. Two Newton steps would end at 2^-17 and
/// make 1 / 1 less than 1 (docs/findings/archive/sigmoid.md).
SONICMOE_HD float reciprocal_by_newton(float d) {
  float y = from_bits(0x7ef311c7u - bits(d));
  const float r = fma(-d, y, 1.0f);
  y = fma(y, fma(r, r, r), y);
  return fma(y, fma(-d, y, 1.0f), y);
}

/// 1 - 2^-t for t >= 0 or a NaN t. Near 0 a plain difference of the two would have none of its
/// bits. Relative error: on the host at most 2^-23. On the GPU, where 2^-t is right to 2^-22, at
/// most 2^-20, and 2^-22 up to t = 0.35.
SONICMOE_HD float one_minus_exp2(float t) {
#if defined(__CUDA_ARCH__)
  const float e = fast_exp2(-t);
  // A minimax polynomial that we fitted for the relative error, 2^-22.1.
  float q = -0x1.1e1480p-7f;
  q = fma(q, t, 0x1.c51d96p-5f);
  q = fma(q, t, -0x1.ebf4ccp-3f);
  q = fma(q, t, 0x1.62e42ap-1f);
  return t < 0.35f ? q * t : 1.0f - e;
#else
  // t = k + f with |f| <= 1/2, and 1 - 2^-f is a polynomial of degree 6 (fitted alike, 2^-26.5).
  // Beyond 30 the result is 1.
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23, see exp()
  t = t > 30.0f ? 30.0f : t;
  const float shifted = t + kShift;
  const float f = t - (shifted - kShift);
  float q = -0x1.4308fap-13f;
  q = fma(q, f, 0x1.5f07b4p-10f);
  q = fma(q, f, -0x1.3b2ba0p-7f);
  q = fma(q, f, 0x1.c6af6ep-5f);
  q = fma(q, f, -0x1.ebfbdep-3f);
  q = fma(q, f, 0x1.62e430p-1f);
  const float scale = from_bits((127u + 0x4b400000u - bits(shifted)) << 23);  // 2^-k
  return fma(scale, q * f, 1.0f - scale);
#endif
}

/// tanh x.
///
/// On Hopper it is one instruction, with a relative error of at most 2^-16.4 over all floats
/// (docs/findings/archive/activation-parameters.md).
///
/// Elsewhere it is n / (2 - n), where n is 1 - e^-2|x|. So small |x| keep their relative accuracy.
/// The error is 2^-19 on a GPU and 2^-22 on the host.
SONICMOE_HD float fast_tanh(float x) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  constexpr std::uint32_t kSign = 0x80000000u;
  const float n = one_minus_exp2(from_bits(bits(x) & ~kSign) * 2.8853900817779268f);  // 2 log2(e)
  return from_bits(bits(n * fast_reciprocal(2.0f - n)) | (bits(x) & kSign));
#endif
}

/// 1 / (1 + e^-x).
SONICMOE_HD float sigmoid(float x) { return fast_reciprocal(add(1.0f, fast_exp(-x))); }
/// sigmoid() for x >= -86.6 or a NaN x. The bound keeps 1 + e^-x below 2^125.
SONICMOE_HD float sigmoid_by_newton(float x) {
  return reciprocal_by_newton(add(1.0f, fast_exp(-x)));
}

}  // namespace sonicmoe::math
