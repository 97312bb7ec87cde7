#pragma once

#include "core/composed_plan.h"
#include "sonicmoe/experts.h"

namespace sonicmoe {

/// What LayerPlan composes: operations, the regions they want in a workspace, and their order.
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

  std::optional<OpPlan<GroupedGemmDesc>> up_proj;
  std::optional<OpPlan<GroupedGemmDesc>> down_proj;
  std::optional<OpPlan<GroupedGemmDesc>> down_proj_dgrad;
  std::optional<OpPlan<BiasGradDesc>> bias_grad;
  std::optional<OpPlan<GroupedGemmDesc>> down_proj_wgrad;
  std::optional<OpPlan<GroupedGemmDesc>> up_proj_wgrad;
  std::optional<OpPlan<GroupedGemmDesc>> up_proj_dgrad;

  void plan_forward(PlanBuilder* build);
  void plan_backward(PlanBuilder* build);
  Forward book_forward(Ledger* ledger) const;
  /// All but scaled_act, which a caller may want to share with dx_rows.
  Backward book_backward(Ledger* ledger) const;
  std::size_t scaled_act_bytes() const;

  /// Where up_proj counts its tiles; an operation before it may reset that word.
  std::int32_t* up_proj_tile_counter(const Sequence& seq, const Forward& at) const;
  void forward(Sequence* seq, const ExpertsForwardArgs& args, const Forward& at) const;
  /// dH, A' and the rows' dS, with the biases' gradients.
  void row_gradients(Sequence* seq, const ExpertsBackwardArgs& args, const Backward& at) const;
  /// dW2, dW1 and dX~. `apart`: an operation stands between them and row_gradients() that has
  /// waited for it, so that they need not.
  void weight_gradients(Sequence* seq, const ExpertsBackwardArgs& args, const Backward& at,
                        bool apart) const;

 private:
  /// Do operations count tiles, and where? On the CPU none does.
  bool counts_tiles() const { return exec.device.type == DeviceType::cuda && desc.rows > 0; }
  void* dpreact(const Sequence& seq, const ExpertsBackwardArgs& args, const Backward& at) const;
};

}  // namespace sonicmoe
