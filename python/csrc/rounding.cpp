#include "operators.h"

namespace sonicmoe::python {
namespace {

RoundingRule parse_rule(const std::string& text) {
  RoundingRule rule;
  if (!parse(text, &rule)) {
    check(Status::error(StatusCode::invalid_argument,
                        "rule: got %s, allowed: nearest, stochastic, nearest_scores, balance, up, "
                        "down",
                        text.c_str()));
  }
  return rule;
}

RouterMode mode_of(bool softmax_over_topk) {
  return softmax_over_topk ? RouterMode::softmax_over_topk : RouterMode::topk_over_softmax;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> token_rounding(
    Tensor logits, OptionalTensor draws, std::int64_t top_k, bool softmax_over_topk,
    bool norm_topk_probs, std::string rule, std::int64_t tile) {
  static PlanCache<TokenRoundingDesc> plans;
  check_dims("logits", logits, 2, "(T, E)");
  const TokenRoundingDesc desc{{.experts = logits.size(1),
                                .top_k = top_k,
                                .mode = mode_of(softmax_over_topk),
                                .norm_topk_probs = norm_topk_probs},
                               logits.size(0),
                               dtype_of("logits", logits),
                               parse_rule(rule),
                               tile};
  const auto plan = plans.get(desc, logits);
  check_tensor("logits", logits, logits, logits.scalar_type(), {desc.tokens, desc.experts},
               "(T, E)");
  if (draws) check_tensor("draws", *draws, logits, ScalarType::Long, {2}, "(seed, offset)");
  logits = aligned(logits);
  const std::int64_t* state = input<std::int64_t>(draws);
  const Tensor scores = empty(logits, {desc.capacity()}, ScalarType::Float);
  const Tensor token_ids = empty(logits, {desc.capacity()}, ScalarType::Int);
  const Tensor expert_ids = empty(logits, {desc.capacity()}, ScalarType::Int);
  const Tensor counts = empty(logits, {desc.experts}, ScalarType::Int);
  const Tensor frequency = empty(logits, {desc.experts}, ScalarType::Int);
  check(plan.run({.logits = input<void>(logits),
                  .draws = draws ? reinterpret_cast<const std::uint64_t*>(state) : nullptr,
                  .scores = output<float>(scores),
                  .token_ids = output<std::int32_t>(token_ids),
                  .expert_ids = output<std::int32_t>(expert_ids),
                  .counts = output<std::int32_t>(counts),
                  .frequency = output<std::int32_t>(frequency)},
                 Scratch(logits, plan.workspace_bytes()), stream_of(logits)));
  return {scores, token_ids, expert_ids, counts, frequency};
}

Tensor token_rounding_backward(Tensor dscores, Tensor logits, Tensor token_ids, Tensor expert_ids,
                               std::int64_t top_k, bool softmax_over_topk, bool norm_topk_probs) {
  static PlanCache<TokenRoundingGradDesc> plans;
  check_dims("logits", logits, 2, "(T, E)");
  check_dims("token_ids", token_ids, 1, "(capacity)");
  const TokenRoundingGradDesc desc{{.experts = logits.size(1),
                                    .top_k = top_k,
                                    .mode = mode_of(softmax_over_topk),
                                    .norm_topk_probs = norm_topk_probs,
                                    .list_length = token_ids.size(0)},
                                   logits.size(0),
                                   dtype_of("logits", logits)};
  const auto plan = plans.get(desc, logits);
  check_tensor("logits", logits, logits, logits.scalar_type(), {desc.tokens, desc.experts},
               "(T, E)");
  check_tensor("dscores", dscores, logits, ScalarType::Float, {desc.list_length}, "(capacity)");
  check_tensor("token_ids", token_ids, logits, ScalarType::Int, {desc.list_length}, "(capacity)");
  check_tensor("expert_ids", expert_ids, logits, ScalarType::Int, {desc.list_length}, "(capacity)");
  logits = aligned(logits);
  const Tensor dlogits = empty(logits, {desc.tokens, desc.experts}, logits.scalar_type());
  check(plan.run({.logits = input<void>(logits),
                  .token_ids = input<std::int32_t>(token_ids),
                  .expert_ids = input<std::int32_t>(expert_ids),
                  .dscores = input<float>(dscores),
                  .dlogits = output<void>(dlogits)},
                 Scratch(logits, plan.workspace_bytes()), stream_of(logits)));
  return dlogits;
}

}  // namespace sonicmoe::python
