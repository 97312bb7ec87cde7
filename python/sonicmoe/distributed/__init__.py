"""Experts on several GPUs: torch.distributed carries, the library computes (docs/distributed.md).

`import sonicmoe` does not import this package.
"""

from ._style import ExpertParallel
from ._transport import Transport, experts

__all__ = ["ExpertParallel", "Transport", "experts"]
