"""A class's gate is taken for one of ours only if it has its values."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sonicmoe.integrations.transformers as sonicmoe_transformers
from sonicmoe.integrations import _gates


def clamped(limit):
    return lambda g, u: F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)


def oai(alpha, limit):
    def gate(g, u):
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return (u + 1) * g * torch.sigmoid(alpha * g)

    return gate


def situ(alpha, beta):
    return lambda g, u: alpha * torch.tanh(g / alpha) * torch.sigmoid(g) * beta * torch.tanh(u / beta)


KNOWN = {
    "swiglu": lambda g, u: F.silu(g) * u,
    "geglu": lambda g, u: F.gelu(g) * u,
    "geglu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "reglu": lambda g, u: F.relu(g) * u,
    "quick_geglu": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    "swiglu(limit=10)": clamped(10.0),
    "swiglu(limit=0.37)": clamped(0.37),
    "swiglu_clamp_after(limit=7)": lambda g, u: F.silu(g).clamp(max=7) * u.clamp(-7, 7),
    "swiglu_oai(alpha=1.702,limit=7)": oai(1.702, 7.0),
    "swiglu_oai(alpha=1.3,limit=3.3)": oai(1.3, 3.3),
    "swiglu_oai(alpha=1,limit=inf)": oai(1.0, float("inf")),
    "situ_glu(alpha=4,beta=25)": situ(4.0, 25.0),
    "situ_glu(alpha=1.5,beta=3)": situ(1.5, 3.0),
}
UNKNOWN = {
    "other limits": lambda g, u: F.silu(g.clamp(max=7)) * u.clamp(-10, 10),
    "up's limit alone": lambda g, u: F.silu(g) * u.clamp(-7, 7),
    "gate's limit alone": lambda g, u: F.silu(g.clamp(max=2e3)) * u,
    "an upper limit for up": lambda g, u: F.silu(g.clamp(max=7)) * u.clamp(max=7),
    "halves exchanged": lambda g, u: F.silu(u) * g,
    "no gate": lambda g, u: g * u,
    "tanh": lambda g, u: torch.tanh(g) * u,
    "scaled": lambda g, u: 1.0001 * F.silu(g) * u,
    "zero": lambda g, u: 0 * g,
    "other offset": lambda g, u: F.silu(g) * (u + 0.5),
    "between the two forms of GELU": lambda g, u: u * (F.gelu(g) + F.gelu(g, approximate="tanh")) / 2,
    "neighbours": lambda g, u: F.silu(g) * u.roll(1, -1),
}


def columns(gate, interleaved):
    if interleaved:
        return lambda h: gate(h[..., ::2], h[..., 1::2])
    return lambda h: gate(*h.chunk(2, -1))


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("text", KNOWN)
def test_known_gate(text, interleaved, fp32):
    gate = KNOWN[text]
    if fp32:

        def in_fp32(g, u):
            return gate(g.float(), u.float()).to(g.dtype)

        assert _gates.gated(columns(in_fp32, interleaved), interleaved) == text
    else:
        assert _gates.gated(columns(gate, interleaved), interleaved) == text


@pytest.mark.parametrize("why", UNKNOWN)
def test_unknown_gate(why):
    assert _gates.gated(columns(UNKNOWN[why], False), False) is None


def test_a_gate_of_the_other_layout_is_unknown():
    assert _gates.gated(columns(KNOWN["swiglu"], True), False) is None
    assert _gates.gated(columns(KNOWN["swiglu"], False), True) is None


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("relu", F.relu),
        ("relu_sq", lambda h: F.relu(h).square()),
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda h: F.gelu(h, approximate="tanh")),
        (None, torch.tanh),
        (None, F.leaky_relu),
        (None, F.relu6),
        (None, lambda h: h),
    ],
)
def test_plain(text, function):
    assert _gates.plain(function) == text


class Experts(nn.Module):
    """As transformers' decorator leaves a class."""

    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_transposed, is_concatenated = False, True

    def __init__(self, act_fn, limit=float("inf")):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 16))
        self.down_proj = nn.Parameter(torch.randn(4, 16, 16))
        self.act_fn, self.limit = act_fn, limit

    def _apply_gate(self, h):
        g, u = h.chunk(2, -1)
        return self.act_fn(g.clamp(max=self.limit)) * u.clamp(-self.limit, self.limit)

    def run(self):
        x, ids = torch.ones(3, 16), torch.zeros(3, 1, dtype=torch.int64)
        return sonicmoe_transformers.experts_forward(self, x, ids, torch.ones(3, 1))

    def expected(self):
        h = self._apply_gate(F.linear(torch.ones(3, 16), self.gate_up_proj[0]))
        return F.linear(h, self.down_proj[0])


def assert_same(experts):
    torch.testing.assert_close(experts.run(), experts.expected(), rtol=1e-4, atol=1e-4)


def test_an_unknown_gate_is_refused_by_name():
    experts = Experts(torch.tanh)
    with pytest.raises(NotImplementedError, match=r"^Experts\._apply_gate: got .* none of ours"):
        experts.run()
    experts.has_gate = False
    with pytest.raises(NotImplementedError, match=r"^Experts\.act_fn: got .* none of ours"):
        experts.run()


def test_settings_changed_after_a_call_count():
    experts = Experts(F.silu)
    assert_same(experts)
    experts.limit = 0.5
    assert_same(experts)
    experts.act_fn = F.gelu
    with pytest.raises(NotImplementedError):  # geglu has no limit
        experts.run()
    experts.limit = float("inf")
    assert_same(experts)


def test_settings_of_parts_of_the_activation_count():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 1.0

        def forward(self, g):
            return self.factor * F.silu(g)

    experts = Experts(nn.Sequential(Part()))
    assert_same(experts)
    experts.act_fn[0].factor = 2.0
    with pytest.raises(NotImplementedError):
        experts.run()
