"""Living with PyTorch: tracing, compilation, autocast, what is kept, threads, modules."""

import copy
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from helpers import OVER_SOFTMAX, ROUTERS, kept_bytes, make_layer, permuted, router_text, run

import sonicmoe
from sonicmoe import (
    ActivationType,
    KernelBackendMoE,
    MoE,
    _autocast,
    functional,
    is_glu,
)

T, D, N, E, K = 40, 24, 16, 6, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_module(**options):
    return MoE(E, K, D, N, ActivationType.SWIGLU, True, 0.2, **options)


def gradients(module, outputs, x):
    o, aux_loss = outputs
    leaves = [x, *module.parameters()]
    return torch.autograd.grad(o.float().square().sum() + aux_loss, leaves)


# Operators.


def operator_calls(dtype):
    ops = torch.ops.sonicmoe
    # No sentinels: their rows of H are not written, so two runs may differ there.
    lists = torch.rand(70), torch.randint(0, 48, (70,)).int(), torch.randint(0, 6, (70,)).int()
    for layout in ("concatenated", "transposed"):
        layer = make_layer(bias=True, dtype=dtype, layout=layout)
        tensors = {k: v.detach() for k, v in layer.leaves().items()}
        of_layout = f"w1_layout={layout}"
        options = f"top_k={K} {OVER_SOFTMAX} {of_layout}"
        layer_args = (*tensors.values(), options)
        o, logits, counts, preact, routing = ops.layer_forward(*layer_args)
        x, router_w, w1, b1, w2, b2 = tensors.values()
        yield "layer_forward", layer_args
        yield "layer_forward", (x, router_w, w1, None, w2, None, options + " inference=true")
        yield (
            "layer_backward",
            (o, logits, x, router_w, w1, w2, b2, logits, preact, routing, options),
        )
        routed_args = (x, *lists, w1, b1, w2, b2, of_layout)
        o, counts, preact, routing = ops.routed_forward(*routed_args)
        yield "routed_forward", routed_args
        yield "routed_backward", (o, x, w1, w2, b2, preact, routing, of_layout)
    yield "aux_loss", (logits, counts)
    yield "aux_loss_backward", (torch.ones(()), logits, counts)
    yield "top_k", (logits, f"top_k={K}")
    yield "count_cumsum", (lists[2], 6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(14))
def test_opcheck(case, dtype):
    name, args = list(operator_calls(DTYPES[dtype]))[case]
    if name in ("layer_forward", "routed_forward", "aux_loss") and "inference" not in str(args[-1]):
        args = [
            a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in args
        ]
    torch.library.opcheck(getattr(torch.ops.sonicmoe, name).default, args)


@pytest.mark.parametrize("dtype", DTYPES)
def test_registered_derivative_is_the_eager_one(dtype):
    layer = make_layer(bias=True, dtype=DTYPES[dtype])
    o, logits, _, eager = run(layer, K, ActivationType.SWIGLU, "softmax_over_topk")
    leaves = layer.leaves()
    registered = torch.ops.sonicmoe.layer_forward(*leaves.values(), f"top_k={K}")
    do, dlogits = torch.randn_like(o), torch.randn_like(logits)
    torch.autograd.backward([o, logits], [do, dlogits])
    torch.autograd.backward(registered[:2], [do, dlogits])
    for name in leaves:
        assert torch.equal(leaves[name].grad, eager[name].grad), name


# Compilation.


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_module_compiles_without_graph_breaks(backend, dynamic):
    torch._dynamo.reset()
    module = make_module()
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)
    for tokens in (40, 12):
        x = torch.randn(2, tokens, D, requires_grad=True)
        eager, traced = module(x), compiled(x)
        for a, b in zip(eager, traced, strict=True):
            torch.testing.assert_close(a, b)
        for a, b in zip(gradients(module, eager, x), gradients(module, traced, x), strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            assert torch.equal(compiled(x)[0], eager[0])


def test_functional_interface_compiles():
    torch._dynamo.reset()
    layer = make_layer(tokens=T)
    tokens, experts = torch.randint(0, T, (90,)), torch.randint(0, E + 1, (90,))

    def function(x, scores, w1, w2):
        counts, cumsum = functional.count_cumsum(experts, E)
        o, frequency = functional.moe_general_routing_inputs(
            x, scores, tokens, experts, permuted(w1), None, permuted(w2), None, E
        )
        return o, frequency - counts, cumsum

    args = [layer.x, torch.rand(90), layer.w1, layer.w2]
    args = [a.requires_grad_() for a in args]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    eager, traced = function(*args), compiled(*args)
    for a, b in zip(eager, traced, strict=True):
        assert torch.equal(a, b)
    weight = torch.randn_like(eager[0])
    for a, b in zip(
        torch.autograd.grad(eager[0], args, weight),
        torch.autograd.grad(traced[0], args, weight),
        strict=True,
    ):
        assert torch.equal(a, b)


# Autocast and dtypes.


@pytest.mark.parametrize("backend", [KernelBackendMoE.sonicmoe, KernelBackendMoE.torch])
def test_autocast_is_the_layer_in_its_dtype(backend):
    module = make_module()
    low = copy.deepcopy(module).to(torch.bfloat16)
    x = torch.randn(T, D, requires_grad=True)
    low_x = x.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = module(x, backend)
    low_outputs = low(low_x, backend)
    assert outputs[0].dtype == torch.bfloat16 and outputs[1].dtype == torch.float32
    assert torch.equal(outputs[0], low_outputs[0]) and torch.equal(outputs[1], low_outputs[1])
    for a, b in zip(gradients(module, outputs, x), gradients(low, low_outputs, low_x), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b.float())


def test_autocast_of_lists_keeps_scores():
    layer = make_layer(tokens=T)
    lists = torch.rand(90), torch.randint(0, T, (90,)), torch.randint(0, E, (90,))

    def call(layer, x):
        w1, w2 = permuted(layer.w1), permuted(layer.w2)
        return functional.moe_general_routing_inputs(x, *lists, w1, None, w2, None)[0]

    with torch.autocast("cpu", torch.bfloat16):
        o = call(layer, layer.x)
    low = layer.to(torch.bfloat16)
    assert torch.equal(o, call(low, low.x))


# What is kept for backward.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("activation", [ActivationType.SWIGLU, ActivationType.RELU])
def test_kept_bytes_are_x_h_and_routing(activation, router, dtype):
    layer = make_layer(activation, True, DTYPES[dtype], T, D, N, E)
    leaves = layer.leaves()
    over_topk, norm = ROUTERS[router]
    options = f"{router_text(K, router)} activation={activation.value}"
    size = DTYPES[dtype].itemsize
    expected = [
        T * D * size,  # x
        T * K * (2 * N if is_glu(activation) else N) * size,  # H
        20 * T * K + 4 * (2 * E + 1),  # routing: within 24R + 8(E+1) + 4(T+1)
    ]
    if not over_topk and not norm:
        expected.append(T * E * size)  # logits

    parameters = [v for k, v in leaves.items() if k != "x"]
    kept, _ = kept_bytes(lambda: run_leaves(leaves, activation, router), parameters)
    assert kept == sorted(expected)
    # By the registered derivative too, which tracing uses.
    registered = torch.ops.sonicmoe.layer_forward
    kept, _ = kept_bytes(lambda: registered(*leaves.values(), options), parameters)
    assert kept == sorted(expected)


def run_leaves(leaves, activation, router):
    over_topk, norm = ROUTERS[router]
    return functional.moe_TC_softmax_topk_layer(
        leaves["x"],
        leaves["router_w"],
        permuted(leaves["w1"]),
        leaves["b1"],
        permuted(leaves["w2"]),
        leaves["b2"],
        K,
        activation_type=activation,
        is_softmax_over_topk=over_topk,
        norm_topk_probs=norm,
    )


def test_kept_bytes_of_lists():
    layer = make_layer(bias=True, tokens=T)
    leaves = layer.leaves()
    scores = torch.rand(90, requires_grad=True)
    tokens, experts = torch.randint(0, T, (90,)), torch.randint(0, E, (90,))

    def call():
        w1, w2 = permuted(leaves["w1"]), permuted(leaves["w2"])
        return functional.moe_general_routing_inputs(
            leaves["x"], scores, tokens, experts, w1, leaves["b1"], w2, leaves["b2"]
        )

    kept, _ = kept_bytes(call, [v for k, v in leaves.items() if k != "x"])
    routing = 16 * 90 + 4 * (2 * E + 1) + 4 * (T + 1)
    assert kept == sorted([T * D * 4, 90 * 2 * N * 4, routing])


def list_layer(leaves):
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, T, (T * K,), generator=generator)
    experts = torch.randint(0, E, (T * K,), generator=generator)
    scores = torch.rand(T * K, generator=generator)
    w1, w2 = permuted(leaves["w1"]), permuted(leaves["w2"])
    return functional.moe_general_routing_inputs(
        leaves["x"], scores, tokens, experts, w1, leaves["b1"], w2, leaves["b2"]
    )


LAYERS = {
    "router": lambda leaves: run_leaves(leaves, ActivationType.SWIGLU, "softmax_over_topk"),
    "lists": list_layer,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_dh_takes_the_place_of_h_in_the_last_backward(name, dtype):
    leaves = make_layer(bias=True, dtype=DTYPES[dtype], tokens=T).leaves()
    leaves = {k: v for k, v in leaves.items() if name == "router" or k != "router_w"}
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        o = LAYERS[name](leaves)[0]
    (h,) = [tensor for tensor in packed if tensor.shape == (T * K, 2 * N)]
    before, weight = h.clone(), torch.randn_like(o)

    def backward(retain):
        return torch.autograd.grad(o, leaves.values(), weight, retain_graph=retain)

    first, second = backward(True), backward(True)
    assert torch.equal(h, before)
    last = backward(False)
    assert not torch.equal(h, before)
    for gradients in (second, last):
        for a, b in zip(first, gradients, strict=True):
            assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        backward(False)


def test_h_that_the_operator_returned_stays():
    leaves = make_layer().leaves()
    o, *_, h, _ = torch.ops.sonicmoe.layer_forward(
        leaves["x"], leaves["router_w"], leaves["w1"], None, leaves["w2"], None,
        f"top_k={K}",
    )  # fmt: skip
    before = h.clone()
    o.sum().backward()
    assert torch.equal(h, before)


def test_offloading_gives_the_same_gradients():
    module = make_module()
    x = torch.randn(T, D, requires_grad=True)
    plain = gradients(module, module(x), x)
    with torch.autograd.graph.save_on_cpu():
        outputs = module(x)
    for a, b in zip(gradients(module, outputs, x), plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(reentrant):
    module = make_module()
    x = torch.randn(T, D, requires_grad=True)
    leaves = [x, *module.parameters()]
    plain = gradients(module, module(x), x)
    for _ in range(2):
        o, aux_loss = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant)
        (o.float().square().sum() + aux_loss).backward()
        for leaf, gradient in zip(leaves, plain, strict=True):
            assert torch.equal(leaf.grad, gradient)
            leaf.grad = None


@pytest.mark.parametrize("backend", [KernelBackendMoE.sonicmoe, KernelBackendMoE.torch])
def test_inference_keeps_nothing(backend):
    module = make_module()
    x = torch.randn(T, D, requires_grad=True)
    expected = module(x, backend)[0].detach()

    def check(call):
        kept, (o, aux_loss) = kept_bytes(call, [])
        assert kept == [] and not o.requires_grad and torch.equal(o, expected)
        return aux_loss

    assert check(lambda: module(x, backend, is_inference_mode=True)) is None
    with torch.no_grad():
        assert check(lambda: module(x, backend)) is not None
    with torch.inference_mode():
        assert check(lambda: module(x.detach(), backend)) is not None
    module.eval()  # alone, it still differentiates
    kept, (o, _) = kept_bytes(lambda: module(x, backend), module.parameters())
    assert kept and o.requires_grad
    module.requires_grad_(False)
    check(lambda: module(x.detach(), backend))


def test_inference_operator_stores_no_preactivations():
    layer = make_layer()
    tensors = [t.detach() for t in (layer.x, layer.router_w, layer.w1, layer.w2)]
    x, router_w, w1, w2 = tensors
    forward = torch.ops.sonicmoe.layer_forward
    *_, preact, routing = forward(x, router_w, w1, None, w2, None, f"top_k={K} inference=true")
    assert preact.numel() == 0 and routing.numel() == 0


def test_second_derivative_is_refused():
    module = make_module()
    x = torch.randn(T, D, requires_grad=True)
    o, _ = module(x)
    with pytest.raises(RuntimeError, match="has no second derivative: got create_graph=True"):
        torch.autograd.grad(o.sum(), x, create_graph=True)
    logits = torch.randn(3, 4, requires_grad=True)
    loss = torch.ops.sonicmoe.aux_loss(logits, torch.ones(4).int())
    with pytest.raises(RuntimeError, match="aux_loss has no second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


# Determinism.


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_threads(dtype):
    module = MoE(8, 2, 64, 48, ActivationType.SWIGLU, True, 0.2).to(DTYPES[dtype])
    x = torch.randn(300, 64).to(DTYPES[dtype]).requires_grad_()
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 2, 3, 2, 4, 2):
            torch.set_num_threads(count)
            for _ in range(10):
                outputs = module(x)
                runs.append([*outputs, *gradients(module, outputs, x)])
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


# The module.


@pytest.mark.parametrize("bias", [False, True])
def test_state_dict_has_the_names_and_shapes_of_the_original(bias):
    module = MoE(E, K, D, N, ActivationType.GEGLU, bias, 0.02)
    shapes = {"router.weight": (E, D), "c_fc.weight": (E, 2 * N, D), "c_proj.weight": (E, D, N)}
    if bias:
        shapes |= {"c_fc.bias": (E, 2 * N), "c_proj.bias": (E, D)}
    assert {k: tuple(v.shape) for k, v in module.state_dict().items()} == shapes
    state = {k: torch.randn(shape) for k, shape in shapes.items()}
    module.load_state_dict(state)
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert tuple(MoE(E, K, D, N, ActivationType.RELU, bias, 0.02).c_fc.weight.shape) == (E, N, D)


def test_initial_weights():
    module = MoE(16, 2, 64, 64, ActivationType.SWIGLU, True, 0.02)
    for experts in (module.c_fc, module.c_proj):
        # The deviation's own deviation is std / sqrt(2 * 65536): five of them.
        assert abs(experts.weight.std().item() - 0.02) < 5 * 0.02 / (2 * 65536) ** 0.5
        assert not experts.bias.any()
    meta = MoE(16, 2, 64, 64, ActivationType.SWIGLU, True, 0.02).to("meta")
    assert meta(torch.empty(5, 64, device="meta"))[0].shape == (5, 64)


def test_copies_and_conversions():
    module = make_module(softmax_over_topk=False, norm_topk_probs=True, concat_layout=True)
    x = torch.randn(T, D)
    assert torch.equal(copy.deepcopy(module)(x)[0], module(x)[0])
    low = module.to(torch.bfloat16)
    o, aux_loss = low(x.bfloat16())
    assert o.dtype == torch.bfloat16 and aux_loss.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_lowers_the_loss_as_plain_pytorch_does(dtype):
    x = torch.randn(128, D).to(DTYPES[dtype])
    target = torch.randn(128, D).to(DTYPES[dtype])
    module = make_module().to(DTYPES[dtype])
    curves = []
    for backend in (KernelBackendMoE.sonicmoe, KernelBackendMoE.torch):
        trained = copy.deepcopy(module)
        optimizer = torch.optim.Adam(trained.parameters(), lr=3e-3)
        losses = []
        for _ in range(30):
            o, aux_loss = trained(x, backend)
            loss = (o - target).float().square().mean() + 0.01 * aux_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(torch.tensor(losses))
    ours, plain = curves
    assert ours[-1] < 0.7 * ours[0]
    # Adam turns a rounding difference in a tiny gradient into a whole step of its size, so curves
    # drift apart: they are held to a part of the distance that training covers.
    assert (ours - plain).abs().max() < 0.02 * (ours[0] - ours[-1])


# The package.


def test_version_is_that_of_the_library():
    cmake = Path(__file__).parents[2] / "CMakeLists.txt"
    version = re.search(r"project\(sonicmoe VERSION ([0-9.]+)", cmake.read_text()).group(1)
    assert sonicmoe.__version__ == version + ("" if sonicmoe.has_cuda() else "+cpu")


def test_threads_are_those_of_torch():
    # A second OpenMP runtime would bring its own team, and the teams would fight for the cores.
    script = (
        "import sonicmoe, torch\n"
        "sonicmoe.count_cumsum(torch.tensor([1]), 2)\n"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line\n"
        "       and 'torch' not in line.split('/')[-1]})"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.count("libgomp") + run.stdout.count("libiomp") == 1, run.stdout


def test_autocast_to_fp32_is_none(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
    x, weight = torch.randn(2, 3).bfloat16(), torch.randn(3)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda device, dtype=dtype: dtype)
        got = _autocast.autocast(x, weight, None)
        if dtype == torch.bfloat16:
            assert got[1].dtype == torch.bfloat16
        else:
            assert got == (x, weight, None)


@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_kept_bytes_of_a_view(routing):
    """A view is copied once, and the copy is what is kept."""
    moe = make_module(routing=routing, tile=8)
    x = torch.randn(T, 3 * D)[:, :D].requires_grad_()
    kept, _ = kept_bytes(lambda: moe(x)[0], list(moe.parameters()))
    assert kept.count(T * D * 4) == 1 and T * 3 * D * 4 not in kept


def test_without_the_extension_the_torch_backend_works(tmp_path):
    shutil.copytree(
        Path(sonicmoe.__file__).parent, tmp_path / "sonicmoe", ignore=lambda *_: ["lib"]
    )
    script = (
        "import sonicmoe, torch\n"
        "m = sonicmoe.MoE(4, 2, 16, 8, sonicmoe.ActivationType.SWIGLU, False, 0.02)\n"
        "x = torch.randn(3, 16)\n"
        "m(x, sonicmoe.KernelBackendMoE.torch)\n"
        "m(x)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "RuntimeError: sonicmoe's extension is missing" in run.stderr
    assert "run `make build` in a source tree" in run.stderr and "line 5" in run.stderr
