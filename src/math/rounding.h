#pragma once

#include <cstdint>

#include "math/ieee.h"

/// The decisions of token rounding, the same on every backend. All but score_up() are in integers.
namespace sonicmoe::math {

/// The row counts that an expert can be rounded to.
struct Candidates {
  std::int32_t count;  ///< f, the tokens that chose the expert (token choice, TC)
  std::int32_t floor;  ///< f rounded down to a multiple of the tile
  std::int32_t ceil;   ///< f rounded up, clamped to 2^31 - 1; no expert has more tokens
  bool open;           ///< rounding may go both ways: f is no multiple of the tile, and ceil <= T
};

SONICMOE_HD Candidates candidates(std::int32_t count, std::int32_t tile, std::int64_t tokens) {
  const std::int32_t floor = count / tile * tile;
  if (floor == count) return {count, count, count, false};
  const std::int64_t ceil = std::int64_t{floor} + tile;
  return {count, floor, static_cast<std::int32_t>(ceil < INT32_MAX ? ceil : INT32_MAX),
          ceil <= tokens};
}

// The functions below return true to round up. Their result counts only where Candidates::open.

/// Rounds to the nearer multiple, ties down.
SONICMOE_HD bool nearest_up(const Candidates& c) { return c.ceil - c.count < c.count - c.floor; }

/// Rounds up with probability (f - floor) / tile, for a uniform 32-bit draw:
///
///     draw / 2^32 < (f - floor) / tile
SONICMOE_HD bool stochastic_up(const Candidates& c, std::int32_t tile, std::uint32_t draw) {
  return std::uint64_t{draw} * static_cast<std::uint32_t>(tile) <
         (std::uint64_t{static_cast<std::uint32_t>(c.count - c.floor)} << 32);
}

/// Rounds up with probability dropped / (dropped + added), by the upper 24 bits of a draw.
/// `dropped` is the sum of the scores that rounding down would drop, and `added` is the sum of the
/// scores that rounding up would add.
SONICMOE_HD bool score_up(float dropped, float added, std::uint32_t draw) {
  const float uniform = static_cast<float>(draw >> 8) * 0x1p-24f;
  return mul(uniform, add(dropped, added)) < dropped;
}

/// Keeps the running error nearer to 0, ties down. `error` is the sum of (rounded count - f) over
/// the experts before this one.
SONICMOE_HD bool balance_up(const Candidates& c, std::int64_t error) {
  const std::int64_t up = c.ceil - c.count + error;
  const std::int64_t down = c.floor - c.count + error;
  return (up < 0 ? -up : up) < (down < 0 ? -down : down);
}

}  // namespace sonicmoe::math
