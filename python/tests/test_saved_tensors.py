"""A backward unpacks what was saved once.

Checkpointing refuses a second time, and offloading would copy again.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sonicmoe import MoE, functional, losses

T, D, N, E, K = 12, 16, 8, 8, 2
X = torch.randn(T, D, generator=torch.Generator().manual_seed(0))
LOGITS = torch.randn(T, E, generator=torch.Generator().manual_seed(1))
IDS, COUNTS = LOGITS.topk(K)[1], torch.full((E,), T // 4)


def _module(**options):
    torch.manual_seed(2)
    return MoE(E, K, D, N, "swiglu", False, 0.3, **options)


def _called_router(**options):
    moe = _module(**options)
    moe.router.register_forward_hook(lambda *_: None)
    return moe


def _lists(x, w1, w2, scores):
    tokens = torch.arange(T).repeat_interleave(K)
    return functional.moe_general_routing_inputs(
        x, scores.reshape(-1), tokens, IDS.reshape(-1), w1, None, w2, None
    )[0]


def _rounded(x, w1, w2, logits):
    scores, tokens, experts, _ = functional.token_rounding(logits, K, tile=4)
    return functional.moe_general_routing_inputs(x, scores, tokens, experts, w1, None, w2, None)[0]


def _of_weights(function, routed):
    """The function of x, w1, w2 and a routing tensor, as one of x alone, and its leaves."""
    generator = torch.Generator().manual_seed(3)
    w1 = (0.3 * torch.randn(E, 2 * N, D, generator=generator)).requires_grad_()
    w2 = (0.3 * torch.randn(E, D, N, generator=generator)).requires_grad_()
    routed = routed.clone().requires_grad_()
    return lambda x: function(x, w1, w2, routed), [w1, w2, routed]


def _of_module(moe):
    def call(x):
        out, loss = moe(x)
        return out.sum() + loss

    return call, list(moe.parameters())


ALL_LOSSES = {"switch": 1.0, "z": 0.1, "sequence_balance": 0.5}
CASES = {
    "module": lambda: _of_module(_module(losses=ALL_LOSSES)),
    "module, all options": lambda: _of_module(
        _module(router="deepseek_v4", recompute="preact", losses=ALL_LOSSES)
    ),
    "module, token rounding": lambda: _of_module(_module(routing="token_rounding", tile=4)),
    "called router": lambda: _of_module(_called_router()),
    "called router, kept logits": lambda: _of_module(_called_router(router="olmoe")),
    "called router, expert_scale": lambda: _of_module(_called_router(router="gemma4")),
    "called router, token rounding": lambda: _of_module(
        _called_router(routing="token_rounding", tile=4)
    ),
    "ids": lambda: _of_weights(
        lambda x, w1, w2, s: functional.experts(x, IDS, s, w1, w2)[0], torch.rand(T, K)
    ),
    "logits": lambda: _of_weights(
        lambda x, w1, w2, z: functional.experts_from_logits(x, z, K, w1, w2)[0], LOGITS
    ),
    "logits and ids": lambda: _of_weights(
        lambda x, w1, w2, z: functional.experts_from_logits(x, z, K, w1, w2, ids=IDS)[0], LOGITS
    ),
    "lists": lambda: _of_weights(_lists, torch.rand(T, K)),
    "rounded lists": lambda: _of_weights(_rounded, LOGITS),
    "grouped": lambda: _of_weights(
        lambda x, w1, w2, s: functional.grouped_experts(
            x.repeat(2, 1), COUNTS, w1, w2, scores=s.reshape(-1)
        ),
        torch.rand(T, K),
    ),
    "losses": lambda: (
        lambda x: losses.z_loss(x) + losses.switch_loss(x, torch.ones(D, dtype=torch.int32)),
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_saved_tensor_is_unpacked_once(name):
    call, _ = CASES[name]()
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    def unpack(number):
        unpacked.append(number)
        return packed[number]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        call(X.clone().requires_grad_()).sum().backward()
    assert unpacked and len(set(unpacked)) == len(unpacked)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_checkpointing_changes_no_gradient(name, reentrant):
    call, leaves = CASES[name]()
    found = []
    for step in (call, lambda x: checkpoint(call, x, use_reentrant=reentrant)):
        x = X.clone().requires_grad_()
        step(x).sum().backward()
        found.append([x.grad, *[leaf.grad for leaf in leaves]])
        for leaf in leaves:
            leaf.grad = None
    for plain, again in zip(*found, strict=True):
        assert (plain is None) == (again is None)
        assert plain is None or torch.equal(plain, again)
