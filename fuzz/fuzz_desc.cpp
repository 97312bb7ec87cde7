// Descriptors of every kind with any values: make_plan accepts or refuses with a reason, and what
// it accepts has bounded sizes. Small layers run forward and backward in guarded memory.
#include <cstddef>
#include <string>
#include <vector>

#include "fuzz/fuzz.h"
#include "sonicmoe/sonicmoe.h"
#include "testkit/run.h"

namespace sonicmoe::fuzz {
namespace {

constexpr std::size_t kSane = std::size_t{1} << 62;

Device any_device(FuzzedDataProvider* in) {
  Device device;
  if (in->ConsumeIntegralInRange(0, 15) == 0) {
    device.type = pick<DeviceType>(in, 2);
    device.index = in->ConsumeIntegral<std::int32_t>();
  }
  return device;
}

/// The beginning of a kernel's name, or the name and more.
std::string any_kernel(FuzzedDataProvider* in) {
  static const std::vector<KernelInfo> kernels = sonicmoe::kernels();
  const std::size_t last = kernels.size() - 1;
  const std::string name = kernels[in->ConsumeIntegralInRange<std::size_t>(0, last)].name;
  return name.substr(0, in->ConsumeIntegralInRange<std::size_t>(0, name.size())) +
         in->ConsumeRandomLengthString(20);
}

Options any_options(FuzzedDataProvider* in) {
  Options options = few_threads(in);
  if (in->ConsumeIntegralInRange(0, 15) == 0) {
    options.threads = in->ConsumeIntegral<std::int32_t>();
    options.checked = in->ConsumeBool();
  }
  if (in->ConsumeIntegralInRange(0, 15) == 0) options.kernel = in->ConsumeRandomLengthString(20);
  if (in->ConsumeIntegralInRange(0, 15) == 0) options.kernel = "cpu";
  if (in->ConsumeIntegralInRange(0, 15) == 0) options.kernel = any_kernel(in);
  if (in->ConsumeIntegralInRange(0, 15) == 0) {
    options.multiprocessors = in->ConsumeIntegral<std::int32_t>();
  }
  return options;
}

/// A parameter is the kind's own, mostly.
ActivationSpec any_activation(FuzzedDataProvider* in) {
  ActivationSpec spec = pick<Activation>(in, static_cast<int>(activations().size()));
  for (float* value : {&spec.alpha, &spec.beta, &spec.limit}) {
    if (in->ConsumeIntegralInRange(0, 31) == 0) *value = in->ConsumeFloatingPoint<float>();
  }
  return spec;
}

/// Any operation's plan. Returns whether there is one.
template <class Desc>
void plan_operation(FuzzedDataProvider* in, const Desc& desc) {
  const Device device = any_device(in);
  const Options options = any_options(in);
  const auto plan = make_plan(desc, device, options);
  if (!plan.ok()) return require_good_refusal(plan.status());
  require(plan.value().desc() == desc, "the plan's descriptor is another");
  require(plan.value().workspace_bytes() < kSane, "workspace_bytes overflowed");
  require(!plan.value().explain().empty(), "no explanation");
}

/// Options that make a router other than plain(), or its logits fp32.
void any_router_options(FuzzedDataProvider* in, RouterDesc* d) {
  d->score = pick<RouterScore>(in, 3);
  d->eps = in->PickValueInArray({0.0f, 0.0f, 1e-20f, 0.5f, -1.0f});
  d->scale = in->PickValueInArray({1.0f, 2.5f, 0.0f});
  d->logit_bias = in->ConsumeBool();
  d->selection_bias = in->ConsumeBool();
  d->expert_scale = in->ConsumeBool();
  d->groups = in->PickValueInArray({1, 1, 2, 4, 0, 5000});
  d->kept_groups = in->PickValueInArray({1, 1, 2, 3});
  d->group_score = pick<GroupScore>(in, 2);
  d->f32_logits = in->ConsumeBool();
  d->f32_router_w = in->ConsumeBool();
}

LayerDesc layer_desc(FuzzedDataProvider* in) {
  LayerDesc d;
  d.router.input = pick<RouterInput>(in, 5);
  const bool lists = d.router.takes_lists(), logits = d.router.has_logits();
  d.router.order = logits ? pick<RouterOrder>(in, 2) : RouterOrder::select_then_score;
  d.tokens = number(in, 40);
  d.experts.hidden = width(in);
  d.experts.intermediate = width(in);
  d.router.experts = number(in, 20);
  d.router.top_k = number(in, lists ? 0 : 6);
  d.experts.dtype = pick<DType>(in, 2);
  d.experts.activation = any_activation(in);
  d.experts.w1_layout = pick<W1Layout>(in, 5);
  d.router.renormalize = logits && in->ConsumeBool();
  if (in->ConsumeBool()) any_router_options(in, &d.router);
  d.experts.bias = in->ConsumeBool();
  d.experts.inference = in->ConsumeIntegralInRange(0, 7) == 0;
  d.experts.recompute = pick<Recompute>(in, 2);
  d.router.list_length = number(in, lists ? 100 : 0);
  d.router.assume_sorted = in->ConsumeIntegralInRange(0, 3) == 0;
  d.rounding.tile = in->ConsumeIntegralInRange(0, 3) == 0 ? number(in, 40) : 0;
  d.rounding.rule = pick<RoundingRule>(in, 6);
  return d;
}

bool small(const LayerDesc& d) {
  return d.tokens <= 40 && d.experts.hidden <= 40 && d.experts.intermediate <= 40 &&
         d.router.experts <= 20 && d.rows() <= 300 && (d.tokens > 0 || d.rows() == 0);
}

void run_small(const LayerDesc& desc, std::uint64_t seed, const Options& options) {
  const testkit::Problem problem = testkit::make_problem(testkit::custom_case(desc, seed));
  const testkit::LayerRun run = testkit::run_layer(problem, {}, options);
  require(run.status.ok(), run.status.message());
  require_none(run.damage);
  if (desc.rounding.tile > 0) {
    for (const std::int32_t count : run.counts) {
      require(count >= 0 && count <= desc.tokens && count % desc.rounding.tile == 0,
              "count is no multiple of the tile: " + std::to_string(count));
    }
  } else {
    const testkit::Grouping g = testkit::group(run.routing, desc.tokens, desc.router.experts);
    require(run.counts == g.counts, "counts are not those of the routing");
  }
}

void layer(FuzzedDataProvider* in) {
  const LayerDesc desc = layer_desc(in);
  const Device device = any_device(in);
  const Options options = any_options(in);
  const auto plan = make_plan(desc, device, options);
  if (!plan.ok()) return require_good_refusal(plan.status());
  require(plan.value().desc() == desc, "the plan's descriptor is another");
  require(plan.value().workspace_bytes() < kSane, "workspace_bytes overflowed");
  require(plan.value().saved_bytes().total() < kSane, "saved_bytes overflowed");
  require(!plan.value().explain().empty(), "no explanation");
  if (!small(desc) || options.threads > 8) return;
  run_small(desc, in->ConsumeIntegral<std::uint64_t>(), options);
}

/// A plan of a router, of experts or of sums is refused, or tells what it does.
template <class Desc>
void plan_part(FuzzedDataProvider* in, const Desc& desc) {
  const auto plan = make_plan(desc, any_device(in), any_options(in));
  if (!plan.ok()) return require_good_refusal(plan.status());
  require(plan.value().desc() == desc, "the plan's descriptor is another");
  require(!plan.value().forward_operations().empty(), "no operation");
  require(!plan.value().explain().empty(), "no explanation");
}

void operation(FuzzedDataProvider* in) {
  const std::int64_t tokens = number(in, 100), rows = number(in, 1000), hidden = width(in);
  const std::int64_t intermediate = width(in), experts = number(in, 300), top_k = number(in, 300);
  const auto dtype = pick<DType>(in, 3);
  const ActivationSpec activation = any_activation(in);
  const auto layout = pick<W1Layout>(in, 5);
  const auto input = pick<RouterInput>(in, 5);
  const auto order = pick<RouterOrder>(in, 2);
  const bool flag = in->ConsumeBool(), other = in->ConsumeBool();
  RouterDesc router{
      .experts = experts, .top_k = top_k, .input = input, .order = order, .renormalize = flag};
  if (other) any_router_options(in, &router);
  const GroupedDesc grouped{{.hidden = hidden,
                             .intermediate = intermediate,
                             .dtype = dtype,
                             .activation = activation,
                             .w1_layout = layout,
                             .bias = flag,
                             .inference = other},
                            tokens,
                            rows,
                            experts};
  switch (in->ConsumeIntegralInRange(0, 12)) {
    case 0:
      return plan_operation(in, RouterGemmDesc{pick<GemmPass>(in, 3), tokens, hidden, experts,
                                               dtype, flag, other, flag && other});
    case 1:
      return plan_operation(in, TopKDesc{{router}, tokens, dtype});
    case 2:
      return plan_operation(
          in, MetadataDesc{tokens, experts, flag ? top_k : 0, rows, other, number(in, 100)});
    case 3:
      return plan_operation(in, GroupedGemmDesc{{grouped}, pick<GemmOp>(in, 6)});
    case 4:
      return plan_operation(in, BiasGradDesc{{grouped}});
    case 5:
      return plan_operation(in, AggregateDesc{tokens, rows, hidden, top_k, dtype,
                                              flag ? experts : 0, other, flag && other});
    case 6:
      return plan_operation(in, ScoreGradDesc{{router}, tokens, rows, dtype});
    case 7:
      return plan_operation(in, AuxLossDesc{tokens, experts, dtype, flag, pick<RouterLoss>(in, 2),
                                            pick<RouterScore>(in, 3), number(in, 8), other});
    case 8:
      return plan_operation(
          in,
          TokenRoundingDesc{{router}, tokens, dtype, pick<RoundingRule>(in, 6), number(in, 1030)});
    case 9: {
      TokenRoundingGradDesc grad{{router}, tokens, dtype};
      grad.list_length = rows;
      return plan_operation(in, grad);
    }
    case 10:
      return plan_part(in, grouped);
    case 11: {
      RoutingDesc routing{{router}, tokens, hidden, dtype};
      routing.rounding = {number(in, 300), pick<RoundingRule>(in, 6)};
      routing.max_rows = flag ? number(in, 100) : 0;
      routing.inference = other;
      return plan_part(in, routing);
    }
    default:
      return plan_part(in,
                       CombineDesc{tokens, rows, hidden, top_k, dtype, flag ? experts : 0, other});
  }
}

}  // namespace
}  // namespace sonicmoe::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  FuzzedDataProvider in(data, size);
  in.ConsumeBool() ? sonicmoe::fuzz::layer(&in) : sonicmoe::fuzz::operation(&in);
  return 0;
}
