// Takes the gradients of the rows' scores through the router's softmax to dlogits. Without logits
// it brings them into slot order.
#include "core/backends.h"
#include "cpu/scored_routing.h"

namespace sonicmoe::cpu {
namespace {

float slot_gradient(const ScoreGradArgs& a, std::int64_t slot) {
  const std::int32_t row = a.slot_rows[slot];
  return row < 0 ? 0.0f : a.row_dscores[row];
}

/// A slot's gradient g and the factor s that takes it to the logit: s (g - inner), where the
/// softmax subtracts inner = sum_k g_k s_k. With a router that is plain() they are the gradient and
/// the value of the slot's score.
struct Entry {
  float gradient;
  float factor;
};

/// Does the router's softmax subtract a sum that is not 0 anyway?
bool subtracts(const RouterDesc& d) {
  return d.plain() || d.over_top_k() || d.reaches_all_experts();
}

/// What token t's weights divide by.
float divisor_of(const ScoreGradDesc& d, const ScoreGradArgs& a, std::int64_t t) {
  float sum = 0.0f;
  for (std::int64_t k = 0; k < d.top_k; ++k) {
    sum = math::add(sum, a.slot_probabilities[t * d.top_k + k]);
  }
  return weights_of(d).divisor(sum);
}

/// Entries of token t where the router is not plain().
void scored_entries(const ScoreGradDesc& d, const ScoreGradArgs& a, std::int64_t t,
                    Entry* entries) {
  const std::int64_t first = t * d.top_k;
  const math::RouterWeights weights = weights_of(d);
  const float divisor = divisor_of(d, a, t);
  float inner = 0.0f;
  for (std::int64_t k = 0; k < d.top_k; ++k) {
    const std::int32_t e = a.slot_experts[first + k];
    const float p = a.slot_probabilities[first + k];
    const float own = d.expert_scale && !is_sentinel(e, d.experts) ? a.expert_scale[e] : 1.0f;
    entries[k] = {weights.scaled(slot_gradient(a, first + k), own),
                  weights.factor(math::router_slope(d.score, p), divisor)};
    inner = math::fma(entries[k].gradient, weights.weight(p, divisor), inner);
  }
  for (std::int64_t k = 0; k < d.top_k; ++k) {
    entries[k].gradient = weights.gradient(entries[k].gradient, inner, divisor);
  }
}

/// dexpert_scale[e] sums g w scale over the slots of expert e, in their order.
void expert_scale_gradients(const ScoreGradDesc& d, const ScoreGradArgs& a) {
  const math::RouterWeights weights = weights_of(d);
  std::fill_n(a.dexpert_scale, d.experts, 0.0f);
  for (std::int64_t t = 0; t < d.tokens; ++t) {
    const std::int64_t first = t * d.top_k;
    const float divisor = divisor_of(d, a, t);
    for (std::int64_t k = 0; k < d.top_k; ++k) {
      const std::int32_t e = a.slot_experts[first + k];
      if (is_sentinel(e, d.experts)) continue;
      const float w = weights.weight(a.slot_probabilities[first + k], divisor);
      const float g = slot_gradient(a, first + k);
      a.dexpert_scale[e] = math::fma(g, weights.scaled(w, 1.0f), a.dexpert_scale[e]);
    }
  }
}

/// Writes dlogits of token t. `grad` is E floats of scratch, `entries` K.
template <class T>
void token(const ScoreGradDesc& d, const ScoreGradArgs& a, std::int64_t t, float* grad,
           Entry* entries) {
  const std::int64_t first = t * d.top_k;
  if (d.plain()) {
    for (std::int64_t k = 0; k < d.top_k; ++k) {
      entries[k] = {slot_gradient(a, first + k), a.slot_scores[first + k]};
    }
  } else {
    scored_entries(d, a, t, entries);
  }
  float inner = 0.0f;  // sum_k g_k s_k
  for (std::int64_t k = 0; k < d.top_k && subtracts(d); ++k) {
    inner = math::fma(entries[k].gradient, entries[k].factor, inner);
  }
  const int experts = static_cast<int>(d.experts);
  if (d.reaches_all_experts()) {
    // The softmax is over all experts: p_e (g_e - inner), with p recomputed from the logits.
    const T* logits = static_cast<const T*>(a.logits) + t * d.experts;
    softmax_row(load_row(logits, d.experts, grad), d.experts, grad);
    for (int e = 0; e < experts; ++e) grad[e] = -grad[e] * inner;
    for (std::int64_t k = 0; k < d.top_k; ++k) {
      const std::int32_t e = a.slot_experts[first + k];
      if (is_sentinel(e, d.experts)) continue;
      grad[e] += entries[k].factor * entries[k].gradient;
    }
  } else {
    std::fill_n(grad, experts, 0.0f);
    for (std::int64_t k = 0; k < d.top_k; ++k) {
      const std::int32_t e = a.slot_experts[first + k];
      if (is_sentinel(e, d.experts)) continue;
      const float gradient = entries[k].factor * (entries[k].gradient - inner);
      float& sum = grad[e];
      sum = d.takes_ids() ? sum + gradient : gradient;  // 0 + -0 would lose the sign
    }
  }
  const T* in = static_cast<const T*>(a.dlogits_in);
  T* out = static_cast<T*>(a.dlogits) + t * d.experts;
  for (int e = 0; e < experts; ++e) {
    const float outside = in == nullptr ? 0.0f : to_float(in[t * d.experts + e]);
    out[e] = from_float<T>(grad[e] + outside);
  }
}

/// Of one thread: a row of gradients and a token's entries.
std::int64_t floats(const ScoreGradDesc& d) { return d.experts + 2 * d.top_k; }

std::size_t workspace(const ScoreGradDesc& desc, const Exec& exec) {
  if (!desc.has_logits()) return 0;
  return static_cast<std::size_t>(floats(desc)) * 4 * static_cast<std::size_t>(exec.threads);
}

Status run(const ScoreGradDesc& d, const ScoreGradArgs& a, void* memory,
           const Exec& exec) noexcept {
  if (!d.has_logits()) {
    for (std::int64_t s = 0; s < d.rows; ++s) a.dscores[s] = slot_gradient(a, s);
    return {};
  }
  return visit_dtype(d.dtype, [&](auto type) {
    parallel_ranges(exec.threads, d.tokens, kTokensPerPiece,
                    [&](int thread, std::int64_t begin, std::int64_t end) {
                      float* grad = static_cast<float*>(memory) + thread * floats(d);
                      auto* entries = reinterpret_cast<Entry*>(grad + d.experts);
                      for (std::int64_t t = begin; t < end; ++t) {
                        token<decltype(type)>(d, a, t, grad, entries);
                      }
                    });
    if (a.dexpert_scale != nullptr && d.expert_scale) expert_scale_gradients(d, a);
    return Status();
  });
}

}  // namespace

const Kernel<ScoreGradDesc> kScoreGrad = {
    .op = "score_grad",
    .name = "cpu.score_grad",
    .dtypes = kStorageTypes,
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cpu
