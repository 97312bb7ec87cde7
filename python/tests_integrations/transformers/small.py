"""Small models, one of each kind of experts."""

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

VOCABULARY = 96
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def qwen3(**options) -> PreTrainedModel:
    sizes = _SIZES | {"num_experts": 8, "moe_intermediate_size": 16, "intermediate_size": 16}
    return _make(Qwen3MoeConfig(**(sizes | options)))


def gpt_oss(**options) -> PreTrainedModel:
    sizes = _SIZES | {"num_local_experts": 8, "intermediate_size": 16}
    return _make(GptOssConfig(**(sizes | options)))


def _make(config) -> PreTrainedModel:
    torch.manual_seed(0)
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tokens(rows: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def step(model, implementation: str, call=None):
    """The loss and the gradients of one step."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    ids = tokens()
    loss = (model if call is None else call)(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same(got, wanted, tolerance: float) -> None:
    assert abs(got[0] - wanted[0]) <= tolerance * abs(wanted[0])
    assert got[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        error = (got[1][name] - gradient).norm()
        assert error <= tolerance * gradient.norm(), (name, error / gradient.norm())
