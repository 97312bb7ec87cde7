#pragma once

#include "core/composed_plan.h"
#include "core/routing_block.h"
#include "sonicmoe/router.h"
#include "sonicmoe/token_rounding.h"

namespace sonicmoe {

/// Operations, their regions in a workspace, and their order, in a form that LayerPlan composes.
struct RouterPlan::Impl : ComposedPlan {
  struct Forward {
    std::size_t row_slots = 0;
    std::size_t block_counts = 0;
    std::size_t scratch = 0;
  };
  struct Backward {
    std::size_t dscores = 0;  // gradients of the scores of token rounding's lists
    std::size_t scratch = 0;
  };

  RoutingDesc desc;
  Forward fwd;
  Backward bwd;
  std::size_t block_counts = 0;  ///< bytes of Handoff::block_counts; 0: none

  std::optional<OpPlan<RouterGemmDesc>> router_gemm;
  std::optional<OpPlan<TopKDesc>> top_k;
  std::optional<OpPlan<TokenRoundingDesc>> token_rounding;
  std::optional<OpPlan<MetadataDesc>> metadata;
  std::optional<OpPlan<ScoreGradDesc>> score_grad;
  std::optional<OpPlan<TokenRoundingGradDesc>> token_rounding_grad;
  std::optional<OpPlan<RouterGemmDesc>> router_dgrad;
  std::optional<OpPlan<RouterGemmDesc>> router_wgrad;

  bool rounded() const { return slot_kind(desc) == SlotKind::rounded; }
  /// Are slots positions in lists, of the caller or of token rounding?
  bool lists() const { return rounded() || desc.takes_lists(); }
  /// Do a token's logits have gradients at its own experts alone, if no other loss reads the
  /// logits? Then the sum over dX's rows can add the router's part, and router_dgrad need not run.
  bool reaches_own_experts() const {
    return desc.projects() && !rounded() && !desc.needs_logits() && desc.top_k <= kMaxRoutedTopK;
  }
  /// The scores (R) of a call's slots.
  const float* slot_scores(const RouterForwardArgs& args, const RoutedRows& rows) const;

  RouterGemmDesc product(GemmPass pass) const;
  void plan_forward(PlanBuilder* build);
  void plan_backward(PlanBuilder* build);
  Forward book_forward(Ledger* ledger) const;
  Backward book_backward(Ledger* ledger) const;

  /// From x or lists to grouped rows. Metadata sets *next_tile_counter to 0 unless it is null.
  void forward(Sequence* seq, const RouterForwardArgs& args, const Forward& at,
               std::int32_t* next_tile_counter) const;
  /// Copies the optional outputs. Run it last: no operation waits for these copies.
  void copy_out(Sequence* seq, const RouterForwardArgs& args) const;
  /// From dS of the rows to the gradients of the lists' scores or of the logits.
  void score_gradients(Sequence* seq, const RouterBackwardArgs& args, const Backward& at) const;
  /// From dlogits to the router's part of dX and to the gradient of its weights.
  void weight_gradients(Sequence* seq, const RouterBackwardArgs& args) const;
};

}  // namespace sonicmoe
