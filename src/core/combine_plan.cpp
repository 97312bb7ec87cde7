// From the experts' rows to tokens: one sum makes O, another dX.
#include "core/combine_plan.h"

#include <algorithm>

namespace sonicmoe {

void CombinePlan::Impl::plan_forward(PlanBuilder* build) {
  build->add(&aggregate_o, {desc.tokens, desc.rows, desc.hidden, desc.top_k, desc.dtype});
}

void CombinePlan::Impl::plan_backward(PlanBuilder* build) {
  build->add(&aggregate_dx, {desc.tokens, desc.rows, desc.hidden, desc.top_k, desc.dtype,
                             desc.experts, desc.f32_dlogits, desc.f32_router_w});
}

void CombinePlan::Impl::forward(Sequence* seq, const AggregateArgs& args) const {
  seq->run("aggregate_o", aggregate_o, args);
}

void CombinePlan::Impl::backward(Sequence* seq, const AggregateArgs& args) const {
  seq->run_for(args.out, "aggregate_dx", aggregate_dx, args);
}

Result<CombinePlan> make_plan(const CombineDesc& desc, Device device, const Options& options) {
  return compose<CombinePlan>(desc, device, options,
                              [&](CombinePlan::Impl* impl, PlanBuilder* build) {
                                impl->plan_forward(build);
                                impl->forward_ledger.book("scratch", build->take_scratch());
                                if (!desc.inference) impl->plan_backward(build);
                                impl->backward_ledger.book("scratch", build->take_scratch());
                              });
}

const CombineDesc& CombinePlan::desc() const noexcept { return impl_->desc; }
std::size_t CombinePlan::workspace_bytes() const noexcept {
  return std::max(impl_->forward_ledger.size(), impl_->backward_ledger.size());
}
std::string CombinePlan::explain() const { return "combine\n" + impl_->explain(); }

std::vector<const char*> CombinePlan::forward_operations() const {
  return names_of([&](Sequence* seq) { impl_->forward(seq, {}); });
}
std::vector<const char*> CombinePlan::backward_operations() const {
  return names_of([&](Sequence* seq) { impl_->backward(seq, {}); });
}

// The plan's arguments are those of its operations, which check them.
Status CombinePlan::forward(const AggregateArgs& args, Workspace workspace, Stream stream,
                            OperationMask operations) const noexcept {
  return call(*impl_, impl_->forward_ledger, 0, workspace, stream, operations,
              [&](Sequence* seq) { impl_->forward(seq, args); });
}

Status CombinePlan::backward(const AggregateArgs& args, Workspace workspace, Stream stream,
                             OperationMask operations) const noexcept {
  if (Status status = validate_backward(impl_->desc.inference); !status.ok()) return status;
  return call(*impl_, impl_->backward_ledger, 0, workspace, stream, operations,
              [&](Sequence* seq) { impl_->backward(seq, args); });
}

}  // namespace sonicmoe
