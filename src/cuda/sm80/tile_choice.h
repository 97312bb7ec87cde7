#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "core/device_traits.h"

/// Which of the two tiles an operation takes: a pure function of shape and device.
namespace sonicmoe::cuda::sm80 {

inline int tiles(std::int64_t extent, int width) {
  return static_cast<int>((extent + width - 1) / width);
}

/// m blocks of all experts: the mean of three cases, as experts have the mean number of rows, or
/// one standard deviation of random routing more or less.
inline double m_blocks(std::int64_t rows, std::int64_t experts) {
  experts = std::clamp<std::int64_t>(experts, 1, std::max<std::int64_t>(rows, 1));
  const double mean = static_cast<double>(rows) / static_cast<double>(experts);
  double sum = 0;
  for (int side = -1; side <= 1; ++side) {
    sum += std::max(1.0, std::ceil((mean + side * std::sqrt(mean)) / 128));
  }
  return sum / 3 * static_cast<double>(experts);
}

/// Wide tiles defer to narrow ones where those end earlier: with few tiles, or where n blocks reach
/// far past the end. A multiprocessor has one wide tile at a time or two narrow ones, which take as
/// long; a narrow one alone takes half. Wide tiles read a quarter less, so a hot chip clocks higher;
/// but nothing multiplies while a wide tile begins or ends. Only long sums make up for that.
inline std::string defer_to_narrow(const DeviceTraits& device, double m_blocks, int wide,
                                   int narrow) {
  const double each = m_blocks / std::max(device.multiprocessors, 1);
  const double wide_time = std::ceil(each * wide);
  const double narrow_time = each * narrow <= 1 ? 0.5 : std::ceil(each * narrow / 2);
  if (wide_time <= narrow_time) return {};
  return std::to_string(narrow) + " narrow tiles across take less time than " +
         std::to_string(wide);
}

/// Refuses devices whose thread blocks cannot have the stages of a tile.
inline std::string reject_shared(const DeviceTraits& device, int bytes) {
  if (device.block_shared_bytes >= bytes) return {};
  return "shared memory of a thread block: got " + std::to_string(device.block_shared_bytes) +
         ", allowed: at least " + std::to_string(bytes) + " (for this tile)";
}

}  // namespace sonicmoe::cuda::sm80
