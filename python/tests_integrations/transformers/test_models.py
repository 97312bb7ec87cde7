"""Whole models of transformers 5.24 train as they do with `eager`."""

import copy

import census
import pytest
import torch

#: Models that census.SMALL does not fit; test_classes.py trains their experts.
TOO_SPECIAL = {
    "BeamExperts",
    "DeepseekOcr2TextExperts",
    "DiffusionGemmaTextExperts",
    "Dots3NoteExperts",
    "Ernie4_5_VLMoeMoeExperts",
    "FlintExperts",
    "Gemma4TextExperts",
    "Glm4vMoeTextExperts",
    "Glm5NextTextExperts",
    "HYV4VLExperts",
    "Lfm2MoeExperts",
    "MiMoV2FlashExperts",
    "Mistral4Experts",
    "Qwen3OmniMoeTalkerTextExperts",
    "ZayaExperts",
}
WHOLE = [(module, kind) for module, kind in census.marked() if kind not in TOO_SPECIAL]


def train(model, implementation: str, dtype: torch.dtype = torch.float32):
    """Losses of three steps, and the gradients of the first."""
    model = copy.deepcopy(model).to(dtype)
    model.set_experts_implementation(implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(1))
    losses, gradients = [], None
    for _ in range(3):
        torch.manual_seed(2)  # dropout, and routers that add noise
        optimizer.zero_grad()
        out = model(input_ids=ids)[0].float()
        if out.shape[-1] == 96:
            loss = torch.nn.functional.cross_entropy(
                out[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            )
        else:
            loss = (out * torch.linspace(-1, 1, out.shape[-1])).mean()
        loss.backward()
        if gradients is None:
            gradients = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


@pytest.mark.parametrize(("module", "kind"), WHOLE, ids=[kind for _, kind in WHOLE])
def test_trains_as_eager(module, kind, name):
    model = census.whole_model(module, kind)
    got, gradients = train(model, name)
    wanted, wanted_gradients = train(model, "eager")
    assert got == pytest.approx(wanted, rel=1e-4)
    assert gradients.keys() == wanted_gradients.keys()
    scale = torch.stack([g.norm() for g in wanted_gradients.values()]).max()
    for key, gradient in wanted_gradients.items():
        error = (gradients[key] - gradient).norm()
        assert error <= 1e-4 * gradient.norm() + 1e-6 * scale, key
