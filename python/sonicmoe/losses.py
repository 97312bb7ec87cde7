"""Losses on a router's logits that keep the experts in balance, and what goes with them.

Symbols: T tokens, B sequences of S tokens, E experts, K experts a token. Logits are fp32, bf16 or
fp16 (fp16 on CUDA alone) and the only argument that gets a gradient; losses are fp32 scalars.
Counts are int32 or int64.

`score` makes a token's shares q (E) of its logits z: p / sum(p), where p is `"softmax"` of z,
`"sigmoid"` of z, or `"sqrt_softplus"`, sqrt(log(1 + e^z)) (DeepSeek-V4). A token whose p are all
zero has no shares.

`padding_mask` says which tokens count: True, or an integer other than 0. None: all of them. Logits
of other tokens reach no result, and their gradient is zero. A mean over nothing is 0.

What an argument may not be raises TypeError or ValueError, as `argument: got value, allowed:
values`. Values of logits are not checked. `reference_losses.py` has the same in plain PyTorch.
"""

import math
import numbers
from collections.abc import Mapping

import torch

from . import _check, _ops
from .router import SCORES, fp32


def switch_loss(
    logits: torch.Tensor,
    counts: torch.Tensor,
    *,
    score: str = "softmax",
    padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The load-balancing loss E * sum_e (P_e / sum P)(f_e / sum f), an fp32 scalar.

    logits (T, E); P (E) sums the shares q over the tokens that count. `counts` (E) are f, how often
    these tokens chose each expert (:func:`count_choices`), without gradient. padding_mask (T).
    Balanced experts give 1, and 0 comes back where P or f are all zero.

    Fedus et al., Switch Transformers, 2021 (arXiv:2101.03961), equations 4 to 6.
    """
    tokens, experts = _sizes(logits, 2, "(T, E)")
    _score(score)
    _counts(counts, logits, (experts,), "(E)")
    mask = _mask(padding_mask, logits.device, (tokens,), "(T)")
    return _aux_loss(logits, counts, "balance", score, mask)


def unchecked_switch_loss(
    logits: torch.Tensor, counts: torch.Tensor, *, score: str, padding_mask: torch.Tensor | None
) -> torch.Tensor:
    """:func:`switch_loss` of what a layer has made and checked."""
    return _aux_loss(logits, counts, "balance", score, _as_uint8(padding_mask))


def sequence_balance_loss(
    logits: torch.Tensor,
    counts: torch.Tensor,
    *,
    score: str = "sigmoid",
    padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mean over sequences of :func:`switch_loss` of each, an fp32 scalar.

    logits (B, S, E), counts (B, E), padding_mask (B, S). Where P or f of a sequence are all zero,
    for it is padding alone, the mean leaves it out.

    DeepSeek-AI, DeepSeek-V3, 2024 (arXiv:2412.19437), equations 17 to 20, before the factor alpha:
    f there is E / (K S) times the counts and P the mean share, whose products add up to the same.
    """
    sequences, length, experts = _sizes(logits, 3, "(B, S, E)")
    _score(score)
    _counts(counts, logits, (sequences, experts), "(B, E)")
    mask = _mask(padding_mask, logits.device, (sequences, length), "(B, S)")
    if sequences * length == 0:  # nothing, which any one sequence without tokens is too
        counts = counts.new_zeros(1, experts)
    return _aux_loss(logits.flatten(0, 1), counts, "balance", score, mask)


def z_loss(logits: torch.Tensor, *, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over tokens of logsumexp(z)^2, an fp32 scalar.

    logits (..., E); padding_mask has the shape of the logits without E.

    Zoph et al., ST-MoE, 2022 (arXiv:2202.08906), equation 5.
    """
    *shape, experts = _sizes(logits, None, "(..., E)")
    mask = _mask(padding_mask, logits.device, tuple(shape), "(...)")
    return _aux_loss(logits.reshape(math.prod(shape), experts), None, "z", "softmax", mask)


def count_choices(
    ids: torch.Tensor,
    num_experts: int,
    *,
    padding_mask: torch.Tensor | None = None,
    per_sequence: bool = False,
) -> torch.Tensor:
    """How often tokens that count chose each expert: (E) int32, or (B, E) with `per_sequence`.

    ids (T, K) or, which `per_sequence` needs, (B, S, K), int32 or int64. Those below 0 or from E on
    are sentinels and not counted. Duplicates count each time. padding_mask (T), or (B, S).
    """
    _check.ids("ids", ids)
    _check.integer("num_experts", num_experts)
    if not 1 <= num_experts <= 2**16:
        raise ValueError(f"num_experts: got {num_experts}, allowed: 1 to {2**16}")
    allowed = "(B, S, K) with per_sequence" if per_sequence else "(T, K) or (B, S, K)"
    if ids.dim() != 3 and (per_sequence or ids.dim() != 2):
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, allowed: {allowed}")
    shape = tuple(ids.shape[:-1])
    mask = _mask(padding_mask, ids.device, shape, "(B, S)" if ids.dim() == 3 else "(T)")
    counted = (ids >= 0) & (ids < num_experts)
    if mask is not None:
        counted = counted & mask.view(*shape, 1).bool()
    sequences = ids.shape[0] if per_sequence else 1
    # One more expert takes what is not counted.
    cells = torch.where(counted, ids, num_experts).long()
    if per_sequence:
        first = torch.arange(sequences, device=ids.device) * (num_experts + 1)
        cells = cells + first.view(-1, 1, 1)
    counts = torch.zeros(sequences * (num_experts + 1), dtype=torch.int32, device=ids.device)
    cells = cells.reshape(-1)
    counts = counts.scatter_add(0, cells, counts.new_ones(1).expand(cells.shape))
    counts = counts.view(sequences, num_experts + 1)[:, :num_experts]
    return counts.contiguous() if per_sequence else counts[0]


@torch.no_grad()
def update_selection_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float) -> None:
    """bias += rate * sign(mean(counts) - counts), in place and without gradient.

    bias (E) fp32; counts (E), of a step's tokens on all ranks, for the caller to add up; rate a
    finite number in fp32, not negative. An expert with the mean count keeps its bias.

    Wang et al., Auxiliary-Loss-Free Load Balancing, 2024 (arXiv:2408.15664), algorithm 1.
    """
    _check.tensors(bias=bias)
    if bias.dtype != torch.float32:
        raise TypeError(f"bias: got {bias.dtype}, allowed: torch.float32")
    if bias.dim() != 1:
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, allowed: (E)")
    _counts(counts, bias, tuple(bias.shape), "(E)", "bias")
    rate = fp32("rate", rate, "finite numbers from 0 on", lambda value: value >= 0)
    counts = counts.long()
    # Times E, which changes no sign: in integers the comparison with the mean is exact.
    sign = torch.sign(counts.sum() - counts.numel() * counts)
    bias.add_(sign.to(bias.dtype), alpha=rate)


def _aux_loss(
    logits: torch.Tensor,
    counts: torch.Tensor | None,
    loss: str,
    score: str,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    _ops.require()
    counts = None if counts is None else _in_32_bits(counts)
    mask = None if mask is None else mask.reshape(-1)
    return _ops.aux_loss(logits.contiguous(), counts, loss, score, mask)


def _in_32_bits(counts: torch.Tensor) -> torch.Tensor:
    """Counts (..., E), whose ratios alone matter, as int32: below 2^31 by a common divisor."""
    if counts.dtype == torch.int64 and counts.numel() > 0:
        counts = counts // (counts.amax(dim=-1, keepdim=True) // 2**31 + 1).clamp(min=1)
    return counts.int().contiguous()


def _sizes(logits: torch.Tensor, dims: int | None, words: str) -> torch.Size:
    """The shape of logits that the library may read; `dims` None: one dimension or more."""
    _check.tensors(logits=logits)
    _check.alike(logits, "logits")
    if (logits.dim() == 0) if dims is None else (logits.dim() != dims):
        raise ValueError(f"logits: got shape {tuple(logits.shape)}, allowed: {words}")
    return logits.shape


def _score(score: str) -> None:
    if score not in SCORES:
        kind = ValueError if isinstance(score, str) else TypeError
        raise kind(f"score: got {score!r}, allowed: {', '.join(map(repr, SCORES))}")


def _counts(
    counts: torch.Tensor,
    like: torch.Tensor,
    shape: tuple[int, ...],
    words: str,
    name_of_like: str = "logits",
) -> None:
    _check.ids("counts", counts)
    _check.on_device("counts", counts, like.device, name_of_like)
    _check.shaped("counts", counts, shape, words)


def _mask(
    mask: torch.Tensor | None, device: torch.device, shape: tuple[int, ...], words: str
) -> torch.Tensor | None:
    """The checked mask as uint8."""
    if mask is not None:
        _check.padding_mask(mask, device, "the other argument")
        _check.shaped("padding_mask", mask, shape, words)
    return _as_uint8(mask)


def _as_uint8(mask: torch.Tensor | None) -> torch.Tensor | None:
    """0 where a token does not count, else 1."""
    return None if mask is None else mask.ne(0).to(torch.uint8)


#: The names of losses that MoE adds up.
LOSSES = ("switch", "z", "sequence_balance")


def checked_losses(losses: Mapping[str, float] | None) -> dict[str, float]:
    """MoE's weights of losses by name; the switch loss alone for None."""
    if losses is None:
        return {"switch": 1.0}
    allowed = f"a dict of weights by name: {', '.join(map(repr, LOSSES))}"
    if not isinstance(losses, Mapping):
        raise TypeError(f"losses: got {losses!r}, allowed: {allowed}")
    for name, weight in losses.items():
        if name not in LOSSES:
            raise ValueError(f"losses: got {name!r}, allowed: {allowed}")
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
            raise TypeError(f"losses[{name!r}]: got {weight!r}, allowed: a number")
        try:
            finite = math.isfinite(weight)
        except OverflowError:  # an integer beyond floats
            finite = False
        if not finite:
            raise ValueError(f"losses[{name!r}]: got {weight!r}, allowed: finite numbers")
    return {name: float(weight) for name, weight in losses.items()}
