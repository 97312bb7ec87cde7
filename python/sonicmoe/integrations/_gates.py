"""Recognises a function of pre-activations by its values.

A framework's experts bring code for their gate, not its name: names in configurations lie, and a new
class may change the formula under the old name. So a function is taken for one of ours only if it
gives the same values over the whole range.
"""

import math
from collections.abc import Callable

import torch

from .._check import _activation
from ..reference import _activate

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Where the values are compared, besides around the limits.
_POINTS = [0.0, 1e-3, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 8.0, 12.0, 20.0, 60.0, 1e3, 1e5]
_HUGE = 1e30


def gated(function: Callable[[torch.Tensor], torch.Tensor], interleaved: bool) -> str | None:
    """The activation, as a text, of a function from (rows, 2I) to (rows, I); None for no known one.

    `interleaved`: columns are g0, u0, g1, u1, ..., otherwise g0, g1, ..., u0, u1, ...
    """

    def gate(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        g, u = torch.broadcast_tensors(g, u)
        pairs = torch.stack((g.flatten(), u.flatten()), -1 if interleaved else 0)
        return function(pairs.reshape(1, -1)).reshape(g.shape)

    def at(g: float, u: float) -> float:
        return gate(_f64([g]), _f64([u])).item()

    for text, limits in _gated_candidates(at):
        if not isinstance(_activation("", text), Exception) and _agrees(gate, text, limits):
            return text
    return None


def plain(function: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """The activation without a gate that a function (rows, I) is; None for no known one."""
    h = _points([])
    for text in ("relu_sq", "relu", "silu", "gelu", "gelu_tanh"):
        wanted = _activate(h.reshape(1, -1), text, False)
        if _close(function(h.reshape(1, -1)), wanted, 1 + h.abs() ** 2):
            return text
    return None


def _gated_candidates(at: Callable[[float, float], float]):
    """Activations with the parameters that the function must have if it is one of these; and where
    it then changes its form. What `at` cannot tell makes a text that is no activation."""
    for kind in ("geglu", "geglu_tanh", "reglu", "quick_geglu"):
        yield kind, []
    # With gate and up small, only an up of _HUGE meets the limit.
    small = 2.0**-10
    limit = _written(small * _ratio(at(small, _HUGE), at(small, small)))
    if limit == "inf":
        yield "swiglu", []
    else:
        yield f"swiglu(limit={limit})", [float(limit)]
        yield f"swiglu_clamp_after(limit={limit})", [float(limit)]
    # (clamp(u, limit) + 1) g sigmoid(alpha g)
    limit = _written(_ratio(at(small, _HUGE), at(small, 0.0)) - 1)
    alpha = _written(_logit(at(1.0, 0.0)))
    yield f"swiglu_oai(alpha={alpha},limit={limit})", [float(limit)]
    # alpha tanh(g / alpha) sigmoid(g) beta tanh(u / beta)
    beta = 1 / _atanh(_ratio(at(1.0, 1.0), at(1.0, _HUGE)))
    alpha = _ratio(at(_HUGE, 1.0), beta * math.tanh(1 / beta))
    yield f"situ_glu(alpha={_written(alpha)},beta={_written(beta)})", [alpha, beta]


def _agrees(gate: Gate, text: str, limits: list[float]) -> bool:
    points = _points(limits)
    g, u = points[:, None], points[None, :]
    pairs = torch.stack(torch.broadcast_tensors(g, u), -1).reshape(1, -1)
    wanted = _activate(pairs, text, True).reshape(len(points), -1)
    return _close(gate(g, u), wanted, (1 + g.abs()) * (1 + u.abs()))


def _close(got: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor) -> bool:
    """To the precision of a function that computes in fp32: 8 roundings of the largest term. The two
    forms of GELU differ by 4e-4 of it."""
    return bool(((got.double() - wanted).abs() <= 2.0**-21 * scale).all())


def _points(limits: list[float]) -> torch.Tensor:
    around = [
        limit * factor
        for limit in limits
        for factor in (0.5, 0.9, 0.99, 1.0, 1.01, 1.1, 2.0)
        if math.isfinite(limit)
    ]
    magnitudes = _f64(_POINTS + around)
    return torch.cat((magnitudes, -magnitudes))


def _f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _logit(p: float) -> float:
    return math.log(p / (1 - p)) if 0 < p < 1 else math.nan


def _atanh(value: float) -> float:
    return math.atanh(value) if 0 < abs(value) < 1 else math.nan


def _written(value: float) -> str:
    """A measured parameter: the number of 5 digits that it is if computed in fp32."""
    if not math.isfinite(value) or abs(value) > 1e20:
        return "inf" if value > 0 else "nan"
    short = f"{value:.5g}"
    return short if abs(float(short) - value) <= 2e-6 * abs(value) else repr(value)
