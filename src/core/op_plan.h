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

/// Leaves a call so many multiprocessors of `device` (Options::multiprocessors), or refuses.
Status limit_multiprocessors(int wanted, DeviceTraits* device);
/// OpPlan::run() within a sequence of operations.
template <class Desc>
Status run_operation(const OpPlan<Desc>& plan, const typename Desc::Args& args,
                     const Handoff& handoff, Workspace workspace, Stream stream) noexcept;

/// Device, options and thread count, checked and made definite.
Result<Exec> make_exec(Device device, const Options& options);

}  // namespace sonicmoe
