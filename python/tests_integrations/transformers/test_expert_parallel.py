"""transformers' own expert parallelism on two ranks, with our experts on each, beside one rank."""

import pytest
import small
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import apply_expert_parallelism

import sonicmoe.integrations.transformers as sonicmoe_transformers

RANKS, TOKENS, TOP_K, EXPERTS = 2, 20, 2, 8


def layer(make, implementation: str) -> nn.Module:
    module = make().model.layers[0].mlp.experts
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    module.config._experts_implementation = implementation
    return nn.ModuleDict({"experts": module})


def batch(rank: int, highest: int):
    """Hidden states, ids below `highest` and weights of a rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(TOKENS, 32, generator=generator).requires_grad_()
    order = torch.rand(TOKENS, highest, generator=generator).argsort(1)
    weights = torch.rand(TOKENS, TOP_K, generator=generator).requires_grad_()
    return x, order[:, :TOP_K].contiguous(), weights


def run(module, x, ids, weights):
    out = module(x, ids, weights)
    (out * torch.linspace(-1, 1, 32)).sum().backward()
    return out.detach(), x.grad, weights.grad


def local(gradient):
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def check(rank: int, store: str, make, implementation: str, shared: bool, highest: int) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        name = sonicmoe_transformers.register()
        if shared:
            ep_mesh = tp_mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
        else:
            mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("ep", "tp"))
            ep_mesh, tp_mesh = mesh["ep"], mesh["tp"]
        plan = {
            f"experts.{key}": "grouped_gemm"
            for key, _ in layer(make, name)["experts"].named_parameters()
        }
        model = apply_expert_parallelism(
            layer(make, name),
            ep_mesh,
            tp_mesh,
            plan | {"experts": "ep_dispatch_experts"},
            implementation,
        )
        batches = [batch(0 if shared else r, highest) for r in range(RANKS)]
        got = run(model["experts"], *batches[rank])

        whole = layer(make, "eager")["experts"]
        for r in range(1 if shared else RANKS):
            fresh = batch(r, highest)
            wanted = run(whole, *fresh)
            if shared or r == rank:
                for ours, eager in zip(got, wanted, strict=True):
                    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
        for parameter, expected in zip(
            model["experts"].parameters(), whole.parameters(), strict=True
        ):
            own = expected.grad.chunk(RANKS)[rank]
            torch.testing.assert_close(local(parameter.grad), own, rtol=1e-4, atol=1e-5)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "implementation", "shared", "highest"),
    [
        (small.qwen3, "all_to_all", False, EXPERTS),
        (small.gpt_oss, "all_to_all", False, EXPERTS),
        (small.qwen3, "all_to_all", True, EXPERTS),
        (small.qwen3, "all_to_all", False, EXPERTS // RANKS),  # rank 1 receives no row
        (small.qwen3, "all_reduce", True, EXPERTS),
        (small.gpt_oss, "all_reduce", True, EXPERTS // RANKS),
    ],
)
def test_two_ranks(make, implementation, shared, highest, tmp_path):
    arguments = (str(tmp_path / "store"), make, implementation, shared, highest)
    mp.spawn(check, arguments, nprocs=RANKS)
