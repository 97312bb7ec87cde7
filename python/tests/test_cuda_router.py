"""Every option of a router on a GPU, against plain PyTorch on the CPU."""

import pytest
import torch
from helpers import NEEDS_HOPPER, Layer, assert_as_good, error, make_layer
from test_router import OPTIONS, K, config_of, exact, run, run_plain, tensors_of

from sonicmoe import MoE, RouterConfig, functional, losses

pytestmark = NEEDS_HOPPER
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE = "cuda"


def there(layer: Layer) -> Layer:
    return Layer(*(None if t is None else t.to(DEVICE) for t in vars(layer).values()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("f32_router", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_match_plain_pytorch(name, f32_router, dtype):
    config = config_of(name)
    sizes = dict(tokens=300, hidden=136, intermediate=72, experts=16)
    layer, tensors = make_layer(bias=True, dtype=DTYPES[dtype], **sizes), tensors_of(config)
    if f32_router:
        layer.router_w = torch.randn(16, 136) * 136**-0.5
    on_device = {n: t.to(DEVICE) for n, t in tensors.items()}
    o, logits, counts, leaves = run(there(layer), config, on_device)
    given = {n: on_device.get(n) for n in ("selection_bias", "expert_scale")}
    _, ids = functional.route(logits.detach(), K, router=config, **given)
    plain = run_plain(layer, ids.cpu(), config, tensors)
    true = run_plain(layer.to(torch.float64), ids.cpu(), config, exact(tensors))
    assert torch.equal(counts.cpu(), plain[2]) and logits.dtype == plain[1].dtype
    do = torch.randn(o.shape).to(o.dtype)
    dlogits = torch.randn(logits.shape).to(logits.dtype)
    for outputs in ((o, logits), plain[:2], true[:2]):
        torch.autograd.backward(outputs, [do.to(outputs[0]), dlogits.to(outputs[1])])
    assert_as_good("o", o.cpu(), plain[0], true[0])
    if f32_router:
        # Tensor cores truncate each of 136 / 16 sums to 24 bits.
        limit = 2 * error(plain[1], true[1]) + 9 * 2.0**-24 * true[1].norm()
        assert error(logits.cpu(), true[1]) <= limit
    else:
        assert_as_good("logits", logits.cpu(), plain[1], true[1])
    for n, leaf in leaves.items():
        assert_as_good(f"d{n}", leaf.grad.cpu(), plain[3][n].grad, true[3][n].grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 256, 768, 1536, 2880, 7168])
def test_logits_of_an_fp32_router_are_as_good_as_fp32(hidden, dtype):
    layer = there(make_layer(dtype=DTYPES[dtype], tokens=2048, hidden=hidden, experts=72))
    router_w = 0.02 * torch.randn(72, hidden, device=DEVICE)
    experts = layer.w1, None, layer.w2, None
    logits = functional.moe_TC_softmax_topk_layer(layer.x, router_w, *experts, K)[1]
    true = layer.x.double() @ router_w.double().T
    assert not torch.backends.cuda.matmul.allow_tf32
    assert error(logits, true) <= 4 * error(layer.x.float() @ router_w.T, true)


@pytest.mark.parametrize("name", OPTIONS)
def test_choices_are_those_of_the_cpu(name):
    """Given the same logits, also where they tie: the same experts and weights, bit for bit."""
    config = config_of(name)
    z = torch.randint(-8, 9, (300, 16)).to(torch.bfloat16) / 4
    given = {n: t for n, t in tensors_of(config).items() if n != "logit_bias"}
    on_device = {n: t.to(DEVICE) for n, t in given.items()}
    ours = functional.route(z.to(DEVICE), K, router=config, **on_device)
    for a, b in zip(ours, functional.route(z, K, router=config, **given), strict=True):
        assert torch.equal(a.cpu(), b)


def test_the_module_with_an_fp32_router():
    config = RouterConfig("sigmoid", renormalize=True, selection_bias=True, logit_bias=True)
    weights = {"switch": 1.0, "z": 1e-3, "sequence_balance": 0.5}
    moe = MoE(16, K, 136, 72, "swiglu", True, 0.1, router=config, losses=weights)
    moe = moe.to(DEVICE).bfloat16()
    moe.router.float()
    x = torch.randn(2, 150, 136, device=DEVICE, dtype=torch.bfloat16)
    mask = torch.rand(2, 150, device=DEVICE) < 0.8
    o, aux_loss = moe(x, padding_mask=mask)
    (o.float().sum() + aux_loss).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in moe.parameters())
    assert moe.router.weight.grad.dtype == moe.router.bias.grad.dtype == torch.float32
    assert moe.tokens_per_expert.sum() == mask.sum() * K
    before = moe.selection_bias.clone()
    counts = moe.tokens_per_expert.clone()
    moe.update_selection_bias(0.5)
    losses.update_selection_bias(before, counts, 0.5)
    assert torch.equal(moe.selection_bias, before) and not moe.tokens_per_expert.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_bad_logit_spoils_its_token_alone(name, given, value):
    """Wherever it is: among the experts of ids, too, or beside them."""
    config, tokens, bad = config_of(name), 40, 7
    sizes = dict(tokens=tokens, hidden=136, intermediate=72, experts=16)
    layer = there(make_layer(dtype=torch.bfloat16, **sizes))
    on_device = {n: t.to(DEVICE) for n, t in tensors_of(config).items() if n != "logit_bias"}
    z = torch.randn(tokens, 16, device=DEVICE)
    ids = None
    if given:
        on_device.pop("selection_bias", None)
        ids = z.topk(K)[1].int()

    def layer_of(logits: torch.Tensor) -> torch.Tensor:
        return functional.experts_from_logits(
            layer.x, logits, K, layer.w1, layer.w2, ids=ids, router=config, **on_device
        )[0]

    good = layer_of(z)
    for expert in (0, 9, 15):
        spoilt = z.clone()
        spoilt[bad, expert] = value
        out = layer_of(spoilt)
        assert out[bad].isnan().all()
        others = torch.arange(tokens) != bad
        assert torch.equal(out[others], good[others])
