#pragma once

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe {

/// What decisions know of a device. Plain numbers: a choice can be looked up for a device that is
/// not there.
struct DeviceTraits {
  /// Ten times the compute capability: 90. 0: the CPU, of which nothing else is said.
  int arch = 0;
  int multiprocessors = 0;  ///< that a call may fill: all, or fewer by Options::multiprocessors
  std::int64_t l2_bytes = 0;
  int shared_bytes = 0;        ///< of a multiprocessor
  int block_shared_bytes = 0;  ///< of those, what one thread block may ask for
};

/// The kind of device that an architecture belongs to.
constexpr DeviceType device_type(int arch) {
  return arch == 0 ? DeviceType::cpu : DeviceType::cuda;
}

}  // namespace sonicmoe
