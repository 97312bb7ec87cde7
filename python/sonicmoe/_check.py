"""Checks that come before the library's own: types, devices and views, which C++ cannot see.

Shapes, sizes and contents are checked by the operators, whose text reaches Python as a ValueError.
All messages read `argument: got value, allowed: values`.
"""

import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, overload

import torch

from .enums import ActivationType, allowed_activations, is_glu, parse_activation
from .router import Routing
from .router import flag as flag

if TYPE_CHECKING:  # slow to import
    from torch.distributed.tensor import DTensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TENSORS = (torch.Tensor, torch.nn.Parameter)  # known without a look at attributes
_PLAIN = (*_TENSORS, type(None))
_OPTIONAL = ("b1", "b2", "w1_up", "b1_up", "w1_main_grad", "w2_main_grad", "w1_up_main_grad")


def tensors(**values: object) -> None:
    """All are plain tensors; those of _OPTIONAL may be None."""
    for name, value in values.items():
        if type(value) in _PLAIN and (value is not None or name in _OPTIONAL):
            if isinstance(value, torch.Tensor):
                strided(name, value)
            continue
        if is_dtensor(value):
            raise TypeError(f"{name}: got a DTensor, allowed: {_of_dtensor(name)}")
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, allowed: a tensor")


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """The error with the caller's name of the argument that it begins with, or itself."""
    name, colon, rest = str(error).partition(":")
    return type(error)(f"{names[name]}{colon}{rest}") if name in names else error


def strided(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: got a tensor in {tensor.layout}, allowed: torch.strided")


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """By what its class has, which lives in a module that is slow to import."""
    kind = type(value)
    return kind not in _PLAIN and hasattr(kind, "to_local") and hasattr(kind, "placements")


def _of_dtensor(name: str) -> str:
    return f"this rank's tensor, {name}.to_local(); ExpertParallel is for experts that are sharded"


@overload
def local(name: str, value: torch.Tensor, x: torch.Tensor) -> torch.Tensor: ...


@overload
def local(name: str, value: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None: ...


def local(name: str, value: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """What this rank has of a module's tensor beside x: all of it, as DTensors or as plain tensors.
    Its gradient is replicated too."""
    if type(value) in _PLAIN and type(x) in _PLAIN:
        return value
    if not is_dtensor(value):
        if value is not None and is_dtensor(x):
            raise TypeError(f"{name}: got a plain tensor, allowed: a DTensor like x, or plain x")
        return value
    if not all(placement.is_replicate() for placement in value.placements):
        raise ValueError(
            f"{name}: got a DTensor with placements {tuple(value.placements)}, allowed: "
            f"Replicate() alone, or {_of_dtensor(name)}"
        )
    if not is_dtensor(x):
        raise TypeError(f"{name}: got a DTensor beside a plain x, allowed: {_of_dtensor(name)}")
    return value.to_local()


def not_sharded_alone(name: str, part: torch.nn.Module | None) -> None:
    """Of a part that FSDP2 has made a unit of its own, whose class then has this method."""
    if hasattr(type(part), "set_reshard_after_forward"):
        raise ValueError(
            f"{name}: got a module under fully_shard, which frees its parameters when its forward "
            "returns, allowed: a plain one; shard the MoE or its block"
        )


def supported(name: str, dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise TypeError(f"{name}: got {dtype}, allowed: {', '.join(map(str, _DTYPES))}")


def alike(x: torch.Tensor, name_of_x: str = "x", **others: torch.Tensor | None) -> None:
    """One floating type, one device."""
    dtype, device = x.dtype, x.device
    supported(name_of_x, dtype)
    if device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name_of_x}: got a tensor on {device}, allowed: cpu, cuda")
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(
                f"{name}: got {tensor.dtype}, allowed: {dtype}, the dtype of {name_of_x}"
            )
        on_device(name, tensor, device, name_of_x)


def alike_or_fp32(x: torch.Tensor, **others: torch.Tensor) -> None:
    """One floating type, one device; the others may be fp32."""
    alike(x)
    for name, tensor in others.items():
        if tensor.dtype not in (x.dtype, torch.float32):
            others_too = "" if x.dtype == torch.float32 else ", or torch.float32"
            raise TypeError(
                f"{name}: got {tensor.dtype}, allowed: {x.dtype}, the dtype of x{others_too}"
            )
        on_device(name, tensor, x.device)


def plain_alike(x: torch.Tensor, or_fp32: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether all are plain tensors of one floating type on one device: a quick look, in place of
    the checks that name what is wrong. `or_fp32` may be fp32, the others None."""
    if type(x) not in _TENSORS or type(or_fp32) not in _TENSORS:
        return False
    dtype, device = x.dtype, x.device
    if x.layout is not torch.strided:
        return False
    for tensor in others:
        if tensor is None:
            continue
        if type(tensor) not in _TENSORS or tensor.dtype != dtype or tensor.device != device:
            return False
    if or_fp32.dtype not in (dtype, torch.float32) or or_fp32.device != device:
        return False
    return dtype in _DTYPES and (x.is_cpu or x.is_cuda)


def router_tensors(x: torch.Tensor, routing: Routing) -> None:
    """fp32 tensors beside x, or None."""
    for name in ("logit_bias", "selection_bias", "expert_scale"):
        tensor = getattr(routing, name)
        if tensor is None:
            continue
        tensors(**{name: tensor})
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name}: got {tensor.dtype}, allowed: torch.float32")
        on_device(name, tensor, x.device)


def autocast_dtype(device: torch.device) -> None:
    """Of the library: the CPU has no kernels for fp16."""
    kind = device.type
    if kind == "cpu" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype == torch.float16:
            raise ValueError(
                f"torch.autocast: got dtype={dtype} on the CPU, allowed: dtype=torch.bfloat16"
            )


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


def main_grads(*named: tuple[str, torch.Tensor | None, torch.Tensor | None]) -> None:
    """Name, weight and main_grad of each weight: all of them or none, but for frozen weights."""
    if all(value is None for _, _, value in named):
        return
    for name, weight, value in named:
        if weight is not None:
            main_grad(f"{name}_main_grad", value, weight)
    for name, weight, value in named:
        if value is None and weight is not None and weight.requires_grad:
            raise ValueError(
                f"{name}_main_grad: got None, allowed: a torch.float32 tensor, for another weight "
                f"has one and {name} is not frozen"
            )


def on_device(name: str, tensor: torch.Tensor, device: torch.device, name_of_x: str = "x") -> None:
    if tensor.device != device:
        raise ValueError(
            f"{name}: got a tensor on {tensor.device}, allowed: {device}, where {name_of_x} is"
        )


def shaped(name: str, tensor: torch.Tensor, shape: tuple[int, ...], words: str) -> None:
    """A tensor of this shape, which `words` name."""
    if tuple(tensor.shape) != tuple(shape):
        allowed = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, allowed: {words} = {allowed}")


def padding_mask(mask: torch.Tensor, device: torch.device, name_of_x: str = "x") -> None:
    """A plain tensor of truth values beside x, of any shape."""
    tensors(padding_mask=mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"padding_mask: got {mask.dtype}, allowed: torch.bool, or integers 0 and 1")
    on_device("padding_mask", mask, device, name_of_x)


def mask_of_tokens(mask: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """The mask as (T) beside x (..., d)."""
    if mask is None:
        return None
    padding_mask(mask, x.device)
    of_x = x.shape[:-1]
    # One size after the other: tracing takes an unknown size for another one in `shape in (...)`.
    fits = mask.dim() == len(of_x) and all(m == n for m, n in zip(mask.shape, of_x, strict=True))
    if not fits and not (mask.dim() == 1 and mask.shape[0] == of_x.numel()):
        raise ValueError(
            f"padding_mask: got shape {tuple(mask.shape)}, allowed: {tuple(x.shape[:-1])}, that of "
            "x without its last dimension, or (T)"
        )
    return mask.reshape(-1)


def memory(name: str, value: torch.Tensor | None, rows: torch.Tensor) -> None:
    """Memory of the caller's for a result like `rows`, or None."""
    if value is None:
        return
    tensors(**{name: value})
    if value.dtype != rows.dtype:
        raise TypeError(f"{name}: got {value.dtype}, allowed: {rows.dtype}, the result's dtype")
    on_device(name, value, rows.device, "rows")
    if value.shape != rows.shape:
        raise ValueError(
            f"{name}: got shape {tuple(value.shape)}, allowed: (R, H) = {tuple(rows.shape)}"
        )
    if not value.is_contiguous():
        raise ValueError(f"{name}: got strides {value.stride()}, allowed: a contiguous (R, H)")
    if value.requires_grad:
        raise ValueError(f"{name}: got a tensor that requires grad, allowed: one that does not")


def segments(
    counts: torch.Tensor | None, offsets: torch.Tensor | None, device: torch.device
) -> None:
    """Which rows each expert owns: at least one of the two, on the rows' device."""
    if counts is None and offsets is None:
        raise ValueError("counts: got None, allowed: a tensor, or None with offsets")
    for name, tensor in (("counts", counts), ("offsets", offsets)):
        if tensor is not None:
            ids(name, tensor)
            on_device(name, tensor, device, "rows")


#: Where the rows' scores may enter, by the library's names.
SCORES_AT = ("before_down", "after_down")


def score_at(name: str, value: str) -> None:
    if value not in SCORES_AT:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name}: got {value!r}, allowed: {', '.join(map(repr, SCORES_AT))}")


#: What backward may make again, by the library's names.
RECOMPUTES = ("none", "preact")


def recompute(name: str, value: str) -> str:
    if value not in RECOMPUTES:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name}: got {value!r}, allowed: {', '.join(map(repr, RECOMPUTES))}")
    return value


def expected_rows(name: str, value: int | None) -> int:
    """The library's number: 0 for None."""
    if value is None:
        return 0
    integer(name, value)
    if not 0 <= value < 2**31:
        raise ValueError(f"{name}: got {value}, allowed: 0 to {2**31 - 1}")
    return int(value)


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
    if type(value) is int:
        return
    if isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{name}: got {value!r}, allowed: an int")


def _activation(name: str, value: object) -> ActivationType | str | Exception:
    """Returns the exception to raise: a function whose result is a constant may not raise."""
    if isinstance(value, ActivationType):
        return value
    allowed = f"allowed: an ActivationType, {allowed_activations()}"
    if not isinstance(value, str):
        return TypeError(f"{name}: got {value!r}, {allowed}")
    try:
        kind, _ = parse_activation(value)
    except KeyError:
        return ValueError(f"{name}: got {value!r}, {allowed}")
    except ValueError as error:
        return ValueError(f"{name}.{error}")
    return kind if value == kind.value else value


# What torch.compiler.assume_constant_result() does, after an import of the whole compiler.
vars(_activation)["_dynamo_marked_constant"] = True


def activation(name: str, value: ActivationType | str) -> ActivationType | str:
    """An ActivationType for itself or its name; a text with parameters as it is."""
    known = _activation(name, value)
    if isinstance(known, Exception):
        raise known
    return known


def layer_sizes(**sizes: int) -> None:
    """Hidden size, intermediate size, experts and K, in this order, by the caller's names.

    The library is not asked: it may be missing, and has no device yet."""
    *of_rows, (of_experts, experts), (of_top_k, top_k) = sizes.items()
    for name, size in of_rows:
        if size % 8 != 0 or not 8 <= size <= 2**20:
            raise ValueError(f"{name}: got {size}, allowed: multiples of 8 from 8 to {2**20}")
    number_of_experts(of_experts, experts)
    chosen(of_top_k, top_k, of_experts, experts)


def number_of_experts(name: str, value: int) -> None:
    if not 1 <= value <= 2**16:
        raise ValueError(f"{name}: got {value}, allowed: 1 to {2**16}")


def chosen(name: str, top_k: int, of_experts: str, experts: int) -> None:
    """How many experts a token chooses, of how many."""
    integer(name, top_k)
    if not 1 <= top_k <= experts:
        raise ValueError(f"{name}: got {top_k}, allowed: 1 to {of_experts} ({experts})")


#: The published names of the rules (NR-f, SR-f, NR-s, Balance-f, UP, DOWN) and the library's own,
#: each with the library's.
ROUNDING_RULES = {
    "nr": "nearest",
    "sr": "stochastic",
    "nr_s": "nearest_scores",
    "balance": "balance",
    "up": "up",
    "down": "down",
    "nearest": "nearest",
    "stochastic": "stochastic",
    "nearest_scores": "nearest_scores",
}


def draws(name: str, rule: str) -> bool:
    """Whether the rule needs random numbers."""
    return rounding_rule(name, rule) in ("stochastic", "nearest_scores")


def rounding_rule(name: str, rule: str) -> str:
    """The library's name of a rounding rule."""
    if not isinstance(rule, str):
        raise TypeError(f"{name}: got {rule!r}, allowed: a str")
    if rule not in ROUNDING_RULES:
        raise ValueError(f"{name}: got {rule!r}, allowed: {', '.join(map(repr, ROUNDING_RULES))}")
    return ROUNDING_RULES[rule]


#: How w1 holds gate and up, by the library's names: in one tensor (E, out, in), in one tensor
#: (E, in, out), or in any way. w2 lies like w1.
ONE_TENSOR_LAYOUTS = ("interleaved", "concatenated")
TRANSPOSED_LAYOUTS = ("transposed", "transposed_interleaved")
W1_LAYOUTS = (*ONE_TENSOR_LAYOUTS, "separate", *TRANSPOSED_LAYOUTS)


def w1_layout(
    layout: str | None,
    concat_layout: bool,
    activation: ActivationType | str,
    w1_up: torch.Tensor | None = None,
    allowed: tuple[str, ...] = W1_LAYOUTS,
    **of_up: torch.Tensor | None,
) -> str:
    """The layout that the arguments ask for; `of_up` has no meaning without w1_up."""
    if layout is not None and layout not in allowed:
        kind = ValueError if isinstance(layout, str) else TypeError
        raise kind(f"layout: got {layout!r}, allowed: {', '.join(map(repr, allowed))}")
    if w1_up is not None:
        return _separate(layout, concat_layout, activation)
    if layout == "separate":
        raise ValueError("w1_up: got None, allowed: a tensor, for layout is 'separate'")
    for name, value in of_up.items():
        if value is not None:
            raise ValueError(f"{name}: got a tensor, allowed: None, for w1_up is None")
    if concat_layout:
        if layout not in (None, "concatenated"):
            raise ValueError(f"concat_layout: got True, allowed: False, for layout is {layout!r}")
        return "concatenated"
    return layout or "interleaved"


def _separate(layout: str | None, concat_layout: bool, activation: ActivationType | str) -> str:
    if layout not in (None, "separate"):
        raise ValueError(f"layout: got {layout!r}, allowed: 'separate', for w1_up is given")
    if concat_layout:
        raise ValueError("concat_layout: got True, allowed: False, for w1_up is given")
    if not is_glu(activation):
        raise ValueError(f"w1_up: got a tensor, allowed: None, for {activation} has no gate")
    return "separate"


def width(name: str, tensor: torch.Tensor, shape: str = "(T, H)") -> int:
    """H of a tensor (T, H) or (R, H)."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, allowed: a tensor")
    if tensor.dim() != 2:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, allowed: {shape}")
    return tensor.size(1)


def expert_weights(
    name: str,
    weights: torch.Tensor,
    out: str,
    in_: str,
    layout: str,
    hidden: int,
    name_of_x: str = "x",
) -> torch.Tensor:
    """The weights as they are stored, without a copy: a contiguous (E, out, in_), or (E, in_, out)
    if the layout is transposed.

    The caller gave that tensor or its view by .permute(1, 2, 0). A form fits if H, which is `out`
    or `in_`, has its place in the shape, and the strides are the form's.
    """
    if not isinstance(weights, torch.Tensor):
        raise TypeError(f"{name}: got {type(weights).__name__}, allowed: a tensor")
    rows, columns = (in_, out) if layout in TRANSPOSED_LAYOUTS else (out, in_)
    place = 1 if rows == "H" else 2
    stored = _stored(weights, place, hidden)
    if stored is not None:
        return stored
    hint = ""
    if layout != "separate" and _stored(weights, 3 - place, hidden) is not None:
        a, b = ONE_TENSOR_LAYOUTS if layout in TRANSPOSED_LAYOUTS else TRANSPOSED_LAYOUTS
        hint = f"; layout={a!r} or {b!r} takes a contiguous (E, {columns}, {rows})"
    raise ValueError(
        f"{name}: got shape {tuple(weights.shape)} with strides {weights.stride()}, allowed: a "
        f"contiguous (E, {rows}, {columns}), or its view ({rows}, {columns}, E) by "
        f".permute(1, 2, 0), where H is {hidden}, the width of {name_of_x}{hint}"
    )


def optional_weights(name: str, weights: torch.Tensor | None, *form: Any) -> torch.Tensor | None:
    """The same of weights that may be None."""
    return None if weights is None else expert_weights(name, weights, *form)


def _stored(weights: torch.Tensor, place: int, hidden: int) -> torch.Tensor | None:
    """The contiguous tensor that the weights are, or are a view of: H is its dimension `place`."""
    if weights.dim() != 3:
        return None
    # The view first, which is contiguous itself if there is one expert.
    if weights.size(place - 1) == hidden:
        stored = weights.permute(2, 0, 1)
        if stored.is_contiguous():
            return stored
    return weights if weights.size(place) == hidden and weights.is_contiguous() else None
