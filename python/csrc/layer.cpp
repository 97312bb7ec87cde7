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
  describe_experts(&desc.experts, "x", x, w1_up, w2, bias, main_grads);
  desc.tokens = x.size(0);
  desc.router.experts = w2.size(0);
  return desc;
}

/// The router's own tensors, each with the option of its name. Those that an operator lacks are
/// missing.
struct RouterTensors {
  OptionalTensor logit_bias = {}, selection_bias = {}, expert_scale = {};  // (E)
  OptionalTensor draws = {};  // seed and offset (2) int64, optional; with rounding_tile
};

bool rounds(const LayerDesc& desc) { return desc.rounding.tile != 0; }

/// A router's weights in fp32 beside another x make the logits fp32 too.
void describe_router_w(LayerDesc* desc, const Tensor& x, const Tensor& router_w) {
  if (router_w.scalar_type() != ScalarType::Float || x.scalar_type() == ScalarType::Float) return;
  desc->router.f32_router_w = desc->router.f32_logits = true;
}

/// The checks that every layer operator makes on what it reads; the plan has checked the sizes.
class Inputs : public ExpertInputs {
 public:
  Inputs(const LayerDesc& desc, const Tensor& x) : ExpertInputs(desc.grouped(), x), desc_(desc) {}

  void logits(const char* argument, const OptionalTensor& tensor) const {
    if (!tensor) return;
    check_tensor(argument, *tensor, x(), logits_dtype(), {desc_.tokens, desc_.router.experts},
                 "(T, E)");
  }
  void router_w(const Tensor& tensor) const {
    check_tensor("router_w", tensor, x(), router_w_dtype(),
                 {desc_.router.experts, desc_.experts.hidden}, "(E, d)");
  }
  void of_router(const RouterTensors& tensors) const {
    router_tensor("logit_bias", tensors.logit_bias, desc_.router.logit_bias);
    router_tensor("selection_bias", tensors.selection_bias, desc_.router.selection_bias);
    expert_scale(tensors.expert_scale);
    if (!tensors.draws) return;
    if (!rounds(desc_)) {
      check(Status::error(StatusCode::invalid_argument,
                          "draws: got a tensor, allowed: None, for rounding_tile is 0"));
    }
    check_draws(*tensors.draws, x());
  }
  void expert_scale(const OptionalTensor& tensor) const {
    router_tensor("expert_scale", tensor, desc_.router.expert_scale);
  }
  void saved(const LayerPlan& plan, const Tensor& h, const Tensor& routing) const {
    saved_preact(h);
    this->routing(plan, routing);
  }
  void routing(const LayerPlan& plan, const Tensor& block) const {
    check_tensor("routing", block, x(), ScalarType::Int, {routing_ints(plan)}, "(routing)");
  }

  ScalarType logits_dtype() const { return desc_.router.f32_logits ? ScalarType::Float : dtype(); }
  ScalarType router_w_dtype() const {
    return desc_.router.f32_router_w ? ScalarType::Float : dtype();
  }

  /// The routing block is an array of int32, so that torch sees a plain tensor.
  static std::int64_t routing_ints(const LayerPlan& plan) {
    return static_cast<std::int64_t>(plan.saved_bytes().routing / sizeof(std::int32_t));
  }

 private:
  void router_tensor(const char* argument, const OptionalTensor& tensor, bool option) const {
    check_router_tensor(argument, tensor, option, x(), desc_.router.experts);
  }

  const LayerDesc& desc_;
};

/// The gradient of a router's tensor, empty without its option.
Tensor router_gradient(const Tensor& x, const LayerDesc& desc, bool option) {
  return empty(x, {option ? desc.router.experts : 0}, ScalarType::Float);
}
float* output_if(const Tensor& tensor, bool wanted) {
  return wanted ? output<float>(tensor) : nullptr;
}

/// The choices of each expert, which losses want, and the rows of each after rounding.
struct Counts {
  Counts(const Tensor& x, const LayerDesc& desc)
      : chosen(empty(x, {desc.router.experts}, ScalarType::Int)),
        rounded(empty(x, {rounds(desc) ? desc.router.experts : 0}, ScalarType::Int)) {}
  void add_to(ForwardArgs* args, const LayerDesc& desc) const {
    args->counts = output<std::int32_t>(rounds(desc) ? rounded : chosen);
    args->frequency = rounds(desc) ? output<std::int32_t>(chosen) : nullptr;
  }
  Tensor chosen;   // (E)
  Tensor rounded;  // (E), empty without rounding
};

Tensor empty_routing(const Tensor& x, const LayerPlan& plan) {
  return empty(x, {Inputs::routing_ints(plan)}, ScalarType::Int);
}

/// Routing of the caller, by RouterInput. What another input means is not there.
struct Given {
  OptionalTensor logits = {};                                   // (T, E)
  OptionalTensor ids = {}, weights = {};                        // (T, K)
  OptionalTensor token_ids = {}, expert_ids = {}, scores = {};  // (L)
  RouterTensors router = {};
};

using GivenForward = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void choose_by_ids(LayerDesc* desc, std::int64_t top_k) {
  if (desc->router.top_k != 0) {
    check(Status::error(StatusCode::invalid_argument,
                        "layer: got top_k, allowed: options, for the other arguments say that"));
  }
  desc->router.input = RouterInput::ids_and_weights;
  desc->router.top_k = top_k;
}

void choose_by_lists(LayerDesc* desc, std::int64_t length) {
  desc->router.input = RouterInput::lists;
  desc->router.list_length = length;
}

void score_by_logits(LayerDesc* desc, bool ids) {
  desc->router.input = ids ? RouterInput::logits_and_ids : RouterInput::logits;
}

void check_given(const LayerDesc& desc, const Inputs& inputs, const Tensor& x, const Given& given) {
  const auto check_given_tensor = [&x](const char* argument, const OptionalTensor& tensor,
                                       ScalarType dtype, Shape shape, const char* meaning) {
    if (tensor) check_tensor(argument, *tensor, x, dtype, shape, meaning);
  };
  const Shape slots = {desc.tokens, desc.router.top_k};
  inputs.logits("logits", given.logits);
  check_given_tensor("ids", given.ids, ScalarType::Int, slots, "(T, K)");
  check_given_tensor("weights", given.weights, ScalarType::Float, slots, "(T, K)");
  const Shape list = {desc.router.list_length};
  check_given_tensor("scores", given.scores, ScalarType::Float, list, "(L)");
  check_given_tensor("token_ids", given.token_ids, ScalarType::Int, list, "(L)");
  check_given_tensor("expert_ids", given.expert_ids, ScalarType::Int, list, "(L)");
}

/// ids_routing's block may have more rows than H, unlike metadata's own. The host reads the CPU's.
void check_max_rows(const LayerDesc& desc, const Tensor& x, const Tensor& routing) {
  if (!x.is_cpu() || desc.experts.inference) return;
  const std::int32_t pairs = rows_of(router_of(desc, x), routing).offsets[desc.router.experts];
  if (pairs <= desc.rows()) return;
  check(Status::error(StatusCode::invalid_argument,
                      "max_rows: got %lld, allowed: from %d on, the rows of routing",
                      static_cast<long long>(desc.rows()), pairs));
}

/// Forward of every operator whose caller routes. With `made`, ids_routing's block, training runs
/// only what comes behind metadata, the first operation of ids and weights.
GivenForward given_forward(LayerDesc desc, const Given& given, Tensor x, const Tensor& w1,
                           OptionalTensor b1, const Tensor& w2, OptionalTensor b2,
                           const OptionalTensor& w1_up, OptionalTensor b1_up,
                           const MainGrads& main_grads, const OptionalTensor& made = {}) {
  check_biases(desc.experts, b1, b1_up, b2);
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.rows("x", x);
  check_given(desc, inputs, x, given);
  inputs.of_router(given.router);
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.biases(b1, b1_up, b2);
  align(&x, &b1, &b1_up, &b2);
  const OptionalTensor logits = aligned(given.logits);

  const Tensor o = empty(x, {desc.tokens, desc.experts.hidden}, x.scalar_type());
  const Counts counts(x, desc);
  const Tensor preact = empty_preact(x, desc.grouped());
  if (made) {
    inputs.routing(plan, *made);
    check_max_rows(desc, x, *made);
  }
  const Tensor routing = made ? *made : empty_routing(x, plan);
  ForwardArgs args{.x = input<void>(x),
                   .selection_bias = input<float>(given.router.selection_bias),
                   .expert_scale = input<float>(given.router.expert_scale),
                   .w1 = input<void>(w1),
                   .w1_up = input<void>(w1_up),
                   .b1 = input<void>(b1),
                   .b1_up = input<void>(b1_up),
                   .w2 = input<void>(w2),
                   .b2 = input<void>(b2),
                   .given_logits = input<void>(logits),
                   .given_ids = input<std::int32_t>(given.ids),
                   .given_weights = input<float>(given.weights),
                   .list_tokens = input<std::int32_t>(given.token_ids),
                   .list_experts = input<std::int32_t>(given.expert_ids),
                   .list_scores = input<float>(given.scores),
                   .draws = draws_of(given.router.draws),
                   .o = output<void>(o),
                   .preact = output<void>(preact),
                   .routing = output<void>(routing)};
  counts.add_to(&args, desc);
  Unread error(x);
  args.error_word = error.word();
  check(plan.forward(
      args, Scratch(x, plan.forward_workspace_bytes()), stream_of(x),
      made && !desc.experts.inference ? kAllOperations & ~OperationMask{1} : kAllOperations));
  return {o, counts.chosen, preact, routing};
}

/// Which gradients a backward is asked for, and memory for dH.
struct Asked {
  bool dx;
  Wanted weights;
  const OptionalTensor& dpreact;
};

/// Their backward. The second result, of this shape, is the gradient of the logits if there are
/// any, else of the weights or scores. The last one is dexpert_scale.
LogitsGradients given_backward(LayerDesc desc, Shape shape, const OptionalTensor& given_logits,
                               Tensor dout, Tensor x, const Tensor& w1, const Tensor& w2,
                               OptionalTensor b2, const Tensor& preact, const Tensor& routing,
                               const OptionalTensor& w1_up, const MainGrads& main_grads,
                               const Asked& asked, OptionalTensor b1, OptionalTensor b1_up,
                               const OptionalTensor& expert_scale = {}) {
  main_grads.check_wanted(asked.weights);
  desc.experts.inference = false;
  desc.experts.dpreact_in_workspace = !asked.dpreact.has_value();
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.rows("dout", dout);
  inputs.rows("x", x);
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.biases_again(b1, b1_up, b2);
  inputs.logits("logits", given_logits);
  inputs.expert_scale(expert_scale);
  inputs.saved(plan, preact, routing);
  inputs.dpreact(asked.dpreact);
  align(&x, &dout, &b1, &b1_up, &b2);
  const OptionalTensor logits = aligned(given_logits);

  const bool of_logits = desc.router.has_logits();
  const Tensor dx = empty(x, {asked.dx ? desc.tokens : 0, desc.experts.hidden}, x.scalar_type());
  const Tensor dgiven = empty(x, shape, of_logits ? inputs.logits_dtype() : ScalarType::Float);
  const Tensor dexpert_scale = router_gradient(x, desc, desc.router.expert_scale);
  const WeightGradients gradients(x, desc.grouped(), asked.weights);
  BackwardArgs args{.x = input<void>(x),
                    .expert_scale = input<float>(expert_scale),
                    .w1 = input<void>(w1),
                    .w1_up = input<void>(w1_up),
                    .b1 = input<void>(b1),
                    .b1_up = input<void>(b1_up),
                    .w2 = input<void>(w2),
                    .b2 = input<void>(b2),
                    .logits = input<void>(logits),
                    .preact = input<void>(preact),
                    .routing = input<void>(routing),
                    .dout = input<void>(dout),
                    .dx = asked.dx ? output<void>(dx) : nullptr,
                    .dexpert_scale = output_if(dexpert_scale, desc.router.expert_scale),
                    .dgiven_logits = of_logits ? output<void>(dgiven) : nullptr,
                    .dscores = of_logits ? nullptr : output<float>(dgiven),
                    .dpreact = output<void>(asked.dpreact)};
  gradients.add_to(&args, main_grads);
  check(plan.backward(args, Scratch(x, plan.backward_workspace_bytes()), stream_of(x)));
  return std::tuple_cat(gradients.behind(dx, dgiven), std::make_tuple(dexpert_scale));
}

/// Those of a router without an expert_scale.
Gradients without_scale(const LogitsGradients& gradients) {
  const auto& [dx, dgiven, dw1, db1, dw2, db2, dw1_up, db1_up, dexpert_scale] = gradients;
  return {dx, dgiven, dw1, db1, dw2, db2, dw1_up, db1_up};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> layer_forward(
    Tensor x, Tensor router_w, Tensor w1, OptionalTensor b1, Tensor w2, OptionalTensor b2,
    std::string layer, OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
    OptionalTensor w1_up, OptionalTensor b1_up, OptionalTensor w1_up_main_grad,
    OptionalTensor logit_bias, OptionalTensor selection_bias, OptionalTensor expert_scale,
    OptionalTensor draws) {
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  LayerDesc desc = describe(layer, x, w1_up, w2, b1.has_value(), main_grads);
  describe_router_w(&desc, x, router_w);
  check_biases(desc.experts, b1, b1_up, b2);
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.rows("x", x);
  inputs.router_w(router_w);
  inputs.of_router({logit_bias, selection_bias, expert_scale, draws});
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.biases(b1, b1_up, b2);
  align(&x, &router_w, &b1, &b1_up, &b2);

  const Tensor o = empty(x, {desc.tokens, desc.experts.hidden}, x.scalar_type());
  const Tensor logits = empty(x, {desc.tokens, desc.router.experts}, inputs.logits_dtype());
  const Counts counts(x, desc);
  const Tensor preact = empty_preact(x, desc.grouped());
  const Tensor routing = empty_routing(x, plan);
  ForwardArgs args{.x = input<void>(x),
                   .router_w = input<void>(router_w),
                   .logit_bias = input<float>(logit_bias),
                   .selection_bias = input<float>(selection_bias),
                   .expert_scale = input<float>(expert_scale),
                   .w1 = input<void>(w1),
                   .w1_up = input<void>(w1_up),
                   .b1 = input<void>(b1),
                   .b1_up = input<void>(b1_up),
                   .w2 = input<void>(w2),
                   .b2 = input<void>(b2),
                   .draws = draws_of(draws),
                   .o = output<void>(o),
                   .logits = output<void>(logits),
                   .preact = output<void>(preact),
                   .routing = output<void>(routing)};
  counts.add_to(&args, desc);
  Unread error(x);
  args.error_word = error.word();
  check(plan.forward(args, Scratch(x, plan.forward_workspace_bytes()), stream_of(x)));
  return {o, logits, counts.chosen, preact, routing};
}

LayerGradients layer_backward(Tensor dout, OptionalTensor dlogits, Tensor x, Tensor router_w,
                              Tensor w1, Tensor w2, OptionalTensor b2, OptionalTensor logits,
                              Tensor preact, Tensor routing, std::string layer,
                              OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
                              OptionalTensor dpreact, bool wants_dx, bool wants_drouter_w,
                              bool wants_dw1, bool wants_dw2, OptionalTensor w1_up,
                              OptionalTensor w1_up_main_grad, bool wants_dw1_up,
                              OptionalTensor expert_scale, bool wants_dlogit_bias,
                              OptionalTensor b1, OptionalTensor b1_up) {
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  const Wanted wanted{wants_dw1, wants_dw1_up && w1_up.has_value(), wants_dw2};
  main_grads.check_wanted(wanted);
  LayerDesc desc = describe(layer, x, w1_up, w2, b2.has_value(), main_grads);
  describe_router_w(&desc, x, router_w);
  desc.experts.inference = false;
  desc.experts.dpreact_in_workspace = !dpreact.has_value();
  const LayerPlan plan = plans().get(desc, x);
  const Inputs inputs(desc, x);
  inputs.rows("dout", dout);
  inputs.logits("dlogits", dlogits);
  inputs.rows("x", x);
  inputs.router_w(router_w);
  inputs.weights(w1, w1_up, w2, main_grads);
  inputs.biases_again(b1, b1_up, b2);
  inputs.logits("logits", logits);
  inputs.expert_scale(expert_scale);
  inputs.saved(plan, preact, routing);
  inputs.dpreact(dpreact);
  align(&x, &dout, &dlogits, &router_w, &b1, &b1_up, &b2);

  const Tensor dx = empty(x, {wants_dx ? desc.tokens : 0, desc.experts.hidden}, x.scalar_type());
  const Tensor drouter_w = empty(
      x, {wants_drouter_w ? desc.router.experts : 0, desc.experts.hidden}, inputs.router_w_dtype());
  const bool biased = desc.router.logit_bias && wants_dlogit_bias;
  const Tensor dlogit_bias = router_gradient(x, desc, biased);
  const Tensor dexpert_scale = router_gradient(x, desc, desc.router.expert_scale);
  const WeightGradients gradients(x, desc.grouped(), wanted);
  BackwardArgs args{.x = input<void>(x),
                    .router_w = input<void>(router_w),
                    .expert_scale = input<float>(expert_scale),
                    .w1 = input<void>(w1),
                    .w1_up = input<void>(w1_up),
                    .b1 = input<void>(b1),
                    .b1_up = input<void>(b1_up),
                    .w2 = input<void>(w2),
                    .b2 = input<void>(b2),
                    .logits = input<void>(logits),
                    .preact = input<void>(preact),
                    .routing = input<void>(routing),
                    .dout = input<void>(dout),
                    .dlogits = input<void>(dlogits),
                    .dx = wants_dx ? output<void>(dx) : nullptr,
                    .drouter_w = wants_drouter_w ? output<void>(drouter_w) : nullptr,
                    .dlogit_bias = output_if(dlogit_bias, biased),
                    .dexpert_scale = output_if(dexpert_scale, desc.router.expert_scale),
                    .dpreact = output<void>(dpreact)};
  gradients.add_to(&args, main_grads);
  check(plan.backward(args, Scratch(x, plan.backward_workspace_bytes()), stream_of(x)));
  return std::tuple_cat(gradients.behind(dx, drouter_w),
                        std::make_tuple(dlogit_bias, dexpert_scale));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> routed_forward(
    Tensor x, Tensor scores, Tensor token_ids, Tensor expert_ids, Tensor w1, OptionalTensor b1,
    Tensor w2, OptionalTensor b2, std::string layer, OptionalTensor w1_main_grad,
    OptionalTensor w2_main_grad, OptionalTensor w1_up, OptionalTensor b1_up,
    OptionalTensor w1_up_main_grad) {
  check_dims("scores", scores, 1, "(L)");
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  LayerDesc desc = describe(layer, x, w1_up, w2, b1.has_value(), main_grads);
  choose_by_lists(&desc, scores.size(0));
  return given_forward(desc, {.token_ids = token_ids, .expert_ids = expert_ids, .scores = scores},
                       x, w1, b1, w2, b2, w1_up, b1_up, main_grads);
}

Gradients routed_backward(Tensor dout, Tensor x, Tensor w1, Tensor w2, OptionalTensor b2,
                          Tensor preact, Tensor routing, std::string layer,
                          OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
                          OptionalTensor dpreact, bool wants_dx, bool wants_dw1, bool wants_dw2,
                          OptionalTensor w1_up, OptionalTensor w1_up_main_grad, bool wants_dw1_up,
                          OptionalTensor b1, OptionalTensor b1_up) {
  check_dims("preact", preact, 2, "(L, 2n or n)");
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  const Wanted wanted{wants_dw1, wants_dw1_up && w1_up.has_value(), wants_dw2};
  LayerDesc desc = describe(layer, x, w1_up, w2, b2.has_value(), main_grads);
  choose_by_lists(&desc, preact.size(0));
  return without_scale(given_backward(desc, {desc.router.list_length}, {}, dout, x, w1, w2, b2,
                                      preact, routing, w1_up, main_grads,
                                      {wants_dx, wanted, dpreact}, b1, b1_up));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> ids_forward(
    Tensor x, Tensor ids, Tensor weights, Tensor w1, OptionalTensor b1, Tensor w2,
    OptionalTensor b2, std::string layer, OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
    OptionalTensor w1_up, OptionalTensor b1_up, OptionalTensor w1_up_main_grad) {
  check_dims("ids", ids, 2, "(T, K)");
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  LayerDesc desc = describe(layer, x, w1_up, w2, b1.has_value(), main_grads);
  choose_by_ids(&desc, ids.size(1));
  return given_forward(desc, {.ids = ids, .weights = weights}, x, w1, b1, w2, b2, w1_up, b1_up,
                       main_grads);
}

Tensor ids_routing(Tensor x, Tensor ids, Tensor weights, std::int64_t experts, std::string layer) {
  check_dims("x", x, 2, "(T, d)");
  check_dims("ids", ids, 2, "(T, K)");
  LayerDesc desc = options_of(layer);
  choose_by_ids(&desc, ids.size(1));
  desc.tokens = x.size(0);
  desc.router.experts = experts;
  desc.experts.hidden = x.size(1);
  desc.experts.dtype = dtype_of("x", x);
  if (desc.experts.inference) return empty(x, {0}, ScalarType::Int);
  const RouterPlan router = router_of(desc, x);
  check_given(desc, Inputs(desc, x), x, {.ids = ids, .weights = weights});
  const Tensor routing = empty(x, {routing_ints(router)}, ScalarType::Int);
  const Tensor counts = empty(x, {experts}, ScalarType::Int);  // nobody reads them
  check(router.forward({.given_ids = input<std::int32_t>(ids),
                        .given_weights = input<float>(weights),
                        .counts = output<std::int32_t>(counts),
                        .routing = output<void>(routing)},
                       Scratch(x, router.forward_workspace_bytes()), stream_of(x)));
  return routing;
}

std::tuple<Tensor, Tensor> ids_experts_forward(Tensor x, Tensor ids, Tensor weights, Tensor routing,
                                               Tensor w1, OptionalTensor b1, Tensor w2,
                                               OptionalTensor b2, std::string layer,
                                               OptionalTensor w1_up, OptionalTensor b1_up) {
  check_dims("ids", ids, 2, "(T, K)");
  const OptionalTensor none;
  const MainGrads no_main_grads{none, none, none};
  LayerDesc desc = describe(layer, x, w1_up, w2, b1.has_value(), no_main_grads);
  choose_by_ids(&desc, ids.size(1));
  const auto made = given_forward(desc, {.ids = ids, .weights = weights}, x, w1, b1, w2, b2, w1_up,
                                  b1_up, no_main_grads, routing);
  return {std::get<0>(made), std::get<2>(made)};
}

Gradients ids_backward(Tensor dout, Tensor x, std::int64_t top_k, Tensor w1, Tensor w2,
                       OptionalTensor b2, Tensor preact, Tensor routing, std::string layer,
                       OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
                       OptionalTensor dpreact, bool wants_dx, bool wants_dw1, bool wants_dw2,
                       OptionalTensor w1_up, OptionalTensor w1_up_main_grad, bool wants_dw1_up,
                       OptionalTensor b1, OptionalTensor b1_up) {
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  const Wanted wanted{wants_dw1, wants_dw1_up && w1_up.has_value(), wants_dw2};
  LayerDesc desc = describe(layer, x, w1_up, w2, b2.has_value(), main_grads);
  choose_by_ids(&desc, top_k);
  return without_scale(given_backward(desc, {desc.tokens, top_k}, {}, dout, x, w1, w2, b2, preact,
                                      routing, w1_up, main_grads, {wants_dx, wanted, dpreact}, b1,
                                      b1_up));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> logits_forward(
    Tensor x, Tensor logits, OptionalTensor ids, Tensor w1, OptionalTensor b1, Tensor w2,
    OptionalTensor b2, std::string layer, OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
    OptionalTensor w1_up, OptionalTensor b1_up, OptionalTensor w1_up_main_grad,
    OptionalTensor selection_bias, OptionalTensor expert_scale, OptionalTensor draws) {
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  LayerDesc desc = describe(layer, x, w1_up, w2, b1.has_value(), main_grads);
  score_by_logits(&desc, ids.has_value());
  const RouterTensors router{
      .selection_bias = selection_bias, .expert_scale = expert_scale, .draws = draws};
  return given_forward(desc, {.logits = logits, .ids = ids, .router = router}, x, w1, b1, w2, b2,
                       w1_up, b1_up, main_grads);
}

LogitsGradients logits_backward(Tensor dout, Tensor x, OptionalTensor logits, bool has_ids,
                                Tensor w1, Tensor w2, OptionalTensor b2, Tensor preact,
                                Tensor routing, std::string layer, OptionalTensor w1_main_grad,
                                OptionalTensor w2_main_grad, OptionalTensor dpreact, bool wants_dx,
                                bool wants_dw1, bool wants_dw2, OptionalTensor w1_up,
                                OptionalTensor w1_up_main_grad, bool wants_dw1_up,
                                OptionalTensor expert_scale, OptionalTensor b1,
                                OptionalTensor b1_up) {
  const MainGrads main_grads{w1_main_grad, w1_up_main_grad, w2_main_grad};
  const Wanted wanted{wants_dw1, wants_dw1_up && w1_up.has_value(), wants_dw2};
  LayerDesc desc = describe(layer, x, w1_up, w2, b2.has_value(), main_grads);
  score_by_logits(&desc, has_ids);
  return given_backward(desc, {desc.tokens, desc.router.experts}, logits, dout, x, w1, w2, b2,
                        preact, routing, w1_up, main_grads, {wants_dx, wanted, dpreact}, b1, b1_up,
                        expert_scale);
}

}  // namespace sonicmoe::python
