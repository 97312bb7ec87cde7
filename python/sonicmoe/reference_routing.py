"""Top-K and token rounding in plain PyTorch and Python: full sorts, one expert after the other.

What the operators are tested against, and what `KernelBackendMoE.torch` runs.
"""

import torch

from . import _check


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type to accumulate in: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def route(
    logits: torch.Tensor, k: int, softmax_over_topk: bool = True, norm_topk_probs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (T, K), at least fp32, and expert ids (T, K) of each token, largest first.

    A stable sort, because ties go to the lower expert id, which `torch.topk` does not promise.
    """
    _check.chosen(k, logits.shape[-1])
    logits = logits.to(wide_type(logits.dtype))
    values = logits if softmax_over_topk else logits.softmax(dim=-1)
    values, ids = values.sort(dim=-1, descending=True, stable=True)
    scores, ids = values[:, :k], ids[:, :k]
    if softmax_over_topk:
        scores = scores.softmax(dim=-1)
    elif norm_topk_probs:
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return scores, ids


def score_ids(
    logits: torch.Tensor,
    ids: torch.Tensor,
    softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
) -> torch.Tensor:
    """Scores (T, K), at least fp32, of ids (T, K) that the caller has chosen; 0 of sentinels."""
    logits = logits.to(wide_type(logits.dtype))
    sentinel = (ids < 0) | (ids >= logits.shape[-1])
    values = logits if softmax_over_topk else logits.softmax(dim=-1)
    scores = values.gather(1, ids.masked_fill(sentinel, 0).long())
    if softmax_over_topk:  # a row of sentinels alone becomes NaN, and then zero
        scores = scores.masked_fill(sentinel, -torch.inf).softmax(dim=-1)
    scores = scores.masked_fill(sentinel, 0)
    if norm_topk_probs and not softmax_over_topk:
        scores = scores / scores.sum(dim=-1, keepdim=True).masked_fill(
            sentinel.all(dim=-1, keepdim=True), 1
        )
    return scores


def philox(seed: int, offset: int, index: int) -> int:
    """First word of Philox4x32-10 with key `seed` and counter (offset, index)."""
    word = 0xFFFFFFFF
    c0, c1, c2, c3 = offset & word, offset >> 32 & word, index & word, index >> 32 & word
    k0, k1 = seed & word, seed >> 32 & word
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & word, p0 >> 32 ^ c3 ^ k1, p0 & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c0


def _target(f: int, tile: int, tokens: int, rule: str, draw: int, error: int, scores) -> int:
    """How many of the expert's candidates, best first with these scores, are kept."""
    floor = f // tile * tile
    ceil = floor if floor == f else floor + tile
    if floor == ceil or ceil > tokens:
        return floor
    if rule == "nearest":
        up = ceil - f < f - floor
    elif rule == "stochastic":
        up = draw * tile < (f - floor) << 32
    elif rule == "nearest_scores":
        dropped = scores[floor:f].sum().item()
        added = scores[f:ceil].sum().item()
        up = (draw >> 8) / 2**24 * (dropped + added) < dropped
    elif rule == "balance":
        up = abs(ceil - f + error) < abs(floor - f + error)
    else:
        up = rule == "up"
    return ceil if up else floor


def token_rounding(
    logits: torch.Tensor,
    top_k: int,
    rule: str,
    tile: int,
    softmax_over_topk: bool,
    norm_topk_probs: bool,
    draws: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Lists scores, token ids, expert ids; counts (E) after rounding and before."""
    rule = _check.rounding_rule("rule", rule)
    tokens, experts = logits.shape
    top_scores, ids = route(logits, top_k, softmax_over_topk, norm_topk_probs)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    probabilities = logits.to(wide_type(logits.dtype)).softmax(dim=-1)
    scores = probabilities.scatter(1, ids, top_scores.to(probabilities.dtype))
    seed, offset = (0, 0) if draws is None else draws.tolist()

    kept = torch.zeros_like(chosen)
    frequency = chosen.sum(dim=0)
    error = 0
    for expert in range(experts):
        # Chosen tokens first, each part by probability, then by token: two stable sorts.
        order = probabilities[:, expert].detach().sort(descending=True, stable=True).indices
        order = order[(~chosen[order, expert]).int().sort(stable=True).indices]
        f = int(frequency[expert])
        draw = philox(seed, offset, expert)
        column = scores[order, expert].detach()
        target = _target(f, tile, tokens, rule, draw, error, column)
        kept[order[:target], expert] = True
        error += target - f

    token_ids, expert_ids = kept.nonzero(as_tuple=True)
    grown = tokens * top_k + min(experts, tokens * top_k) * (tile - 1)
    padding = min(tokens * experts, grown) - token_ids.numel()
    return (
        torch.cat([scores[token_ids, expert_ids], scores.new_zeros(padding)]),
        torch.cat([token_ids, token_ids.new_full((padding,), tokens - 1)]).int(),
        torch.cat([expert_ids, expert_ids.new_full((padding,), experts)]).int(),
        kept.sum(dim=0).int(),
        frequency.int(),
    )
