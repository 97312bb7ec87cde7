#include "testkit/grouping.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

namespace sonicmoe::testkit {
namespace {

/// fp64 scores of one row.
Tensor scores_of(const double* logits, const RouterDesc& router) {
  const std::int64_t experts = router.experts;
  Tensor p(logits, logits + experts);
  if (router.score == RouterScore::softmax) {
    const double max = *std::max_element(logits, logits + experts);
    double sum = 0;
    for (std::int64_t e = 0; e < experts; ++e) sum += p[e] = std::exp(logits[e] - max);
    for (double& value : p) value /= sum;
    return p;
  }
  for (double& z : p) {
    const double small = std::exp(-std::fabs(z));
    z = router.score == RouterScore::sigmoid ? (z >= 0 ? 1 : small) / (1 + small)
                                             : std::sqrt(std::fmax(z, 0) + std::log1p(small));
  }
  return p;
}

/// What chooses, and how far two such values must differ before their order is certain.
struct Choice {
  Tensor value, slack;
  Tensor group_value, group_slack;
  std::vector<std::pair<double, double>> terms;  ///< logit and bias: if equal, so are the values
  std::vector<std::vector<std::pair<double, double>>> group_terms;
};

Choice choice_of(const double* logits, const RouterDesc& router, const Tensor& selection_bias) {
  const bool by_score = router.order == RouterOrder::score_then_select;
  Choice out;
  out.value.assign(logits, logits + router.experts);
  out.slack.assign(router.experts, 0);
  if (by_score) out.value = scores_of(logits, router);
  for (std::int64_t e = 0; e < router.experts; ++e) {
    if (by_score) out.value[e] = round_to(out.value[e], DType::f32);
    const double bias = selection_bias.empty() ? 0 : selection_bias[e];
    if (by_score || bias != 0) {
      out.slack[e] = 0x1p-21 * (std::fabs(out.value[e]) + std::fabs(bias));
    }
    out.value[e] += bias;
    out.terms.emplace_back(logits[e], bias);
  }
  const std::int64_t size = router.experts / router.groups;
  for (std::int64_t g = 0; g < router.groups; ++g) {
    out.group_terms.emplace_back(&out.terms[g * size], &out.terms[g * size] + size);
    Tensor values(&out.value[g * size], &out.value[g * size] + size);
    std::sort(values.rbegin(), values.rend());
    const bool two = router.group_score == GroupScore::sum_of_two;
    out.group_value.push_back(two ? values[0] + values[1] : values[0]);
    const double most = *std::max_element(&out.slack[g * size], &out.slack[g * size] + size);
    out.group_slack.push_back(two ? 2 * most + 0x1p-23 * std::fabs(out.group_value.back()) : most);
  }
  return out;
}

/// Does a come before b for certain (1), perhaps (0), or not (-1)? `same`: they have equal terms,
/// and the lower one comes first.
int compare(double a, double b, double slack, bool same, bool a_is_lower) {
  if (same) return a_is_lower ? 1 : -1;
  if (std::fabs(a - b) <= slack) return 0;
  return a > b ? 1 : -1;
}

/// How many groups come before group g, for certain and at most.
struct Before {
  std::int64_t surely = 0, perhaps = 0;
};
Before groups_before(const Choice& c, std::int64_t g) {
  Before before;
  for (std::int64_t o = 0; o < std::ssize(c.group_value); ++o) {
    if (o == g) continue;
    const int order =
        compare(c.group_value[o], c.group_value[g], c.group_slack[o] + c.group_slack[g],
                c.group_terms[o] == c.group_terms[g], o < g);
    before.surely += order > 0;
    before.perhaps += order >= 0;
  }
  return before;
}

}  // namespace

std::vector<std::int64_t> slots_of_token(const std::vector<std::int32_t>& ids, std::int64_t t,
                                         std::int64_t k, std::int64_t experts) {
  std::vector<std::int64_t> slots;
  for (std::int64_t slot = t * k; slot < (t + 1) * k; ++slot) {
    if (!is_sentinel(ids[slot], experts)) slots.push_back(slot);
  }
  return slots;
}

Grouping group(const Routing& routing, std::int64_t tokens, std::int64_t experts) {
  Grouping g;
  g.counts.assign(experts, 0);
  g.offsets.assign(experts + 1, 0);
  g.token_offsets.assign(tokens + 1, 0);
  g.slot_rows.assign(routing.slots(), -1);
  for (std::size_t slot = 0; slot < routing.slots(); ++slot) {
    const std::int32_t expert = routing.experts[slot];
    if (is_sentinel(expert, experts)) continue;
    ++g.counts[expert];
    ++g.token_offsets[routing.tokens[slot] + 1];
    g.row_slots.push_back(static_cast<std::int32_t>(slot));
  }
  std::partial_sum(g.counts.begin(), g.counts.end(), g.offsets.begin() + 1);
  std::partial_sum(g.token_offsets.begin(), g.token_offsets.end(), g.token_offsets.begin());
  g.token_slots = g.row_slots;
  std::stable_sort(g.token_slots.begin(), g.token_slots.end(),
                   [&](int a, int b) { return routing.tokens[a] < routing.tokens[b]; });
  std::sort(g.row_slots.begin(), g.row_slots.end(), [&](int a, int b) {
    return std::tuple(routing.experts[a], routing.tokens[a], a) <
           std::tuple(routing.experts[b], routing.tokens[b], b);
  });
  for (std::size_t row = 0; row < g.rows(); ++row) {
    g.row_tokens.push_back(routing.tokens[g.row_slots[row]]);
    g.slot_rows[g.row_slots[row]] = static_cast<std::int32_t>(row);
  }
  return g;
}

Routing limited(Routing routing, const LayerDesc& desc) {
  const Grouping g = group(routing, desc.tokens, desc.router.experts);
  for (std::size_t row = desc.rows(); row < g.rows(); ++row) routing.experts[g.row_slots[row]] = -1;
  return routing;
}

std::vector<std::int32_t> top_k(const Tensor& logits, std::int64_t tokens, const RouterDesc& router,
                                const Tensor& selection_bias) {
  const std::int64_t size = router.experts / router.groups;
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const Choice c = choice_of(&logits[t * router.experts], router, selection_bias);
    std::vector<std::int32_t> groups(router.groups);
    std::iota(groups.begin(), groups.end(), 0);
    std::stable_sort(groups.begin(), groups.end(),
                     [&](int a, int b) { return c.group_value[a] > c.group_value[b]; });
    groups.resize(router.kept_groups);
    std::vector<std::int32_t> order;
    for (std::int32_t e = 0; e < router.experts; ++e) {
      if (std::ranges::count(groups, e / size) > 0) order.push_back(e);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return c.value[a] > c.value[b]; });
    ids.insert(ids.end(), order.begin(), order.begin() + router.top_k);
  }
  return ids;
}

std::string explain_top_k(const std::vector<std::int32_t>& ids, const Tensor& logits,
                          std::int64_t tokens, const RouterDesc& router,
                          const Tensor& selection_bias) {
  const std::int64_t experts = router.experts, k = router.top_k, size = experts / router.groups;
  if (ids.size() != static_cast<std::size_t>(tokens * k)) return "wrong number of ids";
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto where = [&](std::int64_t rank) {
      return "token " + std::to_string(t) + ", rank " + std::to_string(rank) + ": ";
    };
    const Choice c = choice_of(&logits[t * experts], router, selection_bias);
    std::vector<Before> before;
    for (std::int64_t g = 0; g < router.groups; ++g) before.push_back(groups_before(c, g));
    std::vector<bool> taken(experts, false);
    std::set<std::int64_t> groups;
    for (std::int64_t rank = 0; rank < k; ++rank) {
      const std::int32_t id = ids[t * k + rank];
      if (id < 0 || id >= experts) return where(rank) + "id " + std::to_string(id);
      if (taken[id]) return where(rank) + "expert " + std::to_string(id) + " chosen twice";
      taken[id] = true;
      groups.insert(id / size);
      if (before[id / size].surely >= router.kept_groups) {
        return where(rank) + "expert " + std::to_string(id) + " chosen, whose group is out";
      }
      // Nothing that is still free, and in a group that stays, may come before the one chosen here.
      for (std::int32_t other = 0; other < experts; ++other) {
        if (taken[other] || before[other / size].perhaps >= router.kept_groups) continue;
        if (compare(c.value[other], c.value[id], c.slack[other] + c.slack[id],
                    c.terms[other] == c.terms[id], other < id) > 0) {
          return where(rank) + "expert " + std::to_string(id) + " chosen before " +
                 std::to_string(other);
        }
      }
    }
    if (std::ssize(groups) > router.kept_groups) {
      return where(0) + "experts of " + std::to_string(groups.size()) + " groups";
    }
  }
  return "";
}

Routing routing_of_ids(const std::vector<std::int32_t>& ids, std::int64_t k) {
  Routing routing;
  routing.experts = ids;
  for (std::size_t slot = 0; slot < ids.size(); ++slot) {
    routing.tokens.push_back(static_cast<std::int32_t>(slot / k));
  }
  return routing;
}

}  // namespace sonicmoe::testkit
