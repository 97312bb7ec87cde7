"""What every process of test_distributed.py runs: ExpertParallel beside one module with all."""

import copy
import itertools
from functools import partial

import fake_peer_copies
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import sonicmoe
from sonicmoe import MoE
from sonicmoe.distributed import ExpertParallel, Transport, experts

HIDDEN, EXPERTS, TOP_K = 16, 8, 3
TRANSPORTS = {
    "gather": Transport("gather", max_tokens=24),
    "gather_kept": Transport("gather", max_tokens=24, keep_gathered=True),
    "all_to_all": Transport("all_to_all"),
}


def ep_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def make(**options):
    """The same module on each rank."""
    torch.manual_seed(1)
    bias, intermediate = options.pop("add_bias", False), options.pop("intermediate", 8)
    moe = MoE(EXPERTS, TOP_K, HIDDEN, intermediate, "swiglu", bias, 0.4, **options)
    if bias:
        with torch.no_grad():
            moe.c_fc.bias.normal_()
            moe.c_proj.bias.normal_()
    return moe


def parallel(moe, transport, **options):
    return parallelize_module(copy.deepcopy(moe), ep_mesh(), ExpertParallel(transport, **options))


def tokens_of(counts):
    """Every rank's tokens (T, d), on each rank."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(count, HIDDEN, generator=generator) for count in counts]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(got, want, name, limit=1e-6):
    got, want = whole(got).double(), whole(want).double()
    assert got.shape == want.shape, name
    distance = (got - want).norm().item()
    assert distance <= limit * want.norm().item() + 1e-30, f"{name}: {distance} of {want.norm()}"


def run(call, moe, x, aux_weight=0.0):
    leaf = x.clone().requires_grad_()
    out, aux = call(leaf)
    loss = (out * torch.linspace(-1, 1, HIDDEN)).sum() + aux_weight * aux
    loss.backward()
    return out.detach(), leaf.grad, {n: p.grad for n, p in moe.named_parameters()}


def beside_one(moe, transport, counts, call=lambda moe: moe):
    """Output and all gradients of the ranks' tokens, beside the module on all tokens."""
    batches = tokens_of(counts)
    spread = parallel(moe, transport)
    out, dx, gradients = run(moe, moe, torch.cat(batches))
    rank = dist.get_rank()
    own_out, own_dx, own = run(call(spread), spread, batches[rank])
    close(own_out, out.split(counts)[rank], "out")
    close(own_dx, dx.split(counts)[rank], "dx")
    for name, gradient in gradients.items():
        if gradient is None:
            assert own[name] is None
            continue
        got = own[name]
        if name.startswith("c_"):
            assert isinstance(got, DTensor) and tuple(got.placements) == (Shard(0),)
        else:  # of this rank's tokens
            dist.all_reduce(got)
        close(got, gradient, name)
    assert torch.equal(sum_over_ranks(spread.tokens_per_expert), moe.tokens_per_expert)


def sum_over_ranks(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def even():
    return [12] * dist.get_world_size()


def uneven():
    return [12, 0, 24, 1][: dist.get_world_size()]


def check_transports(folder):
    for transport, counts in itertools.product(TRANSPORTS.values(), (even(), uneven())):
        beside_one(make(add_bias=True), transport, counts)
    beside_one(make(), "gather", even())
    beside_one(make(), "auto", even())
    beside_one(make(), Transport("gather", max_tokens=24), [0] * dist.get_world_size())
    beside_one(make(), "all_to_all", [0] * dist.get_world_size())


PEERS = (("gather", {}), ("gather", {"keep_gathered": True}), ("all_to_all", {}))


def check_peer_copies(folder):
    """Outputs and gradients beside one process. FakePeerCopies replaces the copies."""
    nobody, most = [0] * dist.get_world_size(), {"max_tokens": 24}
    with pytest.MonkeyPatch.context() as patch:
        made = fake_peer_copies.install(patch)
        for name, options in PEERS:
            make_transport = partial(Transport, name, peer_copies=True, **options)
            equal, padded = make_transport(), make_transport(**most)
            for transport, counts in (
                (equal, even()), (padded, even()), (padded, uneven()), (equal, nobody),
                (padded, nobody), (equal, [1] * len(nobody)),
            ):  # fmt: skip
                beside_one(make(add_bias=True), transport, counts)
            beside_one(frozen(), equal, even())
            calls_alike(padded)
            separate(equal)
            two_layers_beside_process_group(equal)
        assert len(made) == 1  # for all layers of the group


def frozen():
    moe = make()
    moe.c_fc.weight.requires_grad_(False)
    return moe


def two_layers_beside_process_group(transport):
    """Two layers in one graph, ids of the caller with sentinels, beside the process group's
    exchanges. Everything has a gradient, or weights alone."""
    count, rank = EXPERTS // dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(9, HIDDEN, generator=generator)
    routings = [
        (torch.rand(9, EXPERTS + 4, generator=generator).argsort(1)[:, :4] - 2,
         torch.rand(9, 4, generator=generator)) for _ in range(2)
    ]  # fmt: skip
    weights = [
        (torch.randn(count, 16, HIDDEN, generator=generator),
         torch.randn(count, HIDDEN, 8, generator=generator)) for _ in range(2)
    ]  # fmt: skip

    def step(transport, everything):
        leaves = [[t.clone().requires_grad_() for t in pair] for pair in weights]
        rows = x.clone().requires_grad_(everything)
        scores = [s.clone().requires_grad_(everything) for _, s in routings]
        out = rows
        for (ids, _), of_ids, pair in zip(routings, scores, leaves, strict=True):
            out = experts(out, ids, of_ids, *pair, group=dist.group.WORLD, transport=transport)
        wanted = [*itertools.chain(*leaves), *([rows, *scores] if everything else [])]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted)]

    for everything in (True, False):
        want = step("gather" if transport.name == "gather" else "all_to_all", everything)
        for tensor, expected in zip(step(transport, everything), want, strict=True):
            close(tensor, expected, "peer copies")


def check_other_numbers_of_tokens(folder):
    """In a first call, and with numbers that all ranks have brought together before."""
    rank = dist.get_rank()
    peers = Transport("all_to_all", peer_copies=True)
    with pytest.MonkeyPatch.context() as patch:
        for transport in (peers, Transport("gather"), Transport("gather", peer_copies=True)):
            for known in (False, True):
                fake_peer_copies.install(patch)
                spread = parallel(make(), transport)
                if known:
                    for tokens in range(dist.get_world_size()):
                        spread(torch.randn(tokens + 1, HIDDEN))
                message = f"^x: got {rank + 1} tokens on rank {rank} and .*allowed: equally many,"
                with pytest.raises(ValueError, match=message):
                    spread(torch.randn(rank + 1, HIDDEN))


def check_routers(folder):
    for transport in ("gather", "all_to_all"):
        for options in (
            {"router": "deepseek_v4"},
            {"router": "gemma4"},
            {"router": "gpt_oss", "layout": "concatenated"},
            {"softmax_over_topk": False},
        ):
            beside_one(make(**options), transport, even())


def check_one_rank_has_it_all(folder):
    """All tokens choose the experts of one rank, and of these not all."""
    for transport in ("gather", "all_to_all"):
        moe = make(router=sonicmoe.RouterConfig(selection_bias=True))
        moe.selection_bias[2:] = -1e4
        moe.top_k = 2
        beside_one(moe, transport, even())


def check_calls(folder):
    """Backward twice, a checkpoint and no backward at all, beside one backward."""
    for transport in TRANSPORTS.values():
        calls_alike(transport)


def calls_alike(transport):
    x = tokens_of(uneven())[dist.get_rank()]

    def step(call, backwards=1):
        spread = parallel(make(), transport)
        leaf = x.clone().requires_grad_()
        out = call(lambda tokens: spread(tokens)[0], leaf)
        dout = torch.linspace(-1, 1, HIDDEN).expand_as(out)
        for left in reversed(range(backwards)):
            leaves = [leaf, *spread.parameters()]
            gradients = torch.autograd.grad(out, leaves, dout, retain_graph=left > 0)
        return [out.detach(), *map(local, gradients)]

    def plain(module, leaf):
        return module(leaf)

    want = step(plain)
    for tensors in (step(plain, 2), step(partial(checkpoint, use_reentrant=False))):
        assert all(torch.equal(got, one) for got, one in zip(tensors, want, strict=True))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(parallel(make(), transport)(x)[0], want[0])


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_frozen(folder):
    for transport in ("gather", "all_to_all"):
        beside_one(frozen(), transport, even())


def check_losses(folder):
    """The mean over ranks of the switch loss with counts of all is that of all tokens."""
    batches = tokens_of(even())
    exact = make()(torch.cat(batches))[1].detach()
    rank = dist.get_rank()
    local = parallel(make(), "gather")(batches[rank])[1].detach()
    close(local, make()(batches[rank])[1].detach(), "local")
    for transport in ("gather", "all_to_all"):
        spread = parallel(make(), transport, loss_counts="global")
        _, aux = spread(batches[rank])
        close(sum_over_ranks(aux.detach()) / dist.get_world_size(), exact, "global")
        assert spread.tokens_per_expert.sum() == TOP_K * len(batches[rank])
    assert (sum_over_ranks(local) / dist.get_world_size() - exact).abs() > 1e-6


def check_function(folder):
    """Ids with sentinels, and scores' gradients."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    moe = make()
    w1, w2 = moe.c_fc.weight.detach(), moe.c_proj.weight.detach()
    x, ids = torch.randn(9, HIDDEN), torch.rand(9, EXPERTS).argsort(1)[:, :TOP_K]
    ids[0, 1], ids[1], ids[2, 0] = -1, EXPERTS, 2**40
    weights = torch.rand(9, TOP_K)
    own = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    for transport in ("gather", "all_to_all"):
        a, b = (t.clone().requires_grad_() for t in (weights, weights))
        want = sonicmoe.experts(x, ids, a, w1, w2)[0]
        group = dist.group.WORLD
        got = experts(x, ids, b, w1[own], w2[own], group=group, transport=transport)
        want.sum().backward()
        got.sum().backward()
        close(got, want, "out")
        close(b.grad, a.grad, "dscores")


def check_other_numbers_of_experts(folder):
    """The last rank holds one expert less than the others."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = 2 if rank < ranks - 1 else 1
    w1, w2 = torch.randn(own, 16, HIDDEN), torch.randn(own, HIDDEN, 8)
    ids, weights = torch.zeros(5, 1, dtype=torch.long), torch.rand(5, 1)
    message = f"^w2: got 1 experts on rank {ranks - 1}, allowed: 2 on each rank"
    for transport in ("gather", "all_to_all"):
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                group = dist.group.WORLD
                experts(
                    torch.randn(5, HIDDEN), ids, weights, w1, w2, group=group, transport=transport
                )


def check_separate(folder):
    """Gate and up rows in tensors of their own, beside one process."""
    for transport in (Transport("gather"), Transport("gather", keep_gathered=True), "all_to_all"):
        separate(transport)


def separate(transport):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    batches = [
        (torch.randn(9, HIDDEN), torch.rand(9, EXPERTS).argsort(1)[:, :TOP_K]) for _ in range(ranks)
    ]
    weights = torch.rand(9, TOP_K)
    names = ("w1", "w1_up", "w2", "b1", "b1_up", "b2")
    shapes = ((24, HIDDEN), (24, HIDDEN), (HIDDEN, 24), (24,), (24,), (HIDDEN,))
    drawn = {name: torch.randn(EXPERTS, *shape) for name, shape in zip(names, shapes, strict=True)}
    own = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    one = {name: t.clone().requires_grad_() for name, t in drawn.items()}
    part = {name: t[own].clone().requires_grad_() for name, t in drawn.items()}
    want = [sonicmoe.experts(x, ids, weights, **one)[0] for x, ids in batches]
    got = experts(*batches[rank], weights, **part, group=dist.group.WORLD, transport=transport)
    sum(out.square().sum() for out in want).backward()
    got.square().sum().backward()
    close(got, want[rank], "out")
    for name, tensor in part.items():
        close(tensor.grad, one[name].grad[own], name)


def check_bf16(folder):
    """In 16 bits each partial sum is rounded once more; autocast casts as without ranks."""
    batches, rank = tokens_of(even()), dist.get_rank()
    exact = run(make(), make(), torch.cat(batches))[0].split(even())[rank]
    for transport in ("gather", "all_to_all"):
        spread = parallel(make(), transport)
        with torch.autocast("cpu", torch.bfloat16):
            out, _ = spread(batches[rank].requires_grad_())
        assert out.dtype == torch.bfloat16
        (out.float().sum()).backward()
        assert spread.c_fc.weight.grad.dtype == torch.float32
        with torch.no_grad():
            assert torch.equal(
                spread(batches[rank], is_inference_mode=True)[0].float().isfinite(),
                torch.ones_like(exact, dtype=torch.bool),
            )
        close(out, exact, transport, limit=3e-2)


def check_kept(folder):
    """The gather transport keeps own x, not everybody's; all-to-all keeps no Y."""

    def kept(transport, counts):
        spread, sizes = parallel(make(intermediate=24), transport), []  # H is wider than x
        x = tokens_of(counts)[dist.get_rank()].requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (sizes.append(tuple(t.shape)), t)[1], lambda t: t
        ):
            spread(x)
        return sizes

    tokens, ranks = 12, dist.get_world_size()
    everybody = (ranks * tokens, HIDDEN)
    assert everybody not in kept("gather", even())
    assert everybody in kept(Transport("gather", keep_gathered=True), even())
    # The rows that arrive, once: no other tensor is as wide.
    wide = [shape for shape in kept("all_to_all", even()) if shape[1:] == (HIDDEN,)]
    assert sum(shape[0] != EXPERTS and shape[0] != tokens for shape in wide) <= 1


def check_reset(folder):
    spread = parallel(make(add_bias=True), "auto")
    torch.manual_seed(3)
    spread.c_fc.reset_parameters()
    spread.c_proj.reset_parameters()
    one = make(add_bias=True)
    torch.manual_seed(3)
    one.c_fc.reset_parameters()
    one.c_proj.reset_parameters()
    assert torch.equal(whole(spread.c_fc.weight), one.c_fc.weight)
    assert torch.equal(whole(spread.c_proj.weight), one.c_proj.weight)
    assert not whole(spread.c_fc.bias).any()


def check_refusals(folder):
    mesh = ep_mesh()
    ranks = dist.get_world_size()

    def apply(moe, mesh=mesh):
        return parallelize_module(moe, mesh, ExpertParallel())

    flat = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "ep"))
    with pytest.raises(ValueError, match="^mesh: got 2 dimensions .*allowed: one"):
        ExpertParallel()._apply(make(), flat)
    with pytest.raises(ValueError, match=f"^num_experts: got 7, allowed: multiples of {ranks}"):
        apply(MoE(7, 2, HIDDEN, 8, "swiglu", False, 0.1))
    with pytest.raises(ValueError, match="^routing: got 'token_rounding', allowed: 'top_k'"):
        apply(make(routing="token_rounding"))
    with pytest.raises(ValueError, match="^gradient_accumulation_fusion: got True"):
        apply(make(gradient_accumulation_fusion=True))
    with pytest.raises(ValueError, match="^recompute: got 'preact', allowed: 'none' under"):
        apply(make(recompute="preact"))
    with pytest.raises(TypeError, match="^module: got Linear, allowed: sonicmoe.MoE"):
        apply(torch.nn.Linear(2, 2))
    w1, w2 = torch.randn(2, 16, HIDDEN), torch.randn(2, HIDDEN, 8)
    x, ids, weights = torch.randn(4, HIDDEN), torch.zeros(4, 1, dtype=torch.long), torch.rand(4, 1)
    for group in (None, "ep", mesh, dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(TypeError, match="^group: got .*, allowed: a ProcessGroup"):
            experts(x, ids, weights, w1, w2, group=group)
    with pytest.raises(TypeError, match="^x: got a DTensor, allowed: .*to_local"):
        x = DTensor.from_local(x, mesh)
        experts(x, ids, weights, w1, w2, group=dist.group.WORLD)
    with pytest.raises(TypeError, match="^mesh: got str, allowed: a DeviceMesh"):
        ExpertParallel()._apply(make(), "ep")
    copies = parallel(make(), Transport("gather", peer_copies=True))
    with pytest.raises(ValueError, match="^peer_copies: got True, allowed: False, for x is on cpu"):
        copies(torch.randn(4, HIDDEN))
    for module, x in ((make().double(), torch.randn(4, HIDDEN).double()),
                      (make(), torch.randn(4, HIDDEN).double())):  # fmt: skip
        with pytest.raises(TypeError, match="^x: got torch.float64, allowed: torch.float32, "):
            apply(module)(x)
    spread = apply(make())
    with pytest.raises(ValueError, match="^c_fc.weight: got a DTensor .*once"):
        apply(spread)
    with pytest.raises(ValueError, match="^kernel_backend_moe: got .*torch, allowed"):
        spread(torch.randn(4, HIDDEN), sonicmoe.KernelBackendMoE.torch)
    x = DTensor.from_local(torch.randn(4, HIDDEN), mesh)
    with pytest.raises(TypeError, match="^x: got a DTensor, allowed: .*to_local"):
        spread(x)
    other = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("a", "b"))["a"]
    weight = spread.c_fc.weight
    elsewhere = DTensor.from_local(weight.to_local(), other, [Shard(0)])
    spread.c_fc.weight = torch.nn.Parameter(elsewhere)
    with pytest.raises(ValueError, match="^c_fc.weight: got a DTensor on .*ExpertParallel"):
        spread(torch.randn(4, HIDDEN))
    spread = parallelize_module(make(), mesh, ExpertParallel(Transport("gather", max_tokens=2)))
    nothing = torch.zeros(4, 0)
    w1, w2 = torch.zeros(1, 16, 8), torch.zeros(1, 8, 8)
    with pytest.raises(ValueError, match=r"^ids: got shape \(4, 0\), allowed: .*K at least 1"):
        experts(torch.zeros(4, 8), nothing.int(), nothing, w1, w2, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="^x: got 4 tokens, allowed: up to max_tokens"):
        spread(torch.randn(4, HIDDEN))


#: By name, in the order in which they run.
CHECKS = {name[6:]: check for name, check in list(globals().items()) if name.startswith("check_")}
