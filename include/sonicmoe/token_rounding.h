#pragma once

#include <cstddef>
#include <cstdint>

#include "sonicmoe/ops.h"
#include "sonicmoe/status.h"
#include "sonicmoe/types.h"

/// Token rounding: every expert's row count becomes a multiple of the GEMM tile (or zero), so that
/// no math is spent on padding. For training; evaluation uses plain top-K.
///
/// Each token first picks its top-K experts ("TC", token choice). An expert with f TC tokens whose
/// f is not a multiple of the tile then keeps floor(f) of them, or all of them and the best others
/// up to ceil(f) (floor and ceil to multiples of the tile). Where ceil(f) > T, every rule takes
/// floor. Order inside an expert: TC tokens before others; among each, full-softmax probability
/// (fp32) descending, then lower token id.
namespace sonicmoe {

struct TokenRoundingArgs {
  const void* logits = nullptr;  ///< (T, E) dtype
  /// Draws are Philox4x32-10 with key = seed and counter = (offset, expert): `offset` moves on with
  /// every step of a training run. Only the stochastic rules draw.
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  const std::uint64_t* draws = nullptr;  ///< (2) seed, offset in the plan's memory, instead of
                                         ///< both: a captured graph draws anew when it is replayed

  // Lists of length capacity(), by token, then expert; the tail is padded with sentinels (expert id
  // E, score 0, the last token's id).
  float* scores = nullptr;  ///< TC entries: as plain top-K gives; added: full-softmax probability
  std::int32_t* token_ids = nullptr;
  std::int32_t* expert_ids = nullptr;
  std::int32_t* counts = nullptr;      ///< (E) after rounding
  std::int32_t* frequency = nullptr;   ///< (E) before rounding; optional
  std::int32_t* error_word = nullptr;  ///< (1), optional, CUDA: see kBadLogits
};
struct SONICMOE_API TokenRoundingDesc : RouterDesc {  ///< `mode` is not `given`
  using Args = TokenRoundingArgs;
  std::int64_t tokens = 0;
  DType dtype = DType::bf16;  ///< of the logits
  RoundingRule rule = RoundingRule::nearest;
  std::int64_t tile = 128;  ///< 1 to 1024
  /// A static bound on the entries.
  std::int64_t capacity() const noexcept { return rounded_capacity(tokens, experts, top_k, tile); }
  bool operator==(const TokenRoundingDesc&) const = default;
};

/// Gradient of the lists' scores to the logits. TC entries go through plain top-K's gradient, with
/// 0 for the entries that were dropped; added entries through the full softmax.
struct TokenRoundingGradArgs {
  const void* logits = nullptr;              ///< (T, E)
  const std::int32_t* token_ids = nullptr;   ///< (capacity), as written by the forward
  const std::int32_t* expert_ids = nullptr;  ///< (capacity)
  const float* dscores = nullptr;            ///< (capacity)
  const void* dlogits_in = nullptr;          ///< (T, E), optional, added
  void* dlogits = nullptr;                   ///< (T, E)
};
struct SONICMOE_API TokenRoundingGradDesc : RouterDesc {  ///< `list_length`: that of the lists
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
