// A layer runs the parts of a router's, an experts' and a combine plan over one workspace. No
// backend has code here.
#include <algorithm>

#include "core/combine_plan.h"
#include "core/experts_plan.h"
#include "core/router_plan.h"
#include "sonicmoe/layer.h"

namespace sonicmoe {

struct LayerPlan::Impl : ComposedPlan {
  struct Forward {
    std::size_t routing = 0;      // inference only; in training the caller gives the block
    std::size_t slot_scores = 0;  // token rounding only; backward does not read them
    RouterPlan::Impl::Forward router;
    ExpertsPlan::Impl::Forward experts;
    std::size_t expert_out = 0;
    std::size_t scratch = 0;
  };
  struct Backward {
    std::size_t row_dscores = 0;
    std::size_t dlogits = 0;
    RouterPlan::Impl::Backward router;
    ExpertsPlan::Impl::Backward experts;
    std::size_t dx_rows = 0;  // lies over scaled_act, which dW2 has read by then
    std::size_t scratch = 0;
  };

  LayerDesc desc;
  SavedBytes saved;
  Forward fwd;
  Backward bwd;
  RouterPlan::Impl router;
  ExpertsPlan::Impl experts;
  CombinePlan::Impl combine;

  /// Sets the descriptors of the three parts.
  void divide() {
    const LayerDesc& d = desc;
    router.desc = d.routing();
    experts.desc = d.grouped();
    const bool by_sum = router.reaches_own_experts();
    combine.desc = {.tokens = d.tokens,
                    .rows = d.rows(),
                    .hidden = d.experts.hidden,
                    .top_k = router.lists() ? 0 : d.router.top_k,
                    .dtype = d.experts.dtype,
                    .experts = by_sum ? d.router.experts : 0,
                    .inference = d.experts.inference,
                    .f32_dlogits = by_sum && d.router.f32_logits,
                    .f32_router_w = by_sum && d.router.f32_router_w};
    router.exec = experts.exec = combine.exec = exec;
  }

  void plan_forward(PlanBuilder* build);
  void plan_backward(PlanBuilder* build);
  void forward(Sequence* seq, const ForwardArgs& args) const;
  void backward(Sequence* seq, const BackwardArgs& args) const;
};

void LayerPlan::Impl::plan_forward(PlanBuilder* build) {
  router.plan_forward(build);
  experts.plan_forward(build);
  combine.plan_forward(build);

  const auto rows = static_cast<std::size_t>(desc.rows());
  const auto hidden = static_cast<std::size_t>(desc.experts.hidden);
  Ledger& ledger = forward_ledger;
  fwd.routing =
      ledger.book("routing", desc.experts.inference ? RoutingBlock::bytes(router.desc) : 0);
  fwd.slot_scores = ledger.book("slot_scores", router.rounded() ? 4 * rows : 0);
  fwd.router = router.book_forward(&ledger);
  fwd.experts = experts.book_forward(&ledger);
  fwd.expert_out = ledger.book("expert_out", rows * hidden * size_of(desc.experts.dtype));
  fwd.scratch = ledger.book("scratch", build->take_scratch());
}

void LayerPlan::Impl::plan_backward(PlanBuilder* build) {
  experts.plan_backward(build);
  router.plan_backward(build);
  combine.plan_backward(build);

  const std::size_t size = size_of(desc.experts.dtype);
  const auto rows = static_cast<std::size_t>(desc.rows());
  const auto hidden = static_cast<std::size_t>(desc.experts.hidden);
  const auto logits = static_cast<std::size_t>(desc.tokens * desc.router.experts) *
                      size_of(desc.router.logits_dtype(desc.experts.dtype));
  Ledger& ledger = backward_ledger;
  bwd.experts = experts.book_backward(&ledger);
  bwd.row_dscores = ledger.book("row_dscores", 4 * rows);
  bwd.router = router.book_backward(&ledger);
  bwd.dlogits = ledger.book("dlogits", desc.router.projects() ? logits : 0);
  bwd.scratch = ledger.book("scratch", build->take_scratch());
  const std::size_t shared = ledger.end();
  bwd.experts.scaled_act = ledger.book("scaled_act", experts.scaled_act_bytes());
  ledger.restart_at(shared);
  bwd.dx_rows = ledger.book("dx_rows", rows * hidden * size);

  saved.x = static_cast<std::size_t>(desc.tokens) * hidden * size;
  if (desc.experts.keeps_preact()) {
    saved.preact = static_cast<std::size_t>(desc.rows() * desc.experts.preact_width()) * size;
  }
  saved.routing = RoutingBlock::bytes(router.desc);
  saved.logits = desc.needs_logits() ? logits : 0;
}

void LayerPlan::Impl::forward(Sequence* seq, const ForwardArgs& args) const {
  const RouterForwardArgs routed{.x = args.x,
                                 .router_w = args.router_w,
                                 .logit_bias = args.logit_bias,
                                 .selection_bias = args.selection_bias,
                                 .expert_scale = args.expert_scale,
                                 .given_logits = args.given_logits,
                                 .given_ids = args.given_ids,
                                 .given_weights = args.given_weights,
                                 .list_tokens = args.list_tokens,
                                 .list_experts = args.list_experts,
                                 .list_scores = args.list_scores,
                                 .seed = args.seed,
                                 .offset = args.offset,
                                 .draws = args.draws,
                                 .logits = args.logits,
                                 .counts = args.counts,
                                 .frequency = args.frequency,
                                 .scores = args.scores,
                                 .expert_ids = args.expert_ids,
                                 .slot_scores = seq->region(fwd.slot_scores),
                                 .error_word = args.error_word,
                                 .routing = desc.experts.inference
                                                ? static_cast<void*>(seq->region(fwd.routing))
                                                : args.routing};
  router.forward(seq, routed, fwd.router, experts.up_proj_tile_counter(*seq, fwd.experts));
  const RoutedRows rows = RoutingBlock::at(router.desc, routed.routing);
  void* const expert_out = seq->region(fwd.expert_out);
  experts.forward(seq,
                  {.offsets = rows.offsets,
                   .row_tokens = rows.row_tokens,
                   .x = args.x,
                   .w1 = args.w1,
                   .w1_up = args.w1_up,
                   .b1 = args.b1,
                   .b1_up = args.b1_up,
                   .w2 = args.w2,
                   .b2 = args.b2,
                   .preact = args.preact,
                   .expert_out = expert_out},
                  fwd.experts);
  combine.forward(seq, {.rows = expert_out,
                        .slot_rows = rows.slot_rows,
                        .token_offsets = rows.token_offsets,
                        .token_slots = router.rounded() ? nullptr : rows.token_slots,
                        .slot_scores = router.slot_scores(routed, rows),
                        .out = args.o});
  router.copy_out(seq, routed);
}

void LayerPlan::Impl::backward(Sequence* seq, const BackwardArgs& args) const {
  // RoutingBlock::at() takes void*, but backward only reads the block.
  const RoutedRows rows = RoutingBlock::at(router.desc, const_cast<void*>(args.routing));
  // The sum over dX's rows adds the router's part of dx where it can. Otherwise router_dgrad writes
  // that part to dx, and the sum adds dx to its rows.
  const bool by_sum = router.reaches_own_experts() && args.dlogits == nullptr;
  const bool by_product = desc.router.projects() && !by_sum;
  void* const dlogits =
      desc.router.projects() ? static_cast<void*>(seq->region(bwd.dlogits)) : args.dgiven_logits;
  const RouterBackwardArgs routed{.x = args.x,
                                  .router_w = args.router_w,
                                  .expert_scale = args.expert_scale,
                                  .logits = args.logits,
                                  .routing = args.routing,
                                  .row_dscores = seq->region(bwd.row_dscores),
                                  .dlogits_in = args.dlogits,
                                  .dlogits = dlogits,
                                  .dscores = args.dscores,
                                  .dx = by_product ? args.dx : nullptr,
                                  .drouter_w = args.drouter_w,
                                  .dlogit_bias = args.dlogit_bias,
                                  .dexpert_scale = args.dexpert_scale};
  const ExpertsBackwardArgs grouped{
      .offsets = rows.offsets,
      .row_tokens = rows.row_tokens,
      .row_scores = rows.row_scores,
      .expert_order = rows.expert_order,
      .x = args.x,
      .dout = args.dout,
      .w1 = args.w1,
      .w1_up = args.w1_up,
      .b1 = args.b1,
      .b1_up = args.b1_up,
      .w2 = args.w2,
      .b2 = args.b2,
      .preact = args.preact,
      .row_dscores = seq->region(bwd.row_dscores),
      .dx_rows = args.dx == nullptr ? nullptr : static_cast<void*>(seq->region(bwd.dx_rows)),
      .dw1 = args.dw1,
      .dw1_up = args.dw1_up,
      .db1 = args.db1,
      .db1_up = args.db1_up,
      .dw2 = args.dw2,
      .db2 = args.db2,
      .dpreact = args.dpreact};
  experts.row_gradients(seq, grouped, bwd.experts);
  router.score_gradients(seq, routed, bwd.router);
  // apart = true: with rows score_grad always launches a kernel. That kernel waits for the
  // operations of row_gradients() before it lets the next kernel start.
  experts.weight_gradients(seq, grouped, bwd.experts, true);
  router.weight_gradients(seq, routed);
  combine.backward(seq, {.rows = grouped.dx_rows,
                         .slot_rows = rows.slot_rows,
                         .token_offsets = rows.token_offsets,
                         .token_slots = router.rounded() ? nullptr : rows.token_slots,
                         .addend = routed.dx,
                         .slot_experts = rows.slot_experts,
                         .dlogits = dlogits,
                         .router_w = by_sum ? args.router_w : nullptr,
                         .out = args.dx});
}

Result<LayerPlan> make_plan(const LayerDesc& desc, Device device, const Options& options) {
  return compose<LayerPlan>(desc, device, options, [&](LayerPlan::Impl* impl, PlanBuilder* build) {
    impl->divide();
    impl->plan_forward(build);
    if (!desc.experts.inference) impl->plan_backward(build);
  });
}

const LayerDesc& LayerPlan::desc() const noexcept { return impl_->desc; }

std::size_t LayerPlan::forward_workspace_bytes() const noexcept {
  return impl_->forward_ledger.size();
}

std::size_t LayerPlan::backward_workspace_bytes() const noexcept {
  return impl_->backward_ledger.size();
}

std::size_t LayerPlan::workspace_bytes() const noexcept {
  return std::max(forward_workspace_bytes(), backward_workspace_bytes());
}

SavedBytes LayerPlan::saved_bytes() const noexcept { return impl_->saved; }

std::string LayerPlan::explain() const {
  const SavedBytes& saved = impl_->saved;
  const Exec& exec = impl_->exec;
  std::string text = std::string("layer on ") + name(exec.device.type) + ", " +
                     std::to_string(exec.threads) + " threads";
  if (exec.device.type == DeviceType::cuda) {
    text += ", " + std::to_string(exec.traits.multiprocessors) + " multiprocessors";
  }
  return text + "\n  " + to_string(impl_->desc) + "\n" + impl_->explain() + "saved for backward, " +
         std::to_string(saved.total()) + " bytes\n  x " + std::to_string(saved.x) + ", preact " +
         std::to_string(saved.preact) + ", routing " + std::to_string(saved.routing) + ", logits " +
         std::to_string(saved.logits) + "\n";
}

std::vector<const char*> LayerPlan::forward_operations() const {
  return names_of([&](Sequence* seq) { impl_->forward(seq, {}); });
}

std::vector<const char*> LayerPlan::backward_operations() const {
  return names_of([&](Sequence* seq) { impl_->backward(seq, {}); });
}

Status LayerPlan::forward(const ForwardArgs& args, Workspace workspace, Stream stream,
                          OperationMask operations) const noexcept {
  const Impl& p = *impl_;
  if (Status status = validate(p.desc, args, p.exec.device.type); !status.ok()) return status;
  return call(p, p.forward_ledger, p.fwd.scratch, workspace, stream, operations,
              [&](Sequence* seq) { p.forward(seq, args); });
}

Status LayerPlan::backward(const BackwardArgs& args, Workspace workspace, Stream stream,
                           OperationMask operations) const noexcept {
  const Impl& p = *impl_;
  if (Status status = validate(p.desc, args, p.exec.device.type); !status.ok()) return status;
  return call(p, p.backward_ledger, p.bwd.scratch, workspace, stream, operations,
              [&](Sequence* seq) { p.backward(seq, args); });
}

}  // namespace sonicmoe
