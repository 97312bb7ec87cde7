"""Shapes, dtypes and devices of what the operators return, for tracing.

The routing block's size repeats the table in src/core/routing_block.h, which tracing cannot ask.
The operators check that it is so.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ._check import TRANSPOSED_LAYOUTS


@functools.lru_cache(maxsize=256)
def options_of(layer: str) -> dict[str, str]:
    """The items of a description's text form. Only the C++ library judges them."""
    return dict(item.partition("=")[::2] for item in layer.split())


def recomputes(options: dict[str, str]) -> bool:
    """Whether backward makes H again, so that forward keeps none."""
    return options.get("recompute") == "preact"


def _is_softmax(options: dict[str, str]) -> bool:
    return options.get("router_score", "softmax") == "softmax"


def _rounds(options: dict[str, str]) -> bool:
    return int(options.get("rounding_tile", 0)) != 0


def row_capacity(options: dict[str, str], tokens: int, experts: int) -> int:
    """The row capacity R of a layer that chooses, as RoutingDesc::row_capacity()."""
    chosen = tokens * int(options.get("top_k", 0))
    if not _rounds(options):
        return chosen
    grown = chosen + torch.sym_min(experts, chosen) * (int(options["rounding_tile"]) - 1)
    return torch.sym_min(tokens * experts, grown)


def _reaches_all_experts(options: dict[str, str]) -> bool:
    """Whether a gradient needs the logits of all experts, as RouterDesc::reaches_all_experts()."""
    if not _is_softmax(options) or options.get("router_order") != "score_then_select":
        return False
    return options.get("renormalize") != "true" or float(options.get("eps", 0)) != 0


class Kept(NamedTuple):
    """What of a layer's inputs and outputs backward needs besides the usual ones."""

    biases: bool
    logits: bool


@functools.lru_cache(maxsize=256)
def kept(layer: str) -> Kept:
    options = options_of(layer)
    return Kept(recomputes(options), _rounds(options) or _reaches_all_experts(options))


def _keeps_probabilities(options: dict[str, str]) -> bool:
    """As RouterDesc::keeps_probabilities(), of a layer that has logits."""
    return (
        not _is_softmax(options)
        or float(options.get("eps", 0)) != 0
        or float(options.get("scale", 1)) != 1
        or int(options.get("groups", 1)) != 1
        or options.get("selection_bias") == "true"
        or options.get("expert_scale") == "true"
    )


def _empty(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_empty(shape, dtype=dtype)


def _outputs(weights, layer):
    """`out` of weights (E, out, in), or (E, in, out) if the layout is transposed."""
    transposed = options_of(layer).get("w1_layout") in TRANSPOSED_LAYOUTS
    return weights.shape[2 if transposed else 1]


def _scored_ints(options, rows, tokens, experts):
    """int32 of the routing block of a layer whose logits have scored its rows."""
    if _rounds(options):
        return 6 * rows + 2 * experts + tokens + 2
    return (6 if _keeps_probabilities(options) else 5) * rows + 2 * experts + 1


def _preact_width(w1, w1_up, layer):
    if recomputes(options_of(layer)):
        return 0
    return _outputs(w1, layer) * (1 if w1_up is None else 2)


def _layer_forward_fake(
    x, router_w, w1, b1, w2, b2, layer, w1_main_grad=None, w2_main_grad=None,
    w1_up=None, b1_up=None, w1_up_main_grad=None, logit_bias=None, selection_bias=None,
    expert_scale=None, draws=None,
):  # fmt: skip
    options = options_of(layer)
    inference = options.get("inference") == "true"
    tokens, experts = x.shape[0], router_w.shape[0]
    rows = 0 if inference else row_capacity(options, tokens, experts)
    routing = _scored_ints(options, rows, tokens, experts)
    logits_dtype = torch.float32 if options.get("f32_logits") == "true" else router_w.dtype
    return (
        _empty(x, *x.shape),
        _empty(x, tokens, experts, dtype=logits_dtype),
        _empty(x, experts, dtype=torch.int32),
        _empty(x, rows, _preact_width(w1, w1_up, layer)),
        _empty(x, 0 if inference else routing, dtype=torch.int32),
    )


def _given_forward_fake(x, w1, layer, w1_up, rows, ints):
    """What the operators of a caller's routing return: `rows` (R), and a routing block of `ints`
    int32."""
    inference = options_of(layer).get("inference") == "true"
    experts = w1.shape[0]
    return (
        _empty(x, *x.shape),
        _empty(x, experts, dtype=torch.int32),
        _empty(x, 0 if inference else rows, _preact_width(w1, w1_up, layer)),
        _empty(x, 0 if inference else ints, dtype=torch.int32),
    )


def _routed_forward_fake(
    x, scores, token_ids, expert_ids, w1, b1, w2, b2, layer, w1_main_grad=None, w2_main_grad=None,
    w1_up=None, b1_up=None, w1_up_main_grad=None,
):  # fmt: skip
    rows = scores.shape[0]
    ints = 4 * rows + 2 * w1.shape[0] + x.shape[0] + 2
    return _given_forward_fake(x, w1, layer, w1_up, rows, ints)


def rows_of_ids(layer: str, slots: int) -> int:
    """As LayerDesc::rows(), of ids and weights."""
    most = int(options_of(layer).get("max_rows", 0))
    return torch.sym_min(most, slots) if most > 0 else slots


def _ids_ints(ids, experts):
    return 3 * ids.shape[0] * ids.shape[1] + 2 * experts + 1


def _ids_forward_fake(
    x, ids, weights, w1, b1, w2, b2, layer, w1_main_grad=None, w2_main_grad=None, w1_up=None,
    b1_up=None, w1_up_main_grad=None,
):  # fmt: skip
    slots = ids.shape[0] * ids.shape[1]
    rows, ints = rows_of_ids(layer, slots), _ids_ints(ids, w1.shape[0])
    return _given_forward_fake(x, w1, layer, w1_up, rows, ints)


def _ids_routing_fake(x, ids, weights, experts, layer):
    inference = options_of(layer).get("inference") == "true"
    return _empty(x, 0 if inference else _ids_ints(ids, experts), dtype=torch.int32)


def _ids_experts_forward_fake(
    x, ids, weights, routing, w1, b1, w2, b2, layer, w1_up=None, b1_up=None
):
    o, _, preact, _ = _ids_forward_fake(x, ids, weights, w1, b1, w2, b2, layer, w1_up=w1_up)
    return o, preact


def _logits_forward_fake(
    x, logits, ids, w1, b1, w2, b2, layer, w1_main_grad=None, w2_main_grad=None, w1_up=None,
    b1_up=None, w1_up_main_grad=None, selection_bias=None, expert_scale=None, draws=None,
):  # fmt: skip
    options, tokens, experts = options_of(layer), x.shape[0], w1.shape[0]
    rows = row_capacity(options, tokens, experts)
    ints = _scored_ints(options, rows, tokens, experts)
    return _given_forward_fake(x, w1, layer, w1_up, rows, ints)


def _expert_scale_fake(x, experts, expert_scale):
    return _empty(x, 0 if expert_scale is None else experts, dtype=torch.float32)


def _wanted_fake(wanted, like):
    return _empty(like, like.shape[0] if wanted else 0, *like.shape[1:])


def _weight_gradients_fake(
    w1, w1_up, w2, layer, has_bias, main_grads, wants_dw1, wants_dw1_up, wants_dw2
):
    returned = all(t is None for t in main_grads)
    experts = w1.shape[0] if has_bias else 0
    return (
        _wanted_fake(returned and wants_dw1, w1),
        _empty(w1, experts, _outputs(w1, layer)),
        _wanted_fake(returned and wants_dw2, w2),
        _empty(w2, experts, _outputs(w2, layer)),
        # Without w1_up they have no experts, and the shapes of those of w1.
        _wanted_fake(returned and wants_dw1_up and w1_up is not None, w1),
        _empty(w1, 0 if w1_up is None else experts, _outputs(w1, layer)),
    )


def _layer_backward_fake(
    dout, dlogits, x, router_w, w1, w2, b2, logits, preact, routing, layer, w1_main_grad=None,
    w2_main_grad=None, dpreact=None, wants_dx=True, wants_drouter_w=True, wants_dw1=True,
    wants_dw2=True, w1_up=None, w1_up_main_grad=None, wants_dw1_up=True, expert_scale=None,
    wants_dlogit_bias=True, b1=None, b1_up=None,
):  # fmt: skip
    main_grads = w1_main_grad, w1_up_main_grad, w2_main_grad
    gradients = _weight_gradients_fake(
        w1, w1_up, w2, layer, b2 is not None, main_grads, wants_dw1, wants_dw1_up, wants_dw2
    )
    biased = wants_dlogit_bias and options_of(layer).get("logit_bias") == "true"
    of_router = (
        _empty(x, router_w.shape[0] if biased else 0, dtype=torch.float32),
        _expert_scale_fake(x, router_w.shape[0], expert_scale),
    )
    return (
        _wanted_fake(wants_dx, x),
        _wanted_fake(wants_drouter_w, router_w),
        *gradients,
        *of_router,
    )


def _routed_backward_fake(
    dout, x, w1, w2, b2, preact, routing, layer, w1_main_grad=None, w2_main_grad=None,
    dpreact=None, wants_dx=True, wants_dw1=True, wants_dw2=True, w1_up=None,
    w1_up_main_grad=None, wants_dw1_up=True, b1=None, b1_up=None,
):  # fmt: skip
    main_grads = w1_main_grad, w1_up_main_grad, w2_main_grad
    gradients = _weight_gradients_fake(
        w1, w1_up, w2, layer, b2 is not None, main_grads, wants_dw1, wants_dw1_up, wants_dw2
    )
    return _wanted_fake(wants_dx, x), _empty(x, preact.shape[0], dtype=torch.float32), *gradients


def _ids_backward_fake(dout, x, top_k, *others, **named):
    dx, _, *gradients = _routed_backward_fake(dout, x, *others, **named)
    return dx, _empty(x, x.shape[0], top_k, dtype=torch.float32), *gradients


def _up_proj_wgrad_fake(
    x, dpreact, top_k, w1, w2, routing, layer, w1_up=None, wants_dw1=True, wants_dw1_up=True
):
    return _wanted_fake(wants_dw1, w1), _wanted_fake(wants_dw1_up and w1_up is not None, w1)


def _logits_backward_fake(
    dout, x, logits, has_ids, w1, w2, b2, preact, routing, layer, w1_main_grad=None,
    w2_main_grad=None, dpreact=None, wants_dx=True, wants_dw1=True, wants_dw2=True, w1_up=None,
    w1_up_main_grad=None, wants_dw1_up=True, expert_scale=None, b1=None, b1_up=None,
):  # fmt: skip
    main_grads = w1_main_grad, w1_up_main_grad, w2_main_grad
    gradients = _weight_gradients_fake(
        w1, w1_up, w2, layer, b2 is not None, main_grads, wants_dw1, wants_dw1_up, wants_dw2
    )
    f32 = options_of(layer).get("f32_logits") == "true"
    return (
        _wanted_fake(wants_dx, x),
        _empty(x, x.shape[0], w1.shape[0], dtype=torch.float32 if f32 else None),
        *gradients,
        _expert_scale_fake(x, w1.shape[0], expert_scale),
    )


def _grouped_forward_out_fake(
    out, rows, counts, offsets, scores, w1, b1, w2, b2, layer, w1_main_grad=None,
    w2_main_grad=None, w1_up=None, b1_up=None, w1_up_main_grad=None, dx_out=None,
):  # fmt: skip
    inference = options_of(layer).get("inference") == "true"
    return (
        _empty(rows, 0 if inference else rows.shape[0], _preact_width(w1, w1_up, layer)),
        _empty(rows, 3 * w2.shape[0], dtype=torch.int32),
    )


def _grouped_forward_fake(rows, *others, **named):
    out = _empty(rows, *rows.shape)
    return out, *_grouped_forward_out_fake(out, rows, *others, **named)


def _grouped_backward_fake(
    dout, rows, scores, w1, w2, b2, preact, segments, layer, w1_main_grad=None, w2_main_grad=None,
    dpreact=None, wants_dx=True, wants_dw1=True, wants_dw2=True, w1_up=None,
    w1_up_main_grad=None, wants_dw1_up=True, dx_out=None, b1=None, b1_up=None,
):  # fmt: skip
    main_grads = w1_main_grad, w1_up_main_grad, w2_main_grad
    gradients = _weight_gradients_fake(
        w1, w1_up, w2, layer, b2 is not None, main_grads, wants_dw1, wants_dw1_up, wants_dw2
    )
    dscores = _empty(rows, 0 if scores is None else rows.shape[0], dtype=torch.float32)
    return _wanted_fake(wants_dx and dx_out is None, rows), dscores, *gradients


def _aux_loss_fake(logits, counts, *options, **named):
    return _empty(logits, dtype=torch.float32)


def _aux_loss_backward_fake(dloss, logits, counts, *options, **named):
    return _empty(logits, *logits.shape)


def _top_k_fake(logits, layer, selection_bias=None, expert_scale=None):
    tokens, k = logits.shape[0], int(options_of(layer).get("top_k", 0))
    return (
        _empty(logits, tokens, k, dtype=torch.float32),
        _empty(logits, tokens, k, dtype=torch.int32),
    )


def _count_cumsum_fake(ids, experts):
    return _empty(ids, experts), _empty(ids, experts)


def _token_dispatch_fake(ids, scores, experts, ranks, packed):
    tokens, top_k = ids.shape
    rows = tokens * (min(ranks, top_k) if packed else ranks)
    return (
        _empty(ids, 1, 2 * ranks + 2),
        _empty(ids, rows),
        _empty(ids, rows, 2 * min(top_k, experts)),
        _empty(ids, tokens, ranks),
        _empty(ids, tokens, top_k),
    )


def _send_rows_fake(x, row_tokens, counts, to):
    return None


def _combine_fake(rows, slot_rows):
    return _empty(rows, slot_rows.shape[0], rows.shape[1])


def _token_rounding_fake(logits, draws, layer):
    options = options_of(layer)
    tokens, experts = logits.shape
    capacity = row_capacity(options, tokens, experts)
    return (
        _empty(logits, capacity, dtype=torch.float32),
        _empty(logits, capacity, dtype=torch.int32),
        _empty(logits, capacity, dtype=torch.int32),
        _empty(logits, experts, dtype=torch.int32),
        _empty(logits, experts, dtype=torch.int32),
    )


def _token_rounding_backward_fake(dscores, logits, token_ids, expert_ids, layer):
    return _empty(logits, *logits.shape)


#: By the operators' names.
FAKES: dict[str, Callable[..., Any]] = {
    "layer_forward": _layer_forward_fake,
    "layer_backward": _layer_backward_fake,
    "routed_forward": _routed_forward_fake,
    "routed_backward": _routed_backward_fake,
    "ids_forward": _ids_forward_fake,
    "ids_backward": _ids_backward_fake,
    "ids_routing": _ids_routing_fake,
    "ids_experts_forward": _ids_experts_forward_fake,
    "up_proj_wgrad": _up_proj_wgrad_fake,
    "logits_forward": _logits_forward_fake,
    "logits_backward": _logits_backward_fake,
    "grouped_forward": _grouped_forward_fake,
    "grouped_forward_out": _grouped_forward_out_fake,
    "grouped_backward": _grouped_backward_fake,
    "aux_loss": _aux_loss_fake,
    "aux_loss_backward": _aux_loss_backward_fake,
    "top_k": _top_k_fake,
    "count_cumsum": _count_cumsum_fake,
    "token_dispatch": _token_dispatch_fake,
    "send_rows": _send_rows_fake,
    "combine": _combine_fake,
    "token_rounding": _token_rounding_fake,
    "token_rounding_backward": _token_rounding_backward_fake,
}
