#include "weights.h"

namespace sonicmoe::python {
namespace {

bool is_separate(const ExpertsDesc& desc) { return desc.w1_layout == W1Layout::separate; }

bool recomputes(const ExpertsDesc& desc) { return desc.recompute == Recompute::preact; }

/// Does w1 alone hold gate and up?
bool has_gate_and_up(const ExpertsDesc& desc) {
  return is_glu(desc.activation) && !is_separate(desc);
}

/// What w1 gives a row, with an element of b1 for each.
std::int64_t w1_width(const ExpertsDesc& desc) {
  return is_separate(desc) ? desc.intermediate : desc.preact_width();
}

/// One expert's weights as they are stored, and the shapes of all in words.
struct Matrix {
  std::int64_t rows, columns;
};
Matrix w1_matrix(const ExpertsDesc& desc) {
  const std::int64_t width = w1_width(desc);
  return desc.transposed() ? Matrix{desc.hidden, width} : Matrix{width, desc.hidden};
}
Matrix w2_matrix(const ExpertsDesc& desc) {
  return desc.transposed() ? Matrix{desc.intermediate, desc.hidden}
                           : Matrix{desc.hidden, desc.intermediate};
}
const char* w1_shape(const ExpertsDesc& desc) {
  if (has_gate_and_up(desc)) return desc.transposed() ? "(E, d, 2n)" : "(E, 2n, d)";
  return desc.transposed() ? "(E, d, n)" : "(E, n, d)";
}
const char* w2_shape(const ExpertsDesc& desc) {
  return desc.transposed() ? "(E, n, d)" : "(E, d, n)";
}

/// Throws ValueError for a tensor that W1Layout::separate alone takes, with another layout; and if
/// it is missing with that layout, unless it is `optional` there.
void check_up(const ExpertsDesc& desc, const char* argument, const OptionalTensor& up,
              bool optional = true) {
  const bool wrong = up ? !is_separate(desc) : is_separate(desc) && !optional;
  if (!wrong) return;
  check(Status::error(StatusCode::invalid_argument, "%s: got %s, allowed: %s, for w1_layout is %s",
                      argument, up ? "a tensor" : "None", up ? "None" : "a tensor",
                      name(desc.w1_layout)));
}

/// Memory for the gradient of weights, without experts unless backward returns it.
Tensor empty_gradient(const Tensor& x, const GroupedDesc& desc, Matrix weights, bool wanted) {
  const bool returned = wanted && !desc.accumulate_weight_grads;
  return empty(x, {returned ? desc.experts : 0, weights.rows, weights.columns}, x.scalar_type());
}
std::int64_t with_bias(const GroupedDesc& desc) { return desc.bias ? desc.experts : 0; }

}  // namespace

void MainGrads::check_wanted(const Wanted& wanted) const {
  if (!any()) return;
  const char* const missing = wanted.dw1 && !w1         ? "w1_main_grad"
                              : wanted.dw1_up && !w1_up ? "w1_up_main_grad"
                              : wanted.dw2 && !w2       ? "w2_main_grad"
                                                        : nullptr;
  if (missing == nullptr) return;
  check(Status::error(StatusCode::invalid_argument,
                      "%s: got None, allowed: a tensor, for that gradient is wanted and another "
                      "one is added to a tensor",
                      missing));
}

void describe_experts(ExpertsDesc* desc, const char* argument, const Tensor& x,
                      const OptionalTensor& w1_up, const Tensor& w2, bool bias,
                      const MainGrads& main_grads) {
  check_dims("w2", w2, 3, w2_shape(*desc));
  desc->hidden = w2.size(desc->transposed() ? 2 : 1);
  desc->intermediate = w2.size(desc->transposed() ? 1 : 2);
  desc->dtype = dtype_of(argument, x);
  desc->bias = bias;
  desc->f32_weight_grads = desc->accumulate_weight_grads = main_grads.any();
  desc->dpreact_in_workspace = recomputes(*desc);
  check_up(*desc, "w1_up", w1_up, false);
  check_up(*desc, "w1_up_main_grad", main_grads.w1_up);
}

void check_biases(const ExpertsDesc& desc, const OptionalTensor& b1, const OptionalTensor& b1_up,
                  const OptionalTensor& b2) {
  check_up(desc, "b1_up", b1_up);
  if (!b1 && !b1_up && !b2) return;
  const bool separate = is_separate(desc);
  const char* const missing = !b1 ? "b1" : separate && !b1_up ? "b1_up" : !b2 ? "b2" : nullptr;
  if (missing == nullptr) return;
  check(Status::error(StatusCode::invalid_argument, "%s: got None, allowed: %s", missing,
                      separate ? "b1, b1_up and b2, or none of them" : "b1 and b2, or neither"));
}

void ExpertInputs::rows(const char* argument, const Tensor& tensor) const {
  check_tensor(argument, tensor, x_, dtype_, {desc_.x_rows(), desc_.hidden},
               desc_.gathers() ? "(T, d)" : "(R, d)");
}

void ExpertInputs::weights(const Tensor& w1, const OptionalTensor& w1_up, const Tensor& w2,
                           const MainGrads& main_grads) const {
  like_w1("w1", w1, dtype_);
  if (w1_up) like_w1("w1_up", *w1_up, dtype_);
  like_w2("w2", w2, dtype_);
  check_alignment("w1", w1);
  if (w1_up) check_alignment("w1_up", *w1_up);
  check_alignment("w2", w2);
  if (main_grads.w1) {
    like_w1("w1_main_grad", *main_grads.w1, ScalarType::Float);
    check_alignment("w1_main_grad", *main_grads.w1);
  }
  if (main_grads.w1_up) {
    like_w1("w1_up_main_grad", *main_grads.w1_up, ScalarType::Float);
    check_alignment("w1_up_main_grad", *main_grads.w1_up);
  }
  if (main_grads.w2) {
    like_w2("w2_main_grad", *main_grads.w2, ScalarType::Float);
    check_alignment("w2_main_grad", *main_grads.w2);
  }
}

void ExpertInputs::biases(const OptionalTensor& b1, const OptionalTensor& b1_up,
                          const OptionalTensor& b2) const {
  like_b1("b1", b1);
  like_b1("b1_up", b1_up);
  like_b2(b2);
}

void ExpertInputs::biases_again(const OptionalTensor& b1, const OptionalTensor& b1_up,
                                const OptionalTensor& b2) const {
  if (recomputes(desc_)) {
    check_biases(desc_, b1, b1_up, b2);
  } else if (b1 || b1_up) {
    check(Status::error(StatusCode::invalid_argument,
                        "%s: got a tensor, allowed: None, for recompute is none",
                        b1 ? "b1" : "b1_up"));
  }
  biases(b1, b1_up, b2);
}

void ExpertInputs::like_b2(const OptionalTensor& tensor) const {
  if (tensor) check_tensor("b2", *tensor, x_, dtype_, {desc_.experts, desc_.hidden}, "(E, d)");
}

void ExpertInputs::saved_preact(const Tensor& tensor) const {
  const bool kept = !recomputes(desc_);
  check_tensor("preact", tensor, x_, dtype_, {desc_.rows, kept ? desc_.preact_width() : 0},
               kept ? "(R, 2n or n)" : "(R, 0)");
}

void ExpertInputs::dpreact(const OptionalTensor& tensor) const {
  if (!tensor) return;
  check_tensor("dpreact", *tensor, x_, dtype_, {desc_.rows, desc_.preact_width()}, "(R, 2n or n)");
}

void ExpertInputs::like_w1(const char* argument, const Tensor& tensor, ScalarType dtype) const {
  const auto [rows, columns] = w1_matrix(desc_);
  check_tensor(argument, tensor, x_, dtype, {desc_.experts, rows, columns}, w1_shape(desc_));
}

void ExpertInputs::like_b1(const char* argument, const OptionalTensor& tensor) const {
  if (!tensor) return;
  check_tensor(argument, *tensor, x_, dtype_, {desc_.experts, w1_width(desc_)},
               has_gate_and_up(desc_) ? "(E, 2n)" : "(E, n)");
}

void ExpertInputs::like_w2(const char* argument, const Tensor& tensor, ScalarType dtype) const {
  const auto [rows, columns] = w2_matrix(desc_);
  check_tensor(argument, tensor, x_, dtype, {desc_.experts, rows, columns}, w2_shape(desc_));
}

Tensor empty_preact(const Tensor& x, const GroupedDesc& desc) {
  return empty(x, {desc.inference ? 0 : desc.rows, recomputes(desc) ? 0 : desc.preact_width()},
               x.scalar_type());
}

WeightGradients::WeightGradients(const Tensor& x, const GroupedDesc& d, const Wanted& wanted)
    : dw1(empty_gradient(x, d, w1_matrix(d), wanted.dw1)),
      db1(empty(x, {with_bias(d), w1_width(d)}, x.scalar_type())),
      dw2(empty_gradient(x, d, w2_matrix(d), wanted.dw2)),
      db2(empty(x, {with_bias(d), d.hidden}, x.scalar_type())),
      dw1_up(empty_gradient(x, d, w1_matrix(d), wanted.dw1_up)),
      db1_up(empty(x, {is_separate(d) ? with_bias(d) : 0, w1_width(d)}, x.scalar_type())),
      wanted_(wanted) {
  // The library makes the gradients of gate and up together, or neither.
  if (!is_separate(d) || wanted.dw1 == wanted.dw1_up) return;
  const std::array<std::int64_t, 3> shape = {d.experts, w1_width(d), d.hidden};
  unwanted_ = d.accumulate_weight_grads ? torch::stable::new_zeros(x, shape, ScalarType::Float)
                                        : torch::stable::new_empty(x, shape);
}

}  // namespace sonicmoe::python
