#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sonicmoe/status.h"
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

/// What a router plan is made for: T tokens of width d.
struct RoutingDesc : RouterDesc {
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;    ///< d
  DType dtype = DType::bf16;  ///< of x, router_w and logits
  RoundingDesc rounding = {};
  bool inference = false;  ///< no backward

  /// Row capacity R: T*K, the list length when the routing is given, rounded_capacity when rounded.
  std::int64_t row_capacity() const noexcept {
    if (rounding.tile > 0) return rounded_capacity(tokens, experts, top_k, rounding.tile);
    return rows(tokens);
  }
  /// Does backward need the logits of all experts?
  bool needs_logits() const noexcept { return rounding.tile > 0 || reaches_all_experts(); }
  bool operator==(const RoutingDesc&) const = default;
};

/// The arrays of a routing block, which carries a call's routing from forward to backward. "Rows"
/// and "slots" are those of ops.h. Null where this kind of routing has none.
struct RoutedRows {
  float* slot_scores = nullptr;           ///< (R) top-K
  std::int32_t* slot_experts = nullptr;   ///< (R) top-K, rounded
  std::int32_t* slot_tokens = nullptr;    ///< (R) rounded
  float* row_scores = nullptr;            ///< (R)
  std::int32_t* row_tokens = nullptr;     ///< (R)
  std::int32_t* slot_rows = nullptr;      ///< (R)
  std::int32_t* token_slots = nullptr;    ///< (R) lists
  std::int32_t* token_offsets = nullptr;  ///< (T+1) lists
  std::int32_t* offsets = nullptr;        ///< (E+1)
  std::int32_t* expert_order = nullptr;   ///< (E)
};

/// Pointers as in ForwardArgs (layer.h), which has most of these fields under the same names.
struct RouterForwardArgs {
  const void* x = nullptr;                     ///< (T, d) dtype; unused when the routing is given
  const void* router_w = nullptr;              ///< (E, d) dtype; likewise
  const std::int32_t* list_tokens = nullptr;   ///< (L) routing given
  const std::int32_t* list_experts = nullptr;  ///< (L)
  const float* list_scores = nullptr;          ///< (L)
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  const std::uint64_t* draws = nullptr;  ///< (2) seed and offset in the plan's memory, instead

  void* logits = nullptr;              ///< (T, E) dtype; unused when the routing is given
  std::int32_t* counts = nullptr;      ///< (E) rows of each expert
  std::int32_t* frequency = nullptr;   ///< (E) rows before token rounding, optional; rounding only
  float* scores = nullptr;             ///< (T, K), optional; plain top-K only
  std::int32_t* expert_ids = nullptr;  ///< (T, K), optional; plain top-K only
  float* slot_scores = nullptr;  ///< (R) of the lists that token rounding makes; rounding only
  std::int32_t* error_word = nullptr;  ///< (1), optional, CUDA
  void* routing = nullptr;             ///< routing_bytes(), at a multiple of 4
};

struct RouterBackwardArgs {
  const void* x = nullptr;
  const void* router_w = nullptr;
  const void* logits = nullptr;        ///< where RoutingDesc::needs_logits()
  const void* routing = nullptr;       ///< as forward wrote it
  const float* row_dscores = nullptr;  ///< (R)
  const void* dlogits_in = nullptr;    ///< (T, E) dtype, of losses outside; optional

  void* dlogits = nullptr;    ///< (T, E) dtype; unused when the routing is given
  float* dscores = nullptr;   ///< (L); routing given only; 0 for sentinels
  void* dx = nullptr;         ///< (T, d) dtype: the router's part of dx; null: not wanted
  void* drouter_w = nullptr;  ///< (E, d) dtype; null: not wanted
};

/// From tokens to grouped rows: the router's product, top-K or token rounding, and the arrays by
/// which ExpertsPlan finds its rows and CombinePlan its sums. Otherwise like LayerPlan.
class SONICMOE_API RouterPlan {
 public:
  const RoutingDesc& desc() const noexcept;
  std::size_t forward_workspace_bytes() const noexcept;
  std::size_t backward_workspace_bytes() const noexcept;
  std::size_t routing_bytes() const noexcept;
  /// The arrays in a routing block of this plan.
  RoutedRows routed_rows(void* routing) const noexcept;
  std::string explain() const;
  std::vector<const char*> forward_operations() const;
  std::vector<const char*> backward_operations() const;

  Status forward(const RouterForwardArgs& args, Workspace workspace, Stream stream = {},
                 OperationMask operations = kAllOperations) const noexcept;
  Status backward(const RouterBackwardArgs& args, Workspace workspace, Stream stream = {},
                  OperationMask operations = kAllOperations) const noexcept;

  struct Impl;
  explicit RouterPlan(std::shared_ptr<const Impl> impl) noexcept : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

SONICMOE_API Result<RouterPlan> make_plan(const RoutingDesc& desc, Device device = {},
                                          const Options& options = {});

}  // namespace sonicmoe
