"""Hugging Face transformers: its Mixture-of-Experts models on our experts.

    import sonicmoe.integrations.transformers as sonicmoe_transformers

    name = sonicmoe_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation=name)
    # or, of a model that is there: model.set_experts_implementation(name)

Every class of experts that transformers marks with `use_experts_implementation` is covered: routers
and shared experts stay the model's. Symbols as in :mod:`sonicmoe.functional`.
"""

from typing import Any

import torch
from torch import nn

from .. import functional
from ..enums import allowed_activations
from . import _gates

#: transformers has an implementation "sonicmoe" already, which loads the original's kernels.
NAME = "sonicmoe_native"


def register(name: str = NAME) -> str:
    """Adds our experts to transformers under `name`, which it returns.

    A name that transformers knows already stands for ours from then on. Needs transformers 5.24.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if not isinstance(name, str) or not name or name == "eager":
        raise ValueError(f"name: got {name!r}, allowed: a text, other than 'eager'")
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    return name


def experts_forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The output (T, H) of transformers' experts for hidden_states (T, H), in their dtype.

    top_k_index (T, K): expert ids; those below 0 or from E on are sentinels, which contribute
    nothing. top_k_weights (T, K): any float dtype, used in fp32. `module` holds the weights and says
    how they lie. NotImplementedError for a gate whose formula is none of ours.
    """
    _give_method(type(module))
    activation = module._sonicmoe_activation()
    if activation is None:
        raise NotImplementedError(_unknown(module))
    up = "gate_up_proj" if module.has_gate else "up_proj"
    weights = {"w1": getattr(module, up), "w2": module.down_proj}
    if module.has_bias:
        weights |= {"b1": getattr(module, f"{up}_bias"), "b2": module.down_proj_bias}
    weights = {key: weight.contiguous() for key, weight in weights.items()}
    x = hidden_states.to(weights["w1"].dtype)
    options = {"activation": activation, "layout": _layout(module)}
    if module.has_post_expert_norm:
        out = _normed(module, x, top_k_index, top_k_weights, weights, options)
    else:
        out = _combined(x, top_k_index, top_k_weights, weights, options)
    return out.to(hidden_states.dtype)


def _combined(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    of_experts: dict[str, torch.Tensor],
    options: dict[str, Any],
) -> torch.Tensor:
    top_k, experts = ids.shape[1], of_experts["w2"].shape[0]
    if top_k <= experts:
        return functional.experts(x, ids, weights, **of_experts, **options)[0]
    # A rank of expert parallelism may hold fewer experts than a token chooses: most are sentinels.
    tokens = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    tokens = tokens[:, None].expand(-1, top_k).flatten()
    of_experts = {"b1": None, "b2": None} | of_experts
    options = dict(options, activation_type=options["activation"])
    del options["activation"]
    return functional.moe_general_routing_inputs(
        x, weights.flatten(), tokens, ids.flatten(), **of_experts, **options
    )[0]


def _normed(
    module: nn.Module,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    of_experts: dict[str, torch.Tensor],
    options: dict[str, Any],
) -> torch.Tensor:
    """A norm between the experts and the sum over them: each pair's output is a row of its own.
    Sentinels' rows are zero, and the norm of zero times their weight."""
    top_k = ids.shape[1]
    rows = x.repeat_interleave(top_k, 0)
    ones = torch.ones(rows.shape[0], 1, device=x.device)
    out = functional.experts(rows, ids.reshape(-1, 1), ones, **of_experts, **options)[0]
    out = module.post_expert_norm(out).reshape(*ids.shape, -1)
    return (out * weights[..., None]).sum(1)


def _layout(module: nn.Module) -> str:
    if not module.has_gate:  # then no column has a partner
        return "transposed" if module.is_transposed else "concatenated"
    if module.is_transposed:
        return "transposed" if module.is_concatenated else "transposed_interleaved"
    return "concatenated" if module.is_concatenated else "interleaved"


#: What experts' gates compute, by all that a gate can depend on.
_known: dict[tuple, str | None] = {}


@torch.compiler.assume_constant_result
def _give_method(experts: type[nn.Module]) -> None:
    """Makes `_sonicmoe_activation` a method: tracing hands a module to no other function whose result is a
    constant."""
    if "_sonicmoe_activation" not in vars(experts):
        experts._sonicmoe_activation = _sonicmoe_activation


@torch.compiler.assume_constant_result
def _sonicmoe_activation(module: nn.Module) -> str | None:
    """The text of a module's activation; None for an unknown one."""
    key = _depends_on(module)
    if key not in _known:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            if module.has_gate:
                _known[key] = _gates.gated(module._apply_gate, not module.is_concatenated)
            else:
                _known[key] = _gates.plain(module.act_fn)
    return _known[key]


def _depends_on(module: nn.Module) -> tuple:
    act = getattr(module, "act_fn", None)
    parts = list(act.modules()) if isinstance(act, nn.Module) else [act]
    gate = getattr(module._apply_gate, "__func__", module._apply_gate)
    return gate, module.has_gate, module.is_concatenated, *map(_settings, [module, *parts])


def _settings(part: object) -> tuple:
    """The class and the settings of a module, the function itself of a function."""
    if not isinstance(part, nn.Module):
        return (part,)
    settings = (
        (name, value)
        for name, value in vars(part).items()
        if isinstance(value, bool | int | float | str) or callable(value)
    )
    return type(part), *settings


def _unknown(module: nn.Module) -> str:
    name = type(module).__name__
    source = f"{name}._apply_gate" if module.has_gate else f"{name}.act_fn"
    return (
        f"{source}: got a function that is none of ours, allowed: {allowed_activations()}; "
        "set_experts_implementation('grouped_mm') takes any"
    )
