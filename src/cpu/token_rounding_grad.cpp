// Takes the gradients of the rounded lists' scores to dlogits. An entry that top-K chose has its
// token-choice (TC) score. An entry that rounding added has its full-softmax probability.
#include <algorithm>

#include "core/backends.h"
#include "cpu/routing.h"

namespace sonicmoe::cpu {
namespace {

/// One thread's scratch.
struct Row {
  float* probabilities;  // (E)
  float* gradient;       // (E): of each entry of the token, then of the logits
  float* scores;         // (K)
  float* dscores;        // (K)
  std::int32_t* ids;     // (K)

  static std::int64_t words(const TokenRoundingGradDesc& d) { return 2 * d.experts + 3 * d.top_k; }
  Row(const TokenRoundingGradDesc& d, void* memory, int thread)
      : probabilities(static_cast<float*>(memory) + thread * words(d)),
        gradient(probabilities + d.experts),
        scores(gradient + d.experts),
        dscores(scores + d.top_k),
        ids(reinterpret_cast<std::int32_t*>(dscores + d.top_k)) {}
};

Status check_list(const TokenRoundingGradDesc& d, const TokenRoundingGradArgs& a) {
  for (std::int64_t i = 0; i < d.list_length; ++i) {
    const std::int64_t low = i == 0 ? 0 : a.token_ids[i - 1];
    if (a.token_ids[i] < low || a.token_ids[i] >= d.tokens) {
      return Status::error(
          StatusCode::invalid_data,
          "token_ids: got %d at position %lld, allowed: tokens that ascend and are "
          "below %lld",
          a.token_ids[i], static_cast<long long>(i), static_cast<long long>(d.tokens));
    }
  }
  return {};
}

template <class T>
void token(const TokenRoundingGradDesc& d, const TokenRoundingGradArgs& a, std::int64_t t,
           const Row& row) {
  const float max =
      load_row(static_cast<const T*>(a.logits) + t * d.experts, d.experts, row.probabilities);
  route_token(d, max, true, row.probabilities, row.scores, row.ids);
  float* gradient = row.gradient;
  std::fill_n(gradient, d.experts, 0.0f);
  const std::int32_t* end = a.token_ids + d.list_length;
  const auto entries = std::equal_range(a.token_ids, end, static_cast<std::int32_t>(t));
  for (const std::int32_t* i = entries.first; i != entries.second; ++i) {
    const std::int64_t at = i - a.token_ids;
    if (is_sentinel(a.expert_ids[at], d.experts)) continue;
    gradient[a.expert_ids[at]] = a.dscores[at];
  }
  // Normalised TC scores are a softmax over the token's K experts. Otherwise a TC score is the
  // full-softmax probability itself.
  const bool own_softmax = d.normalised();
  float inner_top_k = 0.0f;
  for (std::int64_t k = 0; own_softmax && k < d.top_k; ++k) {
    float& g = gradient[row.ids[k]];
    row.dscores[k] = g;
    inner_top_k = math::fma(g, row.scores[k], inner_top_k);
    g = 0.0f;  // the full softmax gets no gradient from this entry
  }
  float inner = 0.0f;
  for (std::int64_t e = 0; e < d.experts; ++e) {
    inner = math::fma(gradient[e], row.probabilities[e], inner);
  }
  for (std::int64_t e = 0; e < d.experts; ++e) {
    gradient[e] = row.probabilities[e] * (gradient[e] - inner);
  }
  for (std::int64_t k = 0; own_softmax && k < d.top_k; ++k) {
    gradient[row.ids[k]] += row.scores[k] * (row.dscores[k] - inner_top_k);
  }
  const T* in = static_cast<const T*>(a.dlogits_in);
  T* out = static_cast<T*>(a.dlogits) + t * d.experts;
  for (std::int64_t e = 0; e < d.experts; ++e) {
    const float outside = in == nullptr ? 0.0f : to_float(in[t * d.experts + e]);
    out[e] = from_float<T>(gradient[e] + outside);
  }
}

std::size_t workspace(const TokenRoundingGradDesc& d, const Exec& exec) {
  return 4 * static_cast<std::size_t>(Row::words(d) * exec.threads);
}

Status run(const TokenRoundingGradDesc& d, const TokenRoundingGradArgs& a, void* memory,
           const Exec& exec) noexcept {
  if (Status status = check_list(d, a); !status.ok()) return status;
  return visit_dtype(d.dtype, [&](auto type) {
    parallel_ranges(exec.threads, d.tokens, kTokensPerPiece,
                    [&](int thread, std::int64_t begin, std::int64_t end) {
                      const Row row(d, memory, thread);
                      for (std::int64_t t = begin; t < end; ++t) {
                        token<decltype(type)>(d, a, t, row);
                      }
                    });
    return Status();
  });
}

}  // namespace

const Kernel<TokenRoundingGradDesc> kTokenRoundingGrad = {
    .op = "token_rounding_grad",
    .name = "cpu.token_rounding_grad",
    .dtypes = kStorageTypes,
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cpu
