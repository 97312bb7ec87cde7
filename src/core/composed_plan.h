#pragma once

#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/ledger.h"
#include "core/plan_builder.h"
#include "core/sequence.h"
#include "core/validate.h"

/// Common code of the plans with several operations: LayerPlan and its three parts.
namespace sonicmoe {

/// The base of these plans' Impl, which adds `desc` and the operations.
struct ComposedPlan {
  Exec exec;
  std::string walk;  ///< which kernels run and why the others do not
  /// Empty in the three parts of a LayerPlan, which books their regions in its own ledgers.
  Ledger forward_ledger, backward_ledger;

  std::string explain() const {
    return walk + forward_ledger.explain("forward") + backward_ledger.explain("backward");
  }
};

/// make_plan() of these plans: checks `desc`, then calls `add(impl, build)`, which adds the
/// operations and books the regions.
template <class Plan, class Desc, class Add>
Result<Plan> compose(const Desc& desc, Device device, const Options& options, Add add) try {
  Result<Exec> exec = make_exec(device, options);
  if (!exec.ok()) return exec.status();
  if (Status status = validate(desc); !status.ok()) return status;
  auto impl = std::make_shared<typename Plan::Impl>();
  impl->desc = desc;
  impl->exec = exec.value();
  PlanBuilder build(impl->exec, options);
  add(impl.get(), &build);
  if (Status status = build.finish(); !status.ok()) return status;
  impl->walk = build.walk();
  return Plan(std::move(impl));
} catch (const std::bad_alloc&) {
  return Status::error(StatusCode::out_of_memory, "make_plan: out of host memory");
}

/// The names of the operations that `run(&sequence)` runs.
template <class Run>
std::vector<const char*> names_of(Run run) {
  std::vector<const char*> names;
  Sequence seq(&names);
  run(&seq);
  return names;
}

/// forward() or backward(): calls `run(&sequence)` with the plan's device current, in a workspace
/// with the regions of `ledger`. Operations share the bytes from offset `scratch` on as their own
/// workspace. The caller has validated the arguments.
template <class Run>
Status call(const ComposedPlan& plan, const Ledger& ledger, std::size_t scratch,
            Workspace workspace, Stream stream, OperationMask operations, Run run) noexcept {
  if (Status status = validate(workspace, ledger.size()); !status.ok()) return status;
  const DeviceGuard guard(plan.exec.device);
  Sequence seq(workspace, scratch, stream, operations);
  run(&seq);
  return seq.status();
}

}  // namespace sonicmoe
