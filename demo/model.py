"""A small byte-level language model: attention and Mixture-of-Experts blocks, nothing else."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from sonicmoe import MoE
from sonicmoe.enums import ActivationType

VOCABULARY = 256  # bytes


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, hidden, heads, moe):
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.moe_norm = nn.LayerNorm(hidden)
        self.moe = moe

    def forward(self, x, run_moe):
        x = x + self.attention(self.attention_norm(x))
        y, aux_loss = run_moe(self.moe, self.moe_norm(x))
        return x + y, aux_loss


class ByteModel(nn.Module):
    def __init__(self, settings, moe_options):
        """`moe_options` are keyword arguments of every MoE block beyond its sizes."""
        super().__init__()
        s = settings
        self.bytes = nn.Embedding(VOCABULARY, s.hidden)
        self.positions = nn.Embedding(s.context, s.hidden)
        self.blocks = nn.ModuleList(
            Block(
                s.hidden,
                s.heads,
                MoE(
                    num_experts=s.experts,
                    num_experts_per_tok=s.top_k,
                    hidden_size=s.hidden,
                    intermediate_size=s.intermediate,
                    activation_function=ActivationType.SWIGLU,
                    add_bias=False,
                    std=s.std,
                    **moe_options,
                ),
            )
            for _ in range(s.layers)
        )
        self.norm = nn.LayerNorm(s.hidden)
        self.head = nn.Linear(s.hidden, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=s.std)

    def forward(self, tokens, run_moe):
        """tokens int64 (B, L) -> logits (B, L, 256) and the mean auxiliary loss of the blocks.

        `run_moe(moe, x) -> (y, aux_loss)` decides how a MoE block is computed: the model is the
        same for every backend. Products are in bf16 on a GPU, in fp32 on the CPU.
        """
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
            aux_losses = []
            for block in self.blocks:
                x, aux_loss = block(x, run_moe)
                aux_losses.append(aux_loss)
            return self.head(self.norm(x)).float(), torch.stack(aux_losses).mean()
