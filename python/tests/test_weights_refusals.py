"""Layouts of the weights: what is not allowed, and the exact words that say so."""

import re

import pytest
import torch
from helpers import permuted

from sonicmoe import functional
from sonicmoe._check import ONE_TENSOR_LAYOUTS, TRANSPOSED_LAYOUTS

T, D, N, E, L = 6, 16, 8, 4, 5
LAYOUTS = "'interleaved', 'concatenated', 'separate', 'transposed', 'transposed_interleaved'"


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
    ({"layout": "columns"}, ValueError, f"layout: got 'columns', allowed: {LAYOUTS}"),
    ({"layout": 3}, TypeError, f"layout: got 3, allowed: {LAYOUTS}"),
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
        {"layout": "transposed"},
        ValueError,
        "layout: got 'transposed', allowed: 'separate', for w1_up is given",
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


def refused(message, error=ValueError):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("change, error, message", SEPARATE)
@pytest.mark.parametrize("lists", [False, True])
def test_separate_gate_and_up(lists, change, error, message):
    function = functional.moe_TC_softmax_topk_layer
    if lists:
        function = functional.moe_general_routing_inputs
    function(**inputs(lists))
    with refused(message, error):
        function(**inputs(lists) | change)


# Hidden and intermediate sizes apart from each other and from 2I.
WIDE = 24


def either_way(transposed, gate="swiglu", **change):
    """The experts on weights that lie one way or the other, with `change`."""
    width = 2 * N if gate == "swiglu" else N
    shapes = {"w1": (E, width, WIDE), "w2": (E, WIDE, N)}
    weights = {name: torch.ones(shape) for name, shape in shapes.items()}
    if transposed:
        weights = {name: weight.mT.contiguous() for name, weight in weights.items()}
    rows, counts = torch.ones(T, WIDE), torch.tensor([3, 0, 2, 1])
    arguments = {"rows": rows, "counts": counts, "activation": gate} | weights
    return functional.grouped_experts(**arguments | change)


def shape_of(tensor):
    return f"got shape {tuple(tensor.shape)} with strides {tensor.stride()}"


def allowed(rows, columns):
    return (
        f"allowed: a contiguous (E, {rows}, {columns}), or its view ({rows}, {columns}, E) by "
        f".permute(1, 2, 0), where H is {WIDE}, the width of rows"
    )


FOR_TRANSPOSED = "; layout='transposed' or 'transposed_interleaved' takes a contiguous "
FOR_OTHERS = "; layout='interleaved' or 'concatenated' takes a contiguous "


@pytest.mark.parametrize("form", [torch.clone, permuted])
@pytest.mark.parametrize("gate, width", [("swiglu", "2I"), ("relu", "I")])
@pytest.mark.parametrize("layout", [None, *ONE_TENSOR_LAYOUTS, *TRANSPOSED_LAYOUTS])
def test_weights_of_the_other_layouts(layout, gate, width, form):
    transposed = layout in TRANSPOSED_LAYOUTS
    either_way(transposed, gate, layout=layout)
    size = 2 * N if gate == "swiglu" else N
    w1, w2 = torch.ones(E, WIDE, size), torch.ones(E, N, WIDE)
    w1_form, w2_form = (width, "H"), ("H", "I")
    if transposed:
        w1, w2 = w1.mT.contiguous(), w2.mT.contiguous()
        w1_form, w2_form = w1_form[::-1], w2_form[::-1]
    hint = FOR_OTHERS if transposed else FOR_TRANSPOSED
    for name, wrong, (rows, columns) in (("w1", form(w1), w1_form), ("w2", form(w2), w2_form)):
        text = f"{name}: {shape_of(wrong)}, {allowed(rows, columns)}"
        with refused(f"{text}{hint}(E, {columns}, {rows})"):
            either_way(transposed, gate, layout=layout, **{name: wrong})
    # The other way round without a copy is no form, and hints at nothing.
    wrong = w1.mT
    with refused(f"w1: {shape_of(wrong)}, {allowed(*w1_form)}"):
        either_way(transposed, gate, layout=layout, w1=wrong)


@pytest.mark.parametrize("layout", TRANSPOSED_LAYOUTS)
@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"w1": torch.ones(E, WIDE, N)},
            ValueError,
            "w1: got shape (4, 24, 8), allowed: (E, d, 2n) = (4, 24, 16)",
        ),
        (
            {"activation": "relu"},
            ValueError,
            "w1: got shape (4, 24, 16), allowed: (E, d, n) = (4, 24, 8)",
        ),
        (
            {"w1": torch.ones(E, WIDE, 24), "w2": torch.ones(E, 12, WIDE)},
            ValueError,
            "intermediate: got 12, allowed: multiples of 8 from 8 to 1048576",
        ),
        (
            {"b1": torch.ones(E, N), "b2": torch.ones(E, WIDE)},
            ValueError,
            "b1: got shape (4, 8), allowed: (E, 2n) = (4, 16)",
        ),
        (
            {"b1": torch.ones(E, 2 * N), "b2": torch.ones(E, N)},
            ValueError,
            "b2: got shape (4, 8), allowed: (E, d) = (4, 24)",
        ),
        (
            {"w1": torch.ones(E, WIDE, 2 * N).bfloat16()},
            TypeError,
            "w1: got torch.bfloat16, allowed: torch.float32, the dtype of rows",
        ),
        (
            {
                "w1": torch.ones(E, WIDE, 2 * N).requires_grad_(),
                "w1_main_grad": torch.zeros(E, 2 * N, WIDE),
            },
            ValueError,
            "w1_main_grad: got shape (4, 16, 24) with strides (384, 24, 1), "
            f"{allowed('H', '2I')}{FOR_OTHERS}(E, 2I, H)",
        ),
        (
            {
                "w1": torch.ones(E, WIDE, 2 * N).requires_grad_(),
                "w1_main_grad": torch.zeros(E, WIDE, N),
            },
            ValueError,
            "w1_main_grad: got shape (4, 24, 8), allowed: (E, d, 2n) = (4, 24, 16)",
        ),
        (
            {
                "w2": torch.ones(E, N, WIDE).requires_grad_(),
                "w2_main_grad": torch.zeros(E, 2 * N, WIDE),
            },
            ValueError,
            "w2_main_grad: got shape (4, 16, 24), allowed: (E, n, d) = (4, 8, 24)",
        ),
        (
            {"b1_up": torch.ones(E, N)},
            ValueError,
            "b1_up: got a tensor, allowed: None, for w1_up is None",
        ),
    ],
)
def test_transposed_weights(change, error, message, layout):
    with refused(message, error):
        either_way(True, **{"layout": layout} | change)


@pytest.mark.parametrize("layout", TRANSPOSED_LAYOUTS)
def test_concat_layout_is_not_transposed(layout):
    weights = torch.ones(E, D, 2 * N), None, torch.ones(E, N, D), None
    with refused(f"concat_layout: got True, allowed: False, for layout is {layout!r}"):
        functional.moe_TC_softmax_topk_layer(
            torch.ones(T, D), torch.ones(E, D), *weights, 2, concat_layout=True, layout=layout
        )


@pytest.mark.parametrize("layout", TRANSPOSED_LAYOUTS)
def test_operators_refuse_in_the_same_words(layout):
    x, w1, w2 = torch.ones(T, WIDE), torch.ones(E, WIDE, 2 * N), torch.ones(E, N, WIDE)
    ids, weights = torch.zeros(T, 1).int(), torch.ones(T, 1)

    def forward(w1=w1, w2=w2, **options):
        text = f"w1_layout={layout}"
        return torch.ops.sonicmoe.ids_forward(x, ids, weights, w1, None, w2, None, text, **options)

    forward()
    with refused("w1: got shape (4, 16, 24), allowed: (E, d, 2n) = (4, 24, 16)"):
        forward(w1=torch.ones(E, 2 * N, WIDE))
    with refused("w1: got strides (384, 1, 24), allowed: a contiguous (E, d, 2n)"):
        forward(w1=torch.ones(E, 2 * N, WIDE).mT)
    with refused("w2: got strides (192, 1, 8), allowed: a contiguous (E, n, d)"):
        forward(w2=torch.ones(E, WIDE, N).mT)
    with refused("w2: got shape (8, 24), allowed: (E, n, d)"):
        forward(w2=torch.ones(N, WIDE))
    with refused(f"w1_up: got a tensor, allowed: None, for w1_layout is {layout}"):
        forward(w1_up=w1)
    with refused("x: got shape (6, 24), allowed: (T, d) = (6, 8)"):
        forward(w2=torch.ones(E, WIDE, N))
