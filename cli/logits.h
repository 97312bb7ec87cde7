#pragma once

#include <cstdint>
#include <string>

#include "testkit/numbers.h"

namespace sonicmoe::cli {

struct Logits {
  std::int64_t tokens = 0;
  std::int64_t experts = 0;
  testkit::Tensor values;  ///< (T, E)
};

/// A .npy file of version 1 with a (T, E) array of little-endian float32 in C order, or those
/// numbers alone. `shape` is "T,E"; it may be empty for .npy, whose header says it. Throws
/// UsageError, in the words of --logits and --te.
Logits read_logits(const std::string& path, const std::string& shape);

/// What a router with random weights says of random tokens, scaled to standard deviation 1. `skew`
/// makes some experts popular: expert e's logits are lower by skew ln(e + 1), so that its share of
/// the softmax falls as (e + 1)^-skew.
Logits random_logits(std::int64_t tokens, std::int64_t experts, double skew, std::uint64_t seed);

}  // namespace sonicmoe::cli
