"""A decoder-only transformer whose feed-forward parts are experts."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sonicmoe import MoE

from .settings import Settings

STD = 0.02  # of all weights at the start


class Attention(nn.Module):
    """Causal, with rotary positions."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.heads = s.heads
        self.qkv = nn.Linear(s.hidden, 3 * s.hidden, bias=False)
        self.out = nn.Linear(s.hidden, s.hidden, bias=False)
        half = s.hidden // s.heads // 2
        angles = torch.outer(torch.arange(s.context), 10000.0 ** (-torch.arange(half) / half))
        # Buffers: mixed precision casts what a module is called with, and parameters.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, -1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        qk, v = qkv.split((2, 1))
        q, k = self._rotated(qk)
        mixed = F.scaled_dot_product_attention(q, k, v[0], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(s.hidden, eps=1e-6)
        self.attention = Attention(s)
        self.moe_norm = nn.RMSNorm(s.hidden, eps=1e-6)
        self.moe = MoE(
            num_experts=s.experts,
            num_experts_per_tok=s.top_k,
            hidden_size=s.hidden,
            intermediate_size=s.intermediate,
            activation_function="swiglu",
            add_bias=False,
            std=STD,
            routing=s.routing,
            rounding=s.rounding,
            tile=s.tile,
        )
        self.again = s.activation_checkpointing

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.again and self.training:
            return checkpoint(self._run, x, use_reentrant=False)
        return self._run(x)

    def _run(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, aux_loss = self.moe(self.moe_norm(x))
        return x + y, aux_loss


class LanguageModel(nn.Module):
    """tokens int64 (B, L) -> logits (B, L, V) and the mean switch loss of the blocks."""

    def __init__(self, s: Settings, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, s.hidden)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden, eps=1e-6)
        self.head = nn.Linear(s.hidden, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=STD)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, aux_losses = self.embedding(tokens), []
        for block in self.blocks:
            x, aux_loss = block(x)
            aux_losses.append(aux_loss)
        return self.head(self.norm(x)), torch.stack(aux_losses).mean()
