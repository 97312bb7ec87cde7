"""Hugging Face transformers: its Mixture-of-Experts models on our experts.

    import sonicmoe.integrations.transformers as sonicmoe_transformers

    name = sonicmoe_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation=name)
    # an existing model: model.set_experts_implementation(name)

Every class of experts that transformers marks with `use_experts_implementation` is covered: routers
and shared experts stay the model's. Symbols as in :mod:`sonicmoe.functional`.
"""

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from .. import _check, functional
from ..enums import allowed_activations
from . import _gates

#: transformers has an implementation "sonicmoe" already, which loads the original's kernels.
NAME = "sonicmoe_native"


def register(name: str = NAME, *, recompute: str = "none") -> str:
    """Adds our experts to transformers under `name`, which it returns.

    `recompute="preact"` keeps no pre-activations for backward, which computes them again. Models of
    both kinds may live together, under two names. "sonicmoe" takes the place of transformers' own implementation of that name; other built-in
    names are refused. Needs transformers 5.24.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError("sonicmoe.integrations.transformers needs transformers 5.24") from error

    taken = {"eager", *ALL_EXPERTS_FUNCTIONS.keys()} - {"sonicmoe"}
    taken -= {key for key in taken if _is_ours(ALL_EXPERTS_FUNCTIONS.get(key))}
    if not isinstance(name, str) or not name.isidentifier() or name in taken:
        raise ValueError(f"name: got {name!r}, allowed: a Python name, but {sorted(taken)}")
    _check.recompute("recompute", recompute)
    ALL_EXPERTS_FUNCTIONS.register(name, partial(experts_forward, recompute=recompute))
    return name


def _is_ours(function: Any) -> bool:
    return isinstance(function, partial) and function.func is experts_forward


def experts_forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    recompute: str = "none",
) -> torch.Tensor:
    """The output (T, H) of transformers' experts for hidden_states (T, H), in their dtype.

    top_k_index (T, K): expert ids; those below 0 or from E on are sentinels, which contribute
    nothing. top_k_weights (T, K): any float dtype, used in fp32. `module` holds the weights and says
    how they lie. NotImplementedError for a gate whose formula is none of ours.
    """
    if top_k_index.dim() != 2 or top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"top_k_index, top_k_weights: got shapes {tuple(top_k_index.shape)} and "
            f"{tuple(top_k_weights.shape)}, allowed: (T, K) for both"
        )
    _give_methods(type(module))
    functions = _guarded(module) if torch.compiler.is_compiling() else ()
    activation = module._sonicmoe_activation(*functions)
    if activation is None:
        raise NotImplementedError(_unknown(module)) from _why(module)
    up = "gate_up_proj" if module.has_gate else "up_proj"
    w1, w2 = getattr(module, up).contiguous(), module.down_proj.contiguous()
    if not w1.dtype.is_floating_point or w1.dtype.itemsize < 2:
        raise TypeError(f"{up}: got {w1.dtype}, allowed: float32, bfloat16, float16")
    b1 = getattr(module, f"{up}_bias").contiguous() if module.has_bias else None
    b2 = module.down_proj_bias.contiguous() if module.has_bias else None
    experts = {"w1": w1, "b1": b1, "w2": w2, "b2": b2}
    experts |= {"layout": _layout(module), "recompute": recompute}
    x = hidden_states.to(w1.dtype)
    if module.has_post_expert_norm:
        norm = module.post_expert_norm
        out = _normed(norm, x, top_k_index, top_k_weights, activation, experts)
    else:
        out = _combined(x, top_k_index, top_k_weights, activation, experts)
    return out.to(hidden_states.dtype)


def _combined(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    experts: dict[str, Any],
) -> torch.Tensor:
    """`experts`: arguments that the functions of the functional interface share."""
    top_k = ids.shape[1]
    if top_k <= experts["w2"].shape[0]:
        return functional.experts(x, ids, weights, activation=activation, **experts)[0]
    # A rank of expert parallelism may hold fewer experts than a token chooses: most are sentinels.
    tokens = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    tokens = tokens[:, None].expand(-1, top_k)
    lists = weights.flatten(), tokens.flatten(), ids.flatten()
    return functional.moe_general_routing_inputs(x, *lists, activation_type=activation, **experts)[
        0
    ]


def _normed(
    norm: nn.Module,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
    experts: dict[str, Any],
) -> torch.Tensor:
    """With a norm between the experts and the sum over them, each pair's output is a row."""
    rows = x.repeat_interleave(ids.shape[1], 0)
    ones = torch.ones(rows.shape[0], 1, device=x.device)
    out = _combined(rows, ids.reshape(-1, 1), ones, activation, experts)
    out = norm(out).reshape(*ids.shape, x.shape[1])
    sentinel = (ids < 0) | (ids >= experts["w2"].shape[0])
    return (out * weights.masked_fill(sentinel, 0)[..., None]).sum(1)


def _layout(module: nn.Module) -> str:
    if not module.has_gate:  # then no column has a partner
        return "transposed" if module.is_transposed else "concatenated"
    if module.is_transposed:
        return "transposed" if module.is_concatenated else "transposed_interleaved"
    return "concatenated" if module.is_concatenated else "interleaved"


# A module's activation is found at its first call, and again when a setting that its gate can read has
# changed. Traced code takes the activation for a constant. It reads the same settings, so that
# torch.compile guards them.

#: Of a module: its settings, and its activation or the error of asking for it.
_found: weakref.WeakKeyDictionary[nn.Module, tuple] = weakref.WeakKeyDictionary()


@torch.compiler.assume_constant_result
def _give_methods(experts: type[nn.Module]) -> None:
    """torch.compile passes a module to a constant function only as `self`, and looks that function
    up in the module's class by its own name."""
    if "_sonicmoe_activation" not in vars(experts):
        experts._sonicmoe_activation = _sonicmoe_activation
        experts._sonicmoe_names = _sonicmoe_names
        experts._sonicmoe_value = _sonicmoe_value


@torch.compiler.assume_constant_result
def _sonicmoe_activation(module: nn.Module, *functions: Any) -> str | None:
    """The text of a module's activation, None for an unknown one. `functions` are guarded."""
    state = [(path, _state(value)) for path, value in _settings(module)]
    known = _found.get(module)
    if known is None or known[0] != state:
        try:
            known = state, _recognized(module)
        except Exception as error:  # of the gate's own code
            known = state, error
        _found[module] = known
    return None if isinstance(known[1], Exception) else known[1]


def _why(module: nn.Module) -> Exception | None:
    error = _found.get(module, (None, None))[1]
    return error if isinstance(error, Exception) else None


def _recognized(module: nn.Module) -> str | None:
    learned = [
        name for _, part in _parts(module) if part is not module for name in part._parameters
    ]
    if learned:
        raise ValueError(f"{learned[0]}: got a parameter of the activation, allowed: none")
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        if module.has_gate:
            return _gates.gated(module._apply_gate, not module.is_concatenated)
        return _gates.plain(module.act_fn)


@torch.compiler.assume_constant_result
def _sonicmoe_names(module: nn.Module) -> str:
    return " ".join(
        path for path, value in _settings(module) if isinstance(value, _SCALARS) or callable(value)
    )


@torch.compiler.assume_constant_result
def _sonicmoe_value(module: nn.Module, path: str) -> bool | int | float | str:
    return dict(_settings(module))[path]


def _guarded(module: nn.Module) -> list[Any]:
    """Reads the settings in traced code. Functions are guarded as arguments of a constant function,
    and returned for that."""
    functions = []
    for path in module._sonicmoe_names().split():
        *parents, name = path.split(".")
        part = module
        for parent in parents:
            part = getattr(part, parent)
        value = getattr(part, name)
        if not isinstance(value, _SCALARS):
            functions.append(value)
        elif value != module._sonicmoe_value(path):  # only for NaN: the comparison makes the guard
            functions.append(None)
    return functions


_SCALARS = (bool, int, float, str)


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module and its parts, but for those that no gate reads, with their paths."""
    for path, part in module.named_modules():
        if path.partition(".")[0] not in ("post_expert_norm", "parametrizations"):
            yield path, part


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes that a gate may read, with their paths. Hooks replace `forward`."""
    for path, part in _parts(module):
        for name, value in vars(part).items():
            if name[0] != "_" and name not in ("forward", "config"):
                yield f"{path}.{name}" if path else name, value
        for name, value in part._buffers.items():
            yield f"{path}.{name}" if path else name, value


def _state(value: Any) -> Any:
    """What is equal as long as the value stays the same, and keeps nothing alive."""
    if isinstance(value, _SCALARS) or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return weakref.ref(value), value._version
    if isinstance(value, list | tuple):
        return [_state(item) for item in value]
    fields = getattr(value, "__dict__", {}) if callable(value) else {}
    scalars = {key: field for key, field in fields.items() if isinstance(field, _SCALARS)}
    try:
        make = weakref.WeakMethod if hasattr(value, "__self__") else weakref.ref
        return make(value), scalars
    except TypeError:  # of builtins' methods, numbers of other kinds and the like
        return repr(value)


def _unknown(module: nn.Module) -> str:
    source = "_apply_gate" if module.has_gate else "act_fn"
    return (
        f"{type(module).__name__}.{source}: got a function that is none of ours, allowed: "
        f"{allowed_activations()}; set_experts_implementation('grouped_mm') takes any"
    )
