// From logits to scores, and back.
#include <algorithm>
#include <cmath>

#include "testkit/oracle.h"
#include "testkit/precision.h"

namespace sonicmoe::testkit {
namespace {

/// A token's K experts (sentinels left out) by the steps of RouterDesc.
template <class Real>
struct Token {
  std::vector<Real> p;       ///< score of each slot
  std::vector<Real> slope;   ///< dp/dz, but for what a softmax subtracts
  std::vector<Real> w;       ///< p, renormalised
  std::vector<Real> factor;  ///< scale and the expert's own, which take w to the score
  Real divisor = 1;          ///< of p
};

template <class Real>
Token<Real> token_of(const RouterDesc& d, const double* logits,
                     const std::vector<std::int64_t>& slots, const std::vector<std::int32_t>& ids,
                     const Tensor& expert_scale) {
  Token<Real> out;
  if (d.score == RouterScore::softmax) {
    const bool over_topk = d.order == RouterOrder::select_then_score;
    std::vector<Real> z(logits, logits + d.experts);
    if (over_topk) {
      z.clear();
      for (const std::int64_t s : slots) z.push_back(static_cast<Real>(logits[ids[s]]));
    }
    const std::vector<Real> p = softmax(z);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      out.p.push_back(p[over_topk ? i : static_cast<std::size_t>(ids[slots[i]])]);
    }
    out.slope = out.p;
  } else {
    for (const std::int64_t s : slots) {
      const auto [value, slope] = score_of(d.score, static_cast<Real>(logits[ids[s]]));
      out.p.push_back(value);
      out.slope.push_back(slope);
    }
  }
  out.w = out.p;
  if (d.renormalize &&
      !(d.score == RouterScore::softmax && d.order == RouterOrder::select_then_score)) {
    Real sum = 0;
    for (const Real p : out.p) sum += p;
    out.divisor = sum + static_cast<Real>(d.eps);
    for (Real& w : out.w) w = out.divisor == 0 ? 0 : w / out.divisor;
  }
  for (const std::int64_t s : slots) {
    const Real own = expert_scale.empty() ? Real{1} : static_cast<Real>(expert_scale[ids[s]]);
    out.factor.push_back(static_cast<Real>(d.scale) * own);
  }
  return out;
}

}  // namespace

Tensor Oracle::scores(const Tensor& logits, const std::vector<std::int32_t>& ids,
                      const Tensor& expert_scale) const {
  const RouterDesc& d = desc_.router;
  Tensor out(desc_.tokens * d.top_k);
  in_precision(precision_, [&](auto real) {
    for (std::int64_t t = 0; t < desc_.tokens; ++t) {
      const auto slots = slots_of_token(ids, t, d.top_k, d.experts);
      const auto token =
          token_of<decltype(real)>(d, &logits[t * d.experts], slots, ids, expert_scale);
      for (std::size_t i = 0; i < slots.size(); ++i) {
        out[slots[i]] = single(token.w[i] * token.factor[i]);
      }
    }
  });
  return out;
}

Tensor Oracle::probabilities(const Tensor& logits, const std::vector<std::int32_t>& ids) const {
  const RouterDesc& d = desc_.router;
  Tensor out(desc_.tokens * d.top_k);
  in_precision(precision_, [&](auto real) {
    for (std::int64_t t = 0; t < desc_.tokens; ++t) {
      const auto slots = slots_of_token(ids, t, d.top_k, d.experts);
      const auto token = token_of<decltype(real)>(d, &logits[t * d.experts], slots, ids, {});
      for (std::size_t i = 0; i < slots.size(); ++i) out[slots[i]] = single(token.p[i]);
    }
  });
  return out;
}

Tensor Oracle::score_grad(const Tensor& logits, const std::vector<std::int32_t>& ids,
                          const Tensor& slot_dscores, const Tensor& dlogits_in,
                          const Tensor& expert_scale, bool magnitudes) const {
  const RouterDesc& d = desc_.router;
  const std::int64_t T = desc_.tokens, E = d.experts;
  const bool renormalizes = d.renormalize && !(d.score == RouterScore::softmax &&
                                               d.order == RouterOrder::select_then_score);
  Tensor out(T * E);
  in_precision(precision_, [&](auto real) {
    using Real = decltype(real);
    const Real minus = magnitudes ? Real{1} : Real{-1};
    for (std::int64_t t = 0; t < T; ++t) {
      const auto slots = slots_of_token(ids, t, d.top_k, E);
      const auto token = token_of<Real>(d, &logits[t * E], slots, ids, expert_scale);
      const std::size_t count = slots.size();
      std::vector<Real> dp(count);  // the gradient of w, then that of p
      Real inner = 0;
      for (std::size_t i = 0; i < count; ++i) {
        const double g = slot_dscores[slots[i]];
        dp[i] = static_cast<Real>(magnitudes ? std::fabs(g) : g) * token.factor[i];
        inner += dp[i] * token.w[i];
      }
      for (std::size_t i = 0; renormalizes && i < count; ++i) {
        dp[i] = token.divisor == 0 ? 0 : (dp[i] + minus * inner) / token.divisor;
      }
      std::vector<Real> g(E, Real{0});
      Real subtracted = 0;  // by a softmax
      if (d.score == RouterScore::softmax) {
        for (std::size_t i = 0; i < count; ++i) subtracted += dp[i] * token.p[i];
      }
      const bool all = d.score == RouterScore::softmax && d.order == RouterOrder::score_then_select;
      if (all && (!renormalizes || d.eps != 0)) {
        for (std::size_t i = 0; i < count; ++i) g[ids[slots[i]]] += dp[i];
        const std::vector<Real> p = softmax(std::vector<Real>(&logits[t * E], &logits[t * E] + E));
        for (std::int64_t e = 0; e < E; ++e) g[e] = p[e] * (g[e] + minus * subtracted);
      } else {
        // Renormalisation without eps has made `subtracted` 0 but for roundings.
        if (all) subtracted = 0;
        for (std::size_t i = 0; i < count; ++i) {
          g[ids[slots[i]]] += token.slope[i] * (dp[i] + minus * subtracted);
        }
      }
      for (std::int64_t e = 0; e < E; ++e) {
        if (!dlogits_in.empty()) g[e] += static_cast<Real>(dlogits_in[t * E + e]);
        out[t * E + e] = store_as(g[e], logits_type());
      }
    }
  });
  return out;
}

Tensor Oracle::expert_scale_grad(const Tensor& logits, const std::vector<std::int32_t>& ids,
                                 const Tensor& slot_dscores) const {
  const RouterDesc& d = desc_.router;
  Tensor out(d.experts);
  in_precision(precision_, [&](auto real) {
    using Real = decltype(real);
    std::vector<Real> sums(d.experts, Real{0});
    for (std::int64_t t = 0; t < desc_.tokens; ++t) {
      const auto slots = slots_of_token(ids, t, d.top_k, d.experts);
      const auto token = token_of<Real>(d, &logits[t * d.experts], slots, ids, {});
      for (std::size_t i = 0; i < slots.size(); ++i) {
        const Real term = static_cast<Real>(slot_dscores[slots[i]]) * token.w[i];
        sums[ids[slots[i]]] += term * token.factor[i];
      }
    }
    for (std::int64_t e = 0; e < d.experts; ++e) out[e] = single(sums[e]);
  });
  return out;
}

Tensor Oracle::logit_bias_grad(const Tensor& dlogits) const {
  const std::int64_t T = desc_.tokens, E = desc_.router.experts;
  Tensor out(E);
  in_precision(precision_, [&](auto real) {
    std::vector<decltype(real)> sums(E, decltype(real){0});
    for (std::int64_t i = 0; i < T * E; ++i) {
      sums[i % E] += static_cast<decltype(real)>(dlogits[i]);
    }
    for (std::int64_t e = 0; e < E; ++e) out[e] = single(sums[e]);
  });
  return out;
}

}  // namespace sonicmoe::testkit
