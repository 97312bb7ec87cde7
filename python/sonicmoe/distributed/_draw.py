"""Random numbers of sharded weights: each rank keeps its part of what one rank would draw.

Ranks with the same seed then hold parts of one weight. On the CPU it is the weight that a plain
module draws.
"""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def _own(weight: DTensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole. Expert parallelism and FSDP2 make blocks."""
    shape, offset = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    return tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))


def draw_experts_(weight: DTensor, draw: Callable[[torch.Tensor], object]) -> None:
    """Fills a weight (E, out, in), for which `draw` fills one expert (out, in) after the other.

    A plain tensor gets the same numbers on the CPU, for out * in is a multiple of 16, the block
    that torch draws at a time.
    """
    (experts, *rest), own = _own(weight), weight.to_local()
    drawn = torch.empty(weight.shape[1:], dtype=own.dtype, device=own.device)
    for expert in range(weight.shape[0]):
        draw(drawn)
        if experts.start <= expert < experts.stop:
            own[expert - experts.start].copy_(drawn[tuple(rest)])


def draw_(weight: DTensor, draw: Callable[[torch.Tensor], object]) -> None:
    """Fills a small weight: each rank holds all of it for a while."""
    own = weight.to_local()
    drawn = torch.empty(weight.shape, dtype=own.dtype, device=own.device)
    draw(drawn)
    own.copy_(drawn[_own(weight)])
