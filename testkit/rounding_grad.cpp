#include <algorithm>
#include <cmath>

#include "testkit/rounding.h"

namespace sonicmoe::testkit {
namespace {

/// The score of one entry is a softmax over a group of experts: those that the token chose, if the
/// entry is one of them and its score is renormalised, else all.
struct Entry {
  bool sentinel;
  std::vector<std::pair<std::int64_t, double>> group;  // expert, softmax over the group
  std::int64_t expert;

  double score() const {
    for (const auto& [e, p] : group) {
      if (e == expert) return p;
    }
    return 0;
  }
};

Entry entry(const TokenRoundingDesc& desc, const Tensor& logits,
            const std::vector<std::int32_t>& ids, std::int64_t t, std::int64_t expert) {
  Entry out{expert >= desc.experts, {}, expert};
  if (out.sentinel) return out;
  const auto begin = ids.begin() + t * desc.top_k, end = begin + desc.top_k;
  const bool of_chosen = (desc.order == RouterOrder::select_then_score || desc.renormalize) &&
                         std::find(begin, end, expert) != end;
  double max = -HUGE_VAL, sum = 0;
  for (std::int64_t e = 0; e < desc.experts; ++e) {
    if (of_chosen && std::find(begin, end, e) == end) continue;
    out.group.emplace_back(e, logits[t * desc.experts + e]);
    max = std::max(max, logits[t * desc.experts + e]);
  }
  for (auto& [e, p] : out.group) sum += p = std::exp(p - max);
  for (auto& [e, p] : out.group) p /= sum;
  return out;
}

}  // namespace

Tensor rounded_scores(const TokenRoundingDesc& desc, const Tensor& logits,
                      const std::vector<std::int32_t>& ids, const RoundedLists& lists) {
  Tensor out;
  for (std::size_t i = 0; i < lists.expert_ids.size(); ++i) {
    out.push_back(entry(desc, logits, ids, lists.token_ids[i], lists.expert_ids[i]).score());
  }
  return out;
}

RoundedScoresGrad rounded_scores_grad(const TokenRoundingDesc& desc, const Tensor& logits,
                                      const std::vector<std::int32_t>& ids,
                                      const RoundedLists& lists, const Tensor& dscores) {
  const std::size_t size = desc.tokens * desc.experts;
  RoundedScoresGrad out{Tensor(size), Tensor(size)};
  for (std::size_t i = 0; i < lists.expert_ids.size(); ++i) {
    const std::int64_t t = lists.token_ids[i];
    const Entry x = entry(desc, logits, ids, t, lists.expert_ids[i]);
    if (x.sentinel) continue;
    const double pull = dscores[i] * x.score();
    for (const auto& [e, p] : x.group) {
      const double own = e == x.expert ? 1 : 0;
      out.value[t * desc.experts + e] += pull * (own - p);
      out.magnitude[t * desc.experts + e] += std::fabs(pull) * (own + p);
    }
  }
  return out;
}

}  // namespace sonicmoe::testkit
