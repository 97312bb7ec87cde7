"""Loads the extension and gives its operators shapes for tracing and derivatives.

The operators themselves, `torch.ops.sonicmoe.*`, are described in `csrc/operators.h`.
"""

from collections.abc import Callable
from pathlib import Path

import torch

_LIBRARY = Path(__file__).parent / "lib" / "libsonicmoe_torch.so"

#: False in a source tree that is not built, where only the `torch` backend works.
AVAILABLE = _LIBRARY.exists()


def require() -> None:
    if not AVAILABLE:
        raise RuntimeError(
            f"sonicmoe's extension is missing ({_LIBRARY}): run `make build` in a source tree, "
            "or `pip install .`; KernelBackendMoE.torch works without it"
        )


# Shapes, dtypes and devices of what the operators return. The routing block is 20 bytes a row and
# 4(2E+1), or 16 bytes a row and 4(2E+1) + 4(T+1) for lists; the operators check that it is so.


def _empty(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_empty(shape, dtype=dtype)


def _layer_forward_fake(
    x, router_w, w1, b1, w2, b2, top_k, activation, softmax_over_topk, norm_topk_probs,
    concat_layout, inference, w1_main_grad=None, w2_main_grad=None,
):  # fmt: skip
    tokens, experts = x.shape[0], router_w.shape[0]
    rows = 0 if inference else tokens * top_k
    return (
        _empty(x, *x.shape),
        _empty(x, tokens, experts),
        _empty(x, experts, dtype=torch.int32),
        _empty(x, rows, w1.shape[1]),
        _empty(x, 0 if inference else 5 * rows + 2 * experts + 1, dtype=torch.int32),
    )


def _routed_forward_fake(
    x, scores, token_ids, expert_ids, w1, b1, w2, b2, activation, concat_layout, inference,
    w1_main_grad=None, w2_main_grad=None,
):  # fmt: skip
    tokens, experts = x.shape[0], w1.shape[0]
    rows = 0 if inference else scores.shape[0]
    return (
        _empty(x, *x.shape),
        _empty(x, experts, dtype=torch.int32),
        _empty(x, rows, w1.shape[1]),
        _empty(x, 0 if inference else 4 * rows + 2 * experts + tokens + 2, dtype=torch.int32),
    )


def _weight_gradients_fake(w1, w2, has_bias, has_main_grads):
    experts = w1.shape[0]
    returned = 0 if has_main_grads else experts
    return (
        _empty(w1, returned, *w1.shape[1:]),
        _empty(w1, experts if has_bias else 0, w1.shape[1]),
        _empty(w2, returned, *w2.shape[1:]),
        _empty(w2, experts if has_bias else 0, w2.shape[1]),
    )


def _layer_backward_fake(
    dout, dlogits, x, router_w, w1, w2, b2, logits, preact, routing, top_k, activation,
    softmax_over_topk, norm_topk_probs, concat_layout, w1_main_grad=None, w2_main_grad=None,
    dpreact=None,
):  # fmt: skip
    gradients = _weight_gradients_fake(w1, w2, b2 is not None, w1_main_grad is not None)
    return _empty(x, *x.shape), _empty(router_w, *router_w.shape), *gradients


def _routed_backward_fake(
    dout, x, w1, w2, b2, preact, routing, activation, concat_layout, w1_main_grad=None,
    w2_main_grad=None, dpreact=None,
):  # fmt: skip
    gradients = _weight_gradients_fake(w1, w2, b2 is not None, w1_main_grad is not None)
    return _empty(x, *x.shape), _empty(x, preact.shape[0], dtype=torch.float32), *gradients


def _aux_loss_fake(logits, counts):
    return _empty(logits, dtype=torch.float32)


def _aux_loss_backward_fake(dloss, logits, counts):
    return _empty(logits, *logits.shape)


def _top_k_fake(logits, k, softmax_over_topk, norm_topk_probs):
    tokens = logits.shape[0]
    return (
        _empty(logits, tokens, k, dtype=torch.float32),
        _empty(logits, tokens, k, dtype=torch.int32),
    )


def _count_cumsum_fake(ids, experts):
    return _empty(ids, experts), _empty(ids, experts)


def _token_rounding_fake(
    logits, draws, top_k, softmax_over_topk, norm_topk_probs, rule, tile
):
    tokens, experts = logits.shape
    chosen = tokens * top_k
    grown = chosen + torch.sym_min(experts, chosen) * (tile - 1)
    capacity = torch.sym_min(tokens * experts, grown)
    return (
        _empty(logits, capacity, dtype=torch.float32),
        _empty(logits, capacity, dtype=torch.int32),
        _empty(logits, capacity, dtype=torch.int32),
        _empty(logits, experts, dtype=torch.int32),
        _empty(logits, experts, dtype=torch.int32),
    )


def _token_rounding_backward_fake(
    dscores, logits, token_ids, expert_ids, top_k, softmax_over_topk, norm_topk_probs
):
    return _empty(logits, *logits.shape)


# Derivatives. Only x, H and the routing block are kept besides the parameters, and the logits where
# a gradient needs the probabilities of all experts. What the weights' gradients are added to is
# passed on as it is: another backward may add to it in between, which is no mistake.


def _keep_main_grads(ctx, main_grads, inputs, weights):
    """And where the weights (indices) are among the inputs, as autograd counts: tensors only."""
    ctx.main_grads = main_grads
    if main_grads[0] is not None:
        ctx.weights_at = [sum(torch.is_tensor(t) for t in inputs[:index]) for index in weights]


def _reaches(ctx, index):
    """Whether this backward goes on to what made the tensor input `index`: not where only other
    gradients were asked for (`autograd.grad`, `backward(inputs=...)`)."""
    node = ctx.next_functions[index][0]
    try:
        return node is not None and _will_execute(node)
    except RuntimeError:  # a leaf whose gradient autograd.grad was asked for
        return True


def _main_grads(ctx):
    """What this backward adds the weights' gradients to: nothing where it was asked for neither of
    them, and a place to forget for the one of two that it was not asked for."""
    if ctx.main_grads[0] is None or torch.compiler.is_compiling():
        return ctx.main_grads
    reached = [_reaches(ctx, index) for index in ctx.weights_at]
    if not any(reached):
        return None, None
    return tuple(
        main_grad if wanted else torch.empty_like(main_grad)
        for main_grad, wanted in zip(ctx.main_grads, reached, strict=True)
    )


def _added(main_grads):
    """Tells autograd that the operator has written to them. Tracing finds out from the schema."""
    if main_grads[0] is not None and not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(main_grads)


# Missing in a torch that we do not know: then every backward reaches everything ...
_will_execute = getattr(torch._C, "_will_engine_execute_node", lambda node: True)

# ... and may be followed by another.
_keeps_graph = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def _place_of_dpreact(ctx, preact):
    """H itself where nobody reads it after this backward: dH takes its place, in eager calls whose
    graph is not kept (retain_graph). None: dH is one more tensor of that size, for a while."""
    if torch.compiler.is_compiling() or not getattr(ctx, "owns_preact", False) or _keeps_graph():
        return None
    torch.autograd.graph.increment_version(preact)
    return preact


def _save_for_layer_backward(ctx, inputs, output):
    x, router_w, w1, b1, w2, b2 = inputs[:6]
    *options, inference, w1_main_grad, w2_main_grad = inputs[6:]
    o, logits, counts, preact, routing = output
    top_k, activation, softmax_over_topk, norm_topk_probs, concat_layout = options
    keeps_logits = not softmax_over_topk and not norm_topk_probs
    ctx.save_for_backward(
        x, router_w, w1, w2, b2, logits if keeps_logits else None, preact, routing
    )
    ctx.options = options
    _keep_main_grads(ctx, (w1_main_grad, w2_main_grad), inputs, (2, 4))
    ctx.mark_non_differentiable(counts, preact, routing)
    ctx.set_materialize_grads(False)


def _layer_backward(ctx, dout, dlogits, dcounts, dpreact, drouting):
    if dout is None and dlogits is None:
        return (None,) * 14
    x, router_w, w1, w2, b2, logits, preact, routing = ctx.saved_tensors
    main_grads = _main_grads(ctx)
    dx, drouter_w, dw1, db1, dw2, db2 = torch.ops.sonicmoe.layer_backward(
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
        *ctx.options,
        *main_grads,
        _place_of_dpreact(ctx, preact),
    )
    _added(main_grads)
    if b2 is None:
        db1 = db2 = None
    if ctx.main_grads[0] is not None:
        dw1 = dw2 = None
    return dx, drouter_w, dw1, db1, dw2, db2, *[None] * 8


def _save_for_routed_backward(ctx, inputs, output):
    x, scores, token_ids, expert_ids, w1, b1, w2, b2 = inputs[:8]
    activation, concat_layout, inference, w1_main_grad, w2_main_grad = inputs[8:]
    o, counts, preact, routing = output
    ctx.save_for_backward(x, w1, w2, b2, preact, routing)
    ctx.options = activation, concat_layout
    _keep_main_grads(ctx, (w1_main_grad, w2_main_grad), inputs, (4, 6))
    ctx.mark_non_differentiable(counts, preact, routing)
    ctx.set_materialize_grads(False)


def _routed_backward(ctx, dout, dcounts, dpreact, drouting):
    if dout is None:
        return (None,) * 13
    x, w1, w2, b2, preact, routing = ctx.saved_tensors
    main_grads = _main_grads(ctx)
    dx, dscores, dw1, db1, dw2, db2 = torch.ops.sonicmoe.routed_backward(
        dout.contiguous(),
        x,
        w1,
        w2,
        b2,
        preact,
        routing,
        *ctx.options,
        *main_grads,
        _place_of_dpreact(ctx, preact),
    )
    _added(main_grads)
    if b2 is None:
        db1 = db2 = None
    if ctx.main_grads[0] is not None:
        dw1 = dw2 = None
    return dx, dscores, None, None, dw1, db1, dw2, db2, *[None] * 5


def _save_for_aux_loss_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _aux_loss_backward(ctx, dloss):
    return torch.ops.sonicmoe.aux_loss_backward(dloss.contiguous(), *ctx.saved_tensors), None


def _save_for_token_rounding_backward(ctx, inputs, output):
    logits, draws, top_k, softmax_over_topk, norm_topk_probs, rule, tile = inputs
    scores, token_ids, expert_ids, counts, frequency = output
    ctx.save_for_backward(logits, token_ids, expert_ids)
    ctx.options = top_k, softmax_over_topk, norm_topk_probs
    ctx.mark_non_differentiable(token_ids, expert_ids, counts, frequency)
    ctx.set_materialize_grads(False)


def _token_rounding_backward(ctx, dscores, *dlists):
    if dscores is None:
        return (None,) * 7
    dlogits = torch.ops.sonicmoe.token_rounding_backward(
        dscores.contiguous(), *ctx.saved_tensors, *ctx.options
    )
    return dlogits, None, None, None, None, None, None


def _differentiable(name: str, save: Callable, backward: Callable) -> Callable:
    """The operator with its derivative; a derivative of that is refused.

    Tracing sees the registered derivative. Eager calls take the same functions through an
    autograd.Function of our own, which costs about half the host time.
    """
    operator = getattr(torch.ops.sonicmoe, name).default

    def backward_once(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"sonicmoe::{name} has no second derivative: got create_graph=True, allowed: False"
            )
        return backward(ctx, *gradients)

    torch.library.register_autograd(operator, backward_once, setup_context=save)

    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            output = operator(*inputs)
        save(ctx, inputs, output)
        ctx.owns_preact = True  # no caller of ours hands it out
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward_once)}
    function = type(name, (torch.autograd.Function,), members)

    def call(*inputs):
        return operator(*inputs) if torch.compiler.is_compiling() else function.apply(*inputs)

    return call


if AVAILABLE:
    torch.ops.load_library(_LIBRARY)
    for _name, _fake in (
        ("layer_forward", _layer_forward_fake),
        ("layer_backward", _layer_backward_fake),
        ("routed_forward", _routed_forward_fake),
        ("routed_backward", _routed_backward_fake),
        ("aux_loss", _aux_loss_fake),
        ("aux_loss_backward", _aux_loss_backward_fake),
        ("top_k", _top_k_fake),
        ("count_cumsum", _count_cumsum_fake),
        ("token_rounding", _token_rounding_fake),
        ("token_rounding_backward", _token_rounding_backward_fake),
    ):
        torch.library.register_fake(f"sonicmoe::{_name}", _fake)
    layer_forward = _differentiable("layer_forward", _save_for_layer_backward, _layer_backward)
    routed_forward = _differentiable("routed_forward", _save_for_routed_backward, _routed_backward)
    token_rounding = _differentiable(
        "token_rounding", _save_for_token_rounding_backward, _token_rounding_backward
    )
    aux_loss = _differentiable("aux_loss", _save_for_aux_loss_backward, _aux_loss_backward)
