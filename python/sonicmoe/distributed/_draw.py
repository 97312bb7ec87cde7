"""Random numbers of sharded experts."""

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def normal_(weight: DTensor, std: float) -> None:
    """Fills this rank's part of a weight (E, out, in) with its part of what all experts draw.

    Every rank draws all of them, one after the other, from its default generator: ranks with the
    same seed fill different experts with different numbers. On the CPU these are the numbers that
    a plain tensor gets, for out * in is a multiple of 16, the block that torch draws at a time.
    """
    mesh, placements, own = weight.device_mesh, weight.placements, weight.to_local()
    if mesh.ndim == 1 and placements[0] == Shard(0) and weight.shape[0] % mesh.size() == 0:
        drawn = torch.empty(weight.shape[1:], dtype=own.dtype, device=own.device)
        first = mesh.get_local_rank() * own.shape[0]
        for expert in range(weight.shape[0]):
            drawn.normal_(0.0, std)
            if first <= expert < first + own.shape[0]:
                own[expert - first].copy_(drawn)
        return
    # Another data-parallel wrapper has sharded the parts again: the whole tensor for a while.
    drawn = torch.empty(weight.shape, dtype=own.dtype, device=own.device)
    for expert in drawn:
        expert.normal_(0.0, std)
    own.copy_(distribute_tensor(drawn, mesh, placements, src_data_rank=None).to_local())
