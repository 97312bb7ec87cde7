"""Routing given by the caller: any order, duplicates, sentinels, rows missing."""

import pytest
import torch
from helpers import assert_as_good, make_layer, permuted

from sonicmoe import ActivationType, count_cumsum, functional, reference

TOKENS, EXPERTS = 20, 6


def random_lists(length):
    return torch.randint(0, TOKENS, (length,)), torch.randint(0, EXPERTS, (length,))


def lists():
    tokens, experts = random_lists(60)
    yield "unsorted", tokens, experts
    yield "sentinels", tokens, torch.where(torch.rand(60) < 0.4, EXPERTS, experts)
    yield "far_sentinels", tokens, torch.where(torch.rand(60) < 0.4, 2**31 - 1, experts)
    some = torch.arange(60) % 5 < 2
    yield "negative", tokens, torch.where(some, -1, experts)
    yield "far_negative", tokens, torch.where(some, -(2**31), experts)
    yield "only_sentinels", tokens, torch.full((60,), EXPERTS)
    yield "duplicates", tokens.repeat(2), experts.repeat(2)
    yield "one_expert", tokens, torch.full((60,), 3)
    yield "one_token", torch.full((60,), 7), experts
    yield "one_row", tokens[:1], experts[:1]
    yield "empty", tokens[:0], experts[:0]
    yield "few_tokens", tokens % 5, experts


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", range(12), ids=[name for name, *_ in lists()])
def test_matches_plain_pytorch(case, dtype, ids_dtype):
    _, tokens, experts = list(lists())[case]
    layer = make_layer(bias=True, dtype=dtype, tokens=TOKENS, experts=EXPERTS)
    scores = torch.randn(len(tokens))
    do = torch.randn(TOKENS, 24).to(dtype)

    def run(function, layer, scores, do, view):
        leaves = layer.leaves() | {"scores": scores.clone().requires_grad_()}
        del leaves["router_w"]
        o, counts = function(
            leaves["x"],
            leaves["scores"],
            tokens.to(ids_dtype),
            experts.to(ids_dtype),
            view(leaves["w1"]),
            leaves["b1"],
            view(leaves["w2"]),
            leaves["b2"],
        )
        o.backward(do)
        return counts, {"o": o.detach()} | {"d" + k: v.grad for k, v in leaves.items()}

    counts, ours = run(functional.moe_general_routing_inputs, layer, scores, do, permuted)
    plain_counts, plain = run(reference.routed_layer, layer, scores, do, lambda w: w)
    exact_layer = layer.to(torch.float64)
    _, exact = run(reference.routed_layer, exact_layer, scores.double(), do.double(), lambda w: w)
    assert torch.equal(counts, plain_counts) and counts.dtype == torch.int32
    for name in ours:
        assert_as_good(name, ours[name], plain[name], exact[name])
    # Sentinels: no gradient at all, not just a small one.
    assert not ours["dscores"][(experts < 0) | (experts >= EXPERTS)].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_score_gradients_come_back_in_the_type_of_the_scores(dtype):
    layer = make_layer(tokens=TOKENS, experts=EXPERTS)
    tokens, experts = random_lists(30)
    scores = torch.rand(30, dtype=dtype, requires_grad=True)
    w1, w2 = permuted(layer.w1), permuted(layer.w2)
    o, _ = functional.moe_general_routing_inputs(
        layer.x, scores, tokens, experts, w1, None, w2, None, EXPERTS
    )
    o.sum().backward()
    assert scores.grad.dtype == dtype and scores.grad.all()


def test_top_k_given_as_lists_is_the_same_layer():
    layer = make_layer(tokens=TOKENS, experts=EXPERTS)
    w1, w2 = permuted(layer.w1), permuted(layer.w2)
    o, logits, counts = functional.moe_TC_softmax_topk_layer(
        layer.x, layer.router_w, w1, None, w2, None, 2
    )
    scores, ids = torch.ops.sonicmoe.top_k(logits, "top_k=2")
    tokens = torch.arange(TOKENS).repeat_interleave(2)
    listed, listed_counts = functional.moe_general_routing_inputs(
        layer.x, scores.flatten(), tokens, ids.flatten(), w1, None, w2, None
    )
    assert torch.equal(o, listed) and torch.equal(counts, listed_counts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 7, 1000, 4096])
@pytest.mark.parametrize("experts", [1, 4, 72, 1920])
def test_count_cumsum(experts, size, dtype):
    x = torch.randint(0, experts, (size,), dtype=dtype)
    expected = x.bincount(minlength=experts)
    counts, cumsum = count_cumsum(x, experts)
    assert counts.dtype == cumsum.dtype == torch.int32
    assert torch.equal(counts.long(), expected) and torch.equal(cumsum.long(), expected.cumsum(0))
    assert torch.equal(count_cumsum(x, experts, do_cumsum=False), counts)


def test_count_cumsum_skips_sentinels_in_any_shape():
    x = torch.tensor([[0, 3, 9, -1], [3, 2**40, 1, -(2**40)]])
    counts, cumsum = count_cumsum(x, 4)
    assert counts.tolist() == [1, 1, 0, 2] and cumsum.tolist() == [1, 2, 2, 4]


def sums_of_rows(dtype, device="cpu", tokens=50, rows=120, hidden=72, top_k=4):
    """What `combine` makes of integers, whose sums are exact, and what it should."""
    data = torch.randint(-8, 9, (rows, hidden)).to(dtype)
    slot_rows = torch.randint(-1, rows, (tokens, top_k), dtype=torch.int32)
    slot_rows[:1] = -1  # a token without rows
    wanted = torch.zeros(tokens, hidden, dtype=torch.float64)
    token, slot = (slot_rows >= 0).nonzero(as_tuple=True)
    wanted.index_add_(0, token, data[slot_rows[token, slot].long()].double())
    got = torch.ops.sonicmoe.combine(data.to(device), slot_rows.to(device))
    return got.cpu(), wanted.to(dtype)


SUMS = [(50, 120, 4), (50, 9, 1), (1, 1, 3), (7, 0, 2), (0, 0, 2)]


@pytest.mark.parametrize("tokens, rows, top_k", SUMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine(dtype, tokens, rows, top_k):
    assert torch.equal(*sums_of_rows(dtype, tokens=tokens, rows=rows, top_k=top_k))


def test_combine_refuses_other_tensors():
    rows, slots = torch.zeros(4, 8), torch.zeros(3, 2, dtype=torch.int32)
    for text, arguments in (
        ("^slot_rows: got ", (rows, slots.long())),
        ("^slot_rows: got ", (rows, slots[0])),
        ("^hidden: got 7, allowed: ", (rows[:, :7].contiguous(), slots)),
    ):
        with pytest.raises(ValueError, match=text):
            torch.ops.sonicmoe.combine(*arguments)


def test_default_activation_is_swiglu():
    layer = make_layer(tokens=TOKENS, experts=EXPERTS)
    tokens, experts = random_lists(30)
    args = (layer.x, torch.rand(30), tokens, experts)
    w1, w2 = permuted(layer.w1), permuted(layer.w2)
    default, _ = functional.moe_general_routing_inputs(*args, w1, None, w2, None, EXPERTS, 0)
    named, _ = functional.moe_general_routing_inputs(
        *args, w1, None, w2, None, activation_type=ActivationType.SWIGLU
    )
    assert torch.equal(default, named)
