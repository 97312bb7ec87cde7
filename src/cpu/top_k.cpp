// Scores and ids of each token's K experts. Larger value first, ties to the lower expert id.
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/backends.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "math/softmax.h"

namespace sonicmoe::cpu {
namespace {

/// The token's logits in fp32 and the largest of them; NaN if any is.
template <class T>
float load_row(const T* logits, std::int64_t experts, float* row) {
  float max = -std::numeric_limits<float>::infinity();
  bool nan = false;
  for (std::int64_t e = 0; e < experts; ++e) {
    row[e] = to_float(logits[e]);
    nan |= row[e] != row[e];
    max = row[e] > max ? row[e] : max;
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : max;
}

/// Sorted insertion: an equal value goes behind, so the lower id, which came first, stays ahead.
void select(const float* values, std::int64_t experts, std::int64_t k, float* best,
            std::int32_t* ids) {
  std::int64_t found = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    if (found == k && !(values[e] > best[k - 1])) continue;
    std::int64_t at = found < k ? found++ : k - 1;
    for (; at > 0 && values[e] > best[at - 1]; --at) {
      best[at] = best[at - 1];
      ids[at] = ids[at - 1];
    }
    best[at] = values[e];
    ids[at] = static_cast<std::int32_t>(e);
  }
}

/// Softmax over the K chosen logits, or the chosen probabilities, renormalised or not. Sums over K
/// run in stored order.
void route_token(const TopKDesc& d, float max, float* row, float* scores, std::int32_t* ids) {
  const int experts = static_cast<int>(d.experts);
  if (d.mode == RouterMode::topk_over_softmax) {
    const float sum =
        math::lane_sum32(experts, [&](int e) { return row[e] = math::softmax_term(row[e], max); });
    for (int e = 0; e < experts; ++e) row[e] = math::div(row[e], sum);
  }
  select(row, d.experts, d.top_k, scores, ids);
  const bool over_topk = d.mode == RouterMode::softmax_over_topk;
  if (!over_topk && !d.norm_topk_probs) return;
  float sum = 0.0f;
  for (std::int64_t k = 0; k < d.top_k; ++k) {
    if (over_topk) scores[k] = math::softmax_term(scores[k], max);
    sum = math::add(sum, scores[k]);
  }
  for (std::int64_t k = 0; k < d.top_k; ++k) scores[k] = math::div(scores[k], sum);
}

std::size_t workspace(const TopKDesc& desc, const Exec& exec) {
  return static_cast<std::size_t>(desc.experts) * 4 * static_cast<std::size_t>(exec.threads);
}

template <class T>
Status run_typed(const TopKDesc& d, const TopKArgs& a, float* rows, const Exec& exec) {
  const T* logits = static_cast<const T*>(a.logits);
  // All data is looked at before anything is written.
  std::atomic<std::int64_t> bad{d.tokens};
  parallel_ranges(exec.threads, d.tokens, kTokensPerPiece,
                  [&](int thread, std::int64_t begin, std::int64_t end) {
                    float* row = rows + thread * d.experts;
                    for (std::int64_t t = begin; t < end; ++t) {
                      if (std::isfinite(load_row(logits + t * d.experts, d.experts, row))) continue;
                      std::int64_t first = bad.load();
                      while (t < first && !bad.compare_exchange_weak(first, t)) {
                      }
                      return;
                    }
                  });
  if (const std::int64_t t = bad.load(); t < d.tokens) {
    const float max = load_row(logits + t * d.experts, d.experts, rows);
    const char* got = max != max ? "a NaN" : max > 0 ? "+inf" : "only -inf";
    return Status::error(StatusCode::invalid_data,
                         "logits: got %s in the row of token %lld, allowed: numbers below +inf, "
                         "at least one of them finite",
                         got, static_cast<long long>(t));
  }
  parallel_ranges(exec.threads, d.tokens, kTokensPerPiece,
                  [&](int thread, std::int64_t begin, std::int64_t end) {
                    float* row = rows + thread * d.experts;
                    for (std::int64_t t = begin; t < end; ++t) {
                      const float max = load_row(logits + t * d.experts, d.experts, row);
                      route_token(d, max, row, a.scores + t * d.top_k, a.ids + t * d.top_k);
                    }
                  });
  return {};
}

Status run(const TopKDesc& desc, const TopKArgs& args, void* memory, const Exec& exec) noexcept {
  float* rows = static_cast<float*>(memory);
  return visit_dtype(desc.dtype,
                     [&](auto t) { return run_typed<decltype(t)>(desc, args, rows, exec); });
}

}  // namespace

const Kernel<TopKDesc> kTopK = {"top_k",   "cpu.top_k", DeviceType::cpu, reject_f16<TopKDesc>,
                                workspace, run};

}  // namespace sonicmoe::cpu
