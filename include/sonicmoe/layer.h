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
/// R the capacity of rows, which are routed (token, expert) pairs; see rows().
///
///   logits = x Wr^T;  scores, ids = route(logits);  for each pair (t, e) with score s:
///   h = x_t W1[e]^T + b1[e];  a = act(h);  o_t += s (a W2[e]^T + b2[e])
///
/// The caller may hand over logits, ids or scores in place of the first two steps: RouterInput.
struct LayerDesc {
  std::int64_t tokens = 0;  ///< T, 0 or more; R and T fit into int32
  RouterDesc router = {};
  ExpertsDesc experts = {};
  /// Only where the layer chooses the experts. Meant for training; evaluation uses plain top-K.
  RoundingDesc rounding = {};
  /// Ids and weights only: the number of pairs that may get rows; 0: all T*K. It saves memory where
  /// most ids are sentinels. Pairs past it, the last in the order of experts, count as sentinels;
  /// `counts` has them all the same.
  std::int64_t max_rows = 0;

  /// Descriptors of a RouterPlan and an ExpertsPlan that do this layer's parts.
  RoutingDesc routing() const noexcept {
    return {{router}, tokens, experts.hidden, experts.dtype, rounding, max_rows, experts.inference};
  }
  GroupedDesc grouped() const noexcept { return {{experts}, tokens, rows(), router.experts}; }
  /// Row capacity R: T*K or max_rows, L for lists, rounded_capacity() when rounded.
  std::int64_t rows() const noexcept { return routing().row_capacity(); }
  /// Does backward need the logits of all experts?
  bool needs_logits() const noexcept { return routing().needs_logits(); }
  bool operator==(const LayerDesc&) const = default;  ///< for caches of plans
};

/// A description as text: "tokens=4096 hidden=512 ... router=topk_over_softmax". Spaces separate
/// the items, which have the order of layer_fields(); fields with default values are left out.
/// parse_layer() gives the same description back, even one that make_plan() refuses. The exception
/// is an enum's value without a name: parse_layer() refuses its text.
SONICMOE_API std::string to_string(const LayerDesc& desc);
/// Reads items in any order. Returns invalid_argument for unknown keys, keys that come twice and
/// values that do not parse.
SONICMOE_API Result<LayerDesc> parse_layer(const std::string& text);

/// One field of the text form.
struct LayerField {
  const char* key;
  const char* help;
  std::string initial;  ///< its value if the text leaves it out
  std::string allowed;  ///< "an integer", "true, false", or the names of its values
};
SONICMOE_API std::vector<LayerField> layer_fields();
/// The value of one field as text; empty for an unknown key.
SONICMOE_API std::string layer_field(const LayerDesc& desc, const std::string& key);

/// Bytes kept from forward to backward, term by term; all 0 for inference. With 2-byte storage:
///
///   x        2Td
///   preact   4Rn, without a gate 2Rn; 0 with Recompute::preact
///   routing  20R + 4(2E+1); 24R unless RouterDesc::plain(); 12R for ids and weights;
///            lists 16R and token rounding 24R, both + 4(2E+1) + 4(T+1)
///   logits   2TE or 0
struct SavedBytes {
  std::size_t x = 0;        ///< the input itself, kept by the caller
  std::size_t preact = 0;   ///< H (R, 2n or n), always [gate n | up n]
  std::size_t routing = 0;  ///< scores and index arrays, one opaque block
  std::size_t logits = 0;   ///< (T, E), if LayerDesc::needs_logits()
  std::size_t total() const noexcept { return x + preact + routing + logits; }
};

/// All pointers are to memory of the plan's device, tensors contiguous. Tensors start at multiples
/// of 16 bytes (on the CPU of an element), int32 and float arrays at multiples of 4, `draws` of 8.
/// A pointer may be null where its tensor has no elements or the plan does not use it. The plan
/// ignores pointers that it does not use, but checks the alignment of error_word. `dtype` below is
/// ExpertsDesc::dtype. Transposed weights have their last two axes the other way round.
struct ForwardArgs {
  const void* x = nullptr;                ///< (T, d) dtype
  const void* router_w = nullptr;         ///< (E, d) dtype or fp32; RouterInput::projection only
  const float* logit_bias = nullptr;      ///< (E); with RouterDesc::logit_bias
  const float* selection_bias = nullptr;  ///< (E); with RouterDesc::selection_bias
  const float* expert_scale = nullptr;    ///< (E); with RouterDesc::expert_scale
  const void* w1 = nullptr;     ///< (E, 2n or n, d) dtype; the gate (E, n, d) if `separate`
  const void* w1_up = nullptr;  ///< (E, n, d) dtype; `separate` only
  const void* b1 = nullptr;     ///< (E, 2n or n) dtype in the order of w1; with bias
  const void* b1_up = nullptr;  ///< (E, n) dtype; with bias and `separate`
  const void* w2 = nullptr;     ///< (E, d, n) dtype
  const void* b2 = nullptr;     ///< (E, d) dtype; with bias

  // What RouterInput names. An expert id < 0 or >= E is a sentinel. Duplicates add. A weight or
  // score that is not finite is the caller's: the call neither refuses nor reports it.
  const void* given_logits = nullptr;       ///< (T, E) dtype or fp32; logits, logits_and_ids
  const std::int32_t* given_ids = nullptr;  ///< (T, K); logits_and_ids, ids_and_weights
  const float* given_weights = nullptr;     ///< (T, K); ids_and_weights
  // Lists of length L. A token id outside [0, T) is an error (see error_word).
  const std::int32_t* list_tokens = nullptr;   ///< (L)
  const std::int32_t* list_experts = nullptr;  ///< (L)
  const float* list_scores = nullptr;          ///< (L)

  // Token rounding only: the draws of the rules stochastic and nearest_scores. The caller advances
  // `offset` at every training step.
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  const std::uint64_t* draws = nullptr;  ///< (2) seed and offset in device memory, in their place

  // Outputs.
  void* o = nullptr;                   ///< (T, d) dtype
  void* logits = nullptr;              ///< (T, E) dtype or fp32; RouterInput::projection only
  std::int32_t* counts = nullptr;      ///< (E) rows of each expert
  std::int32_t* frequency = nullptr;   ///< (E) rows before token rounding, optional; rounding only
  float* scores = nullptr;             ///< (T, K), optional; with logits, without rounding
  std::int32_t* expert_ids = nullptr;  ///< (T, K), optional; likewise

  /// (1), optional. Unchecked CUDA calls set the bits kBadTokenId and kBadLogits (ops.h) in it;
  /// checked ones refuse such data (invalid_data). CPU calls refuse bad token ids. They refuse bad
  /// logits where there is no error_word, else they set kBadLogits in it.
  std::int32_t* error_word = nullptr;

  // Written for backward; unused for inference.
  void* preact = nullptr;   ///< H, SavedBytes::preact bytes; unused with Recompute::preact
  void* routing = nullptr;  ///< opaque, SavedBytes::routing bytes
};

/// Arguments of LayerPlan::backward(). Gradients are overwritten, but for the weights' with
/// accumulate_weight_grads.
struct BackwardArgs {
  // As forward read or wrote them.
  const void* x = nullptr;
  const void* router_w = nullptr;
  const float* expert_scale = nullptr;
  const void* w1 = nullptr;
  const void* w1_up = nullptr;
  const void* b1 = nullptr;  ///< b1 and b1_up: with bias and Recompute::preact
  const void* b1_up = nullptr;
  const void* w2 = nullptr;
  const void* b2 = nullptr;
  const void* logits = nullptr;  ///< `logits` or `given_logits`, if SavedBytes::logits > 0
  const void* preact = nullptr;  ///< if SavedBytes::preact > 0
  const void* routing = nullptr;

  // Gradients that the caller gives.
  const void* dout = nullptr;  ///< dO (T, d) dtype
  /// (T, E) like the logits, of other losses on them; optional, with logits. Null may save the
  /// router's product for dX (RouterDesc::reaches_all_experts).
  const void* dlogits = nullptr;

  // Gradients that backward writes, each shaped like its tensor. It overwrites them, but adds to
  // dw1, dw1_up and dw2 with accumulate_weight_grads. Fields marked "or null" may be null, for
  // frozen weights say: backward then skips the operations that compute that gradient alone.
  void* dx = nullptr;              ///< (T, d) dtype, or null
  void* drouter_w = nullptr;       ///< (E, d) like router_w, or null; RouterInput::projection only
  float* dlogit_bias = nullptr;    ///< (E), or null; with RouterDesc::logit_bias
  float* dexpert_scale = nullptr;  ///< (E), or null; with RouterDesc::expert_scale
  void* dw1 = nullptr;             ///< or null, together with dw1_up; fp32 with f32_weight_grads
  void* dw1_up = nullptr;
  void* db1 = nullptr;
  void* db1_up = nullptr;
  void* dw2 = nullptr;  ///< or null; fp32 with f32_weight_grads
  void* db2 = nullptr;
  /// (T, E) like `given_logits`, with the share of `dlogits`.
  void* dgiven_logits = nullptr;
  /// Of `given_weights` (T, K) or `list_scores` (L); 0 for sentinels.
  float* dscores = nullptr;
  /// dH (R, 2n or n) dtype, always [gate n | up n]; used only without dpreact_in_workspace. Rows
  /// past the last one in use keep their contents. It may be `preact` itself: that saves
  /// SavedBytes::preact bytes at the peak, but backward then overwrites H and can run only once.
  void* dpreact = nullptr;
};

/// A whole layer: a RouterPlan, an ExpertsPlan and a CombinePlan over one workspace.
///
/// make_plan does the slow parts: validation, kernel choice, workspace layout. A plan is immutable
/// and cheap to copy. Several threads may call it at once, each with its own workspace. Calls do
/// not allocate. Outputs of a call must not overlap its inputs, except for BackwardArgs::dpreact.
///
/// A call returns the first error and then stops; its outputs hold nothing of use. invalid_argument
/// (a pointer, an alignment, the workspace) comes before anything runs.
class SONICMOE_API LayerPlan {
 public:
  const LayerDesc& desc() const noexcept;
  /// Workspace of forward and of backward. Both may use the same memory or different ones.
  std::size_t forward_workspace_bytes() const noexcept;
  std::size_t backward_workspace_bytes() const noexcept;
  /// The larger of the two.
  std::size_t workspace_bytes() const noexcept;
  SavedBytes saved_bytes() const noexcept;
  /// Which kernels run and why the others do not, the regions of the workspace, the saved bytes.
  std::string explain() const;

  /// Names of the operations that a call may run, in order: the bits of OperationMask.
  std::vector<const char*> forward_operations() const;
  std::vector<const char*> backward_operations() const;

  /// CUDA: queued on the stream and capturable into a graph, unless checked; it clears
  /// cudaGetLastError. CPU: done when it returns.
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
