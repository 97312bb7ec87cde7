"""The module and the world around it: hooks, adapters, transforms, counters, exported programs."""

import copy
import inspect
import io
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import sonicmoe
from sonicmoe import (
    ActivationType,
    KernelBackendMoE,
    MoE,
    distributed,
    experts,
    grouped_experts,
    moe_general_routing_inputs,
    moe_TC_softmax_topk_layer,
)

T, D, N, E, K = 40, 24, 16, 6, 2
BACKENDS = [KernelBackendMoE.sonicmoe, KernelBackendMoE.torch]
ROUTINGS = ["top_k", "token_rounding"]
EPS = torch.finfo(torch.float32).eps


def make_module(**options):
    options = {"tile": 1} | options
    return MoE(E, K, D, N, ActivationType.SWIGLU, options.pop("bias", False), 0.3, **options)


def backward(outputs):
    o, aux_loss = outputs
    (o.square().sum() + aux_loss).backward()


def assert_near(got, want):
    """A called router's logits are PyTorch's sums: another order of D fp32 terms, which moves every
    gradient by some roundings of its largest terms."""
    assert (got - want).norm() <= D * EPS * want.norm()


def assert_same_step(ours, plain, x, backend=KernelBackendMoE.sonicmoe):
    """Output, loss and all gradients that the plain module has."""
    x, plain_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs, expected = ours(x, backend), plain(plain_x, backend)
    for a, b in zip(outputs, expected, strict=True):
        torch.testing.assert_close(a, b)
    backward(outputs)
    backward(expected)
    assert_near(x.grad, plain_x.grad)
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    for name, p in plain.named_parameters():
        assert_near(gradients[name], p.grad)


# Hooks, adapters, routers.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("part", ["router", "c_fc", "c_proj"])
def test_hooks_of_parts_are_called(part, routing, backend):
    plain = make_module(routing=routing)
    moe = copy.deepcopy(plain)
    heard = []
    hooked = getattr(moe, part)
    hooked.register_forward_pre_hook(lambda module, args: heard.append(args[0].shape))
    hooked.register_forward_hook(lambda *_: heard.append("forward"))
    hooked.register_full_backward_hook(lambda *_: heard.append("backward"))
    assert_same_step(moe, plain, torch.randn(2, T, D), backend)
    assert heard == [(2 * T, D), "forward", "backward"]


class Scaled(nn.Module):
    """A weight times a trained number for each row, in another order of memory."""

    def __init__(self, weight):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(weight.shape[:-1]).unsqueeze(-1))

    def forward(self, weight):
        return (weight * self.scale).mT.contiguous().mT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("grad", [False, True])
def test_parametrizations_act(grad, routing, backend):
    moe = make_module(routing=routing)
    plain = copy.deepcopy(moe)
    x = torch.randn(T, D)
    for name in ("router", "c_fc", "c_proj"):
        part = getattr(moe, name)
        parametrize.register_parametrization(part, "weight", Scaled(part.weight))
        getattr(plain, name).weight.data = part.weight.detach().contiguous()
    if not grad:
        with torch.no_grad():
            torch.testing.assert_close(moe(x, backend)[0], plain(x, backend)[0])
        return
    backward(moe(x, backend))
    backward(plain(x, backend))
    for name in ("router", "c_fc", "c_proj"):
        (parametrization,) = getattr(moe, name).parametrizations.weight
        original = getattr(moe, name).parametrizations.weight.original
        gradient = getattr(plain, name).weight.grad
        torch.testing.assert_close(original.grad, gradient * parametrization.scale)
        products = (gradient * original).double()
        ours = parametrization.scale.grad.double()
        # Sums in fp32 of gradients that themselves may differ by sums in another order.
        limit = 2 * products.shape[-1] * EPS * products.abs().sum(-1, keepdim=True)
        assert ((ours - products.sum(-1, keepdim=True)).abs() <= limit).all()


class Adapter(nn.Module):
    """What adapters do to a module: they hold it and change what it returns."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        made = self.inner(x)
        return (made[0] * self.factor, made[1]) if isinstance(made, tuple) else made * self.factor


@pytest.mark.parametrize("name", ["router", "c_fc", "c_proj"])
@pytest.mark.parametrize("as_property", [False, True])
def test_a_weight_beside_its_parameter_counts(name, as_property):
    """As wrappers have it that keep the parameter and give out another tensor."""
    moe = make_module()
    plain = copy.deepcopy(moe)
    part = getattr(moe, name)
    twice = 2 * part.weight.detach()
    if as_property:
        part.__class__ = type("Wrapped", (type(part),), {"weight": property(lambda _: twice)})
    else:
        part.__dict__["weight"] = twice
    getattr(plain, name).weight.data = twice.contiguous()
    x = torch.randn(T, D)
    assert "weight" in part._parameters
    torch.testing.assert_close(moe(x)[0], plain(x)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_adapters_act(routing, backend):
    moe = make_module(routing=routing, bias=True)
    plain = copy.deepcopy(moe)
    for name in ("router", "c_fc", "c_proj"):
        getattr(plain, name).weight.data *= 2
        setattr(moe, name, Adapter(getattr(moe, name)))
    x = torch.randn(T, D)
    outputs, expected = moe(x, backend), plain(x, backend)
    for a, b in zip(outputs, expected, strict=True):
        torch.testing.assert_close(a, b)
    backward(outputs)
    backward(expected)
    for name in ("router", "c_fc", "c_proj"):
        gradient = getattr(plain, name).weight.grad
        assert_near(getattr(moe, name).inner.weight.grad, 2 * gradient)
        assert getattr(moe, name).factor.grad


class Called(nn.Linear):
    """A linear router that the layer does not know, and calls."""


class Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(D, 8)
        self.second = nn.Linear(8, E)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("mode", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("autocast", [False, True])
def test_any_router_is_called(autocast, routing, mode):
    torch.manual_seed(2)
    options = dict(routing=routing, softmax_over_topk=mode[0], norm_topk_probs=mode[1])
    moe = make_module(**options)
    moe.router = Biased()
    plain = copy.deepcopy(moe)
    x = torch.randn(T, D)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        backward(moe(x))
        backward(plain(x, KernelBackendMoE.torch))
    # Sums over all pairs in another order and, in bf16, a rounding on each side.
    tolerance = T * K * EPS + (2 * torch.finfo(torch.bfloat16).eps if autocast else 0)
    for a, b in zip(moe.parameters(), plain.parameters(), strict=True):
        assert (a.grad - b.grad).norm() < tolerance * b.grad.norm()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_called_router_compiles(routing):
    torch._dynamo.reset()
    moe = make_module(routing=routing)
    moe.router = Called(D, E)
    parametrize.register_parametrization(moe.c_fc, "weight", Scaled(moe.c_fc.weight))
    x = torch.randn(T, D)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for a, b in zip(moe(x), compiled(x), strict=True):
        torch.testing.assert_close(a, b)


def test_an_overridden_forward_of_the_router_is_called():
    moe = make_module()
    plain = copy.deepcopy(moe)
    plain.router.weight.data *= 2
    called = moe.router.forward
    moe.router.forward = lambda x: called(x) * 2  # as offloading does
    x = torch.randn(T, D)
    torch.testing.assert_close(moe(x), plain(x))


def test_bad_routers_are_refused():
    moe = make_module()
    x = torch.randn(T, D)
    moe.router = nn.Linear(D, E + 1)
    with pytest.raises(ValueError, match=r"^router\(x\): got shape \(40, 7\), allowed: \(T, E\) "):
        moe(x)
    moe.router = nn.LSTM(D, E)
    with pytest.raises(TypeError, match=r"^router\(x\): got tuple, allowed: a tensor$"):
        moe(x)


@pytest.mark.parametrize("part", ["c_fc", "c_proj"])
def test_main_grad_takes_the_parameter_itself(part):
    moe = make_module(gradient_accumulation_fusion=True)
    for weight in (moe.c_fc.weight, moe.c_proj.weight):
        weight.main_grad = torch.zeros(weight.shape)
    experts = getattr(moe, part)
    parametrize.register_parametrization(experts, "weight", Scaled(experts.weight))
    with pytest.raises(ValueError, match=f"^{part}.weight: got what a parametrization"):
        moe(torch.randn(T, D))
    with torch.no_grad():
        moe(torch.randn(T, D))


# Constant weights, views.


@pytest.mark.parametrize(
    "options",
    [{}, {"norm_topk_probs": True}, {"softmax_over_topk": False, "norm_topk_probs": True}],
)
def test_one_expert_with_constant_weights_warns(options):
    for _ in range(2):
        with pytest.warns(UserWarning, match="the router no gradient; softmax_over_topk=False "):
            MoE(E, 1, D, N, ActivationType.SWIGLU, False, 0.3, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_module(**options)
        moe = MoE(E, 1, D, N, ActivationType.SWIGLU, False, 0.3, softmax_over_topk=False)
    moe(torch.randn(T, D))[0].square().sum().backward()
    assert moe.router.weight.grad.any()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_output_of_two_dimensions_is_no_view(backend, grad):
    x = torch.randn(T, D, requires_grad=grad)
    o, _ = make_module()(x, backend)
    assert not o._is_view()
    o.detach_()


def test_concat_layout_says_the_layout():
    assert make_module(concat_layout=True).concat_layout
    assert not make_module().concat_layout


# Exported programs.


class Block(nn.Module):
    def __init__(self, inference, **options):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.moe = make_module(**options)
        self.inference = inference

    def forward(self, x):
        return x + self.moe(self.norm(x), is_inference_mode=self.inference)[0]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("called_router", [False, True])
def test_an_exported_program_is_saved_and_loaded(called_router, inference, strict):
    block = Block(inference)
    if called_router:
        block.moe.router = Called(D, E)
    block.eval()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    example = (torch.randn(2, 10, D),)
    program = torch.export.export(block, example, dynamic_shapes=(dims,), strict=strict)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    for shape in ((2, 10), (3, 7)):
        x = torch.randn(*shape, D)
        for made in (program, loaded, program.run_decompositions()):
            torch.testing.assert_close(made.module()(x), block(x))


def test_inference_that_is_compiled_keeps_nothing():
    torch._dynamo.reset()
    moe = make_module()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    x = torch.randn(T, D, requires_grad=True)
    o, _ = compiled(x, is_inference_mode=True)
    assert not o.requires_grad and torch.equal(o, moe(x)[0])


# FLOPs.


def counted(call):
    with FlopCounterMode(display=False) as counter:
        result = call()
    return counter.get_total_flops(), result


@pytest.mark.parametrize("activation, products", [("swiglu", 6), ("relu", 4)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("called_router", [False, True])
def test_flops_of_the_module(called_router, compiled, activation, products):
    torch._dynamo.reset()
    moe = MoE(E, K, D, N, activation, False, 0.3)
    if called_router:
        moe.router = Called(D, E)
    forward = products * T * K * N * D + 2 * T * E * D
    x = torch.randn(T, D, requires_grad=True)
    call = torch.compile(moe, backend="aot_eager") if compiled else moe
    call(x)  # a compiler's own runs are not counted
    flops, (o, _) = counted(lambda: call(x))
    assert flops == forward
    assert counted(o.sum().backward)[0] == 2 * forward
    assert counted(lambda: moe(x, is_inference_mode=True))[0] == forward


def test_flops_of_gradients_that_are_wanted():
    moe = make_module()
    up, down, router = 4 * T * K * N * D, 2 * T * K * N * D, 2 * T * E * D
    x = torch.randn(T, D, requires_grad=True)
    for inputs, flops in (
        ([x], up + down + router),  # down: dA, which every gradient of H needs
        ([moe.c_fc.weight], up + down),
        ([moe.c_proj.weight], 2 * down),
        ([moe.router.weight], down + router),
    ):
        o = moe(x)[0].sum()
        assert counted(lambda: torch.autograd.grad(o, inputs))[0] == flops


@pytest.mark.parametrize("separate", [False, True])
def test_flops_of_given_routing(separate):
    x = torch.randn(T, D, requires_grad=True)
    w1 = torch.randn(E, N if separate else 2 * N, D, requires_grad=True)
    w2 = torch.randn(E, D, N, requires_grad=True)
    options = {"w1_up": torch.randn(E, N, D, requires_grad=True)} if separate else {}
    tokens, ids = torch.randint(0, T, (70,)), torch.randint(-1, E, (70,))
    pairs, counts = ids[:T].view(T, 1), torch.full((E,), 2)
    for rows, call in (
        (70, lambda: moe_general_routing_inputs(
            x, torch.rand(70), tokens, ids, w1, None, w2, None, **options)[0]),
        (T, lambda: experts(x, pairs, torch.rand(T, 1), w1, w2, **options)[0]),
        (T, lambda: grouped_experts(x, counts, w1, w2, **options)),
        (T, lambda: grouped_experts(x, counts, w1, w2, out=torch.empty(T, D), **options)),
    ):  # fmt: skip
        flops, o = counted(call)
        assert flops == 6 * rows * N * D
        assert counted(o.sum().backward)[0] == 2 * flops


# Distributed tensors, on a mesh of one rank.


@pytest.fixture
def mesh(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def spread(moe, mesh, *placements):
    """The module with parameters as DTensors."""
    moe = copy.deepcopy(moe)
    for part in (moe.router, moe.c_fc, moe.c_proj):
        for name, p in list(part.named_parameters()):
            setattr(part, name, nn.Parameter(distribute_tensor(p.detach(), mesh, placements)))
    return moe


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("called_router", [False, True])
def test_replicated_weights(called_router, routing, backend, mesh):
    plain = make_module(routing=routing, bias=True)
    if called_router:
        plain.router = Called(D, E)
    moe = spread(plain, mesh, Replicate())
    x = torch.randn(2, T, D)
    leaf = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    plain_leaf = x.clone().requires_grad_()
    outputs, expected = moe(leaf, backend), plain(plain_leaf, backend)
    backward(outputs)
    backward(expected)
    for a, b in zip(outputs, expected, strict=True):
        assert isinstance(a, DTensor)
        torch.testing.assert_close(a.full_tensor(), b)
    torch.testing.assert_close(leaf.grad.full_tensor(), plain_leaf.grad)
    for a, b in zip(moe.parameters(), plain.parameters(), strict=True):
        assert isinstance(a.grad, DTensor)
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)
    assert moe(leaf, is_inference_mode=True)[1] is None


def test_other_distributed_tensors_are_refused(mesh):
    plain = make_module()
    x = torch.randn(T, D)
    everywhere = distribute_tensor(x, mesh, [Replicate()])
    sharded = spread(plain, mesh, Shard(0))
    with pytest.raises(ValueError, match=r"^c_fc.weight: got .*to_local\(\); ExpertParallel"):
        sharded(everywhere)
    with pytest.raises(ValueError, match=r"^x: got a DTensor with placements \(Shard.*to_local"):
        spread(plain, mesh, Replicate())(distribute_tensor(x, mesh, [Shard(0)]))
    with pytest.raises(TypeError, match=r"^c_fc.weight: got a DTensor beside a plain x.*local"):
        spread(plain, mesh, Replicate())(x)
    with pytest.raises(TypeError, match="^c_fc.weight: got a plain tensor, allowed: a DTensor l"):
        plain(everywhere)
    w1, w2 = sharded.c_fc.weight, sharded.c_proj.weight
    with pytest.raises(TypeError, match=r"^w1: got a DTensor, allowed: this rank's .*to_local"):
        moe_TC_softmax_topk_layer(x, plain.router.weight, w1, None, w2, None, K)
    with pytest.raises(TypeError, match=r"^w1: got a DTensor, allowed: this rank's .*to_local"):
        experts(x, torch.zeros(T, 1).int(), torch.rand(T, 1), w1, w2)
    assert torch.equal(
        moe_TC_softmax_topk_layer(
            x, plain.router.weight, w1.to_local(), None, w2.to_local(), None, K
        )[0],
        plain(x)[0],
    )


@pytest.mark.parametrize("part", ["router", "c_fc", "c_proj"])
def test_a_part_that_is_sharded_alone_is_refused(part, mesh):
    moe = make_module()
    fully_shard(getattr(moe, part), mesh=mesh)
    with pytest.raises(ValueError, match=f"^{part}: got a module under fully_shard.* shard the M"):
        moe(torch.randn(T, D))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_module_that_is_sharded(routing, mesh):
    plain = make_module(routing=routing)
    moe = copy.deepcopy(plain)
    fully_shard(moe, mesh=mesh)
    x = torch.randn(T, D)
    for a, b in zip(moe(x), plain(x), strict=True):
        assert torch.equal(a, b)
    backward(moe(x))
    backward(plain(x))
    for a, b in zip(moe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


# Names, types, hints.


@pytest.mark.parametrize("routing", ROUTINGS)
def test_fp16_autocast_on_the_cpu_is_refused(routing):
    moe = make_module(routing=routing)
    x, weights = torch.randn(T, D), (moe.c_fc.weight, moe.c_proj.weight)
    words = "^torch.autocast: got dtype=torch.float16 on the CPU, allowed: dtype=torch.bfloat16$"
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(ValueError, match=words):
            moe(x)
        with pytest.raises(ValueError, match=words):
            experts(x, torch.zeros(T, 1).int(), torch.rand(T, 1), *weights)
        assert moe(x, KernelBackendMoE.torch)[0].dtype == torch.float16


@pytest.mark.parametrize("name", ["c_fc", "c_proj", "router"])
def test_errors_name_the_modules_tensors(name):
    moe = make_module()
    moe.get_submodule(name).half()
    words = f"^{name}.weight: got torch.float16, allowed: torch.float32"
    with pytest.raises(TypeError, match=words):
        moe(torch.randn(T, D))


def test_what_x_and_flags_may_be():
    moe, x = make_module(), torch.randn(T, D)
    for bad in (x.to_sparse(), x.view(2, -1, D).to_sparse()):
        with pytest.raises(ValueError, match="^x: got a tensor in torch.sparse_coo, allowed: torc"):
            moe(bad)
    with pytest.raises(TypeError, match="^is_inference_mode: got 'no', allowed: True, False"):
        moe(x, is_inference_mode="no")
    counts, weights = torch.full((E,), T // E), (torch.randn(E, 2 * N, D), torch.randn(E, D, N))
    with pytest.raises(TypeError, match="^zero_tail: got 'no', allowed: True, False"):
        grouped_experts(x, counts, *weights, zero_tail="no")
    with pytest.raises(ValueError, match="^rows: got a tensor in torch.sparse_coo, allowed: torch"):
        grouped_experts(x.to_sparse(), counts, *weights)


def test_the_name_silu_warns_that_it_has_no_gate():
    with pytest.warns(UserWarning, match="^activation_function: got 'silu', .* 'swiglu' here"):
        moe = MoE(E, K, D, N, "silu", False, 0.3)
    assert moe.activation_function is ActivationType.SILU
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MoE(E, K, D, N, ActivationType.SILU, False, 0.3)
        MoE(E, K, D, N, "swiglu", False, 0.3)


@pytest.mark.parametrize(
    "name, published", [("nearest", "nr"), ("stochastic", "sr"), ("nearest_scores", "nr_s")]
)
def test_rounding_rules_have_their_names_in_cpp_too(name, published):
    logits = torch.randn(T, E)
    options = dict(tile=8, seed=3, offset=5)
    ours = sonicmoe.token_rounding(logits, K, rule=name, **options)
    theirs = sonicmoe.token_rounding(logits, K, rule=published, **options)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    options = dict(routing="token_rounding", tile=8)
    moe, other = make_module(rounding=name, **options), make_module(rounding=published, **options)
    other.load_state_dict(moe.state_dict())
    for backend in BACKENDS:
        results = []
        for module in (moe, other):
            torch.manual_seed(1)
            results.append(module(torch.linspace(-1, 1, T * D).view(T, D), backend)[0])
        assert torch.equal(*results)


def test_the_documented_names_are_exported():
    documented = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    table = re.search(r"\| function \| returns \|\n\|---\|---\|\n((?:\|.*\n)+)", documented)
    names = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*?\|", table[1], re.MULTILINE)))
    assert "token_rounding" in names and "switch_loss" in names
    assert set(names) <= set(sonicmoe.__all__)


def test_everything_exported_is_described():
    for module in (sonicmoe, distributed):
        for name in set(module.__all__) - {"PRESETS"}:
            assert len(inspect.getdoc(getattr(module, name)) or "") > 50, name


def test_the_package_is_typed():
    assert (Path(sonicmoe.__file__).parent / "py.typed").exists()


def in_flat_buffer(module):
    """Puts each parameter one element into a buffer of its own, as ZeRO's flat buffers may."""
    for parameter in module.parameters():
        flat = torch.empty(parameter.numel() + 1, dtype=parameter.dtype, device=parameter.device)
        flat[1:] = parameter.detach().flatten()
        parameter.data = flat[1:].view_as(parameter)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_off_16_bytes(dtype):
    """The CPU reads them as they are, and computes the same bits."""
    moe = make_module(bias=True).to(dtype)
    moved = in_flat_buffer(copy.deepcopy(moe))
    x = torch.randn(T, D, dtype=dtype)
    for module in (moe, moved):
        module(x)[0].sum().backward()
    assert moved.c_fc.weight.data_ptr() % 16 != 0
    for own, other in zip(moe.parameters(), moved.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
