#include "experts_alone.h"

#include <memory>
#include <stdexcept>
#include <utility>

namespace sonicmoe::cli {
namespace {

constexpr double kRowScale = 0.2;  // of x and dO, as in a layer
constexpr double kScoreScale = 1;

GroupedDesc alone(const LayerDesc& layer, std::int64_t rows) {
  GroupedDesc desc{layer.experts, 0, rows, layer.router.experts};
  desc.row_source = RowSource::contiguous;
  desc.score_at = ScoreAt::before_down;
  desc.zero_tail = true;
  return desc;
}

}  // namespace

ExpertsAlone::ExpertsAlone(const Settings& settings, const LayerTensors& tensors) : l_(tensors) {
  const Device device = settings.device;
  const std::int64_t R = tensors.row_counts().all;
  const GroupedDesc desc = alone(settings.desc, R);
  Result<ExpertsPlan> made = make_plan(desc, device, settings.options());
  if (!made.ok())
    throw std::runtime_error(std::string("experts alone: ") + made.status().message());
  std::uint64_t seed = settings.seed + 1000;  // none of the layer's tensors
  const auto random = [&](std::int64_t width, DType type, double scale) {
    return make_random(R * width, type, scale, seed++, device);
  };
  rows_ = random(desc.hidden, desc.dtype, kRowScale);
  scores_ = random(1, DType::f32, kScoreScale);
  out_ = make_tensor(R * desc.hidden, desc.dtype, device);
  segments_ = Buffer(static_cast<std::size_t>(3 * desc.experts) * sizeof(std::int32_t), device);
  if (!desc.inference) {
    if (desc.keeps_preact()) preact_ = make_tensor(R * desc.preact_width(), desc.dtype, device);
    if (!desc.dpreact_in_workspace) {
      dpreact_ = make_tensor(R * desc.preact_width(), desc.dtype, device);
    }
    dout_ = random(desc.hidden, desc.dtype, kRowScale);
    dx_ = make_tensor(R * desc.hidden, desc.dtype, device);
    dscores_ = make_tensor(R, DType::f32, device);
  }

  const auto plan = std::make_shared<const ExpertsPlan>(std::move(made).value());
  const auto workspace = std::make_shared<const Buffer>(plan->forward_workspace_bytes(), device);
  const double flops = 2.0 * static_cast<double>(R) * static_cast<double>(desc.hidden) *
                       static_cast<double>(desc.preact_width() + desc.intermediate);
  groups_.push_back({.tasks = {{.name = "rows_forward",
                                .run =
                                    [plan, workspace, args = forward_args()] {
                                      return plan->forward(args, workspace->workspace());
                                    },
                                .flops = flops,
                                .bytes = total_bytes({&rows_, &scores_, &l_.w1, &l_.b1, &l_.w2,
                                                      &l_.b2, &out_, &preact_})}}});
  run(groups_[0].tasks[0]);
  const auto add_operations = [&](const std::vector<const char*>& names, auto call) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      operations_.push_back({.tasks = {{.name = std::string("rows.") + names[i], .run = [call, i] {
                                          return call(OperationMask{1} << i);
                                        }}}});
    }
  };
  add_operations(plan->forward_operations(),
                 [plan, workspace, args = forward_args()](OperationMask mask) {
                   return plan->forward(args, workspace->workspace(), {}, mask);
                 });
  if (desc.inference) return;
  const auto backward_workspace =
      std::make_shared<const Buffer>(plan->backward_workspace_bytes(), device);
  groups_.push_back(
      {.tasks = {{.name = "rows_backward",
                  .run =
                      [plan, backward_workspace, args = backward_args()] {
                        return plan->backward(args, backward_workspace->workspace());
                      },
                  .flops = 2 * flops,
                  .bytes = total_bytes({&rows_, &scores_, &l_.w1, &l_.w2, &l_.b2, &dout_, &preact_,
                                        &dx_, &dscores_, &l_.dw1, &l_.db1, &l_.dw2, &l_.db2})}}});
  run(groups_[1].tasks[0]);
  add_operations(plan->backward_operations(),
                 [plan, backward_workspace, args = backward_args()](OperationMask mask) {
                   return plan->backward(args, backward_workspace->workspace(), {}, mask);
                 });
}

ExpertsForwardArgs ExpertsAlone::forward_args() const {
  return {.counts = l_.counts.data(),
          .row_scores = scores_.as<float>(),
          .segments = segments_.as<std::int32_t>(),
          .x = rows_.data(),
          .w1 = l_.w1.data(),
          .b1 = l_.b1.data(),
          .w2 = l_.w2.data(),
          .b2 = l_.b2.data(),
          .preact = preact_.data(),
          .expert_out = out_.data()};
}

ExpertsBackwardArgs ExpertsAlone::backward_args() const {
  return {.row_scores = scores_.as<float>(),
          .segments = segments_.as<std::int32_t>(),
          .x = rows_.data(),
          .dout = dout_.data(),
          .w1 = l_.w1.data(),
          .b1 = l_.b1.data(),
          .w2 = l_.w2.data(),
          .b2 = l_.b2.data(),
          .preact = preact_.data(),
          .row_dscores = dscores_.as<float>(),
          .dx_rows = dx_.data(),
          .dw1 = l_.dw1.data(),
          .db1 = l_.db1.data(),
          .dw2 = l_.dw2.data(),
          .db2 = l_.db2.data(),
          .dpreact = dpreact_.data()};
}

}  // namespace sonicmoe::cli
