"""The pictures that tools/figures.py makes of receipts, as SVG with the same bytes each time."""

import io
from typing import Any

GIB = 2**30
#: Bytes of a layer by n, with its weights, for T = 32768, d = 4096, E n = 65536 and K n = 4096, in
#: GiB as read off the bars of the memory figure of arXiv 2512.14080v1.
PUBLISHED = {
    "SonicMoE with its output": {256: 2.53, 512: 2.53, 1024: 2.523},
    "ScatterMoE": {256: 6.533, 512: 4.528, 1024: 3.521},
    "MoMoE": {256: 6.289, 512: 4.277, 1024: 3.271},
    "DeepGEMM++": {256: 6.406, 512: 4.353, 1024: 3.32},
}
PUBLISHED_WEIGHTS = 6 * 65536 * 4096 / GIB
SOURCE = "arXiv 2512.14080v1, read off its bars, less the weights"


def _plot(rows: int, size: tuple[float, float]) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(matplotlib.rcParamsDefault)
    plt.rcParams.update({"svg.hashsalt": "sonicmoe", "font.size": 9})
    return plt.subplots(rows, 1, figsize=size, layout="constrained", squeeze=False)


def _bytes(figure: Any) -> bytes:
    import matplotlib.pyplot as plt

    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    return out.getvalue()


def activation_memory(receipt: dict[str, Any]) -> bytes:
    """Bytes kept for backward over n, from 2048 down, with K n and E n constant."""
    figure, ((axes,),) = _plot(1, (7.2, 3.4))
    names = list(dict.fromkeys(row["thiek"][2] for row in receipt["rows"]))
    for recompute, title in (("none", "sonicmoe"), ("preact", 'sonicmoe, recompute="preact"')):
        rows = [row for row in receipt["rows"] if row["recompute"] == recompute]
        at = [names.index(row["thiek"][2]) for row in rows]
        axes.plot(at, [row["bytes"] / GIB for row in rows], "o-", label=title)
    for name, points in PUBLISHED.items():
        shown = sorted((names.index(n), gib - PUBLISHED_WEIGHTS) for n, gib in points.items())
        axes.plot(*zip(*shown, strict=True), "x:", label=f"{name}, published")
    tokens, hidden = receipt["rows"][0]["thiek"][:2]
    shapes = {row["thiek"][2]: row["thiek"] for row in receipt["rows"]}
    labels = [f"{n}\nE {shapes[n][3]}, K {shapes[n][4]}" for n in names]
    axes.set_xticks(range(len(names)), labels)
    axes.set(ylim=(0, None), ylabel="activation memory a layer, GiB")
    axes.set_xlabel(f"n, at constant FLOPs (T = {tokens}, d = {hidden}, bf16)\n"
                    f"published: {SOURCE}")  # fmt: skip
    axes.legend(fontsize=8)
    return _bytes(figure)


def throughput(receipt: dict[str, Any], grouped_mm: dict[str, Any]) -> bytes:
    """TFLOP/s of forward and backward over the published shapes, a chip and run by color."""
    figure, axes = _plot(2, (7.2, 5.0))
    at = {(row["config"], row["what"]): row for row in receipt["bench"]}
    beside = {row["config"]: row for row in grouped_mm["rows"]}
    configs = [name for name, what in at if what == "forward" and name != "small"]
    chip, other = (of["device"].removeprefix("NVIDIA ").split()[0] for of in (receipt, grouped_mm))
    for panel, what in zip(axes.flat, ("forward", "backward"), strict=True):
        rows = [at[config, what] for config in configs]
        bars = [
            (f"dense bound, {chip}", "0.75",
             [row["tflops"] * row["ms"] / row["dense_bound_ms"] for row in rows]),
            (f"sonicmoe, {chip}", "C0", [row["tflops"] for row in rows]),
            (f"sonicmoe, {other}", "C9",
             [beside[config][f"sonicmoe_{what}_tflops"] for config in configs]),
            (f"torch grouped_mm, {other}", "C1",
             [beside[config][f"grouped_mm_{what}_tflops"] for config in configs]),
        ]  # fmt: skip
        width = 0.8 / len(bars)
        for i, (title, color, values) in enumerate(bars):
            places = [place + (i - (len(bars) - 1) / 2) * width for place in range(len(configs))]
            panel.bar(places, values, width, label=title, color=color)
        panel.set_ylabel(f"{what}, TFLOP/s")
        panel.set_xticks(range(len(configs)), [name.replace("-", "\n") for name in configs])
        panel.set_ylim(0, 900)
        panel.legend(fontsize=7, ncols=4, loc="upper left")
    return _bytes(figure)
