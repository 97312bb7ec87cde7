#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sonicmoe/experts.h"
#include "sonicmoe/router.h"
#include "sonicmoe/status.h"
#include "sonicmoe/types.h"

namespace sonicmoe {

/// One Mixture-of-Experts layer. Symbols: T tokens, d hidden, n intermediate, E experts, K top_k,
/// R rows (routed token-expert pairs; T*K for the router modes, the list length for `given`).
///
///   logits = x Wr^T;  scores, ids = route(logits);  for each pair (t, e) with score s:
///   h = x_t W1[e]^T + b1[e];  a = act(h);  o_t += s (a W2[e]^T + b2[e])
struct LayerDesc {
  std::int64_t tokens = 0;  ///< T >= 0
  RouterDesc router = {};
  ExpertsDesc experts = {};
  /// Router modes, training only.
  RoundingDesc rounding = {};

  /// What the layer's router is, and its experts: the descriptors of plans that do one of both.
  RoutingDesc routing() const noexcept {
    return {{router}, tokens, experts.hidden, experts.dtype, rounding, experts.inference};
  }
  GroupedDesc grouped() const noexcept { return {{experts}, tokens, rows(), router.experts}; }
  /// Row capacity R: T*K, the list length when the routing is given, rounded_capacity when rounded.
  std::int64_t rows() const noexcept { return routing().row_capacity(); }
  /// Does backward need the logits of all experts?
  bool needs_logits() const noexcept { return routing().needs_logits(); }
  bool operator==(const LayerDesc&) const = default;  ///< for caches of plans
};

/// A description as text: "tokens=4096 hidden=512 ... router=topk_over_softmax", items apart by
/// spaces, in the order of layer_fields(), without those that a LayerDesc has of itself.
/// parse_layer() gives the same description back, whatever the sizes and whether a plan would take
/// them; only an enum's value without a name does not come back: its text is refused.
SONICMOE_API std::string to_string(const LayerDesc& desc);
/// Items in any order. Unknown keys, keys that come twice and values that are none are refused.
SONICMOE_API Result<LayerDesc> parse_layer(const std::string& text);

/// One field of the text form.
struct LayerField {
  const char* key;
  const char* help;
  std::string initial;  ///< its value where the text does not have it
  std::string allowed;  ///< "an integer", or the names of its values
};
SONICMOE_API std::vector<LayerField> layer_fields();
/// The value of one field as text; empty for an unknown key.
SONICMOE_API std::string layer_field(const LayerDesc& desc, const std::string& key);

/// Bytes kept from forward to backward, term by term. For 2-byte storage x is 2Td, preact 4Rn (2Rn
/// without a gate), routing at most 24R + 8(E+1) + 4(T+1), logits T*E*2 or 0. All 0 for inference.
struct SavedBytes {
  std::size_t x = 0;        ///< the input itself, kept by the caller
  std::size_t preact = 0;   ///< H (R, 2n or n), always [gate n | up n]
  std::size_t routing = 0;  ///< scores and index arrays, one opaque block
  std::size_t logits = 0;   ///< only where a gradient needs the probabilities of all experts
  std::size_t total() const noexcept { return x + preact + routing + logits; }
};

/// All pointers are to memory of the plan's device, tensors are contiguous, bases aligned to 16
/// bytes. A pointer may be null where its tensor has no elements or the plan does not use it; one
/// that the plan does not use is ignored, but for error_word. `dtype` below is LayerDesc::dtype.
struct ForwardArgs {
  const void* x = nullptr;         ///< (T, d) dtype
  const void* router_w = nullptr;  ///< (E, d) dtype; unused when the routing is given
  const void* w1 = nullptr;        ///< (E, 2n or n, d) dtype; the gate (E, n, d) if `separate`
  const void* w1_up = nullptr;     ///< (E, n, d) dtype; `separate` only
  const void* b1 = nullptr;        ///< (E, 2n or n) dtype, laid out like w1; with bias
  const void* b1_up = nullptr;     ///< (E, n) dtype; with bias and `separate`
  const void* w2 = nullptr;        ///< (E, d, n) dtype
  const void* b2 = nullptr;        ///< (E, d) dtype; with bias

  // Routing given: lists of length L. An expert id >= E is a sentinel: not counted, contributes
  // nothing. A negative expert id or a token id outside [0, T) is an error. Duplicates add.
  const std::int32_t* list_tokens = nullptr;   ///< (L)
  const std::int32_t* list_experts = nullptr;  ///< (L)
  const float* list_scores = nullptr;          ///< (L)

  // Token rounding only: the draws of the stochastic rules. `offset` moves on with every step.
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  const std::uint64_t* draws = nullptr;  ///< (2) seed and offset in the plan's memory, instead

  // Outputs.
  void* o = nullptr;                   ///< (T, d) dtype
  void* logits = nullptr;              ///< (T, E) dtype; unused when the routing is given
  std::int32_t* counts = nullptr;      ///< (E) rows of each expert
  std::int32_t* frequency = nullptr;   ///< (E) rows before token rounding, optional; rounding only
  float* scores = nullptr;             ///< (T, K), optional; plain top-K only
  std::int32_t* expert_ids = nullptr;  ///< (T, K), optional; plain top-K only

  /// (1), optional, CUDA: kBadTokenId, kBadExpertId, kBadLogits are or-ed in (ops.h). The CPU, and
  /// checked CUDA plans, refuse such data instead.
  std::int32_t* error_word = nullptr;

  // Kept for backward (unused for inference).
  void* preact = nullptr;   ///< SavedBytes::preact bytes
  void* routing = nullptr;  ///< SavedBytes::routing bytes
};

struct BackwardArgs {
  // As given to, or written by, forward.
  const void* x = nullptr;
  const void* router_w = nullptr;
  const void* w1 = nullptr;
  const void* w1_up = nullptr;
  const void* w2 = nullptr;
  const void* b2 = nullptr;
  const void* logits = nullptr;  ///< where SavedBytes::logits > 0
  const void* preact = nullptr;
  const void* routing = nullptr;

  // Gradients coming in.
  const void* dout = nullptr;  ///< dO (T, d) dtype
  const void* dlogits =
      nullptr;  ///< (T, E) dtype, of losses outside, added to ours; null: none, and less to do

  // Gradients going out, each shaped like its tensor; all overwritten, but for dw1, dw1_up and dw2
  // with accumulate_weight_grads. Null: not wanted (frozen weights, say), and the operations that
  // make only it are not run. The others may not be null.
  void* dx = nullptr;         ///< (T, d) dtype, or null
  void* drouter_w = nullptr;  ///< (E, d) dtype, or null; router modes only
  void* dw1 = nullptr;        ///< or null ...
  void* dw1_up = nullptr;     ///< ... together with this one
  void* db1 = nullptr;
  void* db1_up = nullptr;
  void* dw2 = nullptr;  ///< or null
  void* db2 = nullptr;
  float* dscores = nullptr;  ///< (L); routing given only; 0 for sentinels
  /// (R, 2n or n) dtype, used without dpreact_in_workspace alone: dH, always [gate n | up n]; rows
  /// past the last in use keep what they had. May be `preact` itself: then SavedBytes::preact bytes
  /// less are in use at a time, and what forward kept is spent.
  void* dpreact = nullptr;
};

/// A whole layer: a RouterPlan, an ExpertsPlan and a CombinePlan over one workspace.
///
/// Everything slow happens in make_plan: validation, kernel choice, workspace layout. A plan is
/// immutable, cheap to copy, and may be used from several threads at once (each with its own
/// workspace). Calls do not allocate. What a call writes must not overlap what it reads, but for
/// BackwardArgs::dpreact.
class SONICMOE_API LayerPlan {
 public:
  const LayerDesc& desc() const noexcept;
  /// Workspace of forward and of backward; they need not share one.
  std::size_t forward_workspace_bytes() const noexcept;
  std::size_t backward_workspace_bytes() const noexcept;
  /// The larger of the two.
  std::size_t workspace_bytes() const noexcept;
  SavedBytes saved_bytes() const noexcept;
  /// Which kernels run and why the others do not, the workspace region by region, what is saved.
  std::string explain() const;

  /// Names of the operations that a call may run, in order.
  std::vector<const char*> forward_operations() const;
  std::vector<const char*> backward_operations() const;

  /// CUDA: asynchronous on the stream, capturable. CPU: done when it returns.
  Status forward(const ForwardArgs& args, Workspace workspace, Stream stream = {},
                 OperationMask operations = kAllOperations) const noexcept;
  /// Refused for inference plans.
  Status backward(const BackwardArgs& args, Workspace workspace, Stream stream = {},
                  OperationMask operations = kAllOperations) const noexcept;

  struct Impl;
  explicit LayerPlan(std::shared_ptr<const Impl> impl) noexcept : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

SONICMOE_API Result<LayerPlan> make_plan(const LayerDesc& desc, Device device = {},
                                         const Options& options = {});

}  // namespace sonicmoe
