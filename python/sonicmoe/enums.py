"""Names of activations and of the backends of :class:`sonicmoe.MoE`."""

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
    }
)


def is_glu(activation_type: ActivationType) -> bool:
    """Whether the activation has a gate, so that W1 has 2n rows instead of n."""
    return activation_type in _GATED
