"""How tokens reach experts that other ranks hold, and the layer as a function."""

import numbers

import torch
import torch.distributed as dist

from .. import _check, _layer, functional
from .._autocast import autocast
from ..enums import ActivationType
from ._all_to_all import all_to_all_experts
from ._collectives import Group, group_of
from ._gather import gather_experts

TRANSPORTS = ("auto", "gather", "all_to_all")


class Transport:
    """The options of a transport; each rank of a group has the same ones.

    `name`: "gather", "all_to_all", or "auto", which is gather where the group has at most K ranks.

    - `peer_copies` lets copy engines exchange in place of NCCL's kernels. It needs GPUs of one
      machine that reach each other's memory (NVLink), and all calls on one CUDA stream. Compiled
      gather ignores it.
    - `max_tokens`, of gather and of peer copies: each rank pads its tokens to this number. Without
      it all ranks bring equally many. Gather checks that on the CPU, and on CUDA in a group's first
      call alone, for the host waits.
    - `keep_gathered`, of gather: keeps everybody's x for backward instead of gathering it again.
    """

    def __init__(
        self,
        name: str = "auto",
        *,
        max_tokens: int | None = None,
        keep_gathered: bool = False,
        peer_copies: bool = False,
    ) -> None:
        if name not in TRANSPORTS:
            kind = ValueError if isinstance(name, str) else TypeError
            raise kind(f"transport: got {name!r}, allowed: {', '.join(map(repr, TRANSPORTS))}")
        if max_tokens is not None:
            if isinstance(max_tokens, bool) or not isinstance(max_tokens, numbers.Integral):
                raise TypeError(f"max_tokens: got {max_tokens!r}, allowed: an int, None")
            if max_tokens < 1:
                raise ValueError(f"max_tokens: got {max_tokens}, allowed: 1 and more")
        _check.flag("keep_gathered", keep_gathered)
        _check.flag("peer_copies", peer_copies)
        if keep_gathered and name == "all_to_all":
            raise ValueError("keep_gathered: got True, allowed: False with 'all_to_all'")
        if max_tokens is not None and name == "all_to_all" and not peer_copies:
            raise ValueError(
                f"max_tokens: got {max_tokens}, allowed: None with 'all_to_all' without peer_copies"
            )
        self.name, self.max_tokens = name, max_tokens
        self.keep_gathered, self.peer_copies = keep_gathered, peer_copies

    def gathers(self, ranks: int, top_k: int) -> bool:
        return self.name == "gather" or (self.name == "auto" and ranks <= top_k)

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        scores: torch.Tensor,
        experts: _layer.ExpertArgs,
        group: Group,
    ) -> torch.Tensor:
        """o (T, d) of ids (T, K) among all experts and scores (T, K); `experts`: the ExpertArgs of
        this rank's."""
        (x,) = autocast(x)
        ids, scores = _layer.int32(ids), scores.float().contiguous()
        given, of_both = (x, ids, scores, experts, group), (self.max_tokens, self.peer_copies)
        if self.gathers(group.size, ids.shape[1]):
            return gather_experts(*given, self.keep_gathered, *of_both)
        return all_to_all_experts(*given, *of_both)

    def __repr__(self) -> str:
        return (
            f"Transport({self.name!r}, max_tokens={self.max_tokens}, "
            f"keep_gathered={self.keep_gathered}, peer_copies={self.peer_copies})"
        )


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    transport: Transport | str = "auto",
    activation: ActivationType | str = ActivationType.SWIGLU,
    layout: str | None = None,
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`sonicmoe.experts` of experts that are spread over a group: output (T, d).

    Rank r of `group`, a process group, holds experts r e to (r+1) e - 1 with e = E / ranks: weights
    and biases are theirs. x (T, d), `ids` (T, K) among all E experts and `weights` (T, K) are this
    rank's tokens. Ids below 0 or from E on are sentinels; a token has each expert once at most. All
    ranks call forward and backward together, and what requires a gradient is alike on each. Unlike
    that function it returns no counts.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "group: got no process group, allowed: one of torch.distributed, after "
            "init_process_group"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: got {type(group).__name__}, allowed: a ProcessGroup of torch.distributed that "
            "this rank belongs to"
        )
    if _check.is_dtensor(x):
        raise TypeError("x: got a DTensor, allowed: this rank's tokens, x.to_local()")
    of_experts = functional._expert_args(
        x, activation, layout, w1, b1, w2, b2, None, None, w1_up, b1_up, None, "none"
    )
    _check.ids("ids", ids)
    _check.scores("weights", weights)
    for name, tensor in (("ids", ids), ("weights", weights)):
        _check.on_device(name, tensor, x.device)
        shape = tuple(tensor.shape)
        if len(shape) != 2 or shape[0] != x.shape[0] or shape[1] == 0:
            raise ValueError(
                f"{name}: got shape {shape}, allowed: (T, K), T = {x.shape[0]}, K at least 1"
            )
    if weights.shape != ids.shape:
        raise ValueError(
            f"weights: got shape {tuple(weights.shape)}, allowed: {tuple(ids.shape)}, that of ids"
        )
    if not isinstance(transport, Transport):
        transport = Transport(transport)
    return transport.run(x, ids, weights, of_experts, group_of(group))
