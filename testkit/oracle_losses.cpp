#include <algorithm>
#include <cmath>
#include <numeric>

#include "testkit/oracle.h"
#include "testkit/precision.h"

namespace sonicmoe::testkit {
namespace {

/// A token's shares q, and what takes their gradients g to the logits: slope_e (g_e - sum q g).
template <class Real>
struct Shares {
  std::vector<Real> q, slope;
  bool any = true;  ///< false: all scores are 0, and so are q and slope
};

/// `magnitudes`: of the slopes' terms, which for the sigmoid are p and p^2.
template <class Real>
Shares<Real> shares(RouterScore score, const double* logits, std::int64_t experts,
                    bool magnitudes) {
  const std::vector<Real> z(logits, logits + experts);
  if (score == RouterScore::softmax) {
    const std::vector<Real> p = softmax(z);
    return {p, p};
  }
  Shares<Real> row;
  for (const Real x : z) {
    const auto [p, slope] = score_of(score, x);
    row.q.push_back(p);
    row.slope.push_back(magnitudes && score == RouterScore::sigmoid ? p + p * p : slope);
  }
  const Real sum = std::accumulate(row.q.begin(), row.q.end(), Real{0});
  row.any = sum != 0;
  for (std::int64_t e = 0; e < experts && row.any; ++e) {
    row.q[e] /= sum;
    row.slope[e] /= sum;
  }
  return row;
}

/// log of the sum of e^z. `magnitudes`: of its two terms.
template <class Real>
Real log_sum(const double* logits, std::int64_t experts, bool magnitudes) {
  const Real max = static_cast<Real>(*std::max_element(logits, logits + experts));
  Real sum = 0;
  for (std::int64_t e = 0; e < experts; ++e) sum += std::exp(static_cast<Real>(logits[e]) - max);
  return (magnitudes ? std::fabs(max) : max) + std::log(sum);
}

/// Tokens begin .. end-1 that the mask leaves in.
std::vector<std::int64_t> counted(const std::vector<std::uint8_t>& mask, std::int64_t begin,
                                  std::int64_t end) {
  std::vector<std::int64_t> tokens;
  for (std::int64_t t = begin; t < end; ++t) {
    if (mask.empty() || mask[t] != 0) tokens.push_back(t);
  }
  return tokens;
}

/// A sequence that the mean takes in.
struct Sequence {
  std::vector<std::int64_t> tokens;  ///< those that count and have shares
  const std::int32_t* counts;
  double choices;  ///< the counts' sum
};

std::vector<Sequence> sequences(const AuxLossDesc& op, const Tensor& logits,
                                const std::vector<std::int32_t>& counts,
                                const std::vector<std::uint8_t>& mask) {
  std::vector<Sequence> all;
  const std::int64_t E = op.experts, S = op.tokens / op.sequences;
  for (std::int64_t b = 0; b < op.sequences; ++b) {
    Sequence s{{}, &counts[b * E], 0};
    s.choices = std::accumulate(s.counts, s.counts + E, 0.0);
    for (const std::int64_t t : counted(mask, b * S, (b + 1) * S)) {
      if (shares<double>(op.score, &logits[t * E], E, false).any) s.tokens.push_back(t);
    }
    if (s.choices != 0 && !s.tokens.empty()) all.push_back(s);
  }
  return all;
}

}  // namespace

AuxLossDesc Oracle::layer_loss() const {
  return {.tokens = desc_.tokens, .experts = desc_.router.experts, .dtype = logits_type()};
}

double Oracle::aux_loss(const Tensor& logits, const std::vector<std::int32_t>& counts) const {
  return aux_loss(layer_loss(), logits, counts, {});
}

Tensor Oracle::aux_loss_grad(const Tensor& logits, const std::vector<std::int32_t>& counts,
                             double dloss, bool magnitudes) const {
  return aux_loss_grad(layer_loss(), logits, counts, {}, dloss, magnitudes);
}

double Oracle::aux_loss(const AuxLossDesc& op, const Tensor& logits,
                        const std::vector<std::int32_t>& counts,
                        const std::vector<std::uint8_t>& mask) const {
  const std::int64_t E = op.experts;
  return in_precision(precision_, [&](auto real) {
    using Real = decltype(real);
    double sum = 0, n = 0;  // of the mean
    if (op.loss == RouterLoss::z) {
      Real squares = 0;
      for (const std::int64_t t : counted(mask, 0, op.tokens)) {
        const Real lse = log_sum<Real>(&logits[t * E], E, false);
        squares += lse * lse;
        n += 1;
      }
      sum = squares;
    } else {
      for (const Sequence& s : sequences(op, logits, counts, mask)) {
        std::vector<Real> columns(E, Real{0});  // P
        for (const std::int64_t t : s.tokens) {
          const std::vector<Real> q = shares<Real>(op.score, &logits[t * E], E, false).q;
          for (std::int64_t e = 0; e < E; ++e) columns[e] += q[e];
        }
        Real matched = 0;  // sum P is the number of tokens, since each token's shares sum to 1
        for (std::int64_t e = 0; e < E; ++e) matched += columns[e] * static_cast<Real>(s.counts[e]);
        sum += static_cast<double>(E) * matched / (std::ssize(s.tokens) * s.choices);
        n += 1;
      }
    }
    return n == 0 ? 0.0 : single(sum / n);
  });
}

Tensor Oracle::aux_loss_grad(const AuxLossDesc& op, const Tensor& logits,
                             const std::vector<std::int32_t>& counts,
                             const std::vector<std::uint8_t>& mask, double dloss,
                             bool magnitudes) const {
  const std::int64_t E = op.experts;
  Tensor out(op.tokens * E);
  in_precision(precision_, [&](auto real) {
    using Real = decltype(real);
    if (op.loss == RouterLoss::z) {
      const std::vector<std::int64_t> tokens = counted(mask, 0, op.tokens);
      for (const std::int64_t t : tokens) {
        const Real lse = log_sum<Real>(&logits[t * E], E, magnitudes);
        const auto scale = static_cast<Real>(2 * dloss / static_cast<double>(tokens.size()));
        const std::vector<Real> p = shares<Real>(RouterScore::softmax, &logits[t * E], E, false).q;
        for (std::int64_t e = 0; e < E; ++e)
          out[t * E + e] = store_as(scale * lse * p[e], op.dtype);
      }
      return;
    }
    const std::vector<Sequence> all = sequences(op, logits, counts, mask);
    for (const Sequence& s : all) {
      // dloss/dq_te = scale * f_e, but for a term that all experts have: it has no gradient.
      const Real scale = static_cast<Real>(
          dloss * E / (static_cast<double>(all.size() * s.tokens.size()) * s.choices));
      for (const std::int64_t t : s.tokens) {
        const Shares<Real> row = shares<Real>(op.score, &logits[t * E], E, magnitudes);
        Real mean = 0;
        for (std::int64_t e = 0; e < E; ++e) mean += row.q[e] * static_cast<Real>(s.counts[e]);
        for (std::int64_t e = 0; e < E; ++e) {
          const auto count = static_cast<Real>(s.counts[e]);
          const Real g = magnitudes ? count + mean : count - mean;
          out[t * E + e] = store_as(scale * row.slope[e] * g, op.dtype);
        }
      }
    }
  });
  return out;
}

}  // namespace sonicmoe::testkit
