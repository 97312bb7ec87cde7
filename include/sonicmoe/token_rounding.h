#pragma once

#include <cstddef>
#include <cstdint>

#include "sonicmoe/ops.h"
#include "sonicmoe/status.h"
#include "sonicmoe/types.h"

/// Token rounding: every expert's row count becomes a multiple of the GEMM's tile (or zero), so
/// that products spend no time on padding. For training; evaluation uses plain top-K.
///
/// Each token first chooses its top-K experts ("TC", token choice). Let f be an expert's number of
/// TC tokens, floor and ceil the multiples of the tile beside f. If f is no multiple of the tile,
/// the expert keeps its best `floor` TC tokens, or all of them and the best others up to `ceil`.
/// The rule (RoundingRule) decides which; where ceil > T, every rule takes floor.
///
/// Best first, the order inside an expert is: TC tokens before others; then the full softmax's
/// probability (fp32), descending; then the lower token id.
namespace sonicmoe {

/// A NaN or a row whose maximum is not finite is refused (invalid_data) before anything is written,
/// or its token's scores are NaN, as TopKArgs says.
struct TokenRoundingArgs {
  const void* logits = nullptr;  ///< (T, E) dtype
  /// Draws are Philox4x32-10 with key = seed and counter = (offset, expert). The caller advances
  /// `offset` at every training step. Only the rules stochastic and nearest_scores draw.
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  /// (2), optional: seed and offset in the plan's memory, at a multiple of 8 bytes, in place of the
  /// fields. The kernels read them, so a captured graph draws anew when it is replayed.
  const std::uint64_t* draws = nullptr;

  // Lists of length capacity(), sorted by token, then expert. Sentinels fill the tail: expert id E,
  // score 0, the last token's id.
  float* scores = nullptr;             ///< TC entries: as plain top-K gives them; added entries:
                                       ///< full-softmax probability
  std::int32_t* token_ids = nullptr;   ///< ascending
  std::int32_t* expert_ids = nullptr;  ///< ascending within a token
  std::int32_t* counts = nullptr;      ///< (E) entries of each expert after rounding
  std::int32_t* frequency = nullptr;   ///< (E) TC tokens of each expert; optional
  std::int32_t* error_word = nullptr;  ///< (1), optional: see kBadLogits
};
/// Router, sizes, rule and tile.
struct SONICMOE_API TokenRoundingDesc : RouterDesc {  ///< `input`: projection or logits
  using Args = TokenRoundingArgs;
  std::int64_t tokens = 0;
  DType dtype = DType::bf16;  ///< of the logits
  RoundingRule rule = RoundingRule::nearest;
  std::int64_t tile = 128;  ///< 1 to 1024
  /// Upper bound on the entries, from sizes alone: the length of the lists.
  std::int64_t capacity() const noexcept { return rounded_capacity(tokens, experts, top_k, tile); }
  bool operator==(const TokenRoundingDesc&) const = default;
};

/// From the gradients of the lists' scores to those of the logits. TC entries go through the
/// gradient of plain top-K, with 0 for dropped entries. Added entries go through the full softmax.
/// CPU calls and checked calls refuse lists whose token ids descend or lie outside [0, T)
/// (invalid_data). Expert ids < 0 or >= E are sentinels.
struct TokenRoundingGradArgs {
  const void* logits = nullptr;              ///< (T, E)
  const std::int32_t* token_ids = nullptr;   ///< (list_length), as token rounding wrote it
  const std::int32_t* expert_ids = nullptr;  ///< (list_length)
  /// (T+1), optional: where each token's entries begin, sentinels apart. It saves CUDA a search.
  const std::int32_t* token_offsets = nullptr;
  const float* dscores = nullptr;    ///< (list_length)
  const void* dlogits_in = nullptr;  ///< (T, E), optional: of other losses, added
  void* dlogits = nullptr;           ///< (T, E)
};
/// Router and sizes of the gradient.
struct SONICMOE_API TokenRoundingGradDesc : RouterDesc {  ///< list_length: capacity(), usually
  using Args = TokenRoundingGradArgs;
  std::int64_t tokens = 0;
  DType dtype = DType::bf16;
  bool operator==(const TokenRoundingGradDesc&) const = default;
};

SONICMOE_API Result<OpPlan<TokenRoundingDesc>> make_plan(const TokenRoundingDesc&, Device = {},
                                                         const Options& = {});
SONICMOE_API Result<OpPlan<TokenRoundingGradDesc>> make_plan(const TokenRoundingGradDesc&,
                                                             Device = {}, const Options& = {});
extern template class OpPlan<TokenRoundingDesc>;
extern template class OpPlan<TokenRoundingGradDesc>;

}  // namespace sonicmoe
