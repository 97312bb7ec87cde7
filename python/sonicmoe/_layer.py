"""The layer on weights as they are stored, (E, out, in). `reference.py` has the same functions."""

from collections.abc import Callable
from typing import Any

import torch

from . import _check, _ops
from ._autocast import autocast
from .enums import ActivationType


def _keeps_nothing(is_inference_mode: bool, *tensors: torch.Tensor | None) -> bool:
    """Whether no backward can follow, so that nothing need be kept for it."""
    if is_inference_mode or not torch.is_grad_enabled():
        return True
    return not any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _expert_options(
    activation: ActivationType | str, layout: str, inference: bool
) -> dict[str, str | bool]:
    text = activation.value if isinstance(activation, ActivationType) else activation
    return {"activation": text, "w1_layout": layout, "inference": inference}


def topk_layer(
    x: torch.Tensor,
    router_w: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    top_k: int,
    activation: ActivationType | str,
    is_inference_mode: bool,
    softmax_over_topk: bool,
    norm_topk_probs: bool,
    layout: str,
    w1_main_grad: torch.Tensor | None = None,
    w2_main_grad: torch.Tensor | None = None,
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
    w1_up_main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o (T, d), logits (T, E) and counts (E) int32."""
    _ops.require()
    _check.integer("K", top_k)
    _check.tensors(x=x, router_w=router_w, w1=w1, b1=b1, w2=w2, b2=b2, b1_up=b1_up)
    x, router_w, w1, b1, w2, b2, w1_up, b1_up = autocast(
        x, router_w, w1, b1, w2, b2, w1_up, b1_up
    )
    _check.alike(x, router_w=router_w, w1=w1, b1=b1, w2=w2, b2=b2, w1_up=w1_up, b1_up=b1_up)
    inference = _keeps_nothing(is_inference_mode, x, router_w, w1, b1, w2, b2, w1_up, b1_up)
    if inference:
        w1_main_grad = w2_main_grad = w1_up_main_grad = None
    _check.main_grads(
        ("w1", w1, w1_main_grad), ("w1_up", w1_up, w1_up_main_grad), ("w2", w2, w2_main_grad)
    )
    layer = _ops.layer_text(
        top_k=int(top_k),
        **_ops.router_options(softmax_over_topk, norm_topk_probs),
        **_expert_options(activation, layout, inference),
    )
    with torch.set_grad_enabled(not inference):
        o, logits, counts, _, _ = _ops.layer_forward(
            x.contiguous(),
            router_w,
            w1,
            b1,
            w2,
            b2,
            layer,
            w1_main_grad,
            w2_main_grad,
            w1_up,
            b1_up,
            w1_up_main_grad,
        )
    return o, logits, counts


def routed_layer(
    x: torch.Tensor,
    scores: torch.Tensor,
    token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: ActivationType | str,
    is_inference_mode: bool,
    layout: str,
    w1_main_grad: torch.Tensor | None = None,
    w2_main_grad: torch.Tensor | None = None,
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
    w1_up_main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (T, d) and counts (E) int32 of lists of length L."""
    _ops.require()
    _check.tensors(x=x, w1=w1, b1=b1, w2=w2, b2=b2, b1_up=b1_up)
    _check.scores("router_scores", scores)
    _check.ids("token_indices", token_ids)
    _check.ids("expert_indices", expert_ids)
    _check.on_device("router_scores", scores, x.device)
    _check.on_device("token_indices", token_ids, x.device)
    _check.on_device("expert_indices", expert_ids, x.device)
    return _given_layer(
        _ops.routed_forward,
        x,
        (scores.float().contiguous(), int32(token_ids), int32(expert_ids)),
        {},
        w1,
        b1,
        w2,
        b2,
        activation,
        is_inference_mode,
        layout,
        w1_main_grad,
        w2_main_grad,
        w1_up,
        b1_up,
        w1_up_main_grad,
    )


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (T, d) and counts (E) int32 of ids and weights (T, K). `others` as _given_layer has them,
    from w1 on."""
    _ops.require()
    _check.tensors(x=x)
    _check.ids("ids", ids)
    _check.scores("weights", weights)
    _check.on_device("ids", ids, x.device)
    _check.on_device("weights", weights, x.device)
    given = int32(ids), weights.float().contiguous()
    return _given_layer(_ops.ids_forward, x, given, {}, *others)


def experts_from_logits(
    x: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    top_k: int,
    softmax_over_topk: bool,
    norm_topk_probs: bool,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of logits (T, E), with ids (T, K) or without."""
    _ops.require()
    _check.integer("K", top_k)
    _check.tensors(x=x, logits=logits)
    if ids is not None:
        _check.ids("ids", ids)
        _check.on_device("ids", ids, x.device)
        ids = int32(ids)
    _check.alike(x, logits=logits)
    x, logits = autocast(x, logits)
    options = {"top_k": int(top_k)} | _ops.router_options(softmax_over_topk, norm_topk_probs)
    given = logits.contiguous(), ids
    return _given_layer(_ops.logits_forward, x, given, options, *others)


def _given_layer(
    operator: Callable,
    x: torch.Tensor,
    given: tuple[torch.Tensor | None, ...],
    router_options: dict[str, int | str | bool],
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: ActivationType | str,
    is_inference_mode: bool,
    layout: str,
    w1_main_grad: torch.Tensor | None = None,
    w2_main_grad: torch.Tensor | None = None,
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
    w1_up_main_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An operator whose caller routes: `given` are its arguments behind x."""
    _check.tensors(w1=w1, b1=b1, w2=w2, b2=b2, b1_up=b1_up)
    x, w1, b1, w2, b2, w1_up, b1_up = autocast(x, w1, b1, w2, b2, w1_up, b1_up)
    _check.alike(x, w1=w1, b1=b1, w2=w2, b2=b2, w1_up=w1_up, b1_up=b1_up)
    inference = _keeps_nothing(is_inference_mode, x, *given, w1, b1, w2, b2, w1_up, b1_up)
    if inference:
        w1_main_grad = w2_main_grad = w1_up_main_grad = None
    _check.main_grads(
        ("w1", w1, w1_main_grad), ("w1_up", w1_up, w1_up_main_grad), ("w2", w2, w2_main_grad)
    )
    layer = _ops.layer_text(**router_options, **_expert_options(activation, layout, inference))
    with torch.set_grad_enabled(not inference):
        o, counts, _, _ = operator(
            x.contiguous(),
            *given,
            w1,
            b1,
            w2,
            b2,
            layer,
            w1_main_grad,
            w2_main_grad,
            w1_up,
            b1_up,
            w1_up_main_grad,
        )
    return o, counts


def grouped_experts(
    rows: torch.Tensor,
    counts: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scores: torch.Tensor | None,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: ActivationType,
    layout: str,
    score_at: str,
    zero_tail: bool,
    expected_rows: int,
    w1_main_grad: torch.Tensor | None = None,
    w2_main_grad: torch.Tensor | None = None,
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
    w1_up_main_grad: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    dx_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y (R, d) of rows (R, d) in expert order."""
    _ops.require()
    _check.tensors(rows=rows, w1=w1, b1=b1, w2=w2, b2=b2, b1_up=b1_up)
    _check.segments(counts, offsets, rows.device)
    if scores is not None:
        _check.scores("scores", scores)
        _check.on_device("scores", scores, rows.device, "rows")
    rows, w1, b1, w2, b2, w1_up, b1_up = autocast(rows, w1, b1, w2, b2, w1_up, b1_up)
    _check.alike(rows, "rows", w1=w1, b1=b1, w2=w2, b2=b2, w1_up=w1_up, b1_up=b1_up)
    _check.memory("out", out, rows)
    _check.memory("dx_out", dx_out, rows)
    inference = _keeps_nothing(False, rows, scores, w1, b1, w2, b2, w1_up, b1_up)
    if inference:
        w1_main_grad = w2_main_grad = w1_up_main_grad = dx_out = None
    _check.main_grads(
        ("w1", w1, w1_main_grad), ("w1_up", w1_up, w1_up_main_grad), ("w2", w2, w2_main_grad)
    )
    layer = _ops.layer_text(
        **_expert_options(activation, layout, inference),
        score_at="none" if scores is None else score_at,
        zero_tail=zero_tail,
        expected_rows=expected_rows,
    )
    if counts is not None and offsets is not None and counts.dtype != offsets.dtype:
        counts, offsets = counts.long(), offsets.long()
    with torch.set_grad_enabled(not inference):
        return _ops.grouped_forward(
            rows.contiguous(),
            None if counts is None else counts.contiguous(),
            None if offsets is None else offsets.contiguous(),
            None if scores is None else scores.float().contiguous(),
            w1,
            b1,
            w2,
            b2,
            layer,
            w1_main_grad,
            w2_main_grad,
            w1_up,
            b1_up,
            w1_up_main_grad,
            dx_out,
            out=out,
        )


def token_rounding(
    logits: torch.Tensor,
    top_k: int,
    rule: str,
    tile: int,
    softmax_over_topk: bool,
    norm_topk_probs: bool,
    draws: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Lists scores, token ids, expert ids; counts (E) after rounding and before."""
    _ops.require()
    layer = _ops.layer_text(
        top_k=int(top_k),
        **_ops.router_options(softmax_over_topk, norm_topk_probs),
        rounding_tile=int(tile),
        rounding_rule=_check.rounding_rule("rule", rule),
    )
    return _ops.token_rounding(logits.contiguous(), draws, layer)


def switch_loss(logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The load-balancing loss () fp32 of logits (T, E) and counts (E) int32."""
    _ops.require()
    return _ops.aux_loss(logits.contiguous(), counts.contiguous())


def int32(ids: torch.Tensor) -> torch.Tensor:
    """Ids as int32; larger ones become the largest, which is as far out of range as they are."""
    if ids.dtype == torch.int64:
        limits = torch.iinfo(torch.int32)
        ids = ids.clamp(limits.min, limits.max).int()
    return ids.contiguous()
