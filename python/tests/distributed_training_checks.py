"""What every process of test_distributed_training.py runs: training beside one process."""

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_checks import close, whole
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_ as nn_clip
from torch.utils.checkpoint import checkpoint

from sonicmoe import MoE
from sonicmoe._experts import Experts
from sonicmoe._router import Router
from sonicmoe.distributed import ExpertParallel, clip_grad_norm_, fully_shard_experts

HIDDEN, EXPERTS, TOP_K, TOKENS, STEPS, LR = 16, 8, 3, 12, 4, 1e-2
TRANSPORTS = ("gather", "all_to_all")


class Block(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        # gemma4 has expert_scale, a parameter beside the router and the experts.
        self.moe = MoE(experts, TOP_K, HIDDEN, 8, "swiglu", True, 0.2, router="gemma4")
        self.remake = None  # how activation checkpointing calls it

    def forward(self, x):
        return self._forward(x) if self.remake is None else self.remake(self._forward, x)

    def _forward(self, x):
        x = x + self.dense(x)
        out, aux = self.moe(self.norm(x))
        return x + out, aux


class Model(nn.Module):
    def __init__(self, experts=EXPERTS):
        super().__init__()
        self.embed, self.head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Block(experts) for _ in range(2))

    def forward(self, x):
        x, total = self.embed(x), 0
        for block in self.blocks:
            x, aux = block(x)
            total = total + aux
        return self.head(x), total


def make(experts=EXPERTS):
    """The same model on each rank."""
    torch.manual_seed(1)
    return Model(experts)


@functools.cache
def mesh_of(*shape):
    names = ("dp", "ep") if len(shape) == 2 else ("replicate", "shard", "ep")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@functools.cache
def everybody(*shape):
    """The mesh of all ranks, with the replicas of HSDP."""
    ranks = dist.get_world_size()
    if len(shape) == 2:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("all",))
    of_all = shape[0], ranks // shape[0]
    return init_device_mesh("cpu", of_all, mesh_dim_names=("replicate", "all"))


def spread(model, shape, transport="auto"):
    style = ExpertParallel(transport, loss_counts="global")
    return parallelize_module(model, mesh_of(*shape)["ep"], {"blocks.*.moe": style})


def sharded(model, shape, transport="auto", wrap=None, of_experts=None, **options):
    """Expert parallelism, what wraps a block, and FSDP2 or HSDP, in the order in which they come."""
    spread(model, shape, transport)
    mesh = mesh_of(*shape)
    data = mesh["dp"] if len(shape) == 2 else mesh["replicate", "shard"]
    for i, block in enumerate(model.blocks):
        fully_shard_experts(block.moe, data, **(of_experts or {}), **options)
        if wrap is not None:
            model.blocks[i] = block = wrap(block)
        fully_shard(block, mesh=everybody(*shape), **options)
    return fully_shard(model, mesh=everybody(*shape), **options)


def shapes():
    """Of (dp, ep)."""
    ranks = dist.get_world_size()
    return [(1, ranks), (2, ranks // 2)]


def pairs():
    """Experts on two ranks."""
    return dist.get_world_size() // 2, 2


def batches(step):
    """Every rank's (T, d), on each rank."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(dist.get_world_size(), TOKENS, HIDDEN, generator=generator)


def loss_of(model, x):
    out, aux = model(x)
    return out.square().mean() + 0.1 * out.sum(1).tanh().mean() + 0.1 * aux


def steps(model, parts_of, first=0, last=STEPS, optimizer=None, clip=None):
    """AdamW on the mean loss of the parts. Returns the losses, and leaves the last gradients."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), LR)
    losses = []
    for step in range(first, last):
        parts = parts_of(step)
        optimizer.zero_grad()
        loss = sum(loss_of(model, part) for part in parts) / len(parts)
        loss.backward()
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def own_part(step):
    return [batches(step)[dist.get_rank()]]


def one_process(model, data_ranks, **options):
    """Of all tokens. The switch loss is that of the tokens of each data-parallel rank."""
    return steps(model, lambda step: batches(step).view(data_ranks, -1, HIDDEN), **options)


@functools.cache
def expected(data_ranks):
    model = make()
    return one_process(model, data_ranks), dict(model.named_parameters())


def alike(model, losses, data_ranks, want=None):
    """Losses and weights beside one process, within 1e-6, and the last gradients.

    AdamW hardly sees the scale of a gradient, which 1e-5 shows: sums over tokens cancel, and the
    weights differ already.
    """
    want_losses, weights = want or expected(data_ranks)
    losses = losses / dist.get_world_size()
    dist.all_reduce(losses)
    close(losses, want_losses, "losses")
    got = dict(model.named_parameters())
    assert got.keys() == weights.keys()
    for name, weight in weights.items():
        close(got[name].detach(), weight.detach(), name)
        close(got[name].grad, weight.grad, f"{name}.grad", limit=1e-5)


def same(got, want):
    """Bit for bit. Wrappers add to names."""
    got, want = list(got.parameters()), list(want.parameters())
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(whole(a.detach()), whole(b.detach()))


def data_ranks(shape):
    return math.prod(shape[:-1])


def check_fsdp(folder):
    for shape in shapes():
        for transport in TRANSPORTS:
            model = sharded(make(), shape, transport)
            alike(model, steps(model, own_part), shape[0])
    for options in (
        {"reshard_after_forward": False},
        {"of_experts": {"shard_placement_fn": lambda parameter: Shard(1)}},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ):
        model = sharded(make(), shape, **options)
        alike(model, steps(model, own_part), shape[0])


def check_group(folder):
    """Experts are gathered for their layer alone, and reduced before the layer below is reached."""
    shape, x = pairs(), batches(0)[dist.get_rank()]
    for keeps in (False, True):
        model = sharded(make(), shape, of_experts={"reshard_after_forward": not keeps})
        weights = [block.moe.c_fc.weight for block in model.blocks]
        reduced = []

        def see(block, inputs, outputs, weights=weights, reduced=reduced):
            outputs[0].register_hook(
                lambda _: reduced.append([w.grad is not None for w in weights])
            )

        handle = model.blocks[0].register_forward_hook(see)
        loss = loss_of(model, x)
        handle.remove()
        gathered = [len(block.moe.c_fc.weight.placements) == 1 for block in model.blocks]
        assert gathered == [keeps, keeps]
        loss.backward()
        assert reduced == [[False, True]]
        with torch.no_grad():
            assert torch.equal(loss_of(model, x), loss)


def check_copies(folder):
    """Each copy has its own module of ExpertParallel, on the same mesh."""
    model, x = spread(make(), (1, dist.get_world_size())), batches(0)[dist.get_rank()]
    copied = copy.deepcopy(model)
    assert copied.blocks[0].moe.parallel is not model.blocks[0].moe.parallel
    assert torch.equal(loss_of(copied, x), loss_of(model, x))
    text = repr(copied.blocks[0].moe.parallel)
    assert "loss_counts='global'" in text and f"ranks={dist.get_world_size()}" in text


def check_fsdp_alone(folder):
    """The same tokens on each rank, so that the mean of gradients is exact."""
    one, model = make(), make()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    want, got = (steps(m, lambda step: [batches(step)[0]]) for m in (one, model))
    assert torch.equal(got, want)
    same(model, one)


def check_hsdp(folder):
    ranks = dist.get_world_size()
    for shape in ((1, 1, ranks), (2, 1, ranks // 2), (1, 2, ranks // 2), (2, ranks // 2, 1)):
        model = sharded(make(), shape)
        alike(model, steps(model, own_part), data_ranks(shape))


def check_ddp(folder):
    """As docs/distributed.md says it: DDP ignores the experts, whose gradients are sums."""
    ranks = dist.get_world_size()
    for transport in TRANSPORTS:
        model = spread(make(), (1, ranks), transport)
        experts = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
        for parameter in experts.values():
            parameter.register_hook(lambda gradient: gradient / ranks)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
        losses = steps(DistributedDataParallel(model, broadcast_buffers=False), own_part)
        alike(model, losses, 1)


def check_mixed_precision(folder):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for shape in shapes():
        model = sharded(make(), shape, mp_policy=policy)
        want = loss_of(make(), batches(0)[dist.get_rank()])
        loss = loss_of(model, batches(0)[dist.get_rank()])
        loss.backward()
        # bf16 has 8 bits, and about 10 roundings follow each other.
        close(loss.detach(), want.detach(), "loss", limit=10 * 2**-8)
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype == torch.float32, name
            assert whole(parameter.grad).isfinite().all(), name


def check_accumulation(folder):
    """Two backward passes with one reduction, beside one of both."""
    models = [sharded(make(), pairs()) for _ in range(2)]
    halves = batches(0)[dist.get_rank()].chunk(2)
    sum(loss_of(models[0], half) for half in halves).backward()
    for model, last in ((models[1], False), (models[1], True)):
        model.set_requires_gradient_sync(last)
        loss_of(model, halves[last]).backward()
    want = dict(models[0].named_parameters())
    for name, parameter in models[1].named_parameters():
        close(parameter.grad, want[name].grad, name)


def check_clip(folder):
    for shape in shapes():
        norms = []
        one, model = make(), sharded(make(), shape)
        want = one_process(one, shape[0], clip=lambda p: norms.append(nn_clip(p, 0.05)))
        losses = steps(model, own_part, clip=lambda p: norms.append(clip_grad_norm_(p, 0.05)))
        alike(model, losses, shape[0], (want, dict(one.named_parameters())))
        close(torch.stack(norms[STEPS:]), torch.stack(norms[:STEPS]), "norms")
        assert min(norms) > 0.05
    # Plain parameters beside those of expert parallelism.
    one, model = make(), spread(make(), (1, dist.get_world_size()))
    for m, clip in ((one, nn_clip), (model, clip_grad_norm_)):
        for parameter in m.parameters():
            parameter.grad = torch.ones_like(parameter)
        norms.append(clip(m.parameters(), 2.0, float("inf")))
        norms.append(clip(m.parameters(), 0.5))
    assert not isinstance(norms[-1], DTensor)
    close(torch.stack(norms[-2:]), torch.stack(norms[-4:-2]), "norms")
    close(model.blocks[0].moe.c_fc.weight.grad, one.blocks[0].moe.c_fc.weight.grad, "clipped")
    assert clip_grad_norm_(make().embed.weight, 1.0) == 0
    model.blocks[0].moe.c_fc.weight.grad.fill_(math.inf)
    with pytest.raises(
        RuntimeError, match="^parameters: got gradients of norm inf, allowed: a fin"
    ):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def check_checkpointing(folder):
    """Of activations: the same bits as without, and each choice counts once."""
    reentrant, other = (functools.partial(checkpoint, use_reentrant=r) for r in (True, False))

    def remade_by(remake, block):
        block.remake = remake
        return block

    shape = pairs()
    for transport in TRANSPORTS:
        want = sharded(make(), shape, transport)
        losses = steps(want, own_part, last=2)
        for wrap in (
            functools.partial(remade_by, reentrant),
            functools.partial(remade_by, other),
            checkpoint_wrapper,
        ):
            model = sharded(make(), shape, transport, wrap)
            assert torch.equal(steps(model, own_part, last=2), losses)
            same(model, want)
            for a, b in zip(model.buffers(), want.buffers(), strict=True):
                assert torch.equal(a, b)


def check_compile(folder):
    """Of a block, of the model, and of a MoE in one graph. all_to_all breaks the graph."""
    torch._dynamo.reset()
    compiled, shape = functools.partial(torch.compile, backend="aot_eager"), pairs()
    for transport in TRANSPORTS:
        model = sharded(make(), shape, transport, compiled)
        alike(model, steps(model, own_part), shape[0], renamed(model, shape[0]))
    model = sharded(make(), shape)
    alike(model, steps(compiled(model), own_part), shape[0])
    moe, x = spread(make(), (1, dist.get_world_size()), "gather").blocks[0].moe, batches(0)[0]
    out, aux = torch.compile(moe, backend="aot_eager", fullgraph=True)(x)
    close(out.detach(), moe(x)[0].detach(), "fullgraph")
    torch._dynamo.reset()


def renamed(model, ranks):
    """What is expected, by the names of a model with wrappers."""
    losses, weights = expected(ranks)
    names = (name for name, _ in model.named_parameters())
    return losses, dict(zip(names, weights.values(), strict=True))


def check_reset(folder):
    """From the meta device: each rank draws its part of what one process draws."""
    by_columns = {"of_experts": {"shard_placement_fn": lambda parameter: Shard(1)}}
    ranks = dist.get_world_size()
    for shape, experts, options in (
        ((1, ranks), 8, {}),
        ((2, ranks // 2), 6, {}),  # 3 experts over 2 ranks
        ((2, ranks // 2), 8, by_columns),
        ((2, ranks // 2, 1), 7, {}),
        ((1, 2, ranks // 2), 8, {}),
    ):
        with torch.device("meta"):
            model = make(experts=experts)
        sharded(model, shape, **options).to_empty(device="cpu")
        one = make(experts=experts)
        for m in (model, one):
            torch.manual_seed(7)
            for module in m.blocks.modules():
                if isinstance(module, MoE | Router | Experts):
                    module.reset_parameters()
        want = dict(one.named_parameters())
        for name, parameter in model.named_parameters():
            if ".moe." in name:
                assert torch.equal(whole(parameter), want[name]), name
        assert not model.blocks[0].moe.tokens_per_expert.any()


def state_of(model, optimizer, full=False):
    weights, moments = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=full)
    )
    return {"model": weights, "optimizer": moments}


def loaded(model, path, **options):
    """An optimizer with its state, behind a model with its own, of a checkpoint."""
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path, **options)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return optimizer


def same_state(got, want):
    (got, layout), (want, other) = (torch.utils._pytree.tree_flatten(s) for s in (got, want))
    assert layout == other
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def check_saved(folder):
    """Two ranks save, two and four load into other shapes (test_distributed_training.py: one)."""
    path, full = folder.parent / "saved", folder.parent / "full"
    ranks = dist.get_world_size()
    if ranks == 2:
        model = sharded(make(), (1, 2))
        optimizer = torch.optim.AdamW(model.parameters(), LR)
        steps(model, own_part, last=2, optimizer=optimizer)
        dcp.save(state_of(model, optimizer), checkpoint_id=path)
        state = state_of(model, optimizer, full=True)
        if dist.get_rank() == 0:
            torch.save(state, full)
        dist.barrier()
        again = sharded(Model(), (1, 2))
        of_again = loaded(again, path)
        for m, o in ((model, optimizer), (again, of_again)):
            steps(m, own_part, 2, STEPS, o)
        same(again, model)
    for shape in ((2, ranks // 2), (1, ranks), (2, 1, ranks // 2)):
        model = sharded(Model(), shape)
        same_state(state_of(model, loaded(model, path), full=True), torch.load(full))


def check_refusals(folder):
    ranks = dist.get_world_size()
    mesh = mesh_of(1, ranks)
    with pytest.raises(TypeError, match="^module: got Linear, allowed: sonicmoe.MoE"):
        fully_shard_experts(nn.Linear(2, 2), mesh["dp"])
    with pytest.raises(ValueError, match="^module: got a MoE without ExpertParallel"):
        fully_shard_experts(make().blocks[0].moe, mesh["dp"])
    moe = spread(make(), (1, ranks)).blocks[0].moe
    with pytest.raises(TypeError, match="^mesh: got str, allowed: a DeviceMesh"):
        fully_shard_experts(moe, "dp")
    with pytest.raises(ValueError, match="^mesh: got .*ep.*allowed: "):
        fully_shard_experts(moe, mesh["ep"])
    half = MixedPrecisionPolicy(torch.float16)
    with pytest.raises(ValueError, match="^mp_policy: got gradients .* torch.float16, allowed: "):
        fully_shard_experts(moe, mesh["dp"], mp_policy=half)
    fully_shard_experts(moe, mesh["dp"])
    with pytest.raises(ValueError, match="^c_fc.weight: got a parameter on .*comes once"):
        fully_shard_experts(moe, mesh["dp"])
    x = batches(0)[0]
    for parts in (lambda block: [block], lambda block: [block.moe.c_fc, block.moe.c_proj]):
        block = spread(make(), (1, ranks)).blocks[0]
        for part in parts(block):
            fully_shard(part, mesh=mesh["dp"])
        with pytest.raises(ValueError, match="^c_fc: got experts in a group of fully_shard"):
            block(x)
    block = spread(make(), (1, ranks)).blocks[0]
    experts = {p for p in block.parameters() if isinstance(p, DTensor)}
    fully_shard(block, mesh=mesh["ep"], ignored_params=experts)
    block(x)
    with pytest.raises(RuntimeError, match="^mesh: got device type 'meta', for which .*nccl"):
        ExpertParallel()._apply(make().blocks[0].moe, DeviceMesh("meta", range(ranks)))


#: By name, in the order in which they run.
CHECKS = {name[6:]: check for name, check in list(globals().items()) if name.startswith("check_")}
