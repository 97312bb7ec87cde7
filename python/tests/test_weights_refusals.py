"""Two tensors of gate and up: what is not allowed, and the exact words that say so."""

import re

import pytest
import torch
from helpers import permuted

from sonicmoe import functional

T, D, N, E, L = 6, 16, 8, 4, 5


def inputs(lists):
    shared = {
        "x": torch.randn(T, D),
        "w1": torch.randn(E, N, D),
        "b1": torch.randn(E, N),
        "w2": torch.randn(E, D, N),
        "b2": torch.randn(E, D),
        "w1_up": permuted(torch.randn(E, N, D)),
        "b1_up": torch.randn(E, N),
    }
    if not lists:
        return shared | {"router_w": torch.randn(E, D), "K": 2}
    ids = {"token_indices": torch.arange(L), "expert_indices": torch.arange(L)}
    return shared | {"router_scores": torch.rand(L)} | ids


SEPARATE = [
    (
        {"layout": "transposed"},
        ValueError,
        "layout: got 'transposed', allowed: 'interleaved', 'concatenated', 'separate'",
    ),
    (
        {"layout": 3},
        TypeError,
        "layout: got 3, allowed: 'interleaved', 'concatenated', 'separate'",
    ),
    ({"w1_up": 3}, TypeError, "w1_up: got int, allowed: a tensor"),
    ({"b1_up": 3}, TypeError, "b1_up: got int, allowed: a tensor"),
    ({"w1_up": None}, ValueError, "b1_up: got a tensor, allowed: None, for w1_up is None"),
    (
        {"w1_up": None, "layout": "separate"},
        ValueError,
        "w1_up: got None, allowed: a tensor, for layout is 'separate'",
    ),
    (
        {"w1_up": None, "b1_up": None, "w1_up_main_grad": torch.zeros(E, N, D)},
        ValueError,
        "w1_up_main_grad: got a tensor, allowed: None, for w1_up is None",
    ),
    (
        {"layout": "interleaved"},
        ValueError,
        "layout: got 'interleaved', allowed: 'separate', for w1_up is given",
    ),
    (
        {"concat_layout": True},
        ValueError,
        "concat_layout: got True, allowed: False, for w1_up is given",
    ),
    (
        {"w1_up": None, "b1_up": None, "concat_layout": True, "layout": "interleaved"},
        ValueError,
        "concat_layout: got True, allowed: False, for layout is 'interleaved'",
    ),
    (
        {"activation_type": "relu"},
        ValueError,
        "w1_up: got a tensor, allowed: None, for ActivationType.RELU has no gate",
    ),
    (
        {"w1": torch.ones(E, 2 * N, D)},
        ValueError,
        "w1: got shape (4, 16, 16), allowed: (E, n, d) = (4, 8, 16)",
    ),
    (
        {"w1_up": torch.ones(E, 2 * N, D)},
        ValueError,
        "w1_up: got shape (4, 16, 16), allowed: (E, n, d) = (4, 8, 16)",
    ),
    (
        {"w1_up": torch.ones(E, D, N)},
        ValueError,
        "w1_up: got shape (4, 16, 8) with strides (128, 8, 1), allowed: a contiguous (E, I, H), or "
        "its view (I, H, E) by .permute(1, 2, 0), where H is 16, the width of x",
    ),
    (
        {"w1_up": torch.ones(E, N, D).mT.contiguous().mT},
        ValueError,
        "w1_up: got shape (4, 8, 16) with strides (128, 1, 8), allowed: a contiguous (E, I, H), or "
        "its view (I, H, E) by .permute(1, 2, 0), where H is 16, the width of x",
    ),
    (
        {"w1_up": torch.ones(E, N, D).bfloat16()},
        TypeError,
        "w1_up: got torch.bfloat16, allowed: torch.float32, the dtype of x",
    ),
    (
        {"w1_up": torch.ones(E, N, D, device="meta")},
        ValueError,
        "w1_up: got a tensor on meta, allowed: cpu, where x is",
    ),
    (
        {"b1_up": None},
        ValueError,
        "b1_up: got None, allowed: b1, b1_up and b2, or none of them",
    ),
    ({"b1": None}, ValueError, "b1: got None, allowed: b1, b1_up and b2, or none of them"),
    ({"b2": None}, ValueError, "b2: got None, allowed: b1, b1_up and b2, or none of them"),
    (
        {"b1": torch.ones(E, 2 * N)},
        ValueError,
        "b1: got shape (4, 16), allowed: (E, n) = (4, 8)",
    ),
    (
        {"b1_up": torch.ones(E, 2 * N)},
        ValueError,
        "b1_up: got shape (4, 16), allowed: (E, n) = (4, 8)",
    ),
    (
        {"b2": torch.ones(E, D).requires_grad_(), "w1_up_main_grad": torch.zeros(E, N, D)},
        ValueError,
        "w1_up_main_grad: got a tensor, allowed: None, for the weight is frozen",
    ),
    (
        {"w1_up": torch.ones(E, N, D).requires_grad_(), "w1_up_main_grad": torch.ones(N, D)},
        ValueError,
        "w1_up_main_grad: got shape (8, 16) with strides (16, 1), allowed: a contiguous (E, I, H), "
        "or its view (I, H, E) by .permute(1, 2, 0), where H is 16, the width of x",
    ),
    (
        {
            "w1_up": torch.ones(E, N, D).requires_grad_(),
            "w2": torch.ones(E, D, N).requires_grad_(),
            "w1_up_main_grad": torch.zeros(E, N, D),
        },
        ValueError,
        "w2_main_grad: got None, allowed: a torch.float32 tensor, for another weight has one and "
        "w2 is not frozen",
    ),
    (
        {
            "w1_up": torch.ones(E, N, D).requires_grad_(),
            "w1_up_main_grad": torch.zeros(E, 2 * N, D),
        },
        ValueError,
        "w1_up_main_grad: got shape (4, 16, 16), allowed: (E, n, d) = (4, 8, 16)",
    ),
]


@pytest.mark.parametrize("change, error, message", SEPARATE)
@pytest.mark.parametrize("lists", [False, True])
def test_separate_gate_and_up(lists, change, error, message):
    function = functional.moe_TC_softmax_topk_layer
    if lists:
        function = functional.moe_general_routing_inputs
    function(**inputs(lists))
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        function(**inputs(lists) | change)
