"""Loads the extension and gives its operators shapes for tracing and derivatives.

The operators themselves, `torch.ops.sonicmoe.*`, are described in `csrc/operators.h`.
"""

import functools
import itertools
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
# a gradient needs the probabilities of all experts. What the weights' gradients are added to is
# passed on as it is: another backward may add to it in between, which is no mistake.


def _keep_optional(ctx, inputs, indices):
    """Which inputs' gradients backward can do without: their indices, and those that autograd
    gives them, which counts tensors only. None for an input that is not there."""
    tensors = [isinstance(value, torch.Tensor) for value in inputs]
    places = list(itertools.accumulate(tensors, initial=0))
    ctx.optional = [(i, places[i]) if tensors[i] else None for i in indices]


def _wants(ctx):
    """For each of those, whether this backward is asked for its gradient."""
    if torch.compiler.is_compiling():
        return [pair is not None and ctx.needs_input_grad[pair[0]] for pair in ctx.optional]
    return [pair is not None and _reaches(ctx, pair[1]) for pair in ctx.optional]


def _reaches(ctx, index):
    """Whether this backward goes on to what made the tensor input `index`: not where only other
    gradients were asked for (`autograd.grad`, `backward(inputs=...)`)."""
    node = ctx.next_functions[index][0]
    try:
        return node is not None and _will_execute(node)
    except RuntimeError:  # a leaf whose gradient autograd.grad was asked for; or nobody can tell
        return True


def _returned(ctx, wants, has_bias, dw1, db1, dw2, db2, dw1_up, db1_up):
    """Gradients for autograd of w1, b1, w2, b2 and, behind three others, of w1_up and b1_up. Where
    those of the weights were added to main_grads, it hears of that; tracing finds out from the
    schema."""
    wanted = wants[-3:]
    if any(t is not None for t in ctx.main_grads):
        written = [t for t, wants_it in zip(ctx.main_grads, wanted, strict=True) if wants_it]
        if written and not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(written)
        wanted = False, False, False
    return (
        dw1 if wanted[0] else None,
        db1 if has_bias else None,
        dw2 if wanted[1] else None,
        db2 if has_bias else None,
        None,
        None,
        None,
        dw1_up if wanted[2] else None,
        db1_up if has_bias and ctx.optional[-1] is not None else None,
    )


def _gradients(ctx, *gradients):
    """Of the forward's inputs: those of the first ones, and None of the others."""
    return *gradients, *[None] * (ctx.inputs - len(gradients))


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
    x, router_w, w1, _, w2, b2, layer, w1_main_grad, w2_main_grad, w1_up, _, w1_up_main_grad = (
        inputs
    )
    o, logits, counts, preact, routing = output
    kept_logits = logits if _keeps_logits(_options(layer)) else None
    ctx.save_for_backward(x, router_w, w1, w2, b2, kept_logits, preact, routing, w1_up)
    ctx.layer, ctx.inputs = layer, len(inputs)
    ctx.main_grads = w1_main_grad, w2_main_grad, w1_up_main_grad
    _keep_optional(ctx, inputs, (0, 1, 2, 4, 9))
    ctx.mark_non_differentiable(counts, preact, routing)
    ctx.set_materialize_grads(False)


def _layer_backward(ctx, dout, dlogits, dcounts, dpreact, drouting):
    if dout is None and dlogits is None:
        return _gradients(ctx)
    x, router_w, w1, w2, b2, logits, preact, routing, w1_up = ctx.saved_tensors
    wants = _wants(ctx)
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
        _place_of_dpreact(ctx, preact),
        *wants[:-1],
        w1_up,
        ctx.main_grads[2],
        wants[-1],
    )
    gradients = _returned(ctx, wants, b2 is not None, *of_experts)
    return _gradients(ctx, dx if wants[0] else None, drouter_w if wants[1] else None, *gradients)


def _save_for_routed_backward(ctx, inputs, output):
    x, _, _, _, w1, _, w2, b2, layer, w1_main_grad, w2_main_grad, w1_up, _, w1_up_main_grad = inputs
    o, counts, preact, routing = output
    ctx.save_for_backward(x, w1, w2, b2, preact, routing, w1_up)
    ctx.layer, ctx.inputs = layer, len(inputs)
    ctx.main_grads = w1_main_grad, w2_main_grad, w1_up_main_grad
    _keep_optional(ctx, inputs, (0, 4, 6, 11))
    ctx.mark_non_differentiable(counts, preact, routing)
    ctx.set_materialize_grads(False)


def _routed_backward(ctx, dout, dcounts, dpreact, drouting):
    if dout is None:
        return _gradients(ctx)
    x, w1, w2, b2, preact, routing, w1_up = ctx.saved_tensors
    wants = _wants(ctx)
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
        _place_of_dpreact(ctx, preact),
        *wants[:-1],
        w1_up,
        ctx.main_grads[2],
        wants[-1],
    )
    gradients = _returned(ctx, wants, b2 is not None, *of_experts)
    return _gradients(ctx, dx if wants[0] else None, dscores, None, None, *gradients)


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
        return _gradients(ctx)
    dlogits = torch.ops.sonicmoe.token_rounding_backward(
        dscores.contiguous(), *ctx.saved_tensors, ctx.layer
    )
    return _gradients(ctx, dlogits)


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
        if torch.compiler.is_compiling():
            return operator(*inputs)
        if torch.is_grad_enabled():
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():  # nothing to save
            return operator(*inputs)

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
