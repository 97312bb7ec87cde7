"""Top-K and token rounding in plain PyTorch and Python: full sorts, one expert after the other.

What the operators are tested against, and what `KernelBackendMoE.torch` runs.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F

from . import _check
from ._autocast import autocast, to_fp32
from .router import RouterConfig, resolve


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type to accumulate in: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def project(
    x: torch.Tensor,
    router_w: torch.Tensor,
    logit_bias: torch.Tensor | None = None,
    f32_logits: bool = False,
) -> torch.Tensor:
    """Logits (T, E) of x (T, d): in the wide type, rounded once to x's type unless `f32_logits` or
    router_w is fp32. Autocast to fp32 does the same."""
    f32_logits = f32_logits or to_fp32(x)
    (x,) = autocast(x)
    if not (f32_logits and router_w.dtype == torch.float32):
        (router_w,) = autocast(router_w)
    f32_logits = f32_logits or router_w.dtype == torch.float32
    if logit_bias is None and not f32_logits:
        return F.linear(x, router_w)
    wide = wide_type(x.dtype)
    bias = None if logit_bias is None else logit_bias.to(wide)
    with torch.autocast(x.device.type, enabled=False) if _can_autocast(x) else nullcontext():
        logits = F.linear(x.to(wide), router_w.to(wide), bias)
    return logits if f32_logits else logits.to(x.dtype)


def _can_autocast(x: torch.Tensor) -> bool:
    return x.device.type != "meta"


def all_scores(z: torch.Tensor, score: str) -> torch.Tensor:
    """p of all logits."""
    if score == "softmax":
        return z.softmax(dim=-1)
    if score == "sigmoid":
        return z.sigmoid()
    softplus = torch.logaddexp(z, torch.zeros_like(z))
    # Where p is 0, so is its gradient: that of the root would be infinite.
    some = softplus > 0
    return torch.where(some, torch.where(some, softplus, 1).sqrt(), 0)


def _choose(
    z: torch.Tensor, k: int, router: RouterConfig, selection_bias: torch.Tensor | None
) -> torch.Tensor:
    """ids (T, K), best first. Stable sorts, because ties go to the lower expert or group, which
    `torch.topk` does not promise."""
    by_scores = router.order == "score_then_select"
    values = all_scores(z, router.score) if by_scores else z
    if selection_bias is not None:
        values = values + selection_bias.to(values.dtype)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    if router.groups > 1:
        grouped = values.unflatten(-1, (router.groups, -1))
        best = 2 if router.group_score == "sum_of_two" else 1
        of_groups = grouped.sort(dim=-1, descending=True).values[..., :best].sum(dim=-1)
        ranks = of_groups.sort(dim=-1, descending=True, stable=True).indices
        out = torch.ones_like(of_groups, dtype=torch.bool)
        out = out.scatter(-1, ranks[..., : router.kept_groups], False)
        out = out.repeat_interleave(grouped.shape[-1], dim=-1)
        # Experts that are out come last, whatever their values are.
        order = order.gather(-1, out.gather(-1, order).int().sort(dim=-1, stable=True).indices)
    return order[:, :k]


def _of_flags(softmax_over_topk: bool, norm_topk_probs: bool) -> RouterConfig:
    return resolve(None, softmax_over_topk, norm_topk_probs)


def route(
    logits: torch.Tensor,
    k: int,
    softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    *,
    router: RouterConfig | None = None,
    selection_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (T, K), at least fp32, and expert ids (T, K) of each token, best first."""
    _check.chosen("K", k, "E", logits.shape[-1])
    router = router or _of_flags(softmax_over_topk, norm_topk_probs)
    with torch.no_grad():
        wide = logits.to(wide_type(logits.dtype))
        ids = _choose(wide, k, router, selection_bias)
    return score_ids(logits, ids, router=router, expert_scale=expert_scale), ids


def score_ids(
    logits: torch.Tensor,
    ids: torch.Tensor,
    softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    *,
    router: RouterConfig | None = None,
    expert_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores (T, K), at least fp32, of ids (T, K) that the caller has chosen; 0 of sentinels."""
    router = router or _of_flags(softmax_over_topk, norm_topk_probs)
    z = logits.to(wide_type(logits.dtype))
    sentinel = (ids < 0) | (ids >= z.shape[-1])
    valid = ids.masked_fill(sentinel, 0).long()
    if router.over_top_k:  # a row of sentinels alone becomes NaN, and then zero
        p = z.gather(1, valid).masked_fill(sentinel, -torch.inf).softmax(dim=-1)
    elif router.score == "softmax":
        p = all_scores(z, router.score).gather(1, valid)
    else:
        p = all_scores(z.gather(1, valid), router.score)
    w = p.masked_fill(sentinel, 0)
    if router.divides:
        divisor = w.sum(dim=-1, keepdim=True) + router.eps
        none = divisor == 0
        w = torch.where(none, 0, w / divisor.masked_fill(none, 1))
    if router.scale != 1:
        w = w * router.scale
    if expert_scale is not None:
        w = w * expert_scale.to(w.dtype)[valid]
    # A token with a NaN or +inf has NaN, whatever its score makes of them.
    bad = ~(z.detach().amax(dim=-1, keepdim=True) < torch.inf)
    return torch.where(bad & ~sentinel, torch.nan, w)


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
