"""Megatron's DDP around our experts: gradients in main_grad, over two micro-batches."""

import pytest
import torch
from helpers import D, E, hidden_states, make_pair
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from sonicmoe import _main_grad


def under_ddp(layer, overlap):
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, use_distributed_optimizer=False
    )
    return DistributedDataParallel(layer.config, config, layer)


def wanted(layer, batches):
    for x in batches:
        layer(x)[0].square().sum().backward()
    made = {"router": layer.router.weight.grad}
    for linear in ("linear_fc1", "linear_fc2"):
        parts = [getattr(e, linear).weight for e in layer.experts.local_experts]
        made[linear] = torch.stack(
            [torch.zeros_like(p) if p.grad is None else p.grad for p in parts]
        ).float()
    return made


def main_grads(layer):
    made = {"router": layer.router.weight.main_grad}
    for linear in ("linear_fc1", "linear_fc2"):
        parts = getattr(layer.experts, linear).parameters_of("weight")
        several = isinstance(parts, list)
        made[linear] = torch.stack([p.main_grad for p in parts]) if several else parts.main_grad
    return made


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_micro_batches(dtype, fused, overlap, per_expert):
    bf16 = dtype == torch.bfloat16
    stock, mine = make_pair(
        ours=dict(gradient_accumulation_fusion=fused), weight_per_expert=per_expert,
        params_dtype=dtype, bf16=bf16,
    )  # fmt: skip
    model = under_ddp(mine, overlap)
    experts = list(mine.experts.parameters())
    for _ in range(2):  # steps: the buffer is cleared between them
        model.zero_grad_buffer()
        stock.zero_grad()
        batches = [hidden_states(dtype, seed) for seed in (3, 4)]
        with model.no_sync():
            model(batches[0])[0].square().sum().backward()
        model(batches[1])[0].square().sum().backward()
        model.finish_grad_sync()
        made = main_grads(mine)
        for name, gradient in wanted(stock, batches).items():
            error = (made[name] - gradient).norm()
            assert 0 < gradient.norm() and error <= (0.04 if bf16 else 1e-5) * gradient.norm()
        assert all(p.grad is None for p in experts)
        assert all(p.grad_added_to_main_grad == fused for p in experts)


def test_gradients_of_each_expert_follow_each_other():
    """In the order in which Megatron lays them out: kernels add to them, and nothing is stacked."""
    _, mine = make_pair(ours=dict(gradient_accumulation_fusion=True), weight_per_expert=True)
    under_ddp(mine, False)
    for linear in (mine.experts.linear_fc1, mine.experts.linear_fc2):
        parts = linear.parameters_of("weight")
        assert _main_grad.as_one([p.main_grad for p in parts]) is not None
        assert _main_grad.as_one(parts) is not None


@pytest.mark.parametrize("per_expert", [False, True])
def test_overwriting(per_expert):
    _, mine = make_pair(ours=dict(gradient_accumulation_fusion=True), weight_per_expert=per_expert)
    under_ddp(mine, False)
    for p in mine.experts.parameters():
        p.overwrite_main_grad = True
        p.main_grad.fill_(float("nan"))
    rows, counts, probs = torch.randn(3 * E, D), torch.tensor([3] * E), torch.rand(3 * E)
    made = []
    for _ in range(2):
        mine.experts(rows, counts, probs)[0].square().sum().backward()
        made.append([p.main_grad.clone() for p in mine.experts.parameters()])
    for first, second in zip(*made, strict=True):
        assert first.any() and torch.equal(first, second)
