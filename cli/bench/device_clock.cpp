#include "device_clock.h"

#include <stdexcept>
#include <string>

#include "cli/buffer.h"

#if SONICMOE_HAS_CUDA
#include <cuda_runtime_api.h>

namespace sonicmoe::cli {
namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

}  // namespace

struct DeviceClock::Impl {
  Buffer memory;
  cudaEvent_t begin = nullptr, end = nullptr;
};

// Ten times the last-level cache of an H200: a quarter of a millisecond, in which the host starts a
// whole layer.
DeviceClock::DeviceClock(Device device)
    : impl_(std::make_unique<Impl>(Buffer(std::size_t{1} << 29, device))) {
  check(cudaSetDevice(device.index));
  check(cudaEventCreate(&impl_->begin));
  check(cudaEventCreate(&impl_->end));
}

DeviceClock::~DeviceClock() {
  (void)cudaEventDestroy(impl_->begin);
  (void)cudaEventDestroy(impl_->end);
}

void DeviceClock::flush() {
  check(cudaMemsetAsync(impl_->memory.data(), 1, impl_->memory.bytes(), nullptr));
}

void DeviceClock::wait() { check(cudaDeviceSynchronize()); }

void DeviceClock::start() { check(cudaEventRecord(impl_->begin, nullptr)); }

double DeviceClock::stop() {
  check(cudaEventRecord(impl_->end, nullptr));
  check(cudaEventSynchronize(impl_->end));
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, impl_->begin, impl_->end));
  return static_cast<double>(milliseconds) * 1e-3;
}

std::vector<double> DeviceClock::repeat(int count, const std::function<void()>& before,
                                        const std::function<void()>& run) {
  struct Events {
    std::vector<cudaEvent_t> all;
    ~Events() {
      for (cudaEvent_t event : all) (void)cudaEventDestroy(event);
    }
  } events;
  for (int i = 0; i < 2 * count; ++i) check(cudaEventCreate(&events.all.emplace_back()));
  for (int i = 0; i < count; ++i) {
    // The host is ahead anyway: five times the last-level cache is enough.
    check(cudaMemsetAsync(impl_->memory.data(), 1, impl_->memory.bytes() / 2, nullptr));
    before();
    check(cudaEventRecord(events.all[2 * i], nullptr));
    run();
    check(cudaEventRecord(events.all[2 * i + 1], nullptr));
  }
  wait();
  std::vector<double> seconds;
  for (int i = 0; i < count; ++i) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, events.all[2 * i], events.all[2 * i + 1]));
    seconds.push_back(static_cast<double>(milliseconds) * 1e-3);
  }
  return seconds;
}

void DeviceClock::copy(void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, nullptr));
}

}  // namespace sonicmoe::cli

#else

namespace sonicmoe::cli {

struct DeviceClock::Impl {};
DeviceClock::DeviceClock(Device) { throw std::runtime_error("this build has no CUDA"); }
DeviceClock::~DeviceClock() = default;
void DeviceClock::flush() {}
void DeviceClock::wait() {}
void DeviceClock::start() {}
double DeviceClock::stop() { return 0; }
std::vector<double> DeviceClock::repeat(int, const std::function<void()>&,
                                        const std::function<void()>&) {
  return {};
}
void DeviceClock::copy(void*, const void*, std::size_t) {}

}  // namespace sonicmoe::cli

#endif
