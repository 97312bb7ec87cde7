#include "operators.h"

namespace sonicmoe::python {
namespace {

PlanCache<LayerDesc, LayerPlan>& plans() {
  static PlanCache<LayerDesc, LayerPlan> cache;
  return cache;
}

/// fp32 tensors that backward adds dW1 and dW2 to; one alone if the other is not asked for.
struct MainGrads {
  const OptionalTensor& w1;
  const OptionalTensor& w2;

  bool any() const { return w1.has_value() || w2.has_value(); }
  /// In backward, which knows what is asked for.
  void check_wanted(bool wants_dw1, bool wants_dw2) const {
    if (!any()) return;
    const char* const missing = wants_dw1 && !w1   ? "w1_main_grad"
                                : wants_dw2 && !w2 ? "w2_main_grad"
                                                   : nullptr;
    if (missing == nullptr) return;
    check(Status::error(StatusCode::invalid_argument,
                        "%s: got None, allowed: a tensor, for that gradient is wanted and the "
                        "other one is added to a tensor",
                        missing));
  }
};

/// `layer`'s options with the sizes, read off the tensors. The weights say what d is, so that x is
/// blamed when its width differs.
LayerDesc describe(const std::string& layer, const Tensor& x, const Tensor& w2, bool bias,
                   const MainGrads& main_grads) {
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
  return desc;
}

void choose_by_lists(LayerDesc* desc, std::int64_t length) {
  desc->router.mode = RouterMode::given;
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
  void weights(const Tensor& w1, const Tensor& w2, const MainGrads& main_grads) const {
    like_w1("w1", w1, dtype_);
    like_w2("w2", w2, dtype_);
    if (main_grads.w1) {
      like_w1("w1_main_grad", *main_grads.w1, ScalarType::Float);
      check_alignment("w1_main_grad", *main_grads.w1);
    }
    if (main_grads.w2) {
      like_w2("w2_main_grad", *main_grads.w2, ScalarType::Float);
      check_alignment("w2_main_grad", *main_grads.w2);
    }
  }
  void b1(const OptionalTensor& tensor) const {
    const char* const shape = is_glu(desc_.experts.activation) ? "(E, 2n)" : "(E, n)";
    if (tensor) {
      check_tensor("b1", *tensor, x_, dtype_, {desc_.router.experts, desc_.experts.preact_width()},
                   shape);
    }
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
                 {desc_.router.experts, desc_.experts.preact_width(), desc_.experts.hidden},
                 is_glu(desc_.experts.activation) ? "(E, 2n, d)" : "(E, n, d)");
  }
  void like_w2(const char* argument, const Tensor& tensor, ScalarType dtype) const {
    check_tensor(argument, tensor, x_, dtype,
                 {desc_.router.experts, desc_.experts.hidden, desc_.experts.intermediate},
                 "(E, d, n)");
  }

  const LayerDesc& desc_;
  const Tensor& x_;
  ScalarType dtype_;
};

void check_biases(const OptionalTensor& b1, const OptionalTensor& b2) {
  if (b1.has_value() != b2.has_value()) {
    check(Status::error(StatusCode::invalid_argument,
                        "%s: got None, allowed: b1 and b2, or neither", b1 ? "b2" : "b1"));
  }
}

Tensor empty_preact(const Tensor& x, const LayerDesc& desc) {
  return empty(x, {desc.experts.inference ? 0 : desc.rows(), desc.experts.preact_width()},
               x.scalar_type());
}

Tensor empty_routing(const Tensor& x, const LayerPlan& plan) {
  return empty(x, {Inputs::routing_ints(plan)}, ScalarType::Int);
}

/// dw1, db1, dw2, db2 and their places in the arguments. dw1 and dw2 are empty if they are added to
/// main_grads, or not wanted.
struct WeightGradients {
  WeightGradients(const Tensor& x, const LayerDesc& d, bool wants_dw1, bool wants_dw2)
      : dw1(empty(x, {returned(d, wants_dw1), d.experts.preact_width(), d.experts.hidden},
                  x.scalar_type())),
        db1(empty(x, {d.experts.bias ? d.router.experts : 0, d.experts.preact_width()},
                  x.scalar_type())),
        dw2(empty(x, {returned(d, wants_dw2), d.experts.hidden, d.experts.intermediate},
                  x.scalar_type())),
        db2(empty(x, {d.experts.bias ? d.router.experts : 0, d.experts.hidden}, x.scalar_type())),
        wants_dw1_(wants_dw1),
        wants_dw2_(wants_dw2) {}

  void add_to(BackwardArgs* args, const MainGrads& main_grads) const {
    if (wants_dw1_) args->dw1 = output<void>(main_grads.w1.value_or(dw1));
    args->db1 = output<void>(db1);
    if (wants_dw2_) args->dw2 = output<void>(main_grads.w2.value_or(dw2));
    args->db2 = output<void>(db2);
  }

  Tensor dw1, db1, dw2, db2;

 private:
  static std::int64_t returned(const LayerDesc& d, bool wanted) {
    return wanted && !d.experts.accumulate_weight_grads ? d.router.experts : 0;
  }

  bool wants_dw1_, wants_dw2_;
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> layer_forward(
    Tensor x, Tensor router_w, Tensor w1, OptionalTensor b1, Tensor w2, OptionalTensor b2,
    std::string layer, OptionalTensor w1_main_grad, OptionalTensor w2_main_grad) {
  check_biases(b1, b2);
  const MainGrads main_grads{w1_main_grad, w2_main_grad};
  LayerDesc desc = describe(layer, x, w2, b1.has_value(), main_grads);
  desc.experts.dpreact_in_workspace = false;  // as backward usually asks: one plan for both
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.tokens("x", x);
  inputs.router_w(router_w);
  inputs.weights(w1, w2, main_grads);
  inputs.b1(b1);
  inputs.b2(b2);
  x = aligned(x);

  const Tensor o = empty(x, {desc.tokens, desc.experts.hidden}, x.scalar_type());
  const Tensor logits = empty(x, {desc.tokens, desc.router.experts}, x.scalar_type());
  const Tensor counts = empty(x, {desc.router.experts}, ScalarType::Int);
  const Tensor preact = empty_preact(x, desc);
  const Tensor routing = empty_routing(x, plan);
  check(plan.forward({.x = input<void>(x),
                      .router_w = input<void>(router_w),
                      .w1 = input<void>(w1),
                      .b1 = input<void>(b1),
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

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> layer_backward(
    Tensor dout, OptionalTensor dlogits, Tensor x, Tensor router_w, Tensor w1, Tensor w2,
    OptionalTensor b2, OptionalTensor logits, Tensor preact, Tensor routing, std::string layer,
    OptionalTensor w1_main_grad, OptionalTensor w2_main_grad, OptionalTensor dpreact, bool wants_dx,
    bool wants_drouter_w, bool wants_dw1, bool wants_dw2) {
  const MainGrads main_grads{w1_main_grad, w2_main_grad};
  main_grads.check_wanted(wants_dw1, wants_dw2);
  LayerDesc desc = describe(layer, x, w2, b2.has_value(), main_grads);
  desc.experts.inference = false;
  desc.experts.dpreact_in_workspace = !dpreact.has_value();
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.tokens("dout", dout);
  inputs.logits("dlogits", dlogits);
  inputs.tokens("x", x);
  inputs.router_w(router_w);
  inputs.weights(w1, w2, main_grads);
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
  const WeightGradients gradients(x, desc, wants_dw1, wants_dw2);
  BackwardArgs args{.x = input<void>(x),
                    .router_w = input<void>(router_w),
                    .w1 = input<void>(w1),
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
  return {dx, drouter_w, gradients.dw1, gradients.db1, gradients.dw2, gradients.db2};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> routed_forward(Tensor x, Tensor scores, Tensor token_ids,
                                                          Tensor expert_ids, Tensor w1,
                                                          OptionalTensor b1, Tensor w2,
                                                          OptionalTensor b2, std::string layer,
                                                          OptionalTensor w1_main_grad,
                                                          OptionalTensor w2_main_grad) {
  check_biases(b1, b2);
  check_dims("scores", scores, 1, "(L)");
  const MainGrads main_grads{w1_main_grad, w2_main_grad};
  LayerDesc desc = describe(layer, x, w2, b1.has_value(), main_grads);
  choose_by_lists(&desc, scores.size(0));
  desc.experts.dpreact_in_workspace = false;  // as backward usually asks: one plan for both
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.tokens("x", x);
  check_tensor("scores", scores, x, ScalarType::Float, {desc.router.list_length}, "(L)");
  check_tensor("token_ids", token_ids, x, ScalarType::Int, {desc.router.list_length}, "(L)");
  check_tensor("expert_ids", expert_ids, x, ScalarType::Int, {desc.router.list_length}, "(L)");
  inputs.weights(w1, w2, main_grads);
  inputs.b1(b1);
  inputs.b2(b2);
  x = aligned(x);

  const Tensor o = empty(x, {desc.tokens, desc.experts.hidden}, x.scalar_type());
  const Tensor counts = empty(x, {desc.router.experts}, ScalarType::Int);
  const Tensor preact = empty_preact(x, desc);
  const Tensor routing = empty_routing(x, plan);
  check(plan.forward({.x = input<void>(x),
                      .w1 = input<void>(w1),
                      .b1 = input<void>(b1),
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

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> routed_backward(
    Tensor dout, Tensor x, Tensor w1, Tensor w2, OptionalTensor b2, Tensor preact, Tensor routing,
    std::string layer, OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
    OptionalTensor dpreact, bool wants_dx, bool wants_dw1, bool wants_dw2) {
  check_dims("preact", preact, 2, "(L, 2n or n)");
  const MainGrads main_grads{w1_main_grad, w2_main_grad};
  main_grads.check_wanted(wants_dw1, wants_dw2);
  LayerDesc desc = describe(layer, x, w2, b2.has_value(), main_grads);
  choose_by_lists(&desc, preact.size(0));
  desc.experts.inference = false;
  desc.experts.dpreact_in_workspace = !dpreact.has_value();
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.tokens("dout", dout);
  inputs.tokens("x", x);
  inputs.weights(w1, w2, main_grads);
  inputs.b2(b2);
  inputs.saved(plan, preact, routing);
  inputs.dpreact(dpreact);
  x = aligned(x);
  dout = aligned(dout);

  const Tensor dx = empty(x, {wants_dx ? desc.tokens : 0, desc.experts.hidden}, x.scalar_type());
  const Tensor dscores = empty(x, {desc.router.list_length}, ScalarType::Float);
  const WeightGradients gradients(x, desc, wants_dw1, wants_dw2);
  BackwardArgs args{.x = input<void>(x),
                    .w1 = input<void>(w1),
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
  return {dx, dscores, gradients.dw1, gradients.db1, gradients.dw2, gradients.db2};
}

}  // namespace sonicmoe::python
