#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "sonicmoe/experts.h"
#include "sonicmoe/router.h"
#include "sonicmoe/status.h"
#include "sonicmoe/types.h"

/// The operations a layer is made of, each usable by itself with the same three calls:
/// make_plan(desc), plan.workspace_bytes(), plan.run(args, workspace, stream).
///
/// "Grouped rows" are the routed (token, expert) pairs sorted by expert, then token, then list
/// position. Expert e owns rows offsets[e] .. offsets[e+1]-1. "Slots" are the pairs in the order
/// they came in: t*K + k for the router modes, the list position when the routing is given.
/// Every pointer may be null where its tensor has no elements. All tensors are contiguous, tensor
/// bases aligned to 16 bytes, index arrays to 4.
namespace sonicmoe {

/// logits = x Wr^T and its two gradients.
struct RouterGemmArgs {
  const void* x = nullptr;        ///< (T, d): forward, wgrad
  const void* w = nullptr;        ///< (E, d): forward, dgrad
  const void* dlogits = nullptr;  ///< (T, E): dgrad, wgrad
  void* logits = nullptr;         ///< (T, E): forward
  void* dx = nullptr;             ///< (T, d): dgrad
  void* dw = nullptr;             ///< (E, d): wgrad
};
enum class GemmPass : std::int32_t { forward = 0, dgrad = 1, wgrad = 2 };
struct SONICMOE_API RouterGemmDesc {
  using Args = RouterGemmArgs;
  GemmPass pass = GemmPass::forward;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t experts = 0;
  DType dtype = DType::bf16;
  bool operator==(const RouterGemmDesc&) const = default;
};

/// What an unchecked CUDA call found wrong in its data: bits that are or-ed into the `error_word`
/// of its arguments, if there is one. Nothing ever clears the word but the caller.
inline constexpr std::int32_t kBadTokenId = 1;   ///< outside [0, T): the entry was skipped
inline constexpr std::int32_t kBadExpertId = 2;  ///< negative: the entry was skipped
inline constexpr std::int32_t kBadLogits = 4;    ///< a row with a NaN or without a finite maximum

/// Scores and expert ids of each token's K experts from its logits. A NaN or a row whose maximum
/// is not finite is refused (CPU, or checked mode) before anything is written; an unchecked call
/// gives such a row valid expert ids and any scores.
struct TopKArgs {
  const void* logits = nullptr;        ///< (T, E) dtype
  float* scores = nullptr;             ///< (T, K)
  std::int32_t* ids = nullptr;         ///< (T, K)
  std::int32_t* error_word = nullptr;  ///< (1), optional, CUDA: see kBadLogits
};
struct SONICMOE_API TopKDesc : RouterDesc {  ///< `mode` is not `given`
  using Args = TopKArgs;
  std::int64_t tokens = 0;
  DType dtype = DType::bf16;  ///< of the logits
  bool operator==(const TopKDesc&) const = default;
};

/// Sorts slots into grouped rows. Deterministic and stable.
struct MetadataArgs {
  const std::int32_t* slot_experts = nullptr;  ///< (S): ids >= E are sentinels
  const std::int32_t* slot_tokens = nullptr;   ///< (S): lists only (top_k == 0)
  const float* slot_scores = nullptr;          ///< (S): optional
  std::int32_t* counts = nullptr;              ///< (E)
  std::int32_t* offsets = nullptr;             ///< (E+1): exclusive prefix sums of counts
  std::int32_t* row_tokens = nullptr;          ///< (S): row -> token; rows past offsets[E]: 0
  std::int32_t* row_slots = nullptr;           ///< (S): row -> slot; rows past offsets[E]: -1
  std::int32_t* slot_rows = nullptr;           ///< (S): slot -> row, -1 for sentinels
  float* row_scores = nullptr;                 ///< (S): optional; rows past offsets[E]: 0
  std::int32_t* token_offsets = nullptr;       ///< (T+1): lists only
  std::int32_t* token_slots = nullptr;  ///< (S): lists only: slots by token, stable; no sentinels
  /// (E), optional: a good order for the weight gradients. Experts by falling counts, in halves of
  /// the mean S/E, rounded; those that are alike by id.
  std::int32_t* expert_order = nullptr;
  std::int32_t* error_word = nullptr;  ///< (1), optional, CUDA: see kBadTokenId
};
struct SONICMOE_API MetadataDesc {
  using Args = MetadataArgs;
  std::int64_t tokens = 0;
  std::int64_t experts = 0;
  std::int64_t top_k = 0;        ///< K: slots are t*K + k. 0: lists of any length
  std::int64_t list_length = 0;  ///< S when top_k == 0
  bool assume_sorted = false;    ///< lists only: token ids ascend
  std::int64_t slots() const noexcept { return top_k > 0 ? tokens * top_k : list_length; }
  bool operator==(const MetadataDesc&) const = default;
};

/// The six grouped GEMMs with their epilogues (R = row capacity, W = 2n with a gate, else n).
enum class GemmOp : std::int32_t {
  up_proj = 0,          ///< H = x[tokens] W1^T + b1 -> preact (not if inference); act(H) -> act
  down_proj = 1,        ///< act W2^T + b2 -> expert_out
  down_proj_dgrad = 2,  ///< dA' = dO[tokens] W2; from H: dH -> dpreact, s*A -> scaled_act,
                        ///< <dA', A> -> row_dscores
  up_proj_dgrad = 3,    ///< dH W1 -> dx_rows
  down_proj_wgrad = 4,  ///< dO[tokens]^T (s*A) -> dw2
  up_proj_wgrad = 5,    ///< dH^T x[tokens] -> dw1
};
struct GroupedGemmArgs {
  const std::int32_t* offsets = nullptr;     ///< (E+1)
  const std::int32_t* row_tokens = nullptr;  ///< (R): the ops that gather
  /// (E), optional: weight gradients on CUDA take the experts in this order, null: by id. It
  /// changes their time, never a bit: experts with many rows should come first. A permutation: an
  /// expert that is missing gets no gradient, and what is no expert is skipped.
  const std::int32_t* expert_order = nullptr;
  const float* row_scores = nullptr;  ///< (R): down_proj_dgrad
  const void* x = nullptr;            ///< (T, d)
  const void* dout = nullptr;         ///< (T, d)
  const void* w1 = nullptr;           ///< (E, W, d); the gate (E, n, d) if separate
  const void* w1_up = nullptr;        ///< (E, n, d) if separate
  const void* b1 = nullptr;           ///< laid out like w1
  const void* b1_up = nullptr;
  const void* w2 = nullptr;  ///< (E, d, n)
  const void* b2 = nullptr;  ///< (E, d)
  // Read by some ops, written by others. Rows past offsets[E] are neither.
  void* preact = nullptr;        ///< (R, W): [gate n | up n] whatever the layout of W1
  void* act = nullptr;           ///< (R, n)
  void* expert_out = nullptr;    ///< (R, d)
  void* dpreact = nullptr;       ///< (R, W); down_proj_dgrad: may be preact
  void* scaled_act = nullptr;    ///< (R, n)
  float* row_dscores = nullptr;  ///< (R)
  void* dx_rows = nullptr;       ///< (R, d)
  void* dw1 = nullptr;           ///< like w1; zero for experts without rows
  void* dw1_up = nullptr;
  void* dw2 = nullptr;
};
struct SONICMOE_API GroupedGemmDesc : GroupedDesc {
  using Args = GroupedGemmArgs;
  GemmOp op = GemmOp::up_proj;
  bool operator==(const GroupedGemmDesc&) const = default;
};

/// db1 = column sums of dH and db2 = column sums of s*dO per expert; row_dscores += <dO, b2>.
struct BiasGradArgs {
  const std::int32_t* offsets = nullptr;     ///< (E+1)
  const std::int32_t* row_tokens = nullptr;  ///< (R)
  const float* row_scores = nullptr;         ///< (R)
  const void* dpreact = nullptr;             ///< (R, W)
  const void* dout = nullptr;                ///< (T, d)
  const void* b2 = nullptr;                  ///< (E, d)
  float* row_dscores = nullptr;              ///< (R), added to
  void* db1 = nullptr;                       ///< like b1; zero for experts without rows
  void* db1_up = nullptr;                    ///< separate only
  void* db2 = nullptr;                       ///< (E, d)
};
struct SONICMOE_API BiasGradDesc : GroupedDesc {
  using Args = BiasGradArgs;
  bool operator==(const BiasGradDesc&) const = default;
};

/// out[t] = sum over the token's slots, in slot order, of score * rows[slot_rows[slot]] +
/// addend[t]. Weighted for O (scores given), unweighted for dX (scores null); addend may be null.
///
/// The router's part of dX, where a token's logits have gradients at its own experts alone (softmax
/// over the top-K or renormalised, no other loss on the logits): with `router_w` given, a second
/// sum over t's slots, in slot order, of dlogits[t, e] * router_w[e], e the slot's expert, is added
/// to the first, before the addend. Experts out of range add nothing.
struct AggregateArgs {
  const void* rows = nullptr;                   ///< (R, d)
  const std::int32_t* slot_rows = nullptr;      ///< (R)
  const std::int32_t* token_offsets = nullptr;  ///< (T+1): lists only (top_k == 0)
  const std::int32_t* token_slots = nullptr;    ///< (R): lists only
  const float* slot_scores = nullptr;           ///< (R) or null
  const void* addend = nullptr;                 ///< (T, d) or null; may be `out` itself
  const std::int32_t* slot_experts = nullptr;   ///< (R): with router_w
  const void* dlogits = nullptr;                ///< (T, E): with router_w
  const void* router_w = nullptr;               ///< (E, d), or null; unweighted top-K slots only
  void* out = nullptr;                          ///< (T, d)
};
inline constexpr std::int64_t kMaxRoutedTopK = 64;  ///< K of a call with router_w
struct SONICMOE_API AggregateDesc {
  using Args = AggregateArgs;
  std::int64_t tokens = 0;
  std::int64_t rows = 0;
  std::int64_t hidden = 0;
  std::int64_t top_k = 0;  ///< K, or 0 for lists
  DType dtype = DType::bf16;
  std::int64_t experts = 0;  ///< E; 0: calls have no router_w. Else K is at most kMaxRoutedTopK
  bool operator==(const AggregateDesc&) const = default;
};

/// Gradient of the scores: dscores in slot order, or pushed through the router mode to dlogits,
/// which is dense and adds dlogits_in. With g the slot gradients, s the scores, p the softmax of
/// all logits: softmax over top-K and renormalised modes dlogit_k = s_k (g_k - sum_j g_j s_j);
/// otherwise dlogit_e = p_e (g_e - sum_k g_k s_k), g_e = 0 for experts that were not chosen.
struct ScoreGradArgs {
  const float* row_dscores = nullptr;          ///< (R)
  const std::int32_t* slot_rows = nullptr;     ///< (R); -1 reads as 0
  const float* slot_scores = nullptr;          ///< (R): router modes
  const std::int32_t* slot_experts = nullptr;  ///< (R): router modes
  const void* logits = nullptr;      ///< (T, E): topk_over_softmax without renormalisation
  const void* dlogits_in = nullptr;  ///< (T, E), optional
  void* dlogits = nullptr;           ///< (T, E): router modes
  float* dscores = nullptr;          ///< (R): `given`
};
struct SONICMOE_API ScoreGradDesc : RouterDesc {
  using Args = ScoreGradArgs;
  std::int64_t tokens = 0;
  std::int64_t rows = 0;  ///< R
  DType dtype = DType::bf16;
  bool operator==(const ScoreGradDesc&) const = default;
};

/// Switch load-balancing loss E * sum_e (P_e / sum P)(f_e / sum f), P_e = sum over tokens of the
/// softmax of the logits, f = counts, without gradient. 0 when T = 0 or all counts are 0.
struct AuxLossArgs {
  const void* logits = nullptr;          ///< (T, E) dtype
  const std::int32_t* counts = nullptr;  ///< (E)
  const float* dloss = nullptr;          ///< (1): backward
  float* loss = nullptr;                 ///< (1): forward
  void* dlogits = nullptr;               ///< (T, E): backward
};
struct SONICMOE_API AuxLossDesc {
  using Args = AuxLossArgs;
  std::int64_t tokens = 0;
  std::int64_t experts = 0;
  DType dtype = DType::bf16;
  bool backward = false;
  bool operator==(const AuxLossDesc&) const = default;
};

/// A plan for one operation. Immutable, cheap to copy, usable from several threads at once.
template <class Desc>
class SONICMOE_API OpPlan {
 public:
  using Args = typename Desc::Args;
  const Desc& desc() const noexcept;
  std::size_t workspace_bytes() const noexcept;
  /// The kernel list, best first: which entry runs and why the others do not.
  std::string explain() const;
  Status run(const Args& args, Workspace workspace = {}, Stream stream = {}) const noexcept;

  struct Impl;
  const Impl& impl() const noexcept { return *impl_; }  ///< for this library's own plans
  explicit OpPlan(std::shared_ptr<const Impl> impl) noexcept : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

SONICMOE_API Result<OpPlan<RouterGemmDesc>> make_plan(const RouterGemmDesc&, Device = {},
                                                      const Options& = {});
SONICMOE_API Result<OpPlan<TopKDesc>> make_plan(const TopKDesc&, Device = {}, const Options& = {});
SONICMOE_API Result<OpPlan<MetadataDesc>> make_plan(const MetadataDesc&, Device = {},
                                                    const Options& = {});
SONICMOE_API Result<OpPlan<GroupedGemmDesc>> make_plan(const GroupedGemmDesc&, Device = {},
                                                       const Options& = {});
SONICMOE_API Result<OpPlan<BiasGradDesc>> make_plan(const BiasGradDesc&, Device = {},
                                                    const Options& = {});
SONICMOE_API Result<OpPlan<AggregateDesc>> make_plan(const AggregateDesc&, Device = {},
                                                     const Options& = {});
SONICMOE_API Result<OpPlan<ScoreGradDesc>> make_plan(const ScoreGradDesc&, Device = {},
                                                     const Options& = {});
SONICMOE_API Result<OpPlan<AuxLossDesc>> make_plan(const AuxLossDesc&, Device = {},
                                                   const Options& = {});

extern template class OpPlan<RouterGemmDesc>;
extern template class OpPlan<TopKDesc>;
extern template class OpPlan<MetadataDesc>;
extern template class OpPlan<GroupedGemmDesc>;
extern template class OpPlan<BiasGradDesc>;
extern template class OpPlan<AggregateDesc>;
extern template class OpPlan<ScoreGradDesc>;
extern template class OpPlan<AuxLossDesc>;

}  // namespace sonicmoe
