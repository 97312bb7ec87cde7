#pragma once

#include "core/composed_plan.h"
#include "sonicmoe/combine.h"

namespace sonicmoe {

/// What LayerPlan composes: the two sums, without regions but what they share with all operations.
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
