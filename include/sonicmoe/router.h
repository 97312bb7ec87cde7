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

/// How tokens get their experts and scores. Every descriptor that routes inherits these fields, so
/// that a new field reaches all of them. From logits (T, E), token by token:
///
///   z = logits + logit_bias                           fp32, then rounded to the type of the logits
///   p = score(z)
///   v = p or z (order) + selection_bias               what chooses, in fp32
///   only the `kept_groups` best of `groups` groups of neighbouring experts stay
///   the K largest v                                   ties to the lower expert
///   w = p, divided by (sum of the K p + eps) if renormalize
///   score = w * scale * expert_scale
///
/// Where the sum that divides is 0, so are the scores and their gradients. The three biases and
/// scales are fp32 arrays (E) among the arguments. Without logits every option has its default.
struct RouterDesc {
  std::int64_t experts = 0;  ///< E, 1 to 65536
  std::int64_t top_k = 0;    ///< K, 1 to E; 0 for lists
  RouterInput input = RouterInput::projection;
  RouterScore score = RouterScore::softmax;
  RouterOrder order = RouterOrder::select_then_score;
  bool renormalize = false;      ///< a softmax over the top-K adds up to 1 anyway
  float eps = 0.0f;              ///< 0 or more, finite; only with renormalize, not over the top-K
  float scale = 1.0f;            ///< above 0, finite
  bool logit_bias = false;       ///< projection only; trained
  bool selection_bias = false;   ///< where the layer chooses; without a gradient
  bool expert_scale = false;     ///< trained
  std::int64_t groups = 1;       ///< of E / groups experts each; up to kMaxGroups
  std::int64_t kept_groups = 1;  ///< 1 to groups, and K <= kept_groups * E / groups
  GroupScore group_score = GroupScore::largest;  ///< sum_of_two: at least two experts a group
  bool f32_logits = false;       ///< logits and their gradients are fp32, whatever x is
  bool f32_router_w = false;     ///< router_w and its gradient are fp32; projection, f32_logits
  std::int64_t list_length = 0;  ///< L, lists only: their entries
  /// Lists only: the caller promises that token ids ascend. CPU calls and checked CUDA calls verify
  /// it.
  bool assume_sorted = false;

  /// What an input means to the layer. Each input has one row in traits().
  struct InputTraits {
    bool projects = false;  ///< the layer computes the logits and the gradients of Wr
    bool logits = false;    ///< scores come from logits; backward writes their gradients
    bool chooses = false;   ///< the layer chooses each token's experts
    bool lists = false;     ///< slots are positions in lists, not t*K + k
  };
  constexpr InputTraits traits() const noexcept {
    switch (input) {
      case RouterInput::projection:
        return {.projects = true, .logits = true, .chooses = true};
      case RouterInput::logits:
        return {.logits = true, .chooses = true};
      case RouterInput::logits_and_ids:
        return {.logits = true};
      case RouterInput::ids_and_weights:
        return {};
      case RouterInput::lists:
        return {.lists = true};
    }
    return {};
  }
  constexpr bool projects() const noexcept { return traits().projects; }
  constexpr bool has_logits() const noexcept { return traits().logits; }
  constexpr bool chooses() const noexcept { return traits().chooses; }
  constexpr bool takes_lists() const noexcept { return traits().lists; }
  /// Does the caller give ids (T, K)?
  constexpr bool takes_ids() const noexcept { return !chooses() && !takes_lists(); }
  /// Is the score a softmax over the K experts of a token?
  constexpr bool over_top_k() const noexcept {
    return score == RouterScore::softmax && order == RouterOrder::select_then_score;
  }
  /// Does `renormalize` divide? A softmax over the top-K adds up to 1 as it is.
  constexpr bool divides() const noexcept { return renormalize && !over_top_k(); }
  /// Do a token's K values w add up to 1, so that the softmax cancels from their gradients?
  constexpr bool normalised() const noexcept {
    return over_top_k() || (score == RouterScore::softmax && renormalize && eps == 0.0f);
  }
  /// Do the logits of experts that a token does not go to get gradients? Then backward needs the
  /// logits of all experts.
  constexpr bool reaches_all_experts() const noexcept {
    return has_logits() && score == RouterScore::softmax && !normalised();
  }
  /// Is it a softmax that `order` and `renormalize` alone describe?
  constexpr bool plain() const noexcept {
    return score == RouterScore::softmax && eps == 0.0f && scale == 1.0f && !selection_bias &&
           !expert_scale && groups == 1;
  }
  /// Does backward need the K scores p of a token beside its final scores?
  constexpr bool keeps_probabilities() const noexcept { return has_logits() && !plain(); }
  /// Of the logits and their gradients, where x has `dtype`.
  constexpr DType logits_dtype(DType dtype) const noexcept {
    return f32_logits ? DType::f32 : dtype;
  }
  /// Of router_w and its gradient.
  constexpr DType router_w_dtype(DType dtype) const noexcept {
    return f32_router_w ? DType::f32 : dtype;
  }
  /// Routed (token, expert) pairs of `tokens` tokens, before token rounding.
  constexpr std::int64_t rows(std::int64_t tokens) const noexcept {
    return takes_lists() ? list_length : tokens * top_k;
  }
  bool operator==(const RouterDesc&) const = default;
};
inline constexpr std::int64_t kMaxGroups = 1024;

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
  DType dtype = DType::bf16;   ///< of x; of router_w and logits unless they are fp32
  RoundingDesc rounding = {};  ///< only where the layer chooses
  std::int64_t max_rows = 0;   ///< as in LayerDesc
  bool inference = false;      ///< the plan has no backward

  /// Slots S: T*K, L for lists, rounded_capacity() when rounded.
  std::int64_t slots() const noexcept {
    if (rounding.tile > 0) return rounded_capacity(tokens, experts, top_k, rounding.tile);
    return rows(tokens);
  }
  /// Row capacity R: S, or max_rows if that is less.
  std::int64_t row_capacity() const noexcept {
    return max_rows > 0 && max_rows < slots() ? max_rows : slots();
  }
  /// Does backward need the logits of all experts?
  bool needs_logits() const noexcept { return rounding.tile > 0 || reaches_all_experts(); }
  bool operator==(const RoutingDesc&) const = default;
};

/// The arrays of a routing block, which carries a call's routing from forward to backward. ops.h
/// defines rows and slots. The fields have the meaning of MetadataArgs. An array that this kind of
/// routing lacks is null. "top-K" has logits and no rounding, with ids of the caller or without;
/// "lists" are the caller's and those of token rounding.
struct RoutedRows {
  float* slot_scores = nullptr;           ///< (S) top-K
  float* slot_probabilities = nullptr;    ///< (S) p, if RouterDesc::keeps_probabilities()
  std::int32_t* slot_experts = nullptr;   ///< (S) top-K, rounded
  std::int32_t* slot_tokens = nullptr;    ///< (S) rounded
  float* row_scores = nullptr;            ///< (S), of which R are rows
  std::int32_t* row_tokens = nullptr;     ///< (S), likewise
  std::int32_t* slot_rows = nullptr;      ///< (S)
  std::int32_t* token_slots = nullptr;    ///< (S) lists
  std::int32_t* token_offsets = nullptr;  ///< (T+1) lists
  std::int32_t* offsets = nullptr;        ///< (E+1)
  std::int32_t* expert_order = nullptr;   ///< (E)
};

/// As the fields of the same names in ForwardArgs (layer.h).
struct RouterForwardArgs {
  const void* x = nullptr;                     ///< (T, d) dtype; projection
  const void* router_w = nullptr;              ///< (E, d) router_w_dtype(); projection
  const float* logit_bias = nullptr;           ///< (E); with logit_bias
  const float* selection_bias = nullptr;       ///< (E); with selection_bias
  const float* expert_scale = nullptr;         ///< (E); with expert_scale
  const void* given_logits = nullptr;          ///< (T, E) logits_dtype(); logits, logits_and_ids
  const std::int32_t* given_ids = nullptr;     ///< (T, K); logits_and_ids, ids_and_weights
  const float* given_weights = nullptr;        ///< (T, K); ids_and_weights
  const std::int32_t* list_tokens = nullptr;   ///< (L); lists
  const std::int32_t* list_experts = nullptr;  ///< (L); lists
  const float* list_scores = nullptr;          ///< (L); lists
  std::uint64_t seed = 0;                      ///< as in TokenRoundingArgs
  std::uint64_t offset = 0;
  const std::uint64_t* draws = nullptr;  ///< (2) replaces seed and offset

  void* logits = nullptr;              ///< (T, E) logits_dtype(); projection
  std::int32_t* counts = nullptr;      ///< (E) rows of each expert
  std::int32_t* frequency = nullptr;   ///< (E) rows before token rounding, optional; rounding only
  float* scores = nullptr;             ///< (T, K), optional; with logits, without rounding
  std::int32_t* expert_ids = nullptr;  ///< (T, K), optional; likewise
  float* slot_scores = nullptr;  ///< (S) scores of the lists that rounding writes; rounding only
  std::int32_t* error_word = nullptr;  ///< (1), optional
  void* routing = nullptr;             ///< routing_bytes() bytes, at a multiple of 4
};

/// Gradients from those of the rows' scores. All outputs are overwritten.
struct RouterBackwardArgs {
  const void* x = nullptr;              ///< (T, d) dtype; projection
  const void* router_w = nullptr;       ///< (E, d) router_w_dtype(); projection
  const float* expert_scale = nullptr;  ///< (E); with expert_scale
  const void* logits = nullptr;         ///< of forward, if RoutingDesc::needs_logits()
  const void* routing = nullptr;        ///< as forward wrote it
  const float* row_dscores = nullptr;   ///< (R)
  const void* dlogits_in = nullptr;     ///< (T, E) logits_dtype(), of other losses; optional

  void* dlogits = nullptr;   ///< (T, E) logits_dtype(); with logits
  float* dscores = nullptr;  ///< of the caller's scores, (T, K) weights or (L); 0 for sentinels
  void* dx = nullptr;  ///< (T, d) dtype: the router's part of dX; or null: not computed; projection
  void* drouter_w = nullptr;       ///< (E, d) router_w_dtype(); or null; projection
  float* dlogit_bias = nullptr;    ///< (E); or null; with logit_bias
  float* dexpert_scale = nullptr;  ///< (E), or null; with expert_scale
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
