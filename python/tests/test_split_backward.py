"""Operators of the distributed transports: forward in two parts, dW1 apart from the rest of backward,
and max_rows."""

import pytest
import torch

import sonicmoe  # noqa: F401, loads the operators
from sonicmoe._check import W1_LAYOUTS

T, D, N, E, K = 21, 24, 16, 5, 3


def drawn(layout="interleaved", bias=False):
    """x, ids with sentinels, weights; w1, b1, w2, b2; w1_up, b1_up."""
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(E + 1)[:K] for _ in range(T)]).int()
    ids[ids == E] = -1
    width, parts = (N, 2) if layout == "separate" else (2 * N, 1)
    transposed = layout.startswith("transposed")
    shape = (E, D, width) if transposed else (E, width, D)
    ups = [torch.randn(shape) for _ in range(parts)]
    w2 = torch.randn(E, N, D) if transposed else torch.randn(E, D, N)
    biases = [torch.randn(E, width) if bias else None for _ in range(parts)]
    w1, w1_up = [*ups, None][:2]
    b1, b1_up = [*biases, None][:2]
    experts = w1, b1, w2, torch.randn(E, D) if bias else None
    return (torch.randn(T, D), ids, torch.rand(T, K)), experts, {"w1_up": w1_up}, b1_up


def text_of(layout, more=""):
    return f"activation=swiglu w1_layout={layout} {more}"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", W1_LAYOUTS)
def test_w1s_gradient_alone_has_the_bits_of_backward(layout, bias):
    (x, ids, weights), experts, up, b1_up = drawn(layout, bias)
    w1, _, w2, b2 = experts
    text, dout = text_of(layout), torch.randn(T, D)
    ops = torch.ops.sonicmoe
    _, _, preact, routing = ops.ids_forward(x, ids, weights, *experts, text, **up, b1_up=b1_up)
    whole = ops.ids_backward(dout, x, K, w1, w2, b2, preact, routing, text, **up)
    dpreact = torch.empty_like(preact)
    parts = ops.ids_backward(
        dout, dout, K, w1, w2, b2, preact, routing, text,
        dpreact=dpreact, wants_dw1=False, wants_dw1_up=False, **up,
    )  # fmt: skip
    dw1, dw1_up = ops.up_proj_wgrad(x, dpreact, K, w1, w2, routing, text, **up)
    for i in (0, 1, 3, 4, 5, 7):
        assert torch.equal(parts[i], whole[i])
    assert torch.equal(dw1, whole[2]) and torch.equal(dw1_up, whole[6])
    assert parts[2].numel() == 0 and parts[6].numel() == 0
    for wanted in ((True, False), (False, True), (False, False)):
        some = ops.up_proj_wgrad(x, dpreact, K, w1, w2, routing, text, up["w1_up"], *wanted)
        for gradient, full, asked in zip(some, (dw1, dw1_up), wanted, strict=True):
            assert torch.equal(gradient, full if asked else full[:0])


@pytest.mark.parametrize(
    "more", ["", "max_rows=60", "inference=true", "inference=true max_rows=60"]
)
@pytest.mark.parametrize("layout", W1_LAYOUTS)
def test_forward_in_two_parts_has_the_bits_of_one(layout, more):
    (x, ids, weights), experts, up, b1_up = drawn(layout, bias=True)
    ops, text = torch.ops.sonicmoe, text_of(layout, more)
    out, _, preact, routing = ops.ids_forward(x, ids, weights, *experts, text, **up, b1_up=b1_up)
    text_before = text_of(layout, more.replace("max_rows=60", ""))  # the host learns it later
    made = ops.ids_routing(torch.full_like(x, float("nan")), ids, weights, E, text_before)
    parts = ops.ids_experts_forward(x, ids, weights, made, *experts, text, **up, b1_up=b1_up)
    assert torch.equal(parts[0], out)
    assert preact.shape == parts[1].shape and made.shape == routing.shape
    if "inference" not in more:
        used = int((ids >= 0).sum())
        assert torch.equal(parts[1][:used], preact[:used])
        dout, after = torch.randn(T, D), (text,)
        w1, _, w2, b2 = experts
        whole = ops.ids_backward(dout, x, K, w1, w2, b2, preact, routing, *after, **up)
        again = ops.ids_backward(dout, x, K, w1, w2, b2, parts[1], made, *after, **up)
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_parts_of_forward_say_what_is_wrong():
    (x, ids, weights), experts, _, _ = drawn()
    ops, text = torch.ops.sonicmoe, text_of("interleaved")
    routing = ops.ids_routing(x, ids, weights, E, text)
    for error, call in (
        ("^ids: got ", lambda: ops.ids_routing(x, ids[0], weights, E, text)),
        ("^weights: got ", lambda: ops.ids_routing(x, ids, weights[:3], E, text)),
        ("^experts: got 0", lambda: ops.ids_routing(x, ids, weights, 0, text)),
        (
            "^routing: got ",
            lambda: ops.ids_experts_forward(x, ids, weights, routing[:-1], *experts, text),
        ),
        (
            "^max_rows: got 8, allowed: from ",
            lambda: ops.ids_experts_forward(
                x, ids, weights, routing, *experts, f"{text} max_rows=8"
            ),
        ),
    ):
        with pytest.raises(ValueError, match=error):
            call()


@pytest.mark.parametrize("layout", ["interleaved", "separate"])
@pytest.mark.parametrize("more", ["", "max_rows=40"])
def test_opcheck(layout, more):
    (x, ids, weights), experts, up, b1_up = drawn(layout)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()  # all rows are in use
    w1, _, w2, _ = experts
    ops, text = torch.ops.sonicmoe, text_of(layout, more)
    forward = x, ids, weights, *experts, text
    torch.library.opcheck(ops.ids_forward.default, forward, up)
    torch.library.opcheck(ops.ids_routing.default, (x, ids, weights, E, text))
    _, _, preact, routing = ops.ids_forward(*forward, **up)
    parts = x, ids, weights, routing, *experts, text
    if not more:  # with fewer rows than the block has, H would be too short
        torch.library.opcheck(ops.ids_experts_forward.default, parts, up)
    backward = torch.randn(T, D), x, K, w1, w2, None, preact, routing, text
    torch.library.opcheck(ops.ids_backward.default, backward, up)
    torch.library.opcheck(ops.up_proj_wgrad.default, (x, preact, K, w1, w2, routing, text), up)


def test_it_says_what_is_wrong():
    (x, ids, weights), experts, _, _ = drawn()
    w1, _, w2, _ = experts
    text, op = text_of("interleaved"), torch.ops.sonicmoe.up_proj_wgrad
    _, _, h, routing = torch.ops.sonicmoe.ids_forward(x, ids, weights, *experts, text)
    for arguments, message in (
        ((x[0], h, K, w1, w2, routing), r"^x: got shape \(24,\), allowed: \(T, d\)"),
        ((x[:, :16].contiguous(), h, K, w1, w2, routing), r"^x: got shape \(21, 16\)"),
        ((x, h[:, :8].contiguous(), K, w1, w2, routing), r"^dpreact: got shape \(63, 8\)"),
        ((x, h, K, w1, w2, routing[1:]), r"^routing: got shape"),
        ((x, h, K, w1.double(), w2, routing), "^w1: got float64, allowed: float32"),
        ((x, h, E + 1, w1, w2, routing), r"^top_k: got 6, allowed: 1 to experts \(5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            op(*arguments, text)
    with pytest.raises(ValueError, match="^w1_up: got a tensor, allowed: None"):
        op(x, h, K, w1, w2, routing, text, w1)


@pytest.mark.parametrize("most", [1, 20, 40, 63, 100])
def test_pairs_past_max_rows_are_sentinels(most):
    """They are the last ones in the order of experts, then of tokens."""
    (x, ids, weights), experts, _, _ = drawn()
    w1, _, w2, b2 = experts
    flat = ids.flatten()
    order = torch.where(flat < 0, E, flat).argsort(stable=True)
    left = flat.clone()
    left[order[most:]] = -1
    ops, dout = torch.ops.sonicmoe, torch.randn(T, D)

    def step(ids, text):
        out, counts, preact, routing = ops.ids_forward(x, ids, weights, *experts, text)
        preact[int((ids.flatten() >= 0).sum()) :] = torch.nan  # rows that no expert owns
        gradients = ops.ids_backward(dout, x, K, w1, w2, b2, preact, routing, text)
        dpreact = torch.full_like(preact, torch.nan)
        ops.ids_backward(dout, x, K, w1, w2, b2, preact, routing, text, dpreact=dpreact)
        gradients += ops.up_proj_wgrad(x, dpreact, K, w1, w2, routing, text)
        return counts, preact, (out, *gradients)

    counts, preact, got = step(ids, text_of("interleaved", f"max_rows={most}"))
    all_counts, _, _ = step(ids, text_of("interleaved"))
    _, _, want = step(left.view(T, K), text_of("interleaved"))
    assert preact.shape[0] == min(most, T * K)
    assert torch.equal(counts, all_counts)
    for tensor, expected in zip(got, want, strict=True):
        assert torch.equal(tensor, expected)


def test_max_rows_is_for_ids_and_weights():
    (x, ids, weights), experts, _, _ = drawn()
    with pytest.raises(ValueError, match="^max_rows: got -3, allowed: 0 to 2147483647"):
        torch.ops.sonicmoe.ids_forward(x, ids, weights, *experts, "activation=swiglu max_rows=-3")
    with pytest.raises(ValueError, match="^max_rows: got 3, allowed: 0"):
        logits = torch.randn(T, E)
        layer = f"activation=swiglu top_k={K} max_rows=3"
        torch.ops.sonicmoe.logits_forward(x, logits, None, *experts, layer)
