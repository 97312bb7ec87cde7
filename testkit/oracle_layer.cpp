#include "testkit/oracle.h"

namespace sonicmoe::testkit {

Tensor row_scores(const Grouping& g, const Tensor& slot_scores) {
  Tensor out(g.rows());
  for (std::size_t row = 0; row < out.size(); ++row) out[row] = slot_scores[g.row_slots[row]];
  return out;
}

Tensor Oracle::slot_dscores(const Grouping& g, const Tensor& row_dscores) const {
  Tensor out(g.slot_rows.size());
  for (std::size_t slot = 0; slot < out.size(); ++slot) {
    out[slot] = g.slot_rows[slot] < 0 ? 0.0 : row_dscores[g.slot_rows[slot]];
  }
  return out;
}

namespace {

Tensor logits_of(const Problem& problem, Precision precision) {
  if (!problem.desc.router.projects()) return problem.logits;
  return Oracle(problem.desc, precision).logits(problem.x, problem.router_w, problem.logit_bias);
}

}  // namespace

Routing own_routing(const Problem& problem, Precision precision) {
  const LayerDesc& desc = problem.desc;
  if (!desc.router.chooses()) return limited(problem.lists, desc);
  const Tensor logits = logits_of(problem, precision);
  return routing_of_ids(top_k(logits, desc.tokens, desc.router, problem.selection_bias),
                        desc.router.top_k);
}

LayerTensors oracle_forward(const Problem& problem, const Routing& routing, Precision precision) {
  const LayerDesc& desc = problem.desc;
  const Oracle op(desc, precision);
  const Grouping g = group(routing, desc.tokens, desc.router.experts);
  LayerTensors out;
  if (!desc.router.has_logits()) {
    out.scores = problem.list_scores;
  } else {
    out.logits = logits_of(problem, precision);
    out.scores = op.scores(out.logits, routing.experts, problem.expert_scale);
  }
  auto [preact, act] = op.up_proj(g, problem.x, problem.w1, problem.b1);
  out.preact = std::move(preact);
  out.act = std::move(act);
  out.expert_out = op.down_proj(g, out.act, problem.w2, problem.b2, row_scores(g, out.scores));
  // Contiguous rows have their scores by now: O is their rows, and zeros elsewhere.
  const bool combines = desc.experts.score_at == ScoreAt::combine;
  out.o = op.aggregate(g, out.expert_out, combines ? out.scores : Tensor{}, {});
  return out;
}

void oracle_backward(const Problem& problem, const Routing& routing, Precision precision,
                     LayerTensors* tensors) {
  const LayerDesc& desc = problem.desc;
  const Oracle op(desc, precision);
  const Grouping g = group(routing, desc.tokens, desc.router.experts);
  LayerTensors& out = *tensors;
  const Tensor scores = row_scores(g, out.scores);

  auto dgrad = op.down_proj_dgrad(g, scores, problem.dout, problem.w2, out.preact);
  out.dpreact = std::move(dgrad.dpreact);
  out.scaled_act = std::move(dgrad.scaled_act);
  out.row_dscores = std::move(dgrad.row_dscores);
  if (desc.experts.bias) {
    auto bias = op.bias_grad(g, scores, out.dpreact, problem.dout, problem.b2, out.row_dscores);
    out.db1 = std::move(bias.db1);
    out.db2 = std::move(bias.db2);
    out.row_dscores = std::move(bias.row_dscores);
  }
  out.dw2 = op.down_proj_wgrad(g, problem.dout, out.scaled_act);
  out.dw1 = op.up_proj_wgrad(g, problem.x, out.dpreact);
  out.dx_rows = op.up_proj_dgrad(g, out.dpreact, problem.w1);
  if (desc.experts.score_at != ScoreAt::none) out.dscores = op.slot_dscores(g, out.row_dscores);

  Tensor router_dx;
  if (desc.router.has_logits()) {
    out.dlogits = op.score_grad(out.logits, routing.experts, out.dscores, problem.dlogits,
                                problem.expert_scale);
  }
  if (desc.router.expert_scale) {
    out.dexpert_scale = op.expert_scale_grad(out.logits, routing.experts, out.dscores);
  }
  if (desc.router.logit_bias) out.dlogit_bias = op.logit_bias_grad(out.dlogits);
  if (desc.router.projects()) {
    out.drouter_w = op.router_dw(out.dlogits, problem.x);
    router_dx = op.router_dx(out.dlogits, problem.router_w);
  }
  out.dx = op.aggregate(g, out.dx_rows, {}, router_dx);
}

}  // namespace sonicmoe::testkit
