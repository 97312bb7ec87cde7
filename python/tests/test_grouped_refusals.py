"""The experts alone: what is not allowed, and the exact words that say so."""

import re

import pytest
import torch

from sonicmoe import enums, functional

R, D, N, E = 12, 16, 8, 4
ACTIVATIONS = f"an ActivationType, {enums.allowed_activations()}"


def inputs():
    return {
        "rows": torch.randn(R, D),
        "counts": torch.tensor([3, 0, 4, 2]),
        "w1": torch.randn(E, 2 * N, D),
        "w2": torch.randn(E, D, N),
        "scores": torch.rand(R),
    }


def leaf(*shape):
    return torch.ones(shape).requires_grad_()


OFFSETS = {"counts": None, "offsets": torch.tensor([0, 3, 3, 8, 10])}

REFUSED = [
    ({"rows": 3}, TypeError, "rows: got int, allowed: a tensor"),
    ({"rows": torch.ones(D)}, ValueError, "rows: got shape (16,), allowed: (R, H)"),
    (
        {"rows": torch.ones(R, D).double()},
        TypeError,
        "rows: got torch.float64, allowed: torch.float32, torch.bfloat16, torch.float16",
    ),
    (
        {"rows": torch.ones(R, 24)},
        ValueError,
        "w1: got shape (4, 16, 16) with strides (256, 16, 1), allowed: a contiguous (E, 2I, H), or "
        "its view (2I, H, E) by .permute(1, 2, 0), where H is 24, the width of rows",
    ),
    ({"w1": None}, TypeError, "w1: got NoneType, allowed: a tensor"),
    (
        {"w1": torch.ones(E, N, D)},
        ValueError,
        "w1: got shape (4, 8, 16), allowed: (E, 2n, d) = (4, 16, 16)",
    ),
    (
        {"w2": torch.ones(E, D, N).bfloat16()},
        TypeError,
        "w2: got torch.bfloat16, allowed: torch.float32, the dtype of rows",
    ),
    (
        {"w2": torch.ones(E, D, N, device="meta")},
        ValueError,
        "w2: got a tensor on meta, allowed: cpu, where rows is",
    ),
    (
        {"w2": torch.ones(E, D, 12), "w1": torch.ones(E, 24, D)},
        ValueError,
        "intermediate: got 12, allowed: multiples of 8 from 8 to 1048576",
    ),
    ({"b1": torch.ones(E, 2 * N)}, ValueError, "b2: got None, allowed: b1 and b2, or neither"),
    (
        {"b1": torch.ones(E, N), "b2": torch.ones(E, D)},
        ValueError,
        "b1: got shape (4, 8), allowed: (E, 2n) = (4, 16)",
    ),
    # Which rows an expert owns.
    ({"counts": None}, ValueError, "counts: got None, allowed: a tensor, or None with offsets"),
    ({"counts": [3, 0, 4, 2]}, TypeError, "counts: got list, allowed: a tensor"),
    (
        {"counts": torch.ones(E)},
        TypeError,
        "counts: got torch.float32, allowed: torch.int32, torch.int64",
    ),
    ({"counts": torch.ones(5).int()}, ValueError, "counts: got shape (5,), allowed: (E) = (4,)"),
    (
        {"counts": torch.ones(E, device="meta").int()},
        ValueError,
        "counts: got a tensor on meta, allowed: cpu, where rows is",
    ),
    (
        {"offsets": torch.ones(E + 1).short()},
        TypeError,
        "offsets: got torch.int16, allowed: torch.int32, torch.int64",
    ),
    (
        {"offsets": torch.ones(E).long()},
        ValueError,
        "offsets: got shape (4,), allowed: (E+1) = (5,)",
    ),
    (
        {"counts": torch.tensor([3, 0, 4, 6])},
        ValueError,
        "counts: got 6 at position 3, allowed: 0 to 5, the rows from row 7 on",
    ),
    (
        {"counts": torch.tensor([3, -1, 4, 2], dtype=torch.int32)},
        ValueError,
        "counts: got -1 at position 1, allowed: 0 to 9, the rows from row 3 on",
    ),
    (
        {"counts": torch.tensor([3, 2**32, 4, 2])},  # not wrapped around to 0
        ValueError,
        "counts: got 4294967296 at position 1, allowed: 0 to 9, the rows from row 3 on",
    ),
    (
        OFFSETS | {"offsets": torch.tensor([0, 3, 2, 8, 10])},
        ValueError,
        "offsets: got 2 at position 2, allowed: 3, the end of the rows before, to 12, the number "
        "of rows",
    ),
    (
        OFFSETS | {"offsets": torch.tensor([0, 3, 3, 8, 13])},
        ValueError,
        "offsets: got 13 at position 4, allowed: 8, the end of the rows before, to 12, the number "
        "of rows",
    ),
    (
        {"offsets": torch.tensor([0, 2, 3, 8, 10])},
        ValueError,
        "offsets: got 2 at position 1, allowed: 3, the end of the rows before, to 12, the number "
        "of rows",
    ),
    # Scores.
    ({"scores": torch.rand(R, 1)}, ValueError, "scores: got shape (12, 1), allowed: (R) = (12,)"),
    (
        {"scores": torch.arange(R)},
        TypeError,
        "scores: got torch.int64, allowed: any floating dtype",
    ),
    (
        {"scores": torch.rand(R, device="meta")},
        ValueError,
        "scores: got a tensor on meta, allowed: cpu, where rows is",
    ),
    (
        {"score_at": "combine"},
        ValueError,
        "score_at: got 'combine', allowed: 'before_down', 'after_down'",
    ),
    (
        {"score_at": None, "scores": None},
        TypeError,
        "score_at: got None, allowed: 'before_down', 'after_down'",
    ),
    # Options.
    ({"activation": "tanh"}, ValueError, f"activation: got 'tanh', allowed: {ACTIVATIONS}"),
    (
        {"layout": "columns"},
        ValueError,
        "layout: got 'columns', allowed: 'interleaved', 'concatenated', 'separate', "
        "'transposed', 'transposed_interleaved'",
    ),
    (
        {"layout": "separate"},
        ValueError,
        "w1_up: got None, allowed: a tensor, for layout is 'separate'",
    ),
    ({"rows_hint": -1}, ValueError, "rows_hint: got -1, allowed: 0 to 2147483647"),
    ({"rows_hint": 2**31}, ValueError, "rows_hint: got 2147483648, allowed: 0 to 2147483647"),
    ({"rows_hint": 3.0}, TypeError, "rows_hint: got 3.0, allowed: an int"),
    # Memory of the caller's.
    (
        {"w1": leaf(E, 2 * N, D), "w1_main_grad": torch.zeros(E, 2 * N, D), "w2": leaf(E, D, N)},
        ValueError,
        "w2_main_grad: got None, allowed: a torch.float32 tensor, for another weight has one and "
        "w2 is not frozen",
    ),
    (
        {"w2_main_grad": torch.zeros(D, N), "w2": leaf(E, D, N)},
        ValueError,
        "w2_main_grad: got shape (16, 8) with strides (8, 1), allowed: a contiguous (E, H, I), or "
        "its view (H, I, E) by .permute(1, 2, 0), where H is 16, the width of rows",
    ),
    ({"out": 3}, TypeError, "out: got int, allowed: a tensor"),
    (
        {"out": torch.empty(R, D).bfloat16()},
        TypeError,
        "out: got torch.bfloat16, allowed: torch.float32, the result's dtype",
    ),
    (
        {"out": torch.empty(R, D, device="meta")},
        ValueError,
        "out: got a tensor on meta, allowed: cpu, where rows is",
    ),
    (
        {"out": torch.empty(R + 1, D)},
        ValueError,
        "out: got shape (13, 16), allowed: (R, H) = (12, 16)",
    ),
    (
        {"dx_out": torch.empty(D, R).t()},
        ValueError,
        "dx_out: got strides (1, 12), allowed: a contiguous (R, H)",
    ),
    (
        {"out": leaf(R, D)},
        ValueError,
        "out: got a tensor that requires grad, allowed: one that does not",
    ),
    (
        {"dx_out": leaf(R, D)},
        ValueError,
        "dx_out: got a tensor that requires grad, allowed: one that does not",
    ),
]


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("change, error, message", REFUSED)
def test_grouped_experts(change, error, message):
    functional.grouped_experts(**inputs())
    with refused(error, message):
        functional.grouped_experts(**inputs() | change)


def test_nothing_is_written_after_bad_counts():
    out = torch.full((R, D), 7.0)
    with pytest.raises(ValueError, match="^counts: got 10 at position 1"):
        functional.grouped_experts(**inputs() | {"counts": torch.tensor([3, 10, 1, 2]), "out": out})
    assert (out == 7).all()


def test_operators_refuse_in_the_same_words():
    ops = torch.ops.sonicmoe
    rows, counts, w1, w2, scores = inputs().values()
    text = "score_at=after_down"

    def forward(text=text, counts=counts, scores=scores, **options):
        return ops.grouped_forward(rows, counts, None, scores, w1, None, w2, None, text, **options)

    out, preact, segments = forward()
    for key, value in (("row_source", "gathered"), ("index_type", "i64"), ("dtype", "f32")):
        message = f"layer: got {key}, allowed: options, for the other arguments say that"
        with refused(ValueError, message):
            forward(f"{text} {key}={value}")
    with refused(ValueError, "scores: got None, allowed: a tensor, for score_at is before_down"):
        forward("score_at=before_down", scores=None)
    with refused(ValueError, "scores: got a tensor, allowed: None, for score_at is none"):
        forward("score_at=none")
    message = "score_at: got combine, allowed: none, before_down, after_down with contiguous rows"
    with refused(ValueError, message):
        forward("")
    with refused(ValueError, "counts: got None, allowed: a tensor, or None with offsets"):
        forward(counts=None)
    with refused(ValueError, "counts: got float32, allowed: int32"):
        forward(counts=torch.ones(E))
    with refused(ValueError, "offsets: got int32, allowed: int64"):
        ops.grouped_forward(
            rows, counts, torch.zeros(E + 1).int(), scores, w1, None, w2, None, text
        )
    with refused(ValueError, "dx_out: got shape (1, 16), allowed: (R, d) = (12, 16)"):
        forward(dx_out=torch.empty(1, D))

    def backward(dout=out, scores=scores, preact=preact, segments=segments, **options):
        return ops.grouped_backward(
            dout, rows, scores, w1, w2, None, preact, segments, text, **options
        )

    with refused(ValueError, "segments: got shape (11,), allowed: (3E) = (12,)"):
        backward(segments=segments[1:])
    with refused(ValueError, "preact: got shape (11, 16), allowed: (R, 2n or n) = (12, 16)"):
        backward(preact=preact[1:])
    with refused(ValueError, "dout: got shape (11, 16), allowed: (R, d) = (12, 16)"):
        backward(dout=out[1:])
    with refused(ValueError, "scores: got None, allowed: a tensor, for score_at is after_down"):
        backward(scores=None)
    with refused(ValueError, "dx_out: got bfloat16, allowed: float32"):
        backward(dx_out=out.bfloat16())
