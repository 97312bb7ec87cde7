#pragma once

#include "math/ieee.h"

namespace sonicmoe::math {

/// Storage of a bfloat16 on the host.
struct Bf16 {
  std::uint16_t bits;
};

SONICMOE_HD float to_float(float x) { return x; }
SONICMOE_HD float to_float(Bf16 x) { return from_bits(static_cast<std::uint32_t>(x.bits) << 16); }

/// Rounds to nearest even. A NaN stays a (quiet) NaN.
template <class T>
SONICMOE_HD T from_float(float x);

template <>
SONICMOE_HD float from_float<float>(float x) {
  return x;
}

template <>
SONICMOE_HD Bf16 from_float<Bf16>(float x) {
  const std::uint32_t u = bits(x);
  const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (u >> 16) | 0x40u;
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  return Bf16{static_cast<std::uint16_t>(nan ? quiet : rounded)};
}

}  // namespace sonicmoe::math
