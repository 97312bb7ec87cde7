"""Gradients of the experts' weights added to `main_grad` in fp32, as Megatron's layers do."""

import copy
import re

import pytest
import torch
from helpers import OVER_SOFTMAX, make_layer, permuted

from sonicmoe import ActivationType, KernelBackendMoE, MoE, functional
from sonicmoe._check import TRANSPOSED_LAYOUTS

T, D, N, E, K = 40, 24, 16, 6, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_module(dtype=torch.float32, activation=ActivationType.SWIGLU, **options):
    return MoE(E, K, D, N, activation, True, 0.2, **options).to(dtype)


def fused(plain):
    """The same module with a random `main_grad` on the experts' weights, and what those were."""
    moe = copy.deepcopy(plain)
    moe.gradient_accumulation_fusion = True
    before = []
    for weight in weights(moe):
        weight.main_grad = torch.randn(weight.shape)
        before.append(weight.main_grad.clone())
    return moe, before


def weights(moe):
    return [moe.c_fc.weight, moe.c_proj.weight]


def backward(moe, x):
    o, aux_loss = moe(x)
    (o.float().square().sum() + aux_loss).backward()


def expect_added(moe, before, gradients):
    for weight, old, gradient in zip(weights(moe), before, gradients, strict=True):
        assert torch.equal(weight.main_grad, old + gradient)


def wide_gradients(plain, x):
    """The fp32 gradients: what is added to zeros. Rounded, they are the plain module's."""
    moe, _ = fused(plain)
    for weight in weights(moe):
        weight.main_grad.zero_()
    backward(moe, x)
    return [weight.main_grad for weight in weights(moe)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [ActivationType.SWIGLU, ActivationType.RELU_SQ])
@pytest.mark.parametrize("concat_layout", [False, True])
@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_backward_adds(dtype, activation, concat_layout, routing):
    options = dict(concat_layout=concat_layout, routing=routing, tile=8)
    plain = make_module(DTYPES[dtype], activation, **options)
    moe, before = fused(plain)
    x = torch.randn(T, D).to(DTYPES[dtype])
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    backward(moe, ours)
    backward(plain, theirs)
    wide = wide_gradients(plain, x)
    for gradient, weight in zip(wide, weights(plain), strict=True):
        assert torch.equal(gradient.to(weight.dtype), weight.grad)
    expect_added(moe, before, wide)
    # Nothing else has changed.
    assert torch.equal(ours.grad, theirs.grad)
    for (name, p), q in zip(moe.named_parameters(), plain.parameters(), strict=True):
        if any(p is weight for weight in weights(moe)):
            assert p.grad is None and not hasattr(p, "grad_added_to_main_grad"), name
        else:
            assert torch.equal(p.grad, q.grad), name


def test_micro_batches_in_any_order():
    plain = make_module()
    moe, before = fused(plain)
    batches = torch.randn(3, T, D)
    losses = [moe(x)[0].square().sum() for x in batches]  # all forward, as in a pipeline
    for i in (1, 0, 2):
        losses[i].backward()
    total = [old.clone() for old in before]
    for i in (1, 0, 2):
        plain.zero_grad()
        plain(batches[i])[0].square().sum().backward()
        for so_far, weight in zip(total, weights(plain), strict=True):
            so_far += weight.grad
    expect_added(moe, total, [0, 0])


@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
@pytest.mark.parametrize("add_bias", [False, True])
@pytest.mark.parametrize("tells", [False, True])
def test_only_a_backward_that_is_asked_for_the_weights_adds(routing, add_bias, tells):
    """`tells`: the weights have `grad_added_to_main_grad`, and so a node before them."""
    plain = MoE(E, K, D, N, ActivationType.SWIGLU, add_bias, 0.2, routing=routing, tile=8)
    moe, _ = fused(plain)
    for weight in weights(moe):
        if tells:
            weight.grad_added_to_main_grad = False
    leaf = torch.randn(T, D, requires_grad=True)
    wide = wide_gradients(plain, leaf.detach())
    gradients = [weight.main_grad.clone() for weight in weights(moe)]

    def expect(first, second):
        """Whether each weight's gradient has been added since the last call."""
        for i, added in enumerate((first, second)):
            if added:
                gradients[i] += wide[i]
            weight = weights(moe)[i]
            assert torch.equal(weight.main_grad, gradients[i])
            if tells:
                assert weight.grad_added_to_main_grad == added
                weight.grad_added_to_main_grad = False
            weight.grad = None

    torch.manual_seed(0)
    plain_x = leaf.detach().requires_grad_()
    backward(plain, plain_x)
    for x in (leaf, leaf * 1):  # a leaf, and what another layer gave
        torch.manual_seed(0)
        o, aux_loss = moe(x)
        loss = o.square().sum() + aux_loss
        (dx,) = torch.autograd.grad(loss, [x], retain_graph=True)
        assert torch.equal(dx, plain_x.grad)
        expect(False, False)
        loss.backward(inputs=[leaf, moe.router.weight], retain_graph=True)
        expect(False, False)
        loss.backward(inputs=weights(moe), retain_graph=True)
        expect(True, True)
        loss.backward(inputs=[moe.c_fc.weight], retain_graph=True)
        expect(True, False)
        loss.backward(inputs=[leaf, moe.c_proj.weight], retain_graph=True)
        expect(False, True)
        torch.autograd.grad(loss, [moe.c_fc.weight], retain_graph=True, allow_unused=True)
        expect(True, False)
        loss.backward()
        expect(True, True)


def test_autocast():
    plain = make_module()
    moe, before = fused(plain)
    x = torch.randn(T, D)
    with torch.autocast("cpu", torch.bfloat16):
        backward(moe, x)
    expect_added(moe, before, wide_gradients(plain.to(torch.bfloat16), x.bfloat16()))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiles_to_one_graph(dtype, backend):
    torch._dynamo.reset()
    plain = make_module(DTYPES[dtype])
    moe, before = fused(plain)
    eager, _ = fused(plain)
    for ours, theirs, old in zip(weights(moe), weights(eager), before, strict=True):
        theirs.main_grad.copy_(old)
        ours.grad_added_to_main_grad = False
    compiled = torch.compile(moe, fullgraph=True, backend=backend)
    for _ in range(2):
        x = torch.randn(T, D).to(DTYPES[dtype])
        backward(compiled, x)
        backward(eager, x)
    for ours, theirs in zip(weights(moe), weights(eager), strict=True):
        # The loss is compiled too: inductor may sum it in another order.
        torch.testing.assert_close(ours.main_grad, theirs.main_grad)
        assert ours.grad is None and ours.grad_added_to_main_grad
    with torch.no_grad():
        assert torch.equal(compiled(x)[0], eager(x)[0])


def test_hooks_of_megatron():
    moe, before = fused(make_module())
    seen = []
    for weight in weights(moe):
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(
            lambda w: seen.append(w.grad_added_to_main_grad and w.grad.shape == w.shape)
        )
    o, _ = moe(torch.randn(T, D))
    assert not any(weight.grad_added_to_main_grad for weight in weights(moe))
    o.square().sum().backward()
    assert seen == [True, True]
    for weight, old in zip(weights(moe), before, strict=True):
        assert not torch.equal(weight.main_grad, old)


def test_main_grad_is_needed_for_training_only():
    plain = make_module(gradient_accumulation_fusion=True)
    x = torch.randn(T, D)
    o, _ = plain(x, is_inference_mode=True)
    with torch.no_grad():
        assert torch.equal(plain(x)[0], o)
    with pytest.raises(ValueError, match="^c_fc.weight.main_grad: got None, allowed: "):
        plain(x)
    for weight in weights(plain):
        weight.requires_grad_(False)
    backward(plain, x)  # frozen experts have no gradients to add
    assert plain.router.weight.grad is not None


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_one_weight_may_be_frozen(frozen, backend, routing):
    torch._dynamo.reset()
    plain = make_module(routing=routing, tile=8)
    weights(plain)[frozen].requires_grad_(False)
    moe, before = fused(plain)
    x = torch.randn(T, D)
    backward(torch.compile(moe, backend=backend) if backend else moe, x)
    backward(plain, x)
    main = [weight.main_grad for weight in weights(moe)]
    other = 1 - frozen
    torch.testing.assert_close(main[other], before[other] + weights(plain)[other].grad)
    assert torch.equal(main[frozen], before[frozen])
    for (name, p), q in zip(moe.named_parameters(), plain.parameters(), strict=True):
        if any(p is weight for weight in weights(moe)):
            assert p.grad is None, name
        else:
            assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("frozen", ["w1", "w2"])
def test_functional_with_one_frozen_weight(lists, frozen):
    other = "w2" if frozen == "w1" else "w1"
    layer = make_layer(bias=True)
    leaves = layer.leaves()
    leaves[frozen].requires_grad_(False)
    main = torch.zeros(leaves[other].shape)
    x, router_w, w1, b1, w2, b2 = leaves.values()
    args = permuted(w1), b1, permuted(w2), b2
    options = {f"{other}_main_grad": permuted(main)}
    ids = torch.randint(0, 48, (70,)), torch.randint(0, 6, (70,))
    scores = torch.rand(70)

    def call(**options):
        if lists:
            return functional.moe_general_routing_inputs(x, scores, *ids, *args, **options)[0]
        return functional.moe_TC_softmax_topk_layer(x, router_w, *args, K, **options)[0]

    call(**options).square().sum().backward()
    assert leaves[other].grad is None and leaves[frozen].grad is None
    call().square().sum().backward()
    assert torch.equal(main, leaves[other].grad) and main.any()
    leaves[frozen].requires_grad_(True)
    with pytest.raises(ValueError, match=f"^{frozen}_main_grad: got None, allowed: a torch."):
        call(**options)


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_functional_adds_to_what_was_asked_for(lists, bias):
    layer = make_layer(bias=bias)
    leaves = layer.leaves()
    x, router_w, w1, b1, w2, b2 = map(leaves.get, ("x", "router_w", "w1", "b1", "w2", "b2"))
    router_w.requires_grad_(False)  # counts as an input all the same
    main = [torch.zeros(layer.w1.shape), torch.zeros(layer.w2.shape)]
    args = permuted(w1), b1, permuted(w2), b2
    options = {"w1_main_grad": permuted(main[0]), "w2_main_grad": permuted(main[1])}
    if lists:
        ids = torch.randint(0, 48, (70,)), torch.randint(0, 6, (70,))
        o = functional.moe_general_routing_inputs(x, torch.rand(70), *ids, *args, **options)[0]
    else:
        o = functional.moe_TC_softmax_topk_layer(x, router_w, *args, K, **options)[0]
    for wanted, added in (
        ([x], (False, False)),
        ([w1], (True, False)),
        ([x, w2], (False, True)),
        ([w1, w2], (True, True)),
    ):
        torch.autograd.grad(o.square().sum(), wanted, retain_graph=True, allow_unused=True)
        assert tuple(bool(t.any()) for t in main) == added
        for t in main:
            t.zero_()


@pytest.mark.parametrize("layout", ["interleaved", *TRANSPOSED_LAYOUTS])
@pytest.mark.parametrize("lists", [False, True])
def test_functional(lists, layout):
    layer = make_layer(bias=True, layout=layout)
    leaves = layer.leaves()
    before = [torch.randn(layer.w1.shape), torch.randn(layer.w2.shape)]
    main = [t.clone() for t in before]
    scores = torch.rand(70)
    ids = torch.randint(0, 48, (70,)), torch.randint(0, 6, (70,))

    def call(leaves, **options):
        x, router_w, w1, b1, w2, b2 = leaves.values()
        w1, w2 = permuted(w1), permuted(w2)
        options["layout"] = layout
        if lists:
            return functional.moe_general_routing_inputs(
                x, scores, *ids, w1, b1, w2, b2, **options
            )[0]
        return functional.moe_TC_softmax_topk_layer(x, router_w, w1, b1, w2, b2, K, **options)[0]

    options = {"w1_main_grad": permuted(main[0]), "w2_main_grad": permuted(main[1])}
    versions = [t._version for t in main]
    call(leaves, **options).square().sum().backward()
    assert all(t._version > version for t, version in zip(main, versions, strict=True))
    plain = layer.leaves()
    call(plain).square().sum().backward()
    assert leaves["w1"].grad is None and leaves["w2"].grad is None
    assert torch.equal(main[0], before[0] + plain["w1"].grad)
    assert torch.equal(main[1], before[1] + plain["w2"].grad)
    for name in ("x", "b1", "b2"):
        assert torch.equal(leaves[name].grad, plain[name].grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["concatenated", "transposed_interleaved"])
def test_opcheck(layout, dtype):
    ops = torch.ops.sonicmoe
    layer = make_layer(bias=True, dtype=DTYPES[dtype], layout=layout)
    x, router_w, w1, b1, w2, b2 = (t.detach() for t in layer.leaves().values())
    main_grads = torch.randn(w1.shape), torch.randn(w2.shape)
    options = f"top_k={K} {OVER_SOFTMAX} w1_layout={layout}"
    args = (x, router_w, w1, b1, w2, b2, options, *main_grads)
    o, logits, _, preact, routing = ops.layer_forward(*args)
    backward = (o, logits, x, router_w, w1, w2, b2, logits, preact, routing, options, *main_grads)
    assert [t.shape[0] for t in ops.layer_backward(*backward)[2:]] == [0, E, 0, E, 0, 0, 0, 0]
    torch.library.opcheck(ops.layer_backward.default, backward)
    lists = torch.rand(70), torch.randint(0, 48, (70,)).int(), torch.randint(0, 6, (70,)).int()
    routed = (x, *lists, w1, b1, w2, b2, f"w1_layout={layout}", *main_grads)
    o, _, preact, routing = ops.routed_forward(*routed)
    torch.library.opcheck(
        ops.routed_backward.default,
        (o, x, w1, w2, b2, preact, routing, f"w1_layout={layout}", *main_grads),
    )
    alone = (*backward[:-2], None, main_grads[1], None)  # and no dpreact
    with pytest.raises(ValueError, match="^w1_main_grad: got None, allowed: a tensor, for that "):
        ops.layer_backward(*alone)
    returned = ops.layer_backward(*alone, wants_dw1=False)[2:]
    assert [t.shape[0] for t in returned] == [0, E, 0, E, 0, 0, 0, 0]
    # With gradients backward would run twice and add twice: only the forward operators' own checks.
    torch.library.opcheck(ops.layer_forward.default, args)
    torch.library.opcheck(ops.routed_forward.default, routed)


def refusals():
    w1, w2 = torch.zeros(E, 2 * N, D), torch.zeros(E, D, N)
    yield (
        {"w1_main_grad": w1.bfloat16()},
        TypeError,
        "c_fc.weight.main_grad: got torch.bfloat16, allowed: torch.float32",
    )
    yield {"w1_main_grad": 3}, TypeError, "c_fc.weight.main_grad: got int, allowed: a tensor"
    yield (
        {"w2_main_grad": w1},
        ValueError,
        "c_proj.weight.main_grad: got shape (6, 32, 24), allowed: (E, d, n) = (6, 24, 16)",
    )
    yield (
        {"w1_main_grad": torch.zeros(E, D, 2 * N).mT},
        ValueError,
        "c_fc.weight.main_grad: got strides (768, 1, 32), allowed: a contiguous (E, 2n, d)",
    )
    yield (
        {"w1_main_grad": w1.to("meta")},
        ValueError,
        "c_fc.weight.main_grad: got a tensor on meta, allowed: cpu, where x is",
    )
    yield (
        {"w2_main_grad": w2.requires_grad_()},
        ValueError,
        "c_proj.weight.main_grad: got a tensor that requires grad, allowed: one that does not",
    )


@pytest.mark.parametrize("change, error, message", list(refusals()))
def test_refusals(change, error, message):
    moe, _ = fused(make_module())
    for name, value in change.items():
        weight = moe.c_fc.weight if name[:2] == "w1" else moe.c_proj.weight
        weight.main_grad = value
    pattern = message if "0x" in message else re.escape(message)
    with pytest.raises(error, match=f"^{pattern}$"):
        moe(torch.randn(T, D))


def test_refused_options():
    moe, _ = fused(make_module())
    x = torch.randn(T, D)
    with pytest.raises(ValueError, match="^kernel_backend_moe: got KernelBackendMoE.torch, "):
        moe(x, KernelBackendMoE.torch)
    moe.c_proj.weight.__fsdp_param__ = True
    with pytest.raises(ValueError, match="^c_proj.weight: got a parameter of Megatron-FSDP, "):
        moe(x)
    del moe.c_proj.weight.__fsdp_param__
    layer = make_layer()
    with pytest.raises(ValueError, match="^w1_main_grad: got a tensor, allowed: None, for the "):
        functional.moe_TC_softmax_topk_layer(
            layer.x.requires_grad_(), layer.router_w, permuted(layer.w1), None,
            permuted(layer.w2), None, K, w1_main_grad=permuted(layer.w1),
            w2_main_grad=permuted(layer.w2),
        )  # fmt: skip
