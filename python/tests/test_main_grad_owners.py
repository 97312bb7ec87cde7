"""What owners of `main_grad` ask for: gradients for their hooks, overwriting, a weight an expert."""

import copy
import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sonicmoe import ActivationType, MoE, functional
from sonicmoe._main_grad import MainGrads, as_one, joined

T, D, N, E, K = 40, 24, 16, 6, 2
ROWS = [3, 0, 9, 1, 7, 4]


def make_module(**options):
    return MoE(E, K, D, N, ActivationType.SWIGLU, True, 0.2, **options)


def fused(plain):
    """The same module with main_grads of NaN, which tell of their weights."""
    moe = copy.deepcopy(plain)
    moe.gradient_accumulation_fusion = True
    for weight in weights(moe):
        weight.main_grad = torch.full(weight.shape, float("nan"))
        weight.grad_added_to_main_grad = False
    return moe


def weights(moe):
    return [moe.c_fc.weight, moe.c_proj.weight]


class Calls(TorchDispatchMode):
    """The operators that made a tensor of that shape."""

    def __init__(self, *shapes):
        super().__init__()
        self.shapes, self.names = shapes, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.shape in self.shapes:
            self.names.append(operator.overloadpacket.__name__)
        return made


def test_nothing_fills_the_gradient_for_hooks():
    moe = fused(make_module())
    o, _ = moe(torch.randn(T, D))
    with Calls(*(weight.shape for weight in weights(moe))) as calls:
        o.square().sum().backward()
    assert calls.names.count("empty_like") == 2
    assert set(calls.names) <= {"empty_like", "detach"}


def test_gradients_for_hooks_share_no_memory():
    moe = fused(make_module())
    other = fused(make_module())
    for module in (moe, other):
        module(torch.randn(T, D))[0].square().sum().backward()
    for mine, its in zip(weights(moe), weights(other), strict=True):
        its.grad.zero_()
        mine.grad.fill_(1)
        assert not its.grad.any() and not torch.equal(mine.main_grad, mine.grad)


@pytest.mark.parametrize("why", ["zero_out_wgrad", "anomaly"])
def test_gradients_for_hooks_are_zeros_where_somebody_reads_them(why):
    moe = fused(make_module())
    for weight in weights(moe):
        weight.zero_out_wgrad = why == "zero_out_wgrad"
    with torch.autograd.set_detect_anomaly(why == "anomaly"):
        moe(torch.randn(T, D))[0].square().sum().backward()
    for weight in weights(moe):
        assert not weight.grad.any()


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("options", [{}, {"routing": "token_rounding", "tile": 8}])
def test_overwrites(options, tells):
    plain = make_module(**options)
    moe = fused(plain)
    for weight in weights(moe):
        weight.overwrite_main_grad = True
        if not tells:
            del weight.grad_added_to_main_grad
    for x in torch.randn(2, T, D):  # each of them overwrites
        plain.zero_grad()
        (dx,) = torch.autograd.grad(moe(x.requires_grad_())[0].sum(), [x])  # not this one
        before = [weight.main_grad.clone() for weight in weights(moe)]
        for module in (plain, moe):
            o, aux_loss = module(x)
            (o.square().sum() + aux_loss).backward()
        for weight, old, wanted in zip(weights(moe), before, weights(plain), strict=True):
            assert not torch.equal(old, weight.main_grad)
            assert torch.equal(weight.main_grad, wanted.grad)
            assert (weight.grad is not None) == tells


def test_overwrites_what_a_backward_was_asked_for():
    moe = fused(make_module())
    for weight in weights(moe):
        weight.overwrite_main_grad = True
    o, aux_loss = moe(torch.randn(T, D))
    o.sum().backward(inputs=[moe.c_proj.weight], retain_graph=True)
    assert moe.c_fc.weight.main_grad.isnan().all()
    assert not moe.c_proj.weight.main_grad.isnan().any()
    aux_loss.backward()  # a loss that depends on neither
    assert not any(weight.main_grad.any() for weight in weights(moe))


def test_one_weight_is_overwritten_and_one_is_not():
    plain = make_module()
    moe = fused(plain)
    x = torch.randn(T, D)
    moe.c_fc.weight.overwrite_main_grad = True
    moe.c_proj.weight.main_grad.fill_(1)
    for module in (plain, moe):
        module(x)[0].square().sum().backward()
    assert torch.equal(moe.c_fc.weight.main_grad, plain.c_fc.weight.grad)
    assert torch.equal(moe.c_proj.weight.main_grad, plain.c_proj.weight.grad + 1)


def test_overwriting_keeps_nothing_alive():
    moe = fused(make_module())
    for weight in weights(moe):
        weight.overwrite_main_grad = True
    x = torch.randn(T, D)
    kept = weakref.ref(x)
    gc.disable()
    try:
        made = moe(x)
        del made, x
        assert kept() is None
    finally:
        gc.enable()


def test_overwriting_is_refused_in_a_compiled_call():
    torch._dynamo.reset()
    moe = fused(make_module())
    moe.c_proj.weight.overwrite_main_grad = True
    with pytest.raises(Exception, match="c_proj.weight.overwrite_main_grad: got True, allowed: "):
        torch.compile(moe, backend="aot_eager", fullgraph=True)(torch.randn(T, D))


@pytest.mark.parametrize("compiles", [False, True])
def test_functional_with_main_grad(compiles):
    torch._dynamo.reset()
    w1 = torch.nn.Parameter(torch.randn(E, 2 * N, D))
    w2 = torch.nn.Parameter(torch.randn(E, D, N))
    rows, counts = torch.randn(sum(ROWS), D), torch.tensor(ROWS)
    functional.grouped_experts(rows, counts, w1, w2).square().sum().backward()
    seen = []
    wanted = [w1.grad, w2.grad]
    for w in (w1, w2):
        w.grad, w.main_grad, w.grad_added_to_main_grad = None, torch.zeros(w.shape), False
        w.register_post_accumulate_grad_hook(seen.append)

    def call(rows, counts):
        (a, a_grad), (b, b_grad) = map(functional.with_main_grad, (w1, w2))
        return functional.grouped_experts(
            rows, counts, a, b, w1_main_grad=a_grad, w2_main_grad=b_grad
        )

    if compiles:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    call(rows, counts).square().sum().backward()
    for w, gradient in zip((w1, w2), wanted, strict=True):
        assert w.grad_added_to_main_grad and torch.equal(w.main_grad, gradient)
    if not compiles:
        assert {id(w) for w in seen} == {id(w1), id(w2)}
    with pytest.raises(ValueError, match="^weight.overwrite_main_grad: got True, allowed: False"):
        w1.overwrite_main_grad = True
        functional.with_main_grad(w1)
    w1.requires_grad_(False)
    del w1.overwrite_main_grad
    assert functional.with_main_grad(w1) == (w1, None)


# A weight for each expert.


def apart(weight, adjacent):
    """The experts of a weight (E, ...), in one memory or each in its own."""
    parts = weight.detach().clone().unbind()
    return [torch.nn.Parameter(part if adjacent else part.clone()) for part in parts]


def of_experts(w1, w2, main_grads, rows, counts):
    out = functional.grouped_experts(rows, counts, w1, w2, **main_grads.named)
    main_grads.zero_before(out)
    return out


@pytest.mark.parametrize("adjacent", [False, True])
def test_weights_of_each_expert(adjacent, monkeypatch):
    whole = [torch.randn(E, 2 * N, D), torch.randn(E, D, N)]
    rows, counts = torch.randn(sum(ROWS), D), torch.tensor(ROWS)
    leaves = [w.clone().requires_grad_() for w in whole]
    wanted = functional.grouped_experts(rows, counts, *leaves)
    wanted.square().sum().backward()
    w1, w2 = (apart(w, adjacent) for w in whole)
    if adjacent:
        monkeypatch.setattr(torch, "stack", None)
    out = functional.grouped_experts(rows, counts, joined(w1), joined(w2))
    out.square().sum().backward()
    assert torch.equal(out, wanted)
    for parts, leaf in zip((w1, w2), leaves, strict=True):
        assert torch.equal(torch.cat([p.grad for p in parts]), leaf.grad.flatten(0, 1))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("grads_adjacent", [False, True])
@pytest.mark.parametrize("adjacent", [False, True])
def test_main_grads_of_each_expert(adjacent, grads_adjacent, frozen, overwrite):
    whole = [torch.randn(E, 2 * N, D), torch.randn(E, D, N)]
    rows, counts = torch.randn(sum(ROWS), D), torch.tensor(ROWS)
    leaves = [w.clone().requires_grad_() for w in whole]
    functional.grouped_experts(rows, counts, *leaves).square().sum().backward()
    parts = [apart(w, adjacent) for w in whole]
    hooked = []
    for ws in parts:
        buffer = torch.ones(E, *ws[0].shape)
        for w, main_grad in zip(ws, buffer, strict=True):
            w.main_grad = main_grad if grads_adjacent else main_grad.clone()
            w.grad_added_to_main_grad = False
            w.overwrite_main_grad = overwrite
            w.register_post_accumulate_grad_hook(hooked.append)
    parts[0][2].requires_grad_(not frozen)
    for _ in range(2):
        main_grads = MainGrads(w1=("w1", parts[0]), w2=("w2", parts[1]))
        assert len(main_grads.named) == (2 if grads_adjacent and not frozen else 0)
        of_experts(*main_grads.weights, main_grads, rows, counts).square().sum().backward()
    for ws, leaf in zip(parts, leaves, strict=True):
        for w, gradient in zip(ws, leaf.grad, strict=True):
            if w.requires_grad:
                added = gradient if overwrite else 1 + gradient + gradient
                torch.testing.assert_close(w.main_grad, added)
            else:
                assert torch.equal(w.main_grad, torch.ones(w.shape))
            assert w.grad_added_to_main_grad == w.requires_grad
    assert len(hooked) == 2 * (2 * E - frozen)


def test_what_is_one_memory():
    whole = torch.randn(4, 6, 8)
    assert torch.equal(as_one(list(whole)), whole)
    assert torch.equal(as_one(list(whole[1:3])), whole[1:3])
    for wrong in (
        [whole[1], whole[0]],
        [whole[0], whole[2]],
        [whole[0], whole[1].clone()],
        [whole[0], whole[1, :3]],
        [whole[0], whole[1].t()],
        [whole[0], whole[1].double()],
    ):
        assert as_one(wrong) is None


def test_weights_of_each_expert_are_refused_with_main_grads_in_a_compiled_call():
    torch._dynamo.reset()
    parts = apart(torch.randn(E, D, N), True)
    for w in parts:
        w.main_grad = torch.zeros(w.shape)

    def call(x):
        return MainGrads(w=("experts.w", parts)).weights[0] * x

    with pytest.raises(Exception, match="experts.w: got a weight for each expert, allowed: one"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(torch.ones(()))
