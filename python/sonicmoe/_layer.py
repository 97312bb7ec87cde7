"""The layer on weights as they are stored: (E, out, in), or (E, in, out) in a transposed layout.

`reference.py` has the same functions.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import _check, _ops
from ._autocast import autocast, autocasts, to_fp32
from .enums import ActivationType
from .router import Rounding, Routing


def _keeps_nothing(is_inference_mode: bool, *tensors: torch.Tensor | None) -> bool:
    """Whether no backward can follow, so that nothing need be kept for it."""
    if is_inference_mode or not torch.is_grad_enabled():
        return True
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return False
    return True


def _run(operator: Callable, inference: bool, *inputs: Any, **named: Any) -> Any:
    """What the operator returns, without a history in inference mode."""
    if not inference:
        return operator(*inputs, **named)
    if torch.compiler.is_compiling():
        # A change of the grad mode would enter the graph, which torch.export could not load again.
        inputs = [i.detach() if isinstance(i, torch.Tensor) else i for i in inputs]
        return operator(*inputs, **named)
    if not torch.is_grad_enabled():
        return operator(*inputs, **named)
    with torch.no_grad():
        return operator(*inputs, **named)


class ExpertArgs(NamedTuple):
    """What each layer takes of its experts, as its last arguments. Weights are as they are stored;
    `w1_up`, `b1_up` and `w1_up_main_grad` belong to the layout "separate"."""

    w1: torch.Tensor
    b1: torch.Tensor | None
    w2: torch.Tensor
    b2: torch.Tensor | None
    activation: ActivationType | str
    is_inference_mode: bool
    layout: str
    w1_main_grad: torch.Tensor | None = None
    w2_main_grad: torch.Tensor | None = None
    w1_up: torch.Tensor | None = None
    b1_up: torch.Tensor | None = None
    w1_up_main_grad: torch.Tensor | None = None
    recompute: str = "none"

    def plain(self, x: torch.Tensor, or_fp32: torch.Tensor) -> bool:
        """Whether x, `or_fp32` and these need neither more checks nor a cast, as in most calls."""
        if self.w1 is None or self.w2 is None:
            return False
        of_experts = *self[:4], self.w1_up, self.b1_up
        return _check.plain_alike(x, or_fp32, *of_experts) and not autocasts(x)

    def checked(
        self,
        x: torch.Tensor,
        *others: torch.Tensor | None,
        text: str = "",
        x_name: str = "x",
        plain: bool | None = None,
    ) -> tuple[torch.Tensor, bool, tuple[torch.Tensor | str | None, ...]]:
        """x, cast by autocast; whether nothing is kept, for neither x nor these nor `others` can
        have a backward; and the operators' arguments from w1 on. `text`: what else the layer is
        told, and a space. `plain`: what plain() says, if it is known."""
        w1, b1, w2, b2, activation, inference, layout = self[:7]
        w1_grad, w2_grad, w1_up, b1_up, up_grad, recompute = self[7:]
        if not (self.plain(x, x) if plain is None else plain):
            _check.tensors(w1=w1, b1=b1, w2=w2, b2=b2, b1_up=b1_up)
            if autocasts(x):
                _check.autocast_dtype(x.device)
                x, w1, b1, w2, b2, w1_up, b1_up = autocast(x, w1, b1, w2, b2, w1_up, b1_up)
            _check.alike(x, x_name, w1=w1, b1=b1, w2=w2, b2=b2, w1_up=w1_up, b1_up=b1_up)
        inference = _keeps_nothing(inference, x, *others, w1, b1, w2, b2, w1_up, b1_up)
        if inference:
            w1_grad = w2_grad = up_grad = None
        elif w1_grad is not None or w2_grad is not None or up_grad is not None:
            _check.main_grads(("w1", w1, w1_grad), ("w1_up", w1_up, up_grad), ("w2", w2, w2_grad))
        kind = activation.value if isinstance(activation, ActivationType) else activation
        layer = (
            f"{text}activation={kind} w1_layout={layout} "
            f"inference={'true' if inference else 'false'} recompute={recompute}"
        )
        return x, inference, (w1, b1, w2, b2, layer, w1_grad, w2_grad, w1_up, b1_up, up_grad)


def topk_layer(
    x: torch.Tensor,
    router_w: torch.Tensor,
    top_k: int,
    routing: Routing,
    *of_experts: Any,
    rounding: Rounding | None = None,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o (T, d), logits (T, E) and counts (E) int32, those before rounding; `of_experts`, `named`:
    ExpertArgs."""
    _ops.require()
    experts, f32 = ExpertArgs(*of_experts, **named), routing.config.logits == "f32"
    plain = experts.plain(x, router_w)
    if not plain:
        _check.tensors(x=x, router_w=router_w)
    _chosen(top_k, router_w, 0)
    if not plain:
        if autocasts(x):
            f32 = f32 or to_fp32(x)
            (x,) = autocast(x)
            # It rounds no weight of a router whose logits are to be fp32.
            if not (f32 and router_w.dtype == torch.float32):
                (router_w,) = autocast(router_w)
        _check.alike_or_fp32(x, router_w=router_w)
    _check.router_tensors(x, routing)
    f32 = x.dtype != torch.float32 and (f32 or router_w.dtype == torch.float32)
    of_router = routing[1:]
    text, draws = _choosing(routing.text(True, f32), top_k, rounding)
    x, inference, of_operator = experts.checked(x, router_w, *of_router, text=text, plain=plain)
    inputs = x.contiguous(), router_w, *of_operator, *map(_contiguous, of_router), draws
    return _run(_ops.layer_forward, inference, *inputs)


def _chosen(top_k: int, tensor: torch.Tensor, experts: int) -> None:
    """Checks K of the experts that dimension `experts` of a matrix has; the library refuses what is
    no matrix."""
    of_matrix = tensor.dim() == 2
    _check.chosen("K", top_k, "E", tensor.shape[experts] if of_matrix else top_k)


def _choosing(
    router: str, top_k: int, rounding: Rounding | None
) -> tuple[str, torch.Tensor | None]:
    """The router's text with what it chooses, and the draws."""
    text = f"{router} top_k={int(top_k)} "
    if rounding is None:
        return text, None
    text += f"rounding_tile={rounding.tile} rounding_rule={rounding.rule} "
    return text, rounding.draws


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def routed_layer(
    x: torch.Tensor,
    scores: torch.Tensor,
    token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    *of_experts: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (T, d) and counts (E) int32 of lists of length L."""
    _ops.require()
    _check.tensors(x=x)
    _check.scores("router_scores", scores)
    _check.ids("token_indices", token_ids)
    _check.ids("expert_indices", expert_ids)
    _check.on_device("router_scores", scores, x.device)
    _check.on_device("token_indices", token_ids, x.device)
    _check.on_device("expert_indices", expert_ids, x.device)
    given = scores.float().contiguous(), int32(token_ids), int32(expert_ids)
    experts = ExpertArgs(*of_experts, **named)
    if torch.compiler.is_compiling():
        return _given_layer(_ops.routed_forward, x, given, experts)
    try:
        return _given_layer(_ops.routed_forward, x, given, experts)
    except ValueError as error:
        raise _of_lists(error, token_ids) from None


#: The operator's names of lists, and those of the caller.
_LISTS = {
    "scores": "router_scores",
    "token ids": "token_indices",
    "token_ids": "token_indices",
    "expert_ids": "expert_indices",
}


def _of_lists(error: ValueError, token_ids: torch.Tensor) -> Exception:
    """The error in the caller's names, with a token id as the caller gave it: see int32()."""
    text = str(error)
    if place := re.match(r"token ids: got -?\d+( at position (\d+))", text):
        given = int(token_ids[int(place[2])])
        error = ValueError(f"token ids: got {given}{place[1]}{text[place.end() :]}")
    return _check.renamed(error, _LISTS)


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *of_experts: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (T, d) and counts (E) int32 of ids and weights (T, K)."""
    _ops.require()
    _check.tensors(x=x)
    _check.ids("ids", ids)
    _check.scores("weights", weights)
    _check.on_device("ids", ids, x.device)
    _check.on_device("weights", weights, x.device)
    experts = ExpertArgs(*of_experts)
    if ids.dim() == 2 and isinstance(experts.w2, torch.Tensor) and experts.w2.dim() == 3:
        most = experts.w2.shape[0]
        if not 1 <= ids.shape[1] <= most:
            raise ValueError(
                f"ids: got shape {tuple(ids.shape)}, allowed: (T, K) with K from 1 to E ({most})"
            )
    given = int32(ids), weights.float().contiguous()
    return _given_layer(_ops.ids_forward, x, given, experts)


def logits_layer(
    x: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    top_k: int,
    routing: Routing,
    *of_experts: Any,
    rounding: Rounding | None = None,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (T, d) and counts (E) int32, those before rounding, of logits (T, E), with ids (T, K) or
    without."""
    _ops.require()
    _check.tensors(x=x, logits=logits)
    _chosen(top_k, logits, 1)
    if ids is not None:
        _check.ids("ids", ids)
        _check.on_device("ids", ids, x.device)
        ids = int32(ids)
    if logits.dtype == x.dtype:  # fp32 logits of a 16-bit x are to be fp32
        (logits,) = autocast(logits)
    (x,) = autocast(x)
    _check.alike_or_fp32(x, logits=logits)
    _check.router_tensors(x, routing)
    router = routing.text(ids is None, logits.dtype == torch.float32 != x.dtype)
    given = logits.contiguous(), ids
    text, draws = _choosing(router, top_k, rounding)
    of_router = _contiguous(routing.selection_bias), _contiguous(routing.expert_scale), draws
    experts = ExpertArgs(*of_experts, **named)
    return _given_layer(_ops.logits_forward, x, given, experts, of_router, text)


def _given_layer(
    operator: Callable,
    x: torch.Tensor,
    given: tuple[torch.Tensor | None, ...],
    experts: ExpertArgs,
    of_router: tuple[torch.Tensor | None, ...] = (),
    text: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """An operator whose caller routes: `given` are its arguments behind x, `of_router` the last."""
    x, inference, of_operator = experts.checked(x, *given, *of_router, text=text)
    return _run(operator, inference, x.contiguous(), *given, *of_operator, *of_router)


def grouped_experts(
    rows: torch.Tensor,
    counts: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scores: torch.Tensor | None,
    experts: ExpertArgs,
    *,
    score_at: str,
    zero_tail: bool,
    expected_rows: int,
    out: torch.Tensor | None,
    dx_out: torch.Tensor | None,
) -> torch.Tensor:
    """y (R, d) of rows (R, d) in expert order."""
    _ops.require()
    _check.tensors(rows=rows)
    _check.segments(counts, offsets, rows.device)
    if scores is not None:
        _check.scores("scores", scores)
        _check.on_device("scores", scores, rows.device, "rows")
    text = _ops.layer_text(
        score_at="none" if scores is None else score_at,
        zero_tail=zero_tail,
        expected_rows=expected_rows,
    )
    rows, inference, of_operator = experts.checked(rows, scores, text=f"{text} ", x_name="rows")
    _check.memory("out", out, rows)
    _check.memory("dx_out", dx_out, rows)
    if counts is not None and offsets is not None and counts.dtype != offsets.dtype:
        counts, offsets = counts.long(), offsets.long()
    return _run(
        _ops.grouped_forward,
        inference,
        rows.contiguous(),
        None if counts is None else counts.contiguous(),
        None if offsets is None else offsets.contiguous(),
        None if scores is None else scores.float().contiguous(),
        *of_operator,
        None if inference else dx_out,
        out=out,
    )


def top_k(
    logits: torch.Tensor,
    k: int,
    routing: Routing,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (T, K) fp32 and ids (T, K) int32 of logits (T, E), without a history."""
    _ops.require()
    _chosen(k, logits, 1)
    _check.router_tensors(logits, routing)
    layer = _ops.layer_text(routing.text(True, False), top_k=int(k))
    given = logits.detach().contiguous(), layer
    of_router = routing.selection_bias, routing.expert_scale
    detached = [None if t is None else t.detach().contiguous() for t in of_router]
    return torch.ops.sonicmoe.top_k(*given, *detached)


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
    _check.autocast_dtype(logits.device)
    _chosen(top_k, logits, 1)
    layer = _ops.layer_text(
        "",
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
