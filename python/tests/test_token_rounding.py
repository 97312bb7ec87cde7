"""Token rounding: the operator against the plain reference, gradients, the module, refusals.

Counts, lists and the scores of top-K entries do not depend on the order of sums that matters here,
so they are compared for equality where logits make the order of probabilities certain; scores are
fp32 softmax terms, each a few roundings from the reference's.
"""

import numpy
import pytest
import torch

from sonicmoe import ActivationType, KernelBackendMoE, MoE, _ops, functional, reference
from sonicmoe._check import ROUNDING_RULES

RULES = tuple(ROUNDING_RULES)
ALLOWED = "'nr', 'sr', 'nr_s', 'balance', 'up', 'down', 'nearest', 'stochastic', 'nearest_scores'"
EPS = torch.finfo(torch.float32).eps


def logits_of(tokens, experts, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    # Uneven experts, so that rounding has something to do.
    skew = torch.linspace(0, 1.5, experts)
    return (torch.randn(tokens, experts, generator=generator) + skew).to(dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("tile", [1, 3, 16, 128])
def test_lists_equal_the_reference(rule, mode, tile):
    logits = logits_of(90, 11, seed=tile)
    got = functional.token_rounding(
        logits, 3, rule=rule, tile=tile, softmax_over_topk=mode[0], norm_topk_probs=mode[1], seed=7,
        offset=5,
    )  # fmt: skip
    draws = torch.tensor([7, 5])
    want = reference.token_rounding(logits, 3, rule, tile, *mode, draws)
    for ours, theirs in zip(got[1:], want[1:4], strict=True):
        assert torch.equal(ours, theirs)
    # exp, a sum of 11 and a division: relative error below 32 eps on either side.
    torch.testing.assert_close(got[0], want[0], rtol=64 * EPS, atol=0)


def test_tile_one_is_plain_top_k():
    logits = logits_of(50, 9, seed=1)
    scores, tokens, experts, counts = functional.token_rounding(logits, 2, tile=1)
    top_scores, ids = torch.ops.sonicmoe.top_k(logits, "top_k=2")
    order = ids.sort(dim=1).indices
    assert torch.equal(tokens, torch.arange(50).repeat_interleave(2).int())
    assert torch.equal(experts.view(50, 2), ids.gather(1, order))
    assert torch.equal(scores.view(50, 2), top_scores.gather(1, order))
    assert torch.equal(counts, ids.flatten().bincount(minlength=9).int())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", [(True, False), (False, False), (False, True)])
def test_gradient_equals_autograd_of_the_reference(rule, mode):
    logits = logits_of(70, 8, seed=3).requires_grad_()
    scores = functional.token_rounding(
        logits, 2, rule=rule, tile=16, softmax_over_topk=mode[0], norm_topk_probs=mode[1]
    )[0]
    dscores = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0))
    scores.backward(dscores)
    wide = logits.detach().double().requires_grad_()
    expected = reference.token_rounding(wide, 2, rule, 16, *mode, None)
    expected[0].backward(dscores.double())
    # Sums of up to 8 products of numbers of unit size, in fp32.
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=0, atol=64 * EPS)


def test_module_rounds_while_training_and_not_otherwise():
    torch.manual_seed(0)
    options = dict(routing="token_rounding", rounding="up", tile=16)
    moe = MoE(8, 2, 16, 8, ActivationType.SWIGLU, False, 0.1, **options)
    plain = MoE(8, 2, 16, 8, ActivationType.SWIGLU, False, 0.1)
    plain.load_state_dict(moe.state_dict())
    x = torch.randn(6, 20, 16)
    assert not torch.equal(moe(x)[0], plain(x)[0])
    assert torch.equal(moe(x, is_inference_mode=True)[0], plain(x, is_inference_mode=True)[0])
    torch.testing.assert_close(moe(x)[1], plain(x)[1])  # the loss counts what top-K chose
    moe.eval()
    assert torch.equal(moe(x)[0], plain(x)[0])


@pytest.mark.parametrize("rule", RULES)
def test_module_equals_the_torch_backend(rule):
    torch.manual_seed(0)
    moe = MoE(
        6, 2, 16, 24, ActivationType.SWIGLU, True, 0.3, routing="token_rounding", rounding=rule,
        tile=16,
    )  # fmt: skip
    x = torch.randn(100, 16)
    gradients = []
    for backend in (KernelBackendMoE.sonicmoe, KernelBackendMoE.torch):
        torch.manual_seed(1)  # the draws
        moe.zero_grad()
        inputs = x.clone().requires_grad_()
        out, loss = moe(inputs, backend)
        (out.square().sum() + loss).backward()
        gradients.append([out, loss, inputs.grad, *(p.grad for p in moe.parameters())])
    for ours, theirs in zip(*gradients, strict=True):
        error = (ours - theirs).norm() / theirs.norm().clamp_min(1e-30)
        assert error < 1e-5  # fp32 in other orders: sums of at most 600 terms


@pytest.mark.parametrize(
    "dtype, autocasts", [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_a_linear_router_with_a_bias(dtype, autocasts):
    """Its bias is in the logits before they are rounded to a type, and then to tiles."""
    torch.manual_seed(0)
    moe = MoE(6, 2, 16, 24, "swiglu", True, 0.3, routing="token_rounding", tile=16)
    moe.router.bias = torch.nn.Parameter(torch.linspace(-1, 1, 6))
    x = torch.randn(100, 16).to(dtype)
    if not autocasts:
        moe = moe.to(dtype)
        moe.router.float()
    outputs, gradients = [], []
    for backend in (KernelBackendMoE.sonicmoe, KernelBackendMoE.torch):
        moe.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            outputs.append(moe(x, backend)[0])
        outputs[-1].float().square().sum().backward()
        gradients.append(moe.router.bias.grad)
    # Either side rounds H, A, Y and the output by half an eps each.
    tolerance = 2 * 4 * torch.finfo(torch.bfloat16 if autocasts else dtype).eps / 2
    for ours, theirs in (outputs, gradients):
        assert theirs.norm() > 0 and (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ROUNDING_RULES.values())
@pytest.mark.parametrize("mode", [(True, False), (False, False), (False, True)])
def test_layers_equal_their_parts(mode, rule, dtype):
    """With the router or its logits, a layer rounds as token_rounding does, forward and backward."""
    ops = torch.ops.sonicmoe
    torch.manual_seed(9)
    x, router_w, dout = (torch.randn(*s).to(dtype) for s in ((90, 16), (6, 16), (90, 16)))
    weights = torch.randn(6, 16, 16).to(dtype), None, torch.randn(6, 16, 8).to(dtype), None
    draws = torch.tensor([3, 4])
    router = " ".join(f"{k}={str(v).lower()}" for k, v in _ops.router_options(*mode).items())
    layer = f"{router} top_k=2 rounding_tile=16 rounding_rule={rule}"
    o, logits, counts, *kept = ops.layer_forward(x, router_w, *weights, layer, draws=draws)
    scores, *lists, after, before = ops.token_rounding(logits, draws, layer)
    expected, counted, *routed = ops.routed_forward(x, scores, *lists, *weights, "")
    assert torch.equal(o, expected) and torch.equal(counts, before)
    assert torch.equal(counted, after) and not torch.equal(after, before)
    from_logits = ops.logits_forward(x, logits, None, *weights, layer, draws=draws)
    assert torch.equal(from_logits[0], o) and torch.equal(from_logits[1], before)

    w1, _, w2, _ = weights
    parts = ops.routed_backward(dout, x, w1, w2, None, *routed, "")
    dlogits = ops.token_rounding_backward(parts[1], logits, *lists, layer)
    given = ops.logits_backward(dout, x, logits, False, w1, w2, None, *from_logits[2:], layer)
    whole = ops.layer_backward(dout, None, x, router_w, w1, w2, None, logits, *kept, layer)
    assert torch.equal(given[0], parts[0]) and torch.equal(given[1], dlogits)
    for i in (2, 4):
        assert torch.equal(given[i], parts[i]) and torch.equal(whole[i], parts[i])
    # The layer's own products of dlogits, in fp32 and rounded once; the parts round their dx, too.
    of_router = dlogits.float() @ router_w.float() + parts[0].float(), dlogits.float().T @ x.float()
    for ours, want in zip(whole[:2], of_router, strict=True):
        assert (ours.float() - want).norm() <= 2 * torch.finfo(dtype).eps * want.norm()


def test_draws_follow_the_generator():
    moe = MoE(
        16, 2, 16, 8, ActivationType.SWIGLU, False, 0.3, routing="token_rounding", rounding="sr",
        tile=16,
    )  # fmt: skip
    x = torch.randn(200, 16)
    outputs = []
    for seed in (0, 0, 1, 2, 3):
        torch.manual_seed(seed)
        outputs.append(moe(x)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not all(torch.equal(outputs[0], other) for other in outputs[2:])


def _detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value


def test_opcheck_and_compile():
    logits = logits_of(33, 8, seed=2).requires_grad_()
    draws = torch.tensor([1, 2])
    layer = "top_k=2 rounding_tile=16 rounding_rule=stochastic"
    ops = torch.ops.sonicmoe
    torch.library.opcheck(ops.token_rounding.default, (logits, draws, layer))
    w1, w2 = torch.randn(8, 16, 16, requires_grad=True), torch.randn(8, 16, 8, requires_grad=True)
    x, router_w = torch.randn(33, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    inputs = {
        ops.layer_forward: (x, router_w, w1, None, w2, None, layer),
        ops.logits_forward: (x, logits, None, w1, None, w2, None, layer),
    }
    for operator, args in inputs.items():
        # The other tests of opcheck compare H, whose last rows nobody writes.
        some = "test_schema", "test_autograd_registration", "test_faketensor"
        torch.library.opcheck(operator.default, args, {"draws": draws}, test_utils=some)
        args = *args[:-1], f"{layer} inference=true"
        torch.library.opcheck(operator.default, [_detached(a) for a in args], {"draws": draws})
    moe = MoE(8, 2, 16, 8, ActivationType.SWIGLU, False, 0.3, routing="token_rounding", tile=16)
    x = torch.randn(64, 16)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x)[0], moe(x)[0])


def test_no_tokens():
    scores, tokens, experts, counts = functional.token_rounding(torch.empty(0, 4), 2)
    assert scores.numel() == tokens.numel() == experts.numel() == 0
    assert torch.equal(counts, torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile": 0}, "tile: got 0, allowed: 1 to 1024"),
        ({"tile": 1025}, "tile: got 1025, allowed: 1 to 1024"),
        ({"K": 5}, "K: got 5, allowed: 1 to E (4)"),
        (
            {"rule": "nr_f"},
            f"rule: got 'nr_f', allowed: {ALLOWED}",
        ),
    ],
)
def test_refusals(changes, message):
    arguments = {"logits": torch.zeros(6, 4), "K": 2, **changes}
    with pytest.raises(ValueError) as error:
        functional.token_rounding(**arguments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1.7}, "seed: got 1.7, allowed: an int"),
        ({"offset": None}, "offset: got None, allowed: an int"),
        ({"rule": ["nr"]}, "rule: got ['nr'], allowed: a str"),
        ({"softmax_over_topk": "no"}, "softmax_over_topk: got 'no', allowed: True, False"),
        ({"norm_topk_probs": 1}, "norm_topk_probs: got 1, allowed: True, False"),
        (
            {"logits": torch.zeros(6, 4, dtype=torch.int64)},
            "logits: got torch.int64, allowed: torch.float32, torch.bfloat16, torch.float16",
        ),
    ],
)
def test_refused_types(changes, message):
    with pytest.raises(TypeError) as error:
        functional.token_rounding(**{"logits": torch.zeros(6, 4), "K": 2, **changes})
    assert str(error.value) == message


def test_seeds_are_64_bits():
    logits = torch.randn(200, 8)

    def counts(seed, offset):
        return functional.token_rounding(logits, 2, rule="sr", seed=seed, offset=offset)[3].tolist()

    for word in (1, 2**31, 2**62):
        assert counts(2**64 - word, 7) == counts(-word, 7)
        assert counts(7, 2**64 - word) == counts(7, -word)
    assert len({tuple(counts(seed, 0)) for seed in (0, 1, 2**63, 2**64 - 1)}) > 1
    moving = torch.compile(functional.token_rounding, fullgraph=True, backend="aot_eager")
    for offset in (3, 4, 2**62, 2**64 - 2):
        got = moving(logits, 2, rule="sr", tile=8, seed=2**64 - 1, offset=offset)
        want = functional.token_rounding(
            logits, 2, rule="sr", tile=8, seed=2**64 - 1, offset=offset
        )
        assert torch.equal(got[3], want[3])
    # NumPy's integers are integers.
    assert counts(numpy.int64(7), numpy.uint64(2**64 - 9)) == counts(7, -9)
    with pytest.raises(ValueError, match=f"^seed: got {2**64}, allowed: "):
        counts(2**64, 0)


def test_module_refusals():
    for options, message in [
        (
            {"routing": "expert_choice"},
            "routing: got 'expert_choice', allowed: 'top_k', 'token_rounding'",
        ),
        ({"tile": 0}, "tile: got 0, allowed: 1 to 1024"),
        (
            {"rounding": "x"},
            f"rounding: got 'x', allowed: {ALLOWED}",
        ),
    ]:
        with pytest.raises(ValueError) as error:
            MoE(4, 2, 8, 8, ActivationType.SWIGLU, False, 0.1, **options)
        assert str(error.value) == message
