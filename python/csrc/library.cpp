#include "operators.h"

// The schemas. Shapes without data and derivatives are registered in Python (sonicmoe/_ops.py): the
// stable ABI has no C++ interface for them. torch.compile keeps calls of these operators on disk,
// across versions of this library: a released operator whose schema changes gets a new name.
STABLE_TORCH_LIBRARY(sonicmoe, library) {
  library.def(
      "layer_forward(Tensor x, Tensor router_w, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, "
      "str layer, Tensor? w1_main_grad=None, Tensor? w2_main_grad=None, "
      "Tensor? w1_up=None, Tensor? b1_up=None, Tensor? w1_up_main_grad=None, "
      "Tensor? logit_bias=None, Tensor? selection_bias=None, Tensor? expert_scale=None, "
      "Tensor? draws=None) -> "
      "(Tensor o, Tensor logits, Tensor counts, Tensor preact, Tensor routing)");
  library.def(
      "layer_backward(Tensor dout, Tensor? dlogits, Tensor x, Tensor router_w, Tensor w1, "
      "Tensor w2, Tensor? b2, Tensor? logits, Tensor preact, Tensor routing, "
      "str layer, Tensor(a!)? w1_main_grad=None, Tensor(b!)? w2_main_grad=None, "
      "Tensor(c!)? dpreact=None, bool wants_dx=True, bool wants_drouter_w=True, "
      "bool wants_dw1=True, bool wants_dw2=True, "
      "Tensor? w1_up=None, Tensor(d!)? w1_up_main_grad=None, bool wants_dw1_up=True, "
      "Tensor? expert_scale=None, bool wants_dlogit_bias=True, "
      "Tensor? b1=None, Tensor? b1_up=None) -> "
      "(Tensor dx, Tensor drouter_w, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2, "
      "Tensor dw1_up, Tensor db1_up, Tensor dlogit_bias, Tensor dexpert_scale)");
  library.def(
      "routed_forward(Tensor x, Tensor scores, Tensor token_ids, Tensor expert_ids, Tensor w1, "
      "Tensor? b1, Tensor w2, Tensor? b2, str layer, "
      "Tensor? w1_main_grad=None, Tensor? w2_main_grad=None, "
      "Tensor? w1_up=None, Tensor? b1_up=None, Tensor? w1_up_main_grad=None) -> "
      "(Tensor o, Tensor counts, Tensor preact, Tensor routing)");
  library.def(
      "routed_backward(Tensor dout, Tensor x, Tensor w1, Tensor w2, Tensor? b2, Tensor preact, "
      "Tensor routing, str layer, "
      "Tensor(a!)? w1_main_grad=None, Tensor(b!)? w2_main_grad=None, "
      "Tensor(c!)? dpreact=None, bool wants_dx=True, bool wants_dw1=True, bool wants_dw2=True, "
      "Tensor? w1_up=None, Tensor(d!)? w1_up_main_grad=None, bool wants_dw1_up=True, "
      "Tensor? b1=None, Tensor? b1_up=None) -> "
      "(Tensor dx, Tensor dscores, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2, "
      "Tensor dw1_up, Tensor db1_up)");
  library.def(
      "ids_forward(Tensor x, Tensor ids, Tensor weights, "
      "Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str layer, "
      "Tensor? w1_main_grad=None, Tensor? w2_main_grad=None, "
      "Tensor? w1_up=None, Tensor? b1_up=None, Tensor? w1_up_main_grad=None) -> "
      "(Tensor o, Tensor counts, Tensor preact, Tensor routing)");
  library.def(
      "ids_routing(Tensor x, Tensor ids, Tensor weights, int experts, str layer) -> Tensor "
      "routing");
  library.def(
      "ids_experts_forward(Tensor x, Tensor ids, Tensor weights, Tensor routing, Tensor w1, "
      "Tensor? b1, Tensor w2, Tensor? b2, str layer, Tensor? w1_up=None, Tensor? b1_up=None) -> "
      "(Tensor o, Tensor preact)");
  library.def(
      "ids_backward(Tensor dout, Tensor x, int top_k, "
      "Tensor w1, Tensor w2, Tensor? b2, Tensor preact, Tensor routing, str layer, "
      "Tensor(a!)? w1_main_grad=None, Tensor(b!)? w2_main_grad=None, "
      "Tensor(c!)? dpreact=None, bool wants_dx=True, bool wants_dw1=True, bool wants_dw2=True, "
      "Tensor? w1_up=None, Tensor(d!)? w1_up_main_grad=None, bool wants_dw1_up=True, "
      "Tensor? b1=None, Tensor? b1_up=None) -> "
      "(Tensor dx, Tensor dweights, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2, "
      "Tensor dw1_up, Tensor db1_up)");
  library.def(
      "up_proj_wgrad(Tensor x, Tensor dpreact, int top_k, Tensor w1, Tensor w2, Tensor routing, "
      "str layer, Tensor? w1_up=None, bool wants_dw1=True, bool wants_dw1_up=True) -> "
      "(Tensor dw1, Tensor dw1_up)");
  library.def(
      "logits_forward(Tensor x, Tensor logits, Tensor? ids, "
      "Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str layer, "
      "Tensor? w1_main_grad=None, Tensor? w2_main_grad=None, "
      "Tensor? w1_up=None, Tensor? b1_up=None, Tensor? w1_up_main_grad=None, "
      "Tensor? selection_bias=None, Tensor? expert_scale=None, Tensor? draws=None) -> "
      "(Tensor o, Tensor counts, Tensor preact, Tensor routing)");
  library.def(
      "logits_backward(Tensor dout, Tensor x, Tensor? logits, bool has_ids, "
      "Tensor w1, Tensor w2, Tensor? b2, Tensor preact, Tensor routing, str layer, "
      "Tensor(a!)? w1_main_grad=None, Tensor(b!)? w2_main_grad=None, "
      "Tensor(c!)? dpreact=None, bool wants_dx=True, bool wants_dw1=True, bool wants_dw2=True, "
      "Tensor? w1_up=None, Tensor(d!)? w1_up_main_grad=None, bool wants_dw1_up=True, "
      "Tensor? expert_scale=None, "
      "Tensor? b1=None, Tensor? b1_up=None) -> "
      "(Tensor dx, Tensor dlogits, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2, "
      "Tensor dw1_up, Tensor db1_up, Tensor dexpert_scale)");
  library.def(
      "grouped_forward(Tensor rows, Tensor? counts, Tensor? offsets, Tensor? scores, "
      "Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str layer, "
      "Tensor? w1_main_grad=None, Tensor? w2_main_grad=None, "
      "Tensor? w1_up=None, Tensor? b1_up=None, Tensor? w1_up_main_grad=None, "
      "Tensor? dx_out=None) -> (Tensor out, Tensor preact, Tensor segments)");
  library.def(
      "grouped_forward_out(Tensor(a!) out, Tensor rows, Tensor? counts, Tensor? offsets, Tensor? "
      "scores, "
      "Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str layer, "
      "Tensor? w1_main_grad=None, Tensor? w2_main_grad=None, "
      "Tensor? w1_up=None, Tensor? b1_up=None, Tensor? w1_up_main_grad=None, "
      "Tensor? dx_out=None) -> (Tensor preact, Tensor segments)");
  library.def(
      "grouped_backward(Tensor dout, Tensor rows, Tensor? scores, Tensor w1, Tensor w2, "
      "Tensor? b2, Tensor preact, Tensor segments, str layer, "
      "Tensor(a!)? w1_main_grad=None, Tensor(b!)? w2_main_grad=None, "
      "Tensor(c!)? dpreact=None, bool wants_dx=True, bool wants_dw1=True, bool wants_dw2=True, "
      "Tensor? w1_up=None, Tensor(d!)? w1_up_main_grad=None, bool wants_dw1_up=True, "
      "Tensor(e!)? dx_out=None, "
      "Tensor? b1=None, Tensor? b1_up=None) -> "
      "(Tensor dx, Tensor dscores, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2, "
      "Tensor dw1_up, Tensor db1_up)");
  library.def(
      "aux_loss(Tensor logits, Tensor? counts, str loss='balance', str score='softmax', "
      "Tensor? token_mask=None) -> Tensor");
  library.def(
      "aux_loss_backward(Tensor dloss, Tensor logits, Tensor? counts, str loss='balance', "
      "str score='softmax', Tensor? token_mask=None) -> Tensor");
  library.def(
      "top_k(Tensor logits, str layer, Tensor? selection_bias=None, Tensor? expert_scale=None) -> "
      "(Tensor scores, Tensor ids)");
  library.def(
      "token_rounding(Tensor logits, Tensor? draws, str layer) -> "
      "(Tensor scores, Tensor token_ids, Tensor expert_ids, Tensor counts, Tensor frequency)");
  library.def(
      "token_rounding_backward(Tensor dscores, Tensor logits, Tensor token_ids, "
      "Tensor expert_ids, str layer) -> Tensor");
  library.def("count_cumsum(Tensor ids, int experts) -> (Tensor counts, Tensor cumsum)");
  library.def(
      "token_dispatch(Tensor ids, Tensor scores, int experts, int ranks, bool packed) -> (Tensor "
      "numbers, Tensor row_tokens, Tensor choices, Tensor token_rows, Tensor score_places)");
  library.def("send_rows(Tensor x, Tensor row_tokens, Tensor counts, Tensor to) -> ()");
  library.def("combine(Tensor rows, Tensor slot_rows) -> Tensor");
  library.def("info() -> str");
  library.def("build_version() -> str");
}

namespace {

// One implementation: tensors say where it runs.
void implement(torch::stable::detail::StableLibrary& library) {
  using namespace sonicmoe;  // NOLINT: shorter
  library.impl("layer_forward", TORCH_BOX(&python::layer_forward));
  library.impl("layer_backward", TORCH_BOX(&python::layer_backward));
  library.impl("routed_forward", TORCH_BOX(&python::routed_forward));
  library.impl("routed_backward", TORCH_BOX(&python::routed_backward));
  library.impl("ids_forward", TORCH_BOX(&python::ids_forward));
  library.impl("ids_routing", TORCH_BOX(&python::ids_routing));
  library.impl("ids_experts_forward", TORCH_BOX(&python::ids_experts_forward));
  library.impl("ids_backward", TORCH_BOX(&python::ids_backward));
  library.impl("up_proj_wgrad", TORCH_BOX(&python::up_proj_wgrad));
  library.impl("logits_forward", TORCH_BOX(&python::logits_forward));
  library.impl("logits_backward", TORCH_BOX(&python::logits_backward));
  library.impl("grouped_forward", TORCH_BOX(&python::grouped_forward));
  library.impl("grouped_forward_out", TORCH_BOX(&python::grouped_forward_out));
  library.impl("grouped_backward", TORCH_BOX(&python::grouped_backward));
  library.impl("aux_loss", TORCH_BOX(&python::aux_loss));
  library.impl("aux_loss_backward", TORCH_BOX(&python::aux_loss_backward));
  library.impl("top_k", TORCH_BOX(&python::top_k));
  library.impl("token_rounding", TORCH_BOX(&python::token_rounding));
  library.impl("token_rounding_backward", TORCH_BOX(&python::token_rounding_backward));
  library.impl("count_cumsum", TORCH_BOX(&python::count_cumsum));
  library.impl("token_dispatch", TORCH_BOX(&python::token_dispatch));
  library.impl("send_rows", TORCH_BOX(&python::send_rows));
  library.impl("combine", TORCH_BOX(&python::combine));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sonicmoe, CPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(sonicmoe, CUDA, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(sonicmoe, CompositeExplicitAutograd, library) {
  library.impl("info", TORCH_BOX(&sonicmoe::python::info));
  library.impl("build_version", TORCH_BOX(&sonicmoe::python::build_version));
}
