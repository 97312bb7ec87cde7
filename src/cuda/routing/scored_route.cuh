#pragma once

#include "cuda/routing/routing.cuh"
#include "math/router_score.h"

/// What the kernels of top_k_scored.cu and top_few_scored.cu know of a router.
namespace sonicmoe::cuda {

/// The fields of a descriptor that decide a token's experts and scores.
struct ScoredRoute {
  std::int32_t experts;
  int top_k;
  RouterScore score;
  bool by_score;    ///< scores choose, not logits
  bool over_top_k;  ///< softmax over a token's K experts
  int groups, kept_groups;
  std::int32_t group_size;
  bool two;  ///< a group has the sum of its two largest values
  math::RouterWeights weights;
  const float* selection_bias;  ///< or null
  const float* expert_scale;    ///< or null

  static ScoredRoute of(const TopKDesc& d, const TopKArgs& a) {
    return {.experts = static_cast<std::int32_t>(d.experts),
            .top_k = static_cast<int>(d.top_k),
            .score = d.score,
            .by_score = d.order == RouterOrder::score_then_select,
            .over_top_k = d.over_top_k(),
            .groups = static_cast<int>(d.groups),
            .kept_groups = static_cast<int>(d.kept_groups),
            .group_size = static_cast<std::int32_t>(d.experts / d.groups),
            .two = d.group_score == GroupScore::sum_of_two,
            .weights = {d.divides(), d.eps, d.scale},
            .selection_bias = d.selection_bias ? a.selection_bias : nullptr,
            .expert_scale = d.expert_scale ? a.expert_scale : nullptr};
  }

  __host__ __device__ bool softmax() const { return score == RouterScore::softmax; }
  /// Is p a softmax over all experts?
  __device__ bool over_all() const { return softmax() && !over_top_k; }
  __device__ float p(float z, const RowSoftmax& row) const {
    return softmax() ? row.probability(z) : math::router_score(score, z);
  }
  /// What chooses expert e.
  __device__ float value(float z, const RowSoftmax& row, std::int64_t e) const {
    const float v = by_score ? p(z, row) : z;
    return selection_bias == nullptr ? v : math::add(v, selection_bias[e]);
  }
};

}  // namespace sonicmoe::cuda
