"""The library's gradients against differences of its own outputs, without any reference."""

import pytest
import torch
from helpers import ROUTERS, make_layer, permuted, run

from sonicmoe import ActivationType, functional
from sonicmoe._check import TRANSPOSED_LAYOUTS

# relu's kinks would make differences wrong; its derivative is compared with PyTorch's elsewhere.
SMOOTH = [a for a in ActivationType if "RELU" not in a.name and a is not ActivationType.REGLU]
SMOOTH += ["situ_glu(alpha=1.5,beta=2)", "swiglu_oai(alpha=-1,limit=inf)"]
EPS = torch.finfo(torch.float32).eps


def check_directional(loss, leaf, gradient, scale):
    """loss(leaf + t v) against <gradient, v>, v random of unit length.

    Differences at steps t and 2t, extrapolated: the error left is below the difference of the two.
    Rounding adds at most a few EPS * scale / t, scale being the sum of the terms' magnitudes.
    """
    direction = torch.randn_like(leaf)
    direction /= direction.norm()
    step = 0.05

    def difference(t):
        return (loss(leaf + t * direction) - loss(leaf - t * direction)) / (2 * t)

    near, far = difference(step), difference(2 * step)
    extrapolated = (4 * near - far) / 3
    limit = abs(near - far) + 4 * EPS * scale / step
    derivative = (gradient.double() * direction.double()).sum().item()
    assert abs(derivative - extrapolated) <= limit
    return limit, abs(derivative)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("activation", SMOOTH)
def test_layer(activation, router):
    layer = make_layer(activation, bias=True, tokens=24)
    # Logits a unit apart or more, in steps too small to change the choice of experts.
    layer.x[:, :6] = torch.rand(24, 6).argsort(1).float()
    layer.router_w = torch.eye(6, 24) + 0.01 * torch.randn(6, 24)
    k = 2
    weight = torch.randn(24, 24, dtype=torch.double)
    weight_logits = torch.randn(24, 6, dtype=torch.double)
    counts_before = run(layer, k, activation, router)[2]

    def loss(name, value):
        changed = type(layer)(**{**vars(layer), name: value})
        o, logits, counts, _ = run(changed, k, activation, router)
        assert torch.equal(counts, counts_before)
        terms = (o.double() * weight).sum() + (logits.double() * weight_logits).sum()
        return terms.item()

    o, logits, _, leaves = run(layer, k, activation, router)
    scale = ((o * weight).abs().sum() + (logits * weight_logits).abs().sum()).item()
    torch.autograd.backward([o, logits], [weight.float(), weight_logits.float()])
    limits, derivatives = [], []
    for name, leaf in leaves.items():
        for _ in range(3):
            limit, derivative = check_directional(
                lambda value, name=name: loss(name, value), leaf.detach(), leaf.grad, scale
            )
            limits.append(limit)
            derivatives.append(derivative)
    # The comparison means something: limits are small against what is compared.
    assert sum(limits) < 0.05 * sum(derivatives)


def test_list_scores():
    layer = make_layer(tokens=10)
    w1, w2 = permuted(layer.w1), permuted(layer.w2)
    tokens, experts = torch.randint(0, 10, (30,)), torch.randint(0, 7, (30,))  # 6: a sentinel
    weight = torch.randn(10, 24, dtype=torch.double)

    def forward(scores):
        return functional.moe_general_routing_inputs(
            layer.x, scores, tokens, experts, w1, None, w2, None
        )[0]

    scores = torch.rand(30, requires_grad=True)
    o = forward(scores)
    o.backward(weight.float())
    scale = (o * weight).abs().sum().item()
    limit, derivative = check_directional(
        lambda s: (forward(s).double() * weight).sum().item(), scores.detach(), scores.grad, scale
    )
    assert limit < 0.05 * derivative


@pytest.mark.parametrize("score_at", ["before_down", "after_down"])
@pytest.mark.parametrize("layout", ["interleaved", *TRANSPOSED_LAYOUTS])
@pytest.mark.parametrize("activation", SMOOTH)
def test_grouped_experts(activation, layout, score_at):
    layer = make_layer(activation, bias=True, tokens=24, layout=layout)
    counts, offsets = torch.tensor([5, 0, 7, 1, 4, 2]), torch.tensor([0, 5, 6, 13, 15, 20, 24])
    weight = torch.randn(24, 24, dtype=torch.double)

    def forward(leaves):
        return functional.grouped_experts(
            leaves["x"], counts, leaves["w1"], leaves["w2"], leaves["scores"], leaves["b1"],
            leaves["b2"], offsets=offsets, activation=activation, layout=layout,
            score_at=score_at,
        )  # fmt: skip

    leaves = layer.leaves() | {"scores": torch.rand(24, requires_grad=True)}
    del leaves["router_w"]
    o = forward(leaves)
    o.backward(weight.float())
    scale = (o * weight).abs().sum().item()
    limits, derivatives = [], []
    for name, leaf in leaves.items():
        for _ in range(3):
            limit, derivative = check_directional(
                lambda value, name=name: (
                    (forward(leaves | {name: value}).double() * weight).sum().item()
                ),
                leaf.detach(),
                leaf.grad,
                scale,
            )
            limits.append(limit)
            derivatives.append(derivative)
    assert sum(limits) < 0.05 * sum(derivatives)
