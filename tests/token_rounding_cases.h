#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "sonicmoe/token_rounding.h"

namespace sonicmoe::testkit {

struct RoundingCase {
  TokenRoundingDesc desc;
  std::vector<std::byte> logits;  ///< (T, E), as the library stores them
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  std::string text() const;
};

/// Any rule, tile, mode and storage type; no or few tokens, one or hundreds of experts; logits with
/// many ties, with masks, with probabilities that underflow. `number` says which case.
RoundingCase random_rounding_case(std::uint64_t number);

/// The same without extremes: fp32, logits of size one that are multiples of 2^-8, experts of
/// unequal popularity.
RoundingCase plain_rounding_case(std::uint64_t number, const TokenRoundingDesc& desc);

}  // namespace sonicmoe::testkit
