#pragma once

#include <cstdint>

#include "math/ieee.h"

namespace sonicmoe::math {

/// How many rows an expert has, in halves of the mean S/E, rounded. By this and not by rows, since
/// experts that differ little should stay as they are: with even experts the exact order was up to
/// 2 % slower (docs/findings/skew.md).
struct LoadClass {
  float per_row;

  LoadClass(std::int64_t experts, std::int64_t slots)
      : per_row(slots > 0 ? 2.0f * static_cast<float>(experts) / static_cast<float>(slots) : 0) {}
  SONICMOE_HD std::int32_t operator()(std::int32_t rows) const {
    return static_cast<std::int32_t>(add(mul(static_cast<float>(rows), per_row), 0.5f));
  }
};

}  // namespace sonicmoe::math
