#include "operations.h"

#include <algorithm>
#include <stdexcept>

namespace sonicmoe::cli {
namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

std::vector<std::string> without(std::vector<std::string> names,
                                 const std::vector<std::string>& others) {
  std::erase_if(names, [&](const std::string& name) { return contains(others, name); });
  return names;
}

std::vector<std::string> strings(const std::vector<const char*>& names) {
  return {names.begin(), names.end()};
}

}  // namespace

Operations::Operations(const Settings& settings, const LayerPlan& plan, const LayerTensors& tensors,
                       bool every_kernel)
    : settings_(settings),
      tensors_(tensors),
      s_(settings.desc),
      rows_(tensors.row_counts().all),
      layer_(make_layer(plan)) {
  for (const auto* operations : {&layer_->forward, &layer_->backward}) {
    for (const std::string& name : *operations) {
      groups_.push_back({.tasks = {task(layer_, name, {name})}});
      if (every_kernel) add_every_kernel(name);
      if (name == "aggregate_o") add_in_layer(name, {"down_proj"});
      if (name == "aggregate_dx") {
        const bool projects = settings.desc.router.projects();
        add_in_layer(name, projects ? std::vector<std::string>{"up_proj_dgrad", "router_wgrad"}
                                    : std::vector<std::string>{"up_proj_dgrad"});
      }
    }
  }
}

std::shared_ptr<const Operations::Layer> Operations::make_layer(const LayerPlan& plan) const {
  auto layer = std::make_shared<Layer>(
      Layer{plan, Buffer(plan.forward_workspace_bytes(), settings_.device),
            Buffer(plan.backward_workspace_bytes(), settings_.device),
            strings(plan.forward_operations()), strings(plan.backward_operations())});
  run(task(layer, "forward", layer->forward));
  if (!layer->backward.empty()) run(task(layer, "backward", layer->backward));
  return layer;
}

Task Operations::task(const std::shared_ptr<const Layer>& layer, std::string name,
                      const std::vector<std::string>& operations) const {
  Task task{.name = std::move(name), .run = {}};
  const bool is_forward = contains(layer->forward, operations.front());
  const std::vector<std::string>& all = is_forward ? layer->forward : layer->backward;
  OperationMask mask = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!contains(operations, all[i])) continue;
    mask |= OperationMask{1} << i;
    const Cost added = cost(all[i]);
    task.flops += added.flops;
    task.bytes += added.bytes;
  }
  for (const std::string& operation : operations) {
    if (!contains(all, operation)) throw std::logic_error(operation + ": no such operation");
  }
  if (is_forward) {
    task.run = [layer, mask, args = tensors_.forward_args()] {
      return layer->plan.forward(args, layer->forward_workspace.workspace(), {}, mask);
    };
  } else {
    BackwardArgs args = tensors_.backward_args();
    // Without a loss on the logits a layer may need no product for the router's part of dX.
    if (operations == std::vector<std::string>{"router_dgrad"})
      args.dlogits = tensors_.logits.data();
    task.run = [layer, mask, args] {
      return layer->plan.backward(args, layer->backward_workspace.workspace(), {}, mask);
    };
  }
  return task;
}

void Operations::add_every_kernel(const std::string& operation) {
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op != operation || kernel.device != settings_.device.type) continue;
    if (cost(operation).flops == 0 || kernel.op.starts_with("router")) continue;
    Options options = settings_.options();
    options.kernel = kernel.name;
    const auto plan = make_plan(settings_.desc, settings_.device, options);
    if (!plan.ok()) continue;  // it cannot run this shape
    groups_.push_back({.tasks = {task(make_layer(plan.value()), kernel.name, {operation})}});
  }
}

void Operations::add_in_layer(const std::string& name, const std::vector<std::string>& before) {
  if (settings_.device.type != DeviceType::cuda) return;
  const Task earlier = task(layer_, "before", before);
  groups_.push_back(
      {.tasks = {task(layer_, name + ".in_layer", {name})}, .before = [earlier] { run(earlier); }});
}

Task Operations::forward() const {
  return task(layer_, "forward",
              without(layer_->forward, {"router_gemm", "top_k", "token_rounding"}));
}

Task Operations::backward() const {
  return task(layer_, "backward",
              without(layer_->backward, {"token_rounding_grad", "router_dgrad", "router_wgrad"}));
}

Task Operations::routing() const {
  return task(layer_, "routing",
              without(layer_->forward, {"router_gemm", "up_proj", "down_proj", "aggregate_o"}));
}

Operations::Cost Operations::cost(const std::string& operation) const {
  const LayerTensors& l = tensors_;
  const auto size = static_cast<double>(size_of(settings_.desc.experts.dtype));
  // Of a tensor of grouped rows only the rows in use move.
  const auto rows = [&](std::int64_t columns) {
    return static_cast<double>(rows_ * columns) * size;
  };
  const auto words = [](std::int64_t count) { return 4.0 * static_cast<double>(count); };
  const bool lists = settings_.desc.rounding.tile > 0;
  const double flops = 2.0 * static_cast<double>(rows_) * static_cast<double>(s_.d);
  const double up_flops = flops * static_cast<double>(s_.w);
  const double down_flops = flops * static_cast<double>(s_.n);
  const double router_flops = 2.0 * static_cast<double>(s_.t * s_.e) * static_cast<double>(s_.d);
  const double router = total_bytes({&l.x, &l.router_w, &l.logits});
  const double tokens_of_lists = lists ? words(s_.t + 1 + s_.r) : 0;
  const double row_words = words(rows_);
  const RouterDesc& router_desc = settings_.desc.router;
  const bool by_sum =
      router_desc.projects() && !lists && !settings_.desc.needs_logits() && s_.k <= kMaxRoutedTopK;
  const double kept = settings_.desc.experts.keeps_preact() ? rows(s_.w) : 0;

  if (operation.starts_with("router_")) return {router_flops, router};
  if (operation == "top_k") return {0, total_bytes({&l.logits}) + words(2 * s_.r)};
  if (operation == "token_rounding") {
    return {0, total_bytes({&l.logits, &l.counts}) + words(3 * s_.r)};
  }
  if (operation == "metadata") {
    return {0, words(6 * s_.r + 3 * s_.e + 1) + tokens_of_lists + (lists ? words(s_.r) : 0)};
  }
  if (operation == "up_proj") {
    return {up_flops, total_bytes({&l.x, &l.w1, &l.b1}) + kept + rows(s_.n)};
  }
  if (operation == "up_proj_recompute") {
    return {up_flops, total_bytes({&l.x, &l.w1, &l.b1}) + rows(s_.w + s_.n)};
  }
  if (operation == "down_proj") {
    return {down_flops, total_bytes({&l.w2, &l.b2}) + rows(s_.n + s_.d)};
  }
  if (operation == "aggregate_o") {
    return {0, rows(s_.d) + words(2 * s_.r) + tokens_of_lists + total_bytes({&l.o})};
  }
  if (operation == "down_proj_dgrad") {
    return {down_flops, total_bytes({&l.dout, &l.w2}) + rows(2 * s_.w + s_.n) + 2 * row_words};
  }
  if (operation == "bias_grad") {
    return {0, total_bytes({&l.dout, &l.b2, &l.db1, &l.db2}) + rows(s_.w) + row_words};
  }
  if (operation == "score_grad") {
    const bool to_slots = lists || !router_desc.has_logits();
    return {0, row_words + words(s_.r) +
                   (to_slots ? words(s_.r) : words(2 * s_.r) + total_bytes({&l.logits}))};
  }
  if (operation == "token_rounding_grad") {
    return {0, 2 * total_bytes({&l.logits}) + words(3 * s_.r)};
  }
  if (operation == "down_proj_wgrad") {
    return {down_flops, total_bytes({&l.dout, &l.dw2}) + rows(s_.n)};
  }
  if (operation == "up_proj_wgrad") {
    return {up_flops, total_bytes({&l.x, &l.dw1}) + rows(s_.w)};
  }
  if (operation == "up_proj_dgrad") return {up_flops, total_bytes({&l.w1}) + rows(s_.w + s_.d)};
  if (operation == "aggregate_dx") {
    const double addend = router_desc.projects() ? total_bytes({&l.dx}) : 0;
    const double extra =
        by_sum ? words(s_.r) + total_bytes({&l.logits, &l.router_w}) : tokens_of_lists + addend;
    return {0, rows(s_.d) + words(s_.r) + extra + total_bytes({&l.dx})};
  }
  throw std::logic_error(operation + ": nothing is known of its cost");
}

}  // namespace sonicmoe::cli
