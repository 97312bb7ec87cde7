"""Trains the demo's model with our bf16 experts, PyTorch's bf16 and PyTorch's fp32 experts.

    python benchmarks/fidelity.py --minutes 4
    python benchmarks/fidelity.py --report

Runs of one seed have the same initial weights and batches, so that their losses pair. Gaps are those
to the fp32 run of the same seed. Rounding alone moves a curve, for it flips a choice here and there;
a second fp32 run, whose experts' output is scaled by 1 + 2^-20, says how far.

A run is RUN-SEED.json in --out as it ends; a start skips what is there. Small runs wait for the host:
--processes share one device. On the CPU all runs compute in fp32. Exit code 0, also where no time was
left; 2 for bad options.
"""

import argparse
import concurrent.futures
import datetime
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from arguments import minutes, positive, report_file

ROOT = Path(__file__).resolve().parents[1]
for folder in ("python", "demo"):
    sys.path.insert(0, str(ROOT / folder))
from corpus import load_corpus  # noqa: E402
from training import Curve, Settings, StopRequest, Variant, train  # noqa: E402

from sonicmoe import KernelBackendMoE  # noqa: E402

WINDOW = 50  # steps of which a result keeps the mean loss
EARLY = 50  # steps at the start in which the largest gap is reported
NUDGE = 1 + 2**-20


def _ours(moe, x):
    return moe(x, KernelBackendMoE.sonicmoe)


def _torchs(moe, x):
    return moe(x, KernelBackendMoE.torch)


def _wide(moe, x):
    """The whole layer in fp32, its router too."""
    with torch.autocast(x.device.type, enabled=False):
        return moe(x.float(), KernelBackendMoE.torch)


def _nudged(moe, x):
    y, aux_loss = _wide(moe, x)
    return y * NUDGE, aux_loss


RUNS = {"fp32": _wide, "ours": _ours, "torch": _torchs, "nudged": _nudged}
TITLES = {
    "ours": "our bf16 experts",
    "torch": "PyTorch's bf16 experts",
    "nudged": "PyTorch's fp32 experts, output scaled by 1 + 2^-20",
    "fp32": "PyTorch's fp32 experts",
}


def settings_of(options: argparse.Namespace, seed: int) -> Settings:
    if options.small:
        small = {"batch": 2, "context": 16, "hidden": 16, "heads": 2, "experts": 4}
        return Settings(**small, steps=options.steps, seed=seed, intermediate=8, warmup=4)
    return Settings(steps=options.steps, seed=seed)


def result_of(name: str, seed: int, options: argparse.Namespace) -> Path:
    return options.out / f"{name}-{seed}.json"


def run(name: str, seed: int, options: argparse.Namespace) -> str:
    """Trains one run to its end and writes its result. Returns a line about it."""
    if options.device == "cpu":
        torch.set_num_threads(1)
    s = settings_of(options, seed)
    corpus = load_corpus(options.text, s.context)
    curve = Curve(Variant(name, RUNS[name]))
    with StopRequest() as stop:
        train(curve, s, corpus, torch.device(options.device), stop, lambda _: None)
    cuda = options.device == "cuda"
    result = {
        "run": name,
        "seed": seed,
        "settings": vars(s),
        "text": {"source": corpus.source, "train_tokens": len(corpus.train)},
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": curve.seconds,
        "held_out_loss": curve.held_out_loss,
        "first_losses": curve.train_loss[:EARLY],
        "window": WINDOW,
        "losses": [
            statistics.fmean(curve.train_loss[i : i + WINDOW])
            for i in range(0, len(curve.train_loss), WINDOW)
        ],
    }
    file = result_of(name, seed, options)
    file.with_suffix(".new").write_text(json.dumps(result) + "\n")
    os.replace(file.with_suffix(".new"), file)
    return (
        f"{name}-{seed}: held-out loss {curve.held_out_loss[-1][1]:.4f}, "
        f"{1e3 * curve.seconds / s.steps:.1f} ms a step"
    )


def train_all(options: argparse.Namespace, began: float) -> None:
    """Seed by seed, on --processes at a time, until there is no time for one more."""
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = [(name, seed) for seed in range(options.seeds) for name in RUNS]
    waiting = [job for job in jobs if not result_of(*job, options).exists()]
    until = began + 60 * options.minutes if options.minutes else math.inf
    longest, running = 0.0, {}
    spawn = multiprocessing.get_context("spawn")  # a fork has no CUDA
    with concurrent.futures.ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        while waiting or running:
            while waiting and len(running) < options.processes:
                if time.monotonic() + longest > until:
                    print("No time is left for another run; the next start goes on.")
                    waiting.clear()
                    break
                job = waiting.pop(0)
                running[pool.submit(run, *job, options)] = time.monotonic()
            done, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            for future in done:
                longest = max(longest, time.monotonic() - running.pop(future))
                print(future.result(), flush=True)
    there = sum(result_of(*job, options).exists() for job in jobs)
    print(f"{there} of {len(jobs)} runs are done")


def _last_quarter(result: dict[str, Any]) -> float:
    losses = result["losses"]
    return statistics.fmean(losses[3 * len(losses) // 4 :])


#: What is compared: a number of each result.
MEASURES = {
    "held_out": lambda result: result["held_out_loss"][-1][1],
    "last_quarter": _last_quarter,
}


def _mean_and_error(values: list[float]) -> dict[str, Any]:
    """The standard error of the mean needs two values."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "standard_error": error}


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Per run: its losses, and their gaps to fp32 in pairs of one seed."""
    by_seed = {(result["run"], result["seed"]): result for result in results}
    made = {}
    for name in RUNS:
        own = [result for result in results if result["run"] == name]
        pairs = [(r, by_seed["fp32", r["seed"]]) for r in own if ("fp32", r["seed"]) in by_seed]
        if not own:
            continue
        made[name] = {"seeds": [result["seed"] for result in own]}
        for measure, of in MEASURES.items():
            made[name][measure] = _mean_and_error([of(result) for result in own])
            if pairs and name != "fp32":
                gaps = [of(result) - of(wide) for result, wide in pairs]
                made[name][f"{measure}_gap"] = _mean_and_error(gaps)
        if pairs and name != "fp32":
            early = [
                max(abs(a - b) for a, b in zip(r["first_losses"], w["first_losses"], strict=True))
                for r, w in pairs
            ]
            made[name]["largest_early_gap"] = max(early)
    return made


def _signed(value: dict[str, Any] | None) -> str:
    if value is None:
        return "–"
    text = f"{value['mean']:+.4f}"
    error = value["standard_error"]
    return text if error is None else f"{text} ± {error:.4f}"


def table(summed: dict[str, Any]) -> str:
    lines = [
        f"| run | seeds | held-out loss | gap | last quarter of training | gap | largest gap in "
        f"{EARLY} steps |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, title in TITLES.items():
        if name in summed:
            row = summed[name]
            cells = [title, str(len(row["seeds"]))]
            for measure in MEASURES:
                cells += [f"{row[measure]['mean']:.4f}", _signed(row.get(f"{measure}_gap"))]
            early = row.get("largest_early_gap")
            cells.append("–" if early is None else f"{early:.1e}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(options: argparse.Namespace) -> None:
    """The receipt, and the table. ValueError where there is nothing, or runs do not pair."""
    files = sorted(options.out.glob("*-*.json"))
    results = [json.loads(file.read_text()) for file in files]
    if not results:
        raise ValueError(f"--out: got {options.out}, allowed: a folder with a finished run")
    shared = [
        {
            key: {**result, **result["settings"], "seed": None}[key]
            for key in ("text", "device", "steps")
        }
        for result in results
    ]
    if any(other != shared[0] for other in shared):
        raise ValueError(
            f"--out: got {options.out}, whose runs differ in text, device or steps, allowed: a folder "
            "of one study"
        )
    content = {
        "command": f"python benchmarks/fidelity.py --steps {shared[0]['steps']}",
        "summary": summary(results),
        "runs": results,
    }
    options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(table(content["summary"]))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, metavar="PATH",
                        help="a file or folder (default: Python's standard library)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("fidelity"), help="default: %(default)s")
    parser.add_argument("--steps", type=positive, default=2000, help="default: %(default)s")
    parser.add_argument("--seeds", type=positive, default=3, help="default: %(default)s")
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--processes", type=positive, default=6 if cuda else 1,
                        help="runs at a time (default: %(default)s)")  # fmt: skip
    parser.add_argument("--minutes", type=minutes, help="start no run that may end later")
    parser.add_argument("--small", action="store_true", help="a model for tests")
    parser.add_argument("--report", action="store_true", help="receipt and table of what is done")
    receipt = ROOT / "receipts" / "fidelity.json"
    parser.add_argument("--json", type=report_file, default=receipt, help="the receipt")
    return parser


def main(arguments: list[str] | None = None) -> int:
    began, parser = time.monotonic(), make_parser()
    options = parser.parse_args(arguments)
    try:
        if options.report:
            report(options)
            return 0
        load_corpus(options.text, settings_of(options, 0).context)
    except ValueError as error:
        parser.error(str(error))
    train_all(options, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
