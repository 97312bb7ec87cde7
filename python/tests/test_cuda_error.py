"""The error that the storage type makes unavoidable, and no more, at a published size on a GPU.

An fp64 layer that rounds exactly where docs/numerics.md says, and nowhere else, against one that
never rounds: our error may be 5 % above its error.
"""

import pytest
import torch

from sonicmoe import moe_general_routing_inputs, moe_TC_softmax_topk_layer

ALLOWED = 1.05


def layer(x, router_w, w1, w2, dout, ids, scores, rounded):
    """All tensors in fp64; ids (T, K), scores (T, K) fp32 values; w1 [gate; up]."""
    r = (lambda t: t.bfloat16().double()) if rounded else (lambda t: t)
    single = (lambda t: t.float().double()) if rounded else (lambda t: t)
    (experts, _, n), k = w2.shape, ids.shape[1]
    out, dx = torch.zeros_like(x), torch.zeros_like(x)
    ds = torch.zeros(ids.numel(), device=x.device, dtype=torch.float64)
    dw1, dw2 = torch.empty_like(w1), torch.empty_like(w2)
    for e in range(experts):
        slot = (ids.flatten() == e).nonzero().flatten()
        token, s = slot // k, scores.flatten()[slot, None]
        h = x[token] @ w1[e].T
        gate, up = h[:, :n], h[:, n:]
        act = r(torch.nn.functional.silu(gate) * up)
        out.index_add_(0, token, s * r(act @ w2[e].T))
        kept = r(h)
        gate, up = kept[:, :n], kept[:, n:]
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        da = dout[token] @ w2[e]
        ds[slot] = single((da * silu * up).sum(1))
        slope = sigmoid + silu * (1 - sigmoid)
        dh = r(torch.cat([s * da * up * slope, s * da * silu], 1))
        dx.index_add_(0, token, r(dh @ w1[e]))
        dw1[e] = r(dh.T @ x[token])
        dw2[e] = r(dout[token].T @ r(s * silu * up))
    ds = ds.view(ids.shape)
    dlogits = torch.zeros(len(x), experts, device=x.device, dtype=torch.float64)
    dlogits.scatter_(1, ids, scores * (ds - (ds * scores).sum(1, keepdim=True)))
    dlogits = r(dlogits)
    drouter_w = r(dlogits.T @ x)
    dx_all = r(dx + dlogits @ router_w)
    return {
        "o": r(out), "dx": dx_all, "dw1": dw1, "dw2": dw2, "ds": ds, "dlogits": dlogits,
        "drouter_w": drouter_w,
    }  # fmt: skip


def dlogits_of(x, router_w, w1, w2, dout, k, dx):
    """The library's dlogits, which never leave the layer, bit for bit.

    drouter_w is dlogits^T x. Backward reads x for that and for dW1 only (dx, to which dlogits
    contribute, stays the same), so a piece of the identity may stand in its place: then drouter_w
    is a piece of dlogits.
    """
    ops, options = torch.ops.sonicmoe, f"top_k={k} w1_layout=concatenated"
    *_, preact, routing = ops.layer_forward(x, router_w, w1, None, w2, None, options)
    pieces = []
    for piece in torch.arange(len(x), device=x.device).split(x.shape[1]):
        probe = torch.zeros_like(x)
        probe[piece, piece - piece[0]] = 1
        same_dx, drouter_w, *_ = ops.layer_backward(
            dout, None, probe, router_w, w1, w2, None, None, preact, routing, options
        )
        assert torch.equal(same_dx, dx)
        pieces.append(drouter_w.T[: len(piece)])
    return torch.cat(pieces)


def check(device, tokens, hidden, intermediate, experts, k):
    torch.manual_seed(0)

    def normal(*shape, scale):
        return (torch.randn(*shape, device=device) * scale).bfloat16().requires_grad_()

    x, router_w = normal(tokens, hidden, scale=0.2), normal(experts, hidden, scale=0.02)
    w1 = normal(experts, 2 * intermediate, hidden, scale=0.02)
    w2 = normal(experts, hidden, intermediate, scale=0.02)
    dout = normal(tokens, hidden, scale=0.2).detach()

    out, logits, _ = moe_TC_softmax_topk_layer(
        x, router_w, w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None, k, concat_layout=True
    )
    out.backward(dout)
    # The choice of experts is a step function: it is that of the library's own logits, for all.
    ids = logits.detach().float().sort(dim=1, descending=True, stable=True).indices[:, :k]
    scores = logits.detach().double().gather(1, ids).softmax(1).float()
    leaf = scores.clone().requires_grad_()
    token_ids = torch.arange(tokens, device=device, dtype=torch.int32).repeat_interleave(k)
    listed, _ = moe_general_routing_inputs(
        x.detach(), leaf.flatten(), token_ids, ids.flatten().int(),
        w1.detach().permute(1, 2, 0), None, w2.detach().permute(1, 2, 0), None, concat_layout=True,
    )  # fmt: skip
    listed.backward(dout)
    inputs = [t.detach() for t in (x, router_w, w1, w2, dout)]
    ours = {
        "o": out, "dx": x.grad, "dw1": w1.grad, "dw2": w2.grad, "ds": leaf.grad,
        "dlogits": dlogits_of(*inputs, k, x.grad), "drouter_w": router_w.grad,
    }  # fmt: skip

    wide = [t.double() for t in inputs]
    exact = layer(*wide, ids, scores.double(), rounded=False)
    rounded = layer(*wide, ids, scores.double(), rounded=True)
    for name, want in exact.items():
        error = ((ours[name].double() - want).norm() / want.norm()).item()
        least = ((rounded[name] - want).norm() / want.norm()).item()
        print(f"{name:10s} error {error:.3e}, of exact rounding {least:.3e}")
        assert error <= ALLOWED * least, name


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_error_is_that_of_exact_rounding():
    check("cuda", 24576, 1536, 256, 128, 8)


def test_error_is_that_of_exact_rounding_on_the_cpu():
    check("cpu", 600, 128, 136, 16, 4)
