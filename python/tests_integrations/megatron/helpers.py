"""A MoE layer of Megatron with its own experts, and with ours."""

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from sonicmoe.integrations.megatron import replace_experts

S, B, D, N, E, K = 12, 2, 32, 40, 8, 2
GROUPS = ["tp", "cp", "ep", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp", "dp_cp", "dp"]


def make_config(**options):
    defaults = dict(
        num_layers=2, hidden_size=D, num_attention_heads=4, num_moe_experts=E, moe_router_topk=K,
        moe_ffn_hidden_size=N, ffn_hidden_size=N, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, moe_token_dispatcher_type="allgather", use_cpu_initialization=True,
        moe_router_load_balancing_type="none", init_method_std=0.2,
    )  # fmt: skip
    return TransformerConfig(**defaults | options)


def make_layer(config, ours, **options):
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    if ours:
        replace_experts(spec, **options)
    layer = build_module(spec, config=config)
    for expert in getattr(layer.experts, "local_experts", []):
        # It adds the bias in place to a view, which autograd refuses.
        expert.linear_fc2.register_forward_hook(lambda _, inputs, out: (out[0].clone(), out[1]))
    return layer


def own_state(layer):
    """The state of a layer without extra states, which hold nothing here."""
    return {k: v for k, v in layer.state_dict().items() if "_extra_state" not in k}


def make_pair(ours=None, weight_per_expert=False, **options):
    """A layer with Megatron's experts and one with ours, of the same weights. `ours`: options of
    the latter's configuration."""
    stock = make_layer(make_config(**options), False)
    config = make_config(**options | (ours or {}))
    mine = make_layer(config, True, weight_per_expert=weight_per_expert)
    mine.load_state_dict(own_state(stock))
    return stock, mine


def gather(stock, kind, linear):
    """A gradient or tensor of all of Megatron's experts, as (E, ...)."""
    experts = stock.experts.local_experts
    return [kind(getattr(e, linear).weight) for e in experts]


def groups():
    return ProcessGroupCollection.use_mpu_process_groups()


def hidden_states(dtype=torch.float32, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(S, B, D, generator=generator).to(dtype)
