#pragma once

#include "core/ledger.h"
#include "core/plan_builder.h"
#include "core/sequence.h"
#include "sonicmoe/combine.h"

namespace sonicmoe {

/// What LayerPlan composes: the two sums, without regions of their own.
struct CombinePlan::Impl {
  CombineDesc desc;
  Exec exec;
  std::string walk;
  std::size_t workspace_bytes = 0;

  std::optional<OpPlan<AggregateDesc>> aggregate_o;
  std::optional<OpPlan<AggregateDesc>> aggregate_dx;

  void plan_forward(PlanBuilder* build, std::size_t* scratch);
  void plan_backward(PlanBuilder* build, std::size_t* scratch);
  void forward(Sequence* seq, const AggregateArgs& args) const;
  void backward(Sequence* seq, const AggregateArgs& args) const;
};

}  // namespace sonicmoe
