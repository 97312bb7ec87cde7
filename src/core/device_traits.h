#pragma once

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe {

/// Everything that the choice of a kernel and its launch know of a device. Plain numbers, so that
/// tests look up the choices for a device that the machine does not have.
struct DeviceTraits {
  /// Ten times the compute capability: 90 for 9.0. 0: the CPU, whose other fields stay 0.
  int arch = 0;
  int multiprocessors = 0;  ///< all, or as many as Options::multiprocessors lets a call fill
  std::int64_t l2_bytes = 0;
  int shared_bytes = 0;        ///< shared memory of a multiprocessor
  int block_shared_bytes = 0;  ///< most shared memory of a thread block
};

/// The kind of device that an architecture belongs to.
constexpr DeviceType device_type(int arch) {
  return arch == 0 ? DeviceType::cpu : DeviceType::cuda;
}

}  // namespace sonicmoe
