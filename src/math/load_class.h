#pragma once

#include <cstdint>

#include "math/ieee.h"

namespace sonicmoe::math {

/// The rows of an expert in halves of the mean S/E, rounded. S is `slots`, E is `experts`.
///
/// Metadata ranks experts by load class, and experts of one class by id. With evenly loaded
/// experts, ranking by exact row counts was up to 2 % slower (docs/findings/archive/skew.md).
struct LoadClass {
  float per_row;  ///< classes a row: 2E/S

  LoadClass(std::int64_t experts, std::int64_t slots)
      : per_row(slots > 0 ? 2.0f * static_cast<float>(experts) / static_cast<float>(slots) : 0) {}
  SONICMOE_HD std::int32_t operator()(std::int32_t rows) const {
    return static_cast<std::int32_t>(add(mul(static_cast<float>(rows), per_row), 0.5f));
  }
};

}  // namespace sonicmoe::math
