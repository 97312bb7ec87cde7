#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "sonicmoe/status.h"
#include "sonicmoe/token_rounding.h"
#include "testkit/numbers.h"

/// What token rounding means, by full sorts and plain loops that share no code with the library.
namespace sonicmoe::testkit {

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> counter,
                                           std::array<std::uint32_t, 2> key);

/// What plain routing says of every token, in fp32: the starting point of rounding. Taken from the
/// library's own top-K, which has its own tests, so that what follows can be compared bit for bit.
struct TokenChoice {
  std::vector<std::int32_t> ids;     ///< (T, K)
  std::vector<float> scores;         ///< (T, K)
  std::vector<float> probabilities;  ///< (T, E): full softmax
};

/// What token rounding writes.
struct RoundedLists {
  std::vector<float> scores;             ///< (capacity)
  std::vector<std::int32_t> token_ids;   ///< (capacity)
  std::vector<std::int32_t> expert_ids;  ///< (capacity)
  std::vector<std::int32_t> counts;      ///< (E)
  std::vector<std::int32_t> frequency;   ///< (E)
};
/// Same bits everywhere; "" or the name of the first array that differs.
std::string first_difference(const RoundedLists& a, const RoundedLists& b);

RoundedLists round_tokens(const TokenRoundingDesc& desc, const TokenChoice& choice,
                          std::uint64_t seed, std::uint64_t offset);

/// The probability, in fp64 and straight from the definition, that an expert goes up under a
/// stochastic rule; (E), 0 for experts that stay or are clamped to T.
std::vector<double> up_probabilities(const TokenRoundingDesc& desc, const TokenChoice& choice);

/// Whether `lists` keeps every promise that can be stated without saying how rounding is done:
/// multiples of the tile, deviations, order and padding of the lists, no chosen token dropped for
/// another, scores as plain routing gives. Returns what is wrong, or "".
std::string explain_rounding(const TokenRoundingDesc& desc, const TokenChoice& choice,
                             const RoundedLists& lists);

/// Scores of the lists as a function of the logits (T, E), in fp64. Which experts the tokens chose
/// (ids) and which entries exist is held fixed. Sentinels score 0.
Tensor rounded_scores(const TokenRoundingDesc& desc, const Tensor& logits,
                      const std::vector<std::int32_t>& ids, const RoundedLists& lists);
/// Its gradient, (T, E): sum over the entries of dscores[i] dscore[i]/dlogits.
struct RoundedScoresGrad {
  Tensor value;
  Tensor magnitude;  ///< the same sum with every term positive: what error bounds are made of
};
RoundedScoresGrad rounded_scores_grad(const TokenRoundingDesc& desc, const Tensor& logits,
                                      const std::vector<std::int32_t>& ids,
                                      const RoundedLists& lists, const Tensor& dscores);

/// Runs the library in guarded, poisoned memory.
class RoundingRunner {
 public:
  /// `logits` as the library stores them: (T, E) of desc.dtype. The library accepts `desc`.
  RoundingRunner(const TokenRoundingDesc& desc, std::vector<std::byte> logits, Device device = {})
      : desc_(desc), logits_(std::move(logits)), device_(device) {}

  const TokenRoundingDesc& desc() const { return desc_; }
  Tensor logits() const { return decode(logits_, desc_.dtype); }

  /// Every function returns a status that is not ok, without results, if the library refuses the
  /// call, writes where it must not, or writes anything at all although it refuses.
  Result<TokenChoice> choose(const Options& options = {}) const;
  Result<RoundedLists> round(std::uint64_t seed, std::uint64_t offset,
                             const Options& options = {}) const;
  /// dlogits (T, E). `dlogits_in` may be empty. `offsets`: with
  /// TokenRoundingGradArgs::token_offsets.
  Result<Tensor> gradient(const RoundedLists& lists, const Tensor& dscores,
                          const Tensor& dlogits_in, const Options& options = {},
                          bool offsets = false) const;

 private:
  TokenRoundingDesc desc_;
  std::vector<std::byte> logits_;
  Device device_;
};

}  // namespace sonicmoe::testkit
