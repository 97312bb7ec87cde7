"""Draws token-rounding-waste.svg: the share of GEMM rows that is padding, with and without rounding.

Counts are those of a random router: each expert's count is binomial(T, K/E), seed 0. A GEMM with
tiles of 128 rows computes ceil(f / 128) * 128 rows for an expert with f tokens.
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

TILE = 128
MODELS = {  # experts, experts a token
    "Mixtral 8x7B": (8, 2),
    "OLMoE-1B-7B": (64, 8),
    "gpt-oss-120b": (128, 4),
    "Qwen3-30B-A3B": (128, 8),
    "DeepSeek-V3": (256, 8),
    "Kimi K2": (384, 8),
    "Qwen3-Next-80B-A3B": (512, 10),
}


def padding(tokens: int, experts: int, top_k: int) -> float:
    counts = np.random.default_rng(0).binomial(tokens, top_k / experts, size=(200, experts))
    padded = (-counts % TILE).sum()
    return 100 * padded / (padded + counts.sum())


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "sonicmoe", "font.size": 9})
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    place = np.arange(len(MODELS))
    for shift, tokens in ((-0.2, 4096), (0.2, 16384)):
        shares = [padding(tokens, *model) for model in MODELS.values()]
        bars = axes.barh(place + shift, shares, 0.38, label=f"top-K, T = {tokens}")
        labels = [
            f"{share:.0f} %  ({tokens * k / e:.0f} rows an expert)"
            for share, (e, k) in zip(shares, MODELS.values(), strict=True)
        ]
        axes.bar_label(bars, labels, padding=3, fontsize=7)
    axes.set(yticks=place, yticklabels=MODELS, xlim=(0, 80))
    axes.set_xlabel(f"padding, % of the rows that tiles of {TILE} compute (0 with token rounding)")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    out = Path(__file__).with_suffix(".svg")
    figure.savefig(out, metadata={"Date": None})
    print(out)


if __name__ == "__main__":
    main()
