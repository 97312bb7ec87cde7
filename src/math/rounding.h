#pragma once

#include <cstdint>

#include "math/ieee.h"

/// The decisions of token rounding, in integers where they can be.
namespace sonicmoe::math {

/// Rows of an expert as candidates for rounding.
struct Candidates {
  std::int32_t count;  ///< TC tokens f
  std::int32_t floor;
  std::int32_t ceil;  ///< at most 2^31 - 1, which no expert's tokens exceed
  bool open;          ///< both are possible: f is not a multiple of the tile, and ceil <= T
};

SONICMOE_HD Candidates candidates(std::int32_t count, std::int32_t tile, std::int64_t tokens) {
  const std::int32_t floor = count / tile * tile;
  if (floor == count) return {count, count, count, false};
  const std::int64_t ceil = std::int64_t{floor} + tile;
  return {count, floor, static_cast<std::int32_t>(ceil < INT32_MAX ? ceil : INT32_MAX),
          ceil <= tokens};
}

/// Nearer multiple, ties down.
SONICMOE_HD bool nearest_up(const Candidates& c) { return c.ceil - c.count < c.count - c.floor; }

/// Up with probability (f - floor) / tile, for a uniform 32-bit draw: draw / 2^32 < (f - floor) /
/// tile.
SONICMOE_HD bool stochastic_up(const Candidates& c, std::int32_t tile, std::uint32_t draw) {
  return std::uint64_t{draw} * static_cast<std::uint32_t>(tile) <
         (std::uint64_t{static_cast<std::uint32_t>(c.count - c.floor)} << 32);
}

/// Up with probability dropped / (dropped + added), for the upper 24 bits of a draw.
SONICMOE_HD bool score_up(float dropped, float added, std::uint32_t draw) {
  const float uniform = static_cast<float>(draw >> 8) * 0x1p-24f;
  return mul(uniform, add(dropped, added)) < dropped;
}

/// `error` is the sum of the deviations (chosen - f) of the experts before.
SONICMOE_HD bool balance_up(const Candidates& c, std::int64_t error) {
  const std::int64_t up = c.ceil - c.count + error;
  const std::int64_t down = c.floor - c.count + error;
  return (up < 0 ? -up : up) < (down < 0 ? -down : down);
}

}  // namespace sonicmoe::math
