#include "operations.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

namespace sonicmoe::cli {

Operations::Operations(const Settings& settings, const LayerTensors& layer, bool every_kernel)
    : settings_(settings),
      layer_(layer),
      every_kernel_(every_kernel),
      s_(settings.desc),
      rows_(layer.row_counts().all) {
  const auto rows_of = [&](std::int64_t columns) {
    return make_tensor(s_.r * columns, settings_.desc.experts.dtype, settings_.device);
  };
  const auto words = [&](std::int64_t count) {
    return Buffer(static_cast<std::size_t>(count) * 4, settings_.device);
  };
  scores_ = words(s_.r);
  ids_ = words(s_.r);
  offsets_ = words(s_.e + 1);
  expert_order_ = words(s_.e);
  row_tokens_ = words(s_.r);
  row_slots_ = words(s_.r);
  slot_rows_ = words(s_.r);
  row_scores_ = words(s_.r);
  tile_counters_ = words(3);
  preact_ = rows_of(s_.w);
  act_ = rows_of(s_.n);
  expert_out_ = rows_of(s_.d);
  if (rounded()) {
    slot_tokens_ = words(s_.r);
    token_offsets_ = words(s_.t + 1);
    token_slots_ = words(s_.r);
    dscores_ = words(s_.r);
  }
  add_routing();
  add_forward();
  if (settings_.desc.experts.inference) return;

  dpreact_ = rows_of(s_.w);
  scaled_act_ = rows_of(s_.n);
  row_dscores_ = words(s_.r);
  dx_rows_ = rows_of(s_.d);
  dlogits_ = make_tensor(s_.t * s_.e, settings_.desc.experts.dtype, settings_.device);
  add_backward();
  // Under another name a sequence would leave it out, and run the operation as it is alone.
  for (const Task& task : in_sequence_) (void)named(task.name);
}

/// Of a tensor of grouped rows only the rows in use move.
double Operations::moved_bytes(const Buffer& buffer) const {
  const auto bytes = static_cast<double>(buffer.bytes());
  if (rows_ == s_.r) return bytes;
  for (const Buffer* rows : {&preact_, &act_, &expert_out_, &dpreact_, &scaled_act_, &row_dscores_,
                             &row_scores_, &dx_rows_}) {
    if (&buffer == rows) return bytes * static_cast<double>(rows_) / static_cast<double>(s_.r);
  }
  return bytes;
}

template <class Desc>
Task Operations::task(std::string name, const OpPlan<Desc>& plan, const typename Desc::Args& args,
                      double flops, std::initializer_list<const Buffer*> moved) const {
  const auto workspace = std::make_shared<Buffer>(plan.workspace_bytes(), settings_.device);
  Task task{.name = std::move(name),
            .run = [plan, args, workspace] { return plan.run(args, workspace->workspace()); },
            .flops = flops};
  for (const Buffer* buffer : moved) task.bytes += moved_bytes(*buffer);
  run(task);
  return task;
}

template <class Desc>
void Operations::add(std::string name, const Desc& desc, const typename Desc::Args& args,
                     double flops, std::initializer_list<const Buffer*> moved) {
  const auto plan = settings_.plan(desc, settings_.layer_line());
  groups_.push_back({.tasks = {task(std::move(name), plan, args, flops, moved)}});
}

void Operations::add_gemm(const char* name, GemmOp op, double flops,
                          std::initializer_list<const Buffer*> moved) {
  const GroupedGemmDesc desc = gemm_desc(op);
  GroupedGemmArgs args = gemm_args();
  // As in a layer and in backward(), where these follow score_grad and each other.
  args.beside_previous =
      rows_ > 0 && (op == GemmOp::down_proj_wgrad || op == GemmOp::up_proj_wgrad);
  const auto chosen = settings_.plan(desc, settings_.layer_line());
  groups_.push_back({.tasks = {task(name, chosen, args, flops, moved)}});
  // Alone an operation clears what its tiles are counted in; in a sequence an earlier one has.
  std::int32_t* const counter = tile_counters_.as<std::int32_t>();
  if (op == GemmOp::up_proj) args.tile_counter = counter, args.next_tile_counter = counter + 1;
  if (op == GemmOp::down_proj) args.tile_counter = counter + 1;
  if (op == GemmOp::down_proj_dgrad) args.next_tile_counter = counter + 2;
  if (op == GemmOp::up_proj_dgrad) args.tile_counter = counter + 2;
  if (args.tile_counter != nullptr || args.next_tile_counter != nullptr) {
    in_sequence_.push_back(task(name, chosen, args, flops, moved));
  }
  if (!every_kernel_) return;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op != name || kernel.device != settings_.device.type) continue;
    Options options = settings_.options();
    options.kernel = kernel.name;
    const auto plan = make_plan(desc, settings_.device, options);
    if (!plan.ok()) continue;  // it cannot run this shape
    groups_.push_back({.tasks = {task(kernel.name, plan.value(), gemm_args(), flops, moved)}});
  }
}

const Task& Operations::named(const std::string& name) const {
  for (const Group& group : groups_) {
    if (group.tasks[0].name == name) return group.tasks[0];
  }
  throw std::logic_error(name + ": no such operation");
}

void Operations::add_in_layer(const std::string& name, std::initializer_list<const char*> before) {
  if (settings_.device.type != DeviceType::cuda) return;
  Task task = named(name);
  task.name += ".in_layer";
  std::vector<Task> tasks;
  for (const char* operation : before) tasks.push_back(named(operation));
  const auto run_all = [tasks] {
    for (const Task& one : tasks) run(one);
  };
  groups_.push_back({.tasks = {std::move(task)}, .before = run_all});
}

Task Operations::sequence(std::string name, const std::vector<const char*>& operations) const {
  Task all{.name = std::move(name), .run = {}};
  std::vector<std::function<Status()>> runs;
  for (const char* operation : operations) {
    const Task& alone = named(operation);
    const auto other = std::ranges::find(in_sequence_, alone.name, &Task::name);
    const Task& task = other != in_sequence_.end() ? *other : alone;
    runs.push_back(task.run);
    all.flops += task.flops;
    all.bytes += task.bytes;
  }
  all.run = [runs = std::move(runs)] {
    for (const auto& run : runs) {
      if (Status status = run(); !status.ok()) return status;
    }
    return Status();
  };
  return all;
}

Task Operations::forward() const {
  return sequence("forward", {"metadata", "up_proj", "down_proj", "aggregate_o"});
}

Task Operations::backward() const {
  std::vector<const char*> operations = {"down_proj_dgrad"};
  if (settings_.desc.experts.bias) operations.push_back("bias_grad");
  for (const char* operation :
       {"score_grad", "down_proj_wgrad", "up_proj_wgrad", "up_proj_dgrad", "aggregate_dx"}) {
    operations.push_back(operation);
  }
  return sequence("backward", operations);
}

Task Operations::routing() const {
  return sequence("routing", {rounded() ? "token_rounding" : "top_k", "metadata"});
}

void Operations::add_routing() {
  const LayerDesc& desc = settings_.desc;
  RouterGemmDesc router;
  router.tokens = s_.t, router.hidden = s_.d, router.experts = s_.e,
  router.dtype = desc.experts.dtype;
  RouterGemmArgs router_args;
  router_args.x = layer_.x.data();
  router_args.w = layer_.router_w.data();
  router_args.logits = layer_.logits.data();
  const double router_flops = 2.0 * static_cast<double>(s_.t * s_.e) * static_cast<double>(s_.d);
  add("router_gemm", router, router_args, router_flops,
      {&layer_.x, &layer_.router_w, &layer_.logits});

  if (rounded()) {
    add_rounding();
  } else {
    add_top_k();
  }
  add_metadata();
}

void Operations::add_top_k() {
  const LayerDesc& desc = settings_.desc;
  TopKDesc top_k;
  top_k.tokens = s_.t, top_k.experts = s_.e, top_k.top_k = s_.k, top_k.dtype = desc.experts.dtype;
  top_k.mode = desc.router.mode, top_k.norm_topk_probs = desc.router.norm_topk_probs;
  TopKArgs args;
  args.logits = layer_.logits.data();
  args.scores = scores_.as<float>();
  args.ids = ids_.as<std::int32_t>();
  block_counts_ = Buffer(block_counts_bytes(top_k, settings_.device), settings_.device);
  args.block_counts = block_counts_.as<std::uint8_t>();
  add("top_k", top_k, args, 0, {&layer_.logits, &scores_, &ids_, &block_counts_});
}

void Operations::add_rounding() {
  const LayerDesc& desc = settings_.desc;
  const TokenRoundingDesc rounding{
      {desc.router}, s_.t, desc.experts.dtype, desc.rounding.rule, desc.rounding.tile};
  TokenRoundingArgs args;
  args.logits = layer_.logits.data();
  args.seed = layer_.draws;
  args.scores = scores_.as<float>();
  args.token_ids = slot_tokens_.as<std::int32_t>();
  args.expert_ids = ids_.as<std::int32_t>();
  args.counts = layer_.counts.as<std::int32_t>();
  add("token_rounding", rounding, args, 0,
      {&layer_.logits, &scores_, &slot_tokens_, &ids_, &layer_.counts});
}

void Operations::add_metadata() {
  MetadataDesc metadata;
  metadata.tokens = s_.t, metadata.experts = s_.e;
  metadata.top_k = rounded() ? 0 : s_.k;
  metadata.list_length = rounded() ? s_.r : 0;
  metadata.assume_sorted = rounded();
  MetadataArgs args;
  args.slot_experts = ids_.as<std::int32_t>();
  args.slot_tokens = slot_tokens_.as<std::int32_t>();
  args.slot_scores = scores_.as<float>();
  args.counts = layer_.counts.as<std::int32_t>();
  args.offsets = offsets_.as<std::int32_t>();
  args.expert_order = expert_order_.as<std::int32_t>();
  args.block_counts = block_counts_.as<std::uint8_t>();
  args.row_tokens = row_tokens_.as<std::int32_t>();
  args.row_slots = row_slots_.as<std::int32_t>();
  args.slot_rows = slot_rows_.as<std::int32_t>();
  args.row_scores = row_scores_.as<float>();
  args.token_offsets = token_offsets_.as<std::int32_t>();
  args.token_slots = token_slots_.as<std::int32_t>();
  args.next_tile_counter = tile_counters_.as<std::int32_t>();
  add("metadata", metadata, args, 0,
      {&ids_, &slot_tokens_, &scores_, &block_counts_, &layer_.counts, &offsets_, &expert_order_,
       &row_tokens_, &row_slots_, &slot_rows_, &row_scores_, &token_offsets_, &token_slots_});
}

GroupedGemmDesc Operations::gemm_desc(GemmOp op) const {
  const LayerDesc& layer = settings_.desc;
  GroupedGemmDesc desc;
  desc.op = op;
  desc.tokens = s_.t, desc.rows = s_.r, desc.hidden = s_.d, desc.intermediate = s_.n;
  desc.experts = s_.e, desc.dtype = layer.experts.dtype, desc.activation = layer.experts.activation;
  desc.w1_layout = layer.experts.w1_layout, desc.bias = layer.experts.bias,
  desc.inference = layer.experts.inference;
  return desc;
}

GroupedGemmArgs Operations::gemm_args() const {
  GroupedGemmArgs args;
  args.offsets = offsets_.as<std::int32_t>();
  args.expert_order = expert_order_.as<std::int32_t>();
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
  desc.tokens = s_.t, desc.rows = s_.r, desc.hidden = s_.d, desc.top_k = rounded() ? 0 : s_.k;
  desc.dtype = settings_.desc.experts.dtype;
  return desc;
}

AggregateArgs Operations::aggregate_args() const {
  AggregateArgs args;
  args.slot_rows = slot_rows_.as<std::int32_t>();
  args.token_offsets = token_offsets_.as<std::int32_t>();
  args.token_slots = token_slots_.as<std::int32_t>();
  return args;
}

void Operations::add_forward() {
  const LayerTensors& l = layer_;
  const double up_flops = 2.0 * static_cast<double>(rows_ * s_.w) * static_cast<double>(s_.d);
  const double down_flops = 2.0 * static_cast<double>(rows_ * s_.d) * static_cast<double>(s_.n);
  const Buffer none;
  const Buffer* kept_preact = settings_.desc.experts.inference ? &none : &preact_;
  add_gemm("up_proj", GemmOp::up_proj, up_flops, {&l.x, &l.w1, &l.b1, kept_preact, &act_});
  add_gemm("down_proj", GemmOp::down_proj, down_flops, {&act_, &l.w2, &l.b2, &expert_out_});

  AggregateArgs args = aggregate_args();
  args.rows = expert_out_.data();
  args.slot_scores = scores_.as<float>();
  args.out = l.o.data();
  add("aggregate_o", aggregate_desc(), args, 0,
      {&expert_out_, &slot_rows_, &token_offsets_, &token_slots_, &scores_, &l.o});
  add_in_layer("aggregate_o", {"down_proj"});
}

void Operations::add_score_grad() {
  const LayerDesc& desc = settings_.desc;
  ScoreGradDesc score;
  score.tokens = s_.t, score.experts = s_.e, score.rows = s_.r, score.dtype = desc.experts.dtype;
  ScoreGradArgs args;
  args.row_dscores = row_dscores_.as<float>();
  args.slot_rows = slot_rows_.as<std::int32_t>();
  if (rounded()) {
    // Lists take their gradients in slot order, and rounding takes them from there to the logits.
    score.mode = RouterMode::given;
    args.dscores = dscores_.as<float>();
    add("score_grad", score, args, 0, {&row_dscores_, &slot_rows_, &dscores_});

    TokenRoundingGradDesc grad{{desc.router}, s_.t, desc.experts.dtype};
    grad.list_length = s_.r;
    TokenRoundingGradArgs grad_args;
    grad_args.logits = layer_.logits.data();
    grad_args.token_ids = slot_tokens_.as<std::int32_t>();
    grad_args.expert_ids = ids_.as<std::int32_t>();
    grad_args.dscores = dscores_.as<float>();
    grad_args.dlogits = dlogits_.data();
    add("token_rounding_grad", grad, grad_args, 0,
        {&layer_.logits, &slot_tokens_, &ids_, &dscores_, &dlogits_});
    return;
  }
  score.top_k = s_.k, score.mode = desc.router.mode,
  score.norm_topk_probs = desc.router.norm_topk_probs;
  args.slot_scores = scores_.as<float>();
  args.slot_experts = ids_.as<std::int32_t>();
  args.logits = layer_.logits.data();
  args.dlogits = dlogits_.data();
  add("score_grad", score, args, 0, {&row_dscores_, &slot_rows_, &scores_, &ids_, &dlogits_});
}

void Operations::add_backward() {
  const LayerDesc& desc = settings_.desc;
  const LayerTensors& l = layer_;
  const double up_flops = 2.0 * static_cast<double>(rows_ * s_.w) * static_cast<double>(s_.d);
  const double down_flops = 2.0 * static_cast<double>(rows_ * s_.d) * static_cast<double>(s_.n);
  const double router_flops = 2.0 * static_cast<double>(s_.t * s_.e) * static_cast<double>(s_.d);

  add_gemm("down_proj_dgrad", GemmOp::down_proj_dgrad, down_flops,
           {&l.dout, &l.w2, &preact_, &row_scores_, &dpreact_, &scaled_act_, &row_dscores_});
  add_gemm("up_proj_dgrad", GemmOp::up_proj_dgrad, up_flops, {&dpreact_, &l.w1, &dx_rows_});
  add_gemm("down_proj_wgrad", GemmOp::down_proj_wgrad, down_flops, {&l.dout, &scaled_act_, &l.dw2});
  add_gemm("up_proj_wgrad", GemmOp::up_proj_wgrad, up_flops, {&l.x, &dpreact_, &l.dw1});

  if (desc.experts.bias) {
    BiasGradDesc bias;
    bias.tokens = s_.t, bias.rows = s_.r, bias.hidden = s_.d, bias.intermediate = s_.n;
    bias.experts = s_.e, bias.dtype = desc.experts.dtype, bias.activation = desc.experts.activation;
    bias.w1_layout = desc.experts.w1_layout;
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

  add_score_grad();
  RouterGemmDesc router;
  router.tokens = s_.t, router.hidden = s_.d, router.experts = s_.e,
  router.dtype = desc.experts.dtype;
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

  AggregateArgs args = aggregate_args();
  args.rows = dx_rows_.data();
  args.out = l.dx.data();
  in_sequence_.push_back(  // without the router's dX
      task("aggregate_dx", settings_.plan(aggregate_desc(), settings_.layer_line()), args, 0,
           {&dx_rows_, &slot_rows_, &token_offsets_, &token_slots_, &l.dx}));
  AggregateDesc with_router = aggregate_desc();
  if (!rounded() && s_.k <= kMaxRoutedTopK &&
      (desc.router.mode == RouterMode::softmax_over_topk || desc.router.norm_topk_probs)) {
    // As the layer does, without a loss on the logits: router_dgrad is for layers that have one.
    with_router.experts = s_.e;
    args.slot_experts = ids_.as<std::int32_t>();
    args.dlogits = dlogits_.data();
    args.router_w = l.router_w.data();
    add("aggregate_dx", with_router, args, 0,
        {&dx_rows_, &slot_rows_, &ids_, &dlogits_, &l.router_w, &l.dx});
  } else {
    args.addend = l.dx.data();
    add("aggregate_dx", with_router, args, 0,
        {&dx_rows_, &slot_rows_, &token_offsets_, &token_slots_, &l.dx, &l.dx});
  }
  add_in_layer("aggregate_dx", {"up_proj_dgrad", "router_wgrad"});
}

}  // namespace sonicmoe::cli
