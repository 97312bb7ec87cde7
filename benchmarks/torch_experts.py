"""Experts from PyTorch's own parts around F.grouped_mm, which ours are timed beside.

Rows of a token are gathered and summed without atomics: the gradient of either is the other, and
sums are in fp32. What is between the products is compiled on a GPU. Scores multiply A, which is
narrower than Y. The host never waits.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def compiled(function: Callable) -> Callable:
    """Compiled where its tensors are on a GPU."""
    fast = functools.cache(lambda: torch.compile(function, dynamic=False))

    def call(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return (fast() if x.is_cuda else function)(x, *rest)

    return call


@compiled
def summed(rows: torch.Tensor, rows_of_token: torch.Tensor) -> torch.Tensor:
    """(R, d) and (T, K) to (T, d)."""
    return rows[rows_of_token].float().sum(1).to(rows.dtype)


@compiled
def activated(h: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """SwiGLU of H (R, 2n) times scores (R): A (R, n)."""
    gate, up = h.float().chunk(2, -1)
    return (F.silu(gate) * up * scores.unsqueeze(-1)).to(h.dtype)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tokens, rows_of_token):
        ctx.save_for_backward(rows_of_token)
        return x[tokens]

    @staticmethod
    def backward(ctx, d):
        return summed(d, *ctx.saved_tensors), None, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, tokens, rows_of_token):
        ctx.save_for_backward(tokens)
        return summed(y, rows_of_token)

    @staticmethod
    def backward(ctx, d):
        return d[ctx.saved_tensors[0]], None, None


def experts(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """x (T, d), ids and scores (T, K), w1 (E, 2n, d), gates before ups, w2 (E, d, n) to (T, d)."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    every = torch.arange(len(w1), dtype=ids.dtype, device=x.device)
    # Not bincount: on CUDA the host would wait for it.
    ends = torch.searchsorted(sorted_ids, every, right=True, out_int32=True)
    tokens = order // ids.shape[1]
    row = torch.arange(len(order), device=x.device)
    rows_of_token = torch.empty_like(order).scatter_(0, order, row).view(ids.shape)
    h = F.grouped_mm(Gather.apply(x, tokens, rows_of_token), w1.mT, offs=ends)
    # A score has one row, so that its gradient is a gather; that of index_select is an index_add.
    row_scores = Gather.apply(scores.reshape(-1, 1), order, rows_of_token.view(-1, 1)).flatten()
    y = F.grouped_mm(activated(h, row_scores), w2.mT, offs=ends)
    return Sum.apply(y, tokens, rows_of_token)
