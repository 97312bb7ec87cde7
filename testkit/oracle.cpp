#include "testkit/oracle.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <type_traits>

#include "testkit/precision.h"

namespace sonicmoe::testkit {
namespace {

/// a (m, k) times b (k, n): finish(i, sums) gets each row of n sums. Both operands are functions
/// of their indices; sums run over k in ascending order.
template <class Real, class A, class B, class Finish>
void multiply(std::int64_t m, std::int64_t n, std::int64_t k, A a, B b, Finish finish) {
  if (m == 0) return;
  std::vector<Real> other(k * n);
  for (std::int64_t i = 0; i < k; ++i) {
    for (std::int64_t j = 0; j < n; ++j) other[i * n + j] = static_cast<Real>(b(i, j));
  }
// Waking threads costs more than a small product.
#pragma omp parallel for schedule(dynamic) if (m * n * k > 1000000)
  for (std::int64_t i = 0; i < m; ++i) {
    std::vector<Real> sums(n, Real{0});
    for (std::int64_t l = 0; l < k; ++l) {
      const Real factor = static_cast<Real>(a(i, l));
      const Real* row = other.data() + l * n;
      for (std::int64_t j = 0; j < n; ++j) sums[j] += factor * row[j];
    }
    finish(i, sums.data());
  }
}

template <class Real>
struct Curve {
  Real value;
  Real slope;
};

template <class Real>
Curve<Real> silu(Real x) {
  const Real s = 1 / (1 + std::exp(-x));
  return {x * s, s * (1 + x * (1 - s))};
}

template <class Real>
Curve<Real> sigmoid_times(Real x, Real alpha) {  // x sigmoid(alpha x)
  const Real s = 1 / (1 + std::exp(-alpha * x));
  return {x * s, s + alpha * x * s * (1 - s)};
}

template <class Real>
Curve<Real> scaled_tanh(Real x, Real scale) {  // scale tanh(x / scale)
  const Real t = std::tanh(x / scale);
  return {scale * t, 1 - t * t};
}

template <class Real>
Curve<Real> gelu(Real x) {
  const Real cdf = std::erfc(-x * std::numbers::sqrt2_v<Real> / 2) / 2;
  const Real pdf =
      std::exp(-x * x / 2) * std::numbers::inv_sqrtpi_v<Real> * std::numbers::sqrt2_v<Real> / 2;
  return {x * cdf, cdf + x * pdf};
}

template <class Real>
Curve<Real> gelu_tanh(Real x) {
  const Real c = std::numbers::sqrt2_v<Real> * std::numbers::inv_sqrtpi_v<Real>;
  const Real cubic = static_cast<Real>(0.044715);
  const Real t = std::tanh(c * (x + cubic * x * x * x));
  return {x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t * t) * c * (1 + 3 * cubic * x * x) / 2};
}

template <class Real>
Curve<Real> relu(Real x) {
  return {std::max(x, Real{0}), Real(x > 0)};
}

template <class Real>
Curve<Real> relu_sq(Real x) {
  const Real r = std::max(x, Real{0});
  return {r * r, 2 * r};
}

/// An activation's value a, and what the gradient `da` of a becomes for gate and up.
template <class Real>
struct Activated {
  Real value;
  Real dgate;
  Real dup;
};

/// Without a gate, `gate` is h, and `up` is not looked at.
template <class Real>
Activated<Real> activate(const ActivationSpec& activation, Real gate, Real up, Real da) {
  const auto gated = [&](Curve<Real> f) -> Activated<Real> {
    return {f.value * up, da * up * f.slope, da * f.value};
  };
  const auto plain = [&](Curve<Real> f) -> Activated<Real> { return {f.value, da * f.slope, 0}; };
  const Real limit = static_cast<Real>(activation.limit);
  const auto clamped = [&](Curve<Real> f, bool gate_inside, Real offset = 0) -> Activated<Real> {
    const Real inside = std::clamp(up, -limit, limit), factor = inside + offset;
    return {f.value * factor, gate_inside ? da * factor * f.slope : 0,
            inside == up ? da * f.value : 0};
  };
  switch (activation.kind) {
    case Activation::swiglu:
      return clamped(silu(std::min(gate, limit)), gate <= limit);
    case Activation::geglu:
      return gated(gelu(gate));
    case Activation::geglu_tanh:
      return gated(gelu_tanh(gate));
    case Activation::reglu:
      return gated(relu(gate));
    case Activation::relu:
      return plain(relu(gate));
    case Activation::relu_sq:
      return plain(relu_sq(gate));
    case Activation::gelu:
      return plain(gelu(gate));
    case Activation::gelu_tanh:
      return plain(gelu_tanh(gate));
    case Activation::silu:
      return plain(silu(gate));
    case Activation::swiglu_clamp_after: {
      const Curve<Real> f = silu(gate);
      return clamped({std::min(f.value, limit), f.slope}, f.value <= limit);
    }
    case Activation::swiglu_oai:
      return clamped(sigmoid_times(std::min(gate, limit), static_cast<Real>(activation.alpha)),
                     gate <= limit, 1);
    case Activation::situ_glu: {
      const Curve<Real> g = scaled_tanh(gate, static_cast<Real>(activation.alpha));
      const Curve<Real> u = scaled_tanh(up, static_cast<Real>(activation.beta));
      const Real s = 1 / (1 + std::exp(-gate));
      return {g.value * s * u.value, da * u.value * (g.slope * s + g.value * s * (1 - s)),
              da * g.value * s * u.slope};
    }
    case Activation::quick_geglu:
      return gated(sigmoid_times(gate, static_cast<Real>(1.702)));
  }
  return {};
}

}  // namespace

double Oracle::store_as(double value, DType type) const {
  return precision_ == Precision::exact ? value : round_to(value, type);
}
double Oracle::store(double value) const { return store_as(value, desc_.experts.dtype); }
double Oracle::single(double value) const { return store_as(value, DType::f32); }

Tensor Oracle::logits(const Tensor& x, const Tensor& router_w, const Tensor& logit_bias) const {
  const std::int64_t T = desc_.tokens, d = desc_.experts.hidden, E = desc_.router.experts;
  Tensor out(T * E);
  in_precision(precision_, [&](auto real) {
    multiply<decltype(real)>(
        T, E, d, [&](auto t, auto i) { return x[t * d + i]; },
        [&](auto i, auto e) { return router_w[e * d + i]; },
        [&](auto t, auto* sums) {
          for (std::int64_t e = 0; e < E; ++e) {
            if (!logit_bias.empty()) sums[e] += static_cast<decltype(real)>(logit_bias[e]);
            out[t * E + e] = store_as(sums[e], logits_type());
          }
        });
  });
  return out;
}

Tensor Oracle::router_dx(const Tensor& dlogits, const Tensor& router_w) const {
  const std::int64_t T = desc_.tokens, d = desc_.experts.hidden, E = desc_.router.experts;
  Tensor out(T * d);
  in_precision(precision_, [&](auto real) {
    multiply<decltype(real)>(
        T, d, E, [&](auto t, auto e) { return dlogits[t * E + e]; },
        [&](auto e, auto i) { return router_w[e * d + i]; },
        [&](auto t, auto* sums) {
          for (std::int64_t i = 0; i < d; ++i) out[t * d + i] = store(sums[i]);
        });
  });
  return out;
}

Tensor Oracle::router_dw(const Tensor& dlogits, const Tensor& x) const {
  const std::int64_t T = desc_.tokens, d = desc_.experts.hidden, E = desc_.router.experts;
  const DType type = desc_.router.router_w_dtype(desc_.experts.dtype);
  Tensor out(E * d);
  in_precision(precision_, [&](auto real) {
    multiply<decltype(real)>(
        E, d, T, [&](auto e, auto t) { return dlogits[t * E + e]; },
        [&](auto t, auto i) { return x[t * d + i]; },
        [&](auto e, auto* sums) {
          for (std::int64_t i = 0; i < d; ++i) out[e * d + i] = store_as(sums[i], type);
        });
  });
  return out;
}

Oracle::UpProj Oracle::up_proj(const Grouping& g, const Tensor& x, const Tensor& w1,
                               const Tensor& b1) const {
  const std::int64_t d = desc_.experts.hidden, n = desc_.experts.intermediate,
                     W = desc_.experts.preact_width();
  UpProj out{Tensor(g.rows() * W), Tensor(g.rows() * n)};
  in_precision(precision_, [&](auto real) {
    using Real = decltype(real);
    for (std::int64_t e = 0; e < desc_.router.experts; ++e) {
      const std::int64_t first = g.offsets[e];
      multiply<Real>(
          g.counts[e], W, d, [&](auto r, auto i) { return x[g.row_tokens[first + r] * d + i]; },
          [&](auto i, auto w) { return w1[(e * W + w) * d + i]; },
          [&](auto r, auto* h) {
            if (!b1.empty()) {
              for (std::int64_t w = 0; w < W; ++w) h[w] += static_cast<Real>(b1[e * W + w]);
            }
            for (std::int64_t w = 0; w < W; ++w) out.preact[(first + r) * W + w] = store(h[w]);
            // From h before it is rounded.
            for (std::int64_t j = 0; j < n; ++j) {
              out.act[(first + r) * n + j] =
                  store(activate<Real>(desc_.experts.activation, h[j], h[W - n + j], 0).value);
            }
          });
    }
  });
  return out;
}

Tensor Oracle::down_proj(const Grouping& g, const Tensor& act, const Tensor& w2, const Tensor& b2,
                         const Tensor& row_scores) const {
  const ScoreAt at = desc_.experts.score_at;
  const bool scores_product = at == ScoreAt::before_down || at == ScoreAt::after_down;
  const bool scores_bias = at == ScoreAt::after_down;
  const std::int64_t d = desc_.experts.hidden, n = desc_.experts.intermediate;
  Tensor out(g.rows() * d);
  in_precision(precision_, [&](auto real) {
    using Real = decltype(real);
    for (std::int64_t e = 0; e < desc_.router.experts; ++e) {
      const std::int64_t first = g.offsets[e];
      multiply<Real>(
          g.counts[e], d, n, [&](auto r, auto j) { return act[(first + r) * n + j]; },
          [&](auto j, auto i) { return w2[(e * d + i) * n + j]; },
          [&](auto r, auto* y) {
            const Real score = scores_product ? static_cast<Real>(row_scores[first + r]) : Real{1};
            for (std::int64_t i = 0; i < d; ++i) {
              const Real bias = b2.empty() ? Real{0} : static_cast<Real>(b2[e * d + i]);
              y[i] = score * y[i] + (scores_bias ? score * bias : bias);
              out[(first + r) * d + i] = store(y[i]);
            }
          });
    }
  });
  return out;
}

Oracle::DownProjDgrad Oracle::down_proj_dgrad(const Grouping& g, const Tensor& row_scores,
                                              const Tensor& dout, const Tensor& w2,
                                              const Tensor& preact) const {
  const std::int64_t d = desc_.experts.hidden, n = desc_.experts.intermediate,
                     W = desc_.experts.preact_width();
  const bool scored = desc_.experts.score_at != ScoreAt::none;
  DownProjDgrad out{Tensor(g.rows() * W), Tensor(g.rows() * n), Tensor(scored ? g.rows() : 0)};
  in_precision(precision_, [&](auto real) {
    using Real = decltype(real);
    for (std::int64_t e = 0; e < desc_.router.experts; ++e) {
      const std::int64_t first = g.offsets[e];
      multiply<Real>(
          g.counts[e], n, d, [&](auto r, auto i) { return dout[g.row_tokens[first + r] * d + i]; },
          [&](auto i, auto j) { return w2[(e * d + i) * n + j]; },
          [&](auto r, auto* unscaled) {  // dA' before the score
            const std::int64_t row = first + r;
            const Real score = scored ? static_cast<Real>(row_scores[row]) : Real{1};
            Real dscore = 0;
            for (std::int64_t j = 0; j < n; ++j) {
              const Real gate = static_cast<Real>(preact[row * W + j]);
              const Real up = static_cast<Real>(preact[row * W + W - n + j]);
              const Activated<Real> a =
                  activate<Real>(desc_.experts.activation, gate, up, score * unscaled[j]);
              out.dpreact[row * W + j] = store(a.dgate);
              if (is_glu(desc_.experts.activation)) out.dpreact[row * W + n + j] = store(a.dup);
              out.scaled_act[row * n + j] = store(score * a.value);
              dscore += unscaled[j] * a.value;
            }
            if (scored) out.row_dscores[row] = single(dscore);
          });
    }
  });
  return out;
}

Tensor Oracle::up_proj_dgrad(const Grouping& g, const Tensor& dpreact, const Tensor& w1) const {
  const std::int64_t d = desc_.experts.hidden, W = desc_.experts.preact_width();
  Tensor out(g.rows() * d);
  in_precision(precision_, [&](auto real) {
    for (std::int64_t e = 0; e < desc_.router.experts; ++e) {
      const std::int64_t first = g.offsets[e];
      multiply<decltype(real)>(
          g.counts[e], d, W, [&](auto r, auto w) { return dpreact[(first + r) * W + w]; },
          [&](auto w, auto i) { return w1[(e * W + w) * d + i]; },
          [&](auto r, auto* sums) {
            for (std::int64_t i = 0; i < d; ++i) out[(first + r) * d + i] = store(sums[i]);
          });
    }
  });
  return out;
}

Tensor Oracle::down_proj_wgrad(const Grouping& g, const Tensor& dout,
                               const Tensor& scaled_act) const {
  const std::int64_t d = desc_.experts.hidden, n = desc_.experts.intermediate;
  Tensor out(desc_.router.experts * d * n);
  in_precision(precision_, [&](auto real) {
    for (std::int64_t e = 0; e < desc_.router.experts; ++e) {
      const std::int64_t first = g.offsets[e];
      multiply<decltype(real)>(
          d, n, g.counts[e], [&](auto i, auto r) { return dout[g.row_tokens[first + r] * d + i]; },
          [&](auto r, auto j) { return scaled_act[(first + r) * n + j]; },
          [&](auto i, auto* sums) {
            for (std::int64_t j = 0; j < n; ++j) out[(e * d + i) * n + j] = store(sums[j]);
          });
    }
  });
  return out;
}

Tensor Oracle::up_proj_wgrad(const Grouping& g, const Tensor& x, const Tensor& dpreact) const {
  const std::int64_t d = desc_.experts.hidden, W = desc_.experts.preact_width();
  Tensor out(desc_.router.experts * W * d);
  in_precision(precision_, [&](auto real) {
    for (std::int64_t e = 0; e < desc_.router.experts; ++e) {
      const std::int64_t first = g.offsets[e];
      multiply<decltype(real)>(
          W, d, g.counts[e], [&](auto w, auto r) { return dpreact[(first + r) * W + w]; },
          [&](auto r, auto i) { return x[g.row_tokens[first + r] * d + i]; },
          [&](auto w, auto* sums) {
            for (std::int64_t i = 0; i < d; ++i) out[(e * W + w) * d + i] = store(sums[i]);
          });
    }
  });
  return out;
}

Oracle::BiasGrad Oracle::bias_grad(const Grouping& g, const Tensor& row_scores,
                                   const Tensor& dpreact, const Tensor& dout, const Tensor& b2,
                                   const Tensor& row_dscores) const {
  const std::int64_t d = desc_.experts.hidden, W = desc_.experts.preact_width(),
                     E = desc_.router.experts;
  const ScoreAt at = desc_.experts.score_at;
  const bool scores_bias = at == ScoreAt::combine || at == ScoreAt::after_down;
  BiasGrad out{Tensor(E * W), Tensor(E * d), row_dscores};
  in_precision(precision_, [&](auto real) {
    using Real = decltype(real);
    for (std::int64_t e = 0; e < E; ++e) {
      std::vector<Real> db1(W, Real{0}), db2(d, Real{0});
      for (std::int64_t row = g.offsets[e]; row < g.offsets[e + 1]; ++row) {
        const double* grad = &dout[g.row_tokens[row] * d];
        const Real score = scores_bias ? static_cast<Real>(row_scores[row]) : Real{1};
        Real bias_part = 0;  // <dO, b2>
        for (std::int64_t i = 0; i < d; ++i) {
          db2[i] += score * static_cast<Real>(grad[i]);
          bias_part += static_cast<Real>(grad[i]) * static_cast<Real>(b2[e * d + i]);
        }
        for (std::int64_t w = 0; w < W; ++w) db1[w] += static_cast<Real>(dpreact[row * W + w]);
        if (!scores_bias) continue;
        out.row_dscores[row] = single(static_cast<Real>(row_dscores[row]) + bias_part);
      }
      for (std::int64_t w = 0; w < W; ++w) out.db1[e * W + w] = store(db1[w]);
      for (std::int64_t i = 0; i < d; ++i) out.db2[e * d + i] = store(db2[i]);
    }
  });
  return out;
}

Tensor Oracle::aggregate(const Grouping& g, const Tensor& rows, const Tensor& slot_scores,
                         const Tensor& addend) const {
  const std::int64_t T = desc_.tokens, d = desc_.experts.hidden;
  Tensor out(T * d);
  in_precision(precision_, [&](auto real) {
    using Real = decltype(real);
    for (std::int64_t t = 0; t < T; ++t) {
      std::vector<Real> sums(d, Real{0});
      for (std::int32_t at = g.token_offsets[t]; at < g.token_offsets[t + 1]; ++at) {
        const std::int32_t slot = g.token_slots[at];
        const Real score = static_cast<Real>(slot_scores.empty() ? 1.0 : slot_scores[slot]);
        for (std::int64_t i = 0; i < d; ++i) {
          sums[i] += score * static_cast<Real>(rows[g.slot_rows[slot] * d + i]);
        }
      }
      for (std::int64_t i = 0; i < d; ++i) {
        if (!addend.empty()) sums[i] += static_cast<Real>(addend[t * d + i]);
        out[t * d + i] = store(sums[i]);
      }
    }
  });
  return out;
}

Tensor Oracle::routed_dx(const std::vector<std::int32_t>& slot_experts, const Tensor& dlogits,
                         const Tensor& router_w) const {
  const std::int64_t T = desc_.tokens, d = desc_.experts.hidden, E = desc_.router.experts,
                     K = desc_.router.top_k;
  Tensor out(T * d);
  in_precision(precision_, [&](auto real) {
    using Real = decltype(real);
    for (std::int64_t t = 0; t < T; ++t) {
      std::vector<Real> sums(d, Real{0});
      for (std::int64_t slot = t * K; slot < (t + 1) * K; ++slot) {
        const std::int64_t e = slot_experts[slot];
        const Real gradient = static_cast<Real>(dlogits[t * E + e]);
        for (std::int64_t i = 0; i < d; ++i) {
          sums[i] += gradient * static_cast<Real>(router_w[e * d + i]);
        }
      }
      for (std::int64_t i = 0; i < d; ++i) out[t * d + i] = static_cast<double>(sums[i]);
    }
  });
  return out;
}

}  // namespace sonicmoe::testkit
