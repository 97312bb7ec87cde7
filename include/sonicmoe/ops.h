#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "sonicmoe/experts.h"
#include "sonicmoe/router.h"
#include "sonicmoe/status.h"
#include "sonicmoe/types.h"

/// The operations of a layer. Each works by itself with the same three calls:
/// make_plan(desc), plan.workspace_bytes(), plan.run(args, workspace, stream).
///
/// "Grouped rows" are the routed (token, expert) pairs sorted by expert, then token, then list
/// position. Expert e owns rows offsets[e] .. offsets[e+1]-1. "Slots" are the pairs in the order of
/// the input: t*K + k, or the list position for lists. A slot whose expert id is < 0 or >= E is a
/// sentinel: it gets no row.
///
/// Arguments are pointers to contiguous tensors in memory of the plan's device. Tensors start at
/// multiples of 16 bytes (on the CPU of an element), arrays of indices and scores at multiples of
/// 4. A pointer may be null where its tensor has no elements or the operation does not use it.
/// Outputs are overwritten and must not overlap inputs, unless a field says otherwise. Where a
/// field has no type, it is the descriptor's dtype.
namespace sonicmoe {

/// The router's product and its gradients: logits = x w^T + bias, dx = dlogits w, dw = dlogits^T x,
/// dbias = column sums of dlogits. Behind each shape stand the passes that use the tensor. An fp32
/// w beside 16-bit x enters logits as three 16-bit parts, which have all its bits. Into dx enter
/// two parts of w, and into dx and dw two of fp32 dlogits: 16 bits with bf16, 22 with fp16. For
/// fp16 this holds of numbers below 65504 and above 2^-14.
struct RouterGemmArgs {
  const void* x = nullptr;        ///< (T, d) dtype: forward, wgrad
  const void* w = nullptr;        ///< (E, d) w_dtype(): forward, dgrad
  const float* bias = nullptr;    ///< (E): forward, with `bias`
  const void* dlogits = nullptr;  ///< (T, E) logits_dtype(): dgrad, wgrad
  void* logits = nullptr;         ///< (T, E) logits_dtype(): forward
  void* dx = nullptr;             ///< (T, d) dtype: dgrad
  void* dw = nullptr;             ///< (E, d) w_dtype(): wgrad; with `bias` it may be null
  float* dbias = nullptr;         ///< (E): wgrad, with `bias`; or null
};
/// Which of the router's products.
enum class GemmPass : std::int32_t { forward = 0, dgrad = 1, wgrad = 2 };
/// Sizes and types of one of the router's products.
struct SONICMOE_API RouterGemmDesc {
  using Args = RouterGemmArgs;
  GemmPass pass = GemmPass::forward;
  std::int64_t tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t experts = 0;
  DType dtype = DType::bf16;
  bool bias = false;
  bool f32_logits = false;
  bool f32_w = false;  ///< only with f32_logits
  DType logits_dtype() const noexcept { return f32_logits ? DType::f32 : dtype; }
  DType w_dtype() const noexcept { return f32_w ? DType::f32 : dtype; }
  bool operator==(const RouterGemmDesc&) const = default;
};

/// Bits for invalid data. An unchecked CUDA call or-s them into the `error_word` of its arguments,
/// if the caller gives one; a CPU call kBadLogits alone. Only the caller clears the word.
inline constexpr std::int32_t kBadTokenId = 1;  ///< a token id outside [0, T): the call skipped it
inline constexpr std::int32_t kBadLogits = 2;   ///< a row with a NaN or without a finite maximum
inline constexpr std::int32_t kBadCounts = 4;   ///< segments of rows that overlap or reach past R

/// Scores and expert ids of each token's K experts from its logits, by descending value of what
/// chooses (RouterDesc). A NaN, +inf, or with softmax a row of -inf is refused (invalid_data)
/// before anything is written, by checked CUDA calls, and by CPU calls without an error_word. Other
/// calls give such a row valid expert ids, and NaN as scores: at least one of them, so that the
/// token's output is NaN.
///
/// With RouterInput::logits_and_ids nothing is chosen: `scores` are those of `given_ids`, in their
/// order, and `ids` becomes a copy of them. The softmax over the top-K runs over the given logits.
/// Sentinels take no part in a sum and have score 0. If the probabilities of a token's ids add up
/// to 0, renormalised scores are 0. Softmax over the top-K also refuses ids that only have logits
/// of -inf.
struct TopKArgs {
  const void* logits = nullptr;             ///< (T, E) dtype
  const std::int32_t* given_ids = nullptr;  ///< (T, K); logits_and_ids
  const float* selection_bias = nullptr;    ///< (E); with selection_bias
  const float* expert_scale = nullptr;      ///< (E); with expert_scale
  float* scores = nullptr;                  ///< (T, K)
  float* probabilities = nullptr;           ///< (T, K) p, if keeps_probabilities()
  std::int32_t* ids = nullptr;              ///< (T, K)
  std::int32_t* error_word = nullptr;       ///< (1), optional: see kBadLogits
};
/// Router, sizes and type of the choice.
struct SONICMOE_API TopKDesc : RouterDesc {  ///< `input` has logits
  using Args = TopKArgs;
  std::int64_t tokens = 0;
  DType dtype = DType::bf16;  ///< of the logits
  bool operator==(const TopKDesc&) const = default;
};

/// Sorts slots into grouped rows, stably; results repeat bit for bit. S is the number of slots. CPU
/// calls and checked calls refuse token ids outside [0, T), and token ids that descend despite
/// assume_sorted (invalid_data). An unchecked call skips token ids out of range.
struct MetadataArgs {
  const std::int32_t* slot_experts = nullptr;  ///< (S): ids < 0 or >= E are sentinels
  const std::int32_t* slot_tokens = nullptr;   ///< (S): lists only (top_k == 0)
  const float* slot_scores = nullptr;          ///< (S): with row_scores
  std::int32_t* counts = nullptr;              ///< (E)
  std::int32_t* offsets = nullptr;             ///< (E+1): exclusive prefix sums of counts, at most
                                               ///< row_capacity
  std::int32_t* row_tokens = nullptr;          ///< (S): row -> token; rows past offsets[E]: 0
  std::int32_t* row_slots = nullptr;           ///< (S): row -> slot; rows past offsets[E]: -1
  std::int32_t* slot_rows = nullptr;           ///< (S): slot -> row; -1 for skipped slots, and for
                                               ///< rows past the capacity
  float* row_scores = nullptr;                 ///< (S): optional; rows past offsets[E]: 0
  std::int32_t* token_offsets = nullptr;       ///< (T+1): lists only; of token_slots
  /// (S): lists only: slots by token, stable, without sentinels; entries past offsets[E]: -1.
  std::int32_t* token_slots = nullptr;
  /// (E), optional: the experts, most rows first, for GroupedGemmArgs::expert_order. Sorted by
  /// descending count, rounded to halves of the mean S/E; experts with the same rounded count by
  /// id.
  std::int32_t* expert_order = nullptr;
  std::int32_t* error_word = nullptr;  ///< (1), optional, CUDA: see kBadTokenId
};
/// Sizes of the slots.
struct SONICMOE_API MetadataDesc {
  using Args = MetadataArgs;
  std::int64_t tokens = 0;
  std::int64_t experts = 0;
  std::int64_t top_k = 0;         ///< K: slots are t*K + k. 0: lists of any length
  std::int64_t list_length = 0;   ///< S when top_k == 0
  bool assume_sorted = false;     ///< lists only: the caller promises that token ids ascend
  std::int64_t row_capacity = 0;  ///< with top_k, up to S; 0: S
  /// S, the number of slots.
  std::int64_t slots() const noexcept { return top_k > 0 ? tokens * top_k : list_length; }
  /// Rows that slots may get.
  std::int64_t rows() const noexcept { return row_capacity > 0 ? row_capacity : slots(); }
  bool operator==(const MetadataDesc&) const = default;
};

/// Which of R contiguous rows each expert owns, from counts, row_offsets or both (see
/// ExpertsForwardArgs). Segments come out ascending, disjoint and inside [0, R]: one that does not
/// fit loses rows, from its front where it overlaps an earlier one. CPU calls and checked calls
/// refuse such segments (invalid_data).
struct SegmentsArgs {
  const void* counts = nullptr;          ///< (E) index_type, or null
  const void* row_offsets = nullptr;     ///< (E+1) index_type, or null; not both null
  std::int32_t* begins = nullptr;        ///< (E): first row of each expert
  std::int32_t* ends = nullptr;          ///< (E): the row behind its last
  std::int32_t* expert_order = nullptr;  ///< (E): as in MetadataArgs
  std::int32_t* error_word = nullptr;    ///< (1), optional, CUDA: see kBadCounts
};
/// Sizes and type of the counts.
struct SONICMOE_API SegmentsDesc {
  using Args = SegmentsArgs;
  std::int64_t rows = 0;     ///< R
  std::int64_t experts = 0;  ///< E
  IndexType index_type = IndexType::i32;
  std::int64_t expected_rows = 0;  ///< as in ExpertsDesc; it decides expert_order
  bool operator==(const SegmentsDesc&) const = default;
};

/// Writes zeros to the rows that no expert owns.
struct ZeroTailArgs {
  const std::int32_t* begins = nullptr;  ///< (E), ascending
  const std::int32_t* ends = nullptr;    ///< (E), likewise: expert e owns begins[e] .. ends[e]-1
  void* rows = nullptr;                  ///< (R, d), or null
  float* values = nullptr;               ///< (R): one value a row, or null
};
/// Sizes and type of the rows.
struct SONICMOE_API ZeroTailDesc {
  using Args = ZeroTailArgs;
  std::int64_t rows = 0;     ///< R
  std::int64_t hidden = 0;   ///< d
  std::int64_t experts = 0;  ///< E
  DType dtype = DType::bf16;
  bool operator==(const ZeroTailDesc&) const = default;
};

/// The six grouped GEMMs with their epilogues. R is the row capacity, W is 2n with a gate, else n.
/// x[tokens] has row row_tokens[r] of x as its row r; with contiguous rows it is x itself, and
/// dO[tokens] is dY. The tensor behind `->` gets the result.
enum class GemmOp : std::int32_t {
  up_proj = 0,          ///< H = x[tokens] W1^T + b1 -> preact (not if inference); act(H) -> act
  down_proj = 1,        ///< act W2^T + b2 -> expert_out; with the scores of contiguous rows
  down_proj_dgrad = 2,  ///< dA' = dO[tokens] W2; from H: dH -> dpreact, s*A -> scaled_act,
                        ///< <dA', A> -> row_dscores. Without scores s = 1, and there is no dS
  up_proj_dgrad = 3,    ///< dH W1 -> dx_rows
  down_proj_wgrad = 4,  ///< dO[tokens]^T (s*A) -> dw2
  up_proj_wgrad = 5,    ///< dH^T x[tokens] -> dw1
};
/// Arguments of the six, of which each uses its own.
struct GroupedGemmArgs {
  const std::int32_t* offsets = nullptr;     ///< (E+1), or (E) with `ends`
  const std::int32_t* ends = nullptr;        ///< (E): expert e has rows offsets[e] .. ends[e]-1
                                             ///< null: ends are offsets + 1
  const std::int32_t* row_tokens = nullptr;  ///< (R): operations with [tokens] above, gathered rows
  /// (E), optional: the order in which CUDA's weight gradients compute the experts; null: by id. It
  /// changes their time, never a bit: experts with many rows should come first. It must be a
  /// permutation: an expert that is missing gets no gradient, ids outside [0, E) are skipped.
  const std::int32_t* expert_order = nullptr;
  /// (R): down_proj_dgrad, and down_proj of contiguous rows, if there are scores
  const float* row_scores = nullptr;
  const void* x = nullptr;      ///< (T, d), or (R, d) contiguous
  const void* dout = nullptr;   ///< (T, d), or (R, d) contiguous
  const void* w1 = nullptr;     ///< (E, W, d); the gate (E, n, d) if separate; (E, d, W)
                                ///< if transposed
  const void* w1_up = nullptr;  ///< (E, n, d) if separate
  const void* b1 = nullptr;     ///< (E, W) in the order of w1
  const void* b1_up = nullptr;  ///< (E, n) if separate
  const void* w2 = nullptr;     ///< (E, d, n); (E, n, d) if transposed
  const void* b2 = nullptr;     ///< (E, d)
  // Some operations read these, others write them. No operation touches rows that no expert owns.
  void* preact = nullptr;        ///< (R, W): H; ExpertsDesc::alternates() says how
  void* act = nullptr;           ///< (R, n)
  void* expert_out = nullptr;    ///< (R, d)
  void* dpreact = nullptr;       ///< (R, W); down_proj_dgrad: may be preact
  void* scaled_act = nullptr;    ///< (R, n)
  float* row_dscores = nullptr;  ///< (R)
  void* dx_rows = nullptr;       ///< (R, d)
  // fp32 with f32_weight_grads; added to with accumulate_weight_grads. The gradient of an expert
  // without rows is zero.
  void* dw1 = nullptr;     ///< laid out like w1
  void* dw1_up = nullptr;  ///< (E, n, d) if separate
  void* dw2 = nullptr;     ///< likewise
};
/// One of the six products.
struct SONICMOE_API GroupedGemmDesc : GroupedDesc {
  using Args = GroupedGemmArgs;
  GemmOp op = GemmOp::up_proj;
  bool operator==(const GroupedGemmDesc&) const = default;
};

/// Gradients of the biases, per expert: db1 sums the rows of dH, db2 the rows of s*dO. The
/// operation also adds <dO, b2> to row_dscores, which down_proj_dgrad wrote. Where b2 gets no score
/// (ExpertsDesc::scores_bias), s is 1 and row_dscores stays as it is.
struct BiasGradArgs {
  const std::int32_t* offsets = nullptr;     ///< as in GroupedGemmArgs
  const std::int32_t* ends = nullptr;        ///< as in GroupedGemmArgs
  const std::int32_t* row_tokens = nullptr;  ///< (R), gathered rows
  const float* row_scores = nullptr;         ///< (R)
  const void* dpreact = nullptr;             ///< (R, W)
  const void* dout = nullptr;                ///< (T, d)
  const void* b2 = nullptr;                  ///< (E, d)
  float* row_dscores = nullptr;              ///< (R), added to
  void* db1 = nullptr;                       ///< laid out like b1; zero for experts without rows
  void* db1_up = nullptr;                    ///< separate only
  void* db2 = nullptr;                       ///< (E, d); likewise
};
/// Sizes and types of the bias gradients.
struct SONICMOE_API BiasGradDesc : GroupedDesc {
  using Args = BiasGradArgs;
  bool operator==(const BiasGradDesc&) const = default;
};

/// Sums each token's rows, in fp32 with one rounding at the end:
///
///   out[t] = sum over t's slots of score * rows[slot_rows[slot]]
///          + sum over t's slots of dlogits[t, e] * router_w[e], e the slot's expert
///          + addend[t]
///
/// Each sum runs in slot order. O is weighted; dX is unweighted, with null `slot_scores`. Slots
/// whose row is -1 and experts outside [0, E) add nothing.
///
/// The second sum runs only with `router_w`. It is the router's part of dX where a token's logits
/// have gradients at its own experts alone. They do with softmax over the top-K or renormalised
/// scores, if no other loss reads the logits.
struct AggregateArgs {
  const void* rows = nullptr;                   ///< (R, d)
  const std::int32_t* slot_rows = nullptr;      ///< (S): slot -> row, or -1
  const std::int32_t* token_offsets = nullptr;  ///< (T+1): lists only (top_k == 0)
  const std::int32_t* token_slots = nullptr;    ///< (R): lists only; null: 0, 1, ..., R-1
  const float* slot_scores = nullptr;           ///< (S) or null
  const void* addend = nullptr;                 ///< (T, d) or null; may be `out` itself
  const std::int32_t* slot_experts = nullptr;   ///< (S): with router_w
  const void* dlogits = nullptr;                ///< (T, E), or fp32: with router_w
  const void* router_w = nullptr;               ///< (E, d), or fp32; or null; not with slot_scores
  void* out = nullptr;                          ///< (T, d)
};
inline constexpr std::int64_t kMaxRoutedTopK = 64;  ///< largest K with router_w
/// Sizes and types of an aggregation.
struct SONICMOE_API AggregateDesc {
  using Args = AggregateArgs;
  std::int64_t tokens = 0;
  std::int64_t rows = 0;  ///< R: 0 to T*K, or any number for lists
  std::int64_t hidden = 0;
  std::int64_t top_k = 0;  ///< K, or 0 for lists
  DType dtype = DType::bf16;
  /// E if calls may have router_w; then K is 1 to min(E, kMaxRoutedTopK). 0: they have none.
  std::int64_t experts = 0;
  bool f32_dlogits = false;   ///< dlogits is fp32; only with experts
  bool f32_router_w = false;  ///< router_w is fp32; only with f32_dlogits
  bool operator==(const AggregateDesc&) const = default;
};

/// Gradient of the scores. Without logits it is dscores in slot order. With logits it goes through
/// the router to dlogits, which is dense and includes dlogits_in. With g the slot gradients, s the
/// scores and p the softmax of all logits:
///
///   softmax over the top-K, or renormalised: dlogit_k = s_k (g_k - sum_j g_j s_j), others 0
///   otherwise: dlogit_e = p_e (g_e - sum_k g_k s_k), g_e = 0 for experts without a slot
///
/// The other routers (not RouterDesc::plain()) first take g through scales and renormalisation:
///
///   h_k = g_k * scale * expert_scale[e];  dexpert_scale[e] += g_k * w_k * scale
///   dp_k = (h_k - sum_j h_j w_j) / (sum + eps), or h_k if nothing is renormalised
///
/// and dp through the score: with sigmoid dlogit = dp p (1 - p), with sqrt_softplus
/// dlogit = dp sigmoid(z) / 2p, and 0 where p = 0; with softmax as above, of dp and p.
///
/// With RouterInput::logits_and_ids a token may have an expert several times, and its slots add.
/// Sentinels' experts get nothing.
struct ScoreGradArgs {
  const float* row_dscores = nullptr;          ///< (R)
  const std::int32_t* slot_rows = nullptr;     ///< (R); -1 reads as 0
  const float* slot_scores = nullptr;          ///< (R): with logits, if plain()
  const float* slot_probabilities = nullptr;   ///< (R): p, if keeps_probabilities()
  const std::int32_t* slot_experts = nullptr;  ///< (R): with logits
  const float* expert_scale = nullptr;         ///< (E), or null: with expert_scale
  const std::int32_t* offsets = nullptr;       ///< (E+1): of rows, with expert_scale
  const void* logits = nullptr;                ///< (T, E): if RouterDesc::reaches_all_experts()
  const void* dlogits_in = nullptr;            ///< (T, E), optional: of other losses; with logits
  void* dlogits = nullptr;                     ///< (T, E): with logits
  float* dscores = nullptr;                    ///< (R): without logits
  float* dexpert_scale = nullptr;              ///< (E): with expert_scale
};
/// Router, sizes and types of the gradient.
struct SONICMOE_API ScoreGradDesc : RouterDesc {
  using Args = ScoreGradArgs;
  std::int64_t tokens = 0;
  std::int64_t rows = 0;  ///< R
  DType dtype = DType::bf16;
  bool operator==(const ScoreGradDesc&) const = default;
};

/// A loss on logits that keeps a router healthy. q are a token's scores over all experts, divided
/// by their sum, and lse is the log of the sum of e^z over its logits. Tokens that `token_mask`
/// leaves out count nowhere.
///
///   balance  mean over sequences of E * sum_e (P_e / sum P)(f_e / sum f); P_e sums q over a
///            sequence's tokens, f are its counts, which get no gradient. One sequence: Switch's
///            load-balancing loss. DeepSeek-V3's sequence-wise loss is this with B sequences.
///   z        mean over tokens of lse^2 (ST-MoE)
///
/// A token whose scores are all 0 has q = 0. A sequence whose counts or P are all 0 is left out of
/// the mean. A mean over nothing is 0, and so is its gradient. No call checks the logits.
struct AuxLossArgs {
  const void* logits = nullptr;              ///< (T, E) dtype; sequence b has tokens b*T/B ...
  const std::int32_t* counts = nullptr;      ///< (B, E): balance; choices of tokens that count
  const std::uint8_t* token_mask = nullptr;  ///< (T): 0 leaves a token out; with `masked`
  const float* dloss = nullptr;              ///< (1): backward
  float* loss = nullptr;                     ///< (1): forward
  void* dlogits = nullptr;                   ///< (T, E): backward
};
/// Sizes, types and kind of a loss.
struct SONICMOE_API AuxLossDesc {
  using Args = AuxLossArgs;
  std::int64_t tokens = 0;
  std::int64_t experts = 0;
  DType dtype = DType::bf16;
  bool backward = false;
  RouterLoss loss = RouterLoss::balance;
  RouterScore score = RouterScore::softmax;  ///< balance: what q is made of
  std::int64_t sequences = 1;                ///< B, a divisor of T; 1 for z
  bool masked = false;
  bool operator==(const AuxLossDesc&) const = default;
};

/// selection_bias += rate * sign(mean of counts - counts): experts that a step's tokens chose too
/// often get a smaller bias. The comparison with the mean is exact. Wang et al.,
/// Auxiliary-Loss-Free Load Balancing (arXiv:2408.15664), algorithm 1.
struct UpdateSelectionBiasArgs {
  const std::int32_t* counts = nullptr;  ///< (E): of a step's tokens, on all ranks
  float* selection_bias = nullptr;       ///< (E): read and written
  float rate = 0.0f;                     ///< finite, not negative
};
struct SONICMOE_API UpdateSelectionBiasDesc {
  using Args = UpdateSelectionBiasArgs;
  std::int64_t experts = 0;  ///< E
  bool operator==(const UpdateSelectionBiasDesc&) const = default;
};

/// A plan for one operation. Immutable and cheap to copy. Several threads may call one plan at
/// once, each with its own workspace. Calls do not allocate.
template <class Desc>
class SONICMOE_API OpPlan {
 public:
  using Args = typename Desc::Args;
  const Desc& desc() const noexcept;
  std::size_t workspace_bytes() const noexcept;
  /// The kernel list, best first: which entry runs and why the others do not.
  std::string explain() const;
  /// CPU: done when it returns. CUDA: queued on the stream and capturable, unless checked. Returns
  /// invalid_argument for a pointer, alignment or workspace before anything runs.
  Status run(const Args& args, Workspace workspace = {}, Stream stream = {}) const noexcept;

  struct Impl;
  const Impl& impl() const noexcept { return *impl_; }  ///< for this library's own plans
  explicit OpPlan(std::shared_ptr<const Impl> impl) noexcept : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

// make_plan() validates the descriptor and chooses the kernel. It returns invalid_argument for a
// size or combination that is not allowed, `unsupported` where no kernel runs the descriptor.

SONICMOE_API Result<OpPlan<RouterGemmDesc>> make_plan(const RouterGemmDesc&, Device = {},
                                                      const Options& = {});
SONICMOE_API Result<OpPlan<TopKDesc>> make_plan(const TopKDesc&, Device = {}, const Options& = {});
SONICMOE_API Result<OpPlan<MetadataDesc>> make_plan(const MetadataDesc&, Device = {},
                                                    const Options& = {});
SONICMOE_API Result<OpPlan<SegmentsDesc>> make_plan(const SegmentsDesc&, Device = {},
                                                    const Options& = {});
SONICMOE_API Result<OpPlan<ZeroTailDesc>> make_plan(const ZeroTailDesc&, Device = {},
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
SONICMOE_API Result<OpPlan<UpdateSelectionBiasDesc>> make_plan(const UpdateSelectionBiasDesc&,
                                                               Device = {}, const Options& = {});

extern template class OpPlan<RouterGemmDesc>;
extern template class OpPlan<TopKDesc>;
extern template class OpPlan<MetadataDesc>;
extern template class OpPlan<SegmentsDesc>;
extern template class OpPlan<ZeroTailDesc>;
extern template class OpPlan<GroupedGemmDesc>;
extern template class OpPlan<BiasGradDesc>;
extern template class OpPlan<AggregateDesc>;
extern template class OpPlan<ScoreGradDesc>;
extern template class OpPlan<AuxLossDesc>;
extern template class OpPlan<UpdateSelectionBiasDesc>;

}  // namespace sonicmoe
