#include "testkit/grouping.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

namespace sonicmoe::testkit {
namespace {

/// fp64 softmax of one row.
Tensor probabilities(const double* logits, std::int64_t experts) {
  Tensor p(experts);
  const double max = *std::max_element(logits, logits + experts);
  double sum = 0;
  for (std::int64_t e = 0; e < experts; ++e) sum += p[e] = std::exp(logits[e] - max);
  for (double& value : p) value /= sum;
  return p;
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

std::vector<std::int32_t> top_k(const Tensor& logits, std::int64_t tokens, std::int64_t experts,
                                std::int64_t k, RouterOrder by) {
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const double* row = &logits[t * experts];
    Tensor key(row, row + experts);
    if (by == RouterOrder::score_then_select) {
      key = probabilities(row, experts);
      for (double& p : key) p = round_to(p, DType::f32);
    }
    std::vector<std::int32_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key[a] > key[b]; });
    ids.insert(ids.end(), order.begin(), order.begin() + k);
  }
  return ids;
}

std::string explain_top_k(const std::vector<std::int32_t>& ids, const Tensor& logits,
                          std::int64_t tokens, std::int64_t experts, std::int64_t k,
                          RouterOrder by) {
  const double slack = by == RouterOrder::score_then_select ? 0x1p-20 : 0;
  if (ids.size() != static_cast<std::size_t>(tokens * k)) return "wrong number of ids";
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto where = [&](std::int64_t rank) {
      return "token " + std::to_string(t) + ", rank " + std::to_string(rank) + ": ";
    };
    const double* row = &logits[t * experts];
    const Tensor p = probabilities(row, experts);
    std::vector<bool> taken(experts, false);
    for (std::int64_t rank = 0; rank < k; ++rank) {
      const std::int32_t id = ids[t * k + rank];
      if (id < 0 || id >= experts) return where(rank) + "id " + std::to_string(id);
      if (taken[id]) return where(rank) + "expert " + std::to_string(id) + " chosen twice";
      taken[id] = true;
      // Nothing that is still free may come before the one chosen here.
      for (std::int32_t other = 0; other < experts; ++other) {
        if (taken[other]) continue;
        const bool tie = row[other] == row[id];
        const bool better = slack == 0 ? row[other] > row[id] : p[other] * (1 - slack) > p[id];
        if (better || (tie && other < id)) {
          return where(rank) + "expert " + std::to_string(id) + " chosen before " +
                 std::to_string(other);
        }
      }
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
