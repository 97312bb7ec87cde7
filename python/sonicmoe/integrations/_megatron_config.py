"""What a TransformerConfig of Megatron asks of the experts, or why they refuse it."""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core import activations
from megatron.core.fusions import fused_bias_geglu
from megatron.core.transformer.transformer_config import TransformerConfig

from .. import _check

#: Activation functions by our names; the gate's in the first column, without a gate in the second.
_NAMES: list[tuple[Callable, str | None, str | None]] = [
    (F.silu, "swiglu", "silu"),
    (F.gelu, "geglu", "gelu"),
    (activations.fast_gelu, "geglu_tanh", "gelu_tanh"),
    (F.relu, "reglu", "relu"),
    (activations.squared_relu, None, "relu_sq"),
    (activations.quick_gelu, "quick_geglu", None),
    (fused_bias_geglu.quick_gelu, "quick_geglu", None),
]


def _name(function: Callable, gated: bool) -> str | None:
    if isinstance(function, functools.partial) and function.func is F.gelu and not function.args:
        tanh = {"none": False, "tanh": True}.get(function.keywords.get("approximate", "none"))
        if tanh is not None and not function.keywords.keys() - {"approximate"}:
            function = activations.fast_gelu if tanh else F.gelu
    for known, with_gate, without in _NAMES:
        if known is function:
            return with_gate if gated else without
    return None


def activation_of(config: TransformerConfig) -> str:
    """The activation with its parameters."""
    gated, clamp = config.gated_linear_unit, config.activation_func_clamp_value
    offset, function = config.glu_linear_offset, config.activation_func
    name = _name(function, gated)
    if name is None:
        raise ValueError(
            f"config.activation_func: got {_described(function)} with gated_linear_unit={gated}, "
            "allowed: silu, gelu, fast_gelu, relu with and without a gate, quick_gelu with one, "
            "squared_relu without"
        )
    if config.bias_activation_fusion and name not in ("swiglu", "quick_geglu"):
        raise ValueError(
            f"config.bias_activation_fusion: got True with {_described(function)}, allowed: False; "
            "Megatron fuses swiglu and quick_geglu alone, and others would be approximated"
        )
    if config.bias_activation_fusion and name == "swiglu" and (clamp is not None or offset):
        raise ValueError(
            "config.bias_activation_fusion: got True, allowed: False with silu and "
            f"activation_func_clamp_value={clamp}, glu_linear_offset={offset}, which Megatron's "
            "fused kernel ignores"
        )
    if clamp is None and offset == 0:
        return name
    alpha = {"swiglu": 1.0, "quick_geglu": 1.702}.get(name)
    if alpha is not None and offset == 1:
        text = f"swiglu_oai(alpha={alpha},limit={float(math.inf if clamp is None else clamp)})"
    elif name == "swiglu" and offset == 0:
        text = f"swiglu(limit={float(clamp)})"
    else:
        raise ValueError(
            f"config.activation_func_clamp_value: got {clamp} with glu_linear_offset={offset} and "
            f"{_described(function)}, allowed: None and 0, or silu with an offset of 0 or 1, or "
            "quick_gelu with an offset of 1"
        )
    return _check.activation("config.activation_func_clamp_value", text)


def _described(function: Callable) -> str:
    return getattr(function, "__name__", repr(function))


def check_config(config: TransformerConfig, tensor_parallel: int) -> None:
    """Refuses by name what the experts would not do."""
    why = "for the experts compute in bf16, fp16 or fp32"
    _refuse(config, "fp8", None, why)
    _refuse(config, "fp4", None, why)
    _refuse(config, "use_kitchen", False, why)
    _refuse(config, "use_te_activation_func", False, "for they compute the activation themselves")
    _refuse(config, "activation_func_fp8_input_store", False, "for they keep H as it is")
    _refuse(config, "delay_wgrad_compute", False, "for their weight gradients are made in backward")
    if config.fine_grained_activation_offloading:
        kept = sorted({"expert_fc1", "moe_act"} & set(config.offload_modules))
        if kept:
            raise ValueError(
                f"config.offload_modules: got {', '.join(map(repr, kept))}, allowed: others, for "
                "the experts keep rows and H on their device"
            )
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        raise ValueError(
            f"config.moe_router_topk: got {config.moe_router_topk}, allowed: 1 with "
            "moe_apply_probs_on_input"
        )
    if config.add_bias_linear and tensor_parallel > 1:
        raise ValueError(
            "config.add_bias_linear: got True, allowed: False with expert tensor parallelism, where "
            "every rank would add the bias of fc2"
        )
    if config.params_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"config.params_dtype: got {config.params_dtype}, allowed: torch.float32, "
            "torch.bfloat16, torch.float16"
        )


def _refuse(config: TransformerConfig, name: str, allowed: object, why: str) -> None:
    value = getattr(config, name, allowed)
    if value and value != allowed:
        raise ValueError(f"config.{name}: got {value!r}, allowed: {allowed!r}, {why}")
