#include "operators.h"

namespace sonicmoe::python {
namespace {

/// The enumerator of this name; the library's own names, in order.
template <class Enum>
Enum named(const char* argument, const std::string& text, std::initializer_list<Enum> all) {
  std::string allowed;
  for (const Enum value : all) {
    if (text == name(value)) return value;
    allowed += (allowed.empty() ? "" : ", ") + std::string(name(value));
  }
  check(Status::error(StatusCode::invalid_argument, "%s: got %s, allowed: %s", argument,
                      text.c_str(), allowed.c_str()));
  return *all.begin();
}

AuxLossDesc describe_aux_loss(const Tensor& logits, const OptionalTensor& counts,
                              const std::string& loss, const std::string& score,
                              const OptionalTensor& token_mask, bool backward) {
  check_dims("logits", logits, 2, "(T, E)");
  AuxLossDesc desc{.tokens = logits.size(0),
                   .experts = logits.size(1),
                   .dtype = dtype_of("logits", logits),
                   .backward = backward};
  desc.loss = named("loss", loss, {RouterLoss::balance, RouterLoss::z});
  desc.score = named("score", score,
                     {RouterScore::softmax, RouterScore::sigmoid, RouterScore::sqrt_softplus});
  const bool of_sequences = counts && counts->dim() == 2;
  if (of_sequences) desc.sequences = counts->size(0);
  desc.masked = token_mask.has_value();
  check_tensor("logits", logits, logits, logits.scalar_type(), {desc.tokens, desc.experts},
               "(T, E)");
  if (of_sequences) {
    check_tensor("counts", *counts, logits, ScalarType::Int, {desc.sequences, desc.experts},
                 "(B, E)");
  } else if (counts) {
    check_tensor("counts", *counts, logits, ScalarType::Int, {desc.experts}, "(E)");
  }
  if (token_mask) {
    check_tensor("token_mask", *token_mask, logits, ScalarType::Byte, {desc.tokens}, "(T)");
  }
  return desc;
}

PlanCache<AuxLossDesc>& aux_loss_plans() {
  static PlanCache<AuxLossDesc> cache;
  return cache;
}

}  // namespace

Tensor aux_loss(Tensor logits, OptionalTensor counts, std::string loss_name, std::string score,
                OptionalTensor token_mask) {
  const auto plan = aux_loss_plans().get(
      describe_aux_loss(logits, counts, loss_name, score, token_mask, false), logits);
  logits = aligned(logits);
  const Tensor loss = empty(logits, {}, ScalarType::Float);
  check(plan.run({.logits = input<void>(logits),
                  .counts = input<std::int32_t>(counts),
                  .token_mask = input<std::uint8_t>(token_mask),
                  .loss = output<float>(loss)},
                 Scratch(logits, plan.workspace_bytes()), stream_of(logits)));
  return loss;
}

Tensor aux_loss_backward(Tensor dloss, Tensor logits, OptionalTensor counts, std::string loss,
                         std::string score, OptionalTensor token_mask) {
  const auto plan = aux_loss_plans().get(
      describe_aux_loss(logits, counts, loss, score, token_mask, true), logits);
  check_tensor("dloss", dloss, logits, ScalarType::Float, {}, "()");
  logits = aligned(logits);
  const Tensor dlogits = empty(logits, {logits.size(0), logits.size(1)}, logits.scalar_type());
  check(plan.run({.logits = input<void>(logits),
                  .counts = input<std::int32_t>(counts),
                  .token_mask = input<std::uint8_t>(token_mask),
                  .dloss = input<float>(dloss),
                  .dlogits = output<void>(dlogits)},
                 Scratch(logits, plan.workspace_bytes()), stream_of(logits)));
  return dlogits;
}

std::tuple<Tensor, Tensor> top_k(Tensor logits, std::string layer, OptionalTensor selection_bias,
                                 OptionalTensor expert_scale) {
  static PlanCache<TopKDesc> plans;
  check_dims("logits", logits, 2, "(T, E)");
  TopKDesc desc{{options_of(layer).router}, logits.size(0), dtype_of("logits", logits)};
  desc.experts = logits.size(1);
  const auto plan = plans.get(desc, logits);
  check_tensor("logits", logits, logits, logits.scalar_type(), {desc.tokens, desc.experts},
               "(T, E)");
  check_router_tensor("selection_bias", selection_bias, desc.selection_bias, logits, desc.experts);
  check_router_tensor("expert_scale", expert_scale, desc.expert_scale, logits, desc.experts);
  logits = aligned(logits);
  const Tensor scores = empty(logits, {desc.tokens, desc.top_k}, ScalarType::Float);
  const std::int64_t kept = desc.keeps_probabilities() ? desc.tokens : 0;
  const Tensor probabilities = empty(logits, {kept, desc.top_k}, ScalarType::Float);
  const Tensor ids = empty(logits, {desc.tokens, desc.top_k}, ScalarType::Int);
  Unread error(logits);
  check(plan.run({.logits = input<void>(logits),
                  .selection_bias = input<float>(selection_bias),
                  .expert_scale = input<float>(expert_scale),
                  .scores = output<float>(scores),
                  .probabilities = output<float>(probabilities),
                  .ids = output<std::int32_t>(ids),
                  .error_word = error.word()},
                 Scratch(logits, plan.workspace_bytes()), stream_of(logits)));
  return {scores, ids};
}

std::tuple<Tensor, Tensor> count_cumsum(Tensor ids, std::int64_t experts) {
  static PlanCache<MetadataDesc> plans;
  check_dims("ids", ids, 1, "(S)");
  // One id per token, so that slots are ids.
  const MetadataDesc desc{.tokens = ids.size(0), .experts = experts, .top_k = 1};
  const auto plan = plans.get(desc, ids);
  check_tensor("ids", ids, ids, ScalarType::Int, {desc.tokens}, "(S)");
  const Tensor counts = empty(ids, {experts}, ScalarType::Int);
  Tensor sums = empty(ids, {experts + 1}, ScalarType::Int);  // 0, c0, c0+c1, ...
  const Tensor rows = empty(ids, {3, desc.tokens}, ScalarType::Int);
  std::int32_t* const row = output<std::int32_t>(rows);
  check(plan.run({.slot_experts = input<std::int32_t>(ids),
                  .counts = output<std::int32_t>(counts),
                  .offsets = output<std::int32_t>(sums),
                  .row_tokens = row,
                  .row_slots = row + desc.tokens,
                  .slot_rows = row + 2 * desc.tokens},
                 Scratch(ids, plan.workspace_bytes()), stream_of(ids)));
  // A copy: what an operator returns shares no memory.
  return {counts, torch::stable::clone(torch::stable::narrow(sums, 0, 1, experts))};
}

Dispatch token_dispatch(Tensor ids, Tensor scores, std::int64_t experts, std::int64_t ranks,
                        bool packed) {
  static PlanCache<TokenDispatchDesc> plans;
  check_dims("ids", ids, 2, "(T, K)");
  const TokenDispatchDesc desc{.tokens = ids.size(0),
                               .experts = experts,
                               .ranks = ranks,
                               .top_k = ids.size(1),
                               .packed = packed};
  const auto plan = plans.get(desc, ids);
  const Shape slots = {desc.tokens, desc.top_k};
  check_tensor("ids", ids, ids, ScalarType::Int, slots, "(T, K)");
  check_tensor("scores", scores, ids, ScalarType::Float, slots, "(T, K)");
  const Tensor numbers = empty(ids, {1, 2 * ranks + 2}, ScalarType::Int);
  const Tensor row_tokens = empty(ids, {desc.rows()}, ScalarType::Int);
  const Tensor choices = empty(ids, {desc.rows(), 2 * desc.columns()}, ScalarType::Int);
  const Tensor token_rows = empty(ids, {desc.tokens, ranks}, ScalarType::Int);
  const Tensor score_places = empty(ids, slots, ScalarType::Int);
  check(plan.run({.ids = input<std::int32_t>(ids),
                  .scores = input<float>(scores),
                  .numbers = output<std::int32_t>(numbers),
                  .row_tokens = output<std::int32_t>(row_tokens),
                  .choices = output<std::int32_t>(choices),
                  .token_rows = output<std::int32_t>(token_rows),
                  .score_places = output<std::int32_t>(score_places)},
                 Scratch(ids, plan.workspace_bytes()), stream_of(ids)));
  return {numbers, row_tokens, choices, token_rows, score_places};
}

Tensor combine(Tensor rows, Tensor slot_rows) {
  static PlanCache<CombineDesc, CombinePlan> plans;
  check_dims("rows", rows, 2, "(R, d)");
  check_dims("slot_rows", slot_rows, 2, "(T, K)");
  const CombineDesc desc{.tokens = slot_rows.size(0),
                         .rows = slot_rows.size(0) * slot_rows.size(1),  // some may not exist
                         .hidden = rows.size(1),
                         .top_k = slot_rows.size(1),
                         .dtype = dtype_of("rows", rows),
                         .inference = true};
  const auto plan = plans.get(desc, rows);
  check_tensor("rows", rows, rows, rows.scalar_type(), {rows.size(0), desc.hidden}, "(R, d)");
  check_tensor("slot_rows", slot_rows, rows, ScalarType::Int, {desc.tokens, desc.top_k}, "(T, K)");
  rows = aligned(rows);
  slot_rows = aligned(slot_rows);
  const Tensor out = empty(rows, {desc.tokens, desc.hidden}, rows.scalar_type());
  // Without rows no slot has one, and `out` stands for memory that nobody reads.
  const Tensor& read = rows.size(0) > 0 ? rows : out;
  check(plan.forward({.rows = input<void>(read),
                      .slot_rows = input<std::int32_t>(slot_rows),
                      .out = output<void>(out)},
                     Scratch(rows, plan.workspace_bytes()), stream_of(rows)));
  return out;
}

void send_rows(Tensor x, Tensor row_tokens, Tensor counts, Tensor to) {
  static PlanCache<SendRowsDesc> plans;
  check_dims("x", x, 2, "(T, d)");
  check_dims("to", to, 1, "(P)");
  const SendRowsDesc desc{
      .tokens = x.size(0), .hidden = x.size(1), .ranks = to.size(0), .dtype = dtype_of("x", x)};
  const auto plan = plans.get(desc, x);
  check_tensor("x", x, x, x.scalar_type(), {desc.tokens, desc.hidden}, "(T, d)");
  check_tensor("row_tokens", row_tokens, x, ScalarType::Int, {desc.tokens * desc.ranks}, "(P T)");
  check_tensor("counts", counts, x, ScalarType::Int, {desc.ranks}, "(P)");
  if (!to.is_cpu()) {
    check(Status::error(StatusCode::invalid_argument,
                        "to: got a tensor on a device, allowed: one in the memory of the host"));
  }
  check_tensor("to", to, to, ScalarType::Long, {desc.ranks}, "(P)");
  x = aligned(x);
  check(plan.run({.x = input<void>(x),
                  .row_tokens = input<std::int32_t>(row_tokens),
                  .counts = input<std::int32_t>(counts),
                  .to = reinterpret_cast<void* const*>(input<std::int64_t>(to))},
                 {}, stream_of(x)));
}

}  // namespace sonicmoe::python
