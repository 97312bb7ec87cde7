"""What benchmarks/moe-token-rounding.py reports: medians, gains, a table and a picture of them."""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS = ("experts", "with_router")
TITLES = {"experts": "experts alone", "with_router": "with the router"}
PASSES = ("forward", "backward", "both")
#: H, I, E and K to the gains in percent, forward, backward and both, of the experts alone on one
#: H100 with T = 16384 and tiles of 128: arXiv 2512.14080, figure 13 and its text.
PUBLISHED = {
    (4096, 1024, 256, 4): (25.7, 11.8, 15.9),
    (1536, 1024, 128, 2): (16.5, 6.1, 9.4),
    (2048, 512, 512, 10): (19.6, 7.9, None),
}


def _with_spread(values: list[float]) -> dict[str, float]:
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return {"median": middle, "deviation": deviation}


def _passes(times: list[list[float]]) -> dict[str, list[float]]:
    """Of rounds [forward, backward]."""
    forward, backward = map(list, zip(*times, strict=True))
    return {"forward": forward, "backward": backward, "both": list(map(sum, times))}


def times_of(times: list[list[float]]) -> dict[str, dict[str, float]]:
    """Medians and median absolute deviations, in milliseconds."""
    return {f"{name}_ms": _with_spread(values) for name, values in _passes(times).items()}


def gains_of(top_k: list[list[float]], rounded: list[list[float]]) -> dict[str, dict[str, float]]:
    """How much more of the same a second does, in percent: the ratio of each round's times."""
    ours = _passes(rounded)
    return {
        name: _with_spread([100 * (a / b - 1) for a, b in zip(plain, ours[name], strict=True)])
        for name, plain in _passes(top_k).items()
    }


def saved(report: dict[str, Any]) -> float:
    """Percent of the rows in top-K's tiles that rounding does not compute; below 0 where it adds."""
    rows = {
        name: variant["rows"] + variant["padded_rows"]
        for name, variant in report["variants"].items()
    }
    return 100 * (1 - rows[report["rule"]] / rows["top_k"])


def _gain(value: dict[str, float]) -> str:
    return f"{value['median']:+.1f} ± {value['deviation']:.1f}"


def line_of(report: dict[str, Any]) -> str:
    """One shape, for a terminal."""
    shape = ",".join(map(str, report["thiekq"]))
    gains = "; ".join(
        f"{TITLES[part]} " + ", ".join(f"{name} {_gain(report['gains'][part][name])}"
                                       for name in PASSES)
        for part in PARTS
    )  # fmt: skip
    return f"{shape} {report['rule']}: tile rows saved {saved(report):.1f} %; gains, %: {gains}"


def table(content: dict[str, Any]) -> str:
    """Markdown. Times are those of forward and backward with the router."""
    lines = [
        "| H, I, E, K | rule | tile rows saved, % | top-K, ms | rounded, ms | gain, % "
        "| experts alone: gain, % | published, % |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for report in in_order(content):
        _, *shape, _ = report["thiekq"]
        rule = report["rule"]
        times = [report["variants"][r]["with_router"]["both_ms"] for r in ("top_k", rule)]
        gains = [_gain(report["gains"][part]["both"]) for part in ("with_router", "experts")]
        published = PUBLISHED.get(tuple(shape), (None,))[-1] if rule == "nr" else None
        cells = [", ".join(map(str, shape)), rule, f"{saved(report):.1f}"]
        cells += [f"{time['median']:.3f}" for time in times] + gains
        cells.append("–" if published is None else f"{published:+.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _sweep(report: dict[str, Any]) -> tuple:
    """All of a shape but its experts, and the rule."""
    tokens, hidden, intermediate, _, top_k, tile = report["thiekq"]
    return hidden, intermediate, top_k, tokens, tile, report["rule"]


def in_order(content: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(content["shapes"], key=lambda report: (_sweep(report), report["thiekq"][3]))


def draw(content: dict[str, Any], picture: Path) -> None:
    """A panel a sweep: gains over the number of experts, beside the tile rows saved."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "sonicmoe", "font.size": 9})
    reports = in_order(content)
    sweeps = list(dict.fromkeys(map(_sweep, reports)))
    columns = min(3, len(sweeps))
    rows = math.ceil(len(sweeps) / columns)
    size = 3.6 * columns, 2.8 * rows
    figure, grid = plt.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    for axes in grid.flat[len(sweeps) :]:
        axes.set_axis_off()
    for axes, sweep in zip(grid.flat, sweeps, strict=False):
        some = [report for report in reports if _sweep(report) == sweep]
        experts = [report["thiekq"][3] for report in some]
        axes.plot(experts, list(map(saved, some)), "k:", label="tile rows saved")
        for part, color in zip(PARTS, ("C0", "C1"), strict=True):
            _band(axes, experts, [r["gains"][part]["both"] for r in some], color, TITLES[part])
        marks = [(e, PUBLISHED.get((*sweep[:2], e, sweep[2]), (None,))[-1]) for e in experts]
        marks = [mark for mark in marks if mark[1] is not None and sweep[-1] == "nr"]
        if marks:
            axes.plot(*zip(*marks, strict=True), "kx", label="published, experts alone, H100")
        axes.axhline(0, color="0.7", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(experts, list(map(str, experts)))
        hidden, intermediate, top_k, tokens, tile, rule = sweep
        axes.set_title(f"H {hidden}, I {intermediate}, K {top_k}; {rule}, tiles of {tile}", size=9)
        axes.set_xlabel(f"experts (T = {tokens})")
        axes.legend(fontsize=7)
    for axes in grid[:, 0]:
        axes.set_ylabel("over top-K, forward + backward, %")
    figure.suptitle(f"{content['device']}; bands: median absolute deviation of a round", size=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)
    plt.close(figure)


def _band(axes: Any, at: list[int], gains: list[dict], color: str, label: str) -> None:
    def edge(sign: int) -> list[float]:
        return [gain["median"] + sign * gain["deviation"] for gain in gains]

    axes.plot(at, edge(0), "o-", color=color, markersize=3, label=label)
    axes.fill_between(at, edge(-1), edge(1), color=color, alpha=0.2, linewidth=0)


def show(receipt: Path, picture: Path, say: Callable[[str], None] = print) -> None:
    """ValueError where there is no receipt, or nothing in it."""
    content = json.loads(receipt.read_text()) if receipt.exists() else {}
    if not content.get("shapes"):
        raise ValueError(f"--json: got {receipt}, allowed: a file with shapes that were timed")
    say(table(content))
    draw(content, picture)
    say(f"\n{receipt}\n{picture}")
