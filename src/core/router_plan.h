#pragma once

#include "core/composed_plan.h"
#include "core/routing_block.h"
#include "sonicmoe/router.h"
#include "sonicmoe/token_rounding.h"

namespace sonicmoe {

/// What LayerPlan composes: operations, the regions they want in a workspace, and their order.
struct RouterPlan::Impl : ComposedPlan {
  struct Forward {
    std::size_t row_slots = 0;
    std::size_t block_counts = 0;
    std::size_t scratch = 0;
  };
  struct Backward {
    std::size_t dscores = 0;  // token rounding: of the lists it made
    std::size_t scratch = 0;
  };

  RoutingDesc desc;
  Forward fwd;
  Backward bwd;
  std::size_t block_counts = 0;  ///< bytes that top_k hands to metadata; 0: none

  std::optional<OpPlan<RouterGemmDesc>> router_gemm;
  std::optional<OpPlan<TopKDesc>> top_k;
  std::optional<OpPlan<TokenRoundingDesc>> token_rounding;
  std::optional<OpPlan<MetadataDesc>> metadata;
  std::optional<OpPlan<ScoreGradDesc>> score_grad;
  std::optional<OpPlan<TokenRoundingGradDesc>> token_rounding_grad;
  std::optional<OpPlan<RouterGemmDesc>> router_dgrad;
  std::optional<OpPlan<RouterGemmDesc>> router_wgrad;

  bool given() const { return slot_kind(desc) == SlotKind::given; }
  bool rounded() const { return slot_kind(desc) == SlotKind::rounded; }
  bool lists() const { return slot_kind(desc) != SlotKind::top_k; }
  /// Do a token's logits have gradients at its own experts alone, unless a loss outside adds some?
  /// Then the sum over dX's rows can add the router's part, and no product is needed.
  bool reaches_own_experts() const {
    return !lists() && !desc.needs_logits() && desc.top_k <= kMaxRoutedTopK;
  }

  void plan_forward(PlanBuilder* build);
  void plan_backward(PlanBuilder* build);
  Forward book_forward(Ledger* ledger) const;
  Backward book_backward(Ledger* ledger) const;

  /// From x or lists to grouped rows; metadata resets `next_tile_counter`.
  void forward(Sequence* seq, const RouterForwardArgs& args, const Forward& at,
               std::int32_t* next_tile_counter) const;
  /// Optional outputs, after everything that something waits for.
  void copy_out(Sequence* seq, const RouterForwardArgs& args) const;
  /// From the rows' dS to the lists' scores or the logits.
  void score_gradients(Sequence* seq, const RouterBackwardArgs& args, const Backward& at) const;
  /// From dlogits to the router's part of dx and to its weights.
  void weight_gradients(Sequence* seq, const RouterBackwardArgs& args) const;
};

}  // namespace sonicmoe
