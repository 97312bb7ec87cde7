#include "testkit/inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "testkit/parallel.h"

namespace sonicmoe::testkit {
namespace {

/// One stream of random numbers per tensor.
enum Stream : std::uint64_t {
  kX,
  kRouter,
  kW1,
  kB1,
  kW2,
  kB2,
  kDout,
  kDlogits,
  kTokens,
  kExperts,
  kScores,
  kPreact,
  kAct,
  kDpreact,
  kScaledAct,
  kLogitBias,
  kSelectionBias,
  kExpertScale
};

Tensor normal_tensor(std::uint64_t seed, Stream stream, std::int64_t size, double scale,
                     DType type) {
  const Random random(seed, stream);
  Tensor out(size);
  for_each_index(size, [&](auto i) { out[i] = round_to(scale * random.normal(i), type); });
  return out;
}

bool is_empty_end(std::int64_t e, std::int64_t E) { return e == 0 || e == E / 2 || e == E - 1; }

/// How much the router prefers an expert, on top of random logits of size one.
double preference(RoutingKind kind, std::int64_t e, const LayerDesc& desc) {
  const std::int64_t E = desc.router.experts;
  // 3.47 * (norm of x) bounds no logit strictly, but 40 is past anything that sums of such numbers
  // reach, and e^-40 of a probability still shows in fp32.
  constexpr double kDecisive = 40;
  if (kind == RoutingKind::empty_ends && E - 3 >= desc.router.top_k && is_empty_end(e, E)) {
    return -kDecisive;
  }
  if (kind == RoutingKind::one_expert && e == E - 1) return kDecisive / 4;
  return 0;
}

Tensor router_weights(const Case& c) {
  const LayerDesc& desc = c.desc;
  const std::int64_t E = desc.router.experts, d = desc.experts.hidden;
  const double scale = c.scale == Scale::benchmark ? 0.02 : 1 / std::sqrt(d);
  Tensor w =
      normal_tensor(c.seed, kRouter, E * d, scale, desc.router.router_w_dtype(desc.experts.dtype));
  for (std::int64_t e = 0; e < E; ++e) {
    double* row = &w[e * d];
    if (c.routing == RoutingKind::all_equal) std::fill(row, row + d, 0.0);
    if (c.routing == RoutingKind::ties && e % 2 == 1) std::copy(row - d, row, row);
    // x[t][0] = 1 in these kinds, see make_problem().
    const double prefer = preference(c.routing, e, desc);
    if (prefer != 0) row[0] = prefer;
  }
  return w;
}

/// Logits of the caller, of size one, that lead to the same kind of routing.
Tensor logits_of(const Case& c) {
  const LayerDesc& desc = c.desc;
  const std::int64_t E = desc.router.experts;
  const DType type = desc.router.logits_dtype(desc.experts.dtype);
  Tensor out = normal_tensor(c.seed, kRouter, desc.tokens * E, 1, type);
  for (std::int64_t i = 0; i < desc.tokens * E; ++i) {
    const std::int64_t e = i % E;
    if (c.routing == RoutingKind::all_equal) out[i] = 0;
    if (c.routing == RoutingKind::ties && e % 2 == 1) out[i] = out[i - 1];
    out[i] = round_to(out[i] + preference(c.routing, e, desc), type);
  }
  return out;
}

/// A number for each expert, such that the case's kind of routing stays.
Tensor expert_numbers(const Case& c, Stream stream, double scale, double mean) {
  const std::int64_t E = c.desc.router.experts;
  Tensor out = normal_tensor(c.seed, stream, E, scale, DType::f32);
  for (std::int64_t e = 0; e < E; ++e) {
    if (c.routing != RoutingKind::random && stream != kExpertScale) out[e] = 0;
    out[e] = round_to(out[e] + mean, DType::f32);
  }
  return out;
}

std::int32_t list_expert(RoutingKind kind, const Random& random, std::int64_t i,
                         std::int64_t experts) {
  if (kind == RoutingKind::one_expert) return static_cast<std::int32_t>(experts - 1);
  if (kind == RoutingKind::sentinels_only) {
    return static_cast<std::int32_t>(i % 3 == 2 ? -1 : experts + i % 2);
  }
  if (kind == RoutingKind::empty_ends && experts > 3) {
    for (std::uint64_t attempt = i;; attempt += 0x100000000) {
      const std::int64_t e = random.below(attempt, experts);
      if (!is_empty_end(e, experts)) return static_cast<std::int32_t>(e);
    }
  }
  if (kind == RoutingKind::hostile && random.below(i + 0x200000000, 4) == 0) {
    using Limits = std::numeric_limits<std::int32_t>;
    const auto end = static_cast<std::int32_t>(experts);
    const std::array sentinels = {end, end + 1, -1, Limits::min(), Limits::max(), -end};
    return sentinels[i % sentinels.size()];
  }
  return static_cast<std::int32_t>(random.below(i, experts));
}

Routing make_lists(const Case& c) {
  const LayerDesc& desc = c.desc;
  const Random tokens(c.seed, kTokens), experts(c.seed, kExperts);
  constexpr std::array kCounts = {127, 128, 129, 0, 1, 255, 256, 257};
  Routing lists;
  std::int64_t tile_expert = 0, left = kCounts[0];
  for (std::int64_t i = 0; i < desc.router.list_length; ++i) {
    auto token = tokens.below(i, desc.tokens);
    std::int32_t expert = list_expert(c.routing, experts, i, desc.router.experts);
    if (c.routing == RoutingKind::tile_counts) {
      while (left == 0) left = kCounts[++tile_expert % kCounts.size()];
      --left;
      expert = static_cast<std::int32_t>(tile_expert);
    }
    if (c.routing == RoutingKind::hostile) {
      token -= token % 3 == 2;  // no third token has an expert
      if (i % 5 == 4) {         // a duplicate of the pair before
        token = lists.tokens.back();
        expert = lists.experts.back();
      }
    }
    lists.tokens.push_back(static_cast<std::int32_t>(token));
    lists.experts.push_back(expert);
  }
  if (desc.router.assume_sorted) std::sort(lists.tokens.begin(), lists.tokens.end());
  return lists;
}

/// Ids (T, K): K different experts a token, but for the kinds of lists and ids.
Routing make_ids(const Case& c) {
  const std::int64_t E = c.desc.router.experts, K = c.desc.router.top_k;
  const bool different = c.routing != RoutingKind::hostile &&
                         c.routing != RoutingKind::one_expert &&
                         c.routing != RoutingKind::sentinels_only;
  const Random random(c.seed, kExperts);
  std::vector<std::int32_t> ids, order(static_cast<std::size_t>(E));
  for (std::int64_t t = 0; t < c.desc.tokens; ++t) {
    std::iota(order.begin(), order.end(), 0);
    const bool avoids = c.routing == RoutingKind::empty_ends && E - 3 >= K;
    std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      if (avoids && is_empty_end(a, E) != is_empty_end(b, E)) return is_empty_end(b, E);
      return std::pair(random.bits(t * E + a), a) < std::pair(random.bits(t * E + b), b);
    });
    for (std::int64_t k = 0; k < K; ++k) {
      const std::int64_t i = t * K + k;
      std::int32_t id = different ? order[k] : list_expert(c.routing, random, i, E);
      if (c.routing == RoutingKind::hostile && i % 5 == 4 && k > 0) id = ids.back();
      if (c.routing == RoutingKind::hostile && t % 3 == 2) id = t % 2 == 0 ? -1 : INT32_MAX;
      ids.push_back(id);
    }
  }
  return routing_of_ids(ids, K);
}

/// Contiguous rows: list entry r has row r as its token, and names its owner. The rows that the
/// kind gives an expert follow each other; those of sentinels come last. `hostile`: an expert's
/// part of the rows ends with some that it does not own.
Routing make_owners(const Case& c) {
  const std::int64_t rows = c.desc.tokens, experts = c.desc.router.experts;
  Routing lists = make_lists(c);
  std::iota(lists.tokens.begin(), lists.tokens.end(), 0);
  std::ranges::sort(lists.experts, {}, [](auto e) { return static_cast<std::uint32_t>(e); });
  if (c.routing != RoutingKind::hostile) return lists;
  const Random random(c.seed, kExperts);
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int64_t begin = e * rows / experts, end = (e + 1) * rows / experts;
    const std::int64_t owned = random.below(e, end - begin + 1);
    for (std::int64_t row = begin; row < end; ++row) {
      lists.experts[row] = static_cast<std::int32_t>(row < begin + owned ? e : experts);
    }
  }
  return lists;
}

Tensor integers(std::uint64_t seed, Stream stream, std::int64_t size, std::int64_t magnitude) {
  const Random random(seed, stream);
  Tensor out(size);
  for_each_index(size, [&](auto i) {
    out[i] = static_cast<double>(random.below(i, 2 * magnitude + 1) - magnitude);
  });
  return out;
}

/// 64, 0 or -64; with a finite limit also the limit and 8 below it.
double gate_value(const Random& random, std::uint64_t index, double limit) {
  if (std::isfinite(limit)) {
    const std::array values = {-64.0, 0.0, limit - 8, limit, 64.0};
    return values[random.below(index, 5)];
  }
  return 64.0 * static_cast<double>(random.below(index, 3) - 1);
}

}  // namespace

std::uint64_t Random::mix(std::uint64_t z) {
  z += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

double Random::normal(std::uint64_t index) const {
  const std::uint64_t b = bits(index);
  const auto sum =
      static_cast<double>((b & 0xffff) + ((b >> 16) & 0xffff) + ((b >> 32) & 0xffff) + (b >> 48));
  // Mean of the sum 2 * 65535; variance 4 * 65536^2 / 12.
  return (sum - 131070.0) * (1.7320508075688772 / 65536.0);
}

Problem make_problem(const Case& c) {
  const LayerDesc& desc = c.desc;
  const std::int64_t T = desc.tokens, d = desc.experts.hidden, n = desc.experts.intermediate,
                     E = desc.router.experts;
  const std::int64_t W = desc.experts.preact_width();
  const DType type = desc.experts.dtype;
  const bool bench = c.scale == Scale::benchmark;
  Problem p;
  p.desc = desc;
  p.x = normal_tensor(c.seed, kX, T * d, bench ? 0.2 : 1, type);
  p.dout = normal_tensor(c.seed, kDout, T * d, bench ? 0.2 : 1, type);
  p.w1 = normal_tensor(c.seed, kW1, E * W * d, bench ? 0.02 : 1 / std::sqrt(d), type);
  p.w2 = normal_tensor(c.seed, kW2, E * d * n, bench ? 0.02 : 1 / std::sqrt(n), type);
  if (desc.experts.bias) {
    p.b1 = normal_tensor(c.seed, kB1, E * W, bench ? 0.02 : 0.5, type);
    p.b2 = normal_tensor(c.seed, kB2, E * d, bench ? 0.02 : 0.5, type);
  }
  if (desc.router.takes_lists()) p.lists = desc.experts.gathers() ? make_lists(c) : make_owners(c);
  if (desc.router.takes_ids()) p.lists = make_ids(c);
  if (!desc.router.has_logits()) {
    const Random random(c.seed, kScores);
    for (std::size_t i = 0; i < p.lists.slots(); ++i) {
      p.list_scores.push_back(round_to(0.1 + random.uniform(i), DType::f32));
    }
  } else if (c.outside_dlogits) {
    p.dlogits = normal_tensor(c.seed, kDlogits, T * E, 0.5, desc.router.logits_dtype(type));
  }
  if (desc.router.logit_bias) p.logit_bias = expert_numbers(c, kLogitBias, 0.5, 0);
  if (desc.router.selection_bias) p.selection_bias = expert_numbers(c, kSelectionBias, 0.25, 0);
  if (desc.router.expert_scale) p.expert_scale = expert_numbers(c, kExpertScale, 0.25, 1);
  if (desc.router.projects()) {
    p.router_w = router_weights(c);
    if (c.routing == RoutingKind::empty_ends || c.routing == RoutingKind::one_expert) {
      for (std::int64_t t = 0; t < T; ++t) p.x[t * d] = 1;
    }
  } else if (desc.router.has_logits()) {
    p.logits = logits_of(c);
  }
  return p;
}

GemmInputs integer_inputs(const LayerDesc& desc, Routing routing, std::uint64_t seed) {
  const std::int64_t T = desc.tokens, d = desc.experts.hidden, n = desc.experts.intermediate,
                     E = desc.router.experts;
  const std::int64_t W = desc.experts.preact_width();
  const auto R = static_cast<std::int64_t>(group(routing, T, E).rows());
  const auto slots = static_cast<std::int64_t>(routing.slots());
  const double limit = desc.experts.activation.limit;
  GemmInputs out;
  constexpr std::array kScoreValues = {0.5, 2.0, -0.5, 1.0, -2.0};
  const Random scores(seed, kScores);
  for (std::int64_t i = 0; i < slots; ++i) {
    out.slot_scores.push_back(kScoreValues[scores.below(i, 5)]);
  }
  out.routing = std::move(routing);
  out.x = integers(seed, kX, T * d, 2);
  out.dout = integers(seed, kDout, T * d, 2);
  out.w1 = integers(seed, kW1, E * W * d, 3);
  out.b1 = integers(seed, kB1, E * W, 5);
  out.w2 = integers(seed, kW2, E * d * n, 3);
  out.b2 = integers(seed, kB2, E * d, 5);
  out.preact = integers(seed, kPreact, R * W, 4);
  out.act = integers(seed, kAct, R * n, 3);
  out.dpreact = integers(seed, kDpreact, R * W, 3);
  out.scaled_act = integers(seed, kScaledAct, R * n, 3);

  // Gates: of every eight columns of x the first is the selector. Each token has one selector that
  // is 1, the others are 0; gate rows of W1 are 64, 0 or -64 there and 0 elsewhere.
  const Random choose(seed, kTokens), gates(seed, kExperts);
  for (std::int64_t t = 0; t < T; ++t) {
    const std::int64_t chosen = choose.below(t, d / 8);
    for (std::int64_t i = 0; i < d / 8; ++i) out.x[t * d + 8 * i] = i == chosen;
  }
  for_each_index(E * n * d, [&](auto at) {
    const std::int64_t e = at / (n * d), i = at % d;
    out.w1[at + e * (W - n) * d] = i % 8 == 0 ? gate_value(gates, at, limit) : 0;
  });
  for (std::int64_t e = 0; e < E; ++e) std::fill_n(&out.b1[e * W], n, 0.0);
  const Random preact(seed, kPreact);
  for (std::int64_t r = 0; r < R; ++r) {
    for (std::int64_t j = 0; j < n; ++j) {
      out.preact[r * W + j] = gate_value(preact, r * W + j, limit);
    }
    for (std::int64_t j = n; j < W && std::isfinite(limit); ++j) {
      const std::array ups = {-64.0, -limit, limit, 64.0};
      const std::int64_t draw = preact.below(r * W + j, 16);
      if (draw < 4) out.preact[r * W + j] = ups[draw];
    }
  }
  return out;
}

}  // namespace sonicmoe::testkit
