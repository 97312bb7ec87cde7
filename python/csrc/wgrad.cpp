#include "operators.h"
#include "weights.h"

namespace sonicmoe::python {

std::tuple<Tensor, Tensor> up_proj_wgrad(Tensor x, Tensor dpreact, std::int64_t top_k, Tensor w1,
                                         Tensor w2, Tensor routing, std::string layer,
                                         OptionalTensor w1_up, bool wants_dw1, bool wants_dw1_up) {
  static PlanCache<GroupedGemmDesc> products;
  check_dims("x", x, 2, "(T, d)");
  check_dims("dpreact", dpreact, 2, "(R, 2n or n)");
  LayerDesc desc = options_of(layer);
  desc.router.input = RouterInput::ids_and_weights;
  desc.router.top_k = top_k;
  desc.experts.inference = false;
  const OptionalTensor none;
  const MainGrads no_main_grads{none, none, none};
  describe_experts(&desc.experts, "x", x, w1_up, w2, false, no_main_grads);
  desc.tokens = x.size(0);
  desc.router.experts = w2.size(0);
  const RouterPlan router = router_of(desc, x);
  const GroupedDesc grouped = desc.grouped();
  const auto plan = products.get({{grouped}, GemmOp::up_proj_wgrad}, x);

  const ExpertInputs inputs(grouped, x);
  inputs.rows("x", x);
  inputs.weights(w1, w1_up, w2, no_main_grads);
  inputs.dpreact(dpreact);
  check_tensor("routing", routing, x, ScalarType::Int, {routing_ints(router)}, "(routing)");
  x = aligned(x);

  const WeightGradients gradients(x, grouped,
                                  {wants_dw1, wants_dw1_up && w1_up.has_value(), false});
  BackwardArgs made;
  gradients.add_to(&made, no_main_grads);
  const RoutedRows rows = rows_of(router, routing);
  if (made.dw1 != nullptr) {
    check(plan.run({.offsets = rows.offsets,
                    .row_tokens = rows.row_tokens,
                    .expert_order = rows.expert_order,
                    .x = input<void>(x),
                    .dpreact = const_cast<void*>(input<void>(dpreact)),
                    .dw1 = made.dw1,
                    .dw1_up = made.dw1_up},
                   Scratch(x, plan.workspace_bytes()), stream_of(x)));
  }
  const auto& [dx, dscores, dw1, db1, dw2, db2, dw1_up, db1_up] = gradients.behind(x, x);
  return {dw1, dw1_up};
}

}  // namespace sonicmoe::python
