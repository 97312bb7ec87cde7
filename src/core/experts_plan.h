#pragma once

#include "core/composed_plan.h"
#include "sonicmoe/experts.h"

namespace sonicmoe {

/// Operations, their regions in a workspace, and their order, in a form that LayerPlan composes.
struct ExpertsPlan::Impl : ComposedPlan {
  struct Forward {
    std::size_t tile_counters = 0;  // of up_proj and down_proj
    std::size_t act = 0;
    std::size_t scratch = 0;
  };
  struct Backward {
    std::size_t dpreact = 0;
    std::size_t tile_counter = 0;  // of up_proj_dgrad
    std::size_t scaled_act = 0;
    std::size_t scratch = 0;
  };

  GroupedDesc desc;
  Forward fwd;
  Backward bwd;

  std::optional<OpPlan<SegmentsDesc>> segments;   // contiguous rows only
  std::optional<OpPlan<ZeroTailDesc>> zero_tail;  // likewise
  std::optional<OpPlan<GroupedGemmDesc>> up_proj;
  std::optional<OpPlan<GroupedGemmDesc>> down_proj;
  std::optional<OpPlan<GroupedGemmDesc>> up_proj_recompute;  // in backward, with Recompute::preact
  std::optional<OpPlan<GroupedGemmDesc>> down_proj_dgrad;
  std::optional<OpPlan<BiasGradDesc>> bias_grad;
  std::optional<OpPlan<GroupedGemmDesc>> down_proj_wgrad;
  std::optional<OpPlan<GroupedGemmDesc>> up_proj_wgrad;
  std::optional<OpPlan<GroupedGemmDesc>> up_proj_dgrad;

  void plan_forward(PlanBuilder* build);
  void plan_backward(PlanBuilder* build);
  Forward book_forward(Ledger* ledger) const;
  /// Books all regions except scaled_act: LayerPlan lays dx_rows over it.
  Backward book_backward(Ledger* ledger) const;
  std::size_t scaled_act_bytes() const;

  /// The word in which up_proj counts its tiles, or null. Metadata may reset it (Handoff).
  std::int32_t* up_proj_tile_counter(const Sequence& seq, const Forward& at) const;
  void forward(Sequence* seq, const ExpertsForwardArgs& args, const Forward& at) const;
  /// Writes dH, A', the biases' gradients, and dS of the rows that experts own.
  void row_gradients(Sequence* seq, const ExpertsBackwardArgs& args, const Backward& at) const;
  /// Writes dW2, dW1, dX~, and zeros for rows that no expert owns. `apart`: the caller runs an
  /// operation between row_gradients() and this one, which waits for row_gradients(). The weight
  /// gradients may then overlap that operation.
  void weight_gradients(Sequence* seq, const ExpertsBackwardArgs& args, const Backward& at,
                        bool apart) const;

 private:
  /// Which rows the experts own, and the order of the weight gradients' experts.
  struct ExpertRows {
    const std::int32_t* offsets;
    const std::int32_t* ends;  ///< null: offsets + 1
    const std::int32_t* expert_order;
  };
  ExpertRows rows_of(const ExpertsBackwardArgs& args) const;
  /// Does the workspace hold tile counters? The CPU schedules no tiles dynamically.
  bool counts_tiles() const { return exec.device.type == DeviceType::cuda && desc.rows > 0; }
  /// `keeps`: it writes H.
  GroupedGemmDesc up_proj_desc(bool keeps) const {
    GroupedGemmDesc up{{desc}, GemmOp::up_proj};
    up.inference = !keeps;
    return up;
  }
  /// dH, and before that the H of up_proj_recompute.
  void* dpreact(const Sequence& seq, const ExpertsBackwardArgs& args, const Backward& at) const;
};

}  // namespace sonicmoe
