"""Loads the extension and gives its operators shapes for tracing and derivatives.

The operators themselves, `torch.ops.sonicmoe.*`, are described in `csrc/operators.h`.
"""

import functools
from pathlib import Path

import torch

from . import _autograd

_LIBRARY = Path(__file__).parent / "lib" / "libsonicmoe_torch.so"

#: False in a source tree that is not built, where only the `torch` backend works.
AVAILABLE = _LIBRARY.exists()


def require() -> None:
    if not AVAILABLE:
        raise RuntimeError(
            f"sonicmoe's extension is missing ({_LIBRARY}): run `make build` in a source tree, "
            "or `pip install .`; KernelBackendMoE.torch works without it"
        )


# Options, as the operators take them: the text form of a description (docs/api.md) without what
# their tensors say.


def layer_text(**options: int | bool | str) -> str:
    """The items that the options are: layer_text(top_k=8, bias=True) is `top_k=8 bias=true`."""
    # Tracing makes a text once anyhow, and warns of a cache.
    return _text(**options) if torch.compiler.is_compiling() else _cached_text(**options)


def _text(**options: int | bool | str) -> str:
    return " ".join(f"{key}={_written(value)}" for key, value in options.items())


_cached_text = functools.lru_cache(maxsize=256)(_text)


def _written(value: int | bool | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@functools.lru_cache(maxsize=256)
def _options(layer: str) -> dict[str, str]:
    """The items of such a text. Only the C++ library judges them."""
    return dict(item.partition("=")[::2] for item in layer.split())


def router_options(softmax_over_topk: bool, norm_topk_probs: bool) -> dict[str, str | bool]:
    """The two arguments of the original SonicMoE, as options."""
    router = "softmax_over_topk" if softmax_over_topk else "topk_over_softmax"
    return {"router": router, "norm_topk_probs": bool(norm_topk_probs)}


def _keeps_logits(options: dict[str, str]) -> bool:
    """Whether a gradient needs the probabilities of all experts."""
    topk_over_softmax = options.get("router") == "topk_over_softmax"
    return topk_over_softmax and options.get("norm_topk_probs") != "true"


# Shapes, dtypes and devices of what the operators return. The routing block is 20 bytes a row and
# 4(2E+1), or 16 bytes a row and 4(2E+1) + 4(T+1) for lists; the operators check that it is so.


def _empty(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_empty(shape, dtype=dtype)


def _preact_width(w1, w1_up):
    return w1.shape[1] if w1_up is None else 2 * w1.shape[1]


def _layer_forward_fake(
    x, router_w, w1, b1, w2, b2, layer, w1_main_grad=None, w2_main_grad=None,
    w1_up=None, b1_up=None, w1_up_main_grad=None,
):  # fmt: skip
    options = _options(layer)
    inference = options.get("inference") == "true"
    tokens, experts = x.shape[0], router_w.shape[0]
    rows = 0 if inference else tokens * int(options.get("top_k", 0))
    return (
        _empty(x, *x.shape),
        _empty(x, tokens, experts),
        _empty(x, experts, dtype=torch.int32),
        _empty(x, rows, _preact_width(w1, w1_up)),
        _empty(x, 0 if inference else 5 * rows + 2 * experts + 1, dtype=torch.int32),
    )


def _routed_forward_fake(
    x, scores, token_ids, expert_ids, w1, b1, w2, b2, layer, w1_main_grad=None, w2_main_grad=None,
    w1_up=None, b1_up=None, w1_up_main_grad=None,
):  # fmt: skip
    inference = _options(layer).get("inference") == "true"
    tokens, experts = x.shape[0], w1.shape[0]
    rows = 0 if inference else scores.shape[0]
    return (
        _empty(x, *x.shape),
        _empty(x, experts, dtype=torch.int32),
        _empty(x, rows, _preact_width(w1, w1_up)),
        _empty(x, 0 if inference else 4 * rows + 2 * experts + tokens + 2, dtype=torch.int32),
    )


def _wanted_fake(wanted, like):
    return _empty(like, like.shape[0] if wanted else 0, *like.shape[1:])


def _weight_gradients_fake(
    w1, w1_up, w2, has_bias, main_grads, wants_dw1, wants_dw1_up, wants_dw2
):
    returned = all(t is None for t in main_grads)
    experts = w1.shape[0] if has_bias else 0
    return (
        _wanted_fake(returned and wants_dw1, w1),
        _empty(w1, experts, w1.shape[1]),
        _wanted_fake(returned and wants_dw2, w2),
        _empty(w2, experts, w2.shape[1]),
        # Without w1_up they have no experts, and the rows of w1.
        _wanted_fake(returned and wants_dw1_up and w1_up is not None, w1),
        _empty(w1, 0 if w1_up is None else experts, w1.shape[1]),
    )


def _layer_backward_fake(
    dout, dlogits, x, router_w, w1, w2, b2, logits, preact, routing, layer, w1_main_grad=None,
    w2_main_grad=None, dpreact=None, wants_dx=True, wants_drouter_w=True, wants_dw1=True,
    wants_dw2=True, w1_up=None, w1_up_main_grad=None, wants_dw1_up=True,
):  # fmt: skip
    main_grads = w1_main_grad, w1_up_main_grad, w2_main_grad
    gradients = _weight_gradients_fake(
        w1, w1_up, w2, b2 is not None, main_grads, wants_dw1, wants_dw1_up, wants_dw2
    )
    return _wanted_fake(wants_dx, x), _wanted_fake(wants_drouter_w, router_w), *gradients


def _routed_backward_fake(
    dout, x, w1, w2, b2, preact, routing, layer, w1_main_grad=None, w2_main_grad=None,
    dpreact=None, wants_dx=True, wants_dw1=True, wants_dw2=True, w1_up=None,
    w1_up_main_grad=None, wants_dw1_up=True,
):  # fmt: skip
    main_grads = w1_main_grad, w1_up_main_grad, w2_main_grad
    gradients = _weight_gradients_fake(
        w1, w1_up, w2, b2 is not None, main_grads, wants_dw1, wants_dw1_up, wants_dw2
    )
    return _wanted_fake(wants_dx, x), _empty(x, preact.shape[0], dtype=torch.float32), *gradients


def _grouped_forward_out_fake(
    out, rows, counts, offsets, scores, w1, b1, w2, b2, layer, w1_main_grad=None,
    w2_main_grad=None, w1_up=None, b1_up=None, w1_up_main_grad=None, dx_out=None,
):  # fmt: skip
    inference = _options(layer).get("inference") == "true"
    return (
        _empty(rows, 0 if inference else rows.shape[0], _preact_width(w1, w1_up)),
        _empty(rows, 3 * w2.shape[0], dtype=torch.int32),
    )


def _grouped_forward_fake(rows, *others, **named):
    out = _empty(rows, *rows.shape)
    return out, *_grouped_forward_out_fake(out, rows, *others, **named)


def _grouped_backward_fake(
    dout, rows, scores, w1, w2, b2, preact, segments, layer, w1_main_grad=None, w2_main_grad=None,
    dpreact=None, wants_dx=True, wants_dw1=True, wants_dw2=True, w1_up=None,
    w1_up_main_grad=None, wants_dw1_up=True, dx_out=None,
):  # fmt: skip
    main_grads = w1_main_grad, w1_up_main_grad, w2_main_grad
    gradients = _weight_gradients_fake(
        w1, w1_up, w2, b2 is not None, main_grads, wants_dw1, wants_dw1_up, wants_dw2
    )
    dscores = _empty(rows, 0 if scores is None else rows.shape[0], dtype=torch.float32)
    return _wanted_fake(wants_dx and dx_out is None, rows), dscores, *gradients


def _aux_loss_fake(logits, counts):
    return _empty(logits, dtype=torch.float32)


def _aux_loss_backward_fake(dloss, logits, counts):
    return _empty(logits, *logits.shape)


def _top_k_fake(logits, layer):
    tokens, k = logits.shape[0], int(_options(layer).get("top_k", 0))
    return (
        _empty(logits, tokens, k, dtype=torch.float32),
        _empty(logits, tokens, k, dtype=torch.int32),
    )


def _count_cumsum_fake(ids, experts):
    return _empty(ids, experts), _empty(ids, experts)


def _token_rounding_fake(logits, draws, layer):
    options = _options(layer)
    tokens, experts = logits.shape
    chosen = tokens * int(options.get("top_k", 0))
    grown = chosen + torch.sym_min(experts, chosen) * (int(options.get("rounding_tile", 0)) - 1)
    capacity = torch.sym_min(tokens * experts, grown)
    return (
        _empty(logits, capacity, dtype=torch.float32),
        _empty(logits, capacity, dtype=torch.int32),
        _empty(logits, capacity, dtype=torch.int32),
        _empty(logits, experts, dtype=torch.int32),
        _empty(logits, experts, dtype=torch.int32),
    )


def _token_rounding_backward_fake(dscores, logits, token_ids, expert_ids, layer):
    return _empty(logits, *logits.shape)


# Derivatives. Only x, H and the routing block are kept besides the parameters, and the logits where
# a gradient needs the probabilities of all experts.


def _save_for_layer_backward(ctx, inputs, output):
    x, router_w, w1, _, w2, b2, layer, w1_main_grad, w2_main_grad, w1_up, _, w1_up_main_grad = (
        inputs
    )
    o, logits, counts, preact, routing = output
    kept_logits = logits if _keeps_logits(_options(layer)) else None
    ctx.save_for_backward(x, router_w, w1, w2, b2, kept_logits, preact, routing, w1_up)
    ctx.layer, ctx.inputs = layer, len(inputs)
    ctx.main_grads = w1_main_grad, w2_main_grad, w1_up_main_grad
    _autograd.keep_optional(ctx, inputs, (0, 1, 2, 4, 9))
    ctx.mark_non_differentiable(counts, preact, routing)
    ctx.set_materialize_grads(False)


def _layer_backward(ctx, dout, dlogits, dcounts, dpreact, drouting):
    if dout is None and dlogits is None:
        return _autograd.padded(ctx)
    x, router_w, w1, w2, b2, logits, preact, routing, w1_up = ctx.saved_tensors
    wants = _autograd.asked_for(ctx)
    dx, drouter_w, *of_experts = torch.ops.sonicmoe.layer_backward(
        torch.zeros_like(x) if dout is None else dout.contiguous(),
        None if dlogits is None else dlogits.contiguous(),
        x,
        router_w,
        w1,
        w2,
        b2,
        logits,
        preact,
        routing,
        ctx.layer,
        *ctx.main_grads[:2],
        _autograd.place_of_dpreact(ctx, preact),
        *wants[:-1],
        w1_up,
        ctx.main_grads[2],
        wants[-1],
    )
    gradients = _autograd.returned(ctx, wants, b2 is not None, *of_experts)
    of_inputs = dx if wants[0] else None, drouter_w if wants[1] else None
    return _autograd.padded(ctx, *of_inputs, *gradients)


def _save_for_routed_backward(ctx, inputs, output):
    x, _, _, _, w1, _, w2, b2, layer, w1_main_grad, w2_main_grad, w1_up, _, w1_up_main_grad = inputs
    o, counts, preact, routing = output
    ctx.save_for_backward(x, w1, w2, b2, preact, routing, w1_up)
    ctx.layer, ctx.inputs = layer, len(inputs)
    ctx.main_grads = w1_main_grad, w2_main_grad, w1_up_main_grad
    _autograd.keep_optional(ctx, inputs, (0, 4, 6, 11))
    ctx.mark_non_differentiable(counts, preact, routing)
    ctx.set_materialize_grads(False)


def _routed_backward(ctx, dout, dcounts, dpreact, drouting):
    if dout is None:
        return _autograd.padded(ctx)
    x, w1, w2, b2, preact, routing, w1_up = ctx.saved_tensors
    wants = _autograd.asked_for(ctx)
    dx, dscores, *of_experts = torch.ops.sonicmoe.routed_backward(
        dout.contiguous(),
        x,
        w1,
        w2,
        b2,
        preact,
        routing,
        ctx.layer,
        *ctx.main_grads[:2],
        _autograd.place_of_dpreact(ctx, preact),
        *wants[:-1],
        w1_up,
        ctx.main_grads[2],
        wants[-1],
    )
    gradients = _autograd.returned(ctx, wants, b2 is not None, *of_experts)
    return _autograd.padded(ctx, dx if wants[0] else None, dscores, None, None, *gradients)


def _save_for_grouped_backward(ctx, inputs, output):
    rows, _, _, scores, w1, _, w2, b2, layer, *others = inputs
    w1_main_grad, w2_main_grad, w1_up, _, w1_up_main_grad, ctx.dx_out, *out = others
    _, preact, segments = output
    ctx.save_for_backward(rows, scores, w1, w2, b2, preact, segments, w1_up)
    ctx.layer, ctx.inputs = layer, len(inputs)
    ctx.main_grads = w1_main_grad, w2_main_grad, w1_up_main_grad
    _autograd.keep_optional(ctx, inputs, (0, 4, 6, 11))
    ctx.mark_dirty(*out)
    ctx.mark_non_differentiable(preact, segments)
    ctx.set_materialize_grads(False)


def _grouped_backward(ctx, dout, dpreact, dsegments):
    if dout is None:
        return _autograd.padded(ctx)
    rows, scores, w1, w2, b2, preact, segments, w1_up = ctx.saved_tensors
    wants = _autograd.asked_for(ctx)
    dx_out = ctx.dx_out if wants[0] else None
    dx, dscores, *of_experts = torch.ops.sonicmoe.grouped_backward(
        dout.contiguous(),
        rows,
        scores,
        w1,
        w2,
        b2,
        preact,
        segments,
        ctx.layer,
        *ctx.main_grads[:2],
        _autograd.place_of_dpreact(ctx, preact),
        *wants[:-1],
        w1_up,
        ctx.main_grads[2],
        wants[-1],
        dx_out,
    )
    if dx_out is not None:
        dx = dx_out
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(dx_out)
    gradients = _autograd.returned(ctx, wants, b2 is not None, *of_experts)
    return _autograd.padded(
        ctx,
        dx if wants[0] else None,
        None,
        None,
        None if scores is None else dscores,
        *gradients,
    )


def _forward_into(*inputs):
    """The last input is the output's memory."""
    *others, out = inputs
    return out, *torch.ops.sonicmoe.grouped_forward_out(out, *others)


def grouped_forward(*inputs, out=None):
    """The operator's output, in the memory of `out` if that is given. Compiled calls copy it there:
    tracing loses the history of a result that is a view of an input.

    `out` itself gets no history. Memory that serves every step would keep the graphs of all.
    """
    if out is None or torch.compiler.is_compiling():
        result = _grouped_forward(*inputs)[0]
        if out is not None:
            with torch.no_grad():
                out.copy_(result)
        return result
    result = out.detach()
    if torch.is_grad_enabled():
        return _GroupedForwardInto.apply(*inputs, result)[0]
    with torch._C._AutoDispatchBelowAutograd():
        _forward_into(*inputs, result)
    if not result.is_inference():
        torch.autograd.graph.increment_version(result)
    return result


def _save_for_aux_loss_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _aux_loss_backward(ctx, dloss):
    return torch.ops.sonicmoe.aux_loss_backward(dloss.contiguous(), *ctx.saved_tensors), None


def _save_for_token_rounding_backward(ctx, inputs, output):
    logits, draws, layer = inputs
    scores, token_ids, expert_ids, counts, frequency = output
    ctx.save_for_backward(logits, token_ids, expert_ids)
    ctx.layer, ctx.inputs = layer, len(inputs)
    ctx.mark_non_differentiable(token_ids, expert_ids, counts, frequency)
    ctx.set_materialize_grads(False)


def _token_rounding_backward(ctx, dscores, *dlists):
    if dscores is None:
        return _autograd.padded(ctx)
    dlogits = torch.ops.sonicmoe.token_rounding_backward(
        dscores.contiguous(), *ctx.saved_tensors, ctx.layer
    )
    return _autograd.padded(ctx, dlogits)


if AVAILABLE:
    torch.ops.load_library(_LIBRARY)
    for _name, _fake in (
        ("layer_forward", _layer_forward_fake),
        ("layer_backward", _layer_backward_fake),
        ("routed_forward", _routed_forward_fake),
        ("routed_backward", _routed_backward_fake),
        ("grouped_forward", _grouped_forward_fake),
        ("grouped_forward_out", _grouped_forward_out_fake),
        ("grouped_backward", _grouped_backward_fake),
        ("aux_loss", _aux_loss_fake),
        ("aux_loss_backward", _aux_loss_backward_fake),
        ("top_k", _top_k_fake),
        ("count_cumsum", _count_cumsum_fake),
        ("token_rounding", _token_rounding_fake),
        ("token_rounding_backward", _token_rounding_backward_fake),
    ):
        torch.library.register_fake(f"sonicmoe::{_name}", _fake)
    layer_forward = _autograd.differentiable(
        "layer_forward", _save_for_layer_backward, _layer_backward
    )
    routed_forward = _autograd.differentiable(
        "routed_forward", _save_for_routed_backward, _routed_backward
    )
    _grouped_forward = _autograd.differentiable(
        "grouped_forward", _save_for_grouped_backward, _grouped_backward
    )
    _GroupedForwardInto = _autograd.function(
        "grouped_forward_out", _forward_into, _save_for_grouped_backward, _grouped_backward
    )
    token_rounding = _autograd.differentiable(
        "token_rounding", _save_for_token_rounding_backward, _token_rounding_backward
    )
    aux_loss = _autograd.differentiable(
        "aux_loss", _save_for_aux_loss_backward, _aux_loss_backward
    )
