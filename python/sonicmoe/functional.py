"""The functional interface, call-compatible with the original SonicMoE.

Symbols: T tokens, H hidden size, I intermediate size, E experts, K experts a token, L list length.
Weights are the permuted views that the original takes: w1 (2I, H, E), or (I, H, E) for an
activation without a gate, and w2 (H, I, E), both `.permute(1, 2, 0)` of contiguous tensors with
the experts first. `stream_id` is accepted and the current stream is used.
"""

import torch

from . import _check, _layer, _ops
from .enums import ActivationType


def moe_TC_softmax_topk_layer(
    x: torch.Tensor,
    router_w: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    K: int,
    stream_id: int = 0,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    is_softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    concat_layout: bool = False,
    *,
    w1_main_grad: torch.Tensor | None = None,
    w2_main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each token picks its K experts: output (T, H), router logits (T, E), frequency (E) int32.

    x (T, H), router_w (E, H), b1 (E, 2I or I), b2 (E, H); biases both or none. Gradients reach all
    of them, also from a loss on the logits. See :class:`sonicmoe.MoE` for the options.
    """
    return _layer.topk_layer(
        x,
        router_w,
        _check.expert_weights("w1", w1, "(2I or I, H, E)"),
        b1,
        _check.expert_weights("w2", w2, "(H, I, E)"),
        b2,
        K,
        activation_type,
        is_inference_mode_enabled,
        is_softmax_over_topk,
        norm_topk_probs,
        concat_layout,
        _check.expert_weights("w1_main_grad", w1_main_grad, "(2I or I, H, E)"),
        _check.expert_weights("w2_main_grad", w2_main_grad, "(H, I, E)"),
    )


def moe_general_routing_inputs(
    x: torch.Tensor,
    router_scores: torch.Tensor,
    token_indices: torch.Tensor,
    expert_indices: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    E: int | None = None,
    stream_id: int = 0,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
    *,
    w1_main_grad: torch.Tensor | None = None,
    w2_main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller routes, with lists of length L: output (T, H) and frequency (E) int32.

    Token `token_indices[i]` goes to expert `expert_indices[i]` with weight `router_scores[i]`
    (any float dtype, raised to fp32; differentiable). Lists may be in any order; duplicates add;
    an expert index of E or more is a sentinel that contributes nothing. `E` may be left out.
    `w1_main_grad` and `w2_main_grad` as above.
    """
    w1 = _check.expert_weights("w1", w1, "(2I or I, H, E)")
    w2 = _check.expert_weights("w2", w2, "(H, I, E)")
    if E is not None:
        _check.integer("E", E)
        if E != w2.shape[0]:
            raise ValueError(f"E: got {E!r}, allowed: {w2.shape[0]}, the last dimension of w2")
    return _layer.routed_layer(
        x,
        router_scores,
        token_indices,
        expert_indices,
        w1,
        b1,
        w2,
        b2,
        activation_type,
        is_inference_mode_enabled,
        concat_layout,
        _check.expert_weights("w1_main_grad", w1_main_grad, "(2I or I, H, E)"),
        _check.expert_weights("w2_main_grad", w2_main_grad, "(H, I, E)"),
    )


def token_rounding(
    logits: torch.Tensor,
    K: int,
    *,
    rule: str = "nr",
    tile: int = 128,
    softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds each expert's token count to a multiple of `tile`, for training.

    Router logits (T, E) -> scores fp32, token ids (ascending, then by expert), expert ids, lists of
    one static length for :func:`moe_general_routing_inputs`, padded with sentinels; and the counts
    (E) int32 after rounding. Gradients reach the logits through kept and added entries.

    `rule`: "nr" nearest, ties down; "sr" up with probability (f - floor) / tile; "nr_s" up with the
    share of score that rounding down would drop; "balance" nearest with the running error; "up";
    "down". `seed` and `offset`, 64 bits each, fix the draws of "sr" and "nr_s": move `offset` on at
    every step.
    """
    _check.logits("logits", logits)
    _check.integer("K", K)
    _check.integer("tile", tile)
    seed, offset = _check.word("seed", seed), _check.word("offset", offset)
    draws = None
    if rule in _check.DRAWING_RULES:  # made where the logits are: a copy from the host cannot be captured
        draws = torch.full((2,), seed, dtype=torch.int64, device=logits.device)
        draws[1:].fill_(offset)  # draws[1] = offset waits for the stream
    return _layer.token_rounding(
        logits, K, rule, tile, softmax_over_topk, norm_topk_probs, draws
    )[:4]


def switch_loss(router_logits: torch.Tensor, expert_frequency: torch.Tensor) -> torch.Tensor:
    """The load-balancing loss E * sum_e (P_e / sum P)(f_e / sum f), an fp32 scalar.

    P (E) is the sum over tokens of the softmax of the logits (T, E), f the frequency, without
    gradient. 0 without tokens.
    """
    _check.logits("router_logits", router_logits)
    _check.counts("expert_frequency", expert_frequency)
    return _layer.switch_loss(router_logits, expert_frequency)


def count_cumsum(
    x: torch.Tensor, E: int, do_cumsum: bool = True
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """How often each expert 0 .. E-1 occurs in x, int32 or int64 of any shape.

    Counts (E) int32 and their inclusive sums (E) int32, or the counts alone. Ids of E or more are
    sentinels, which are not counted.
    """
    _ops.require()
    _check.ids("x", x)
    _check.integer("E", E)
    counts, cumsum = torch.ops.sonicmoe.count_cumsum(_layer.int32(x).flatten(), E)
    return (counts, cumsum) if do_cumsum else counts
