#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

// Scalar arithmetic that spells out every rounding, so that CPU and GPU give the same bits. No
// compiler may fuse or split these operations; the host build passes -ffp-contract=off.

#if defined(__CUDACC__)
#define SONICMOE_HD __host__ __device__ __forceinline__
#else
#define SONICMOE_HD inline __attribute__((always_inline))
#endif

namespace sonicmoe::math {

SONICMOE_HD float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

SONICMOE_HD float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

SONICMOE_HD float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

SONICMOE_HD float sub(float a, float b) { return add(a, -b); }

SONICMOE_HD float div(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

/// The larger of x and low. A NaN x stays a NaN.
SONICMOE_HD float at_least(float x, float low) {
#if defined(__CUDA_ARCH__)
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(low));
  return x;
#else
  return x < low ? low : x;
#endif
}

/// The smaller of x and high. A NaN x stays a NaN.
SONICMOE_HD float at_most(float x, float high) {
#if defined(__CUDA_ARCH__)
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(high));
  return x;
#else
  return x > high ? high : x;
#endif
}

SONICMOE_HD std::uint32_t bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return std::bit_cast<std::uint32_t>(x);
#endif
}

SONICMOE_HD float from_bits(std::uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  return std::bit_cast<float>(u);
#endif
}

}  // namespace sonicmoe::math
