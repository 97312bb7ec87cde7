#include <stdexcept>
#include <string_view>

#include "operators.h"
#include "weights.h"

namespace sonicmoe::python {
namespace {

PlanCache<GroupedDesc, ExpertsPlan>& plans() {
  static PlanCache<GroupedDesc, ExpertsPlan> cache;
  return cache;
}

/// `layer`'s options with what the tensors say.
GroupedDesc describe(const std::string& layer, const Tensor& rows, const OptionalTensor& scores,
                     const OptionalTensor& w1_up, const Tensor& w2, bool bias,
                     const MainGrads& main_grads) {
  check_dims("rows", rows, 2, "(R, d)");
  ExpertsDesc experts = options_of(layer).experts;
  experts.row_source = RowSource::contiguous;
  describe_experts(&experts, "rows", rows, w1_up, w2, bias, main_grads);
  if (scores.has_value() != experts.scored()) {
    check(Status::error(
        StatusCode::invalid_argument, "scores: got %s, allowed: %s, for score_at is %s",
        scores ? "a tensor" : "None", scores ? "None" : "a tensor", name(experts.score_at)));
  }
  return {experts, 0, rows.size(0), w2.size(0)};
}

void check_scores(const OptionalTensor& scores, const Tensor& rows, const GroupedDesc& desc) {
  if (scores) check_tensor("scores", *scores, rows, ScalarType::Float, {desc.rows}, "(R)");
}

/// Throws ValueError unless counts or offsets exist, both of `desc.index_type`.
void check_counts(const OptionalTensor& counts, const OptionalTensor& offsets, const Tensor& rows,
                  const GroupedDesc& desc) {
  if (!counts && !offsets) {
    throw std::invalid_argument("counts: got None, allowed: a tensor, or None with offsets");
  }
  const ScalarType type = desc.index_type == IndexType::i64 ? ScalarType::Long : ScalarType::Int;
  if (counts) check_tensor("counts", *counts, rows, type, {desc.experts}, "(E)");
  if (offsets) check_tensor("offsets", *offsets, rows, type, {desc.experts + 1}, "(E+1)");
}

IndexType index_type_of(const OptionalTensor& counts, const OptionalTensor& offsets) {
  const OptionalTensor& first = counts ? counts : offsets;
  return first && first->scalar_type() == ScalarType::Long ? IndexType::i64 : IndexType::i32;
}

/// check(), with our name of the argument that the library calls row_offsets.
void check_call(const Status& status) {
  const std::string_view text = status.message();
  if (!status.ok() && text.starts_with("row_offsets:")) {
    throw std::invalid_argument(std::string(text.substr(std::string_view("row_").size())));
  }
  check(status);
}

/// A tensor of the caller that the call writes like x: `argument`, or nothing.
void check_memory(const char* argument, const OptionalTensor& memory, const ExpertInputs& inputs) {
  if (!memory) return;
  inputs.rows(argument, *memory);
  check_alignment(argument, *memory);
}

}  // namespace

std::tuple<Tensor, Tensor> grouped_forward_out(
    Tensor out, Tensor rows, OptionalTensor counts, OptionalTensor offsets, OptionalTensor scores,
    Tensor w1, OptionalTensor b1, Tensor w2, OptionalTensor b2, std::string layer,
    OptionalTensor w1_main_grad, OptionalTensor w2_main_grad, OptionalTensor w1_up,
    OptionalTensor b1_up, OptionalTensor w1_up_main_grad, OptionalTensor dx_out) {
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  GroupedDesc desc = describe(layer, rows, scores, w1_up, w2, b1.has_value(), main_grads);
  check_biases(desc, b1, b1_up, b2);
  desc.index_type = index_type_of(counts, offsets);
  const ExpertsPlan plan = plans().get(desc, rows);
  const ExpertInputs inputs(desc, rows);
  inputs.rows("rows", rows);
  check_counts(counts, offsets, rows, desc);
  check_scores(scores, rows, desc);
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.biases(b1, b1_up, b2);
  check_memory("out", out, inputs);
  check_memory("dx_out", dx_out, inputs);
  align(&rows, &b1, &b1_up, &b2);

  const Tensor preact = empty_preact(rows, desc);
  const Tensor segments = empty(rows, {3 * desc.experts}, ScalarType::Int);
  check_call(plan.forward({.counts = input<void>(counts),
                           .row_offsets = input<void>(offsets),
                           .row_scores = input<float>(scores),
                           .segments = output<std::int32_t>(segments),
                           .x = input<void>(rows),
                           .w1 = input<void>(w1),
                           .w1_up = input<void>(w1_up),
                           .b1 = input<void>(b1),
                           .b1_up = input<void>(b1_up),
                           .w2 = input<void>(w2),
                           .b2 = input<void>(b2),
                           .preact = output<void>(preact),
                           .expert_out = output<void>(out)},
                          Scratch(rows, plan.forward_workspace_bytes()), stream_of(rows)));
  return {preact, segments};
}

std::tuple<Tensor, Tensor, Tensor> grouped_forward(
    Tensor rows, OptionalTensor counts, OptionalTensor offsets, OptionalTensor scores, Tensor w1,
    OptionalTensor b1, Tensor w2, OptionalTensor b2, std::string layer, OptionalTensor w1_main_grad,
    OptionalTensor w2_main_grad, OptionalTensor w1_up, OptionalTensor b1_up,
    OptionalTensor w1_up_main_grad, OptionalTensor dx_out) {
  check_dims("rows", rows, 2, "(R, d)");
  const Tensor out = empty(rows, {rows.size(0), rows.size(1)}, rows.scalar_type());
  const auto [preact, segments] =
      grouped_forward_out(out, rows, counts, offsets, scores, w1, b1, w2, b2, layer, w1_main_grad,
                          w2_main_grad, w1_up, b1_up, w1_up_main_grad, dx_out);
  return {out, preact, segments};
}

Gradients grouped_backward(Tensor dout, Tensor rows, OptionalTensor scores, Tensor w1, Tensor w2,
                           OptionalTensor b2, Tensor preact, Tensor segments, std::string layer,
                           OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
                           OptionalTensor dpreact, bool wants_dx, bool wants_dw1, bool wants_dw2,
                           OptionalTensor w1_up, OptionalTensor w1_up_main_grad, bool wants_dw1_up,
                           OptionalTensor dx_out, OptionalTensor b1, OptionalTensor b1_up) {
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  const Wanted wanted{wants_dw1, wants_dw1_up && w1_up.has_value(), wants_dw2};
  main_grads.check_wanted(wanted);
  GroupedDesc desc = describe(layer, rows, scores, w1_up, w2, b2.has_value(), main_grads);
  desc.inference = false;
  desc.dpreact_in_workspace = !dpreact.has_value();
  const ExpertsPlan plan = plans().get(desc, rows);
  const ExpertInputs inputs(desc, rows);
  inputs.rows("dout", dout);
  inputs.rows("rows", rows);
  check_scores(scores, rows, desc);
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.biases_again(b1, b1_up, b2);
  inputs.saved_preact(preact);
  check_tensor("segments", segments, rows, ScalarType::Int, {3 * desc.experts}, "(3E)");
  inputs.dpreact(dpreact);
  check_memory("dx_out", dx_out, inputs);
  align(&rows, &dout, &b1, &b1_up, &b2);

  const bool makes_dx = wants_dx && !dx_out;
  const Tensor dx = empty(rows, {makes_dx ? desc.rows : 0, desc.hidden}, rows.scalar_type());
  const Tensor dscores = empty(rows, {scores ? desc.rows : 0}, ScalarType::Float);
  const WeightGradients gradients(rows, desc, wanted);
  ExpertsBackwardArgs args{.row_scores = input<float>(scores),
                           .segments = input<std::int32_t>(segments),
                           .x = input<void>(rows),
                           .dout = input<void>(dout),
                           .w1 = input<void>(w1),
                           .w1_up = input<void>(w1_up),
                           .b1 = input<void>(b1),
                           .b1_up = input<void>(b1_up),
                           .w2 = input<void>(w2),
                           .b2 = input<void>(b2),
                           .preact = input<void>(preact),
                           .row_dscores = output<float>(dscores),
                           .dx_rows = wants_dx ? output<void>(dx_out.value_or(dx)) : nullptr,
                           .dpreact = output<void>(dpreact)};
  gradients.add_to(&args, main_grads);
  check(plan.backward(args, Scratch(rows, plan.backward_workspace_bytes()), stream_of(rows)));
  return gradients.behind(dx, dscores);
}

}  // namespace sonicmoe::python
