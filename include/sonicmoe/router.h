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

/// How tokens get their experts. Every descriptor that routes inherits these fields, so that a new
/// field reaches all of them.
struct RouterDesc {
  std::int64_t experts = 0;  ///< E, 1 to 65536
  std::int64_t top_k = 0;    ///< K, 1 to E; 0 when the routing is given
  RouterMode mode = RouterMode::softmax_over_topk;
  bool norm_topk_probs = false;  ///< topk_over_softmax: divide the K scores by their sum
  std::int64_t list_length = 0;  ///< L, routing given only: entries of the lists
  /// Routing given only: the caller promises that token ids ascend. CPU calls and checked CUDA
  /// calls verify it.
  bool assume_sorted = false;

  /// Does the caller give lists, instead of a router that chooses K experts for each token?
  constexpr bool given() const noexcept { return mode == RouterMode::given; }
  /// Is the softmax over the K chosen experts? Otherwise it is over all E.
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
  /// Do the logits of experts that a token did not choose get gradients? Then backward needs the
  /// logits of all experts.
  constexpr bool reaches_all_experts() const noexcept { return !given() && !normalised(); }
  /// Routed (token, expert) pairs of `tokens` tokens, before token rounding.
  constexpr std::int64_t rows(std::int64_t tokens) const noexcept {
    return given() ? list_length : tokens * top_k;
  }
  bool operator==(const RouterDesc&) const = default;
};

/// Token rounding (token_rounding.h) to multiples of `tile` rows an expert.
struct RoundingDesc {
  std::int64_t tile = 0;  ///< up to 1024; 0: plain top-K
  RoundingRule rule = RoundingRule::nearest;
  bool operator==(const RoundingDesc&) const = default;
};

/// A router for T tokens of width d.
struct RoutingDesc : RouterDesc {
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;     ///< d, as in ExpertsDesc
  DType dtype = DType::bf16;   ///< of x, router_w and logits
  RoundingDesc rounding = {};  ///< not when the routing is given
  bool inference = false;      ///< the plan has no backward

  /// Row capacity R: T*K for plain top-K, L when the routing is given, rounded_capacity() when
  /// rounded.
  std::int64_t row_capacity() const noexcept {
    if (rounding.tile > 0) return rounded_capacity(tokens, experts, top_k, rounding.tile);
    return rows(tokens);
  }
  /// Does backward need the logits of all experts?
  bool needs_logits() const noexcept { return rounding.tile > 0 || reaches_all_experts(); }
  bool operator==(const RoutingDesc&) const = default;
};

/// The arrays of a routing block, which carries a call's routing from forward to backward. ops.h
/// defines rows and slots. The fields have the meaning of MetadataArgs. An array that this kind of
/// routing lacks is null; "lists" are given ones and those of token rounding.
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

/// As the fields of the same names in ForwardArgs (layer.h).
struct RouterForwardArgs {
  const void* x = nullptr;                     ///< (T, d) dtype; unused when the routing is given
  const void* router_w = nullptr;              ///< (E, d) dtype; likewise
  const std::int32_t* list_tokens = nullptr;   ///< (L) routing given
  const std::int32_t* list_experts = nullptr;  ///< (L)
  const float* list_scores = nullptr;          ///< (L)
  std::uint64_t seed = 0;                      ///< as in TokenRoundingArgs
  std::uint64_t offset = 0;
  const std::uint64_t* draws = nullptr;  ///< (2) replaces seed and offset

  void* logits = nullptr;              ///< (T, E) dtype; unused when the routing is given
  std::int32_t* counts = nullptr;      ///< (E) rows of each expert
  std::int32_t* frequency = nullptr;   ///< (E) rows before token rounding, optional; rounding only
  float* scores = nullptr;             ///< (T, K), optional; plain top-K only
  std::int32_t* expert_ids = nullptr;  ///< (T, K), optional; plain top-K only
  float* slot_scores = nullptr;  ///< (R) scores of the lists that rounding writes; rounding only
  std::int32_t* error_word = nullptr;  ///< (1), optional, CUDA
  void* routing = nullptr;             ///< routing_bytes() bytes, at a multiple of 4
};

/// Gradients from those of the rows' scores. All outputs are overwritten.
struct RouterBackwardArgs {
  const void* x = nullptr;             ///< (T, d) dtype; unused when the routing is given
  const void* router_w = nullptr;      ///< (E, d) dtype; likewise
  const void* logits = nullptr;        ///< as forward wrote them, if RoutingDesc::needs_logits()
  const void* routing = nullptr;       ///< as forward wrote it
  const float* row_dscores = nullptr;  ///< (R)
  const void* dlogits_in = nullptr;    ///< (T, E) dtype, of other losses; optional

  void* dlogits = nullptr;    ///< (T, E) dtype; unused when the routing is given
  float* dscores = nullptr;   ///< (L); routing given only; 0 for sentinels
  void* dx = nullptr;         ///< (T, d) dtype: the router's part of dX; or null: not computed
  void* drouter_w = nullptr;  ///< (E, d) dtype; or null
};

/// From tokens to grouped rows: the router's product, top-K or token rounding, and the index arrays
/// that ExpertsPlan and CombinePlan read. Otherwise like LayerPlan.
class SONICMOE_API RouterPlan {
 public:
  const RoutingDesc& desc() const noexcept;
  std::size_t forward_workspace_bytes() const noexcept;
  std::size_t backward_workspace_bytes() const noexcept;
  /// Bytes of a routing block.
  std::size_t routing_bytes() const noexcept;
  /// The arrays in the routing block at `routing`.
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
