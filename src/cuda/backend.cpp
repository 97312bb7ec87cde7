// The functions of the CUDA backend that core calls besides kernels: they list the devices, make
// one current for a call, and copy. The host compiler compiles this file.
#include <cstdio>

#include "core/backends.h"
#include "cuda/runtime.h"

static_assert(__cplusplus >= 202002L);

namespace sonicmoe::cuda {
namespace {

std::string driver_version() {
  int version = 0;
  (void)cudaDriverGetVersion(&version);
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string runtime_version() {
  return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

/// Why this machine has no CUDA device for us, or empty. `count`, unless null, gets the number of
/// devices. Asks the driver once: no driver appears or disappears while a process runs.
const std::string& missing(int* count) {
  static int devices = 0;
  static const std::string reason = [] {
    const std::string head = "device: got cuda, allowed: cpu (";
    const cudaError_t error = cudaGetDeviceCount(&devices);
    (void)cudaGetLastError();
    int driver = 0;
    (void)cudaDriverGetVersion(&driver);
    if (driver == 0) return head + "there is no CUDA driver on this machine)";
    if (error == cudaErrorInsufficientDriver) {
      return head + "the driver is for CUDA " + driver_version() + ", this build needs " +
             runtime_version() + ")";
    }
    if (error != cudaSuccess) return head + cudaGetErrorString(error) + ")";
    return devices > 0 ? std::string() : head + "the driver has no device)";
  }();
  if (count != nullptr) *count = devices;
  return reason;
}

}  // namespace

std::string device_reason(int index) {
  int count = 0;
  if (const std::string& reason = missing(&count); !reason.empty()) return reason;
  if (index >= count) {
    return "device.index: got " + std::to_string(index) + ", allowed: 0 to " +
           std::to_string(count - 1);
  }
  return {};
}

DeviceTraits device_traits(int index) noexcept {
  // The attribute, or 0 if the query fails.
  const auto ask = [index](cudaDeviceAttr attribute) {
    int value = 0;
    if (cudaDeviceGetAttribute(&value, attribute, index) == cudaSuccess) return value;
    (void)cudaGetLastError();  // or launched() would report it for the next launch
    return 0;
  };
  DeviceTraits traits;
  traits.arch =
      10 * ask(cudaDevAttrComputeCapabilityMajor) + ask(cudaDevAttrComputeCapabilityMinor);
  traits.multiprocessors = ask(cudaDevAttrMultiProcessorCount);
  traits.l2_bytes = ask(cudaDevAttrL2CacheSize);
  traits.shared_bytes = ask(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  traits.block_shared_bytes = ask(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return traits;
}

std::vector<DeviceInfo> devices() {
  int count = 0;
  if (const std::string& reason = missing(&count); !reason.empty()) {
    return {{{DeviceType::cuda, 0}, "CUDA", "", false, reason}};
  }
  std::vector<DeviceInfo> all;
  for (int index = 0; index < count; ++index) {
    DeviceInfo info;
    info.device = {DeviceType::cuda, index};
    cudaDeviceProp properties;
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, index);
        error == cudaSuccess) {
      char details[160];
      std::snprintf(details, sizeof(details),
                    "%d SMs, %.0f GiB, compute capability %d.%d, driver for CUDA %s",
                    properties.multiProcessorCount,
                    static_cast<double>(properties.totalGlobalMem) / (1 << 30), properties.major,
                    properties.minor, driver_version().c_str());
      info.name = properties.name;
      info.details = details;
      info.reason = sonicmoe::device_reason(info.device);
    } else {
      (void)cudaGetLastError();
      info.name = "CUDA";
      info.reason =
          std::string("device: got cuda, allowed: cpu (") + cudaGetErrorString(error) + ")";
    }
    info.usable = info.reason.empty();
    all.push_back(std::move(info));
  }
  return all;
}

int enter(int index) noexcept {
  // Clears the last error, so that launched() does not report an error of the caller's earlier CUDA
  // calls as ours. An error that the caller has not read yet is lost, too.
  (void)cudaGetLastError();
  int current = 0;
  if (cudaGetDevice(&current) != cudaSuccess || current == index) return -1;
  return cudaSetDevice(index) == cudaSuccess ? current : -1;
}

void leave(int previous) noexcept { (void)cudaSetDevice(previous); }

Status copy(void* to, const void* from, std::size_t bytes, const Exec& exec) noexcept {
  return to_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(exec)),
                   "copy");
}

}  // namespace sonicmoe::cuda
