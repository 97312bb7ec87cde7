#pragma once

#include <cstdint>
#include <vector>

#include "sonicmoe/layer.h"
#include "testkit/numbers.h"

namespace sonicmoe::testkit {

/// Which (token, expert) pairs exist, in the order they came in (slots): t*K + k, or the position
/// in lists. An expert id < 0 or >= E is a sentinel.
struct Routing {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> experts;
  std::size_t slots() const { return experts.size(); }
};

/// Slots sorted by expert, then token, then slot: what the metadata operation must compute.
struct Grouping {
  std::vector<std::int32_t> counts;         ///< (E)
  std::vector<std::int32_t> offsets;        ///< (E+1)
  std::vector<std::int32_t> row_tokens;     ///< (rows in use)
  std::vector<std::int32_t> row_slots;      ///< (rows in use)
  std::vector<std::int32_t> slot_rows;      ///< (slots), -1 for sentinels
  std::vector<std::int32_t> token_offsets;  ///< (T+1)
  std::vector<std::int32_t> token_slots;    ///< (rows in use): by token, then slot
  std::size_t rows() const { return row_slots.size(); }
};
inline bool is_sentinel(std::int32_t expert, std::int64_t experts) {
  return expert < 0 || expert >= experts;
}
/// The slots of token t without sentinels; `ids` is (T, K).
std::vector<std::int64_t> slots_of_token(const std::vector<std::int32_t>& ids, std::int64_t t,
                                         std::int64_t k, std::int64_t experts);
Grouping group(const Routing& routing, std::int64_t tokens, std::int64_t experts);
/// The routing with sentinels in the place of pairs past LayerDesc::max_rows.
Routing limited(Routing routing, const LayerDesc& desc);

/// The K experts of each token, (T, K), by descending value of what chooses, computed in fp64 and
/// scores rounded to fp32; ties to the lower id. `selection_bias` may be empty.
std::vector<std::int32_t> top_k(const Tensor& logits, std::int64_t tokens, const RouterDesc& router,
                                const Tensor& selection_bias = {});

/// Whether `ids` is a right answer of top-K for these logits. Logits alone allow one answer. Where
/// two scores, or two groups' scores, lie closer than 2^-20 of their terms, their last bits decide
/// the order. Either order is then right, unless the terms are equal. Returns what is wrong, or "".
std::string explain_top_k(const std::vector<std::int32_t>& ids, const Tensor& logits,
                          std::int64_t tokens, const RouterDesc& router,
                          const Tensor& selection_bias = {});

Routing routing_of_ids(const std::vector<std::int32_t>& ids, std::int64_t k);

}  // namespace sonicmoe::testkit
