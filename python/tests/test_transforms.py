"""The module in PyTorch's transforms: torch.func, and what of it is refused."""

import pytest
import torch
from test_module import ROUTINGS, Called, D, E, N, T, backward, make_module
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

import sonicmoe
from sonicmoe import grouped_experts


def transformed(moe):
    """A loss of parameters and x, and both without a history."""
    parameters = {name: p.detach() for name, p in moe.named_parameters()}

    def loss(parameters, x):
        o, aux_loss = functional_call(moe, parameters, (x,))
        return o.square().sum() + aux_loss

    return loss, parameters, torch.randn(T, D)


def expect_gradients(moe, x, got):
    backward(moe(x))
    for name, p in moe.named_parameters():
        assert torch.equal(got[name], p.grad), name


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("called_router", [False, True])
def test_grad_and_vjp(called_router, routing):
    moe = make_module(routing=routing, bias=True, softmax_over_topk=False)
    if called_router:
        moe.router = Called(D, E)
    loss, parameters, x = transformed(moe)
    got, dx = grad(loss, argnums=(0, 1))(parameters, x)
    value, pullback = vjp(loss, parameters, x)
    leaf = x.clone().requires_grad_()
    expect_gradients(moe, leaf, got)
    assert torch.equal(dx, leaf.grad) and torch.equal(value, loss(parameters, x))
    for name, gradient in pullback(torch.tensor(2.0))[0].items():
        torch.testing.assert_close(gradient, 2 * got[name])
    # Leaves outside of the transform have gradients of their own.
    moe.zero_grad()
    leaf.grad = None
    scale = torch.ones((), requires_grad=True)
    grad(lambda s: loss(dict(moe.named_parameters()), s * leaf))(scale)
    backward(moe(leaf))
    assert torch.equal(dx, leaf.grad)


def test_functional_call_gives_gradients():
    moe = make_module()
    loss, parameters, x = transformed(moe)
    leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
    loss(leaves, x).backward()
    expect_gradients(moe, x, {name: leaf.grad for name, leaf in leaves.items()})


@pytest.mark.parametrize("routing", ROUTINGS)
def test_batches_of_vmap_are_refused(routing):
    moe = make_module(routing=routing)
    loss, parameters, x = transformed(moe)
    batch = torch.stack([x, x])
    words = "^sonicmoe: got a batch of vmap .* allowed: calls without it; x"
    with pytest.raises(NotImplementedError, match=words):
        vmap(lambda x: moe(x)[0])(batch)
    with pytest.raises(NotImplementedError, match=words), torch.no_grad():
        vmap(lambda x: moe(x)[0])(batch)
    with pytest.raises(NotImplementedError, match=words):
        vmap(grad(loss), in_dims=(None, 0))(parameters, batch)
    with pytest.raises(NotImplementedError, match=words):
        jacrev(lambda x: moe(x)[0])(x)
    with pytest.raises(NotImplementedError, match=words):
        o, cotangents = moe(x)[0], torch.randn(2, T, D)
        torch.autograd.grad(o, list(moe.parameters()), cotangents, is_grads_batched=True)


def test_second_and_forward_derivatives_are_refused():
    loss, parameters, x = transformed(make_module())
    words = "has no second derivative: got a derivative of a gradient, allowed: first ones; "
    with pytest.raises(NotImplementedError, match=words):
        grad(lambda x: grad(loss, argnums=1)(parameters, x).square().sum())(x)
    moe = make_module()
    with pytest.raises(NotImplementedError, match="no second derivative: got create_graph=True"):
        torch.autograd.grad(moe(x)[0].sum(), moe.c_fc.weight, create_graph=True)
    words = "^sonicmoe: got a tangent of forward-mode differentiation"
    with pytest.raises(NotImplementedError, match=words):
        jvp(lambda x: loss(parameters, x), (x,), (x,))
    with pytest.raises(NotImplementedError, match="^sonicmoe: got a "):
        hessian(loss, argnums=1)(parameters, x)
    frozen = make_module().requires_grad_(False)
    rows, counts = torch.randn(T, D), torch.full((E,), T // E)
    experts = torch.randn(E, 2 * N, D), torch.randn(E, D, N)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        dual_rows = torch.autograd.forward_ad.make_dual(rows, rows)
        for call in (
            lambda: moe(dual),
            lambda: frozen(dual),
            lambda: moe(dual, is_inference_mode=True),
            lambda: grouped_experts(dual_rows, counts, *experts),
            lambda: grouped_experts(dual_rows, counts, *experts, out=torch.empty(T, D)),
            lambda: sonicmoe.z_loss(dual),
        ):
            with torch.no_grad(), pytest.raises(NotImplementedError, match=words):
                call()
            with pytest.raises(NotImplementedError, match=words):
                call()
        moe(x)  # has no tangent


def test_memory_of_the_caller_is_refused_in_transforms():
    rows, counts = torch.randn(T, D), torch.full((E,), T // E)
    w1, w2, out = torch.randn(E, 2 * N, D), torch.randn(E, D, N), torch.empty(T, D)

    def loss(rows, **options):
        return grouped_experts(rows, counts, w1, w2, **options).square().sum()

    leaf = rows.clone().requires_grad_()
    loss(leaf).backward()
    assert torch.equal(grad(loss)(rows), leaf.grad)
    with pytest.raises(NotImplementedError, match="^out: got a tensor, allowed: None, in torch.f"):
        grad(lambda rows: loss(rows, out=out))(rows)
