#include "operators.h"

namespace sonicmoe::python {
namespace {

PlanCache<LayerDesc, LayerPlan>& plans() {
  static PlanCache<LayerDesc, LayerPlan> cache;
  return cache;
}

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
  void check_wanted(const Wanted& wanted) const {
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
};

bool is_separate(const LayerDesc& desc) { return desc.experts.w1_layout == W1Layout::separate; }

/// Rows of w1, b1 and dW1 for each expert: n if the up rows are a tensor of their own.
std::int64_t w1_rows(const LayerDesc& desc) {
  return is_separate(desc) ? desc.experts.intermediate : desc.experts.preact_width();
}

/// Throws ValueError for a tensor that W1Layout::separate alone takes, with another layout; and if
/// it is missing with that layout, unless it is `optional` there.
void check_up(const LayerDesc& desc, const char* argument, const OptionalTensor& up,
              bool optional = true) {
  const bool wrong = up ? !is_separate(desc) : is_separate(desc) && !optional;
  if (!wrong) return;
  check(Status::error(StatusCode::invalid_argument, "%s: got %s, allowed: %s, for w1_layout is %s",
                      argument, up ? "a tensor" : "None", up ? "None" : "a tensor",
                      name(desc.experts.w1_layout)));
}

/// `layer`'s options with the sizes, read off the tensors. The weights say what d is, so that x is
/// blamed when its width differs.
LayerDesc describe(const std::string& layer, const Tensor& x, const OptionalTensor& w1_up,
                   const Tensor& w2, bool bias, const MainGrads& main_grads) {
  check_dims("x", x, 2, "(T, d)");
  check_dims("w2", w2, 3, "(E, d, n)");
  LayerDesc desc = options_of(layer);
  if (desc.rounding.tile != 0) {
    check(Status::error(StatusCode::invalid_argument,
                        "rounding_tile: got %lld, allowed: 0 (token_rounding makes lists)",
                        static_cast<long long>(desc.rounding.tile)));
  }
  desc.tokens = x.size(0);
  desc.experts.hidden = w2.size(1);
  desc.experts.intermediate = w2.size(2);
  desc.router.experts = w2.size(0);
  desc.experts.dtype = dtype_of("x", x);
  desc.experts.bias = bias;
  desc.experts.f32_weight_grads = desc.experts.accumulate_weight_grads = main_grads.any();
  check_up(desc, "w1_up", w1_up, false);
  check_up(desc, "w1_up_main_grad", main_grads.w1_up);
  return desc;
}

void choose_by_lists(LayerDesc* desc, std::int64_t length) {
  desc->router.input = RouterInput::lists;
  desc->router.list_length = length;
}

/// The checks that every layer operator makes on what it reads; the plan has checked the sizes.
class Inputs {
 public:
  Inputs(const LayerDesc& desc, const Tensor& x) : desc_(desc), x_(x), dtype_(x.scalar_type()) {}

  void tokens(const char* argument, const Tensor& tensor) const {
    check_tensor(argument, tensor, x_, dtype_, {desc_.tokens, desc_.experts.hidden}, "(T, d)");
  }
  void logits(const char* argument, const OptionalTensor& tensor) const {
    if (tensor)
      check_tensor(argument, *tensor, x_, dtype_, {desc_.tokens, desc_.router.experts}, "(T, E)");
  }
  void router_w(const Tensor& tensor) const {
    check_tensor("router_w", tensor, x_, dtype_, {desc_.router.experts, desc_.experts.hidden},
                 "(E, d)");
  }
  void weights(const Tensor& w1, const OptionalTensor& w1_up, const Tensor& w2,
               const MainGrads& main_grads) const {
    like_w1("w1", w1, dtype_);
    if (w1_up) like_w1("w1_up", *w1_up, dtype_);
    like_w2("w2", w2, dtype_);
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
  void biases(const OptionalTensor& b1, const OptionalTensor& b1_up,
              const OptionalTensor& b2) const {
    like_b1("b1", b1);
    like_b1("b1_up", b1_up);
    this->b2(b2);
  }
  void b2(const OptionalTensor& tensor) const {
    if (tensor)
      check_tensor("b2", *tensor, x_, dtype_, {desc_.router.experts, desc_.experts.hidden},
                   "(E, d)");
  }
  void saved(const LayerPlan& plan, const Tensor& preact, const Tensor& routing) const {
    like_preact("preact", preact);
    check_tensor("routing", routing, x_, ScalarType::Int, {routing_ints(plan)}, "(routing)");
  }

  void dpreact(const OptionalTensor& tensor) const {
    if (tensor) like_preact("dpreact", *tensor);
  }

  /// The routing block is an array of int32, so that torch sees a plain tensor.
  static std::int64_t routing_ints(const LayerPlan& plan) {
    return static_cast<std::int64_t>(plan.saved_bytes().routing / sizeof(std::int32_t));
  }

 private:
  void like_preact(const char* argument, const Tensor& tensor) const {
    check_tensor(argument, tensor, x_, dtype_, {desc_.rows(), desc_.experts.preact_width()},
                 "(R, 2n or n)");
  }
  void like_w1(const char* argument, const Tensor& tensor, ScalarType dtype) const {
    check_tensor(argument, tensor, x_, dtype,
                 {desc_.router.experts, w1_rows(desc_), desc_.experts.hidden},
                 has_gate_and_up() ? "(E, 2n, d)" : "(E, n, d)");
  }
  void like_b1(const char* argument, const OptionalTensor& tensor) const {
    if (tensor) {
      check_tensor(argument, *tensor, x_, dtype_, {desc_.router.experts, w1_rows(desc_)},
                   has_gate_and_up() ? "(E, 2n)" : "(E, n)");
    }
  }
  void like_w2(const char* argument, const Tensor& tensor, ScalarType dtype) const {
    check_tensor(argument, tensor, x_, dtype,
                 {desc_.router.experts, desc_.experts.hidden, desc_.experts.intermediate},
                 "(E, d, n)");
  }

  /// Does w1 alone have the rows of both?
  bool has_gate_and_up() const { return is_glu(desc_.experts.activation) && !is_separate(desc_); }

  const LayerDesc& desc_;
  const Tensor& x_;
  ScalarType dtype_;
};

void check_biases(const LayerDesc& desc, const OptionalTensor& b1, const OptionalTensor& b1_up,
                  const OptionalTensor& b2) {
  check_up(desc, "b1_up", b1_up);
  if (!b1 && !b1_up && !b2) return;
  const bool separate = is_separate(desc);
  const char* const missing = !b1 ? "b1" : separate && !b1_up ? "b1_up" : !b2 ? "b2" : nullptr;
  if (missing == nullptr) return;
  check(Status::error(StatusCode::invalid_argument, "%s: got None, allowed: %s", missing,
                      separate ? "b1, b1_up and b2, or none of them" : "b1 and b2, or neither"));
}

Tensor empty_preact(const Tensor& x, const LayerDesc& desc) {
  return empty(x, {desc.experts.inference ? 0 : desc.rows(), desc.experts.preact_width()},
               x.scalar_type());
}

Tensor empty_routing(const Tensor& x, const LayerPlan& plan) {
  return empty(x, {Inputs::routing_ints(plan)}, ScalarType::Int);
}

/// The gradients of weights and biases and their places in the arguments. Those of weights are
/// empty if they are added to main_grads, or not wanted; those of `up`, unless w1_up exists.
class WeightGradients {
 public:
  WeightGradients(const Tensor& x, const LayerDesc& d, const Wanted& wanted)
      : dw1(empty(x, {returned(d, wanted.dw1), w1_rows(d), d.experts.hidden}, x.scalar_type())),
        db1(empty(x, {biases(d), w1_rows(d)}, x.scalar_type())),
        dw2(empty(x, {returned(d, wanted.dw2), d.experts.hidden, d.experts.intermediate},
                  x.scalar_type())),
        db2(empty(x, {biases(d), d.experts.hidden}, x.scalar_type())),
        dw1_up(
            empty(x, {returned(d, wanted.dw1_up), w1_rows(d), d.experts.hidden}, x.scalar_type())),
        db1_up(empty(x, {is_separate(d) ? biases(d) : 0, w1_rows(d)}, x.scalar_type())),
        wanted_(wanted) {
    // The library makes the gradients of gate and up together, or neither.
    if (!is_separate(d) || wanted.dw1 == wanted.dw1_up) return;
    const std::array<std::int64_t, 3> shape = {d.router.experts, w1_rows(d), d.experts.hidden};
    unwanted_ = d.experts.accumulate_weight_grads
                    ? torch::stable::new_zeros(x, shape, ScalarType::Float)
                    : torch::stable::new_empty(x, shape);
  }

  void add_to(BackwardArgs* args, const MainGrads& main_grads) const {
    if (wanted_.dw1 || wanted_.dw1_up) {
      args->dw1 = output<void>(wanted_.dw1 ? main_grads.w1.value_or(dw1) : unwanted_);
      args->dw1_up = output<void>(wanted_.dw1_up ? main_grads.w1_up.value_or(dw1_up) : unwanted_);
    }
    args->db1 = output<void>(db1);
    args->db1_up = output<void>(db1_up);
    if (wanted_.dw2) args->dw2 = output<void>(main_grads.w2.value_or(dw2));
    args->db2 = output<void>(db2);
  }

  Tensor dw1, db1, dw2, db2, dw1_up, db1_up;

 private:
  static std::int64_t returned(const LayerDesc& d, bool wanted) {
    return wanted && !d.experts.accumulate_weight_grads ? d.router.experts : 0;
  }
  static std::int64_t biases(const LayerDesc& d) { return d.experts.bias ? d.router.experts : 0; }

  Wanted wanted_;
  OptionalTensor unwanted_;  // of the two halves, if one alone is wanted: nobody reads it
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> layer_forward(
    Tensor x, Tensor router_w, Tensor w1, OptionalTensor b1, Tensor w2, OptionalTensor b2,
    std::string layer, OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
    OptionalTensor w1_up, OptionalTensor b1_up, OptionalTensor w1_up_main_grad) {
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  LayerDesc desc = describe(layer, x, w1_up, w2, b1.has_value(), main_grads);
  check_biases(desc, b1, b1_up, b2);
  desc.experts.dpreact_in_workspace = false;  // as backward usually asks: one plan for both
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.tokens("x", x);
  inputs.router_w(router_w);
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.biases(b1, b1_up, b2);
  x = aligned(x);

  const Tensor o = empty(x, {desc.tokens, desc.experts.hidden}, x.scalar_type());
  const Tensor logits = empty(x, {desc.tokens, desc.router.experts}, x.scalar_type());
  const Tensor counts = empty(x, {desc.router.experts}, ScalarType::Int);
  const Tensor preact = empty_preact(x, desc);
  const Tensor routing = empty_routing(x, plan);
  check(plan.forward({.x = input<void>(x),
                      .router_w = input<void>(router_w),
                      .w1 = input<void>(w1),
                      .w1_up = input<void>(w1_up),
                      .b1 = input<void>(b1),
                      .b1_up = input<void>(b1_up),
                      .w2 = input<void>(w2),
                      .b2 = input<void>(b2),
                      .o = output<void>(o),
                      .logits = output<void>(logits),
                      .counts = output<std::int32_t>(counts),
                      .preact = output<void>(preact),
                      .routing = output<void>(routing)},
                     Scratch(x, plan.forward_workspace_bytes()), stream_of(x)));
  return {o, logits, counts, preact, routing};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> layer_backward(
    Tensor dout, OptionalTensor dlogits, Tensor x, Tensor router_w, Tensor w1, Tensor w2,
    OptionalTensor b2, OptionalTensor logits, Tensor preact, Tensor routing, std::string layer,
    OptionalTensor w1_main_grad, OptionalTensor w2_main_grad, OptionalTensor dpreact, bool wants_dx,
    bool wants_drouter_w, bool wants_dw1, bool wants_dw2, OptionalTensor w1_up,
    OptionalTensor w1_up_main_grad, bool wants_dw1_up) {
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  const Wanted wanted{wants_dw1, wants_dw1_up && w1_up.has_value(), wants_dw2};
  main_grads.check_wanted(wanted);
  LayerDesc desc = describe(layer, x, w1_up, w2, b2.has_value(), main_grads);
  desc.experts.inference = false;
  desc.experts.dpreact_in_workspace = !dpreact.has_value();
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.tokens("dout", dout);
  inputs.logits("dlogits", dlogits);
  inputs.tokens("x", x);
  inputs.router_w(router_w);
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.b2(b2);
  inputs.logits("logits", logits);
  inputs.saved(plan, preact, routing);
  inputs.dpreact(dpreact);
  x = aligned(x);
  dout = aligned(dout);
  dlogits = aligned(dlogits);

  const Tensor dx = empty(x, {wants_dx ? desc.tokens : 0, desc.experts.hidden}, x.scalar_type());
  const Tensor drouter_w =
      empty(x, {wants_drouter_w ? desc.router.experts : 0, desc.experts.hidden}, x.scalar_type());
  const WeightGradients gradients(x, desc, wanted);
  BackwardArgs args{.x = input<void>(x),
                    .router_w = input<void>(router_w),
                    .w1 = input<void>(w1),
                    .w1_up = input<void>(w1_up),
                    .w2 = input<void>(w2),
                    .b2 = input<void>(b2),
                    .logits = input<void>(logits),
                    .preact = input<void>(preact),
                    .routing = input<void>(routing),
                    .dout = input<void>(dout),
                    .dlogits = input<void>(dlogits),
                    .dx = wants_dx ? output<void>(dx) : nullptr,
                    .drouter_w = wants_drouter_w ? output<void>(drouter_w) : nullptr,
                    .dpreact = output<void>(dpreact)};
  gradients.add_to(&args, main_grads);
  check(plan.backward(args, Scratch(x, plan.backward_workspace_bytes()), stream_of(x)));
  return {dx,
          drouter_w,
          gradients.dw1,
          gradients.db1,
          gradients.dw2,
          gradients.db2,
          gradients.dw1_up,
          gradients.db1_up};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> routed_forward(
    Tensor x, Tensor scores, Tensor token_ids, Tensor expert_ids, Tensor w1, OptionalTensor b1,
    Tensor w2, OptionalTensor b2, std::string layer, OptionalTensor w1_main_grad,
    OptionalTensor w2_main_grad, OptionalTensor w1_up, OptionalTensor b1_up,
    OptionalTensor w1_up_main_grad) {
  check_dims("scores", scores, 1, "(L)");
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  LayerDesc desc = describe(layer, x, w1_up, w2, b1.has_value(), main_grads);
  check_biases(desc, b1, b1_up, b2);
  choose_by_lists(&desc, scores.size(0));
  desc.experts.dpreact_in_workspace = false;  // as backward usually asks: one plan for both
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.tokens("x", x);
  check_tensor("scores", scores, x, ScalarType::Float, {desc.router.list_length}, "(L)");
  check_tensor("token_ids", token_ids, x, ScalarType::Int, {desc.router.list_length}, "(L)");
  check_tensor("expert_ids", expert_ids, x, ScalarType::Int, {desc.router.list_length}, "(L)");
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.biases(b1, b1_up, b2);
  x = aligned(x);

  const Tensor o = empty(x, {desc.tokens, desc.experts.hidden}, x.scalar_type());
  const Tensor counts = empty(x, {desc.router.experts}, ScalarType::Int);
  const Tensor preact = empty_preact(x, desc);
  const Tensor routing = empty_routing(x, plan);
  check(plan.forward({.x = input<void>(x),
                      .w1 = input<void>(w1),
                      .w1_up = input<void>(w1_up),
                      .b1 = input<void>(b1),
                      .b1_up = input<void>(b1_up),
                      .w2 = input<void>(w2),
                      .b2 = input<void>(b2),
                      .list_tokens = input<std::int32_t>(token_ids),
                      .list_experts = input<std::int32_t>(expert_ids),
                      .list_scores = input<float>(scores),
                      .o = output<void>(o),
                      .counts = output<std::int32_t>(counts),
                      .preact = output<void>(preact),
                      .routing = output<void>(routing)},
                     Scratch(x, plan.forward_workspace_bytes()), stream_of(x)));
  return {o, counts, preact, routing};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> routed_backward(
    Tensor dout, Tensor x, Tensor w1, Tensor w2, OptionalTensor b2, Tensor preact, Tensor routing,
    std::string layer, OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
    OptionalTensor dpreact, bool wants_dx, bool wants_dw1, bool wants_dw2, OptionalTensor w1_up,
    OptionalTensor w1_up_main_grad, bool wants_dw1_up) {
  check_dims("preact", preact, 2, "(L, 2n or n)");
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  const Wanted wanted{wants_dw1, wants_dw1_up && w1_up.has_value(), wants_dw2};
  main_grads.check_wanted(wanted);
  LayerDesc desc = describe(layer, x, w1_up, w2, b2.has_value(), main_grads);
  choose_by_lists(&desc, preact.size(0));
  desc.experts.inference = false;
  desc.experts.dpreact_in_workspace = !dpreact.has_value();
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.tokens("dout", dout);
  inputs.tokens("x", x);
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.b2(b2);
  inputs.saved(plan, preact, routing);
  inputs.dpreact(dpreact);
  x = aligned(x);
  dout = aligned(dout);

  const Tensor dx = empty(x, {wants_dx ? desc.tokens : 0, desc.experts.hidden}, x.scalar_type());
  const Tensor dscores = empty(x, {desc.router.list_length}, ScalarType::Float);
  const WeightGradients gradients(x, desc, wanted);
  BackwardArgs args{.x = input<void>(x),
                    .w1 = input<void>(w1),
                    .w1_up = input<void>(w1_up),
                    .w2 = input<void>(w2),
                    .b2 = input<void>(b2),
                    .preact = input<void>(preact),
                    .routing = input<void>(routing),
                    .dout = input<void>(dout),
                    .dx = wants_dx ? output<void>(dx) : nullptr,
                    .dscores = output<float>(dscores),
                    .dpreact = output<void>(dpreact)};
  gradients.add_to(&args, main_grads);
  check(plan.backward(args, Scratch(x, plan.backward_workspace_bytes()), stream_of(x)));
  return {dx,
          dscores,
          gradients.dw1,
          gradients.db1,
          gradients.dw2,
          gradients.db2,
          gradients.dw1_up,
          gradients.db1_up};
}

}  // namespace sonicmoe::python
