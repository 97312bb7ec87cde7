"""The losses of losses.py in plain PyTorch operations, differentiated by autograd.

What the operators are tested against, on any device and in any floating type. Arguments are the
same; they are not checked.
"""

import torch

from .reference_routing import all_scores, wide_type


def _shares(logits: torch.Tensor, score: str) -> torch.Tensor:
    """p / sum(p), or zeros where all p are 0."""
    logits = logits.to(wide_type(logits.dtype))
    p = all_scores(logits, score)
    if score == "softmax":
        return p
    total = p.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, p / torch.where(total > 0, total, 1), 0)


def _kept(logits: torch.Tensor, padding_mask: torch.Tensor | None) -> torch.Tensor:
    """Which tokens count, as a column."""
    if padding_mask is None:
        return logits.new_ones(*logits.shape[:-1], 1, dtype=torch.bool)
    return padding_mask.bool().unsqueeze(-1)


def switch_loss(
    logits: torch.Tensor,
    counts: torch.Tensor,
    *,
    score: str = "softmax",
    padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    mask = None if padding_mask is None else padding_mask.unsqueeze(0)
    return sequence_balance_loss(
        logits.unsqueeze(0), counts.unsqueeze(0), score=score, padding_mask=mask
    )


def sequence_balance_loss(
    logits: torch.Tensor,
    counts: torch.Tensor,
    *,
    score: str = "sigmoid",
    padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    kept = _kept(logits, padding_mask)
    shares = torch.where(kept, _shares(logits.masked_fill(~kept, 0), score), 0).sum(dim=1)
    frequency = counts.to(shares.dtype)
    totals = shares.sum(dim=-1) * frequency.sum(dim=-1)
    counted = totals != 0
    terms = logits.shape[-1] * (shares * frequency).sum(dim=-1) / torch.where(counted, totals, 1)
    return torch.where(counted, terms, 0).sum() / counted.sum().clamp(min=1)


def z_loss(logits: torch.Tensor, *, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
    kept = _kept(logits, padding_mask)
    logits = logits.to(wide_type(logits.dtype)).masked_fill(~kept, 0)
    squares = torch.where(kept.squeeze(-1), logits.logsumexp(dim=-1).square(), 0)
    return squares.sum() / kept.sum().clamp(min=1)


def count_choices(
    ids: torch.Tensor,
    num_experts: int,
    *,
    padding_mask: torch.Tensor | None = None,
    per_sequence: bool = False,
) -> torch.Tensor:
    chosen = ids.unsqueeze(-1) == torch.arange(num_experts, device=ids.device)
    chosen = chosen.sum(dim=-2) * _kept(ids, padding_mask)
    return chosen.sum(dim=tuple(range(int(per_sequence), chosen.dim() - 1))).int()


def update_selection_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float) -> None:
    counts = counts.double()
    with torch.no_grad():
        bias += rate * torch.sign(counts.mean() - counts).to(bias.dtype)
