"""Names of activations and of the backends of :class:`sonicmoe.MoE`."""

import math
import struct
from enum import Enum


class ActivationType(Enum):
    """Activation of the experts; the values are the names of the C++ library.

    GELU and GEGLU use erf, the _TANH ones the tanh approximation.
    """

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    GEGLU_TANH = "geglu_tanh"
    REGLU = "reglu"

    RELU = "relu"
    RELU_SQ = "relu_sq"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"

    SWIGLU_CLAMP_AFTER = "swiglu_clamp_after"
    SWIGLU_OAI = "swiglu_oai"
    SITU_GLU = "situ_glu"
    QUICK_GEGLU = "quick_geglu"


class KernelBackendMoE(Enum):
    """What computes a :class:`sonicmoe.MoE`: `torch` is the plain PyTorch reference."""

    scattermoe = "scattermoe"
    torch = "torch"
    sonicmoe = "sonicmoe"


_GATED = frozenset(
    {
        ActivationType.SWIGLU,
        ActivationType.GEGLU,
        ActivationType.GEGLU_TANH,
        ActivationType.REGLU,
        ActivationType.SWIGLU_CLAMP_AFTER,
        ActivationType.SWIGLU_OAI,
        ActivationType.SITU_GLU,
        ActivationType.QUICK_GEGLU,
    }
)
_KINDS = {kind.value: kind for kind in ActivationType}

# Allowed values of a parameter, in words and as a function.
_POSITIVE_OR_INF = ("numbers above 0, or inf", lambda value: value > 0)
_POSITIVE = ("finite numbers above 0", lambda value: 0 < value < math.inf)
_FINITE = ("finite numbers", math.isfinite)
#: Of each kind that has any: parameter, default, allowed values.
_PARAMETERS = {
    ActivationType.SWIGLU: {"limit": (math.inf, _POSITIVE_OR_INF)},
    ActivationType.SWIGLU_CLAMP_AFTER: {"limit": (math.inf, _POSITIVE_OR_INF)},
    ActivationType.SWIGLU_OAI: {"alpha": (1.702, _FINITE), "limit": (7.0, _POSITIVE_OR_INF)},
    ActivationType.SITU_GLU: {"alpha": (4.0, _POSITIVE), "beta": (25.0, _POSITIVE)},
}


def is_glu(activation_type: ActivationType | str) -> bool:
    """Whether the activation has a gate, so that W1 has 2n rows instead of n."""
    return parse_activation(activation_type)[0] in _GATED


def allowed_activations() -> str:
    """Every activation as a text, with its parameters' defaults."""
    texts = []
    for name, kind in _KINDS.items():
        defaults = [f"{key}={value:g}" for key, (value, _) in _PARAMETERS.get(kind, {}).items()]
        texts.append(f"{name}({','.join(defaults)})" if defaults else name)
    return ", ".join(texts)


def parse_activation(value: ActivationType | str) -> tuple[ActivationType, dict[str, float]]:
    """The kind and all its parameters, as fp32 has them, of a kind or a text like
    "swiglu(limit=7)".

    KeyError for a text that is none, ValueError for a parameter's value that is not allowed.
    """
    text = value.value if isinstance(value, ActivationType) else value
    name, parenthesis, rest = text.partition("(")
    kind = _KINDS[name]
    known = _PARAMETERS.get(kind, {})
    parameters = {key: _as_fp32(default) for key, (default, _) in known.items()}
    if not parenthesis:
        return kind, parameters
    if not rest.endswith(")"):
        raise KeyError(text)
    given = set()
    for item in rest[:-1].split(","):
        key, equals, number = item.partition("=")
        if key not in known or key in given or not equals or not _is_number(number):
            raise KeyError(text)
        given.add(key)
        parameters[key] = _as_fp32(float(number))
        words, allows = known[key][1]
        if not allows(parameters[key]):
            raise ValueError(f"{key}: got {number}, allowed: {words}")
    return kind, parameters


def _is_number(text: str) -> bool:
    """Of what float() reads, the library reads what has none of these."""
    if not text or text[0] == "+" or "_" in text or text.strip() != text:
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


def _as_fp32(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        raise KeyError(value) from None
