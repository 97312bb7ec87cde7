// From the experts' rows to tokens: the sums of O and of dX.
#include "core/combine_plan.h"

#include <new>

#include "core/validate.h"

namespace sonicmoe {

void CombinePlan::Impl::plan_forward(PlanBuilder* build, std::size_t* scratch) {
  build->add(&aggregate_o, {desc.tokens, desc.rows, desc.hidden, desc.top_k, desc.dtype}, scratch);
}

void CombinePlan::Impl::plan_backward(PlanBuilder* build, std::size_t* scratch) {
  build->add(&aggregate_dx,
             {desc.tokens, desc.rows, desc.hidden, desc.top_k, desc.dtype, desc.experts}, scratch);
}

void CombinePlan::Impl::forward(Sequence* seq, const AggregateArgs& args) const {
  seq->run("aggregate_o", aggregate_o, args);
}

void CombinePlan::Impl::backward(Sequence* seq, const AggregateArgs& args) const {
  seq->run_for(args.out, "aggregate_dx", aggregate_dx, args);
}

Result<CombinePlan> make_plan(const CombineDesc& desc, Device device, const Options& options) try {
  Result<Exec> exec = make_exec(device, options);
  if (!exec.ok()) return exec.status();
  auto impl = std::make_shared<CombinePlan::Impl>();
  impl->desc = desc;
  impl->exec = exec.value();
  PlanBuilder build(impl->exec, options);
  impl->plan_forward(&build, &impl->workspace_bytes);
  if (!desc.inference) impl->plan_backward(&build, &impl->workspace_bytes);
  if (Status status = build.finish(); !status.ok()) return status;
  impl->walk = build.walk();
  return CombinePlan(std::move(impl));
} catch (const std::bad_alloc&) {
  return Status::error(StatusCode::out_of_memory, "make_plan: out of host memory");
}

const CombineDesc& CombinePlan::desc() const noexcept { return impl_->desc; }
std::size_t CombinePlan::workspace_bytes() const noexcept { return impl_->workspace_bytes; }
std::string CombinePlan::explain() const { return "combine\n" + impl_->walk; }

std::vector<const char*> CombinePlan::forward_operations() const {
  std::vector<const char*> names;
  Sequence seq(&names);
  impl_->forward(&seq, {});
  return names;
}
std::vector<const char*> CombinePlan::backward_operations() const {
  std::vector<const char*> names;
  Sequence seq(&names);
  impl_->backward(&seq, {});
  return names;
}

// The operations check their arguments, which are the plan's own.
Status CombinePlan::forward(const AggregateArgs& args, Workspace workspace, Stream stream,
                            OperationMask operations) const noexcept {
  if (Status status = validate(workspace, impl_->workspace_bytes); !status.ok()) return status;
  const DeviceGuard guard(impl_->exec.device);
  Sequence seq(workspace, 0, stream, operations);
  impl_->forward(&seq, args);
  return seq.status();
}

Status CombinePlan::backward(const AggregateArgs& args, Workspace workspace, Stream stream,
                             OperationMask operations) const noexcept {
  if (Status status = validate_backward(impl_->desc.inference); !status.ok()) return status;
  if (Status status = validate(workspace, impl_->workspace_bytes); !status.ok()) return status;
  const DeviceGuard guard(impl_->exec.device);
  Sequence seq(workspace, 0, stream, operations);
  impl_->backward(&seq, args);
  return seq.status();
}

}  // namespace sonicmoe
