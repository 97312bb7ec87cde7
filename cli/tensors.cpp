#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "verify/numbers.h"

namespace sonicmoe::cli {
namespace {

constexpr double kActivationScale = 0.2;
constexpr double kWeightScale = 0.02;

}  // namespace

Sizes::Sizes(const LayerDesc& desc)
    : t(desc.tokens),
      d(desc.hidden),
      n(desc.intermediate),
      e(desc.experts),
      k(desc.top_k),
      r(desc.rows()),
      w(desc.preact_width()) {}

LayerTensors::LayerTensors(const LayerDesc& desc, const SavedBytes& saved, std::uint64_t seed,
                           double skew, Device device)
    : draws(seed) {
  const Sizes s(desc);
  const auto random = [&](std::int64_t elements, double scale) {
    return make_random(elements, desc.dtype, scale, seed++, device);
  };
  const auto empty = [&](std::int64_t elements) {
    return make_tensor(elements, desc.dtype, device);
  };

  x = random(s.t * s.d, kActivationScale);
  router_w = random(s.e * s.d, kWeightScale);
  if (skew > 0) skew_router(desc, skew);
  w1 = random(s.e * s.w * s.d, kWeightScale);
  w2 = random(s.e * s.d * s.n, kWeightScale);
  if (desc.bias) {
    b1 = random(s.e * s.w, kWeightScale);
    b2 = random(s.e * s.d, kWeightScale);
  }
  o = empty(s.t * s.d);
  logits = empty(s.t * s.e);
  counts = Buffer(static_cast<std::size_t>(s.e) * sizeof(std::int32_t), device);
  if (desc.inference) return;

  preact = Buffer(saved.preact, device);
  routing = Buffer(saved.routing, device);
  dout = random(s.t * s.d, kActivationScale);
  dx = empty(s.t * s.d);
  drouter_w = empty(s.e * s.d);
  dw1 = empty(s.e * s.w * s.d);
  dw2 = empty(s.e * s.d * s.n);
  if (desc.bias) {
    db1 = empty(s.e * s.w);
    db2 = empty(s.e * s.d);
  }
}

/// Column 0 of x becomes ones, that of the router's weights what is added to each expert's logits.
void LayerTensors::skew_router(const LayerDesc& desc, double skew) const {
  const Sizes s(desc);
  const auto set = [&](const Buffer& matrix, std::int64_t row, double value) {
    const auto bytes = verify::encode({value}, desc.dtype);
    matrix.upload(bytes.data(), bytes.size(), static_cast<std::size_t>(row * s.d) * bytes.size());
  };
  std::vector<std::int64_t> by_popularity(static_cast<std::size_t>(s.e));
  std::iota(by_popularity.begin(), by_popularity.end(), 0);
  std::shuffle(by_popularity.begin(), by_popularity.end(), std::mt19937_64(draws));
  const double deviation = kActivationScale * kWeightScale * std::sqrt(static_cast<double>(s.d));
  for (std::int64_t i = 0; i < s.e; ++i) {
    set(router_w, by_popularity[static_cast<std::size_t>(i)],
        -skew * deviation * std::log(static_cast<double>(i + 1)));
  }
  for (std::int64_t t = 0; t < s.t; ++t) set(x, t, 1.0);
}

ForwardArgs LayerTensors::forward_args() const {
  ForwardArgs args;
  args.x = x.data();
  args.router_w = router_w.data();
  args.w1 = w1.data();
  args.b1 = b1.data();
  args.w2 = w2.data();
  args.b2 = b2.data();
  args.o = o.data();
  args.logits = logits.data();
  args.counts = counts.as<std::int32_t>();
  args.preact = preact.data();
  args.routing = routing.data();
  args.seed = draws;
  return args;
}

std::int64_t LayerTensors::rows() const {
  const auto all = counts.contents<std::int32_t>();
  return std::accumulate(all.begin(), all.end(), std::int64_t{0});
}

std::pair<std::int32_t, std::int32_t> LayerTensors::fewest_and_most_rows() const {
  const auto all = counts.contents<std::int32_t>();
  const auto [fewest, most] = std::minmax_element(all.begin(), all.end());
  return {*fewest, *most};
}

BackwardArgs LayerTensors::backward_args() const {
  BackwardArgs args;
  args.x = x.data();
  args.router_w = router_w.data();
  args.w1 = w1.data();
  args.w2 = w2.data();
  args.b2 = b2.data();
  args.logits = logits.data();
  args.preact = preact.data();
  args.routing = routing.data();
  args.dout = dout.data();
  args.dx = dx.data();
  args.drouter_w = drouter_w.data();
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
