"""The error that the storage type makes unavoidable, and no more, at a published size on a GPU.

An fp64 layer that rounds exactly where docs/numerics.md says, and nowhere else, against one that
never rounds: our error may be 5 % above its error. dlogits never leave the layer; drouter_w, which is
dlogits^T x, stands for them.
"""

import pytest
import torch

from sonicmoe import moe_general_routing_inputs, moe_TC_softmax_topk_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
T, D, N, E, K = 24576, 1536, 256, 128, 8
ALLOWED = 1.05


def layer(x, router_w, w1, w2, dout, ids, scores, rounded):
    """All tensors in fp64; ids (T, K), scores (T, K) fp32 values; w1 [gate; up]."""
    r = (lambda t: t.bfloat16().double()) if rounded else (lambda t: t)
    single = (lambda t: t.float().double()) if rounded else (lambda t: t)
    out, dx = torch.zeros_like(x), torch.zeros_like(x)
    ds = torch.zeros(T * K, device=x.device, dtype=torch.float64)
    dw1, dw2 = torch.empty_like(w1), torch.empty_like(w2)
    for e in range(E):
        slot = (ids.flatten() == e).nonzero().flatten()
        token, s = slot // K, scores.flatten()[slot, None]
        h = x[token] @ w1[e].T
        gate, up = h[:, :N], h[:, N:]
        act = r(torch.nn.functional.silu(gate) * up)
        out.index_add_(0, token, s * r(act @ w2[e].T))
        kept = r(h)
        gate, up = kept[:, :N], kept[:, N:]
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        da = dout[token] @ w2[e]
        ds[slot] = single((da * silu * up).sum(1))
        slope = sigmoid + silu * (1 - sigmoid)
        dh = r(torch.cat([s * da * up * slope, s * da * silu], 1))
        dx.index_add_(0, token, r(dh @ w1[e]))
        dw1[e] = r(dh.T @ x[token])
        dw2[e] = r(dout[token].T @ r(s * silu * up))
    ds = ds.view(T, K)
    dlogits = torch.zeros(T, E, device=x.device, dtype=torch.float64)
    dlogits.scatter_(1, ids, scores * (ds - (ds * scores).sum(1, keepdim=True)))
    dlogits = r(dlogits)
    drouter_w = r(dlogits.T @ x)
    dx_all = r(dx + r(dlogits @ router_w))
    return {"o": r(out), "dx": dx_all, "dw1": dw1, "dw2": dw2, "ds": ds, "drouter_w": drouter_w}


def test_error_is_that_of_exact_rounding():
    torch.manual_seed(0)

    def normal(*shape, scale):
        return (torch.randn(*shape, device="cuda") * scale).bfloat16().requires_grad_()

    x, router_w = normal(T, D, scale=0.2), normal(E, D, scale=0.02)
    w1, w2 = normal(E, 2 * N, D, scale=0.02), normal(E, D, N, scale=0.02)
    dout = normal(T, D, scale=0.2).detach()

    out, logits, _ = moe_TC_softmax_topk_layer(
        x, router_w, w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None, K, concat_layout=True
    )
    out.backward(dout)
    # The choice of experts is a step function: it is that of the library's own logits, for all.
    ids = logits.detach().float().sort(dim=1, descending=True, stable=True).indices[:, :K]
    scores = logits.detach().double().gather(1, ids).softmax(1).float()
    leaf = scores.clone().requires_grad_()
    tokens = torch.arange(T, device="cuda", dtype=torch.int32).repeat_interleave(K)
    listed, _ = moe_general_routing_inputs(
        x.detach(), leaf.flatten(), tokens, ids.flatten().int(),
        w1.detach().permute(1, 2, 0), None, w2.detach().permute(1, 2, 0), None, concat_layout=True,
    )  # fmt: skip
    listed.backward(dout)
    ours = {
        "o": out, "dx": x.grad, "dw1": w1.grad, "dw2": w2.grad, "ds": leaf.grad,
        "drouter_w": router_w.grad,
    }  # fmt: skip

    wide = [t.detach().double() for t in (x, router_w, w1, w2, dout)]
    exact = layer(*wide, ids, scores.double(), rounded=False)
    rounded = layer(*wide, ids, scores.double(), rounded=True)
    for name, want in exact.items():
        error = ((ours[name].double() - want).norm() / want.norm()).item()
        least = ((rounded[name] - want).norm() / want.norm()).item()
        print(f"{name:10s} error {error:.3e}, of exact rounding {least:.3e}")
        assert error <= ALLOWED * least, name
