#pragma once

#include <string>
#include <vector>

#include "sonicmoe/types.h"

namespace sonicmoe {

/// A device of this machine, and whether kernels of this build can run there.
struct DeviceInfo {
  Device device;
  std::string name;     ///< "NVIDIA H200", or the processor's name
  std::string details;  ///< cores and instruction sets, or SMs, memory and driver
  bool usable = false;  ///< kernels of this build can run there
  std::string reason;   ///< why it is not usable; empty if it is
};

/// One entry of the kernel list: a kernel of this build.
struct KernelInfo {
  std::string op;    ///< "up_proj", "top_k", ...
  std::string name;  ///< "cpu.up_proj"; Options::kernel takes it
  DeviceType device = DeviceType::cpu;
};

SONICMOE_API const char* version() noexcept;  ///< "0.1.0"
/// The CPU, then each CUDA device. Without a CUDA device or driver, one CUDA entry says why.
SONICMOE_API std::vector<DeviceInfo> devices();
SONICMOE_API std::vector<KernelInfo> kernels();  ///< best first within an op

}  // namespace sonicmoe
