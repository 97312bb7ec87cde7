// From tokens to grouped rows and back: the router's product, top-K or token rounding, metadata.
#include "core/router_plan.h"

#include "core/block_counts.h"

namespace sonicmoe {

RouterGemmDesc RouterPlan::Impl::product(GemmPass pass) const {
  return {pass,       desc.tokens,     desc.hidden,     desc.experts,
          desc.dtype, desc.logit_bias, desc.f32_logits, desc.f32_router_w};
}

void RouterPlan::Impl::plan_forward(PlanBuilder* build) {
  const RoutingDesc& d = desc;
  if (d.projects()) {
    build->add(&router_gemm, product(GemmPass::forward));
  }
  if (slot_kind(d) == SlotKind::top_k) {
    const TopKDesc scored{{d}, d.tokens, d.logits_dtype(d.dtype)};
    build->add(&top_k, scored);
    block_counts = block_counts_bytes(scored, exec.device);
  }
  if (rounded()) {
    build->add(&token_rounding,
               {{d}, d.tokens, d.logits_dtype(d.dtype), d.rounding.rule, d.rounding.tile});
  }
  build->add(&metadata, {d.tokens, d.experts, lists() ? 0 : d.top_k, lists() ? d.slots() : 0,
                         d.assume_sorted || rounded(), d.max_rows > 0 ? d.row_capacity() : 0});
}

void RouterPlan::Impl::plan_backward(PlanBuilder* build) {
  const RoutingDesc& d = desc;
  ScoreGradDesc score{{d}, d.tokens, d.slots(), d.logits_dtype(d.dtype)};
  if (rounded()) {  // score_grad writes the lists' gradients in slot order
    static_cast<RouterDesc&>(score) = {.experts = d.experts, .input = RouterInput::lists};
  }
  build->add(&score_grad, score);
  if (rounded()) {
    TokenRoundingGradDesc rounding{{d}, d.tokens, d.logits_dtype(d.dtype)};
    rounding.list_length = d.slots();
    build->add(&token_rounding_grad, rounding);
  }
  if (!d.projects()) return;
  build->add(&router_dgrad, product(GemmPass::dgrad));
  build->add(&router_wgrad, product(GemmPass::wgrad));
}

RouterPlan::Impl::Forward RouterPlan::Impl::book_forward(Ledger* ledger) const {
  Forward at;
  at.row_slots = ledger->book("row_slots", 4 * static_cast<std::size_t>(desc.slots()));
  at.block_counts = ledger->book("block_counts", block_counts);
  return at;
}

RouterPlan::Impl::Backward RouterPlan::Impl::book_backward(Ledger* ledger) const {
  Backward at;
  const auto slots = static_cast<std::size_t>(desc.slots());
  at.dscores = ledger->book("dscores", rounded() ? 4 * slots : 0);
  return at;
}

const float* RouterPlan::Impl::slot_scores(const RouterForwardArgs& args,
                                           const RoutedRows& rows) const {
  switch (slot_kind(desc)) {
    case SlotKind::top_k:
      return rows.slot_scores;
    case SlotKind::ids:
      return args.given_weights;
    case SlotKind::lists:
      return args.list_scores;
    case SlotKind::rounded:
      return args.slot_scores;
  }
  return nullptr;
}

void RouterPlan::Impl::forward(Sequence* seq, const RouterForwardArgs& args, const Forward& at,
                               std::int32_t* next_tile_counter) const {
  const RoutedRows rows = RoutingBlock::at(desc, args.routing);
  const void* const logits = desc.projects() ? args.logits : args.given_logits;
  const std::int32_t* const given = desc.takes_lists() ? args.list_experts : args.given_ids;
  Handoff counted;
  if (block_counts > 0) counted.block_counts = seq->region(at.block_counts);
  if (rounded()) counted.token_offsets = rows.token_offsets;
  seq->run("router_gemm", router_gemm,
           {.x = args.x, .w = args.router_w, .bias = args.logit_bias, .logits = args.logits});
  seq->run("top_k", top_k,
           {.logits = logits,
            .given_ids = args.given_ids,
            .selection_bias = args.selection_bias,
            .expert_scale = args.expert_scale,
            .scores = rows.slot_scores,
            .probabilities = rows.slot_probabilities,
            .ids = rows.slot_experts,
            .error_word = args.error_word},
           counted);
  seq->run("token_rounding", token_rounding,
           {.logits = logits,
            .seed = args.seed,
            .offset = args.offset,
            .draws = args.draws,
            .scores = args.slot_scores,
            .token_ids = rows.slot_tokens,
            .expert_ids = rows.slot_experts,
            .counts = args.counts,
            .frequency = args.frequency,
            .error_word = args.error_word},
           counted);
  counted.next_tile_counter = next_tile_counter;
  seq->run("metadata", metadata,
           {.slot_experts = desc.has_logits() ? rows.slot_experts : given,
            .slot_tokens = desc.takes_lists() ? args.list_tokens : rows.slot_tokens,
            .slot_scores = slot_scores(args, rows),
            .counts = args.counts,
            .offsets = rows.offsets,
            .row_tokens = rows.row_tokens,
            .row_slots = seq->region(at.row_slots),
            .slot_rows = rows.slot_rows,
            .row_scores = rows.row_scores,
            .token_offsets = rows.token_offsets,
            .token_slots = rows.token_slots,
            .expert_order = rows.expert_order,
            .error_word = args.error_word},
           counted);
}

void RouterPlan::Impl::copy_out(Sequence* seq, const RouterForwardArgs& args) const {
  if (slot_kind(desc) != SlotKind::top_k) return;
  const RoutedRows rows = RoutingBlock::at(desc, args.routing);
  const std::size_t bytes = 4 * static_cast<std::size_t>(desc.slots());
  seq->copy(args.scores, rows.slot_scores, bytes, exec);
  seq->copy(args.expert_ids, rows.slot_experts, bytes, exec);
}

void RouterPlan::Impl::score_gradients(Sequence* seq, const RouterBackwardArgs& args,
                                       const Backward& at) const {
  // RoutingBlock::at() takes void*, but backward only reads the block.
  const RoutedRows rows = RoutingBlock::at(desc, const_cast<void*>(args.routing));
  float* const dscores = rounded() ? seq->region(at.dscores) : args.dscores;
  seq->run("score_grad", score_grad,
           {.row_dscores = args.row_dscores,
            .slot_rows = rows.slot_rows,
            .slot_scores = rows.slot_scores,
            .slot_probabilities = rows.slot_probabilities,
            .slot_experts = rows.slot_experts,
            .expert_scale = args.expert_scale,
            .offsets = rows.offsets,
            .logits = args.logits,
            .dlogits_in = args.dlogits_in,
            .dlogits = args.dlogits,
            .dscores = dscores,
            .dexpert_scale = args.dexpert_scale});
  seq->run("token_rounding_grad", token_rounding_grad,
           {.logits = args.logits,
            .token_ids = rows.slot_tokens,
            .expert_ids = rows.slot_experts,
            .token_offsets = rows.token_offsets,
            .dscores = dscores,
            .dlogits_in = args.dlogits_in,
            .dlogits = args.dlogits});
}

void RouterPlan::Impl::weight_gradients(Sequence* seq, const RouterBackwardArgs& args) const {
  const RouterGemmArgs products{.x = args.x,
                                .w = args.router_w,
                                .dlogits = args.dlogits,
                                .dx = args.dx,
                                .dw = args.drouter_w,
                                .dbias = desc.logit_bias ? args.dlogit_bias : nullptr};
  const void* const of_weights = args.drouter_w != nullptr ? args.drouter_w : products.dbias;
  seq->run_for(args.dx, "router_dgrad", router_dgrad, products);
  seq->run_for(of_weights, "router_wgrad", router_wgrad, products);
}

Result<RouterPlan> make_plan(const RoutingDesc& desc, Device device, const Options& options) {
  return compose<RouterPlan>(
      desc, device, options, [&](RouterPlan::Impl* impl, PlanBuilder* build) {
        impl->plan_forward(build);
        impl->fwd = impl->book_forward(&impl->forward_ledger);
        impl->fwd.scratch = impl->forward_ledger.book("scratch", build->take_scratch());
        if (!desc.inference) {
          impl->plan_backward(build);
          impl->bwd = impl->book_backward(&impl->backward_ledger);
          impl->bwd.scratch = impl->backward_ledger.book("scratch", build->take_scratch());
        }
      });
}

const RoutingDesc& RouterPlan::desc() const noexcept { return impl_->desc; }
std::size_t RouterPlan::forward_workspace_bytes() const noexcept {
  return impl_->forward_ledger.size();
}
std::size_t RouterPlan::backward_workspace_bytes() const noexcept {
  return impl_->backward_ledger.size();
}
std::size_t RouterPlan::routing_bytes() const noexcept { return RoutingBlock::bytes(impl_->desc); }
RoutedRows RouterPlan::routed_rows(void* routing) const noexcept {
  return RoutingBlock::at(impl_->desc, routing);
}
std::string RouterPlan::explain() const { return "router\n" + impl_->explain(); }

std::vector<const char*> RouterPlan::forward_operations() const {
  return names_of([&](Sequence* seq) { impl_->forward(seq, {}, impl_->fwd, nullptr); });
}
std::vector<const char*> RouterPlan::backward_operations() const {
  return names_of([&](Sequence* seq) {
    impl_->score_gradients(seq, {}, impl_->bwd);
    impl_->weight_gradients(seq, {});
  });
}

Status RouterPlan::forward(const RouterForwardArgs& args, Workspace workspace, Stream stream,
                           OperationMask operations) const noexcept {
  const Impl& p = *impl_;
  if (Status status = validate(p.desc, args, p.exec.device.type); !status.ok()) return status;
  return call(p, p.forward_ledger, p.fwd.scratch, workspace, stream, operations,
              [&](Sequence* seq) {
                p.forward(seq, args, p.fwd, nullptr);
                p.copy_out(seq, args);
              });
}

Status RouterPlan::backward(const RouterBackwardArgs& args, Workspace workspace, Stream stream,
                            OperationMask operations) const noexcept {
  const Impl& p = *impl_;
  if (Status status = validate(p.desc, args, p.exec.device.type); !status.ok()) return status;
  return call(p, p.backward_ledger, p.bwd.scratch, workspace, stream, operations,
              [&](Sequence* seq) {
                p.score_gradients(seq, args, p.bwd);
                p.weight_gradients(seq, args);
              });
}

}  // namespace sonicmoe
