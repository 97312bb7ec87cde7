"""The layer as two plain PyTorch loops over the experts, each written to be as fast as it can be.

What makes a loop slow by accident is avoided: weights are unbound once (indexing `w1[e]` would
zero-fill the whole gradient for every expert), gate and up are halves of the rows and not every
second one, the scores multiply A, which is narrower than Y, and rows are gathered by
`index_select`, whose gradient is an `index_add`. Measured against these, each was slower: gathering
by indexing, a permutation and a sum over K in place of the last `index_add`, one GEMM each for
gate and up; scores on Y are slower in fp32. SwiGLU, softmax over the top-K, W1 concatenated.
"""

import torch
import torch.nn.functional as F


def _route(x, router_w, top_k):
    """Scores (R) fp32 in token order, the order of the rows by expert, rows of each expert."""
    logits = F.linear(x, router_w)
    # Stable, like the layer: bf16 logits tie often, and ties go to the lower expert id.
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    scores = values[:, :top_k].softmax(dim=-1).flatten()
    experts = ids[:, :top_k].flatten()
    order = experts.argsort(stable=True)
    counts = experts.bincount(minlength=router_w.shape[0]).tolist()
    return scores, order, counts


def _expert(x, scores, w1, w2):
    gate, up = F.linear(x, w1).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up * scores, w2)


def index_loop(x, router_w, w1, w2, top_k):
    """Each expert picks its tokens by `index_select` and adds its rows by `index_add`."""
    scores, order, counts = _route(x, router_w, top_k)
    scores = scores.index_select(0, order).to(x.dtype).unsqueeze(-1).split(counts)
    tokens = (order // top_k).split(counts)
    out = torch.zeros_like(x)
    for t, s, w1_e, w2_e in zip(tokens, scores, w1.unbind(), w2.unbind(), strict=True):
        if len(t):
            out.index_add_(0, t, _expert(x.index_select(0, t), s, w1_e, w2_e))
    return out


def sort_loop(x, router_w, w1, w2, top_k):
    """All rows are sorted by expert and gathered once, split, joined, and added back once."""
    scores, order, counts = _route(x, router_w, top_k)
    scores = scores.index_select(0, order).to(x.dtype).unsqueeze(-1).split(counts)
    tokens = order // top_k
    rows = x.index_select(0, tokens).split(counts)
    y = torch.cat(
        [_expert(*each) for each in zip(rows, scores, w1.unbind(), w2.unbind(), strict=True)]
    )
    return torch.zeros_like(x).index_add_(0, tokens, y)
