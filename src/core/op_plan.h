#pragma once

#include <string>

#include "core/kernel.h"
#include "sonicmoe/ops.h"

namespace sonicmoe {

template <class Desc>
struct OpPlan<Desc>::Impl {
  Desc desc;
  const Kernel<Desc>* kernel;
  Exec exec;
  std::size_t workspace_bytes;
  std::string walk;
};

/// Sets device->multiprocessors to `wanted` (Options::multiprocessors) unless that is 0. Returns
/// invalid_argument for odd or negative numbers, for more than the device has, and on the CPU.
Status limit_multiprocessors(int wanted, DeviceTraits* device);
/// OpPlan::run() with the handoff of a sequence of operations.
template <class Desc>
Status run_operation(const OpPlan<Desc>& plan, const typename Desc::Args& args,
                     const Handoff& handoff, Workspace workspace, Stream stream) noexcept;

/// Checks device and options, and resolves the defaults: traits, threads, checked.
Result<Exec> make_exec(Device device, const Options& options);

}  // namespace sonicmoe
