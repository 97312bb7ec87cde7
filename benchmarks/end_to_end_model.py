"""The stacks of end_to_end.py: decoders under FSDP2 that differ in their experts alone."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch_experts import compiled, experts

from sonicmoe import MoE

AGAIN: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing draws
ROWS_OF_LOGITS = 2048  # at a time: those of a whole step would fill the device
ROOM = 72e9  # of the 85e9 bytes of an 80 GB card; CUDA, NCCL and fragments take their part


class Stack(NamedTuple):
    layers: int  # of the published model, or of one with as many weights
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head: int
    qk_norm: bool
    vocabulary: int
    context: int
    sequences: int  # of a rank in a step
    tile: int = 128  # of token rounding
    checkpoint: str = "block"  # or "attention": what backward computes again

    @property
    def tokens(self) -> int:
        return self.sequences * self.context

    @property
    def block(self) -> int:
        """Weights of a block."""
        attention = 2 * (self.heads + self.kv_heads) * self.head * self.hidden
        norms = 2 * self.hidden + 2 * self.head * self.qk_norm
        experts = 3 * self.experts * self.hidden * self.intermediate
        return attention + norms + self.experts * self.hidden + experts

    @property
    def weights(self) -> int:
        return self.layers * self.block + (2 * self.vocabulary + 1) * self.hidden

    @property
    def active(self) -> int:
        """Weights that multiply a token: K of the experts, and the head, but no embedding."""
        idle = 3 * (self.experts - self.top_k) * self.hidden * self.intermediate
        return self.layers * (self.block - idle) + (self.vocabulary + 1) * self.hidden

    @property
    def flops_of_token(self) -> int:
        """6 for an active weight; Q K^T and P V, forward and backward, over half of the context."""
        return 6 * self.active + 6 * self.layers * self.context * self.heads * self.head

    def bytes_of_rank(self, ranks: int) -> dict[str, int]:
        """What a rank holds, estimated. A block in backward is that of F.grouped_mm."""
        rows = self.tokens * self.top_k
        kept = 2 * self.tokens * self.hidden  # X of a block
        if self.checkpoint == "attention":
            kept = 2 * kept + 4 * rows * self.intermediate  # X of both halves, and our H
        return {
            # fp32 weights, gradients and two moments
            "states": 16 * self.weights // ranks,
            # bf16: gathered bytes and weights, this block's and the next one's, and gradients;
            # fp32: gradients to reduce, of two blocks
            "unsharded_blocks": 18 * self.block,
            # bf16: weights, gradients; fp32: gradients to reduce
            "unsharded_embedding_and_head": 16 * self.vocabulary * self.hidden,
            "kept_of_blocks": self.layers * kept,
            # X gathered, Y; H, A; gradients of all
            "a_block_in_backward": 2 * rows * (4 * self.hidden + 6 * self.intermediate),
            "logits": 12 * ROWS_OF_LOGITS * self.vocabulary,
        }

    def fitted(self, ranks: int) -> "Stack":
        """With as many layers as have room."""
        for layers in range(self.layers, 0, -1):
            made = self._replace(layers=layers)
            if sum(made.bytes_of_rank(ranks).values()) <= ROOM:
                return made
        raise ValueError(
            f"sequences: got {self.sequences}, allowed: as many as one layer has room for"
        )


STACKS = {
    "7B": Stack(44, 1536, 256, 128, 8, 12, 12, 128, False, 50304, 4096, 4),
    "Qwen3-30B-A3B": Stack(48, 2048, 768, 128, 8, 32, 4, 128, True, 151936, 4096, 4),
}
SMALL = {
    "7B": Stack(2, 64, 48, 8, 2, 4, 4, 16, False, 512, 32, 4, 8),
    "Qwen3-30B-A3B": Stack(2, 64, 48, 8, 2, 4, 2, 32, True, 512, 32, 4, 8),
}


@compiled
def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions, x (B, heads, L, head)."""
    a, b = x.float().chunk(2, -1)
    turns = 1e6 ** (-torch.arange(a.shape[-1], device=x.device) / a.shape[-1])
    angles = torch.arange(x.shape[-2], device=x.device).unsqueeze(1) * turns
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class GroupedMM(MoE):
    """MoE's parameters in plain PyTorch (torch_experts.py)."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        tokens = x.flatten(0, -2)
        logits, ids = F.linear(tokens, self.router.weight).float().topk(self.top_k)
        out = experts(tokens, ids, logits.softmax(-1), self.c_fc.weight, self.c_proj.weight)
        return out.view_as(x), None


#: Each makes the experts of a block. The last one shows how far the machine drifts.
VARIANTS: dict[str, Callable[..., MoE]] = {
    "ours": MoE,
    "grouped_mm": GroupedMM,
    "rounding": functools.partial(MoE, routing="token_rounding", rounding="nr"),
    "preact": functools.partial(MoE, recompute="preact"),
    "again": MoE,
}


class Attention(nn.Module):
    def __init__(self, s: Stack) -> None:
        super().__init__()
        self.heads, self.head = [s.heads, s.kv_heads, s.kv_heads], s.head
        self.qkv = nn.Linear(s.hidden, sum(self.heads) * s.head, bias=False)
        self.out = nn.Linear(s.heads * s.head, s.hidden, bias=False)
        make = functools.partial(nn.RMSNorm, s.head, eps=1e-6) if s.qk_norm else nn.Identity
        self.q_norm, self.k_norm = make(), make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head)).transpose(1, 2).split(self.heads, 1)
        q, k = rotated(self.q_norm(q)), rotated(self.k_norm(k))
        groups = {"enable_gqa": True} if self.heads[0] != self.heads[1] else {}
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, **groups)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, s: Stack, make: Callable[..., MoE]) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(s.hidden, eps=1e-6)
        self.attention = Attention(s)
        self.moe_norm = nn.RMSNorm(s.hidden, eps=1e-6)
        sizes = s.experts, s.top_k, s.hidden, s.intermediate
        self.moe = make(
            *sizes, "swiglu", False, 0.02, layout="concatenated", losses={}, tile=s.tile
        )
        self.again = s.checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again == "block":
            return checkpoint(lambda x: self._experts(self._attention(x)), x, **AGAIN)
        return self._experts(checkpoint(self._attention, x, **AGAIN))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.attention_norm(x))

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.moe_norm(x))[0]


class Decoder(nn.Module):
    """tokens and targets int64 (B, L) -> the mean cross entropy."""

    def __init__(self, s: Stack, make: Callable[..., MoE]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocabulary, s.hidden)
        self.blocks = nn.ModuleList(Block(s, make) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden, eps=1e-6)
        self.head = nn.Linear(s.hidden, s.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        parts = (t.flatten(0, 1).split(ROWS_OF_LOGITS) for t in (self.norm(x), targets))
        sums = [checkpoint(self._loss, *p, **AGAIN) for p in zip(*parts, strict=True)]
        return torch.stack(sums).sum() / targets.numel()

    def _loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum")


def sharded(s: Stack, make: Callable[..., MoE], mesh: DeviceMesh, device: torch.device) -> Decoder:
    """Over the ranks of `mesh`, each of which draws its own part: none ever holds all weights.

    Products keep the size of their input, and blocks add little to the embeddings: else all tokens
    of a sequence become alike, and choose the same experts.
    """
    with torch.device("meta"):
        model = Decoder(s, make)
    narrow = torch.bfloat16 if device.type == "cuda" else None
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(narrow, torch.float32)}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(mesh.get_local_rank())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = parameter.to_local()
            std = 1.0 if name.startswith("embedding") else own.shape[-1] ** -0.5
            if name.endswith(("attention.out.weight", "c_proj.weight")):
                std /= (2 * s.layers) ** 0.5
            _ = own.fill_(1) if parameter.ndim == 1 else own.normal_(0, std, generator=generator)
        for block in model.blocks:
            block.moe.tokens_per_expert.zero_()
    return model
