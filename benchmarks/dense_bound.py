"""What a layer is measured against: its six products as dense batched GEMMs, experts even."""

from collections.abc import Callable

import torch


def dense_gemms(thiek: list[int], width: int, dtype: torch.dtype) -> dict[str, list[Callable]]:
    """Calls of torch.bmm, forward's two and backward's four. `width` is 2I with a gate, else I."""
    tokens, hidden, intermediate, experts, top_k = thiek
    rows = max(1, tokens * top_k // experts)

    def normal(scale: float, *shape: int) -> torch.Tensor:
        return (torch.randn(experts, *shape, device="cuda") * scale).to(dtype)

    x, h, a = normal(0.2, rows, hidden), normal(0.02, rows, width), normal(0.02, rows, intermediate)
    w1, w2 = normal(0.02, width, hidden), normal(0.02, hidden, intermediate)
    return {
        "forward": [lambda: torch.bmm(x, w1.mT), lambda: torch.bmm(a, w2.mT)],
        "backward": [
            lambda: torch.bmm(x, w2),
            lambda: torch.bmm(h, w1),
            lambda: torch.bmm(x.mT, a),
            lambda: torch.bmm(h.mT, x),
        ],
    }
