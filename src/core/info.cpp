#include "sonicmoe/info.h"

#include <utility>

#include "core/backends.h"
#include "core/kernel.h"

namespace sonicmoe {

const char* version() noexcept { return SONICMOE_VERSION; }

std::vector<DeviceInfo> devices() {
  DeviceInfo cpu;
  cpu.name = cpu::processor_name();
  cpu.details = cpu::processor_details();
  cpu.reason = device_reason(cpu.device);
  cpu.usable = cpu.reason.empty();
  std::vector<DeviceInfo> all = {cpu};
#if SONICMOE_HAS_CUDA
  for (DeviceInfo& info : cuda::devices()) all.push_back(std::move(info));
#else
  const Device device{DeviceType::cuda, 0};
  all.push_back({device, "CUDA", "", false, device_reason(device)});
#endif
  return all;
}

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> all;
  for_each_kernel([&](const auto& kernel) {
    all.push_back({kernel.op, kernel.name, device_type(kernel.arch)});
  });
  return all;
}

}  // namespace sonicmoe
