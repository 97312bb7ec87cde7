// Takes the gradients of the rows' scores through the router's softmax to dlogits. Without logits
// it brings them into slot order.
#include "core/backends.h"
#include "cpu/routing.h"

namespace sonicmoe::cpu {
namespace {

float slot_gradient(const ScoreGradArgs& a, std::int64_t slot) {
  const std::int32_t row = a.slot_rows[slot];
  return row < 0 ? 0.0f : a.row_dscores[row];
}

/// Writes dlogits of token t. `grad` is E floats of scratch.
template <class T>
void token(const ScoreGradDesc& d, const ScoreGradArgs& a, std::int64_t t, float* grad) {
  const std::int64_t first = t * d.top_k;
  float inner = 0.0f;  // sum_k g_k s_k
  for (std::int64_t s = first; s < first + d.top_k; ++s) {
    inner = math::fma(slot_gradient(a, s), a.slot_scores[s], inner);
  }
  const int experts = static_cast<int>(d.experts);
  if (d.reaches_all_experts()) {
    // The softmax is over all experts: p_e (g_e - inner), with p recomputed from the logits.
    const T* logits = static_cast<const T*>(a.logits) + t * d.experts;
    softmax_row(load_row(logits, d.experts, grad), d.experts, grad);
    for (int e = 0; e < experts; ++e) grad[e] = -grad[e] * inner;
    for (std::int64_t s = first; s < first + d.top_k; ++s) {
      if (is_sentinel(a.slot_experts[s], d.experts)) continue;
      grad[a.slot_experts[s]] += a.slot_scores[s] * slot_gradient(a, s);
    }
  } else {
    std::fill_n(grad, experts, 0.0f);
    for (std::int64_t s = first; s < first + d.top_k; ++s) {
      if (is_sentinel(a.slot_experts[s], d.experts)) continue;
      const float gradient = a.slot_scores[s] * (slot_gradient(a, s) - inner);
      float& sum = grad[a.slot_experts[s]];
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

std::size_t workspace(const ScoreGradDesc& desc, const Exec& exec) {
  if (!desc.has_logits()) return 0;
  return static_cast<std::size_t>(desc.experts) * 4 * static_cast<std::size_t>(exec.threads);
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
                      float* grad = static_cast<float*>(memory) + thread * d.experts;
                      for (std::int64_t t = begin; t < end; ++t) {
                        token<decltype(type)>(d, a, t, grad);
                      }
                    });
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
