#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "common.h"

/// The operators, as registered in library.cpp. `layer` is the text form of a description (layer.h)
/// without what the tensors say: "top_k=8 activation=geglu inference=true". d hidden, n
/// intermediate, W = 2n with a gate else n, R = T*K rows (L for lists). All tensors are contiguous
/// and, unless said otherwise, of x's dtype.
namespace sonicmoe::python {

/// What a backward returns: two gradients that its own comment names, then dw1, db1, dw2, db2,
/// dw1_up and db1_up.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

/// dx, drouter_w, the gradients of weights and biases, dlogit_bias, dexpert_scale.
using LayerGradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
/// dx, dlogits, the gradients of weights and biases, dexpert_scale.
using LogitsGradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

/// o (T, d), logits (T, E), counts (E) int32, and for backward preact (R, W) and the opaque
/// routing block (int32). The last two are empty if `inference`, and preact is (R, 0) with
/// recompute=preact. The main_grads are those of backward, which autograd takes from here; they are
/// checked and left alone. With w1_layout=separate w1 and b1 are the gate (E, n, d) and (E, n),
/// w1_up and b1_up the up rows. Transposed layouts have w1 (E, d, W) and w2 (E, n, d). logit_bias,
/// selection_bias and expert_scale (E) float32 belong to the options of those names in `layer`.
/// router_w may be float32 beside a 16-bit x: then the logits are float32 too, as they are with
/// f32_logits. With rounding_tile the layer rounds, R is rounded_capacity(), and counts are those
/// before rounding; draws: seed and offset, (2) int64.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> layer_forward(
    Tensor x, Tensor router_w, Tensor w1, OptionalTensor b1, Tensor w2, OptionalTensor b2,
    std::string layer, OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
    OptionalTensor w1_up, OptionalTensor b1_up, OptionalTensor w1_up_main_grad,
    OptionalTensor logit_bias, OptionalTensor selection_bias, OptionalTensor expert_scale,
    OptionalTensor draws);

/// dx, drouter_w, dw1, db1, dw2, db2, dw1_up, db1_up, dlogit_bias, dexpert_scale. The bias
/// gradients are empty without biases, those of `up` without w1_up, and the last two without their
/// options. main_grads are float32 and shaped like the weights: the weights' gradients are added to
/// them and come back empty. One may be missing if its gradient is not wanted. dpreact (R, W),
/// optional: memory for dH, which may be preact itself. b1 and b1_up are there with biases and
/// recompute=preact alone. What is not wanted is not computed, not added, and comes back empty. Of
/// dw1 and dw1_up the library computes both or neither: one alone costs as much time as both, and
/// memory for the other one.
LayerGradients layer_backward(Tensor dout, OptionalTensor dlogits, Tensor x, Tensor router_w,
                              Tensor w1, Tensor w2, OptionalTensor b2, OptionalTensor logits,
                              Tensor preact, Tensor routing, std::string layer,
                              OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
                              OptionalTensor dpreact, bool wants_dx, bool wants_drouter_w,
                              bool wants_dw1, bool wants_dw2, OptionalTensor w1_up,
                              OptionalTensor w1_up_main_grad, bool wants_dw1_up,
                              OptionalTensor expert_scale, bool wants_dlogit_bias,
                              OptionalTensor b1, OptionalTensor b1_up);

/// Routing given as lists: scores (L) float32, token_ids and expert_ids (L) int32.
/// o (T, d), counts (E) int32, preact (L, W), routing.
std::tuple<Tensor, Tensor, Tensor, Tensor> routed_forward(
    Tensor x, Tensor scores, Tensor token_ids, Tensor expert_ids, Tensor w1, OptionalTensor b1,
    Tensor w2, OptionalTensor b2, std::string layer, OptionalTensor w1_main_grad,
    OptionalTensor w2_main_grad, OptionalTensor w1_up, OptionalTensor b1_up,
    OptionalTensor w1_up_main_grad);

/// dx, dscores (L) float32, and the gradients of weights and biases as above.
Gradients routed_backward(Tensor dout, Tensor x, Tensor w1, Tensor w2, OptionalTensor b2,
                          Tensor preact, Tensor routing, std::string layer,
                          OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
                          OptionalTensor dpreact, bool wants_dx, bool wants_dw1, bool wants_dw2,
                          OptionalTensor w1_up, OptionalTensor w1_up_main_grad, bool wants_dw1_up,
                          OptionalTensor b1, OptionalTensor b1_up);

/// The caller's router has chosen: ids (T, K) int32, weights (T, K) float32. K is a size of ids.
/// o (T, d), counts (E) int32, preact (R, W), routing.
std::tuple<Tensor, Tensor, Tensor, Tensor> ids_forward(
    Tensor x, Tensor ids, Tensor weights, Tensor w1, OptionalTensor b1, Tensor w2,
    OptionalTensor b2, std::string layer, OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
    OptionalTensor w1_up, OptionalTensor b1_up, OptionalTensor w1_up_main_grad);

/// The first part of ids_forward: a routing block of ids among so many experts, which takes T and d
/// of x (T, d) and reads no row. `layer` as there; if `inference`, the other part does it all, and
/// the block is empty.
Tensor ids_routing(Tensor x, Tensor ids, Tensor weights, std::int64_t experts, std::string layer);
/// The other part: out (T, d) and preact (R, W). max_rows of `layer` is at least the number of ids
/// in [0, E), or 0. The CPU checks that; on CUDA it is the caller's promise, else H overflows.
std::tuple<Tensor, Tensor> ids_experts_forward(Tensor x, Tensor ids, Tensor weights, Tensor routing,
                                               Tensor w1, OptionalTensor b1, Tensor w2,
                                               OptionalTensor b2, std::string layer,
                                               OptionalTensor w1_up, OptionalTensor b1_up);

/// dx, dweights (T, K) float32, and the gradients of weights and biases as above.
Gradients ids_backward(Tensor dout, Tensor x, std::int64_t top_k, Tensor w1, Tensor w2,
                       OptionalTensor b2, Tensor preact, Tensor routing, std::string layer,
                       OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
                       OptionalTensor dpreact, bool wants_dx, bool wants_dw1, bool wants_dw2,
                       OptionalTensor w1_up, OptionalTensor w1_up_main_grad, bool wants_dw1_up,
                       OptionalTensor b1, OptionalTensor b1_up);

/// dw1 and dw1_up alone, of dpreact as ids_backward has written it, and the same bits. So what
/// needs dx alone can run while W1's gradient is computed.
std::tuple<Tensor, Tensor> up_proj_wgrad(Tensor x, Tensor dpreact, std::int64_t top_k, Tensor w1,
                                         Tensor w2, Tensor routing, std::string layer,
                                         OptionalTensor w1_up, bool wants_dw1, bool wants_dw1_up);

/// Logits (T, E) of the caller, float32 with f32_logits; ids (T, K) int32 too, unless the layer is
/// to choose. `layer` has the router's options, with top_k. o (T, d), counts (E) int32, preact (R,
/// W), routing. rounding_tile and draws as above.
std::tuple<Tensor, Tensor, Tensor, Tensor> logits_forward(
    Tensor x, Tensor logits, OptionalTensor ids, Tensor w1, OptionalTensor b1, Tensor w2,
    OptionalTensor b2, std::string layer, OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
    OptionalTensor w1_up, OptionalTensor b1_up, OptionalTensor w1_up_main_grad,
    OptionalTensor selection_bias, OptionalTensor expert_scale, OptionalTensor draws);

/// dx, dlogits (T, E), the gradients of weights and biases as above, and dexpert_scale. logits:
/// where LayerDesc::needs_logits(). has_ids: whether forward got ids.
LogitsGradients logits_backward(Tensor dout, Tensor x, OptionalTensor logits, bool has_ids,
                                Tensor w1, Tensor w2, OptionalTensor b2, Tensor preact,
                                Tensor routing, std::string layer, OptionalTensor w1_main_grad,
                                OptionalTensor w2_main_grad, OptionalTensor dpreact, bool wants_dx,
                                bool wants_dw1, bool wants_dw2, OptionalTensor w1_up,
                                OptionalTensor w1_up_main_grad, bool wants_dw1_up,
                                OptionalTensor expert_scale, OptionalTensor b1,
                                OptionalTensor b1_up);

/// The experts alone on rows (R, d) that are in expert order. counts (E), offsets (E+1) or both are
/// int32 or int64, as ExpertsForwardArgs says. scores (R) float32 belong to a score_at of `layer`
/// that is not none. out (R, d), preact (R, W) and segments (3E) int32; preact is empty if
/// `inference`. dx_out is backward's, as the main_grads are. On the CPU bad counts are refused.
std::tuple<Tensor, Tensor, Tensor> grouped_forward(
    Tensor rows, OptionalTensor counts, OptionalTensor offsets, OptionalTensor scores, Tensor w1,
    OptionalTensor b1, Tensor w2, OptionalTensor b2, std::string layer, OptionalTensor w1_main_grad,
    OptionalTensor w2_main_grad, OptionalTensor w1_up, OptionalTensor b1_up,
    OptionalTensor w1_up_main_grad, OptionalTensor dx_out);

/// The same into `out` (R, d), which starts at a multiple of 16 bytes: preact and segments.
std::tuple<Tensor, Tensor> grouped_forward_out(
    Tensor out, Tensor rows, OptionalTensor counts, OptionalTensor offsets, OptionalTensor scores,
    Tensor w1, OptionalTensor b1, Tensor w2, OptionalTensor b2, std::string layer,
    OptionalTensor w1_main_grad, OptionalTensor w2_main_grad, OptionalTensor w1_up,
    OptionalTensor b1_up, OptionalTensor w1_up_main_grad, OptionalTensor dx_out);

/// dx, dscores (R) float32, empty without scores, and the gradients of weights and biases as above.
/// With dx_out (R, d) at a multiple of 16 bytes dx is written there and comes back empty.
Gradients grouped_backward(Tensor dout, Tensor rows, OptionalTensor scores, Tensor w1, Tensor w2,
                           OptionalTensor b2, Tensor preact, Tensor segments, std::string layer,
                           OptionalTensor w1_main_grad, OptionalTensor w2_main_grad,
                           OptionalTensor dpreact, bool wants_dx, bool wants_dw1, bool wants_dw2,
                           OptionalTensor w1_up, OptionalTensor w1_up_main_grad, bool wants_dw1_up,
                           OptionalTensor dx_out, OptionalTensor b1, OptionalTensor b1_up);

/// A loss () float32 on logits (T, E): AuxLossArgs (ops.h) has the formulas. `loss`: "balance", of
/// counts (B, E) int32, or (E) for one sequence; or "z", which reads none. `score`: the name of a
/// RouterScore. token_mask (T) uint8: 0 leaves a token out.
Tensor aux_loss(Tensor logits, OptionalTensor counts, std::string loss, std::string score,
                OptionalTensor token_mask);
/// dlogits (T, E) from the loss's gradient () float32.
Tensor aux_loss_backward(Tensor dloss, Tensor logits, OptionalTensor counts, std::string loss,
                         std::string score, OptionalTensor token_mask);

/// Scores (T, K) float32 and expert ids (T, K) int32 of logits (T, E).
std::tuple<Tensor, Tensor> top_k(Tensor logits, std::string layer, OptionalTensor selection_bias,
                                 OptionalTensor expert_scale);

/// How often each id in [0, E) occurs in ids (S) int32, and the inclusive sums: (E) int32 both.
std::tuple<Tensor, Tensor> count_cumsum(Tensor ids, std::int64_t experts);

/// Which tokens go to which ranks, of ids (T, K) int32 and scores (T, K) float32; `experts` of each
/// rank. numbers (1, 2P+2), row_tokens (R), choices (R, 2K'), token_rows (T, P) and score_places
/// (T, K), all int32: TokenDispatchArgs (token_dispatch.h) says what is in them.
using Dispatch = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
Dispatch token_dispatch(Tensor ids, Tensor scores, std::int64_t experts, std::int64_t ranks,
                        bool packed);

/// Writes rows of x (T, d) to the ranks whose addresses `to` (P) int64 has, in memory of the host:
/// SendRowsArgs (token_dispatch.h). counts (P) int32.
void send_rows(Tensor x, Tensor row_tokens, Tensor counts, Tensor to);

/// The sums (T, d) of each token's rows (R, d), in fp32 with one rounding and in the order of
/// slot_rows (T, K) int32. Its entries are rows, or -1 for none, and are not checked.
Tensor combine(Tensor rows, Tensor slot_rows);

/// Token rounding of logits (T, E): lists scores (C) float32, token_ids and expert_ids (C) int32, C
/// the capacity; counts after and before rounding (E) int32. draws: seed and offset, (2) int64.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> token_rounding(Tensor logits,
                                                                  OptionalTensor draws,
                                                                  std::string layer);
/// dlogits (T, E) from the lists and their scores' gradients.
Tensor token_rounding_backward(Tensor dscores, Tensor logits, Tensor token_ids, Tensor expert_ids,
                               std::string layer);

/// Devices and kernels of this build, as JSON: {"devices": [...], "kernels": [...]} with the fields
/// of DeviceInfo and KernelInfo (info.h).
std::string info();

/// The package's version: `0.1.0`, or `0.1.0+cpu` for a build without CUDA kernels. Asks no device.
std::string build_version();

}  // namespace sonicmoe::python
