"""The original's test of the layer, with its shapes, inputs and tolerances, on a GPU."""

import pytest
import torch
from helpers import NEEDS_HOPPER

from sonicmoe import ActivationType, KernelBackendMoE, MoE

pytestmark = NEEDS_HOPPER
T = 8192
#: d, n, E, K
SHAPES = [
    (768, 256, 128, 8), (768, 512, 64, 4), (768, 1024, 32, 2),
    (1536, 256, 128, 8), (1536, 512, 64, 4), (1536, 1024, 32, 2),
    (4096, 256, 256, 16), (4096, 512, 128, 8), (4096, 1024, 64, 4),
    (4096, 512, 256, 16), (4096, 1024, 128, 8), (4096, 2048, 64, 4),
]  # fmt: skip


def step(call, moe, x, do, backend):
    x = x.detach().requires_grad_()
    with torch.autocast("cuda", torch.float32):
        o = call(x, kernel_backend_moe=backend)[0]
    gradients = torch.autograd.grad(o, (x, *moe.parameters()), do)
    return o.detach(), gradients


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("add_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ",".join(map(str, shape)))
def test_the_layer_is_the_torch_backend(shape, add_bias, compiled):
    d, n, experts, k = shape
    torch.manual_seed(42)
    with torch.device("cuda"):
        moe = MoE(experts, k, d, n, ActivationType.SWIGLU, add_bias, 0.02).bfloat16()
    if add_bias:
        torch.nn.init.normal_(moe.c_fc.bias, 0, 0.01)
        torch.nn.init.normal_(moe.c_proj.bias, 0, 0.01)
    x, do = (0.02 * torch.randn(T, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    call = torch.compile(moe) if compiled else moe
    o, gradients = step(call, moe, x, do, KernelBackendMoE.sonicmoe)
    expected, of_torch = step(moe, moe, x, do, KernelBackendMoE.torch)
    torch.testing.assert_close(o.float(), expected.float(), atol=1.4e-2, rtol=2e-2)
    # Of such small inputs zeros would pass, so norms are compared as well. At most six roundings to
    # bf16, of 2^-9 each, lie between the inputs and a tensor on either side.
    limit = 2 * 6 * 2.0**-9
    names = ["x", *(name for name, _ in moe.named_parameters())]
    for name, ours, theirs in zip(names, gradients, of_torch, strict=True):
        torch.testing.assert_close(
            ours.float(), theirs.float(), atol=2e-2, rtol=2e-2, msg=lambda m, n=name: f"d{n}: {m}"
        )
    tensors = ["o", *names], [o, *gradients], [expected, *of_torch]
    for name, ours, theirs in zip(*tensors, strict=True):
        difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert difference <= limit, f"{name}: {difference}"
    torch.compiler.reset()
