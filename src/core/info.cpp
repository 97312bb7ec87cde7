#include "sonicmoe/info.h"

#include <utility>

#include "core/backends.h"
#include "core/kernel.h"

namespace sonicmoe {
namespace {

template <class Desc>
void append(std::vector<KernelInfo>* out) {
  for (const Kernel<Desc>* kernel : kernel_list<Desc>()) {
    out->push_back({kernel->op, kernel->name, kernel->device, true, ""});
  }
}

}  // namespace

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
  append<RouterGemmDesc>(&all);
  append<TopKDesc>(&all);
  append<MetadataDesc>(&all);
  append<GroupedGemmDesc>(&all);
  append<BiasGradDesc>(&all);
  append<AggregateDesc>(&all);
  append<ScoreGradDesc>(&all);
  append<AuxLossDesc>(&all);
  append<TokenRoundingDesc>(&all);
  append<TokenRoundingGradDesc>(&all);
  return all;
}

}  // namespace sonicmoe
