// The experts alone: rows of x to rows of Y, and back to dX~, dS and the gradients of the weights.
#include "core/experts_plan.h"

#include "core/segments.h"

namespace sonicmoe {

void ExpertsPlan::Impl::plan_forward(PlanBuilder* build) {
  if (!desc.gathers()) {
    build->add(&segments, {desc.rows, desc.experts, desc.index_type, desc.expected_rows});
  }
  if (desc.zero_tail) build->add(&zero_tail, {desc.rows, desc.hidden, desc.experts, desc.dtype});
  build->add(&up_proj, up_proj_desc(desc.keeps_preact()));
  build->add(&down_proj, {{desc}, GemmOp::down_proj});
}

void ExpertsPlan::Impl::plan_backward(PlanBuilder* build) {
  if (!desc.keeps_preact()) build->add(&up_proj_recompute, up_proj_desc(true));
  build->add(&down_proj_dgrad, {{desc}, GemmOp::down_proj_dgrad});
  if (desc.bias) build->add(&bias_grad, {{desc}});
  build->add(&down_proj_wgrad, {{desc}, GemmOp::down_proj_wgrad});
  build->add(&up_proj_wgrad, {{desc}, GemmOp::up_proj_wgrad});
  build->add(&up_proj_dgrad, {{desc}, GemmOp::up_proj_dgrad});
}

std::size_t ExpertsPlan::Impl::scaled_act_bytes() const {
  return static_cast<std::size_t>(desc.rows * desc.intermediate) * size_of(desc.dtype);
}

ExpertsPlan::Impl::Forward ExpertsPlan::Impl::book_forward(Ledger* ledger) const {
  Forward at;
  at.tile_counters = ledger->book("tile_counters", counts_tiles() ? 8 : 0);
  at.act = ledger->book("act", scaled_act_bytes());
  return at;
}

ExpertsPlan::Impl::Backward ExpertsPlan::Impl::book_backward(Ledger* ledger) const {
  Backward at;
  const auto preact = static_cast<std::size_t>(desc.rows * desc.preact_width());
  at.dpreact =
      ledger->book("dpreact", desc.dpreact_in_workspace ? preact * size_of(desc.dtype) : 0);
  at.tile_counter = ledger->book("tile_counter", counts_tiles() ? 4 : 0);
  return at;
}

std::int32_t* ExpertsPlan::Impl::up_proj_tile_counter(const Sequence& seq,
                                                      const Forward& at) const {
  if (!counts_tiles()) return nullptr;
  return seq.region(at.tile_counters);
}

void ExpertsPlan::Impl::forward(Sequence* seq, const ExpertsForwardArgs& args,
                                const Forward& at) const {
  std::int32_t* const up_tiles = up_proj_tile_counter(*seq, at);
  std::int32_t* const down_tiles = up_tiles == nullptr ? nullptr : up_tiles + 1;
  const Segments own = Segments::at(args.segments, desc.experts);
  seq->run("segments", segments,
           {.counts = args.counts,
            .row_offsets = args.row_offsets,
            .begins = own.begins,
            .ends = own.ends,
            .expert_order = own.expert_order,
            .error_word = args.error_word},
           {.next_tile_counter = up_tiles});
  const std::int32_t* const offsets = desc.gathers() ? args.offsets : own.begins;
  seq->run("up_proj", up_proj,
           {.offsets = offsets,
            .ends = own.ends,
            .row_tokens = args.row_tokens,
            .x = args.x,
            .w1 = args.w1,
            .w1_up = args.w1_up,
            .b1 = args.b1,
            .b1_up = args.b1_up,
            .preact = args.preact,
            .act = seq->region(at.act)},
           {.tile_counter = up_tiles, .next_tile_counter = down_tiles});
  seq->run("down_proj", down_proj,
           {.offsets = offsets,
            .ends = own.ends,
            .row_scores = args.row_scores,
            .w2 = args.w2,
            .b2 = args.b2,
            .act = seq->region(at.act),
            .expert_out = args.expert_out},
           {.tile_counter = down_tiles});
  // It needs segments alone. down_proj, or an operation before it, has waited for that.
  seq->run("zero_tail", zero_tail,
           {.begins = own.begins, .ends = own.ends, .rows = args.expert_out},
           {.overlap_previous = true});
}

ExpertsPlan::Impl::ExpertRows ExpertsPlan::Impl::rows_of(const ExpertsBackwardArgs& args) const {
  if (desc.gathers()) return {args.offsets, nullptr, args.expert_order};
  // Segments::at() takes int32_t*, but backward only reads them.
  const Segments own = Segments::at(const_cast<std::int32_t*>(args.segments), desc.experts);
  return {own.begins, own.ends, own.expert_order};
}

void* ExpertsPlan::Impl::dpreact(const Sequence& seq, const ExpertsBackwardArgs& args,
                                 const Backward& at) const {
  if (!desc.dpreact_in_workspace) return args.dpreact;
  return seq.region(at.dpreact);
}

void ExpertsPlan::Impl::row_gradients(Sequence* seq, const ExpertsBackwardArgs& args,
                                      const Backward& at) const {
  const ExpertRows own = rows_of(args);
  // dH will lie over this H, as it may over the caller's, and A' over A, which nothing reads.
  void* const dh = dpreact(*seq, args, at);
  seq->run("up_proj_recompute", up_proj_recompute,
           {.offsets = own.offsets,
            .ends = own.ends,
            .row_tokens = args.row_tokens,
            .x = args.x,
            .w1 = args.w1,
            .w1_up = args.w1_up,
            .b1 = args.b1,
            .b1_up = args.b1_up,
            .preact = dh,
            .act = seq->region(at.scaled_act)});
  std::int32_t* dx_tiles = nullptr;
  if (counts_tiles()) dx_tiles = seq->region(at.tile_counter);
  seq->run("down_proj_dgrad", down_proj_dgrad,
           {.offsets = own.offsets,
            .ends = own.ends,
            .row_tokens = args.row_tokens,
            .row_scores = args.row_scores,
            .dout = args.dout,
            .w2 = args.w2,
            .preact = desc.keeps_preact() ? const_cast<void*>(args.preact) : dh,
            .dpreact = dh,
            .scaled_act = seq->region(at.scaled_act),
            .row_dscores = args.row_dscores},
           {.next_tile_counter = dx_tiles});
  seq->run("bias_grad", bias_grad,
           {.offsets = own.offsets,
            .ends = own.ends,
            .row_tokens = args.row_tokens,
            .row_scores = args.row_scores,
            .dpreact = dh,
            .dout = args.dout,
            .b2 = args.b2,
            .row_dscores = args.row_dscores,
            .db1 = args.db1,
            .db1_up = args.db1_up,
            .db2 = args.db2});
}

void ExpertsPlan::Impl::weight_gradients(Sequence* seq, const ExpertsBackwardArgs& args,
                                         const Backward& at, bool apart) const {
  // Each weight gradient reads dH or A', and no output of the operation right before it. With
  // `apart` that operation has waited for row_gradients(), so both may overlap it. Otherwise only
  // dW1 may, behind dW2. dX~ reads dH alone, and may overlap both; in a layer it lies over A', and
  // waits. Without rows the operation before may launch no kernel, which overlap_previous needs.
  const bool overlaps = desc.rows > 0;
  const ExpertRows own = rows_of(args);
  seq->run_for(args.dw2, "down_proj_wgrad", down_proj_wgrad,
               {.offsets = own.offsets,
                .ends = own.ends,
                .row_tokens = args.row_tokens,
                .expert_order = own.expert_order,
                .dout = args.dout,
                .scaled_act = seq->region(at.scaled_act),
                .dw2 = args.dw2},
               {.overlap_previous = overlaps && apart});
  seq->run_for(args.dw1, "up_proj_wgrad", up_proj_wgrad,
               {.offsets = own.offsets,
                .ends = own.ends,
                .row_tokens = args.row_tokens,
                .expert_order = own.expert_order,
                .x = args.x,
                .dpreact = dpreact(*seq, args, at),
                .dw1 = args.dw1,
                .dw1_up = args.dw1_up},
               {.overlap_previous = overlaps && (apart || args.dw2 != nullptr)});
  std::int32_t* dx_tiles = nullptr;  // down_proj_dgrad resets it
  if (counts_tiles()) dx_tiles = seq->region(at.tile_counter);
  seq->run_for(args.dx_rows, "up_proj_dgrad", up_proj_dgrad,
               {.offsets = own.offsets,
                .ends = own.ends,
                .w1 = args.w1,
                .w1_up = args.w1_up,
                .dpreact = dpreact(*seq, args, at),
                .dx_rows = args.dx_rows},
               {.tile_counter = dx_tiles,
                .overlap_previous =
                    overlaps && !desc.gathers() && (args.dw2 != nullptr || args.dw1 != nullptr)});
  // It needs nothing that backward writes.
  seq->run("zero_tail", zero_tail,
           {.begins = own.offsets,
            .ends = own.ends,
            .rows = args.dx_rows,
            .values = desc.scored() ? args.row_dscores : nullptr},
           {.overlap_previous = true});
}

Result<ExpertsPlan> make_plan(const GroupedDesc& desc, Device device, const Options& options) {
  return compose<ExpertsPlan>(
      desc, device, options, [&](ExpertsPlan::Impl* impl, PlanBuilder* build) {
        impl->plan_forward(build);
        impl->fwd = impl->book_forward(&impl->forward_ledger);
        impl->fwd.scratch = impl->forward_ledger.book("scratch", build->take_scratch());
        if (!desc.inference) {
          impl->plan_backward(build);
          impl->bwd = impl->book_backward(&impl->backward_ledger);
          impl->bwd.scaled_act = impl->backward_ledger.book("scaled_act", impl->scaled_act_bytes());
          impl->bwd.scratch = impl->backward_ledger.book("scratch", build->take_scratch());
        }
      });
}

const GroupedDesc& ExpertsPlan::desc() const noexcept { return impl_->desc; }
std::size_t ExpertsPlan::forward_workspace_bytes() const noexcept {
  return impl_->forward_ledger.size();
}
std::size_t ExpertsPlan::backward_workspace_bytes() const noexcept {
  return impl_->backward_ledger.size();
}
std::string ExpertsPlan::explain() const { return "experts\n" + impl_->explain(); }

std::vector<const char*> ExpertsPlan::forward_operations() const {
  return names_of([&](Sequence* seq) { impl_->forward(seq, {}, impl_->fwd); });
}
std::vector<const char*> ExpertsPlan::backward_operations() const {
  return names_of([&](Sequence* seq) {
    impl_->row_gradients(seq, {}, impl_->bwd);
    impl_->weight_gradients(seq, {}, impl_->bwd, false);
  });
}

Status ExpertsPlan::forward(const ExpertsForwardArgs& args, Workspace workspace, Stream stream,
                            OperationMask operations) const noexcept {
  const Impl& p = *impl_;
  if (Status status = validate(p.desc, args, p.exec.device.type); !status.ok()) return status;
  return call(p, p.forward_ledger, p.fwd.scratch, workspace, stream, operations,
              [&](Sequence* seq) { p.forward(seq, args, p.fwd); });
}

Status ExpertsPlan::backward(const ExpertsBackwardArgs& args, Workspace workspace, Stream stream,
                             OperationMask operations) const noexcept {
  const Impl& p = *impl_;
  if (Status status = validate(p.desc, args, p.exec.device.type); !status.ok()) return status;
  return call(p, p.backward_ledger, p.bwd.scratch, workspace, stream, operations,
              [&](Sequence* seq) {
                p.row_gradients(seq, args, p.bwd);
                p.weight_gradients(seq, args, p.bwd, false);
              });
}

}  // namespace sonicmoe
