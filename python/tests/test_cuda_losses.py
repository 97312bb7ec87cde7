"""Losses on the router's logits on a GPU: by plain PyTorch, and captured in a graph."""

import pytest
import torch
from helpers import NEEDS_HOPPER, assert_as_good
from test_losses import LOSSES, E, K, call, data, loss_and_gradient

from sonicmoe import losses, reference_losses

pytestmark = NEEDS_HOPPER
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def on_gpu(name, dtype, masked):
    return tuple(None if t is None else t.cuda() for t in data(name, dtype, masked))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "score"), LOSSES)
def test_as_good_as_the_reference(name, score, dtype, masked):
    logits, counts, mask = on_gpu(name, DTYPES[dtype], masked)
    of_loss = name, score
    loss, gradient = loss_and_gradient(losses, *of_loss, logits, counts, mask)
    plain = loss_and_gradient(reference_losses, *of_loss, logits, counts, mask)
    exact = loss_and_gradient(reference_losses, *of_loss, logits.double(), counts, mask)
    assert_as_good("loss", loss, plain[0], exact[0])
    if score == "sqrt_softplus" and dtype == "fp32":
        # The slope's 1 - e^(-p^2) is right to 2^-20 there: one_minus_exp2 of src/math/exp.h.
        assert (gradient - exact[1]).norm() <= 2**-19 * exact[1].norm()
    else:
        assert_as_good("dlogits", gradient, plain[1], exact[1])
    if masked:
        assert not gradient[~mask].any()


@pytest.mark.parametrize(("name", "score"), LOSSES)
def test_captured(name, score):
    logits, _, mask = on_gpu(name, torch.bfloat16, True)
    ids = torch.randint(-1, E + 1, (*logits.shape[:-1], K), device="cuda")
    per_sequence = name == "sequence_balance_loss"

    def step():
        counts = losses.count_choices(ids, E, padding_mask=mask, per_sequence=per_sequence)
        losses.update_selection_bias(bias, counts.sum(0) if per_sequence else counts, 0.5)
        leaf = logits.detach().requires_grad_()
        loss = call(losses, name, score, leaf, counts, mask)
        return loss, torch.autograd.grad(loss, leaf)[0]

    bias = torch.zeros(E, device="cuda")
    expected = step()  # also makes the plans
    shift = bias.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for output in captured:
        output.fill_(torch.nan)
    bias.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
    assert torch.equal(bias, shift)
