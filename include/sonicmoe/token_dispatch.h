#pragma once

#include <algorithm>
#include <cstdint>

#include "sonicmoe/ops.h"
#include "sonicmoe/status.h"
#include "sonicmoe/types.h"

/// Expert parallelism: which tokens a rank sends to which ranks. Rank p of P has the experts p e ..
/// p e + e - 1. A token goes once to each rank that has one of its experts, and takes along the
/// choices of that rank alone.
///
/// A row is a token on its way to a rank. The rows for one rank lie in the order of tokens. Those
/// of rank p start at row p T, or, packed, behind those of the ranks before.
namespace sonicmoe {

struct TokenDispatchArgs {
  const std::int32_t* ids = nullptr;  ///< (T, K) among all experts; < 0 or >= P e: sentinels
  const float* scores = nullptr;      ///< (T, K)
  /// (2P+2): for each rank its rows, then for each its (token, expert) pairs, then e and T.
  std::int32_t* numbers = nullptr;
  std::int32_t* row_tokens = nullptr;  ///< (R): row -> token; places without a row: 0
  /// (R, 2K'): the ids among the rank's own, in the order of `ids`, -1 behind the last; then the
  /// bits of their scores, 0 behind the last. Places without a row: -1 and 0; packed, undefined.
  std::int32_t* choices = nullptr;
  std::int32_t* token_rows = nullptr;  ///< (T, P): the token's row for each rank, -1 for none
  /// (T, K): where the score of each choice lies in a tensor of one float and then (R, K') of the
  /// rows' scores. Sentinels: 0.
  std::int32_t* score_places = nullptr;
};
/// Sizes. Choices of a token that repeat may be more than K'; those behind are left out.
struct SONICMOE_API TokenDispatchDesc {
  using Args = TokenDispatchArgs;
  std::int64_t tokens = 0;   ///< T
  std::int64_t experts = 0;  ///< e, of one rank
  std::int64_t ranks = 0;    ///< P, up to 1024
  std::int64_t top_k = 0;    ///< K
  bool packed = false;
  /// K', the choices of a row: a rank has no more.
  std::int64_t columns() const noexcept { return std::min(top_k, experts); }
  /// R, the places for rows. Packed rows fill the first ones.
  std::int64_t rows() const noexcept { return tokens * (packed ? std::min(ranks, top_k) : ranks); }
  bool operator==(const TokenDispatchDesc&) const = default;
};

/// Writes the rows of tokens to their ranks, whose memory this device reaches: x[row_tokens[p T +
/// i]] to row i of rank p, for i below counts[p]. Token ids out of [0, T) write nothing. What a
/// rank has written is there for another one behind a barrier of both.
struct SendRowsArgs {
  const void* x = nullptr;                   ///< (T, d) dtype
  const std::int32_t* row_tokens = nullptr;  ///< (P T): as TokenDispatchArgs has it, not packed
  const std::int32_t* counts = nullptr;      ///< (P): rows for each rank, at most T
  void* const* to = nullptr;                 ///< (P) in host memory: (T, d) of each rank
};
/// Sizes and type.
struct SONICMOE_API SendRowsDesc {
  using Args = SendRowsArgs;
  static constexpr std::int64_t kMostRanks = 128;
  std::int64_t tokens = 0;  ///< T
  std::int64_t hidden = 0;  ///< d
  std::int64_t ranks = 0;   ///< P, up to kMostRanks
  DType dtype = DType::bf16;
  bool operator==(const SendRowsDesc&) const = default;
};

SONICMOE_API Result<OpPlan<TokenDispatchDesc>> make_plan(const TokenDispatchDesc&, Device = {},
                                                         const Options& = {});
SONICMOE_API Result<OpPlan<SendRowsDesc>> make_plan(const SendRowsDesc&, Device = {},
                                                    const Options& = {});
extern template class OpPlan<TokenDispatchDesc>;
extern template class OpPlan<SendRowsDesc>;

}  // namespace sonicmoe
