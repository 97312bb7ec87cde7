"""recompute="preact" on a GPU: the same bits, a lower peak, and captured in a graph."""

import pytest
import test_recompute
import torch
from helpers import ACTIVATION_LAYOUTS, NEEDS_HOPPER, assert_same
from test_recompute import CALLS, call_of, data, results_of

from sonicmoe import MoE

pytestmark = NEEDS_HOPPER
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def on_gpu(leaves):
    return {
        name: None if leaf is None else leaf.detach().cuda().requires_grad_()
        for name, leaf in leaves.items()
    }


@pytest.fixture(autouse=True)
def _routing_on_gpu(monkeypatch):
    monkeypatch.setattr(test_recompute, "IDS", test_recompute.IDS.cuda())
    monkeypatch.setattr(test_recompute, "COUNTS", test_recompute.COUNTS.cuda())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation, layout", ACTIVATION_LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_same_bits(name, activation, layout, dtype):
    leaves = on_gpu(data(activation, layout, True, DTYPES[dtype]))

    def results(recompute):
        return results_of(call_of(name, leaves, activation, layout, recompute=recompute), leaves)

    assert_same(results("preact"), results("none"))


def test_peak_between_forward_and_backward():
    tokens, hidden, width, top_k = 4096, 256, 512, 4
    held = {}
    for recompute in ("none", "preact"):
        moe = MoE(32, top_k, hidden, width, "swiglu", False, 0.02, recompute=recompute)
        moe = moe.cuda().bfloat16()
        x = torch.randn(tokens, hidden, device="cuda").bfloat16().requires_grad_()
        moe(x)  # loads kernels
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        outputs = moe(x)
        held[recompute] = torch.cuda.memory_allocated() - before
        del outputs
    assert held["none"] - held["preact"] == 4 * tokens * top_k * width


def test_step_in_a_graph():
    moe = MoE(8, 2, 128, 64, "swiglu", True, 0.1, recompute="preact").cuda().bfloat16()
    x = torch.randn(300, 128, device="cuda").bfloat16().requires_grad_()
    dout = torch.randn_like(x)
    leaves = [x, *moe.parameters()]

    def step():
        return torch.autograd.grad(moe(x)[0], leaves, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for got, expected in zip(captured, step(), strict=True):
        assert torch.equal(got, expected)
