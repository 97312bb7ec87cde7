#pragma once

#include "operators.h"

/// What operators with experts share: their weights and biases, and the gradients of both.
namespace sonicmoe::python {

/// Which of the weights' gradients a backward is asked for.
struct Wanted {
  bool dw1, dw1_up, dw2;
};

/// fp32 tensors that backward adds dW1 and dW2 to; one may be missing if its gradient is not asked
/// for. w1_up: with W1Layout::separate alone.
struct MainGrads {
  const OptionalTensor& w1;
  const OptionalTensor& w1_up;
  const OptionalTensor& w2;

  bool any() const { return w1.has_value() || w1_up.has_value() || w2.has_value(); }
  /// In backward, which knows what is asked for.
  void check_wanted(const Wanted& wanted) const;
};

/// Sets what the tensors say: the widths, dtype and bias, and how the weights' gradients are kept;
/// and where dH lies in the usual backward, so that one plan serves both calls.
/// The layout, which is set, says how w2 lies. The weights say what d is, so that x (named
/// `argument`) is blamed when its width differs.
void describe_experts(ExpertsDesc* desc, const char* argument, const Tensor& x,
                      const OptionalTensor& w1_up, const Tensor& w2, bool bias,
                      const MainGrads& main_grads);

/// Throws ValueError unless there are all biases of the layout, or none.
void check_biases(const ExpertsDesc& desc, const OptionalTensor& b1, const OptionalTensor& b1_up,
                  const OptionalTensor& b2);

/// The checks that every operator with experts makes on what it reads; the plan has checked the
/// sizes.
class ExpertInputs {
 public:
  ExpertInputs(const GroupedDesc& desc, const Tensor& x)
      : desc_(desc), x_(x), dtype_(x.scalar_type()) {}

  /// x, dO, or a tensor like them: (T, d), with contiguous rows (R, d).
  void rows(const char* argument, const Tensor& tensor) const;
  void weights(const Tensor& w1, const OptionalTensor& w1_up, const Tensor& w2,
               const MainGrads& main_grads) const;
  void biases(const OptionalTensor& b1, const OptionalTensor& b1_up,
              const OptionalTensor& b2) const;
  /// In backward, which wants b1 where it makes H again, and nowhere else.
  void biases_again(const OptionalTensor& b1, const OptionalTensor& b1_up,
                    const OptionalTensor& b2) const;
  /// H (R, 2n or n), or (R, 0) where backward makes it again.
  void saved_preact(const Tensor& tensor) const;
  /// Memory for dH (R, 2n or n), or nothing.
  void dpreact(const OptionalTensor& tensor) const;

 protected:
  const Tensor& x() const { return x_; }
  ScalarType dtype() const { return dtype_; }

 private:
  void like_w1(const char* argument, const Tensor& tensor, ScalarType dtype) const;
  void like_b1(const char* argument, const OptionalTensor& tensor) const;
  void like_b2(const OptionalTensor& tensor) const;
  void like_w2(const char* argument, const Tensor& tensor, ScalarType dtype) const;

  GroupedDesc desc_;
  const Tensor& x_;
  ScalarType dtype_;
};

/// Memory for H, empty for inference and where backward makes H again.
Tensor empty_preact(const Tensor& x, const GroupedDesc& desc);

/// The gradients of weights and biases and their places in the arguments. Those of weights are
/// empty if they are added to main_grads, or not wanted; those of `up`, unless w1_up exists.
class WeightGradients {
 public:
  WeightGradients(const Tensor& x, const GroupedDesc& desc, const Wanted& wanted);

  /// Args: of a layer's backward, or of the experts' alone.
  template <class Args>
  void add_to(Args* args, const MainGrads& main_grads) const {
    if (wanted_.dw1 || wanted_.dw1_up) {
      args->dw1 = output<void>(wanted_.dw1 ? main_grads.w1.value_or(dw1) : unwanted_);
      args->dw1_up = output<void>(wanted_.dw1_up ? main_grads.w1_up.value_or(dw1_up) : unwanted_);
    }
    args->db1 = output<void>(db1);
    args->db1_up = output<void>(db1_up);
    if (wanted_.dw2) args->dw2 = output<void>(main_grads.w2.value_or(dw2));
    args->db2 = output<void>(db2);
  }

  /// What the operator returns, of which the first two are not the experts'.
  Gradients behind(const Tensor& first, const Tensor& second) const {
    return {first, second, dw1, db1, dw2, db2, dw1_up, db1_up};
  }

 private:
  Tensor dw1, db1, dw2, db2, dw1_up, db1_up;
  Wanted wanted_;
  OptionalTensor unwanted_;  // of the two halves, if one alone is wanted: nobody reads it
};

}  // namespace sonicmoe::python
