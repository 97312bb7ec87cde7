#include "operators.h"
#include "weights.h"

namespace sonicmoe::python {
namespace {

PlanCache<LayerDesc, LayerPlan>& plans() {
  static PlanCache<LayerDesc, LayerPlan> cache;
  return cache;
}

/// `layer`'s options with the sizes, read off the tensors.
LayerDesc describe(const std::string& layer, const Tensor& x, const OptionalTensor& w1_up,
                   const Tensor& w2, bool bias, const MainGrads& main_grads) {
  check_dims("x", x, 2, "(T, d)");
  LayerDesc desc = options_of(layer);
  if (desc.rounding.tile != 0) {
    check(Status::error(StatusCode::invalid_argument,
                        "rounding_tile: got %lld, allowed: 0 (token_rounding makes lists)",
                        static_cast<long long>(desc.rounding.tile)));
  }
  describe_experts(&desc.experts, "x", x, w1_up, w2, bias, main_grads);
  desc.tokens = x.size(0);
  desc.router.experts = w2.size(0);
  return desc;
}

void choose_by_lists(LayerDesc* desc, std::int64_t length) {
  desc->router.input = RouterInput::lists;
  desc->router.list_length = length;
}

/// The checks that every layer operator makes on what it reads; the plan has checked the sizes.
class Inputs : public ExpertInputs {
 public:
  Inputs(const LayerDesc& desc, const Tensor& x) : ExpertInputs(desc.grouped(), x), desc_(desc) {}

  void logits(const char* argument, const OptionalTensor& tensor) const {
    if (!tensor) return;
    check_tensor(argument, *tensor, x(), dtype(), {desc_.tokens, desc_.router.experts}, "(T, E)");
  }
  void router_w(const Tensor& tensor) const {
    check_tensor("router_w", tensor, x(), dtype(), {desc_.router.experts, desc_.experts.hidden},
                 "(E, d)");
  }
  void saved(const LayerPlan& plan, const Tensor& h, const Tensor& routing) const {
    preact("preact", h);
    check_tensor("routing", routing, x(), ScalarType::Int, {routing_ints(plan)}, "(routing)");
  }

  /// The routing block is an array of int32, so that torch sees a plain tensor.
  static std::int64_t routing_ints(const LayerPlan& plan) {
    return static_cast<std::int64_t>(plan.saved_bytes().routing / sizeof(std::int32_t));
  }

 private:
  const LayerDesc& desc_;
};

Tensor empty_routing(const Tensor& x, const LayerPlan& plan) {
  return empty(x, {Inputs::routing_ints(plan)}, ScalarType::Int);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> layer_forward(
    Tensor x, Tensor router_w, Tensor w1, OptionalTensor b1, Tensor w2, OptionalTensor b2,
    std::string layer, OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
    OptionalTensor w1_up, OptionalTensor b1_up, OptionalTensor w1_up_main_grad) {
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  LayerDesc desc = describe(layer, x, w1_up, w2, b1.has_value(), main_grads);
  check_biases(desc.experts, b1, b1_up, b2);
  desc.experts.dpreact_in_workspace = false;  // as backward usually asks: one plan for both
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.rows("x", x);
  inputs.router_w(router_w);
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.biases(b1, b1_up, b2);
  x = aligned(x);

  const Tensor o = empty(x, {desc.tokens, desc.experts.hidden}, x.scalar_type());
  const Tensor logits = empty(x, {desc.tokens, desc.router.experts}, x.scalar_type());
  const Tensor counts = empty(x, {desc.router.experts}, ScalarType::Int);
  const Tensor preact = empty_preact(x, desc.grouped());
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
  inputs.rows("dout", dout);
  inputs.logits("dlogits", dlogits);
  inputs.rows("x", x);
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
  const WeightGradients gradients(x, desc.grouped(), wanted);
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
  check_biases(desc.experts, b1, b1_up, b2);
  choose_by_lists(&desc, scores.size(0));
  desc.experts.dpreact_in_workspace = false;  // as backward usually asks: one plan for both
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.rows("x", x);
  check_tensor("scores", scores, x, ScalarType::Float, {desc.router.list_length}, "(L)");
  check_tensor("token_ids", token_ids, x, ScalarType::Int, {desc.router.list_length}, "(L)");
  check_tensor("expert_ids", expert_ids, x, ScalarType::Int, {desc.router.list_length}, "(L)");
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.biases(b1, b1_up, b2);
  x = aligned(x);

  const Tensor o = empty(x, {desc.tokens, desc.experts.hidden}, x.scalar_type());
  const Tensor counts = empty(x, {desc.router.experts}, ScalarType::Int);
  const Tensor preact = empty_preact(x, desc.grouped());
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
  inputs.rows("dout", dout);
  inputs.rows("x", x);
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.b2(b2);
  inputs.saved(plan, preact, routing);
  inputs.dpreact(dpreact);
  x = aligned(x);
  dout = aligned(dout);

  const Tensor dx = empty(x, {wants_dx ? desc.tokens : 0, desc.experts.hidden}, x.scalar_type());
  const Tensor dscores = empty(x, {desc.router.list_length}, ScalarType::Float);
  const WeightGradients gradients(x, desc.grouped(), wanted);
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
