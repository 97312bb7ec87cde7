#include "operators.h"

namespace sonicmoe::python {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> token_rounding(Tensor logits,
                                                                  OptionalTensor draws,
                                                                  std::string layer) {
  static PlanCache<TokenRoundingDesc> plans;
  check_dims("logits", logits, 2, "(T, E)");
  const LayerDesc options = options_of(layer);
  TokenRoundingDesc desc{{options.router},
                         logits.size(0),
                         dtype_of("logits", logits),
                         options.rounding.rule,
                         options.rounding.tile};
  desc.experts = logits.size(1);
  const auto plan = plans.get(desc, logits);
  check_tensor("logits", logits, logits, logits.scalar_type(), {desc.tokens, desc.experts},
               "(T, E)");
  if (draws) check_draws(*draws, logits);
  logits = aligned(logits);
  const Tensor scores = empty(logits, {desc.capacity()}, ScalarType::Float);
  const Tensor token_ids = empty(logits, {desc.capacity()}, ScalarType::Int);
  const Tensor expert_ids = empty(logits, {desc.capacity()}, ScalarType::Int);
  const Tensor counts = empty(logits, {desc.experts}, ScalarType::Int);
  const Tensor frequency = empty(logits, {desc.experts}, ScalarType::Int);
  Unread error(logits);
  check(plan.run({.logits = input<void>(logits),
                  .draws = draws_of(draws),
                  .scores = output<float>(scores),
                  .token_ids = output<std::int32_t>(token_ids),
                  .expert_ids = output<std::int32_t>(expert_ids),
                  .counts = output<std::int32_t>(counts),
                  .frequency = output<std::int32_t>(frequency),
                  .error_word = error.word()},
                 Scratch(logits, plan.workspace_bytes()), stream_of(logits)));
  return {scores, token_ids, expert_ids, counts, frequency};
}

Tensor token_rounding_backward(Tensor dscores, Tensor logits, Tensor token_ids, Tensor expert_ids,
                               std::string layer) {
  static PlanCache<TokenRoundingGradDesc> plans;
  check_dims("logits", logits, 2, "(T, E)");
  check_dims("token_ids", token_ids, 1, "(capacity)");
  TokenRoundingGradDesc desc{
      {options_of(layer).router}, logits.size(0), dtype_of("logits", logits)};
  desc.experts = logits.size(1);
  desc.list_length = token_ids.size(0);
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
