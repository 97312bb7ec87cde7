#pragma once

#include <cstdint>

#include "math/ieee.h"

namespace sonicmoe::math {

/// First word of Philox4x32-10 (Salmon et al., SC 2011) with key `seed` and counter
/// (offset, index). This random 32-bit number depends on the arguments alone, so every backend
/// draws the same.
SONICMOE_HD std::uint32_t philox(std::uint64_t seed, std::uint64_t offset, std::uint64_t index) {
  std::uint32_t c0 = static_cast<std::uint32_t>(offset);
  std::uint32_t c1 = static_cast<std::uint32_t>(offset >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(index);
  std::uint32_t c3 = static_cast<std::uint32_t>(index >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(seed);
  std::uint32_t k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0;
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

}  // namespace sonicmoe::math
