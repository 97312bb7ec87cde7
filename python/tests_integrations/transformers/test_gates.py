"""A class's gate is taken for one of ours only if it has its values."""

import gc
import types
import weakref

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
    return lambda g, u: (
        alpha * torch.tanh(g / alpha) * torch.sigmoid(g) * beta * torch.tanh(u / beta)
    )


KNOWN = {
    "swiglu": lambda g, u: F.silu(g) * u,
    "geglu": lambda g, u: F.gelu(g) * u,
    "geglu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "reglu": lambda g, u: F.relu(g) * u,
    "quick_geglu": lambda g, u: g * torch.sigmoid(1.702 * g) * u,
    "swiglu(limit=10)": clamped(10.0),
    "swiglu(limit=0.37)": clamped(0.37),
    "swiglu(limit=1e-05)": clamped(1e-5),
    "swiglu(limit=7.141609)": clamped(7.141609),
    "swiglu_clamp_after(limit=7)": lambda g, u: F.silu(g).clamp(max=7) * u.clamp(-7, 7),
    "swiglu_oai(alpha=1.702,limit=7)": oai(1.702, 7.0),
    "swiglu_oai(alpha=1.3,limit=3.3)": oai(1.3, 3.3),
    "swiglu_oai(alpha=1.702,limit=0.5)": oai(1.702, 0.5),
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
    "a bump": lambda g, u: (F.silu(g) + 0.5 * ((g > 2.1) & (g < 2.9))) * u,
    "a hole": lambda g, u: F.silu(g) * u * ((g < 25) | (g > 50)),
    "a far limit of the gate": lambda g, u: F.silu(g.clamp(max=2e5)) * u,
    "another one in fp32": lambda g, u: (F.silu if g.dtype == torch.float64 else F.gelu)(g) * u,
    "no gate": lambda g, u: g * u,
    "tanh": lambda g, u: torch.tanh(g) * u,
    "scaled": lambda g, u: 1.0001 * F.silu(g) * u,
    "zero": lambda g, u: 0 * g,
    "other offset": lambda g, u: F.silu(g) * (u + 0.5),
    "between the two forms of GELU": lambda g, u: (
        u * (F.gelu(g) + F.gelu(g, approximate="tanh")) / 2
    ),
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
        (None, lambda h: F.relu(h).clamp(max=1.5e5)),
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


class Swish(nn.Module):
    def __init__(self, beta):
        super().__init__()
        self.beta = beta

    def forward(self, g):
        return g * torch.sigmoid(self.beta * g)


class OwnPart(Experts):
    """Its activation is in a part of another name."""

    def __init__(self, beta):
        super().__init__(None)
        self.inner = nn.Sequential(Swish(beta))

    def _apply_gate(self, h):
        g, u = h.chunk(2, -1)
        return self.inner(g) * u


class OfConfig(Experts):
    def __init__(self, limit):
        super().__init__(F.silu)
        self.config = types.SimpleNamespace(limit=limit)

    def _apply_gate(self, h):
        g, u = h.chunk(2, -1)
        limit = self.config.limit
        return F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)


class Field:
    """A function with a setting."""

    def __init__(self, beta):
        self.beta = beta

    def __call__(self, g):
        return g * torch.sigmoid(self.beta * g)


@pytest.mark.parametrize("make", [OwnPart, lambda beta: Experts(Field(beta)), OfConfig])
def test_instances_of_a_class_differ(make):
    for setting in (1.0, 1.702):
        assert_same(make(setting))


def test_settings_of_parts_count():
    experts = OwnPart(1.0)
    assert_same(experts)
    experts.inner[0].beta = 1.702
    assert_same(experts)
    experts.inner[0].beta = 1.5
    with pytest.raises(NotImplementedError):
        experts.run()


@pytest.mark.parametrize("kind", ["buffer", "tensor", "list", "field"])
def test_settings_of_other_kinds_count(kind):
    class Kinds(Experts):
        def _apply_gate(self, h):
            g, u = h.chunk(2, -1)
            beta = {"buffer": self.beta, "tensor": self.values, "list": self.items[0]}.get(kind)
            return self.act_fn(g) * u if beta is None else g * torch.sigmoid(beta * g) * u

    experts = Kinds(Field(1.0))
    experts.register_buffer("beta", torch.ones(()))
    experts.values, experts.items = torch.ones(()), [1.0]
    assert_same(experts)
    experts.beta.fill_(1.702)
    experts.values.fill_(1.702)
    experts.items[0] = experts.act_fn.beta = 1.702
    assert_same(experts)


def test_a_learned_activation_is_refused():
    with pytest.raises(NotImplementedError) as caught:
        Experts(Swish(nn.Parameter(torch.ones(())))).run()
    assert "beta: got a parameter" in str(caught.value.__cause__)


def test_a_gate_that_cannot_be_asked_is_refused():
    def scale(g):
        return g * torch.ones(16)

    with pytest.raises(NotImplementedError, match="none of ours") as caught:
        Experts(scale).run()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_nothing_keeps_a_module_alive():
    experts = Experts(F.silu)
    experts.act_fn = experts.silu = types.MethodType(lambda self, g: F.silu(g), experts)
    experts.forward = experts.run  # as accelerate's hooks do
    experts.run()
    gone = weakref.ref(experts)
    del experts
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_guards_the_settings(backend):
    """Settings of one class in one process: other instances, and changes after compilation."""
    torch._dynamo.reset()
    experts = Experts(F.silu)
    run = torch.compile(Experts.run, backend=backend, fullgraph=True)
    for limit, act_fn in ((1.0, F.silu), (0.2, F.silu), (float("inf"), F.gelu), (1.0, F.silu)):
        experts.limit, experts.act_fn = limit, act_fn
        torch.testing.assert_close(run(experts), experts.expected(), rtol=1e-4, atol=1e-4)
    other = Experts(F.silu, 0.3)
    torch.testing.assert_close(run(other), other.expected(), rtol=1e-4, atol=1e-4)
    own = OwnPart(1.0)
    for beta in (1.0, 1.702, 1.0):
        own.inner[0].beta = beta
        torch.testing.assert_close(run(own), own.expected(), rtol=1e-4, atol=1e-4)
    experts.act_fn = torch.tanh
    with pytest.raises(Exception, match="NotImplementedError"):
        run(experts)


def test_export_before_any_call():
    class Module(Experts):
        def forward(self, x, ids, weights):
            return sonicmoe_transformers.experts_forward(self, x, ids, weights)

    arguments = torch.ones(3, 16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    for strict in (True, False):
        module = Module(F.silu)
        exported = torch.export.export(module, arguments, strict=strict)
        torch.testing.assert_close(exported.module()(*arguments), module.expected())
