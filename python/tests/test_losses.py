"""Losses on the router's logits, by plain PyTorch, by differences, and in PyTorch's transforms."""

import re

import pytest
import torch
from helpers import assert_as_good
from test_finite_differences import check_directional

import sonicmoe
from sonicmoe import losses, reference_losses

B, S, E, K = 3, 24, 6, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Each loss and score: the function's name, and what it takes beside logits and mask.
LOSSES = [
    *(("switch_loss", score) for score in losses.SCORES),
    *(("sequence_balance_loss", score) for score in losses.SCORES),
    ("z_loss", None),
]


def data(name, dtype, masked):
    """Logits, counts and mask in the loss's shapes; the second sequence is padding alone."""
    logits = (2 * torch.randn(B, S, E)).to(dtype)
    mask = torch.rand(B, S) < 0.7 if masked else None
    if masked:
        mask[1] = False
    ids = torch.randint(-1, E + 1, (B, S, K))
    if name != "sequence_balance_loss":
        logits, ids = logits.flatten(0, 1), ids.flatten(0, 1)
        mask = mask.flatten() if masked else None
    counts = losses.count_choices(
        ids, E, padding_mask=mask, per_sequence=name == "sequence_balance_loss"
    )
    return logits, counts, mask


def call(module, name, score, logits, counts, mask):
    if name == "z_loss":
        return module.z_loss(logits, padding_mask=mask)
    return getattr(module, name)(logits, counts, score=score, padding_mask=mask)


def loss_and_gradient(module, name, score, logits, counts, mask):
    leaf = logits.detach().clone().requires_grad_()
    loss = call(module, name, score, leaf, counts, mask)
    (3 * loss).backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "score"), LOSSES)
def test_as_good_as_the_reference(name, score, dtype, masked):
    logits, counts, mask = data(name, DTYPES[dtype], masked)
    of_loss = name, score
    loss, gradient = loss_and_gradient(losses, *of_loss, logits, counts, mask)
    plain = loss_and_gradient(reference_losses, *of_loss, logits, counts, mask)
    exact = loss_and_gradient(reference_losses, *of_loss, logits.double(), counts, mask)
    assert loss.shape == () and loss.dtype == torch.float32 and loss > 0
    assert_as_good("loss", loss, plain[0], exact[0])
    assert_as_good("dlogits", gradient, plain[1], exact[1])
    if masked:
        assert not gradient[~mask].any() and gradient[mask].any()


@pytest.mark.parametrize("score", losses.SCORES)
def test_the_reference_is_the_published_formula(score):
    logits, ids = torch.randn(B, S, E).double(), torch.randint(0, E, (B, S, K))
    counts = losses.count_choices(ids, E, per_sequence=True)
    p = {
        "softmax": logits.softmax(-1),
        "sigmoid": torch.sigmoid(logits),
        "sqrt_softplus": torch.log1p(logits.exp()).sqrt(),
    }[score]
    shares = p / p.sum(-1, keepdim=True)
    of_sequences = [
        (E / (K * S) * counts[b] * shares[b].mean(0)).sum() for b in range(B)
    ]  # DeepSeek-V3, equations 17 to 20
    expected = torch.stack(of_sequences).mean()
    found = reference_losses.sequence_balance_loss(logits, counts, score=score)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    one = reference_losses.switch_loss(logits[0], counts[0], score=score)
    torch.testing.assert_close(one, of_sequences[0], rtol=1e-13, atol=0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "score"), LOSSES)
def test_differences(name, score, masked):
    logits, counts, mask = data(name, torch.float32, masked)
    loss, gradient = loss_and_gradient(losses, name, score, logits, counts, mask)
    limits, derivatives = [], []
    for _ in range(5):
        limit, derivative = check_directional(
            lambda value: call(losses, name, score, value, counts, mask).item(),
            logits,
            gradient / 3,
            loss.item(),
        )
        limits.append(limit)
        derivatives.append(derivative)
    # The comparison means something: limits are small against what is compared.
    assert sum(limits) < 0.2 * sum(derivatives)


@pytest.mark.parametrize("score", losses.SCORES[1:])
def test_the_reference_by_gradcheck(score):
    logits, counts, mask = data("sequence_balance_loss", torch.float64, True)
    logits[0, 0] = -torch.inf  # a row without shares, where a division by their sum would be NaN
    leaf = logits.requires_grad_()
    loss = reference_losses.sequence_balance_loss(leaf, counts, score=score, padding_mask=mask)
    loss.backward()
    assert loss.isfinite() and leaf.grad.isfinite().all() and not leaf.grad[0, 0].any()
    fine = logits.detach()[:, 1:].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda value: reference_losses.sequence_balance_loss(
            value, counts, score=score, padding_mask=mask[:, 1:]
        ),
        fine,
    )


@pytest.mark.parametrize(("name", "score"), LOSSES)
def test_padding_is_not_read(name, score):
    logits, counts, mask = data(name, torch.float32, True)
    expected = loss_and_gradient(losses, name, score, logits, counts, mask)
    spoiled = logits.masked_fill(~mask.unsqueeze(-1), torch.nan)
    for given in (mask, mask.int(), mask.long(), mask.to(torch.uint8)):
        for got, want in zip(
            loss_and_gradient(losses, name, score, spoiled, counts, given), expected, strict=True
        ):
            assert torch.equal(got, want)


@pytest.mark.parametrize(("name", "score"), LOSSES)
def test_means_over_nothing(name, score):
    logits, counts, mask = data(name, torch.float32, True)
    nothing = torch.zeros_like(mask)
    cases = [(torch.full_like(logits, torch.nan), counts, nothing)]
    if name != "z_loss":
        cases.append((logits, torch.zeros_like(counts), mask))
    if name == "sequence_balance_loss":
        cases += [(logits[:, :0], counts, None), (logits[:0], counts[:0], None)]
    else:
        cases.append((logits[:0], counts, None))
    for case in cases:
        loss, gradient = loss_and_gradient(losses, name, score, *case)
        assert loss.item() == 0 and gradient.shape == case[0].shape and not gradient.any()


def test_one_sequence_is_the_switch_loss():
    logits, counts, _ = data("switch_loss", torch.float32, False)
    for score in losses.SCORES:
        switch = losses.switch_loss(logits, counts, score=score)
        sequence = losses.sequence_balance_loss(logits[None], counts[None], score=score)
        assert torch.equal(switch, sequence)
    of_layer = sonicmoe.functional.switch_loss(logits, counts)
    assert torch.equal(of_layer, losses.switch_loss(logits, counts.long()))
    assert sonicmoe.switch_loss is losses.switch_loss


def test_strided_and_shaped():
    logits, counts, mask = data("sequence_balance_loss", torch.float32, True)
    wide = logits.repeat_interleave(2, dim=-1)[..., ::2]
    assert not wide.is_contiguous()
    assert torch.equal(
        losses.sequence_balance_loss(wide, counts.T.contiguous().T, padding_mask=mask.T.clone().T),
        losses.sequence_balance_loss(logits, counts, padding_mask=mask),
    )
    flat = losses.z_loss(logits.flatten(0, 1), padding_mask=mask.flatten())
    assert torch.equal(losses.z_loss(logits, padding_mask=mask), flat)
    one = losses.z_loss(logits[0, 0])
    torch.testing.assert_close(one, logits[0, 0].logsumexp(0).square())


# In PyTorch.


def operator_calls(dtype):
    for name, score in LOSSES:
        logits, counts, mask = data(name, dtype, True)
        rest = (
            None if name == "z_loss" else counts,
            "z" if name == "z_loss" else "balance",
            score or "softmax",
            mask.flatten().to(torch.uint8),
        )
        logits = logits.reshape(-1, E)
        yield "aux_loss", (logits.requires_grad_(), *rest)
        yield "aux_loss_backward", (torch.ones(()), logits.detach(), *rest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    for name, args in operator_calls(DTYPES[dtype]):
        torch.library.opcheck(getattr(torch.ops.sonicmoe, name).default, args)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "score"), LOSSES)
def test_compiles(name, score, masked):
    torch._dynamo.reset()

    def step(logits, ids, bias, mask):
        per_sequence = name == "sequence_balance_loss"
        counts = losses.count_choices(ids, E, padding_mask=mask, per_sequence=per_sequence)
        losses.update_selection_bias(bias, counts.sum(0) if per_sequence else counts, 0.5)
        return call(losses, name, score, logits, counts, mask)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    logits, _, mask = data(name, torch.float32, masked)
    ids = torch.randint(-1, E + 1, (*logits.shape[:-1], K))
    results = []
    for function in (step, compiled):
        leaf, bias = logits.clone().requires_grad_(), torch.zeros(E)
        loss = function(leaf, ids, bias, mask)
        loss.backward()
        results.append((loss.detach(), leaf.grad, bias))
    assert results[0][2].any()
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)


def test_one_graph_serves_every_number_of_sequences():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def step(logits, ids):
        counts = losses.count_choices(ids, E, per_sequence=True)
        return losses.sequence_balance_loss(logits, counts)

    for batch in (13, 17, 19, 23):  # equal sizes would be taken for one and the same
        logits, ids = torch.randn(batch, 11, E), torch.randint(0, E, (batch, 11, K))
        counts = losses.count_choices(ids, E, per_sequence=True)
        assert torch.equal(step(logits, ids), losses.sequence_balance_loss(logits, counts))
    assert len(graphs) == 1


@pytest.mark.parametrize(("name", "score"), LOSSES)
def test_transforms(name, score):
    logits, counts, mask = data(name, torch.float32, True)
    _, gradient = loss_and_gradient(losses, name, score, logits, counts, mask)
    found = torch.func.grad(lambda value: 3 * call(losses, name, score, value, counts, mask))
    assert torch.equal(found(logits), gradient)
    leaf = logits.clone().requires_grad_()
    loss = call(losses, name, score, leaf, counts, mask)
    with pytest.raises(RuntimeError, match="aux_loss has no second derivative"):
        torch.autograd.grad(loss, leaf, create_graph=True)


# Counts and the selection bias.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_count_choices(dtype):
    ids = torch.randint(-2, E + 2, (B, S, K), dtype=dtype)
    ids[0, 0] = torch.iinfo(dtype).max
    ids[0, 1] = torch.iinfo(dtype).min
    for mask in (None, torch.rand(B, S) < 0.6, (torch.rand(B, S) < 0.6).int()):
        for shape, per_sequence in (((B, S), True), ((B, S), False), ((B * S,), False)):
            of_shape = None if mask is None else mask.view(shape)
            args = ids.view(*shape, K), E
            options = dict(padding_mask=of_shape, per_sequence=per_sequence)
            counts = losses.count_choices(*args, **options)
            assert counts.dtype == torch.int32 and counts.is_contiguous()
            assert torch.equal(counts, reference_losses.count_choices(*args, **options))
    assert losses.count_choices(ids[:0], E, per_sequence=True).shape == (0, E)
    assert losses.count_choices(ids[:, :0], E, per_sequence=True).tolist() == [[0] * E] * B
    assert losses.count_choices(torch.tensor([[3, 3], [0, -1]]), 4).tolist() == [1, 0, 0, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_update_selection_bias(dtype):
    bias = torch.nn.Parameter(torch.zeros(4))
    losses.update_selection_bias(bias, torch.tensor([1, 2, 3, 2], dtype=dtype), 0.25)
    assert bias.tolist() == [0.25, 0, -0.25, 0] and bias.grad is None
    # So large that fp32 would not tell the counts from their mean.
    big = 2**31 - 8 if dtype == torch.int32 else 2**50
    losses.update_selection_bias(bias, torch.tensor([big, big + 1, big, big], dtype=dtype), 0.25)
    assert bias.tolist() == [0.5, -0.25, 0, 0.25]
    plain = bias.detach().clone()
    counts = torch.randint(0, 50, (4,), dtype=dtype)
    losses.update_selection_bias(bias, counts, 1e-3)
    reference_losses.update_selection_bias(plain, counts, 1e-3)
    assert torch.equal(bias, plain)


@pytest.mark.parametrize("name", ["switch_loss", "sequence_balance_loss"])
def test_large_counts(name):
    """int64 counts beyond 32 bits: all, or those of one sequence."""
    logits, counts, _ = data(name, torch.float32, False)
    expected = getattr(losses, name)(logits, counts)
    large = counts.long()
    if name == "switch_loss":
        large *= 2**29
    else:
        large[0] *= 2**40
    torch.testing.assert_close(getattr(losses, name)(logits, large), expected)


def test_counts_of_batches():
    ids = torch.randint(-1, E + 1, (4, S, K))
    made = torch.func.vmap(lambda one: losses.count_choices(one, E))(ids)
    assert torch.equal(made, torch.stack([losses.count_choices(one, E) for one in ids]))


# Refusals.

LOGITS, COUNTS = torch.ones(4, E), torch.ones(E).int()
IDS = torch.zeros(4, K).long()
FLOATS = "torch.float32, torch.bfloat16, torch.float16"
INTS = "torch.int32, torch.int64"
MASKS = "torch.bool, or integers 0 and 1"
ALL_SCORES = "'softmax', 'sigmoid', 'sqrt_softplus'"
REFUSED = [
    ("switch_loss", (None, COUNTS), {}, TypeError, "logits: got NoneType, allowed: a tensor"),
    (
        "switch_loss",
        (LOGITS.double(), COUNTS),
        {},
        TypeError,
        f"logits: got torch.float64, allowed: {FLOATS}",
    ),
    (
        "switch_loss",
        (LOGITS[0], COUNTS),
        {},
        ValueError,
        f"logits: got shape ({E},), allowed: (T, E)",
    ),
    (
        "switch_loss",
        (LOGITS, COUNTS[:2]),
        {},
        ValueError,
        f"counts: got shape (2,), allowed: (E) = ({E},)",
    ),
    (
        "switch_loss",
        (LOGITS, COUNTS.float()),
        {},
        TypeError,
        f"counts: got torch.float32, allowed: {INTS}",
    ),
    (
        "switch_loss",
        (LOGITS, COUNTS),
        {"score": "relu"},
        ValueError,
        f"score: got 'relu', allowed: {ALL_SCORES}",
    ),
    (
        "switch_loss",
        (LOGITS, COUNTS),
        {"score": 1},
        TypeError,
        f"score: got 1, allowed: {ALL_SCORES}",
    ),
    (
        "switch_loss",
        (LOGITS, COUNTS),
        {"padding_mask": torch.ones(4)},
        TypeError,
        f"padding_mask: got torch.float32, allowed: {MASKS}",
    ),
    (
        "switch_loss",
        (LOGITS, COUNTS),
        {"padding_mask": [True] * 4},
        TypeError,
        "padding_mask: got list, allowed: a tensor",
    ),
    (
        "switch_loss",
        (LOGITS, COUNTS),
        {"padding_mask": torch.ones(2, 2).bool()},
        ValueError,
        "padding_mask: got shape (2, 2), allowed: (T) = (4,)",
    ),
    (
        "switch_loss",
        (LOGITS, COUNTS),
        {"padding_mask": torch.ones(4, device="meta").bool()},
        ValueError,
        "padding_mask: got a tensor on meta, allowed: cpu, where the other argument is",
    ),
    (
        "sequence_balance_loss",
        (LOGITS, COUNTS),
        {},
        ValueError,
        f"logits: got shape (4, {E}), allowed: (B, S, E)",
    ),
    (
        "sequence_balance_loss",
        (LOGITS[None], COUNTS),
        {},
        ValueError,
        f"counts: got shape ({E},), allowed: (B, E) = (1, {E})",
    ),
    (
        "sequence_balance_loss",
        (LOGITS[None], COUNTS[None]),
        {"padding_mask": torch.ones(4).bool()},
        ValueError,
        "padding_mask: got shape (4,), allowed: (B, S) = (1, 4)",
    ),
    (
        "z_loss",
        (LOGITS[0, 0],),
        {},
        ValueError,
        "logits: got shape (), allowed: (..., E)",
    ),
    (
        "z_loss",
        (LOGITS,),
        {"padding_mask": torch.ones(3).bool()},
        ValueError,
        "padding_mask: got shape (3,), allowed: (...) = (4,)",
    ),
    ("count_choices", (IDS.float(), 4), {}, TypeError, f"ids: got torch.float32, allowed: {INTS}"),
    (
        "count_choices",
        (IDS[0], 4),
        {},
        ValueError,
        f"ids: got shape ({K},), allowed: (T, K) or (B, S, K)",
    ),
    (
        "count_choices",
        (IDS, 4),
        {"per_sequence": True},
        ValueError,
        f"ids: got shape (4, {K}), allowed: (B, S, K) with per_sequence",
    ),
    ("count_choices", (IDS, 0), {}, ValueError, "num_experts: got 0, allowed: 1 to 65536"),
    ("count_choices", (IDS, 2.0), {}, TypeError, "num_experts: got 2.0, allowed: an int"),
    (
        "count_choices",
        (IDS, 4),
        {"padding_mask": torch.ones(5).bool()},
        ValueError,
        "padding_mask: got shape (5,), allowed: (T) = (4,)",
    ),
    (
        "update_selection_bias",
        (torch.ones(E).bfloat16(), COUNTS, 0.1),
        {},
        TypeError,
        "bias: got torch.bfloat16, allowed: torch.float32",
    ),
    (
        "update_selection_bias",
        (torch.ones(1, E), COUNTS, 0.1),
        {},
        ValueError,
        f"bias: got shape (1, {E}), allowed: (E)",
    ),
    (
        "update_selection_bias",
        (torch.ones(E), COUNTS[:2], 0.1),
        {},
        ValueError,
        f"counts: got shape (2,), allowed: (E) = ({E},)",
    ),
    (
        "update_selection_bias",
        (torch.ones(E), COUNTS, -0.1),
        {},
        ValueError,
        "rate: got -0.1, allowed: finite numbers from 0 on, as fp32 has them",
    ),
    (
        "update_selection_bias",
        (torch.ones(E), COUNTS, 1e39),
        {},
        ValueError,
        "rate: got 1e+39, allowed: finite numbers from 0 on, as fp32 has them",
    ),
    (
        "update_selection_bias",
        (torch.ones(E), COUNTS, "0.1"),
        {},
        TypeError,
        "rate: got '0.1', allowed: finite numbers from 0 on",
    ),
]


@pytest.mark.parametrize(("name", "args", "options", "error", "message"), REFUSED)
def test_refusals(name, args, options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        getattr(losses, name)(*args, **options)


def test_operator_refusals():
    operator = torch.ops.sonicmoe.aux_loss
    mask = torch.ones(4).to(torch.uint8)
    for args, message in (
        ((LOGITS, COUNTS, "Z"), "loss: got Z, allowed: balance, z"),
        (
            (LOGITS, COUNTS, "balance", "relu"),
            "score: got relu, allowed: softmax, sigmoid, sqrt_softplus",
        ),
        (
            (LOGITS, None, "z", "sigmoid"),
            "score: got sigmoid, allowed: softmax (the default) with loss z",
        ),
        ((LOGITS, None), "counts: got null, allowed: a pointer to (B, E) int32"),
        (
            (LOGITS, torch.ones(3, E).int()),
            "sequences: got 3, allowed: divisors of tokens",
        ),
        (
            (LOGITS, torch.ones(2, E + 1).int()),
            f"counts: got shape (2, {E + 1}), allowed: (B, E) = (2, {E})",
        ),
        (
            (LOGITS, COUNTS, "balance", "softmax", mask[:3]),
            "token_mask: got shape (3,), allowed: (T) = (4,)",
        ),
        (
            (LOGITS, COUNTS, "balance", "softmax", mask.bool()),
            "token_mask: got bool, allowed: uint8",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            operator(*args)
