#pragma once

#include <string>
#include <vector>

#include "sonicmoe/types.h"

namespace sonicmoe {

struct DeviceInfo {
  Device device;
  std::string name;     ///< "NVIDIA H200", or the processor's name
  std::string details;  ///< cores and instruction sets, or SMs, memory and driver
  bool usable = false;  ///< kernels of this build can run there
  std::string reason;   ///< why not, when not usable
};

/// One entry of the kernel list.
struct KernelInfo {
  std::string op;    ///< "up_proj", "top_k", ...
  std::string name;  ///< "cpu.up_proj"; Options::kernel takes it
  DeviceType device = DeviceType::cpu;
  bool compiled = false;
  std::string reason;  ///< why not, when not compiled
};

SONICMOE_API const char* version() noexcept;     ///< "0.1.0"
SONICMOE_API std::vector<DeviceInfo> devices();  ///< never throws for a missing driver
SONICMOE_API std::vector<KernelInfo> kernels();  ///< best first within an op

}  // namespace sonicmoe
