"""All classes of experts that transformers 5.24 marks train as they do with `eager`."""

import copy

import census
import pytest
import torch
from conftest import outcomes
from torch import nn

MARKED = list(census.marked())
TOKENS, HIDDEN, EXPERTS, TOP_K = 40, 32, 8, 2


class Layer(nn.Module):
    """A router of its own and the class's experts."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = experts
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=0.5)  # gates of +-30: past every limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(self.gate(x).softmax(-1), TOP_K)
        return self.experts(x, ids, weights)


def train(layer: nn.Module, implementation: str):
    """Losses of three steps, and the gradients of the first."""
    layer = copy.deepcopy(layer)
    layer.experts.config._experts_implementation = implementation
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x = 3 * torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    losses, gradients = [], None
    for _ in range(3):
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        if gradients is None:
            gradients = {name: p.grad.clone() for name, p in layer.named_parameters()}
            gradients["x"] = x.grad.clone()
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


@pytest.mark.parametrize(("module", "kind"), MARKED, ids=[kind for _, kind in MARKED])
def test_trains_as_eager(module, kind, name):
    layer = Layer(census.experts(module, kind))
    try:
        got, gradients = train(layer, name)
    except NotImplementedError as error:
        outcomes[kind] = str(error)
        raise
    wanted, wanted_gradients = train(layer, "eager")
    # fp32 sums in another order: 2^-17 is 64 roundings. AdamW makes a whole step of the rounding of a
    # tiny gradient, so that the losses are held less tightly.
    assert got == pytest.approx(wanted, rel=1e-4)
    for key, gradient in wanted_gradients.items():
        assert gradient.norm() > 0, key
        error = (gradients[key] - gradient).norm() / gradient.norm()
        assert error < 2**-17, (key, error)
    outcomes[kind] = None


def test_all_classes_are_found():
    assert len(MARKED) == 68
