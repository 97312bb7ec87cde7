"""Every class of experts that transformers marks, and small configurations of its model."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

SMALL = {
    "hidden_size": 32,
    "moe_hidden_size": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "n_groups": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def marked() -> Iterator[tuple[str, str]]:
    """Module and name of each class under the decorator `use_experts_implementation`."""
    root = Path(transformers.__file__).parent / "models"
    for path in sorted(root.glob("*/modeling_*.py")):
        text = path.read_text()
        if "@use_experts_implementation" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and any(
                "use_experts_implementation" in ast.unparse(mark) for mark in node.decorator_list
            ):
                yield f"transformers.models.{path.parent.name}.{path.stem}", node.name


def experts(module: str, name: str) -> torch.nn.Module:
    """The class's experts, 8 of them with 32 and 16 wide projections."""
    source = importlib.import_module(module)
    kind = getattr(source, name)
    failures = []
    for config_class in _configs(source, kind):
        try:
            config = config_class()
            for key, value in _small(config).items():
                setattr(config, key, value)
            config._experts_implementation = "eager"
            sizes = [16] if "intermediate_size" in inspect.signature(kind).parameters else []
            made = kind(config, *sizes)
            if made.down_proj.shape[0] == 8:
                return made
        except Exception as error:  # a configuration of another part of the model
            failures.append(f"{config_class.__name__}: {error!r}")
    raise AssertionError(f"{name}: no configuration fits: {failures}")


def _small(config: PreTrainedConfig) -> dict[str, int | list[int]]:
    """What SMALL says of this configuration's settings."""
    found = {}
    for key, value in SMALL.items():
        try:
            old = getattr(config, key)
        except Exception:  # none, or one that differs from layer to layer
            continue
        found[key] = [value] * len(old) if isinstance(old, list) else value
    return found


def _configs(source, kind) -> list[type]:
    """The configuration that the constructor names, then all of the module."""
    annotation = inspect.signature(kind.__init__).parameters["config"].annotation
    configs = [
        value
        for value in vars(source).values()
        if inspect.isclass(value) and issubclass(value, PreTrainedConfig)
    ]
    return sorted(configs, key=lambda value: value is not annotation)


def whole_model(module: str, name: str) -> PreTrainedModel:
    """A small language model with those experts."""
    source = importlib.import_module(module)
    kind = getattr(source, name)
    failures = []
    for config_class in _configs(source, kind):
        for model_class in _models(source, config_class):
            try:
                config = config_class(**_small(config_class()), use_cache=False)
                config._experts_implementation = "eager"
                with torch.device("meta"):  # some configurations keep a part of full size
                    shape = model_class(config)
                if sum(p.numel() for p in shape.parameters()) > 4e6:
                    continue
                model = model_class(config).float()
                if any(isinstance(part, kind) for part in model.modules()):
                    model(input_ids=torch.arange(3, 15)[None])
                    return model
            except Exception as error:  # a part of the model that SMALL does not fit
                failures.append(f"{model_class.__name__}: {error!r}")
    raise AssertionError(f"{name}: no model can be made: {failures}")


def _models(source, config_class: type) -> list[type]:
    found = [
        value
        for value in vars(source).values()
        if inspect.isclass(value)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == source.__name__
        and value.config_class in (config_class, None)
        and value.__name__.endswith(("ForCausalLM", "Model"))
    ]
    return sorted(found, key=lambda value: not value.__name__.endswith("ForCausalLM"))
