#include <algorithm>
#include <cmath>
#include <numeric>

#include "verify/oracle.h"

namespace sonicmoe::verify {
namespace {

/// fp64 softmax of each row, and its column sums P.
struct Probabilities {
  Tensor p;        // (T, E)
  Tensor columns;  // (E)
};

Probabilities probabilities(const Tensor& logits, std::int64_t tokens, std::int64_t experts) {
  Probabilities out{logits, Tensor(experts)};
  for (std::int64_t t = 0; t < tokens; ++t) {
    double* row = &out.p[t * experts];
    const double max = *std::max_element(row, row + experts);
    double sum = 0;
    for (std::int64_t e = 0; e < experts; ++e) sum += row[e] = std::exp(row[e] - max);
    for (std::int64_t e = 0; e < experts; ++e) out.columns[e] += row[e] /= sum;
  }
  return out;
}

}  // namespace

// The loss is a handful of sums over T*E probabilities, so that fp64 serves every precision; only
// the results are rounded.
double Oracle::aux_loss(const Tensor& logits, const std::vector<std::int32_t>& counts) const {
  const double total = std::accumulate(counts.begin(), counts.end(), 0.0);
  if (desc_.tokens == 0 || total == 0) return 0;
  const Tensor columns = probabilities(logits, desc_.tokens, desc_.experts).columns;
  double sum = 0;  // sum P = T, since each token's probabilities sum to 1
  for (std::int64_t e = 0; e < desc_.experts; ++e) sum += columns[e] * counts[e];
  return single(desc_.experts * sum / (desc_.tokens * total));
}

Tensor Oracle::aux_loss_grad(const Tensor& logits, const std::vector<std::int32_t>& counts,
                             double dloss) const {
  const std::int64_t T = desc_.tokens, E = desc_.experts;
  const double total = std::accumulate(counts.begin(), counts.end(), 0.0);
  Tensor out(T * E);
  if (T == 0 || total == 0) return out;
  const Tensor p = probabilities(logits, T, E).p;
  const double scale = dloss * E / (T * total);  // dloss/dp_te = scale * f_e
  for (std::int64_t t = 0; t < T; ++t) {
    double mean = 0;
    for (std::int64_t e = 0; e < E; ++e) mean += p[t * E + e] * counts[e];
    for (std::int64_t e = 0; e < E; ++e) {
      out[t * E + e] = store(scale * p[t * E + e] * (counts[e] - mean));
    }
  }
  return out;
}

Tensor row_scores(const Grouping& g, const Tensor& slot_scores) {
  Tensor out(g.rows());
  for (std::size_t row = 0; row < out.size(); ++row) out[row] = slot_scores[g.row_slots[row]];
  return out;
}

Routing own_routing(const Problem& problem, Precision precision) {
  const LayerDesc& desc = problem.desc;
  if (desc.router == RouterMode::given) return problem.lists;
  const Tensor logits = Oracle(desc, precision).logits(problem.x, problem.router_w);
  return routing_of_ids(top_k(logits, desc.tokens, desc.experts, desc.top_k, desc.router),
                        desc.top_k);
}

LayerTensors oracle_forward(const Problem& problem, const Routing& routing, Precision precision) {
  const LayerDesc& desc = problem.desc;
  const Oracle op(desc, precision);
  const Grouping g = group(routing, desc.tokens, desc.experts);
  LayerTensors out;
  if (desc.router == RouterMode::given) {
    out.scores = problem.list_scores;
  } else {
    out.logits = op.logits(problem.x, problem.router_w);
    out.scores = op.scores(out.logits, routing.experts);
  }
  auto [preact, act] = op.up_proj(g, problem.x, problem.w1, problem.b1);
  out.preact = std::move(preact);
  out.act = std::move(act);
  out.expert_out = op.down_proj(g, out.act, problem.w2, problem.b2);
  out.o = op.aggregate(g, out.expert_out, out.scores, {});
  return out;
}

void oracle_backward(const Problem& problem, const Routing& routing, Precision precision,
                     LayerTensors* tensors) {
  const LayerDesc& desc = problem.desc;
  const Oracle op(desc, precision);
  const Grouping g = group(routing, desc.tokens, desc.experts);
  LayerTensors& out = *tensors;
  const Tensor scores = row_scores(g, out.scores);

  auto dgrad = op.down_proj_dgrad(g, scores, problem.dout, problem.w2, out.preact);
  out.dpreact = std::move(dgrad.dpreact);
  out.scaled_act = std::move(dgrad.scaled_act);
  out.row_dscores = std::move(dgrad.row_dscores);
  if (desc.bias) {
    auto bias = op.bias_grad(g, scores, out.dpreact, problem.dout, problem.b2, out.row_dscores);
    out.db1 = std::move(bias.db1);
    out.db2 = std::move(bias.db2);
    out.row_dscores = std::move(bias.row_dscores);
  }
  out.dw2 = op.down_proj_wgrad(g, problem.dout, out.scaled_act);
  out.dw1 = op.up_proj_wgrad(g, problem.x, out.dpreact);
  out.dx_rows = op.up_proj_dgrad(g, out.dpreact, problem.w1);
  out.dscores = op.slot_dscores(g, out.row_dscores);

  Tensor router_dx;
  if (desc.router != RouterMode::given) {
    out.dlogits =
        op.score_grad(out.logits, routing.experts, out.scores, out.dscores, problem.dlogits);
    out.drouter_w = op.router_dw(out.dlogits, problem.x);
    router_dx = op.router_dx(out.dlogits, problem.router_w);
  }
  out.dx = op.aggregate(g, out.dx_rows, {}, router_dx);
}

}  // namespace sonicmoe::verify
