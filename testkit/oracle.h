#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sonicmoe/layer.h"
#include "sonicmoe/ops.h"
#include "testkit/grouping.h"
#include "testkit/numbers.h"

/// What the layer means, in plain loops that share no code with the library.
namespace sonicmoe::testkit {

enum class Precision {
  exact,    ///< fp64, nothing rounded
  rounded,  ///< fp64, each tensor rounded once where a backend stores it
  plain,    ///< fp32 sums in the order of the loops, tensors rounded where a backend stores them
};

/// Which gradients to ask backward for.
struct WantedGradients {
  bool dx = true, drouter_w = true, dw1 = true, dw2 = true;
};

/// Everything that a layer reads. W1 and b1 hold [gate n | up n] whatever desc.w1_layout says.
/// Tensors that the layer does not have are empty.
struct Problem {
  LayerDesc desc;
  Tensor x;         ///< (T, d)
  Tensor router_w;  ///< (E, d); projection
  Tensor logits;    ///< (T, E) of the caller; logits, logits_and_ids
  Tensor logit_bias, selection_bias, expert_scale;  ///< (E), where RouterDesc has them
  Tensor w1;                                        ///< (E, W, d), W = 2n with a gate, else n
  Tensor b1;                                        ///< (E, W)
  Tensor w2;                                        ///< (E, d, n)
  Tensor b2;                                        ///< (E, d)
  Tensor dout;                                      ///< (T, d)
  Tensor dlogits;   ///< (T, E), or empty: gradient of losses outside the layer
  Tensor dw1, dw2;  ///< what gradients are added to, like w1 and w2; accumulate_weight_grads only
  Routing lists;    ///< the caller's lists, or its ids (T, K) as routing_of_ids() puts them
  Tensor list_scores;      ///< the scores of the lists, or the weights of the ids
  WantedGradients wanted;  ///< of the library; the oracle makes all
};

/// Everything that a layer computes. "Rows" are the grouped rows in use, so without sentinels.
struct LayerTensors {
  Tensor logits;       ///< (T, E), the caller's or the layer's; empty without logits
  Tensor scores;       ///< (slots)
  Tensor preact, act;  ///< H (rows, W), A (rows, n)
  Tensor expert_out;   ///< Y (rows, d)
  Tensor o;            ///< (T, d)

  Tensor dpreact, scaled_act;  ///< dH (rows, W), A' (rows, n)
  Tensor row_dscores;          ///< (rows)
  Tensor dw1, db1, dw2, db2;   ///< like w1, b1, w2, b2
  Tensor dx_rows;              ///< dX~ (rows, d)
  Tensor dscores;              ///< (slots), 0 for sentinels
  Tensor dlogits;              ///< (T, E), with logits; with the outside's share
  Tensor drouter_w, dx;
  Tensor dlogit_bias, dexpert_scale;  ///< (E)
};

/// Each operation by itself. Arguments are named and shaped as in sonicmoe/ops.h, except that W1,
/// b1 and their gradients hold [gate | up] and that rows in use stand for the row capacity.
class Oracle {
 public:
  Oracle(const LayerDesc& desc, Precision precision) : desc_(desc), precision_(precision) {}

  /// `logit_bias` may be empty.
  Tensor logits(const Tensor& x, const Tensor& router_w, const Tensor& logit_bias = {}) const;
  Tensor router_dx(const Tensor& dlogits, const Tensor& router_w) const;
  Tensor router_dw(const Tensor& dlogits, const Tensor& x) const;

  /// Scores (T, K) of the experts `ids`, which may be any: sentinels have 0. `expert_scale` may be
  /// empty.
  Tensor scores(const Tensor& logits, const std::vector<std::int32_t>& ids,
                const Tensor& expert_scale = {}) const;
  /// p of the same (T, K).
  Tensor probabilities(const Tensor& logits, const std::vector<std::int32_t>& ids) const;

  struct UpProj {
    Tensor preact, act;
  };
  UpProj up_proj(const Grouping& g, const Tensor& x, const Tensor& w1, const Tensor& b1) const;
  /// `row_scores` is read where ExpertsDesc::score_at applies them here.
  Tensor down_proj(const Grouping& g, const Tensor& act, const Tensor& w2, const Tensor& b2,
                   const Tensor& row_scores) const;
  struct DownProjDgrad {
    Tensor dpreact, scaled_act, row_dscores;  ///< the last is empty without scores
  };
  DownProjDgrad down_proj_dgrad(const Grouping& g, const Tensor& row_scores, const Tensor& dout,
                                const Tensor& w2, const Tensor& preact) const;
  Tensor up_proj_dgrad(const Grouping& g, const Tensor& dpreact, const Tensor& w1) const;
  Tensor down_proj_wgrad(const Grouping& g, const Tensor& dout, const Tensor& scaled_act) const;
  Tensor up_proj_wgrad(const Grouping& g, const Tensor& x, const Tensor& dpreact) const;

  struct BiasGrad {
    Tensor db1, db2, row_dscores;
  };
  BiasGrad bias_grad(const Grouping& g, const Tensor& row_scores, const Tensor& dpreact,
                     const Tensor& dout, const Tensor& b2, const Tensor& row_dscores) const;

  /// `slot_scores` and `addend` may be empty.
  Tensor aggregate(const Grouping& g, const Tensor& rows, const Tensor& slot_scores,
                   const Tensor& addend) const;
  /// The router's part of dX from each token's own experts, (T, d), not rounded to storage.
  Tensor routed_dx(const std::vector<std::int32_t>& slot_experts, const Tensor& dlogits,
                   const Tensor& router_w) const;
  /// Row order to slot order.
  Tensor slot_dscores(const Grouping& g, const Tensor& row_dscores) const;
  /// `dlogits_in` and `expert_scale` may be empty. `magnitudes`: of its terms, as in aux_loss_grad.
  Tensor score_grad(const Tensor& logits, const std::vector<std::int32_t>& ids,
                    const Tensor& slot_dscores, const Tensor& dlogits_in,
                    const Tensor& expert_scale = {}, bool magnitudes = false) const;
  Tensor expert_scale_grad(const Tensor& logits, const std::vector<std::int32_t>& ids,
                           const Tensor& slot_dscores) const;
  Tensor logit_bias_grad(const Tensor& dlogits) const;

  double aux_loss(const Tensor& logits, const std::vector<std::int32_t>& counts) const;
  /// `magnitudes`: of its terms, which cancel, added up instead: see cancellation_allowance.
  Tensor aux_loss_grad(const Tensor& logits, const std::vector<std::int32_t>& counts, double dloss,
                       bool magnitudes = false) const;
  /// The same for any loss. `counts` are read by the balance loss, an empty `mask` leaves all in.
  double aux_loss(const AuxLossDesc& op, const Tensor& logits,
                  const std::vector<std::int32_t>& counts,
                  const std::vector<std::uint8_t>& mask) const;
  Tensor aux_loss_grad(const AuxLossDesc& op, const Tensor& logits,
                       const std::vector<std::int32_t>& counts,
                       const std::vector<std::uint8_t>& mask, double dloss,
                       bool magnitudes = false) const;

 private:
  /// To a type, to the storage type of tensors, and to fp32; not in exact mode.
  double store_as(double value, DType type) const;
  double store(double value) const;
  double single(double value) const;
  AuxLossDesc layer_loss() const;
  DType logits_type() const { return desc_.router.logits_dtype(desc_.experts.dtype); }

  LayerDesc desc_;
  Precision precision_;
};

/// `routing` says which experts each token goes to and is held fixed; the scores are computed.
LayerTensors oracle_forward(const Problem& problem, const Routing& routing, Precision precision);
/// Adds the gradients to what oracle_forward returned for the same arguments.
void oracle_backward(const Problem& problem, const Routing& routing, Precision precision,
                     LayerTensors* tensors);

/// The routing that the problem itself leads to: its lists or ids, or the top-K of its logits.
Routing own_routing(const Problem& problem, Precision precision);

/// row_scores[row] = slot_scores[slot of that row].
Tensor row_scores(const Grouping& g, const Tensor& slot_scores);

}  // namespace sonicmoe::testkit
