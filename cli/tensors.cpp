#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>

#include "testkit/numbers.h"

namespace sonicmoe::cli {
namespace {

constexpr double kActivationScale = 0.2;
constexpr double kWeightScale = 0.02;

}  // namespace

Sizes::Sizes(const LayerDesc& desc)
    : t(desc.tokens),
      d(desc.experts.hidden),
      n(desc.experts.intermediate),
      e(desc.router.experts),
      k(desc.router.top_k),
      r(desc.rows()),
      w(desc.experts.preact_width()) {}

LayerTensors::LayerTensors(const LayerDesc& desc, const SavedBytes& saved, std::uint64_t seed,
                           double skew, Device device)
    : draws(seed), router_(desc.router) {
  const Sizes s(desc);
  const auto random = [&](std::int64_t elements, double scale) {
    return make_random(elements, desc.experts.dtype, scale, seed++, device);
  };
  const auto empty = [&](std::int64_t elements) {
    return make_tensor(elements, desc.experts.dtype, device);
  };

  const auto floats = [&](bool wanted, double scale) {
    return make_random(wanted ? s.e : 0, DType::f32, scale, seed++, device);
  };
  const DType dtype = desc.experts.dtype;
  const DType logits_type = router_.logits_dtype(dtype),
              router_type = router_.router_w_dtype(dtype);

  x = random(s.t * s.d, kActivationScale);
  router_w = make_random(s.e * s.d, router_type, kWeightScale, seed++, device);
  if (skew > 0) skew_router(desc, skew);
  w1 = random(s.e * s.w * s.d, kWeightScale);
  w2 = random(s.e * s.d * s.n, kWeightScale);
  if (desc.experts.bias) {
    b1 = random(s.e * s.w, kWeightScale);
    b2 = random(s.e * s.d, kWeightScale);
  }
  logit_bias = floats(router_.logit_bias, kActivationScale);
  selection_bias = floats(router_.selection_bias, kWeightScale);
  expert_scale = floats(router_.expert_scale, 1);
  o = empty(s.t * s.d);
  logits = make_tensor(s.t * s.e, logits_type, device);
  counts = Buffer(static_cast<std::size_t>(s.e) * sizeof(std::int32_t), device);
  if (!router_.projects()) route(desc, device);
  if (desc.experts.inference) return;

  preact = Buffer(saved.preact, device);
  routing = Buffer(saved.routing, device);
  dout = random(s.t * s.d, kActivationScale);
  dx = empty(s.t * s.d);
  if (router_.projects()) drouter_w = make_tensor(s.e * s.d, router_type, device);
  if (router_.has_logits() && !router_.projects()) {
    dlogits = make_tensor(s.t * s.e, logits_type, device);
  }
  if (router_.logit_bias) dlogit_bias = make_tensor(s.e, DType::f32, device);
  if (router_.expert_scale) dexpert_scale = make_tensor(s.e, DType::f32, device);
  if (!router_.has_logits()) dscores = make_tensor(s.t * s.k, DType::f32, device);
  const DType grads_type = desc.experts.f32_weight_grads ? DType::f32 : dtype;
  dw1 = make_tensor(s.e * s.w * s.d, grads_type, device);
  dw2 = make_tensor(s.e * s.d * s.n, grads_type, device);
  if (!desc.experts.dpreact_in_workspace) dpreact = empty(s.r * s.w);
  if (desc.experts.bias) {
    db1 = empty(s.e * s.w);
    db2 = empty(s.e * s.d);
  }
}

/// Runs the operations that the layer leaves to its caller.
void LayerTensors::route(const LayerDesc& desc, Device device) {
  const Sizes s(desc);
  const auto run = [&](const auto& op, const auto& args) {
    const auto plan = make_plan(op, device);
    Status status = plan.status();
    if (plan.ok()) {
      const Buffer workspace(plan->workspace_bytes(), device);
      status = plan->run(args, workspace.workspace());
      (void)counts.contents<std::int32_t>();  // the device is done with the workspace
    }
    if (!status.ok()) throw std::runtime_error(std::string("router: ") + status.message());
  };
  run(RouterGemmDesc{GemmPass::forward, s.t, s.d, s.e, desc.experts.dtype, false,
                     router_.f32_logits},
      RouterGemmArgs{.x = x.data(), .w = router_w.data(), .logits = logits.data()});
  if (router_.takes_ids()) {
    ids = make_tensor(s.t * s.k, DType::f32, device);
    weights = make_tensor(s.t * s.k, DType::f32, device);
    const RouterDesc chooses{.experts = s.e, .top_k = s.k};
    run(TopKDesc{{chooses}, s.t, router_.logits_dtype(desc.experts.dtype)},
        TopKArgs{
            .logits = logits.data(), .scores = weights.as<float>(), .ids = ids.as<std::int32_t>()});
  }
  router_w = {};
  if (router_.has_logits()) weights = {};
  if (!router_.has_logits()) logits = {};
}

/// Column 0 of x becomes ones, that of the router's weights what is added to each expert's logits.
void LayerTensors::skew_router(const LayerDesc& desc, double skew) const {
  const Sizes s(desc);
  const auto set_first_column = [&](const Buffer& matrix, const std::vector<double>& column) {
    auto bytes = matrix.contents<std::byte>();
    const DType type = matrix.data() == router_w.data() ? router_.router_w_dtype(desc.experts.dtype)
                                                        : desc.experts.dtype;
    const auto values = testkit::encode(column, type);
    const std::size_t size = size_of(type);
    for (std::size_t row = 0; row < column.size(); ++row) {
      std::copy_n(&values[row * size], size, &bytes[row * static_cast<std::size_t>(s.d) * size]);
    }
    matrix.upload(bytes.data(), bytes.size());
  };
  // Not std::shuffle, whose order is the standard library's own.
  std::vector<std::size_t> by_popularity(static_cast<std::size_t>(s.e));
  std::iota(by_popularity.begin(), by_popularity.end(), std::size_t{0});
  std::mt19937_64 engine(draws);
  for (std::size_t i = by_popularity.size() - 1; i > 0; --i) {
    std::swap(by_popularity[i], by_popularity[engine() % (i + 1)]);
  }
  const double deviation = kActivationScale * kWeightScale * std::sqrt(static_cast<double>(s.d));
  std::vector<double> added(by_popularity.size());
  for (std::size_t i = 0; i < added.size(); ++i) {
    added[by_popularity[i]] = -skew * deviation * std::log(static_cast<double>(i + 1));
  }
  set_first_column(router_w, added);
  set_first_column(x, std::vector<double>(static_cast<std::size_t>(s.t), 1.0));
}

ForwardArgs LayerTensors::forward_args() const {
  ForwardArgs args;
  args.x = x.data();
  args.router_w = router_w.data();
  args.logit_bias = logit_bias.as<float>();
  args.selection_bias = selection_bias.as<float>();
  args.expert_scale = expert_scale.as<float>();
  args.w1 = w1.data();
  args.b1 = b1.data();
  args.w2 = w2.data();
  args.b2 = b2.data();
  args.o = o.data();
  args.logits = logits.data();
  args.given_logits = logits.data();
  args.given_ids = ids.as<std::int32_t>();
  args.given_weights = weights.as<float>();
  args.counts = counts.as<std::int32_t>();
  args.preact = preact.data();
  args.routing = routing.data();
  args.seed = draws;
  return args;
}

RowCounts LayerTensors::row_counts() const {
  const auto each = counts.contents<std::int32_t>();
  const auto [fewest, most] = std::minmax_element(each.begin(), each.end());
  return {std::accumulate(each.begin(), each.end(), std::int64_t{0}), *fewest, *most};
}

BackwardArgs LayerTensors::backward_args() const {
  BackwardArgs args;
  args.x = x.data();
  args.router_w = router_w.data();
  args.expert_scale = expert_scale.as<float>();
  args.w1 = w1.data();
  args.b1 = b1.data();
  args.w2 = w2.data();
  args.b2 = b2.data();
  args.logits = logits.data();
  args.preact = preact.data();
  args.dpreact = dpreact.data();
  args.routing = routing.data();
  args.dout = dout.data();
  args.dx = dx.data();
  args.drouter_w = drouter_w.data();
  args.dlogit_bias = dlogit_bias.as<float>();
  args.dexpert_scale = dexpert_scale.as<float>();
  args.dgiven_logits = dlogits.data();
  args.dscores = dscores.as<float>();
  args.dw1 = dw1.data();
  args.db1 = db1.data();
  args.dw2 = dw2.data();
  args.db2 = db2.data();
  return args;
}

double total_bytes(std::initializer_list<const Buffer*> buffers) {
  double bytes = 0;
  for (const Buffer* buffer : buffers) bytes += static_cast<double>(buffer->bytes());
  return bytes;
}

}  // namespace sonicmoe::cli
