"""A NaN or +inf among a token's logits makes that token's output NaN.

No call is refused, and no other token's output changes.
"""

import pytest
import torch

from sonicmoe import PRESETS, KernelBackendMoE, MoE, RouterConfig, functional

T, D, N, E, K = 24, 16, 8, 16, 4
BAD = 5
ROUTERS = [*PRESETS, RouterConfig(score="sqrt_softplus"), RouterConfig(logits="f32")]
BACKENDS = KernelBackendMoE.sonicmoe, KernelBackendMoE.torch


def spoiled(logits, value):
    logits = logits.clone()
    logits[BAD, 3] = value
    return logits


def check_output(out, good):
    others = torch.arange(T) != BAD
    assert out[BAD].isnan().all()
    torch.testing.assert_close(out[others], good[others])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_of_a_module(backend, router, value):
    torch.manual_seed(0)
    moe = MoE(E, K, D, N, "swiglu", False, 0.3, router=router)
    x = torch.randn(T, D, requires_grad=True)
    hook = moe.router.register_forward_hook(lambda *_: None)  # so that both call the router
    good = moe(x, backend)[0]
    hook.remove()
    moe.router.register_forward_hook(lambda module, args, logits: spoiled(logits, value))
    out = moe(x, backend)[0]
    check_output(out, good)
    others = torch.arange(T) != BAD
    out[others].sum().backward()
    assert x.grad[others].isfinite().all()


@pytest.mark.parametrize("weight", [torch.nan, torch.inf])
def test_of_the_layers_own_router(weight):
    moe = MoE(E, K, D, N, "swiglu", False, 0.3)
    x = torch.randn(T, D)
    good = moe(x)[0]
    x[BAD, 2] = weight
    check_output(moe(x)[0], good)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("given", [False, True])
def test_of_given_logits(given, value):
    generator = torch.Generator().manual_seed(1)
    w1 = torch.randn(E, 2 * N, D, generator=generator)
    w2 = torch.randn(E, D, N, generator=generator)
    x, logits = torch.randn(T, D, generator=generator), torch.randn(T, E, generator=generator)
    ids = logits.topk(K)[1]
    ids[BAD, 0] = 3
    ids[0, 0] = -1
    ids = ids if given else None
    run = [functional.experts_from_logits(x, z, K, w1, w2, ids=ids)[0]
           for z in (spoiled(logits, value), logits)]  # fmt: skip
    check_output(*run)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_of_token_rounding(value):
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(2))
    logits[BAD] = value
    scores, tokens, experts, counts = functional.token_rounding(logits, K, tile=4)
    some = experts < E
    assert torch.equal(scores.isnan() & some, (tokens == BAD) & some)
    assert (counts % 4 == 0).all()


def test_of_a_rounded_module():
    moe = MoE(E, K, D, N, "swiglu", False, 0.3, routing="token_rounding", tile=4, rounding="up")
    x = torch.randn(T, D)
    x[BAD] = torch.nan
    out = moe(x)[0]
    assert out[BAD].isnan().all() and not out[torch.arange(T) != BAD].isnan().any()


@pytest.mark.parametrize("rule", ["nr", "nr_s", "balance", "up", "down"])
def test_rounding_ranks_a_bad_token_first_everywhere(rule):
    torch.manual_seed(3)
    moe = MoE(8, 2, D, N, "swiglu", False, 0.3, routing="token_rounding", tile=8, rounding=rule)
    x = torch.randn(64, D)
    x[BAD] = torch.nan
    outs = []
    for backend in BACKENDS:
        torch.manual_seed(4)  # of the draws
        outs.append(moe(x, backend)[0])
    assert outs[0][BAD].isnan().all()
    torch.testing.assert_close(*outs, equal_nan=True)
