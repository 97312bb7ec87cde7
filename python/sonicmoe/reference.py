"""The layer in plain PyTorch operations, differentiated by autograd.

This is what `KernelBackendMoE.torch` runs, and what the kernels are tested against. It shares no
formula with them, runs on any device and in any floating type (fp64 too), and rounds to the
storage type at the same points: H, A, Y and the output once each, scores never.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from . import _check
from ._autocast import autocast
from .enums import ActivationType, is_glu, parse_activation
from .reference_routing import project, route, score_ids, token_rounding, wide_type
from .router import Rounding, RouterConfig, Routing, resolve

__all__ = [
    "experts",
    "experts_from_logits",
    "grouped_experts",
    "logits_layer",
    "route",
    "routed_layer",
    "score_ids",
    "switch_loss",
    "token_rounding",
    "topk_layer",
]


def _sigmoid_times(g: torch.Tensor, alpha: float) -> torch.Tensor:
    return g * torch.sigmoid(alpha * g)


# Of gate, up and the parameters, each by its name.
_GATED: dict[ActivationType, Callable[..., torch.Tensor]] = {
    ActivationType.SWIGLU: lambda g, u, limit: F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit),
    ActivationType.GEGLU: lambda g, u: F.gelu(g) * u,
    ActivationType.GEGLU_TANH: lambda g, u: F.gelu(g, approximate="tanh") * u,
    ActivationType.REGLU: lambda g, u: F.relu(g) * u,
    ActivationType.SWIGLU_CLAMP_AFTER: lambda g, u, limit: (
        F.silu(g).clamp(max=limit) * u.clamp(-limit, limit)
    ),
    ActivationType.SWIGLU_OAI: lambda g, u, alpha, limit: (
        _sigmoid_times(g.clamp(max=limit), alpha) * (u.clamp(-limit, limit) + 1)
    ),
    ActivationType.SITU_GLU: lambda g, u, alpha, beta: (
        alpha * torch.tanh(g / alpha) * torch.sigmoid(g) * (beta * torch.tanh(u / beta))
    ),
    ActivationType.QUICK_GEGLU: lambda g, u: _sigmoid_times(g, 1.702) * u,
}
_PLAIN: dict[ActivationType, Callable[[torch.Tensor], torch.Tensor]] = {
    ActivationType.RELU: F.relu,
    ActivationType.RELU_SQ: lambda h: F.relu(h).square(),
    ActivationType.GELU: F.gelu,
    ActivationType.GELU_TANH: lambda h: F.gelu(h, approximate="tanh"),
    ActivationType.SILU: F.silu,
}


def _activate(h: torch.Tensor, activation: ActivationType | str, interleaved: bool) -> torch.Tensor:
    wide = h.to(wide_type(h.dtype))
    kind, parameters = parse_activation(activation)
    if not is_glu(kind):
        return _PLAIN[kind](wide).to(h.dtype)
    if interleaved:
        gate, up = wide[..., 0::2], wide[..., 1::2]
    else:
        gate, up = wide.chunk(2, dim=-1)
    return _GATED[kind](gate, up, **parameters).to(h.dtype)


def _as_one_tensor(w1, b1, w2, activation, layout, w1_up, b1_up):
    """w1 (E, 2n or n, d), b1, w2 (E, d, n), and whether the rows of gate and up alternate."""
    layout = _check.w1_layout(layout, False, activation, w1_up, b1_up=b1_up)
    if layout == "separate":
        w1 = torch.cat([w1, w1_up], dim=1)
        b1 = None if b1 is None else torch.cat([b1, b1_up], dim=1)
    elif layout in _check.TRANSPOSED_LAYOUTS:
        w1, w2 = w1.mT, w2.mT
    return w1, b1, w2, layout in ("interleaved", "transposed_interleaved")


def _experts(x, tokens, experts, scores, w1, b1, w2, b2, activation, layout, w1_up, b1_up):
    """o (T, d) and counts (E): o[tokens[i]] += scores[i] * expert[experts[i]](x[tokens[i]])."""
    w1, b1, w2, interleaved = _as_one_tensor(w1, b1, w2, activation, layout, w1_up, b1_up)
    num_experts = w1.shape[0]
    # Ids of no expert are sentinels: one more bin, which is dropped.
    experts = experts.masked_fill(experts < 0, num_experts).clamp(max=num_experts)
    counts = experts.bincount(minlength=num_experts + 1)[:num_experts]
    per_expert = counts.tolist()
    order = experts.argsort(stable=True)[: sum(per_expert)]
    tokens, scores = tokens[order].long(), scores[order]

    no_bias = [None] * num_experts
    rows = []
    for x_e, w1_e, b1_e, w2_e, b2_e in zip(
        x[tokens].split(per_expert),
        w1.unbind(),
        no_bias if b1 is None else b1.unbind(),
        w2.unbind(),
        no_bias if b2 is None else b2.unbind(),
        strict=True,
    ):
        a = _activate(F.linear(x_e, w1_e, b1_e), activation, interleaved)
        rows.append(F.linear(a, w2_e, b2_e))
    y = torch.cat(rows)

    wide = wide_type(x.dtype)
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    out = out.index_add(0, tokens, y.to(wide) * scores.to(wide).unsqueeze(-1))
    return out.to(x.dtype), counts.int()


def topk_layer(
    x: torch.Tensor,
    router_w: torch.Tensor,
    top_k: int,
    routing: Routing,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode: bool = False,
    layout: str = "interleaved",
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
    *,
    rounding: Rounding | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o (T, d), logits (T, E) and counts (E) int32, those before rounding; w1 (E, 2n or n, d), w2
    (E, d, n).

    With the layout "separate" w1 (E, n, d) is the gate and w1_up (E, n, d) the up rows; the
    transposed ones have w1 (E, d, 2n or n) and w2 (E, n, d).
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_inference_mode):
        x, w1, b1, w2, b2, w1_up, b1_up = autocast(x, w1, b1, w2, b2, w1_up, b1_up)
        f32_logits = routing.config.logits == "f32"
        logits = project(x, router_w, routing.logit_bias, f32_logits)
        of_experts = w1, b1, w2, b2, activation, is_inference_mode, layout, w1_up, b1_up
        o, counts = logits_layer(x, logits, None, top_k, routing, *of_experts, rounding=rounding)
    return o, logits, counts


def _route(logits, top_k, routing):
    return route(
        logits,
        top_k,
        router=routing.config,
        selection_bias=routing.selection_bias,
        expert_scale=routing.expert_scale,
    )


def top_k(logits: torch.Tensor, k: int, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (T, K) and ids (T, K) of logits (T, E), without a history."""
    with torch.no_grad():
        return _route(logits, k, routing)


def routed_layer(
    x: torch.Tensor,
    scores: torch.Tensor,
    token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode: bool = False,
    layout: str = "interleaved",
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (T, d) and counts (E) int32 of lists of length L."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_inference_mode):
        x, w1, b1, w2, b2, w1_up, b1_up = autocast(x, w1, b1, w2, b2, w1_up, b1_up)
        return _experts(
            x, token_ids, expert_ids, scores, w1, b1, w2, b2, activation, layout, w1_up, b1_up
        )


def logits_layer(
    x: torch.Tensor,
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    top_k: int,
    routing: Routing,
    *of_experts: Any,
    rounding: Rounding | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (T, d) and counts (E) int32, those before rounding, of logits (T, E), and of ids (T, K) if
    they are given; `of_experts`: the arguments of routed_layer from w1 on."""
    if rounding is not None:
        rule, tile, draws = rounding
        order = routing.config.over_top_k, routing.config.renormalize
        scores, tokens, chosen, _, frequency = token_rounding(
            logits, top_k, rule, tile, *order, draws
        )
        return routed_layer(x, scores, tokens, chosen, *of_experts)[0], frequency
    if ids is None:
        scores, ids = _route(logits, top_k, routing)
    else:
        scores = score_ids(logits, ids, router=routing.config, expert_scale=routing.expert_scale)
    tokens = torch.arange(ids.shape[0], device=ids.device).repeat_interleave(ids.shape[1])
    return routed_layer(x, scores.flatten(), tokens, ids.flatten(), *of_experts)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    activation: ActivationType | str = ActivationType.SWIGLU,
    layout: str = "interleaved",
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (T, d) and counts (E) int32 of ids and weights (T, K)."""
    tokens = torch.arange(ids.shape[0], device=ids.device).repeat_interleave(ids.shape[1])
    return routed_layer(
        x,
        weights.flatten(),
        tokens,
        ids.flatten(),
        w1,
        b1,
        w2,
        b2,
        activation,
        layout=layout,
        w1_up=w1_up,
        b1_up=b1_up,
    )


def experts_from_logits(
    x: torch.Tensor,
    logits: torch.Tensor,
    K: int,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    ids: torch.Tensor | None = None,
    softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    activation: ActivationType | str = ActivationType.SWIGLU,
    layout: str = "interleaved",
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
    router: RouterConfig | str | None = None,
    selection_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (T, d) and counts (E) int32 of logits (T, E), and of ids (T, K) if they are given."""
    config = resolve(router, softmax_over_topk, norm_topk_probs)
    routing = Routing(config, selection_bias=selection_bias, expert_scale=expert_scale)
    return logits_layer(
        x, logits, ids, K, routing, w1, b1, w2, b2, activation, False, layout, w1_up, b1_up
    )


def _segments(counts, offsets):
    """First row and number of rows of each expert."""
    if offsets is None:
        begins = counts.cumsum(0) - counts
    else:
        begins = offsets[:-1]
        counts = offsets.diff() if counts is None else counts
    return list(zip(begins.tolist(), counts.tolist(), strict=True))


def grouped_experts(
    rows: torch.Tensor,
    counts: torch.Tensor | None,
    w1: torch.Tensor,
    w2: torch.Tensor,
    scores: torch.Tensor | None = None,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    offsets: torch.Tensor | None = None,
    activation: ActivationType = ActivationType.SWIGLU,
    layout: str = "interleaved",
    score_at: str = "after_down",
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
) -> torch.Tensor:
    """y (R, d) of rows (R, d) in expert order; zeros where no expert owns a row.

    Products by W2, biases and scores are in the wide type: y is rounded once.
    """
    rows, w1, b1, w2, b2, w1_up, b1_up = autocast(rows, w1, b1, w2, b2, w1_up, b1_up)
    w1, b1, w2, interleaved = _as_one_tensor(w1, b1, w2, activation, layout, w1_up, b1_up)
    wide = wide_type(rows.dtype)
    pieces, end = [], 0
    for e, (begin, count) in enumerate(_segments(counts, offsets)):
        pieces.append(rows.new_zeros(begin - end, rows.shape[1]))
        end = begin + count
        h = F.linear(rows[begin:end], w1[e], None if b1 is None else b1[e])
        y = F.linear(_activate(h, activation, interleaved).to(wide), w2[e].to(wide))
        s = None if scores is None else scores[begin:end].to(wide).unsqueeze(-1)
        if s is not None and score_at == "before_down":
            y = y * s
        if b2 is not None:
            y = y + b2[e].to(wide)
        if s is not None and score_at == "after_down":
            y = y * s
        pieces.append(y.to(rows.dtype))
    pieces.append(rows.new_zeros(rows.shape[0] - end, rows.shape[1]))
    return torch.cat(pieces)


def switch_loss(logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """E * sum_e (P_e / sum P)(f_e / sum f), P the summed softmax of logits (T, E), f the counts."""
    probs = logits.to(wide_type(logits.dtype)).softmax(dim=-1).sum(dim=0)
    frequency = counts.to(probs.dtype)
    # The sums are T and T*K, or zero without tokens; then so is the loss.
    probs = probs / probs.sum().clamp(min=torch.finfo(probs.dtype).tiny)
    frequency = frequency / frequency.sum().clamp(min=1)
    return logits.shape[-1] * (probs * frequency).sum()
