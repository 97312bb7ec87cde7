#pragma once

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe {

/// How tokens come to their experts. Every descriptor that routes has these fields, so that what is
/// added here reaches all of them. E experts, K top_k.
struct RouterDesc {
  std::int64_t experts = 0;  ///< E >= 1
  std::int64_t top_k = 0;    ///< 1 <= K <= E; 0 when the routing is given
  RouterMode mode = RouterMode::softmax_over_topk;
  bool norm_topk_probs = false;  ///< topk_over_softmax: divide the K scores by their sum
  std::int64_t list_length = 0;  ///< L, routing given only: static length of the lists
  bool assume_sorted = false;    ///< routing given only: token ids ascend (not verified on CUDA)

  /// Are there lists, not K experts of each token?
  constexpr bool given() const noexcept { return mode == RouterMode::given; }
  /// Is the softmax over the K chosen experts? Else it is over all E.
  constexpr bool over_top_k() const noexcept {
    switch (mode) {
      case RouterMode::softmax_over_topk:
        return true;
      case RouterMode::topk_over_softmax:
      case RouterMode::given:
        break;
    }
    return false;
  }
  /// Do a token's K scores add up to 1?
  constexpr bool normalised() const noexcept { return over_top_k() || norm_topk_probs; }
  /// Do experts that a token did not choose get gradients of their logits? Then backward needs the
  /// logits of all.
  constexpr bool reaches_all_experts() const noexcept { return !given() && !normalised(); }
  /// Routed (token, expert) pairs of so many tokens.
  constexpr std::int64_t rows(std::int64_t tokens) const noexcept {
    return given() ? list_length : tokens * top_k;
  }
  bool operator==(const RouterDesc&) const = default;
};

/// Token rounding (token_rounding.h) to multiples of `tile` rows an expert.
struct RoundingDesc {
  std::int64_t tile = 0;  ///< 0: plain top-K; else 1 to 1024
  RoundingRule rule = RoundingRule::nearest;
  bool operator==(const RoundingDesc&) const = default;
};

}  // namespace sonicmoe
