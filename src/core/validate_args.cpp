// The pointers of a call. Refuses null where the call reads or writes a tensor, and misalignment.
#include <cmath>
#include <cstdio>
#include <string>

#include "core/checker.h"
#include "core/validate.h"

namespace sonicmoe {

namespace {

/// On CUDA tensors are read 16 bytes at a time.
template <class Desc>
Checker checker_of(const Desc& d, DeviceType device) {
  if (device == DeviceType::cuda) return Checker();
  if constexpr (requires { d.experts.dtype; }) {
    return Checker(size_of(d.experts.dtype));
  } else if constexpr (requires { d.dtype; }) {
    return Checker(size_of(d.dtype));
  } else {
    return Checker();  // no tensors
  }
}

/// Alignments of logits and of the router's weights, which may be fp32 beside a 16-bit x.
std::size_t of_logits(const RoutingDesc& d, const Checker& check) {
  return check.alignment_of(d.logits_dtype(d.dtype));
}
std::size_t of_router_w(const RoutingDesc& d, const Checker& check) {
  return check.alignment_of(d.router_w_dtype(d.dtype));
}

// These templates check arguments of a layer, and of its router or experts alone: their fields have
// the same names.

template <class Args>
void check_routing(const RoutingDesc& d, const Args& a, Checker* check) {
  if (d.takes_lists()) {
    check->ints("list_tokens", a.list_tokens, d.list_length, "(L) int32");
    check->ints("list_experts", a.list_experts, d.list_length, "(L) int32");
    check->ints("list_scores", a.list_scores, d.list_length, "(L) float");
  }
  if (d.projects()) {
    check->tensor("x", a.x, d.tokens, "(T, d)");
    check->tensor("router_w", a.router_w, 1, "(E, d)", of_router_w(d, *check));
    check->tensor("logits", a.logits, d.tokens, "(T, E)", of_logits(d, *check));
    if (d.logit_bias) check->ints("logit_bias", a.logit_bias, 1, "(E) float");
  } else if (d.has_logits()) {
    check->tensor("given_logits", a.given_logits, d.tokens, "(T, E)", of_logits(d, *check));
  }
  if (d.selection_bias) check->ints("selection_bias", a.selection_bias, 1, "(E) float");
  if (d.expert_scale) check->ints("expert_scale", a.expert_scale, 1, "(E) float");
  if (d.takes_ids()) check->ints("given_ids", a.given_ids, d.tokens, "(T, K) int32");
  if (d.takes_ids() && !d.has_logits()) {
    check->ints("given_weights", a.given_weights, d.tokens, "(T, K) float");
  }
  if (d.rounding.tile > 0) {
    check->optional("frequency", a.frequency, 1, 4).optional("draws", a.draws, 1, 8);
  } else if (d.has_logits()) {
    check->optional("scores", a.scores, d.tokens, 4);
    check->optional("expert_ids", a.expert_ids, d.tokens, 4);
  }
  check->ints("counts", a.counts, 1, "(E) int32").optional("error_word", a.error_word, 1, 4);
}

template <class Args>
void check_routing_grad(const RoutingDesc& d, const Args& a, Checker* check) {
  if (!d.has_logits()) {
    check->ints("dscores", a.dscores, d.slots(), "(T, K) or (L) float");
  }
  if (d.needs_logits()) {
    check->tensor("logits", a.logits, d.tokens, "(T, E)", of_logits(d, *check));
  }
  if (d.expert_scale) {
    check->ints("expert_scale", a.expert_scale, 1, "(E) float");
    check->optional("dexpert_scale", a.dexpert_scale, 1, 4);
  }
  if (!d.projects()) return;
  if (d.logit_bias) check->optional("dlogit_bias", a.dlogit_bias, 1, 4);
  const std::size_t alignment = of_router_w(d, *check);
  check->tensor("x", a.x, d.tokens, "(T, d)");
  check->tensor("router_w", a.router_w, 1, "(E, d)", alignment);
  check->optional("drouter_w", a.drouter_w, 1, alignment);
}

template <class Args>
void check_experts(const ExpertsDesc& d, std::int64_t rows, const Args& a, Checker* check) {
  check->up_weights("w1", "w1_up", a.w1, a.w1_up, d).down_weights("w2", a.w2, d);
  if (d.bias) {
    check->up_bias("b1", "b1_up", a.b1, a.b1_up, d).tensor("b2", a.b2, 1, "(E, d)");
  }
  if (d.keeps_preact()) check->tensor("preact", a.preact, rows, "(R, 2n or n)");
}

/// Alignment of the weights' gradients.
std::size_t of_gradients(const ExpertsDesc& d, const Checker& check) {
  return check.alignment_of(d.f32_weight_grads ? DType::f32 : d.dtype);
}

template <class Args>
void check_experts_grad(const ExpertsDesc& d, std::int64_t rows, const Args& a, Checker* check) {
  check->up_weights("w1", "w1_up", a.w1, a.w1_up, d).down_weights("w2", a.w2, d);
  if (d.keeps_preact()) {
    check->tensor("preact", a.preact, rows, "(R, 2n or n)");
  } else if (d.bias) {
    check->up_bias("b1", "b1_up", a.b1, a.b1_up, d);
  }
  const bool separate = d.w1_layout == W1Layout::separate;
  if (a.dw1 != nullptr || (separate && a.dw1_up != nullptr)) {
    check->up_weights("dw1", "dw1_up", a.dw1, a.dw1_up, d, of_gradients(d, *check));
  }
  check->optional("dw2", a.dw2, 1, of_gradients(d, *check));
  if (d.bias) {
    check->tensor("b2", a.b2, 1, "(E, d)").tensor("db2", a.db2, 1, "(E, d)");
    check->up_bias("db1", "db1_up", a.db1, a.db1_up, d);
  }
  if (!d.dpreact_in_workspace) check->tensor("dpreact", a.dpreact, rows, "(R, 2n or n)");
}

/// x, dO or dY: read where there are rows.
void check_rows(const char* argument, const void* pointer, const GroupedDesc& d, Checker* check) {
  if (d.gathers()) {
    check->tensor(argument, pointer, d.rows * d.tokens, "(T, d)");
  } else {
    check->tensor(argument, pointer, d.rows, "(R, d)");
  }
}

template <class Args>
void check_counts(IndexType type, const Args& a, Checker* check) {
  const std::size_t size = type == IndexType::i64 ? 8 : 4;
  check->require(a.counts != nullptr || a.row_offsets != nullptr, "counts", "null",
                 "a pointer to (E), or null with row_offsets");
  check->optional("counts", a.counts, 1, size).optional("row_offsets", a.row_offsets, 1, size);
}

}  // namespace

Status validate(const LayerDesc& d, const ForwardArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check_routing(d.routing(), a, &check);
  check_experts(d.experts, d.rows(), a, &check);
  check.tensor("x", a.x, d.tokens, "(T, d)").tensor("o", a.o, d.tokens, "(T, d)");
  if (!d.experts.inference) check.ints("routing", a.routing, 1, "saved_bytes().routing bytes");
  return check.status();
}

Status validate(const LayerDesc& d, const BackwardArgs& a, DeviceType device) {
  if (Status status = validate_backward(d.experts.inference); !status.ok()) return status;
  Checker check = checker_of(d, device);
  check_routing_grad(d.routing(), a, &check);
  check_experts_grad(d.experts, d.rows(), a, &check);
  check.tensor("x", a.x, d.tokens, "(T, d)").tensor("dout", a.dout, d.tokens, "(T, d)");
  check.optional("dx", a.dx, d.tokens);
  if (d.router.has_logits()) {
    const std::size_t alignment = of_logits(d.routing(), check);
    check.optional("dlogits", a.dlogits, d.tokens, alignment);
    if (!d.router.projects()) {
      check.tensor("dgiven_logits", a.dgiven_logits, d.tokens, "(T, E)", alignment);
    }
  }
  return check.ints("routing", a.routing, 1, "saved_bytes().routing bytes").status();
}

Status validate(const RoutingDesc& d, const RouterForwardArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check_routing(d, a, &check);
  if (d.rounding.tile > 0) {
    check.ints("slot_scores", a.slot_scores, d.slots(), "(S) float");
  }
  return check.ints("routing", a.routing, 1, "routing_bytes()").status();
}

Status validate(const RoutingDesc& d, const RouterBackwardArgs& a, DeviceType device) {
  if (Status status = validate_backward(d.inference); !status.ok()) return status;
  Checker check = checker_of(d, device);
  check.ints("routing", a.routing, 1, "routing_bytes()");
  check.ints("row_dscores", a.row_dscores, d.row_capacity(), "(R) float");
  check_routing_grad(d, a, &check);
  if (!d.has_logits()) return check.status();
  if (d.projects()) check.optional("dx", a.dx, d.tokens);
  check.optional("dlogits_in", a.dlogits_in, d.tokens, of_logits(d, check));
  return check.tensor("dlogits", a.dlogits, d.tokens, "(T, E)", of_logits(d, check)).status();
}

Status validate(const GroupedDesc& d, const ExpertsForwardArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  if (d.gathers()) {
    check.ints("offsets", a.offsets, 1, "(E+1) int32");
    check.ints("row_tokens", a.row_tokens, d.rows, "(R) int32");
  } else {
    check_counts(d.index_type, a, &check);
    check.ints("segments", a.segments, 1, "(3E) int32");
    if (d.scored()) check.ints("row_scores", a.row_scores, d.rows, "(R) float");
    check.optional("error_word", a.error_word, 1, 4);
  }
  check_rows("x", a.x, d, &check);
  check_experts(d, d.rows, a, &check);
  return check.tensor("expert_out", a.expert_out, d.rows, "(R, d)").status();
}

Status validate(const GroupedDesc& d, const ExpertsBackwardArgs& a, DeviceType device) {
  if (Status status = validate_backward(d.inference); !status.ok()) return status;
  Checker check = checker_of(d, device);
  if (d.gathers()) {
    check.ints("offsets", a.offsets, 1, "(E+1) int32");
    check.ints("row_tokens", a.row_tokens, d.rows, "(R) int32");
    check.optional("expert_order", a.expert_order, 1, 4);
  } else {
    check.ints("segments", a.segments, 1, "(3E) int32");
  }
  check_rows("x", a.x, d, &check);
  check_rows("dout", a.dout, d, &check);
  if (d.scored()) {
    check.ints("row_scores", a.row_scores, d.rows, "(R) float");
    check.ints("row_dscores", a.row_dscores, d.rows, "(R) float");
  }
  check_experts_grad(d, d.rows, a, &check);
  return check.optional("dx_rows", a.dx_rows, d.rows).status();
}

Status validate(const RouterGemmDesc& d, const RouterGemmArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  if (d.pass != GemmPass::dgrad) check.tensor("x", a.x, d.tokens, "(T, d)");
  const std::size_t of_w = check.alignment_of(d.w_dtype());
  const std::size_t of_logits = check.alignment_of(d.logits_dtype());
  if (d.pass != GemmPass::wgrad) check.tensor("w", a.w, 1, "(E, d)", of_w);
  if (d.pass != GemmPass::forward) {
    check.tensor("dlogits", a.dlogits, d.tokens, "(T, E)", of_logits);
  } else {
    check.tensor("logits", a.logits, d.tokens, "(T, E)", of_logits);
  }
  if (d.pass == GemmPass::dgrad) check.tensor("dx", a.dx, d.tokens, "(T, d)");
  if (d.bias && d.pass == GemmPass::forward) check.ints("bias", a.bias, 1, "(E) float");
  if (d.pass == GemmPass::wgrad) {
    // With a bias either gradient may be left out.
    if (!d.bias || a.dbias == nullptr) check.tensor("dw", a.dw, 1, "(E, d)", of_w);
    check.optional("dw", a.dw, 1, of_w).optional("dbias", a.dbias, 1, 4);
  }
  return check.status();
}

Status validate(const TopKDesc& d, const TopKArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check.tensor("logits", a.logits, d.tokens, "(T, E)");
  if (d.takes_ids()) check.ints("given_ids", a.given_ids, d.tokens, "(T, K) int32");
  if (d.selection_bias) check.ints("selection_bias", a.selection_bias, 1, "(E) float");
  if (d.expert_scale) check.ints("expert_scale", a.expert_scale, 1, "(E) float");
  if (d.keeps_probabilities()) {
    check.ints("probabilities", a.probabilities, d.tokens, "(T, K) float");
  }
  check.ints("scores", a.scores, d.tokens, "(T, K) float");
  check.ints("ids", a.ids, d.tokens, "(T, K) int32");
  return check.optional("error_word", a.error_word, 1, 4).status();
}

Status validate(const MetadataDesc& d, const MetadataArgs& a, DeviceType device) {
  const std::int64_t slots = d.slots();
  Checker check = checker_of(d, device);
  check.ints("slot_experts", a.slot_experts, slots, "(S) int32");
  if (d.top_k == 0) check.ints("slot_tokens", a.slot_tokens, slots, "(S) int32");
  check.ints("counts", a.counts, 1, "(E) int32").ints("offsets", a.offsets, 1, "(E+1) int32");
  check.ints("row_tokens", a.row_tokens, slots, "(S) int32");
  check.ints("row_slots", a.row_slots, slots, "(S) int32");
  check.ints("slot_rows", a.slot_rows, slots, "(S) int32");
  if (a.row_scores != nullptr) check.ints("slot_scores", a.slot_scores, slots, "(S) float");
  check.optional("row_scores", a.row_scores, slots, 4);
  if (d.top_k == 0) {
    check.ints("token_offsets", a.token_offsets, 1, "(T+1) int32");
    check.ints("token_slots", a.token_slots, slots, "(S) int32");
  }
  check.optional("expert_order", a.expert_order, 1, 4);
  return check.optional("error_word", a.error_word, 1, 4).status();
}

Status validate(const SegmentsDesc& d, const SegmentsArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check_counts(d.index_type, a, &check);
  check.ints("begins", a.begins, 1, "(E) int32").ints("ends", a.ends, 1, "(E) int32");
  check.ints("expert_order", a.expert_order, 1, "(E) int32");
  return check.optional("error_word", a.error_word, 1, 4).status();
}

Status validate(const ZeroTailDesc& d, const ZeroTailArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check.ints("begins", a.begins, 1, "(E) int32").ints("ends", a.ends, 1, "(E) int32");
  return check.optional("rows", a.rows, d.rows).optional("values", a.values, d.rows, 4).status();
}

Status validate(const GroupedGemmDesc& d, const GroupedGemmArgs& a, DeviceType device) {
  const GemmOp op = d.op;
  const bool gathers = op != GemmOp::down_proj && op != GemmOp::up_proj_dgrad;
  const bool up = op == GemmOp::up_proj || op == GemmOp::up_proj_wgrad;
  Checker check = checker_of(d, device);
  check.ints("offsets", a.offsets, 1, "(E+1) int32");
  check.optional("expert_order", a.expert_order, 1, 4);
  check.optional("ends", a.ends, 1, 4);
  if (gathers) {
    if (d.gathers()) check.ints("row_tokens", a.row_tokens, d.rows, "(R) int32");
    check_rows(up ? "x" : "dout", up ? a.x : a.dout, d, &check);
  }
  switch (op) {
    case GemmOp::up_proj:
      check.up_weights("w1", "w1_up", a.w1, a.w1_up, d);
      if (d.bias) check.up_bias("b1", "b1_up", a.b1, a.b1_up, d);
      if (!d.inference) check.tensor("preact", a.preact, d.rows, "(R, 2n or n)");
      check.tensor("act", a.act, d.rows, "(R, n)");
      break;
    case GemmOp::down_proj:
      check.tensor("act", a.act, d.rows, "(R, n)").down_weights("w2", a.w2, d);
      if (d.bias) check.tensor("b2", a.b2, 1, "(E, d)");
      if (!d.gathers() && d.scored()) check.ints("row_scores", a.row_scores, d.rows, "(R) float");
      check.tensor("expert_out", a.expert_out, d.rows, "(R, d)");
      break;
    case GemmOp::down_proj_dgrad:
      check.down_weights("w2", a.w2, d).tensor("preact", a.preact, d.rows, "(R, 2n or n)");
      check.tensor("dpreact", a.dpreact, d.rows, "(R, 2n or n)");
      check.tensor("scaled_act", a.scaled_act, d.rows, "(R, n)");
      if (!d.scored()) break;
      check.ints("row_scores", a.row_scores, d.rows, "(R) float");
      check.ints("row_dscores", a.row_dscores, d.rows, "(R) float");
      break;
    case GemmOp::up_proj_dgrad:
      check.tensor("dpreact", a.dpreact, d.rows, "(R, 2n or n)");
      check.up_weights("w1", "w1_up", a.w1, a.w1_up, d);
      check.tensor("dx_rows", a.dx_rows, d.rows, "(R, d)");
      break;
    case GemmOp::down_proj_wgrad:
      check.tensor("scaled_act", a.scaled_act, d.rows, "(R, n)");
      check.down_weights("dw2", a.dw2, d, of_gradients(d, check));
      break;
    case GemmOp::up_proj_wgrad:
      check.tensor("dpreact", a.dpreact, d.rows, "(R, 2n or n)");
      check.up_weights("dw1", "dw1_up", a.dw1, a.dw1_up, d, of_gradients(d, check));
      break;
  }
  return check.status();
}

Status validate(const BiasGradDesc& d, const BiasGradArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check.ints("offsets", a.offsets, 1, "(E+1) int32").optional("ends", a.ends, 1, 4);
  if (d.gathers()) check.ints("row_tokens", a.row_tokens, d.rows, "(R) int32");
  check.tensor("dpreact", a.dpreact, d.rows, "(R, 2n or n)");
  check_rows("dout", a.dout, d, &check);
  if (d.scores_bias()) {
    check.tensor("b2", a.b2, 1, "(E, d)");
    check.ints("row_scores", a.row_scores, d.rows, "(R) float");
    check.ints("row_dscores", a.row_dscores, d.rows, "(R) float");
  }
  check.up_bias("db1", "db1_up", a.db1, a.db1_up, d);
  return check.tensor("db2", a.db2, 1, "(E, d)").status();
}

Status validate(const AggregateDesc& d, const AggregateArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check.tensor("rows", a.rows, d.rows, "(R, d)");
  const std::int64_t slots = d.top_k > 0 ? d.tokens * d.top_k : d.rows;
  check.ints("slot_rows", a.slot_rows, slots, "(S) int32");
  if (d.top_k == 0) {
    check.ints("token_offsets", a.token_offsets, 1, "(T+1) int32");
    check.optional("token_slots", a.token_slots, d.rows, 4);
  }
  check.optional("slot_scores", a.slot_scores, slots, 4);
  check.optional("addend", a.addend, d.tokens);
  if (a.router_w != nullptr) {
    check.require(d.experts > 0, "router_w", "a pointer", "null without experts");
    check.require(a.slot_scores == nullptr, "slot_scores", "a pointer", "null with router_w");
    const DType of_w = d.f32_router_w ? DType::f32 : d.dtype;
    const DType of_dlogits = d.f32_dlogits ? DType::f32 : d.dtype;
    check.tensor("router_w", a.router_w, d.experts, "(E, d)", check.alignment_of(of_w));
    check.ints("slot_experts", a.slot_experts, slots, "(S) int32");
    check.tensor("dlogits", a.dlogits, d.tokens, "(T, E)", check.alignment_of(of_dlogits));
  }
  return check.tensor("out", a.out, d.tokens, "(T, d)").status();
}

Status validate(const ScoreGradDesc& d, const ScoreGradArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check.ints("row_dscores", a.row_dscores, d.rows, "(R) float");
  check.ints("slot_rows", a.slot_rows, d.rows, "(R) int32");
  if (!d.has_logits()) {
    return check.ints("dscores", a.dscores, d.rows, "(R) float").status();
  }
  if (d.keeps_probabilities()) {
    check.ints("slot_probabilities", a.slot_probabilities, d.rows, "(R) float");
  } else {
    check.ints("slot_scores", a.slot_scores, d.rows, "(R) float");
  }
  if (d.expert_scale) {
    check.ints("expert_scale", a.expert_scale, 1, "(E) float");
    check.ints("offsets", a.offsets, a.dexpert_scale == nullptr ? 0 : 1, "(E+1) int32");
    check.optional("dexpert_scale", a.dexpert_scale, 1, 4);
  }
  check.ints("slot_experts", a.slot_experts, d.rows, "(R) int32");
  if (d.reaches_all_experts()) {
    check.tensor("logits", a.logits, d.tokens, "(T, E)");
  }
  check.optional("dlogits_in", a.dlogits_in, d.tokens);
  return check.tensor("dlogits", a.dlogits, d.tokens, "(T, E)").status();
}

Status validate(const AuxLossDesc& d, const AuxLossArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check.tensor("logits", a.logits, d.tokens, "(T, E)");
  if (d.loss == RouterLoss::balance) check.ints("counts", a.counts, 1, "(B, E) int32");
  if (d.masked) check.tensor("token_mask", a.token_mask, d.tokens, "(T) uint8", 1);
  if (d.backward) {
    check.ints("dloss", a.dloss, 1, "(1) float");
    check.tensor("dlogits", a.dlogits, d.tokens, "(T, E)");
  } else {
    check.ints("loss", a.loss, 1, "(1) float");
  }
  return check.status();
}

Status validate(const UpdateSelectionBiasDesc& d, const UpdateSelectionBiasArgs& a,
                DeviceType device) {
  Checker check = checker_of(d, device);
  check.ints("counts", a.counts, 1, "(E) int32");
  check.ints("selection_bias", a.selection_bias, 1, "(E) float");
  char rate[32];
  std::snprintf(rate, sizeof rate, "%g", static_cast<double>(a.rate));
  check.require(a.rate >= 0.0f && std::isfinite(a.rate), "rate", rate, "finite numbers from 0 on");
  return check.status();
}

Status validate(const TokenRoundingDesc& d, const TokenRoundingArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check.tensor("logits", a.logits, d.tokens, "(T, E)");
  check.ints("scores", a.scores, d.tokens, "(capacity) float");
  check.ints("token_ids", a.token_ids, d.tokens, "(capacity) int32");
  check.ints("expert_ids", a.expert_ids, d.tokens, "(capacity) int32");
  check.ints("counts", a.counts, 1, "(E) int32");
  check.optional("draws", a.draws, 1, 8).optional("frequency", a.frequency, 1, 4);
  return check.optional("error_word", a.error_word, 1, 4).status();
}

Status validate(const TokenRoundingGradDesc& d, const TokenRoundingGradArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check.tensor("logits", a.logits, d.tokens, "(T, E)");
  check.ints("token_ids", a.token_ids, d.list_length, "(capacity) int32");
  check.ints("expert_ids", a.expert_ids, d.list_length, "(capacity) int32");
  check.optional("token_offsets", a.token_offsets, 1, 4);
  check.ints("dscores", a.dscores, d.list_length, "(capacity) float");
  check.optional("dlogits_in", a.dlogits_in, d.tokens);
  return check.tensor("dlogits", a.dlogits, d.tokens, "(T, E)").status();
}

Status validate(const TokenDispatchDesc& d, const TokenDispatchArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check.ints("ids", a.ids, d.tokens, "(T, K) int32");
  check.ints("scores", a.scores, d.tokens, "(T, K) float");
  check.ints("numbers", a.numbers, 1, "(2P+2) int32");
  check.ints("row_tokens", a.row_tokens, d.tokens, "(R) int32");
  check.ints("choices", a.choices, d.tokens, "(R, 2K') int32");
  check.ints("token_rows", a.token_rows, d.tokens, "(T, P) int32");
  return check.ints("score_places", a.score_places, d.tokens, "(T, K) int32").status();
}

Status validate(const SendRowsDesc& d, const SendRowsArgs& a, DeviceType device) {
  Checker check = checker_of(d, device);
  check.tensor("x", a.x, d.tokens, "(T, d)");
  check.ints("row_tokens", a.row_tokens, d.tokens, "(P T) int32");
  check.ints("counts", a.counts, 1, "(P) int32");
  check.tensor("to", a.to, 1, "(P) pointers", alignof(void*));
  for (std::int64_t rank = 0; check.status().ok() && rank < d.ranks; ++rank) {
    check.tensor("to", a.to[rank], d.tokens, "(T, d) of each rank");
  }
  return check.status();
}

}  // namespace sonicmoe
