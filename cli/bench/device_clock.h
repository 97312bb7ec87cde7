#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "sonicmoe/types.h"

namespace sonicmoe::cli {

/// Time between two points on a CUDA device's default stream, and a cache flush that keeps the
/// device busy while the host gets ahead of it.
class DeviceClock {
 public:
  explicit DeviceClock(Device device);
  ~DeviceClock();
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

  void flush();  ///< returns at once
  void wait();   ///< until the device is idle; throws what went wrong
  void start();
  double stop();  ///< seconds since start(); waits

  /// Seconds of each of `count` runs, without waiting in between; before each, untimed, a flush of
  /// the caches and then before().
  std::vector<double> repeat(int count, const std::function<void()>& before,
                             const std::function<void()>& run);

  /// Starts a copy within the device.
  static void copy(void* to, const void* from, std::size_t bytes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sonicmoe::cli
