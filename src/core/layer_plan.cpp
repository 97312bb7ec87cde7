// A layer is a fixed sequence of operations over one workspace; no backend has code of its own
// here.
#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "core/ledger.h"
#include "core/op_plan.h"
#include "core/routing_block.h"
#include "core/validate.h"
#include "sonicmoe/layer.h"
#include "sonicmoe/token_rounding.h"

namespace sonicmoe {
namespace {

struct ForwardRegions {
  std::size_t routing;      // inference only: otherwise the caller keeps it
  std::size_t slot_scores;  // token rounding: backward does not need them
  std::size_t row_slots;
  std::size_t block_counts;
  std::size_t tile_counters;  // of up_proj and down_proj
  std::size_t act;
  std::size_t expert_out;
  std::size_t scratch;
};

struct BackwardRegions {
  std::size_t dpreact;
  std::size_t row_dscores;
  std::size_t tile_counter;  // of up_proj_dgrad
  std::size_t dscores;       // token rounding: of the lists it made
  std::size_t dlogits;
  std::size_t scaled_act;
  std::size_t dx_rows;  // over scaled_act: dW2 has used that by then
  std::size_t scratch;
};

}  // namespace

struct LayerPlan::Impl {
  LayerDesc desc;
  Exec exec;
  SavedBytes saved;
  Ledger forward_ledger;
  Ledger backward_ledger;
  ForwardRegions fwd;
  BackwardRegions bwd;
  std::size_t block_counts = 0;  ///< bytes
  std::string walk;

  std::optional<OpPlan<RouterGemmDesc>> router_gemm;
  std::optional<OpPlan<TopKDesc>> top_k;
  std::optional<OpPlan<TokenRoundingDesc>> token_rounding;
  std::optional<OpPlan<MetadataDesc>> metadata;
  std::optional<OpPlan<GroupedGemmDesc>> up_proj;
  std::optional<OpPlan<GroupedGemmDesc>> down_proj;
  std::optional<OpPlan<AggregateDesc>> aggregate_o;

  std::optional<OpPlan<GroupedGemmDesc>> down_proj_dgrad;
  std::optional<OpPlan<BiasGradDesc>> bias_grad;
  std::optional<OpPlan<ScoreGradDesc>> score_grad;
  std::optional<OpPlan<TokenRoundingGradDesc>> token_rounding_grad;
  std::optional<OpPlan<GroupedGemmDesc>> down_proj_wgrad;
  std::optional<OpPlan<GroupedGemmDesc>> up_proj_wgrad;
  std::optional<OpPlan<GroupedGemmDesc>> up_proj_dgrad;
  std::optional<OpPlan<RouterGemmDesc>> router_dgrad;
  std::optional<OpPlan<RouterGemmDesc>> router_wgrad;
  std::optional<OpPlan<AggregateDesc>> aggregate_dx;

  SlotKind kind() const { return slot_kind(desc); }
  bool given() const { return kind() == SlotKind::given; }
  bool rounded() const { return kind() == SlotKind::rounded; }
  bool lists() const { return kind() != SlotKind::top_k; }
  /// Do operations count tiles, and where? On the CPU none does.
  bool counts_tiles() const { return exec.device.type == DeviceType::cuda && desc.rows() > 0; }
  /// Do a token's logits have gradients at its own experts alone, unless the caller adds some?
  /// Then the sum over dX's rows adds the router's part, and no product is needed.
  bool routed() const {
    return kind() == SlotKind::top_k && !desc.needs_logits() && desc.router.top_k <= kMaxRoutedTopK;
  }
};

namespace {

/// Makes the plans of one layer; the first refusal stops it.
class Builder {
 public:
  Builder(LayerPlan::Impl* impl, Device device, const Options& options)
      : impl_(*impl), device_(device), options_(options) {}

  template <class Desc>
  Builder& add(std::optional<OpPlan<Desc>>* slot, const Desc& op, std::size_t* scratch) {
    if (!status_.ok()) return *this;
    // A kernel or backend named by the options binds the operations that have such an entry.
    Options options = options_;
    if (!offers(op, options_.kernel)) options.kernel.clear();
    found_ |= options.kernel == options_.kernel;
    Result<OpPlan<Desc>> plan = make_plan(op, device_, options);
    if (!plan.ok()) {
      status_ = plan.status();
      return *this;
    }
    *scratch = std::max(*scratch, plan->workspace_bytes());
    impl_.walk += plan->explain();
    *slot = std::move(plan).value();
    return *this;
  }

  const Status& status() const { return status_; }

  /// Of the whole layer.
  Status finish() const {
    if (status_.ok() && !found_) {
      return Status::error(StatusCode::unsupported,
                           "kernel: got %s, allowed: a name or backend of sonicmoe::kernels()",
                           options_.kernel.c_str());
    }
    return status_;
  }

 private:
  template <class Desc>
  bool offers(const Desc& op, const std::string& wanted) const {
    for (const Kernel<Desc>* kernel : kernel_list<Desc>()) {
      if (is_candidate(*kernel, op, impl_.exec.traits) &&
          kernel_matches(wanted, kernel->name, kernel->arch)) {
        return true;
      }
    }
    return false;
  }

  LayerPlan::Impl& impl_;
  Device device_;
  const Options& options_;
  Status status_;
  bool found_ = false;
};

GroupedDesc grouped(const LayerDesc& d) {
  return {{d.experts}, d.tokens, d.rows(), d.router.experts};
}
GroupedGemmDesc grouped(const LayerDesc& d, GemmOp op) { return {{grouped(d)}, op}; }

AggregateDesc aggregate(const LayerPlan::Impl& impl) {
  const LayerDesc& d = impl.desc;
  return {d.tokens, d.rows(), d.experts.hidden, impl.lists() ? 0 : d.router.top_k, d.experts.dtype};
}

Status plan_forward(LayerPlan::Impl* impl, Builder* build) {
  const LayerDesc& d = impl->desc;
  std::size_t scratch = 0;
  const RouterGemmDesc router{GemmPass::forward, d.tokens, d.experts.hidden, d.router.experts,
                              d.experts.dtype};
  const TopKDesc top_k{{d.router}, d.tokens, d.experts.dtype};
  const TokenRoundingDesc rounding{
      {d.router}, d.tokens, d.experts.dtype, d.rounding.rule, d.rounding.tile};
  const bool lists = impl->lists();
  const MetadataDesc metadata{d.tokens, d.router.experts, lists ? 0 : d.router.top_k,
                              lists ? d.rows() : 0, d.router.assume_sorted || impl->rounded()};
  if (!impl->given()) build->add(&impl->router_gemm, router, &scratch);
  if (!lists) build->add(&impl->top_k, top_k, &scratch);
  if (impl->rounded()) build->add(&impl->token_rounding, rounding, &scratch);
  build->add(&impl->metadata, metadata, &scratch);
  build->add(&impl->up_proj, grouped(d, GemmOp::up_proj), &scratch);
  build->add(&impl->down_proj, grouped(d, GemmOp::down_proj), &scratch);
  build->add(&impl->aggregate_o, aggregate(*impl), &scratch);

  const std::size_t rows = static_cast<std::size_t>(d.rows());
  const std::size_t size = size_of(d.experts.dtype);
  Ledger& ledger = impl->forward_ledger;
  impl->fwd.routing = ledger.book("routing", d.experts.inference ? RoutingBlock::bytes(d) : 0);
  impl->fwd.slot_scores = ledger.book("slot_scores", impl->rounded() ? 4 * rows : 0);
  impl->fwd.row_slots = ledger.book("row_slots", 4 * rows);
  impl->block_counts = lists ? 0 : block_counts_bytes(top_k, impl->exec.device);
  impl->fwd.block_counts = ledger.book("block_counts", impl->block_counts);
  impl->fwd.tile_counters = ledger.book("tile_counters", impl->counts_tiles() ? 8 : 0);
  impl->fwd.act =
      ledger.book("act", rows * static_cast<std::size_t>(d.experts.intermediate) * size);
  impl->fwd.expert_out =
      ledger.book("expert_out", rows * static_cast<std::size_t>(d.experts.hidden) * size);
  impl->fwd.scratch = ledger.book("scratch", scratch);
  return build->status();
}

Status plan_backward(LayerPlan::Impl* impl, Builder* build) {
  const LayerDesc& d = impl->desc;
  std::size_t scratch = 0;
  const RouterGemmDesc dgrad{GemmPass::dgrad, d.tokens, d.experts.hidden, d.router.experts,
                             d.experts.dtype};
  const RouterGemmDesc wgrad{GemmPass::wgrad, d.tokens, d.experts.hidden, d.router.experts,
                             d.experts.dtype};
  const BiasGradDesc bias{grouped(d)};
  // Lists, given or made, take their gradients in slot order.
  ScoreGradDesc score{{d.router}, d.tokens, d.rows(), d.experts.dtype};
  if (impl->lists()) {
    static_cast<RouterDesc&>(score) = {
        .experts = d.router.experts, .mode = RouterMode::given, .list_length = d.rows()};
  }
  TokenRoundingGradDesc rounding{{d.router}, d.tokens, d.experts.dtype};
  rounding.list_length = d.rows();
  build->add(&impl->down_proj_dgrad, grouped(d, GemmOp::down_proj_dgrad), &scratch);
  if (d.experts.bias) build->add(&impl->bias_grad, bias, &scratch);
  build->add(&impl->score_grad, score, &scratch);
  if (impl->rounded()) build->add(&impl->token_rounding_grad, rounding, &scratch);
  build->add(&impl->down_proj_wgrad, grouped(d, GemmOp::down_proj_wgrad), &scratch);
  build->add(&impl->up_proj_wgrad, grouped(d, GemmOp::up_proj_wgrad), &scratch);
  build->add(&impl->up_proj_dgrad, grouped(d, GemmOp::up_proj_dgrad), &scratch);
  if (!impl->given()) {
    build->add(&impl->router_dgrad, dgrad, &scratch).add(&impl->router_wgrad, wgrad, &scratch);
  }
  AggregateDesc sum = aggregate(*impl);
  if (impl->routed()) sum.experts = d.router.experts;
  build->add(&impl->aggregate_dx, sum, &scratch);

  const std::size_t rows = static_cast<std::size_t>(d.rows());
  const std::size_t tokens = impl->given() ? 0 : static_cast<std::size_t>(d.tokens);
  const std::size_t hidden = static_cast<std::size_t>(d.experts.hidden);
  const std::size_t size = size_of(d.experts.dtype);
  const std::size_t width = static_cast<std::size_t>(d.experts.preact_width());
  Ledger& ledger = impl->backward_ledger;
  impl->bwd.dpreact =
      ledger.book("dpreact", d.experts.dpreact_in_workspace ? rows * width * size : 0);
  impl->bwd.row_dscores = ledger.book("row_dscores", 4 * rows);
  impl->bwd.tile_counter = ledger.book("tile_counter", impl->counts_tiles() ? 4 : 0);
  impl->bwd.dscores = ledger.book("dscores", impl->rounded() ? 4 * rows : 0);
  impl->bwd.dlogits =
      ledger.book("dlogits", tokens * static_cast<std::size_t>(d.router.experts) * size);
  impl->bwd.scratch = ledger.book("scratch", scratch);
  const std::size_t shared = ledger.end();
  impl->bwd.scaled_act =
      ledger.book("scaled_act", rows * static_cast<std::size_t>(d.experts.intermediate) * size);
  ledger.restart_at(shared);
  impl->bwd.dx_rows = ledger.book("dx_rows", rows * hidden * size);
  return build->status();
}

/// Runs operations in order and stops at the first that fails.
class Sequence {
 public:
  Sequence(Workspace workspace, std::size_t scratch, Stream stream)
      : base_(static_cast<char*>(workspace.data)),
        scratch_{base_ == nullptr ? nullptr : base_ + scratch, workspace.bytes - scratch},
        stream_(stream) {}

  /// A region of the workspace, as any pointer. Null when there is no workspace, which is so only
  /// when all regions are empty.
  struct Region {
    char* data;
    template <class T>
    operator T*() const {  // NOLINT: implicit by design
      return reinterpret_cast<T*>(data);
    }
  };
  Region region(std::size_t offset) const { return {base_ == nullptr ? nullptr : base_ + offset}; }

  template <class Desc>
  Sequence& run(const std::optional<OpPlan<Desc>>& plan, const typename Desc::Args& args) {
    if (status_.ok()) status_ = plan->run(args, scratch_, stream_);
    return *this;
  }
  /// For an optional output: nothing happens if it is null.
  template <class Desc>
  Sequence& run_for(const void* output, const std::optional<OpPlan<Desc>>& plan,
                    const typename Desc::Args& args) {
    return output == nullptr ? *this : run(plan, args);
  }
  /// Likewise.
  void copy(void* to, const void* from, std::size_t bytes, Exec exec) {
    exec.stream = stream_;
    if (status_.ok() && to != nullptr) status_ = sonicmoe::copy(to, from, bytes, exec);
  }
  const Status& status() const { return status_; }

 private:
  char* base_;
  Workspace scratch_;
  Stream stream_;
  Status status_;
};

}  // namespace

Result<LayerPlan> make_plan(const LayerDesc& desc, Device device, const Options& options) try {
  Result<Exec> exec = make_exec(device, options);
  if (!exec.ok()) return exec.status();
  if (Status status = validate(desc); !status.ok()) return status;
  auto impl = std::make_shared<LayerPlan::Impl>();
  impl->desc = desc;
  impl->exec = exec.value();
  Builder build(impl.get(), device, options);
  if (Status status = plan_forward(impl.get(), &build); !status.ok()) return status;
  if (!desc.experts.inference) {
    if (Status status = plan_backward(impl.get(), &build); !status.ok()) return status;
    const std::size_t size = size_of(desc.experts.dtype);
    const std::size_t tokens = static_cast<std::size_t>(desc.tokens);
    impl->saved.x = tokens * static_cast<std::size_t>(desc.experts.hidden) * size;
    impl->saved.preact = static_cast<std::size_t>(desc.rows() * desc.experts.preact_width()) * size;
    impl->saved.routing = RoutingBlock::bytes(desc);
    if (desc.needs_logits()) {
      impl->saved.logits = tokens * static_cast<std::size_t>(desc.router.experts) * size;
    }
  }
  if (Status status = build.finish(); !status.ok()) return status;
  return LayerPlan(std::move(impl));
} catch (const std::bad_alloc&) {
  return Status::error(StatusCode::out_of_memory, "make_plan: out of host memory");
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
  text += "\n  " + to_string(impl_->desc) + "\n" + impl_->walk;
  text += "forward workspace, " + std::to_string(forward_workspace_bytes()) + " bytes\n" +
          impl_->forward_ledger.explain();
  text += "backward workspace, " + std::to_string(backward_workspace_bytes()) + " bytes\n" +
          impl_->backward_ledger.explain();
  text += "saved for backward, " + std::to_string(saved.total()) + " bytes\n  x " +
          std::to_string(saved.x) + ", preact " + std::to_string(saved.preact) + ", routing " +
          std::to_string(saved.routing) + ", logits " + std::to_string(saved.logits) + "\n";
  return text;
}

Status LayerPlan::forward(const ForwardArgs& args, Workspace workspace,
                          Stream stream) const noexcept {
  const Impl& p = *impl_;
  const LayerDesc& d = p.desc;
  if (Status status = validate(d, args); !status.ok()) return status;
  if (Status status = validate(workspace, forward_workspace_bytes()); !status.ok()) return status;

  const DeviceGuard guard(p.exec.device);
  Sequence seq(workspace, p.fwd.scratch, stream);
  const RoutingBlock routing =
      RoutingBlock::at(d, d.experts.inference ? seq.region(p.fwd.routing) : args.routing);
  float* const made_scores = p.rounded() ? seq.region(p.fwd.slot_scores) : routing.slot_scores;
  const float* slot_scores = p.given() ? args.list_scores : made_scores;
  std::uint8_t* block_counts = nullptr;
  if (p.block_counts > 0) block_counts = seq.region(p.fwd.block_counts);
  // Each is cleared by the operation before its own.
  std::int32_t* up_tiles = nullptr;
  std::int32_t* down_tiles = nullptr;
  if (p.counts_tiles()) {
    up_tiles = seq.region(p.fwd.tile_counters);
    down_tiles = up_tiles + 1;
  }

  if (!p.given()) {
    seq.run(p.router_gemm, {.x = args.x, .w = args.router_w, .logits = args.logits});
  }
  if (p.top_k) {
    seq.run(p.top_k, {.logits = args.logits,
                      .scores = made_scores,
                      .ids = routing.slot_experts,
                      .block_counts = block_counts,
                      .error_word = args.error_word});
  }
  if (p.token_rounding) {
    seq.run(p.token_rounding, {.logits = args.logits,
                               .seed = args.seed,
                               .offset = args.offset,
                               .draws = args.draws,
                               .scores = made_scores,
                               .token_ids = routing.slot_tokens,
                               .expert_ids = routing.slot_experts,
                               .counts = args.counts,
                               .frequency = args.frequency,
                               .error_word = args.error_word});
  }
  seq.run(p.metadata, {.slot_experts = p.given() ? args.list_experts : routing.slot_experts,
                       .slot_tokens = p.given() ? args.list_tokens : routing.slot_tokens,
                       .slot_scores = slot_scores,
                       .block_counts = block_counts,
                       .counts = args.counts,
                       .offsets = routing.offsets,
                       .row_tokens = routing.row_tokens,
                       .row_slots = seq.region(p.fwd.row_slots),
                       .slot_rows = routing.slot_rows,
                       .row_scores = routing.row_scores,
                       .token_offsets = routing.token_offsets,
                       .token_slots = routing.token_slots,
                       .expert_order = routing.expert_order,
                       .next_tile_counter = up_tiles,
                       .error_word = args.error_word});
  seq.run(p.up_proj, {.offsets = routing.offsets,
                      .row_tokens = routing.row_tokens,
                      .x = args.x,
                      .w1 = args.w1,
                      .w1_up = args.w1_up,
                      .b1 = args.b1,
                      .b1_up = args.b1_up,
                      .preact = args.preact,
                      .act = seq.region(p.fwd.act),
                      .tile_counter = up_tiles,
                      .next_tile_counter = down_tiles});
  seq.run(p.down_proj, {.offsets = routing.offsets,
                        .w2 = args.w2,
                        .b2 = args.b2,
                        .act = seq.region(p.fwd.act),
                        .expert_out = seq.region(p.fwd.expert_out),
                        .tile_counter = down_tiles});
  seq.run(p.aggregate_o, {.rows = seq.region(p.fwd.expert_out),
                          .slot_rows = routing.slot_rows,
                          .token_offsets = routing.token_offsets,
                          .token_slots = routing.token_slots,
                          .slot_scores = slot_scores,
                          .out = args.o});
  if (p.top_k) {
    const std::size_t bytes = 4 * static_cast<std::size_t>(d.rows());
    seq.copy(args.scores, routing.slot_scores, bytes, p.exec);
    seq.copy(args.expert_ids, routing.slot_experts, bytes, p.exec);
  }
  return seq.status();
}

Status LayerPlan::backward(const BackwardArgs& args, Workspace workspace,
                           Stream stream) const noexcept {
  const Impl& p = *impl_;
  const LayerDesc& d = p.desc;
  if (Status status = validate(d, args); !status.ok()) return status;
  if (Status status = validate(workspace, backward_workspace_bytes()); !status.ok()) return status;

  const DeviceGuard guard(p.exec.device);
  Sequence seq(workspace, p.bwd.scratch, stream);
  // Backward only reads the block; the operations' arguments are the same as forward's.
  const RoutingBlock routing = RoutingBlock::at(d, const_cast<void*>(args.routing));
  void* const preact = const_cast<void*>(args.preact);
  void* const dpreact = d.experts.dpreact_in_workspace ? seq.region(p.bwd.dpreact) : args.dpreact;
  void* const dlogits = seq.region(p.bwd.dlogits);
  std::int32_t* dx_tiles = nullptr;  // cleared by down_proj_dgrad
  if (p.counts_tiles()) dx_tiles = seq.region(p.bwd.tile_counter);

  seq.run(p.down_proj_dgrad, {.offsets = routing.offsets,
                              .row_tokens = routing.row_tokens,
                              .row_scores = routing.row_scores,
                              .dout = args.dout,
                              .w2 = args.w2,
                              .preact = preact,
                              .dpreact = dpreact,
                              .scaled_act = seq.region(p.bwd.scaled_act),
                              .row_dscores = seq.region(p.bwd.row_dscores),
                              .next_tile_counter = dx_tiles});
  if (d.experts.bias) {
    seq.run(p.bias_grad, {.offsets = routing.offsets,
                          .row_tokens = routing.row_tokens,
                          .row_scores = routing.row_scores,
                          .dpreact = dpreact,
                          .dout = args.dout,
                          .b2 = args.b2,
                          .row_dscores = seq.region(p.bwd.row_dscores),
                          .db1 = args.db1,
                          .db1_up = args.db1_up,
                          .db2 = args.db2});
  }
  seq.run(p.score_grad, {.row_dscores = seq.region(p.bwd.row_dscores),
                         .slot_rows = routing.slot_rows,
                         .slot_scores = routing.slot_scores,
                         .slot_experts = routing.slot_experts,
                         .logits = args.logits,
                         .dlogits_in = args.dlogits,
                         .dlogits = dlogits,
                         .dscores = p.rounded() ? seq.region(p.bwd.dscores) : args.dscores});
  if (p.token_rounding_grad) {
    seq.run(p.token_rounding_grad, {.logits = args.logits,
                                    .token_ids = routing.slot_tokens,
                                    .expert_ids = routing.slot_experts,
                                    .dscores = seq.region(p.bwd.dscores),
                                    .dlogits_in = args.dlogits,
                                    .dlogits = dlogits});
  }
  // The weight gradients need dH and A', not what the operation before each of them makes; with
  // rows there is always a kernel of score_grad, which has waited for dgrad. dX~ takes the place of
  // A'.
  const bool beside = d.rows() > 0;
  seq.run_for(args.dw2, p.down_proj_wgrad,
              {.offsets = routing.offsets,
               .row_tokens = routing.row_tokens,
               .expert_order = routing.expert_order,
               .dout = args.dout,
               .scaled_act = seq.region(p.bwd.scaled_act),
               .dw2 = args.dw2,
               .beside_previous = beside});
  seq.run_for(args.dw1, p.up_proj_wgrad,
              {.offsets = routing.offsets,
               .row_tokens = routing.row_tokens,
               .expert_order = routing.expert_order,
               .x = args.x,
               .dpreact = dpreact,
               .dw1 = args.dw1,
               .dw1_up = args.dw1_up,
               .beside_previous = beside});
  seq.run_for(args.dx, p.up_proj_dgrad,
              {.offsets = routing.offsets,
               .w1 = args.w1,
               .w1_up = args.w1_up,
               .dpreact = dpreact,
               .dx_rows = seq.region(p.bwd.dx_rows),
               .tile_counter = dx_tiles});
  const bool routed = p.routed() && args.dlogits == nullptr;
  const bool dense = !p.given() && !routed;  // then dx holds the router's part until it is added to
  if (!p.given()) {
    const RouterGemmArgs router{
        .x = args.x, .w = args.router_w, .dlogits = dlogits, .dx = args.dx, .dw = args.drouter_w};
    if (dense) seq.run_for(args.dx, p.router_dgrad, router);
    seq.run_for(args.drouter_w, p.router_wgrad, router);
  }
  seq.run_for(args.dx, p.aggregate_dx,
              {.rows = seq.region(p.bwd.dx_rows),
               .slot_rows = routing.slot_rows,
               .token_offsets = routing.token_offsets,
               .token_slots = routing.token_slots,
               .addend = dense ? args.dx : nullptr,
               .slot_experts = routing.slot_experts,
               .dlogits = dlogits,
               .router_w = routed ? args.router_w : nullptr,
               .out = args.dx});
  return seq.status();
}

}  // namespace sonicmoe
