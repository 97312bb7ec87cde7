"""What the derivatives of the operators share.

What the weights' gradients are added to is passed on as it is: another backward may add to it in
between, which is no mistake.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad


def asked_for(ctx):
    """The indices of the inputs whose gradients this backward is asked for. It does not go on to
    all that need one where only some were asked for (`autograd.grad`, `backward(inputs=...)`)."""
    if torch.compiler.is_compiling():
        return [i for i, needs in enumerate(ctx.needs_input_grad) if needs]
    return [i for i, node in _nodes(ctx) if _executes(node)]


def _nodes(ctx):
    """Each input that needs a gradient, by its index, and the node that its gradient goes to."""
    inputs = [i for i, needs in enumerate(ctx.needs_input_grad) if needs]
    # There is one for each tensor, and None for those that need no gradient.
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    return zip(inputs, nodes, strict=True)


def _executes(node):
    try:
        return node is not None and _will_execute(node)
    except RuntimeError:  # a leaf whose gradient autograd.grad was asked for; or nobody can tell
        return True


def zero_before(node, main_grad):
    """Each backward through the node of a layer that adds to that main_grad zeroes it first."""
    nodes = dict(_nodes(node))
    for i, own in zip(node.weights, node.main_grads, strict=True):
        if own is not None and own.data_ptr() == main_grad.data_ptr():
            # What leads on from the node, not the node: a hook that held it would keep it alive.
            node.register_prehook(functools.partial(_zero, main_grad, nodes[i]))


def _zero(main_grad, weight, gradients):
    if _executes(weight):
        main_grad.zero_()


def returned(ctx, asked, dw1, db1, dw2, db2, dw1_up, db1_up):
    """Gradients for autograd of w1, b1, w2, b2 and, behind three others, of w1_up and b1_up. Where
    those of the weights were added to main_grads, it hears of that; tracing finds out from the
    schema."""
    w1, w2, w1_up = ctx.weights
    if any([t is not None for t in ctx.main_grads]):
        written = [t for i, t in zip(ctx.weights, ctx.main_grads, strict=True) if i in asked]
        if written and not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(written)
        dw1 = dw2 = dw1_up = None
    return (
        dw1 if w1 in asked else None,
        db1 if w1 + 1 in asked else None,
        dw2 if w2 in asked else None,
        db2 if w2 + 1 in asked else None,
        None,
        None,
        None,
        dw1_up if w1_up in asked else None,
        db1_up if w1_up + 1 in asked else None,
    )


def padded(ctx, *gradients):
    """Of the forward's inputs: those of the first ones, and None of the others."""
    return *gradients, *[None] * (ctx.inputs - len(gradients))


# Missing in a torch that we do not know: then every backward reaches everything ...
_will_execute = getattr(torch._C, "_will_engine_execute_node", lambda node: True)

# ... and may be followed by another.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)

_unwrap = torch._C._functorch.unwrap_if_dead


def place_of_dpreact(ctx, preact):
    """H itself where nobody reads it after this backward: dH takes its place, in eager calls whose
    graph is not kept (retain_graph). None: dH is one more tensor of that size, for a while. It is
    one anyhow where backward makes H again, which dH then overwrites."""
    if torch.compiler.is_compiling() or not getattr(ctx, "owns_preact", False) or _keeps_graph():
        return None
    if preact.numel() == 0:
        return None
    torch.autograd.graph.increment_version(preact)
    return preact


def _refuse_vmap(*_: object, **__: object) -> None:
    raise NotImplementedError(
        "sonicmoe: got a batch of vmap (is_grads_batched, jacrev, jacfwd, hessian), allowed: calls "
        "without it; x (..., d) takes batches itself, and a loop makes gradients of each sample"
    )


def _refuse_jvp(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(
        "sonicmoe: got a tangent of forward-mode differentiation (jvp, jacfwd), allowed: reverse "
        "mode (backward, torch.func.grad, torch.func.vjp)"
    )


def in_forward_mode() -> bool:
    """Whether tensors may have tangents: inside jvp, linearize or forward_ad.dual_level(). True in
    a torch that does not say."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def refuse_tangents(inputs: Iterable[Any]) -> None:
    """Of a call that autograd does not see: no_grad() leaves forward mode as it is."""
    if in_forward_mode():
        for i in inputs:
            if isinstance(i, torch.Tensor) and forward_ad.unpack_dual(i).tangent is not None:
                _refuse_jvp(None)


def _no_second_derivative(name: str, got: str) -> NotImplementedError:
    return NotImplementedError(
        f"sonicmoe::{name} has no second derivative: got {got}; KernelBackendMoE.torch has one"
    )


class _FirstDerivatives(torch.autograd.Function):
    """Passes `count` gradients on, and refuses their derivatives by the tensors behind them."""

    @staticmethod
    def forward(name: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *gradients):
        raise _no_second_derivative(ctx.name, "a derivative of a gradient, allowed: first ones")

    jvp = staticmethod(_refuse_jvp)
    vmap = staticmethod(_refuse_vmap)


def function(
    name: str, operator: Callable, save: Callable, backward: Callable, outputs: int | None
) -> Callable:
    """`apply` of an autograd.Function of `operator`, for eager calls; a derivative of its backward
    is refused. It returns the first `outputs` of the operator's, or all for None."""

    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            output = operator(*inputs)
        save(ctx, inputs, output)
        ctx.owns_preact = True
        return output if outputs is None else output[:outputs]

    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(_once(name, backward)),
        "jvp": staticmethod(_refuse_jvp),
    }
    eager = type(name, (torch.autograd.Function,), members)
    # Function.apply without what it does for transforms, which never come here: half its time.
    base: Any = super(torch.autograd.Function, eager)  # whose `apply` has no annotation
    apply = base.apply

    def call(*inputs):
        # A tensor that left its transform is what it wraps.
        return apply(*[i if i is None or isinstance(i, str) else _unwrap(i) for i in inputs])

    return call


def _transformed(
    name: str, operator: Callable, save: Callable, backward: Callable
) -> type[torch.autograd.Function]:
    """The same for torch.func's transforms. They want setup_context, which costs eager calls host
    time, and they always run backward so that its derivative could be taken."""

    def forward(*inputs):
        return operator(*inputs)

    def first(ctx, *gradients):
        with torch.no_grad():
            returned = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return returned
        made = [t for t in returned if t is not None]
        others = [t for t in (*gradients, *ctx.saved_tensors) if t is not None]
        passed = iter(_FirstDerivatives.apply(name, len(made), *made, *others))
        return tuple(None if t is None else next(passed) for t in returned)

    members = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(save),
        "backward": staticmethod(first),
        "jvp": staticmethod(_refuse_jvp),
        "vmap": staticmethod(_refuse_vmap),
    }
    return type(name, (torch.autograd.Function,), members)


def _once(name: str, backward: Callable) -> Callable:
    def backward_once(ctx, *gradients):
        if torch.is_grad_enabled():
            raise _no_second_derivative(name, "create_graph=True, allowed: False")
        return backward(ctx, *gradients)

    return backward_once


#: Whether torch.func's transforms are at work.
transforms = torch._C._are_functorch_transforms_active


def differentiable(
    name: str, save: Callable, backward: Callable, outputs: int | None = None
) -> Callable:
    """The operator with its derivative, as a function that returns its first `outputs`, or all for
    None.

    Tracing sees the registered derivative. Eager calls take the same functions through an
    autograd.Function of our own, which costs about half the host time.
    """
    operator = getattr(torch.ops.sonicmoe, name).default
    torch.library.register_autograd(operator, _once(name, backward), setup_context=save)
    eager = function(name, operator, save, backward, outputs)
    transformed = _transformed(name, operator, save, backward)

    def call(*inputs):
        if torch.compiler.is_compiling():
            made = operator(*inputs)
        elif transforms():
            made = transformed.apply(*inputs)
        elif torch.is_grad_enabled():
            return eager(*inputs)
        else:
            refuse_tangents(inputs)
            with torch._C._AutoDispatchBelowAutograd():  # nothing to save
                made = operator(*inputs)
        return made if outputs is None else made[:outputs]

    return call


#: Refusals of what PyTorch would do by a loop over the batch, or refuse in its own words.
_refusals = torch.library.Library("sonicmoe", "IMPL")


def refuse_vmap(name: str) -> None:
    """Of an operator, in torch.func.vmap and in the older vmap behind is_grads_batched."""
    for key in ("FuncTorchBatched", "Batched"):
        _refusals.impl(name, _refuse_vmap, key)
