"""The same layer on a GPU: by plain PyTorch, with autocast, compiled, and captured in a graph."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import (
    FORMS,
    NEEDS_HOPPER,
    ROUTERS,
    Layer,
    activation_layouts,
    assert_as_good,
    at_odd_address,
    everything_of,
    make_layer,
    router_text,
    run,
    run_plain,
)

from sonicmoe import ActivationType, MoE, RouterConfig, functional
from sonicmoe._check import TRANSPOSED_LAYOUTS

pytestmark = NEEDS_HOPPER
K = 2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = ("w1", "w2", "w1_up")


def on_gpu(layer: Layer) -> Layer:
    return Layer(*(None if t is None else t.cuda() for t in vars(layer).values()))


def gradients(o, leaves, weights):
    return torch.autograd.grad((o.float() * weights.to(o.device)).sum(), list(leaves.values()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    "activation, layout", activation_layouts(ActivationType.SWIGLU, ActivationType.RELU_SQ)
)
@pytest.mark.parametrize("form", FORMS)
def test_layer(dtype, router, activation, layout, form):
    layer = make_layer(
        activation, True, DTYPES[dtype], tokens=300, hidden=136, intermediate=72, layout=layout
    )  # fmt: skip
    o, logits, counts, leaves = run(on_gpu(layer), K, activation, router, layout, FORMS[form])
    _, ids = torch.ops.sonicmoe.top_k(logits.detach(), router_text(K, router))
    ids = ids.cpu().long()
    assert counts.tolist() == ids.flatten().bincount(minlength=6).tolist()
    plain = run_plain(layer, ids, activation, router, layout)
    exact = run_plain(layer.to(torch.float64), ids, activation, router, layout)
    assert_as_good("o", o.cpu(), plain[0], exact[0])
    weights = torch.randn(o.shape)
    ours = gradients(o, leaves, weights)
    theirs = gradients(plain[0], plain[3], weights)
    right = torch.autograd.grad((exact[0] * weights).sum(), list(exact[3].values()))
    for name, got, by_torch, want in zip(leaves, ours, theirs, right, strict=True):
        assert_as_good(name, got.cpu(), by_torch, want)


def module(**options):
    torch.manual_seed(1)
    return MoE(8, K, 64, 48, ActivationType.SWIGLU, True, 0.1, **options).cuda()


@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_trains(routing):
    moe = module(routing=routing, tile=16).bfloat16()
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    target = torch.randn_like(x)
    optimizer = torch.optim.Adam(moe.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        o, aux_loss = moe(x)
        loss = (o - target).float().square().mean() + 0.01 * aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast(dtype):
    moe = module()
    x = torch.randn(100, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", DTYPES[dtype]):
        o, aux_loss = moe(x)
    assert o.dtype == DTYPES[dtype]
    (o.float().sum() + aux_loss).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in moe.parameters())
    assert x.grad.dtype == torch.float32


def test_fp32_is_refused_with_the_cure():
    with pytest.raises(ValueError, match="dtype: got f32, allowed: bf16, f16.*autocast"):
        module()(torch.randn(4, 64, device="cuda"))


def test_tensors_elsewhere_are_refused():
    moe = module().bfloat16()
    with pytest.raises(ValueError, match=r"router\.weight: got a tensor on cuda:0, allowed: cpu"):
        moe(torch.randn(4, 64, dtype=torch.bfloat16))
    logits = torch.randn(4, 8, device="cuda")
    with pytest.raises(ValueError, match="counts: got a tensor on cpu, allowed: cuda:0"):
        torch.ops.sonicmoe.aux_loss(logits, torch.ones(8, dtype=torch.int32))


@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_compiles_to_one_graph(routing):
    moe = module(routing=routing, tile=16).bfloat16()
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step(module):
        o, aux_loss = module(x)
        return torch.autograd.grad(o.float().square().sum() + aux_loss, [x, *moe.parameters()])

    eager = step(moe)
    compiled = step(torch.compile(moe, fullgraph=True))
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def on_another_stream(step):
    """As PyTorch wants it before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_captured_in_a_graph(routing):
    moe = module(routing=routing, rounding="sr", tile=16).bfloat16()
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parameters = [x, *moe.parameters()]

    def step():
        o, aux_loss = moe(x)
        return o, torch.autograd.grad(o.float().square().sum() + aux_loss, parameters)

    on_another_stream(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn(64, 64) * (seed + 1))
        graph.replay()
        got = [captured[0].clone(), *(g.clone() for g in captured[1])]
        if routing == "token_rounding":  # other draws than eager's
            assert all(g.isfinite().all() for g in got)
            continue
        o, gradients = step()
        for ours, want in zip(got, [o, *gradients], strict=True):
            assert torch.equal(ours, want)


def test_the_last_backward_needs_one_h_less():
    tokens, top_k, n = 4096, 4, 512
    moe = MoE(8, top_k, 64, n, ActivationType.SWIGLU, False, 0.1).cuda().bfloat16()
    x = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def peak(retain):
        gc.collect()  # what is freed later would count as needed less
        torch.cuda.empty_cache()  # what is left of larger blocks counts as allocated
        o, _ = moe(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = torch.autograd.grad(
            o, (x, *moe.parameters()), torch.ones_like(o), retain_graph=retain
        )
        return torch.cuda.max_memory_allocated() - before, gradients

    peak(False)  # memory that is allocated once
    (kept, first), (spent, last) = peak(True), peak(False)
    h = tokens * top_k * 2 * n * 2
    assert kept - spent >= h
    for a, b in zip(first, last, strict=True):
        assert torch.equal(a, b)


def test_waits_for_nothing_and_uses_the_current_stream():
    moe = module().bfloat16()
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    expected, _ = moe(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # what comes before on this stream takes a while
            late = x.clone()
            o, _ = moe(late)
            late.zero_()  # and this comes after
        assert not stream.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_inputs_and_gradients_that_start_anywhere(routing):
    moe = module(routing=routing, tile=16).bfloat16()
    x, dout = (torch.randn(300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    got = everything_of(moe, moe, at_odd_address(x), at_odd_address(dout))
    for a, b in zip(got, everything_of(moe, moe, x, dout), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rule", ["nr", "sr"])
def test_token_rounding_waits_for_nothing_and_can_be_captured(rule):
    logits = torch.randn(300, 8, device="cuda", dtype=torch.bfloat16)
    expected = functional.token_rounding(logits, K, rule=rule, tile=16, seed=2**64 - 3, offset=5)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        functional.token_rounding(logits, K, rule=rule, tile=16, seed=2**64 - 3, offset=5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lists = functional.token_rounding(logits, K, rule=rule, tile=16, seed=2**64 - 3, offset=5)
    graph.replay()
    for a, b in zip(lists, expected, strict=True):
        assert torch.equal(a, b)


def test_autocast_to_fp32_makes_the_logits_fp32():
    moe = module().bfloat16()
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.float32):
        o, _ = moe(x)
    expected, logits, _ = functional.moe_TC_softmax_topk_layer(
        x, moe.router.weight, moe.c_fc.weight, moe.c_fc.bias, moe.c_proj.weight, moe.c_proj.bias,
        moe.top_k, router=RouterConfig(logits="f32"),
    )  # fmt: skip
    assert logits.dtype == torch.float32 and o.dtype == torch.bfloat16
    assert torch.equal(o, expected)


def test_ours_may_be_the_first_cuda_call_of_a_thread():
    moe = module().bfloat16()
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    expected, _ = moe(x)  # and memory for one more is there
    with ThreadPoolExecutor(1) as new_thread:
        o, _ = new_thread.submit(moe, x).result()
    assert torch.equal(o, expected)


def test_lists():
    torch.manual_seed(3)
    layer = on_gpu(make_layer(bias=True, dtype=torch.bfloat16))
    tokens = torch.randint(0, 48, (90,)).sort().values.int().cuda()
    experts = torch.randint(0, 7, (90,)).int().cuda()  # 6 is a sentinel
    scores = torch.rand(90, device="cuda", requires_grad=True)
    o, counts = functional.moe_general_routing_inputs(
        layer.x, scores, tokens, experts, layer.w1.permute(1, 2, 0), layer.b1,
        layer.w2.permute(1, 2, 0), layer.b2, 6, 0, ActivationType.SWIGLU,
    )  # fmt: skip
    assert counts.sum().item() == (experts < 6).sum().item()
    o.float().sum().backward()
    assert scores.grad[experts == 6].abs().max().item() == 0


def step_with_main_grads(moe, x, start):
    """One forward and backward; what `main_grad` is then, and x's and the other gradients."""
    moe.zero_grad()
    for weight, value in zip((moe.c_fc.weight, moe.c_proj.weight), start, strict=True):
        weight.main_grad = value.clone()
    x = x.clone().requires_grad_()
    o, aux_loss = moe(x)
    (o.float().square().sum() + aux_loss).backward()
    assert moe.c_fc.weight.grad is None and moe.c_proj.weight.grad is None
    others = [x.grad, moe.router.weight.grad, moe.c_fc.bias.grad, moe.c_proj.bias.grad]
    return [moe.c_fc.weight.main_grad, moe.c_proj.weight.main_grad], others


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_gradient_accumulation_fusion(dtype, layout, routing):
    options = dict(routing=routing, tile=16, layout=layout)
    plain = module(**options).to(DTYPES[dtype])
    moe = module(**options, gradient_accumulation_fusion=True).to(DTYPES[dtype])
    x = torch.randn(300, 64, device="cuda", dtype=DTYPES[dtype])
    inputs = x.clone().requires_grad_()
    o, aux_loss = plain(inputs)
    (o.float().square().sum() + aux_loss).backward()
    weights = plain.c_fc.weight, plain.c_proj.weight
    others = inputs.grad, plain.router.weight.grad, plain.c_fc.bias.grad, plain.c_proj.bias.grad

    # Added to zeros it is the fp32 gradient, which the plain module rounds.
    zeros = [torch.zeros(w.shape, device="cuda") for w in weights]
    wide, same = step_with_main_grads(moe, x, zeros)
    for gradient, weight in zip(wide, weights, strict=True):
        assert torch.equal(gradient.to(weight.dtype), weight.grad)
    assert all(torch.equal(a, b) for a, b in zip(same, others, strict=True))
    # Added to anything else it is one fp32 sum, compiled or not.
    before = [torch.randn_like(zero) for zero in zeros]
    layers = [moe]
    if routing == "top_k":  # all of it is ours, whatever the compiler does
        layers.append(torch.compile(moe, fullgraph=True, backend="aot_eager"))
    for layer in layers:
        added, same = step_with_main_grads(layer, x, before)
        assert all(torch.equal(a, b + c) for a, b, c in zip(added, before, wide, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(same, others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
@pytest.mark.parametrize("with_aux_loss", [False, True])
def test_gradients_that_nobody_wants_change_no_other(dtype, routing, with_aux_loss):
    moe = module(routing=routing, tile=16).to(DTYPES[dtype])
    x = torch.randn(300, 64, device="cuda", dtype=DTYPES[dtype])
    leaves = [x, moe.router.weight, moe.c_fc.weight, moe.c_proj.weight]

    def gradients(wanted):
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(wanted >> i & 1 == 1)
        torch.manual_seed(2)  # of token rounding
        o, aux_loss = moe(x)
        loss = o.float().square().sum() + (aux_loss if with_aux_loss else 0)
        return iter(torch.autograd.grad(loss, [t for t in leaves if t.requires_grad]))

    everything = list(gradients(15))
    for wanted in range(1, 15):
        some = gradients(wanted)
        for i, gradient in enumerate(everything):
            assert not wanted >> i & 1 or torch.equal(next(some), gradient), (wanted, i)


def test_gradient_accumulation_fusion_in_a_graph():
    moe = module(gradient_accumulation_fusion=True).bfloat16()
    weights = moe.c_fc.weight, moe.c_proj.weight
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape, device="cuda")
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        o, _ = moe(x)
        o.float().square().sum().backward()

    on_another_stream(step)
    once = [weight.main_grad.clone() for weight in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()  # capturing runs nothing
    torch.cuda.synchronize()
    for weight, gradient in zip(weights, once, strict=True):
        assert torch.equal(weight.main_grad, gradient + gradient)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["separate", *TRANSPOSED_LAYOUTS])
@pytest.mark.parametrize("frozen", [None, "w1", "w1_up", "w2"])
def test_main_grads_of_other_layouts(dtype, layout, frozen):
    layer = on_gpu(make_layer(bias=True, dtype=DTYPES[dtype], tokens=300, layout=layout))
    weights = {name: leaf for name, leaf in layer.leaves().items() if name in WEIGHTS}
    main = {name: torch.zeros(leaf.shape, device="cuda") for name, leaf in weights.items()}

    def step(main):
        leaves = layer.leaves()
        if frozen in leaves:
            leaves[frozen].requires_grad_(False)
        x, router_w, w1, b1, w2, b2, *_ = leaves.values()
        options = {name: leaves[name] for name in ("w1_up", "b1_up") if name in leaves}
        options |= {f"{name}_main_grad": t for name, t in main.items() if name != frozen}
        o, _, _ = functional.moe_TC_softmax_topk_layer(
            x, router_w, w1, b1, w2, b2, K, layout=layout, **options
        )
        o.float().square().sum().backward()
        return leaves

    plain, added = step({}), step(main)
    for name, leaf in added.items():
        if name == frozen:
            assert leaf.grad is None and not main[name].any()
        elif name in main:  # added to zeros it is the fp32 gradient, which the plain one rounds
            assert leaf.grad is None and torch.equal(main[name].to(leaf.dtype), plain[name].grad)
        else:
            assert torch.equal(leaf.grad, plain[name].grad), name


def off_16_bytes(tensor):
    """A copy one element into a buffer, as ZeRO's flat buffers may have it."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    flat[1:] = tensor.flatten()
    return flat[1:].view_as(tensor)


@pytest.mark.gpu
def test_parameters_off_16_bytes():
    """Small ones are copied. The experts' weights are as large as the work, and are refused."""
    torch.manual_seed(0)
    moe = MoE(8, 2, 32, 16, "swiglu", True, 0.3).cuda().bfloat16()
    x = torch.randn(33, 32, device="cuda", dtype=torch.bfloat16)

    def step():
        output = moe(x)[0]
        gradients = torch.autograd.grad(output, list(moe.parameters()), torch.ones_like(output))
        return output, *gradients

    expected = step()
    for parameter in (moe.router.weight, moe.c_fc.bias, moe.c_proj.bias):
        parameter.data = off_16_bytes(parameter.data)
    for got, wanted in zip(step(), expected, strict=True):
        assert torch.equal(got, wanted)
    for name, weight in (("c_fc", moe.c_fc.weight), ("c_proj", moe.c_proj.weight)):
        kept = weight.data
        weight.data = off_16_bytes(kept)
        with pytest.raises(
            ValueError, match=rf"^{name}\.weight: got address 0x[0-9a-f]+, as a view"
        ):
            moe(x)
        weight.data = kept
