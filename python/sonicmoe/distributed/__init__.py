"""Experts on several GPUs: torch.distributed carries, the library computes (docs/distributed.md).

`import sonicmoe` does not import this package.
"""

from ._fsdp import clip_grad_norm_, fully_shard_experts
from ._style import ExpertParallel
from ._transport import Transport, experts

__all__ = ["ExpertParallel", "Transport", "clip_grad_norm_", "experts", "fully_shard_experts"]
