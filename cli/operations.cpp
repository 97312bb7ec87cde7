#include "operations.h"

#include <memory>
#include <stdexcept>

namespace sonicmoe::cli {
namespace {

Buffer words(std::int64_t count) { return Buffer(static_cast<std::size_t>(count) * 4); }

}  // namespace

Operations::Operations(const Settings& settings, const LayerTensors& layer)
    : settings_(settings), layer_(layer), s_(settings.desc) {
  const auto rows_of = [&](std::int64_t columns) {
    return make_tensor(s_.r * columns, settings_.desc.dtype);
  };
  scores_ = words(s_.r);
  ids_ = words(s_.r);
  offsets_ = words(s_.e + 1);
  row_tokens_ = words(s_.r);
  row_slots_ = words(s_.r);
  slot_rows_ = words(s_.r);
  row_scores_ = words(s_.r);
  preact_ = rows_of(s_.w);
  act_ = rows_of(s_.n);
  expert_out_ = rows_of(s_.d);
  add_routing();
  add_forward();
  if (settings_.desc.inference) return;

  dpreact_ = rows_of(s_.w);
  scaled_act_ = rows_of(s_.n);
  row_dscores_ = words(s_.r);
  dx_rows_ = rows_of(s_.d);
  dlogits_ = make_tensor(s_.t * s_.e, settings_.desc.dtype);
  add_backward();
}

template <class Desc>
void Operations::add(std::string name, const Desc& desc, const typename Desc::Args& args,
                     double flops, std::initializer_list<const Buffer*> moved) {
  const auto plan = settings_.plan(desc, settings_.layer_line());
  const auto workspace = std::make_shared<Buffer>(plan.workspace_bytes());
  Task task{.name = std::move(name),
            .run = [plan, args, workspace] { return plan.run(args, workspace->workspace()); },
            .flops = flops,
            .bytes = total_bytes(moved)};
  const Status status = task.run();
  if (!status.ok()) throw std::runtime_error(task.name + ": " + status.message());
  groups_.push_back({.tasks = {std::move(task)}});
}

void Operations::add_routing() {
  const LayerDesc& desc = settings_.desc;
  RouterGemmDesc router;
  router.tokens = s_.t, router.hidden = s_.d, router.experts = s_.e, router.dtype = desc.dtype;
  RouterGemmArgs router_args;
  router_args.x = layer_.x.data();
  router_args.w = layer_.router_w.data();
  router_args.logits = layer_.logits.data();
  const double router_flops = 2.0 * static_cast<double>(s_.t * s_.e) * static_cast<double>(s_.d);
  add("router_gemm", router, router_args, router_flops,
      {&layer_.x, &layer_.router_w, &layer_.logits});

  TopKDesc top_k;
  top_k.tokens = s_.t, top_k.experts = s_.e, top_k.top_k = s_.k, top_k.dtype = desc.dtype;
  top_k.mode = desc.router, top_k.norm_topk_probs = desc.norm_topk_probs;
  TopKArgs top_k_args;
  top_k_args.logits = layer_.logits.data();
  top_k_args.scores = scores_.as<float>();
  top_k_args.ids = ids_.as<std::int32_t>();
  add("top_k", top_k, top_k_args, 0, {&layer_.logits, &scores_, &ids_});

  MetadataDesc metadata;
  metadata.tokens = s_.t, metadata.experts = s_.e, metadata.top_k = s_.k;
  MetadataArgs metadata_args;
  metadata_args.slot_experts = ids_.as<std::int32_t>();
  metadata_args.slot_scores = scores_.as<float>();
  metadata_args.counts = layer_.counts.as<std::int32_t>();
  metadata_args.offsets = offsets_.as<std::int32_t>();
  metadata_args.row_tokens = row_tokens_.as<std::int32_t>();
  metadata_args.row_slots = row_slots_.as<std::int32_t>();
  metadata_args.slot_rows = slot_rows_.as<std::int32_t>();
  metadata_args.row_scores = row_scores_.as<float>();
  add("metadata", metadata, metadata_args, 0,
      {&ids_, &scores_, &layer_.counts, &offsets_, &row_tokens_, &row_slots_, &slot_rows_,
       &row_scores_});
}

GroupedGemmDesc Operations::gemm_desc(GemmOp op) const {
  const LayerDesc& layer = settings_.desc;
  GroupedGemmDesc desc;
  desc.op = op;
  desc.tokens = s_.t, desc.rows = s_.r, desc.hidden = s_.d, desc.intermediate = s_.n;
  desc.experts = s_.e, desc.dtype = layer.dtype, desc.activation = layer.activation;
  desc.w1_layout = layer.w1_layout, desc.bias = layer.bias, desc.inference = layer.inference;
  return desc;
}

GroupedGemmArgs Operations::gemm_args() const {
  GroupedGemmArgs args;
  args.offsets = offsets_.as<std::int32_t>();
  args.row_tokens = row_tokens_.as<std::int32_t>();
  args.row_scores = row_scores_.as<float>();
  args.x = layer_.x.data();
  args.dout = layer_.dout.data();
  args.w1 = layer_.w1.data();
  args.b1 = layer_.b1.data();
  args.w2 = layer_.w2.data();
  args.b2 = layer_.b2.data();
  args.preact = preact_.data();
  args.act = act_.data();
  args.expert_out = expert_out_.data();
  args.dpreact = dpreact_.data();
  args.scaled_act = scaled_act_.data();
  args.row_dscores = row_dscores_.as<float>();
  args.dx_rows = dx_rows_.data();
  args.dw1 = layer_.dw1.data();
  args.dw2 = layer_.dw2.data();
  return args;
}

AggregateDesc Operations::aggregate_desc() const {
  AggregateDesc desc;
  desc.tokens = s_.t, desc.rows = s_.r, desc.hidden = s_.d, desc.top_k = s_.k;
  desc.dtype = settings_.desc.dtype;
  return desc;
}

void Operations::add_forward() {
  const LayerTensors& l = layer_;
  const double up_flops = 2.0 * static_cast<double>(s_.r * s_.w) * static_cast<double>(s_.d);
  const double down_flops = 2.0 * static_cast<double>(s_.r * s_.d) * static_cast<double>(s_.n);
  const Buffer none;
  const Buffer* kept_preact = settings_.desc.inference ? &none : &preact_;
  add("up_proj", gemm_desc(GemmOp::up_proj), gemm_args(), up_flops,
      {&l.x, &l.w1, &l.b1, kept_preact, &act_});
  add("down_proj", gemm_desc(GemmOp::down_proj), gemm_args(), down_flops,
      {&act_, &l.w2, &l.b2, &expert_out_});

  AggregateArgs args;
  args.rows = expert_out_.data();
  args.slot_rows = slot_rows_.as<std::int32_t>();
  args.slot_scores = scores_.as<float>();
  args.out = l.o.data();
  add("aggregate_o", aggregate_desc(), args, 0, {&expert_out_, &slot_rows_, &scores_, &l.o});
}

void Operations::add_backward() {
  const LayerDesc& desc = settings_.desc;
  const LayerTensors& l = layer_;
  const double up_flops = 2.0 * static_cast<double>(s_.r * s_.w) * static_cast<double>(s_.d);
  const double down_flops = 2.0 * static_cast<double>(s_.r * s_.d) * static_cast<double>(s_.n);
  const double router_flops = 2.0 * static_cast<double>(s_.t * s_.e) * static_cast<double>(s_.d);

  add("down_proj_dgrad", gemm_desc(GemmOp::down_proj_dgrad), gemm_args(), down_flops,
      {&l.dout, &l.w2, &preact_, &row_scores_, &dpreact_, &scaled_act_, &row_dscores_});
  add("up_proj_dgrad", gemm_desc(GemmOp::up_proj_dgrad), gemm_args(), up_flops,
      {&dpreact_, &l.w1, &dx_rows_});
  add("down_proj_wgrad", gemm_desc(GemmOp::down_proj_wgrad), gemm_args(), down_flops,
      {&l.dout, &scaled_act_, &l.dw2});
  add("up_proj_wgrad", gemm_desc(GemmOp::up_proj_wgrad), gemm_args(), up_flops,
      {&l.x, &dpreact_, &l.dw1});

  if (desc.bias) {
    BiasGradDesc bias;
    bias.tokens = s_.t, bias.rows = s_.r, bias.hidden = s_.d, bias.intermediate = s_.n;
    bias.experts = s_.e, bias.dtype = desc.dtype, bias.activation = desc.activation;
    bias.w1_layout = desc.w1_layout;
    BiasGradArgs args;
    args.offsets = offsets_.as<std::int32_t>();
    args.row_tokens = row_tokens_.as<std::int32_t>();
    args.row_scores = row_scores_.as<float>();
    args.dpreact = dpreact_.data();
    args.dout = l.dout.data();
    args.b2 = l.b2.data();
    args.row_dscores = row_dscores_.as<float>();
    args.db1 = l.db1.data();
    args.db2 = l.db2.data();
    add("bias_grad", bias, args, 0, {&dpreact_, &l.dout, &l.b2, &row_dscores_, &l.db1, &l.db2});
  }

  ScoreGradDesc score;
  score.tokens = s_.t, score.experts = s_.e, score.top_k = s_.k, score.rows = s_.r;
  score.dtype = desc.dtype, score.mode = desc.router;
  score.norm_topk_probs = desc.norm_topk_probs;
  ScoreGradArgs score_args;
  score_args.row_dscores = row_dscores_.as<float>();
  score_args.slot_rows = slot_rows_.as<std::int32_t>();
  score_args.slot_scores = scores_.as<float>();
  score_args.slot_experts = ids_.as<std::int32_t>();
  score_args.logits = l.logits.data();
  score_args.dlogits = dlogits_.data();
  add("score_grad", score, score_args, 0, {&row_dscores_, &slot_rows_, &scores_, &ids_, &dlogits_});

  RouterGemmDesc router;
  router.tokens = s_.t, router.hidden = s_.d, router.experts = s_.e, router.dtype = desc.dtype;
  RouterGemmArgs router_args;
  router_args.x = l.x.data();
  router_args.w = l.router_w.data();
  router_args.dlogits = dlogits_.data();
  router_args.dx = l.dx.data();
  router_args.dw = l.drouter_w.data();
  router.pass = GemmPass::dgrad;
  add("router_dgrad", router, router_args, router_flops, {&dlogits_, &l.router_w, &l.dx});
  router.pass = GemmPass::wgrad;
  add("router_wgrad", router, router_args, router_flops, {&dlogits_, &l.x, &l.drouter_w});

  AggregateArgs args;
  args.rows = dx_rows_.data();
  args.slot_rows = slot_rows_.as<std::int32_t>();
  args.addend = l.dx.data();
  args.out = l.dx.data();
  add("aggregate_dx", aggregate_desc(), args, 0, {&dx_rows_, &slot_rows_, &l.dx, &l.dx});
}

}  // namespace sonicmoe::cli
