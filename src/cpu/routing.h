#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "math/softmax.h"
#include "sonicmoe/ops.h"

/// One token's routing, shared by top_k, score_grad, aux_loss, token_rounding and its gradient.
namespace sonicmoe::cpu {

/// Loads a token's logits into `row` as fp32. Returns the largest, or a NaN if any logit is one.
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

/// Turns the logits in `row` into their softmax. `max` is the result of load_row().
inline void softmax_row(float max, std::int64_t experts, float* row) {
  const int count = static_cast<int>(experts);
  for (int e = 0; e < count; ++e) row[e] = math::softmax_term(row[e], max);
  const float sum = math::lane_sum32(count, [&](int e) { return row[e]; });
  for (int e = 0; e < count; ++e) row[e] = math::div(row[e], sum);
}

/// Writes the K largest values in descending order, and their ids. Sorted insertion puts an equal
/// value behind the earlier one, so the lower id stays ahead.
inline void select_top_k(const float* values, std::int64_t experts, std::int64_t k, float* best,
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

/// Writes scores and ids of a token's K experts. `row` holds the token's logits and `max` the
/// largest. The softmax over all experts replaces the logits if the mode needs it or if
/// `probabilities` is set. Sums over K run in stored order.
inline void route_token(const RouterDesc& d, float max, bool probabilities, float* row,
                        float* scores, std::int32_t* ids) {
  const bool over_topk = d.over_top_k();
  if (!over_topk) softmax_row(max, d.experts, row);
  select_top_k(row, d.experts, d.top_k, scores, ids);
  if (d.normalised()) {
    float sum = 0.0f;
    for (std::int64_t k = 0; k < d.top_k; ++k) {
      if (over_topk) scores[k] = math::softmax_term(scores[k], max);
      sum = math::add(sum, scores[k]);
    }
    for (std::int64_t k = 0; k < d.top_k; ++k) scores[k] = math::div(scores[k], sum);
  }
  if (over_topk && probabilities) softmax_row(max, d.experts, row);
}

inline bool is_sentinel(std::int32_t id, std::int64_t experts) { return id < 0 || id >= experts; }

/// The largest of `row` at a token's given ids; -inf if all are sentinels.
inline float max_at(const float* row, std::int64_t experts, const std::int32_t* ids,
                    std::int64_t k) {
  float max = -std::numeric_limits<float>::infinity();
  for (std::int64_t i = 0; i < k; ++i) {
    if (!is_sentinel(ids[i], experts) && row[ids[i]] > max) max = row[ids[i]];
  }
  return max;
}

/// Writes the scores of a token's given ids, in their order. `row` and `max` are as in
/// route_token(). Sentinels take no part and get 0.
inline void score_ids(const RouterDesc& d, float max, float* row, const std::int32_t* ids,
                      float* scores) {
  const bool over_topk = d.over_top_k();
  if (over_topk) {
    max = max_at(row, d.experts, ids, d.top_k);
  } else {
    softmax_row(max, d.experts, row);
  }
  float sum = 0.0f;
  for (std::int64_t k = 0; k < d.top_k; ++k) {
    const bool sentinel = is_sentinel(ids[k], d.experts);
    scores[k] = sentinel ? 0.0f : over_topk ? math::softmax_term(row[ids[k]], max) : row[ids[k]];
    sum = math::add(sum, scores[k]);
  }
  if (!d.normalised()) return;
  for (std::int64_t k = 0; k < d.top_k; ++k) {
    scores[k] = sum == 0.0f ? 0.0f : math::div(scores[k], sum);
  }
}

/// Ids of the caller (T, K) that a softmax runs over, or null.
struct GivenIds {
  const std::int32_t* ids = nullptr;
  std::int64_t top_k = 0;
};

/// What is wrong with a token's logits, or null. `row` and `max` are from load_row(). Only a
/// softmax needs a finite logit.
inline const char* bad_logits(float max, const float* row, std::int64_t experts, std::int64_t t,
                              const GivenIds& given, bool softmax) {
  if (max != max) return "a NaN in the row";
  if (!std::isfinite(max) && (max > 0 || softmax)) {
    return max > 0 ? "+inf in the row" : "only -inf in the row";
  }
  if (given.ids == nullptr) return nullptr;
  const std::int32_t* const ids = given.ids + t * given.top_k;
  const bool any = std::any_of(ids, ids + given.top_k,
                               [&](std::int32_t id) { return !is_sentinel(id, experts); });
  const bool finite = std::isfinite(max_at(row, experts, ids, given.top_k));
  return any && !finite ? "only -inf at the ids" : nullptr;
}

/// Makes numbers of a row that bad_logits() finds, so that choosing among them ends well, and
/// returns the new maximum. What is NaN or +inf stays above the others.
inline float tame_row(std::int64_t experts, float* row) {
  constexpr float kMost = std::numeric_limits<float>::max();
  float max = -kMost;
  for (std::int64_t e = 0; e < experts; ++e) {
    if (!(row[e] <= kMost)) row[e] = kMost;
    if (row[e] < -kMost) row[e] = -kMost;
    max = std::max(max, row[e]);
  }
  return max;
}

/// Refuses rows that bad_logits() finds; the error names the first such token. `rows` is
/// (threads, E) scratch.
template <class T>
Status check_logits(const T* logits, std::int64_t tokens, std::int64_t experts, float* rows,
                    int threads, const GivenIds& given = {}, bool softmax = true) {
  std::atomic<std::int64_t> bad{tokens};
  const auto look = [&](std::int64_t t, float* row) {
    const float max = load_row(logits + t * experts, experts, row);
    return bad_logits(max, row, experts, t, given, softmax);
  };
  parallel_ranges(threads, tokens, kTokensPerPiece,
                  [&](int thread, std::int64_t begin, std::int64_t end) {
                    for (std::int64_t t = begin; t < end; ++t) {
                      if (look(t, rows + thread * experts) == nullptr) continue;
                      std::int64_t first = bad.load();
                      while (t < first && !bad.compare_exchange_weak(first, t)) {
                      }
                      return;
                    }
                  });
  const std::int64_t t = bad.load();
  if (t == tokens) return {};
  return Status::error(StatusCode::invalid_data,
                       "logits: got %s of token %lld, allowed: numbers below +inf%s", look(t, rows),
                       static_cast<long long>(t), softmax ? ", at least one of them finite" : "");
}

}  // namespace sonicmoe::cpu
