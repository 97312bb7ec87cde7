"""Both transports on one GPU: a group of one rank, beside the layer without a group."""

import pytest
import torch
import torch.distributed as dist
from helpers import NEEDS_HOPPER

import sonicmoe
from sonicmoe.distributed import Transport, experts

pytestmark = NEEDS_HOPPER
T, D, N, E, K = 300, 136, 72, 9, 3
TRANSPORTS = {
    "collectives": Transport("gather"),
    "peer copies": Transport("gather", peer_copies=True),
    "kept": Transport("gather", peer_copies=True, keep_gathered=True),
    "padded": Transport("gather", peer_copies=True, max_tokens=T + 20),
    "all_to_all": Transport("all_to_all"),
    "placed": Transport("all_to_all", peer_copies=True),
    "placed, padded": Transport("all_to_all", peer_copies=True, max_tokens=T + 20),
}


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_SOCKET_IFNAME", "lo")
        patch.setenv("NCCL_NVLS_ENABLE", "0")
        patch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        store = f"file://{tmp_path_factory.mktemp('group') / 'store'}"
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=device)
        yield
        dist.destroy_process_group()


def drawn(tokens=T, seed=0):
    """x, ids with sentinels, weights and dO."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, D, generator=generator, device="cuda").bfloat16()
    weights, ids = torch.rand(tokens, E, generator=generator, device="cuda").topk(K)
    ids[::7, 1] = -1
    ids[1::5, 0] = E + 2
    dout = torch.randn(tokens, D, generator=generator, device="cuda").bfloat16()
    return x, ids.int(), weights, dout


def weights_of(seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    w1 = torch.randn(E, 2 * N, D, generator=generator, device="cuda").mul_(0.1).bfloat16()
    w2 = torch.randn(E, D, N, generator=generator, device="cuda").mul_(0.1).bfloat16()
    return w1.requires_grad_(), w2.requires_grad_()


def step(call, x, ids, weights, dout, w1, w2):
    leaves = [x.requires_grad_(), weights.requires_grad_(), w1, w2]
    out = call(x, ids, weights, w1, w2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def spread(transport):
    return lambda *arguments: experts(*arguments, group=dist.group.WORLD, transport=transport)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_has_the_bits_of_one_gpu(name):
    for tokens in (T, 1, 0, 40):
        inputs, weights = drawn(tokens), weights_of()
        want = step(lambda *a: sonicmoe.experts(*a)[0], *inputs, *weights)
        for _ in range(2):
            got = step(spread(TRANSPORTS[name]), *inputs, *weights)
            for tensor, expected in zip(got, want, strict=True):
                assert torch.equal(tensor, expected)


def late_dw1(*arguments, real=torch.ops.sonicmoe.up_proj_wgrad):
    torch.cuda._sleep(4_000_000)  # some 2 ms, in which the host queues the layer before
    return real(*arguments)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_layers_share_a_group(name, late, monkeypatch):
    """Also where a layer still reads a buffer when the host queues what fills it again."""
    if late:
        monkeypatch.setattr(torch.ops.sonicmoe, "up_proj_wgrad", late_dw1)
    (x, ids, scores, dout), first, second = drawn(), weights_of(), weights_of(2)

    def twice(call):
        def calls(x, ids, scores, *weights):
            return call(call(x, ids, scores, *weights[:2]), ids, scores, *weights[2:])

        leaves = [x.requires_grad_(), scores.requires_grad_(), *first, *second]
        out = calls(x, ids, scores, *first, *second)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    want = twice(lambda *arguments: sonicmoe.experts(*arguments)[0])
    for tensor, expected in zip(twice(spread(TRANSPORTS[name])), want, strict=True):
        assert torch.equal(tensor, expected)


def test_the_first_call_may_be_in_inference_mode():
    inputs, weights = drawn(T + 3), weights_of()  # of a size that no other test has
    call = spread(TRANSPORTS["placed"])
    with torch.inference_mode():
        out = call(*inputs[:3], *weights)
    assert torch.equal(step(call, *inputs, *weights)[0], out)


def test_all_to_all_is_refused_in_a_capture():
    inputs, weights = drawn(), weights_of()
    for name in ("all_to_all", "placed"):
        with pytest.raises(
            RuntimeError, match="^transport: got 'all_to_all', allowed: 'gather' in"
        ):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                spread(TRANSPORTS[name])(*inputs[:3], *weights)


def test_a_captured_step_follows_other_tokens():
    transport, weights = TRANSPORTS["peer copies"], weights_of()
    inputs = drawn()
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step(spread(transport), *inputs, *weights)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = step(spread(transport), *inputs, *weights)
    for seed, tokens in ((2, 40), (3, 2 * T)):
        step(spread(transport), *drawn(tokens), *weights)  # eager, with fewer and with more tokens
        others = drawn(seed=seed)
        with torch.no_grad():
            for kept, other in zip(inputs, others, strict=True):
                kept.copy_(other)
        graph.replay()
        got = [tensor.clone() for tensor in captured]
        for tensor, expected in zip(got, step(spread(transport), *others, *weights), strict=True):
            assert torch.equal(tensor, expected)
