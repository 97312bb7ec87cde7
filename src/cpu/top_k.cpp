// Writes scores and ids of each token's K experts: larger value first, ties to the lower expert id.
// With ids of the caller it writes those and their scores.
#include <algorithm>
#include <atomic>
#include <limits>

#include "core/backends.h"
#include "cpu/scored_routing.h"

namespace sonicmoe::cpu {
namespace {

/// Of one thread.
std::int64_t floats(const TopKDesc& d) {
  return d.experts + (d.plain() ? 0 : ScoredScratch::floats(d));
}

std::size_t workspace(const TopKDesc& desc, const Exec& exec) {
  return static_cast<std::size_t>(floats(desc)) * 4 * static_cast<std::size_t>(exec.threads);
}

/// `row` holds the token's logits, with ScoredScratch behind it; `max` is the largest.
void route_scored(const TopKDesc& d, const TopKArgs& a, std::int64_t t, float max, float* row) {
  const ScoredScratch scratch(d, row + d.experts);
  const std::int64_t first = t * d.top_k;
  score_all(d, max, row, scratch.p);
  if (d.takes_ids()) {
    std::copy_n(a.given_ids + first, d.top_k, a.ids + first);
  } else {
    choose_experts(d, row, a.selection_bias, scratch, a.ids + first);
  }
  weigh_experts(d, row, a.expert_scale, scratch, a.ids + first, a.probabilities + first,
                a.scores + first);
}

/// Gives a token with bad logits the score NaN, but for sentinels.
void spoil_scores(const TopKDesc& d, const TopKArgs& a, std::int64_t t) {
  for (std::int64_t i = t * d.top_k; i < (t + 1) * d.top_k; ++i) {
    if (is_sentinel(a.ids[i], d.experts)) continue;
    a.scores[i] = std::numeric_limits<float>::quiet_NaN();
    if (!d.plain()) a.probabilities[i] = a.scores[i];
  }
}

template <class T>
Status run_typed(const TopKDesc& d, const TopKArgs& a, float* rows, int threads) {
  const T* logits = static_cast<const T*>(a.logits);
  const GivenIds given = {d.takes_ids() && d.over_top_k() ? a.given_ids : nullptr, d.top_k};
  const bool softmax = d.score == RouterScore::softmax;
  if (a.error_word == nullptr) {
    // Reads all logits before anything is written, so a refused call writes nothing.
    const Status status = check_logits(logits, d.tokens, d.experts, rows, threads, given, softmax);
    if (!status.ok()) return status;
  }
  std::atomic<bool> any_bad{false};
  parallel_ranges(
      threads, d.tokens, kTokensPerPiece, [&](int thread, std::int64_t begin, std::int64_t end) {
        float* row = rows + thread * floats(d);
        for (std::int64_t t = begin; t < end; ++t) {
          float max = load_row(logits + t * d.experts, d.experts, row);
          const bool bad = a.error_word != nullptr &&
                           bad_logits(max, row, d.experts, t, given, softmax) != nullptr;
          if (bad) max = tame_row(d.experts, row);
          const std::int64_t first = t * d.top_k;
          if (!d.plain()) {
            route_scored(d, a, t, max, row);
          } else if (d.takes_ids()) {
            std::copy_n(a.given_ids + first, d.top_k, a.ids + first);
            score_ids(d, max, row, a.given_ids + first, a.scores + first);
          } else {
            route_token(d, max, false, row, a.scores + first, a.ids + first);
          }
          if (bad) spoil_scores(d, a, t), any_bad = true;
        }
      });
  if (any_bad) *a.error_word |= kBadLogits;
  return {};
}

Status run(const TopKDesc& desc, const TopKArgs& args, void* memory, const Exec& exec) noexcept {
  float* rows = static_cast<float*>(memory);
  return visit_dtype(desc.dtype, [&](auto type) {
    return run_typed<decltype(type)>(desc, args, rows, exec.threads);
  });
}

}  // namespace

const Kernel<TopKDesc> kTopK = {
    .op = "top_k",
    .name = "cpu.top_k",
    .dtypes = kStorageTypes,
    .workspace = workspace,
    .run = run,
};

}  // namespace sonicmoe::cpu
