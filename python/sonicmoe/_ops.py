"""Loads the extension and gives its operators shapes for tracing and derivatives.

The operators themselves, `torch.ops.sonicmoe.*`, are described in `csrc/operators.h`.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from . import _autograd, _fakes, _flops
from ._fakes import kept


def _find(folders: Iterable[str]) -> Path | None:
    """The extension in one of a package's folders. An editable installation has two: the source
    tree, where `make build` leaves a library, and site-packages, where pip does. The newest counts,
    since it belongs to the sources as they are."""
    found = [Path(folder, "lib", "libsonicmoe_torch.so") for folder in folders]
    return max(filter(Path.exists, found), key=lambda file: file.stat().st_mtime, default=None)


_LIBRARY = _find(sys.modules[__package__].__path__)

#: False in a source tree that is not built, where only the `torch` backend works.
AVAILABLE = _LIBRARY is not None


def require() -> None:
    if not AVAILABLE:
        raise RuntimeError(
            "sonicmoe's extension is missing: got no lib/libsonicmoe_torch.so in "
            f"{list(sys.modules[__package__].__path__)}; run `make build` in a source tree, "
            "or `pip install .`; KernelBackendMoE.torch works without it"
        )


# Options, as the operators take them: the text form of a description (docs/api.md) without what
# their tensors say.


def layer_text(items: str = "", **options: int | bool | str) -> str:
    """The items that the options are: layer_text(top_k=8, bias=True) is `top_k=8 bias=true`. They
    follow those of a text."""
    written = [f"{key}={_written(value)}" for key, value in options.items()]
    return " ".join([items, *written] if items else written)


def _written(value: int | bool | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def router_options(softmax_over_topk: bool, norm_topk_probs: bool) -> dict[str, str | bool]:
    """The two arguments of the original SonicMoE, as options."""
    order = "select_then_score" if softmax_over_topk else "score_then_select"
    return {"router_order": order, "renormalize": bool(norm_topk_probs)}


# Derivatives. Only x, H and the routing block are kept besides the parameters, and the logits where
# a gradient needs the probabilities of all experts. With recompute=preact H has no bytes.


def _biases_again(layer, b1, b1_up):
    """b1 and b1_up as backward wants them: where it makes H again."""
    return (b1, b1_up) if kept(layer).biases else (None, None)


def _save_for_layer_backward(ctx, inputs, output):
    x, router_w, w1, b1, w2, b2, layer, *others = inputs
    w1_main_grad, w2_main_grad, w1_up, b1_up, w1_up_main_grad, *of_router = others
    _, _, expert_scale, _ = of_router
    o, logits, counts, preact, routing = output
    kept_logits = logits if kept(layer).logits else None
    again = _biases_again(layer, b1, b1_up)
    ctx.save_for_backward(
        x, router_w, w1, w2, b2, kept_logits, preact, routing, w1_up, expert_scale, *again
    )
    ctx.layer, ctx.inputs = layer, len(inputs)
    ctx.weights, ctx.main_grads = (2, 4, 9), (w1_main_grad, w2_main_grad, w1_up_main_grad)
    ctx.mark_non_differentiable(counts, preact, routing)
    ctx.set_materialize_grads(False)


def _layer_backward(ctx, dout, dlogits, *_):
    if dout is None and dlogits is None:
        return _autograd.padded(ctx)
    x, router_w, w1, w2, b2, logits, preact, routing, w1_up, *others = ctx.saved_tensors
    expert_scale, b1, b1_up = others
    asked, main_grads = _autograd.asked_for(ctx), ctx.main_grads
    operator = torch.ops.sonicmoe.layer_backward.default
    dx, drouter_w, *of_experts, dlogit_bias, dexpert_scale = operator(
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
        main_grads[0],
        main_grads[1],
        _autograd.place_of_dpreact(ctx, preact),
        0 in asked,
        1 in asked,
        2 in asked,
        4 in asked,
        w1_up,
        main_grads[2],
        9 in asked,
        expert_scale,
        12 in asked,
        b1,
        b1_up,
    )
    return (
        dx if 0 in asked else None,
        drouter_w if 1 in asked else None,
        *_autograd.returned(ctx, asked, *of_experts),
        None,
        dlogit_bias if 12 in asked else None,
        None,
        None if expert_scale is None else dexpert_scale,
        None,
    )


def _save_for_given_backward(ctx, inputs, output, given, *of_logits):
    """What the operators of a caller's routing keep; `given`: how many inputs say the routing."""
    x, rest = inputs[0], inputs[1 + given :]
    w1, b1, w2, b2, layer, w1_main_grad, w2_main_grad, w1_up, b1_up, w1_up_main_grad, *_ = rest
    o, counts, preact, routing = output
    again = _biases_again(layer, b1, b1_up)
    ctx.save_for_backward(x, w1, w2, b2, preact, routing, w1_up, *again, *of_logits)
    ctx.layer, ctx.inputs = layer, len(inputs)
    ctx.weights = 1 + given, 3 + given, 8 + given
    ctx.main_grads = w1_main_grad, w2_main_grad, w1_up_main_grad
    ctx.mark_non_differentiable(counts, preact, routing)
    ctx.set_materialize_grads(False)


def _given_backward(ctx, saved, dout, operator, *given, scale=()):
    """The gradients of x and of what the caller's router has made, and those of the experts. With
    `scale`, an expert_scale or None, its gradient follows. `saved` are ctx.saved_tensors, which a
    backward may read once: checkpointing and offloading unpack at each access."""
    x, w1, w2, b2, preact, routing, w1_up, b1, b1_up, *_ = saved
    asked, (of_w1, of_w2, of_w1_up) = _autograd.asked_for(ctx), ctx.weights
    dx, dgiven, *of_experts = operator(
        dout.contiguous(),
        x,
        *given,
        w1,
        w2,
        b2,
        preact,
        routing,
        ctx.layer,
        *ctx.main_grads[:2],
        _autograd.place_of_dpreact(ctx, preact),
        0 in asked,
        of_w1 in asked,
        of_w2 in asked,
        w1_up,
        ctx.main_grads[2],
        of_w1_up in asked,
        *scale,
        b1,
        b1_up,
    )
    gradients = _autograd.returned(ctx, asked, *of_experts[:6])
    return dx if 0 in asked else None, dgiven, gradients, *of_experts[6:]


def _save_for_routed_backward(ctx, inputs, output):
    _save_for_given_backward(ctx, inputs, output, 3)


def _routed_backward(ctx, dout, *_):
    if dout is None:
        return _autograd.padded(ctx)
    operator = torch.ops.sonicmoe.routed_backward.default
    dx, dscores, gradients = _given_backward(ctx, ctx.saved_tensors, dout, operator)
    return _autograd.padded(ctx, dx, dscores, None, None, *gradients)


def _save_for_ids_backward(ctx, inputs, output):
    ctx.top_k = inputs[1].shape[1]
    _save_for_given_backward(ctx, inputs, output, 2)


def _ids_backward(ctx, dout, *_):
    if dout is None:
        return _autograd.padded(ctx)
    operator = torch.ops.sonicmoe.ids_backward.default
    dx, dweights, gradients = _given_backward(ctx, ctx.saved_tensors, dout, operator, ctx.top_k)
    return _autograd.padded(ctx, dx, None, dweights, *gradients)


def _save_for_logits_backward(ctx, inputs, output):
    _, logits, ids, _, _, _, _, layer, *_, expert_scale, _ = inputs
    ctx.has_ids = ids is not None
    kept_logits = logits if kept(layer).logits else None
    _save_for_given_backward(ctx, inputs, output, 2, kept_logits, expert_scale)


def _logits_backward(ctx, dout, *_):
    if dout is None:
        return _autograd.padded(ctx)
    operator, saved = torch.ops.sonicmoe.logits_backward.default, ctx.saved_tensors
    *_, logits, scale = saved
    dx, dlogits, gradients, dscale = _given_backward(
        ctx, saved, dout, operator, logits, ctx.has_ids, scale=(scale,)
    )
    of_router = None, None if scale is None else dscale
    return _autograd.padded(ctx, dx, dlogits, None, *gradients, None, *of_router)


def _save_for_grouped_backward(ctx, inputs, output):
    rows, _, _, scores, w1, b1, w2, b2, layer, *others = inputs
    w1_main_grad, w2_main_grad, w1_up, b1_up, w1_up_main_grad, ctx.dx_out, *out = others
    _, preact, segments = output
    again = _biases_again(layer, b1, b1_up)
    ctx.save_for_backward(rows, scores, w1, w2, b2, preact, segments, w1_up, *again)
    ctx.layer, ctx.inputs = layer, len(inputs)
    ctx.weights, ctx.main_grads = (4, 6, 11), (w1_main_grad, w2_main_grad, w1_up_main_grad)
    ctx.mark_dirty(*out)
    ctx.mark_non_differentiable(preact, segments)
    ctx.set_materialize_grads(False)


def _grouped_backward(ctx, dout, *_):
    if dout is None:
        return _autograd.padded(ctx)
    rows, scores, w1, w2, b2, preact, segments, w1_up, b1, b1_up = ctx.saved_tensors
    asked = _autograd.asked_for(ctx)
    dx_out = ctx.dx_out if 0 in asked else None
    dx, dscores, *of_experts = torch.ops.sonicmoe.grouped_backward.default(
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
        0 in asked,
        4 in asked,
        6 in asked,
        w1_up,
        ctx.main_grads[2],
        11 in asked,
        dx_out,
        b1,
        b1_up,
    )
    if dx_out is not None:
        dx = dx_out
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(dx_out)
    gradients = _autograd.returned(ctx, asked, *of_experts)
    return _autograd.padded(
        ctx,
        dx if 0 in asked else None,
        None,
        None,
        None if scores is None else dscores,
        *gradients,
    )


def _forward_into(*inputs):
    """The last input is the output's memory."""
    *others, out = inputs
    return out, *torch.ops.sonicmoe.grouped_forward_out.default(out, *others)


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
    if _autograd.transforms():
        raise NotImplementedError("out: got a tensor, allowed: None, in torch.func's transforms")
    result = out.detach()
    if torch.is_grad_enabled():
        return _grouped_forward_into(*inputs, result)[0]
    _autograd.refuse_tangents(inputs)
    with torch._C._AutoDispatchBelowAutograd():
        _forward_into(*inputs, result)
    if not result.is_inference():
        torch.autograd.graph.increment_version(result)
    return result


def _save_for_aux_loss_backward(ctx, inputs, output):
    logits, counts, *options = inputs
    ctx.loss, ctx.score, mask = options + _AUX_LOSS_DEFAULTS[len(options) :]
    ctx.save_for_backward(logits, counts, mask)
    ctx.inputs = len(inputs)


#: Of the operator's options: loss, score, token_mask.
_AUX_LOSS_DEFAULTS: list[str | None] = ["balance", "softmax", None]


def _aux_loss_backward(ctx, dloss):
    logits, counts, mask = ctx.saved_tensors
    dlogits = torch.ops.sonicmoe.aux_loss_backward.default(
        dloss.contiguous(), logits, counts, ctx.loss, ctx.score, mask
    )
    return _autograd.padded(ctx, dlogits)


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
    dlogits = torch.ops.sonicmoe.token_rounding_backward.default(
        dscores.contiguous(), *ctx.saved_tensors, ctx.layer
    )
    return _autograd.padded(ctx, dlogits)


if AVAILABLE:
    torch.ops.load_library(_LIBRARY)
    for _name, _fake in _fakes.FAKES.items():
        torch.library.register_fake(f"sonicmoe::{_name}", _fake)
        _autograd.refuse_vmap(_name)
    _flops.register()
    layer_forward = _autograd.differentiable(
        "layer_forward", _save_for_layer_backward, _layer_backward, 3
    )
    routed_forward = _autograd.differentiable(
        "routed_forward", _save_for_routed_backward, _routed_backward, 2
    )
    ids_forward = _autograd.differentiable("ids_forward", _save_for_ids_backward, _ids_backward, 2)
    logits_forward = _autograd.differentiable(
        "logits_forward", _save_for_logits_backward, _logits_backward, 2
    )
    _grouped_forward = _autograd.differentiable(
        "grouped_forward", _save_for_grouped_backward, _grouped_backward, 1
    )
    _grouped_forward_into = _autograd.function(
        "grouped_forward_out", _forward_into, _save_for_grouped_backward, _grouped_backward, 1
    )
    token_rounding = _autograd.differentiable(
        "token_rounding", _save_for_token_rounding_backward, _token_rounding_backward
    )
    aux_loss = _autograd.differentiable("aux_loss", _save_for_aux_loss_backward, _aux_loss_backward)
