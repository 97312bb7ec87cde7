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

_DTYPES = torch.float64, torch.float32
Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Magnitudes at which values are compared, besides those around the limits. fp32 holds the square of
# the largest.
_POINTS = [0.0, 1e-3, *(0.137 * 1.139**i for i in range(48)), 1e3, 1e5, 1e8, 1e12, 1e15]
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

    for text, limits in (c for digits in (5, 7, 9) for c in _gated_candidates(at, digits)):
        # The check returns the error of a text that is no activation.
        if not isinstance(_activation("", text), Exception) and _agrees(gate, text, limits):
            return text
    return None


def plain(function: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """The activation without a gate that a function (rows, I) is; None for no known one."""
    h = _points([]).reshape(1, -1)
    for text in ("relu_sq", "relu", "silu", "gelu", "gelu_tanh"):
        wanted = _activate(h, text, False)
        scale = 1 + (h.square() if text == "relu_sq" else h.abs())
        if all(_close(function(h.to(dtype)), wanted, scale) for dtype in _DTYPES):
            return text
    return None


def _gated_candidates(at: Callable[[float, float], float], digits: int):
    """Activations with the parameters that the function has if it is one of these, and where it then
    changes its form. A parameter that `at` cannot give makes a text that is no activation."""

    def written(value: float) -> str:
        if not math.isfinite(value) or abs(value) > 1e20:
            return "inf" if value > 0 else "nan"
        return f"{value:.{digits}g}"

    for kind in ("geglu", "geglu_tanh", "reglu", "quick_geglu"):
        yield kind, []
    # With gate and up small, only an up of _HUGE meets the limit.
    small = 2.0**-40
    limit = written(small * _ratio(at(small, _HUGE), at(small, small)))
    if limit == "inf":
        yield "swiglu", []
    else:
        yield f"swiglu(limit={limit})", [float(limit)]
        yield f"swiglu_clamp_after(limit={limit})", [float(limit)]
    # (clamp(u, limit) + 1) g sigmoid(alpha g)
    limit = _ratio(at(small, _HUGE), at(small, 0.0)) - 1
    below = min(1.0, limit / 2) if limit > 0 else 1.0
    alpha = _logit(at(below, 0.0) / below) / below
    yield f"swiglu_oai(alpha={written(alpha)},limit={written(limit)})", [float(written(limit))]
    # alpha tanh(g / alpha) sigmoid(g) beta tanh(u / beta)
    beta = 1 / _atanh(_ratio(at(1.0, 1.0), at(1.0, _HUGE)))
    alpha = _ratio(at(_HUGE, 1.0), beta * math.tanh(1 / beta))
    yield f"situ_glu(alpha={written(alpha)},beta={written(beta)})", [alpha, beta]


def _agrees(gate: Gate, text: str, limits: list[float]) -> bool:
    points = _points(limits)
    g, u = points[:, None], points[None, :]
    pairs = torch.stack(torch.broadcast_tensors(g, u), -1).reshape(1, -1)
    wanted = _activate(pairs, text, True).reshape(len(points), -1)
    scale = (1 + g.abs()) * (1 + u.abs())
    return all(_close(gate(g.to(dtype), u.to(dtype)), wanted, scale) for dtype in _DTYPES)


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
    magnitudes = _f64(_POINTS + around).float().double()  # as fp32 has them, too
    return torch.cat((magnitudes, -magnitudes))


def _f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _logit(p: float) -> float:
    return math.log(p / (1 - p)) if 0 < p < 1 else math.nan


def _atanh(value: float) -> float:
    return math.atanh(value) if 0 < abs(value) < 1 else math.nan
