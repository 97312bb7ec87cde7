#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/routing.h"
#include "math/router_score.h"

/// One token's routing where the router is not RouterDesc::plain(): other scores than the softmax,
/// biases, groups and scales.
namespace sonicmoe::cpu {

/// Memory for one token of one thread.
struct ScoredScratch {
  float* p;              // (E): scores of all experts, or the logits if p is made of the chosen
  float* values;         // (E): what chooses, of the experts that stay
  float* best;           // (K)
  float* group_values;   // (groups)
  std::int32_t* stayed;  // (E): their ids, ascending

  static std::int64_t floats(const RouterDesc& d) { return 4 * d.experts + d.groups; }
  ScoredScratch(const RouterDesc& d, float* memory)
      : p(memory),
        values(p + d.experts),
        best(values + d.experts),
        group_values(best + d.experts),
        stayed(reinterpret_cast<std::int32_t*>(group_values + d.groups)) {}
};

inline math::RouterWeights weights_of(const RouterDesc& d) { return {d.divides(), d.eps, d.scale}; }

/// Scores of all experts from the logits `z`, whose largest is `max`.
inline void score_all(const RouterDesc& d, float max, const float* z, float* p) {
  if (d.score != RouterScore::softmax) {
    for (std::int64_t e = 0; e < d.experts; ++e) p[e] = math::router_score(d.score, z[e]);
    return;
  }
  std::copy_n(z, d.experts, p);
  if (!d.over_top_k()) softmax_row(max, d.experts, p);
}

inline float group_value(const RouterDesc& d, const float* values) {
  const bool two = d.group_score == GroupScore::sum_of_two;
  float best[2];
  std::int32_t ids[2];
  select_top_k(values, d.experts / d.groups, two ? 2 : 1, best, ids);
  return two ? math::add(best[0], best[1]) : best[0];
}

/// Moves the values of the experts of the best `kept_groups` groups to the front, ties to the lower
/// group. Returns how many they are.
inline std::int64_t keep_groups(const RouterDesc& d, const ScoredScratch& s) {
  const std::int64_t size = d.experts / d.groups;
  for (std::int64_t g = 0; g < d.groups; ++g)
    s.group_values[g] = group_value(d, s.values + g * size);
  std::int64_t left = 0;
  for (std::int64_t g = 0; g < d.groups; ++g) {
    std::int64_t better = 0;
    for (std::int64_t other = 0; other < d.groups; ++other) {
      const float a = s.group_values[other], b = s.group_values[g];
      better += a > b || (a == b && other < g);
    }
    if (better >= d.kept_groups) continue;
    for (std::int64_t e = g * size; e < (g + 1) * size; ++e) {
      s.values[left] = s.values[e];
      s.stayed[left++] = static_cast<std::int32_t>(e);
    }
  }
  return left;
}

/// Chooses a token's K experts. s.p holds the scores, `z` the logits.
inline void choose_experts(const RouterDesc& d, const float* z, const float* selection_bias,
                           const ScoredScratch& s, std::int32_t* ids) {
  const float* const by = d.order == RouterOrder::score_then_select ? s.p : z;
  for (std::int64_t e = 0; e < d.experts; ++e) {
    s.values[e] = d.selection_bias ? math::add(by[e], selection_bias[e]) : by[e];
  }
  const std::int64_t left = d.groups > 1 ? keep_groups(d, s) : d.experts;
  select_top_k(s.values, left, d.top_k, s.best, ids);
  for (std::int64_t k = 0; k < d.top_k && d.groups > 1; ++k) ids[k] = s.stayed[ids[k]];
}

/// Writes p and the scores of a token's ids. s.p holds the scores of all experts, `z` the logits.
/// Sentinels take no part and get 0.
inline void weigh_experts(const RouterDesc& d, const float* z, const float* expert_scale,
                          const ScoredScratch& s, const std::int32_t* ids, float* probabilities,
                          float* scores) {
  const bool over_topk = d.over_top_k();
  const float max = over_topk ? max_at(z, d.experts, ids, d.top_k) : 0.0f;
  float sum = 0.0f;
  for (std::int64_t k = 0; k < d.top_k; ++k) {
    float& p = probabilities[k];
    p = 0.0f;
    if (!is_sentinel(ids[k], d.experts)) {
      p = over_topk ? math::softmax_term(z[ids[k]], max) : s.p[ids[k]];
    }
    sum = math::add(sum, p);
  }
  const math::RouterWeights weights = weights_of(d);
  const float divisor = weights.divisor(sum);
  for (std::int64_t k = 0; k < d.top_k; ++k) {
    if (over_topk) probabilities[k] = sum == 0.0f ? 0.0f : math::div(probabilities[k], sum);
    scores[k] = 0.0f;
    if (is_sentinel(ids[k], d.experts)) continue;
    const float own = d.expert_scale ? expert_scale[ids[k]] : 1.0f;
    scores[k] = weights.scaled(weights.weight(probabilities[k], divisor), own);
  }
}

}  // namespace sonicmoe::cpu
