"""What benchmarks/quality.py reports: the receipt of its results, a table and a picture of it."""

import json
import statistics
from pathlib import Path
from typing import Any

NAMES = {
    "top_k": "top-K",
    "nr": "NR-f",
    "sr": "SR-f",
    "nr_s": "NR-s",
    "balance": "Balance-f",
    "up": "UP",
    "down": "DOWN",
}
ROWS = ("full", "half", "quarter")


def group_of(rule: str, rows: str) -> tuple[str, ...]:
    return (rule,) if rows == "full" else (rule, rows)


def title(group: dict[str, Any]) -> str:
    rows = "" if group["rows"] == "full" else f", {group['rows']} rows"
    return NAMES[group["rule"]] + rows


def lines_of(log: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """A finished log as a result: a head, and a point for each validation; `tokens` a step."""
    points, since = [], []
    for line in log:
        since.append(line)
        if "validation_loss" in line:
            means = {key: statistics.fmean(e[key] for e in since) for key in ("loss", "aux_loss")}
            at = {"step": line["step"], "tokens": line["step"] * tokens}
            points.append(at | {"validation_loss": line["validation_loss"]} | means)
            since = []
    head = {
        "validation_loss": points[-1]["validation_loss"],
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in log),
        "tokens": log[-1]["step"] * tokens,
    }
    return [head, *points]


def read(folder: Path) -> list[dict[str, Any]]:
    """Results with their curves, rule by rule."""
    runs = []
    for file in folder.glob("*.jsonl"):
        head, *curve = map(json.loads, file.read_text().splitlines())
        runs.append(head | {"curve": curve})
    rules = list(NAMES)
    return sorted(runs, key=lambda r: (ROWS.index(r["rows"]), rules.index(r["rule"]), r["seed"]))


def mean_and_error(values: list[float]) -> dict[str, Any]:
    """The standard error of the mean needs two values."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    mean = statistics.fmean(values) if values else None
    return {"pairs": len(values), "mean": mean, "standard_error": error}


def groups(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per rule and rows: means over seeds, and differences to top-K in pairs of one seed.

    Losses pair with top-K at all rows. Speeds pair with top-K at the same rows on such a device.
    """
    top = {(r["rows"], r["seed"]): r for r in runs if r["rule"] == "top_k"}
    made = []
    for rule, rows in dict.fromkeys((r["rule"], r["rows"]) for r in runs):
        some = [r for r in runs if (r["rule"], r["rows"]) == (rule, rows)]
        losses = [r["validation_loss"] for r in some]
        pairs = [(r, top["full", r["seed"]]) for r in some if ("full", r["seed"]) in top]
        speeds = [(r, top[rows, r["seed"]]) for r in some if (rows, r["seed"]) in top]
        speeds = [(r, t) for r, t in speeds if r["device"] == t["device"]]
        made.append(
            {
                "rule": rule,
                "rows": rows,
                "seeds": [r["seed"] for r in some],
                "validation_loss": statistics.fmean(losses),
                "deviation": statistics.stdev(losses) if len(losses) > 1 else None,
                "difference": mean_and_error(
                    [r["validation_loss"] - t["validation_loss"] for r, t in pairs]
                ),
                "tokens_per_s": statistics.fmean(r["tokens_per_s"] for r in some),
                "speed": mean_and_error(
                    [r["tokens_per_s"] / t["tokens_per_s"] - 1 for r, t in speeds]
                ),
            }
        )
    return made


def write(folder: Path, receipt: Path) -> None:
    """ValueError where there is nothing to report."""
    runs = read(folder)
    if not runs:
        raise ValueError(f"--out: got {folder}, allowed: a folder with a finished job")
    study = json.loads((folder / "study.json").read_text())
    content = study | {"groups": groups(runs), "runs": runs}
    receipt.write_text(json.dumps(content, indent=1) + "\n")


def _signed(value: dict[str, Any], scale: float, digits: int) -> str:
    if not value["pairs"]:
        return "–"
    error = value["standard_error"]
    text = f"{value['mean'] * scale:+.{digits}f}"
    return text if error is None else f"{text} ± {error * scale:.{digits}f}"


def table(receipt: dict[str, Any]) -> str:
    lines = [
        "| rule | seeds | validation loss | minus top-K | tokens/s | over top-K, % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for group in receipt["groups"]:
        plain = group["rule"] == "top_k"
        loss = "–" if plain and group["rows"] == "full" else _signed(group["difference"], 1, 4)
        speed = "–" if plain else _signed(group["speed"], 100, 1)
        lines.append(
            f"| {title(group)} | {len(group['seeds'])} | {group['validation_loss']:.4f} | {loss} "
            f"| {group['tokens_per_s']:,.0f} | {speed} |"
        )
    return "\n".join(lines)


def bands(
    group: dict[str, Any], curves: dict[tuple, dict[int, float]]
) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """Tokens, means and standard errors: of the losses, and of the differences to top-K in pairs.

    A job that was stopped where it would have validated lacks that point, and so do its bands.
    """
    own = [curves[group["rule"], group["rows"], seed] for seed in group["seeds"]]
    pairs = []
    for curve, seed in zip(own, group["seeds"], strict=True):
        top = curves.get(("top_k", "full", seed))
        if top is not None:
            pairs.append({at: loss - top[at] for at, loss in curve.items() if at in top})
    made = {}
    for name, some in (("loss", own), ("difference", pairs)):
        if some:
            tokens = sorted(set.intersection(*map(set, some)))
            found = [mean_and_error([curve[at] for curve in some]) for at in tokens]
            errors = [value["standard_error"] or 0.0 for value in found]
            made[name] = (tokens, [value["mean"] for value in found], errors)
    return made


def draw(receipt: dict[str, Any], picture: Path) -> None:
    """Validation loss, and its difference to top-K in pairs; bands are standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "sonicmoe", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    curves = {
        (r["rule"], r["rows"], r["seed"]): {p["tokens"]: p["validation_loss"] for p in r["curve"]}
        for r in receipt["runs"]
    }
    for group in receipt["groups"]:
        color = f"C{list(NAMES).index(group['rule'])}"
        line = ("-", "--", ":")[ROWS.index(group["rows"])]
        found = bands(group, curves)
        for axes, name in ((left, "loss"), (right, "difference")):
            if name in found:
                tokens, means, errors = found[name]
                places = [at / 1e6 for at in tokens]
                low = [mean - error for mean, error in zip(means, errors, strict=True)]
                high = [mean + error for mean, error in zip(means, errors, strict=True)]
                axes.plot(places, means, label=title(group), color=color, linestyle=line)
                axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
    left.set(xlabel="tokens, millions", ylabel="validation loss under top-K, nats a byte")
    right.set(xlabel="tokens, millions", ylabel="validation loss minus that of top-K")
    left.legend(fontsize=7)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)
    plt.close(figure)


def show(receipt: Path, picture: Path) -> None:
    """ValueError where there is no receipt."""
    if not receipt.exists():
        raise ValueError(f"--json: got {receipt}, allowed: a receipt that --report has written")
    content = json.loads(receipt.read_text())
    print(table(content))
    draw(content, picture)
    print(f"\n{receipt}\n{picture}")
