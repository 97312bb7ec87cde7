#pragma once

#include "core/composed_plan.h"
#include "sonicmoe/combine.h"

namespace sonicmoe {

/// The two sums, in a form that LayerPlan composes. They need no regions of the workspace, only the
/// scratch that all operations share.
struct CombinePlan::Impl : ComposedPlan {
  CombineDesc desc;

  std::optional<OpPlan<AggregateDesc>> aggregate_o;
  std::optional<OpPlan<AggregateDesc>> aggregate_dx;

  void plan_forward(PlanBuilder* build);
  void plan_backward(PlanBuilder* build);
  void forward(Sequence* seq, const AggregateArgs& args) const;
  void backward(Sequence* seq, const AggregateArgs& args) const;
};

}  // namespace sonicmoe
