"""The layer against plain PyTorch: every activation, router mode, layout, bias and dtype."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import (
    FORMS,
    ROUTERS,
    activation_layouts,
    assert_as_good,
    at_odd_address,
    everything_of,
    make_layer,
    permuted,
    router_text,
    run,
    run_plain,
)

from sonicmoe import ActivationType, KernelBackendMoE, MoE, enums, functional, reference
from sonicmoe._check import W1_LAYOUTS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compare(layer, k, activation, router, layout="interleaved", form=permuted):
    o, logits, counts, leaves = run(layer, k, activation, router, layout, form)
    _, ids = torch.ops.sonicmoe.top_k(logits.detach(), router_text(k, router))
    args = (ids.long(), activation, router, layout)
    plain_o, plain_logits, plain_counts, plain_leaves = run_plain(layer, *args)
    exact_o, exact_logits, _, exact_leaves = run_plain(layer.to(torch.float64), *args)
    assert torch.equal(counts, plain_counts) and counts.dtype == torch.int32

    # Losses on both outputs, in the dtype of each run.
    do, dlogits = torch.randn(o.shape).to(o.dtype), torch.randn(logits.shape).to(o.dtype)
    for outputs in ((o, logits), (plain_o, plain_logits), (exact_o, exact_logits)):
        torch.autograd.backward(outputs, [do.to(outputs[0]), dlogits.to(outputs[0])])

    assert_as_good("o", o, plain_o, exact_o)
    assert_as_good("logits", logits, plain_logits, exact_logits)
    for name, leaf in leaves.items():
        assert_as_good(f"d{name}", leaf.grad, plain_leaves[name].grad, exact_leaves[name].grad)


PARAMETRIZED = [
    "swiglu(limit=0.75)",
    "swiglu_clamp_after(limit=0.5)",
    "swiglu_oai(alpha=1.25,limit=0.75)",
    "swiglu_oai(alpha=-0.5,limit=inf)",
    "situ_glu(beta=1.5,alpha=0.75)",
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", W1_LAYOUTS)
@pytest.mark.parametrize("activation", PARAMETRIZED)
def test_parameters_match_plain_pytorch(activation, layout, bias, dtype):
    layer = make_layer(activation, bias, DTYPES[dtype], layout=layout)
    compare(layer, 2, activation, "softmax_over_topk", layout)
    defaults = run(layer, 2, activation.partition("(")[0], "softmax_over_topk", layout)[0]
    got = run(layer, 2, activation, "softmax_over_topk", layout)[0]
    assert not torch.equal(got, defaults)


@pytest.mark.parametrize("activation", PARAMETRIZED)
@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_parameters_of_the_module(activation, routing):
    torch._dynamo.reset()
    moe = MoE(6, 2, 24, 16, activation, True, 0.5, routing=routing, tile=8)
    assert moe.activation_function == activation and activation in repr(moe)
    x, dout = torch.randn(48, 24), torch.randn(48, 24)
    eager = everything_of(moe, moe, x, dout)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    for a, b in zip(eager, everything_of(compiled, moe, x, dout), strict=True):
        assert torch.equal(a, b)
    plain = everything_of(lambda leaf: moe(leaf, KernelBackendMoE.torch), moe, x, dout)
    for a, b in zip(eager, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_text_of_the_defaults_is_the_name():
    """The defaults that Python knows are those of the library, of every kind with parameters."""
    texts = [text for text in re.findall(r"\w+(?:\([^)]*\))?", enums.allowed_activations())]
    assert [text.partition("(")[0] for text in texts] == [a.value for a in ActivationType]
    for text, activation in zip(texts, ActivationType, strict=True):
        layer = make_layer(activation)
        by_text = run(layer, 2, text, "softmax_over_topk")[0]
        assert torch.equal(by_text, run(layer, 2, activation, "softmax_over_topk")[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("activation, layout", activation_layouts(*ActivationType))
@pytest.mark.parametrize("form", FORMS)
def test_matches_plain_pytorch(form, activation, layout, router, bias, dtype):
    layer = make_layer(activation, bias, DTYPES[dtype], layout=layout)
    compare(layer, 2, activation, router, layout, FORMS[form])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tokens, experts, k",
    [(1, 6, 2), (3, 6, 6), (40, 2, 1), (130, 9, 3), (5, 64, 2)],
    ids=["one_token", "all_experts", "k1", "above_a_tile_odd_experts", "experts_without_rows"],
)
def test_sizes(tokens, experts, k, dtype):
    layer = make_layer(bias=True, dtype=DTYPES[dtype], tokens=tokens, experts=experts)
    compare(layer, k, ActivationType.SWIGLU, "topk_over_softmax")


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_expert(dtype):
    layer = make_layer(bias=True, dtype=DTYPES[dtype], experts=1)
    compare(layer, 1, ActivationType.SWIGLU, "softmax_over_topk")


def test_calls_of_several_threads_and_sizes_do_not_share_workspace():
    # Every workspace is large enough to be kept between calls, and they differ in size.
    def results(layer):
        o, _, _, leaves = run(layer, 2, ActivationType.SWIGLU, "softmax_over_topk")
        o.square().sum().backward()
        return [o.detach(), *(leaf.grad for leaf in leaves.values())]

    layers = [make_layer(tokens=tokens) for tokens in (6000, 40000, 5000, 12000) * 3]
    expected = [results(layer) for layer in layers]
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(results, layers), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("bias", [False, True])
def test_no_tokens(bias):
    layer = make_layer(bias=bias, tokens=0)
    o, logits, counts, leaves = run(layer, 2, ActivationType.SWIGLU, "softmax_over_topk")
    loss = functional.switch_loss(logits, counts)
    assert o.shape == (0, 24) and logits.shape == (0, 6) and loss.item() == 0
    (o.sum() + loss).backward()
    for name, leaf in leaves.items():
        assert leaf.grad.shape == leaf.shape and not leaf.grad.any(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lower_expert(dtype):
    # Few distinct values, so that nearly every token has ties at the K-th place.
    logits = torch.randint(0, 4, (200, 32)).to(DTYPES[dtype])
    for router, modes in ROUTERS.items():
        scores, ids = torch.ops.sonicmoe.top_k(logits, router_text(5, router))
        plain_scores, plain_ids = reference.route(logits, 5, *modes)
        assert torch.equal(ids, plain_ids.int())
        # fp32: an exp, a sum of at most 32 terms and a division on either side.
        torch.testing.assert_close(scores, plain_scores, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_switch_loss(dtype):
    logits = (2 * torch.randn(100, 12)).to(DTYPES[dtype])
    counts = torch.randint(0, 30, (12,), dtype=torch.int32)
    runs = []
    for function, leaf in (
        (functional.switch_loss, logits.clone()),
        (reference.switch_loss, logits.clone()),
        (reference.switch_loss, logits.double()),
    ):
        leaf.requires_grad_()
        loss = function(leaf, counts)
        (3 * loss).backward()
        runs.append((loss.detach(), leaf.grad))
    (loss, grad), (plain, plain_grad), (exact, exact_grad) = runs
    strided = counts.repeat_interleave(2)[::2]
    assert torch.equal(functional.switch_loss(logits, strided), loss)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert_as_good("loss", loss, plain, exact)
    assert_as_good("dlogits", grad, plain_grad, exact_grad)


@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 3, 24), (0, 3, 24)])
def test_module_takes_any_leading_shape(shape):
    module = MoE(6, 2, 24, 16, ActivationType.SWIGLU, True, 0.2)
    x = torch.randn(shape, requires_grad=True)
    o, aux_loss = module(x)
    plain, plain_loss = module(x, KernelBackendMoE.torch)
    assert o.shape == shape and aux_loss.shape == ()
    torch.testing.assert_close(o, plain)
    torch.testing.assert_close(aux_loss, plain_loss)
    (o.sum() + aux_loss).backward()
    assert x.grad.shape == shape


@pytest.mark.parametrize("activation", ActivationType)
def test_activations_by_name(activation):
    layer = make_layer(activation)
    by_value = run(layer, 2, activation, "softmax_over_topk")[0]
    assert torch.equal(by_value, run(layer, 2, activation.value, "softmax_over_topk")[0])
    assert MoE(6, 2, 24, 16, activation.value, False, 0.2).activation_function is activation


def test_strided_inputs_and_gradients():
    layer = make_layer()
    x = torch.randn(24, 48).t().requires_grad_()  # (48, 24), not contiguous
    do = torch.randn(24, 48).t()
    w1, w2 = permuted(layer.w1), permuted(layer.w2)
    o, _, _ = functional.moe_TC_softmax_topk_layer(x, layer.router_w, w1, None, w2, None, 2)
    o.backward(do)
    leaf = x.detach().contiguous().requires_grad_()
    dense, _, _ = functional.moe_TC_softmax_topk_layer(leaf, layer.router_w, w1, None, w2, None, 2)
    dense.backward(do.contiguous())
    assert torch.equal(o, dense) and torch.equal(x.grad, leaf.grad)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_inputs_and_gradients_that_start_anywhere(routing, compiled):
    """A part of a tensor may start anywhere, and so may the gradient of torch.cat."""
    moe = MoE(6, 2, 24, 16, ActivationType.SWIGLU, True, 0.2, routing=routing, tile=8)
    call = torch.compile(moe, backend="aot_eager") if compiled else moe
    x, dout = torch.randn(48, 24), torch.randn(48, 24)
    got = everything_of(call, moe, at_odd_address(x), at_odd_address(dout))
    for a, b in zip(got, everything_of(moe, moe, x, dout), strict=True):
        assert torch.equal(a, b)
    y, aux_loss = moe(x)
    torch.cat([aux_loss.view(1), y.flatten()]).sum().backward()


def test_logits_and_their_gradients_that_start_anywhere():
    layer = make_layer()
    w1, w2 = permuted(layer.w1), permuted(layer.w2)
    router_w = layer.router_w.requires_grad_()
    _, logits, counts = functional.moe_TC_softmax_topk_layer(
        layer.x, router_w, w1, None, w2, None, 2
    )
    dlogits = torch.randn(logits.shape)
    aligned, odd = (
        torch.autograd.grad(logits, router_w, place(dlogits), retain_graph=True)[0]
        for place in (torch.clone, at_odd_address)
    )
    assert torch.equal(aligned, odd)
    for function in (
        lambda logits: functional.switch_loss(logits, counts),
        lambda logits: functional.token_rounding(logits, 2, tile=8)[0].square().sum(),
    ):
        places = (torch.clone, at_odd_address)
        leaves = [place(logits.detach()).requires_grad_() for place in places]
        values = [function(leaf) for leaf in leaves]
        gradients = [torch.autograd.grad(v, x)[0] for v, x in zip(values, leaves, strict=True)]
        assert torch.equal(*values) and torch.equal(*gradients)
    odd = at_odd_address(logits.detach())
    both = [torch.ops.sonicmoe.top_k(t, "top_k=2") for t in (logits.detach(), odd)]
    for a, b in zip(*both, strict=True):
        assert torch.equal(a, b)


class NoGradient(torch.autograd.Function):
    """Its backward says that nothing comes back, as None."""

    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, gradient: None)


@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_no_gradient_of_the_output(routing):
    moe = MoE(6, 2, 24, 16, ActivationType.SWIGLU, False, 0.2, routing=routing, tile=8)
    x = torch.randn(48, 24, requires_grad=True)
    o, aux_loss = moe(x)
    (NoGradient.apply(o).sum() + aux_loss).backward()
    leaf = x.detach().requires_grad_()
    _, plain_loss = moe(leaf, KernelBackendMoE.torch)
    plain_loss.backward()
    torch.testing.assert_close(x.grad, leaf.grad)
    # Nothing at all comes back: no gradient, and no mistake.
    leaf = x.detach().requires_grad_()
    NoGradient.apply(moe(leaf)[0]).sum().backward()
    assert leaf.grad is None


def test_no_gradient_of_rounded_scores():
    logits = torch.randn(40, 4, requires_grad=True)
    scores, *_ = functional.token_rounding(logits, 2, tile=8)
    NoGradient.apply(scores).sum().backward()
    assert logits.grad is None


def test_loss_on_the_logits_alone():
    layer = make_layer()
    _, logits, counts, leaves = run(layer, 2, ActivationType.SWIGLU, "softmax_over_topk")
    functional.switch_loss(logits, counts).backward()
    assert leaves["router_w"].grad.any() and leaves["x"].grad.any()
    assert not leaves["w1"].grad.any() and not leaves["w2"].grad.any()
