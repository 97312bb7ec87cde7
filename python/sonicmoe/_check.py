"""Checks that come before the library's own: types, devices and views, which C++ cannot see.

Shapes, sizes and contents are checked by the operators, whose text reaches Python as a ValueError.
All messages read `argument: got value, allowed: values`.
"""

import numbers

import torch

from .enums import ActivationType

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ACTIVATIONS = {a.value: a for a in ActivationType}
_OPTIONAL = ("b1", "b2", "w1_main_grad", "w2_main_grad")


def tensors(**values: object) -> None:
    """All are tensors; those of _OPTIONAL may be None."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) and not (value is None and name in _OPTIONAL):
            raise TypeError(f"{name}: got {type(value).__name__}, allowed: a tensor")


def supported(name: str, dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise TypeError(f"{name}: got {dtype}, allowed: {', '.join(map(str, _DTYPES))}")


def alike(x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """One floating type, one device."""
    dtype, device = x.dtype, x.device
    supported("x", dtype)
    if device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"x: got a tensor on {device}, allowed: cpu, cuda")
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: got {tensor.dtype}, allowed: {dtype}, the dtype of x")
        on_device(name, tensor, device)


def main_grad(name: str, value: torch.Tensor | None, weight: torch.Tensor) -> None:
    """What backward may add the weight's gradient to, or None."""
    tensors(**{name: value})
    if value is None:
        return
    if value.dtype != torch.float32:
        raise TypeError(f"{name}: got {value.dtype}, allowed: torch.float32")
    on_device(name, value, weight.device)
    if value.requires_grad:
        raise ValueError(f"{name}: got a tensor that requires grad, allowed: one that does not")
    if not weight.requires_grad:
        raise ValueError(f"{name}: got a tensor, allowed: None, for the weight is frozen")


def main_grads(
    w1: torch.Tensor,
    w1_main_grad: torch.Tensor | None,
    w2: torch.Tensor,
    w2_main_grad: torch.Tensor | None,
) -> None:
    """One alone only if the other weight is frozen."""
    main_grad("w1_main_grad", w1_main_grad, w1)
    main_grad("w2_main_grad", w2_main_grad, w2)
    for name, one, weight, other in (
        ("w1_main_grad", w1_main_grad, w1, w2_main_grad),
        ("w2_main_grad", w2_main_grad, w2, w1_main_grad),
    ):
        if one is None and other is not None and weight.requires_grad:
            raise ValueError(
                f"{name}: got None, allowed: a torch.float32 tensor, for the other one is one and "
                "the weight is not frozen"
            )


def on_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, allowed: {device}, where x is")


def ids(name: str, tensor: torch.Tensor) -> None:
    tensors(**{name: tensor})
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: got {tensor.dtype}, allowed: torch.int32, torch.int64")


def scores(name: str, tensor: torch.Tensor) -> None:
    tensors(**{name: tensor})
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: got {tensor.dtype}, allowed: any floating dtype")


def logits(name: str, tensor: torch.Tensor) -> None:
    tensors(**{name: tensor})
    supported(name, tensor.dtype)


def counts(name: str, tensor: torch.Tensor) -> None:
    tensors(**{name: tensor})
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}: got {tensor.dtype}, allowed: torch.int32")


def word(name: str, value: int) -> int:
    """The 64 bits of the value, signed or not, as a signed integer."""
    integer(name, value)
    if not isinstance(value, (int, torch.SymInt)):
        value = int(value)  # NumPy's have 64 bits themselves
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{name}: got {value}, allowed: {-(2**63)} to {2**64 - 1}")
    return value if value < 2**63 else value - 2**64


def integer(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name}: got {value!r}, allowed: an int")


def activation(name: str, value: ActivationType | str) -> ActivationType:
    """The activation, by its value or its name."""
    if isinstance(value, ActivationType):
        return value
    if isinstance(value, str) and value in _ACTIVATIONS:
        return _ACTIVATIONS[value]
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(f"{name}: got {value!r}, allowed: {', '.join(map(str, ActivationType))}")


def layer_sizes(hidden: int, intermediate: int, experts: int, top_k: int) -> None:
    """In the library's words, which is not asked here: it may be missing, and has no device yet."""
    for name, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size % 8 != 0 or not 8 <= size <= 2**20:
            raise ValueError(f"{name}: got {size}, allowed: multiples of 8 from 8 to {2**20}")
    if not 1 <= experts <= 2**16:
        raise ValueError(f"experts: got {experts}, allowed: 1 to {2**16}")
    chosen(top_k, experts)


def chosen(top_k: int, experts: int) -> None:
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k: got {top_k}, allowed: 1 to experts ({experts})")


#: The published names of the rules (NR-f, SR-f, NR-s, Balance-f, UP, DOWN), and the library's.
ROUNDING_RULES = {
    "nr": "nearest",
    "sr": "stochastic",
    "nr_s": "nearest_scores",
    "balance": "balance",
    "up": "up",
    "down": "down",
}
#: Those that need random numbers.
DRAWING_RULES = ("sr", "nr_s")


def rounding_rule(name: str, rule: str) -> str:
    """The library's name of a rounding rule."""
    if not isinstance(rule, str):
        raise TypeError(f"{name}: got {rule!r}, allowed: a str")
    if rule not in ROUNDING_RULES:
        raise ValueError(f"{name}: got {rule!r}, allowed: {', '.join(map(repr, ROUNDING_RULES))}")
    return ROUNDING_RULES[rule]


def expert_weights(name: str, weights: torch.Tensor | None, shape: str) -> torch.Tensor | None:
    """The contiguous (E, out, in) tensor whose permuted view (out, in, E) the caller gave."""
    if weights is None and name in _OPTIONAL:
        return None
    tensors(**{name: weights})
    if weights.dim() == 3:
        stored = weights.permute(2, 0, 1)
        if stored.is_contiguous():
            return stored
    raise ValueError(
        f"{name}: got shape {tuple(weights.shape)} with strides {weights.stride()}, allowed: "
        f"{shape} with stride order (2, 0, 1), which is the view .permute(1, 2, 0) of a "
        "contiguous tensor with the experts first"
    )
