"""Trains one language model under each rule of token rounding, and reports what each costs.

    python benchmarks/quality.py --text CORPUS --minutes 9
    python benchmarks/quality.py --report

A job is a rule, a number of rows and a seed, and trains the model of examples/lm on one device.
Jobs of one seed have the same initial weights and the same batches. `nr-half` and `nr-quarter`
bring half and a quarter of the rows to the experts at a time, in more batches a step.

A finished job is JOB.jsonl in --out, and is skipped from then on. A stop saves the current job in
--out/work, and the next start goes on from there. Several starts with other --jobs, each on a GPU
of its own (CUDA_VISIBLE_DEVICES), may share --out. --report writes the receipt, from which --draw
makes the table and the picture. Exit code 0, also after a stop; 1 where a job diverged; 2 for bad
options.
"""

import argparse
import contextlib
import datetime
import gc
import hashlib
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in ("python", "examples", "benchmarks"):
    sys.path.insert(0, str(ROOT / folder))
import quality_report  # noqa: E402
from arguments import positive, report_file  # noqa: E402
from lm.settings import ROUNDING, Settings, number  # noqa: E402

ROWS = {"full": 1, "half": 2, "quarter": 4}  # batches that take the place of one
SEVERAL = ("top_k", "nr", "sr", "nr_s", "nr-half", "nr-quarter")  # with --seeds
ONCE = ("balance", "up", "down", "top_k-half", "top_k-quarter")
QUICK = ("top_k-0", "nr-0")
QUICK_STEPS = 640  # 10.5 M tokens
#: Two tiles an expert: 4,096 tokens of a batch, 8 of 128 experts each, are 256 rows. A job takes a
#: minute or two, so that only a stop saves it.
FULL = {
    **{"layers": 4, "hidden": 512, "heads": 8, "experts": 128, "top_k": 8, "intermediate": 128},
    **{"context": 512, "batch": 8, "accumulate": 4, "tile": 128, "steps": 3072},
    **{"validate_every": 128, "validation_sequences": 256, "checkpoint_every": 3072},
}
SMALL = {
    **{"layers": 1, "hidden": 32, "heads": 2, "experts": 8, "top_k": 2, "intermediate": 16},
    **{"context": 32, "batch": 4, "accumulate": 1, "tile": 16, "steps": 6},
    **{"validate_every": 2, "validation_sequences": 4, "checkpoint_every": 3},
}
LEAST = 25  # seconds that must be left to start a job


@dataclass(frozen=True)
class Job:
    rule: str
    rows: str
    seed: int

    @property
    def name(self) -> str:
        return "-".join((*quality_report.group_of(self.rule, self.rows), str(self.seed)))


def job(name: str) -> Job:
    """Of a name like nr-0 or nr-half-2."""
    rule, *rows, seed = name.split("-") if "-" in name else (name, "")
    rows = rows or ["full"]
    if rule not in ("top_k", *ROUNDING) or rows[0] not in ROWS or not seed.isdecimal() or rows[1:]:
        raise argparse.ArgumentTypeError(
            f"got {name!r}, allowed: RULE-SEED, RULE-half-SEED, RULE-quarter-SEED with a rule of "
            f"top_k, {', '.join(ROUNDING)}"
        )
    return Job(rule, rows[0], int(seed))


def jobs_of(seeds: int) -> list[Job]:
    """The study's, seed by seed: a study that ends early has whole pairs."""
    groups = [SEVERAL + ONCE] + [SEVERAL] * (seeds - 1)
    return [job(f"{group}-{seed}") for seed, some in enumerate(groups) for group in some]


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    made = dict(SMALL if options.small else FULL)
    if options.quick and not options.small:
        made["steps"] = QUICK_STEPS
    return made | {"warmup": made["steps"] // 10, "lr": 1e-3}


def settings_of(job: Job, options: argparse.Namespace) -> Settings:
    made, share = sizes(options), ROWS[job.rows]
    made["batch"] //= share
    made["accumulate"] *= share
    if job.rule != "top_k":
        made |= {"routing": "token_rounding", "rounding": job.rule}
    out = options.out / "work" / job.name
    return Settings(**made, text=options.text, out=out, seed=job.seed, device=options.device)


def result_of(job: Job, options: argparse.Namespace) -> Path:
    return options.out / f"{job.name}.jsonl"


def load_text(options: argparse.Namespace) -> Any:
    from lm import data

    return data.load_text(options.text, None, sizes(options)["context"])


def check_study(options: argparse.Namespace, text: Any) -> None:
    """What all results of a folder share; ValueError where the folder has others."""
    parts = [part.numpy().tobytes() for part in (text.train, text.held_out)]
    study = {
        "settings": sizes(options),
        "text": {
            "names": [file.name for file in options.text] or [text.source],
            "train_tokens": len(parts[0]),
            "held_out_tokens": len(parts[1]),
            "sha256": hashlib.sha256(b"".join(parts)).hexdigest(),
        },
    }
    file = options.out / "study.json"
    if not file.exists():
        if not options.plan:
            options.out.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(study, indent=1) + "\n")
        return
    saved = json.loads(file.read_text())
    differ = [key for key in study["settings"] if study["settings"][key] != saved["settings"][key]]
    if study["text"]["sha256"] != saved["text"]["sha256"]:
        differ.append("text")
    if differ:
        raise ValueError(
            f"--out: got {options.out}, whose jobs have another {', '.join(differ)}, allowed: "
            "another folder, or the options that it was begun with"
        )


def command(job: Job, options: argparse.Namespace) -> list[str]:
    line = ["benchmarks/quality.py", "--out", str(options.out), "--jobs", job.name]
    line += ["--device", options.device]
    line += ["--small"] * options.small + ["--quick"] * options.quick
    return line + (["--text", *(path.name for path in options.text)] if options.text else [])


def about(job: Job, options: argparse.Namespace, device: Any) -> dict[str, Any]:
    """What ran where."""
    import torch

    git = ("git", "-C", str(ROOT), "rev-parse", "HEAD")
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # a machine without git
        commit = None
    library = ROOT / "python" / "sonicmoe" / "lib" / "libsonicmoe_torch.so"
    cuda = device.type == "cuda"
    return {
        "command": shlex.join(["python", *command(job, options)]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "library": hashlib.sha256(library.read_bytes()).hexdigest() if library.exists() else None,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
    }


def train(job: Job, options: argparse.Namespace, text: Any, ranks: Any, until: float) -> int:
    """Trains, or goes on, until the job is done or the time is `until`. 1 where it diverged."""
    from lm import captured, checkpoint, report, training

    s = settings_of(job, options)
    s.check(1)
    folder = checkpoint.latest(s.out)
    log = report.read(s.out / "log.jsonl")
    if not log or log[-1]["step"] < s.steps or "validation_loss" not in log[-1]:
        if folder is not None:
            saved = checkpoint.read(folder)
            text.check_resumed(saved)
            s.check_resumed(Settings.of(saved["settings"]), 1, saved)
        if until < math.inf:
            left = (until - time.monotonic()) / 60
            s = Settings.of(s.saved() | {"minutes": max(left, 1e-9)})
        if training.run(s, text, ranks, folder, captured.Captured):
            return 1
    log = report.read(s.out / "log.jsonl")
    if log[-1]["step"] == s.steps:
        head, *points = quality_report.lines_of(log, s.batch * s.accumulate * s.context)
        head = {"rule": job.rule, "rows": job.rows, "seed": job.seed} | head
        head |= about(job, options, ranks.device)
        new = s.out / "result.jsonl"
        new.write_text("".join(json.dumps(line) + "\n" for line in (head, *points)))
        os.replace(new, result_of(job, options))
        shutil.rmtree(s.out)
    return 0


def run(jobs: list[Job], options: argparse.Namespace, text: Any, until: float) -> int:
    """One job after the other, until a time or a signal."""
    from lm import parallel

    (options.out / "work").mkdir(exist_ok=True)
    failed = 0
    with parallel.ranks_of(settings_of(jobs[0], options)) as ranks:
        for job in jobs:
            file, said = result_of(job, options), options.out / "work" / f"{job.name}.txt"
            if file.exists():
                continue
            if until - time.monotonic() < LEAST:
                break
            print(f"{job.name}: starts", flush=True)
            with said.open("a") as lines, contextlib.redirect_stdout(lines):
                diverged = train(job, options, text, ranks, until)
            failed |= diverged
            if diverged:
                print(f"{job.name}: diverged ({said})")
            elif file.exists():
                head = json.loads(file.read_text().splitlines()[0])
                print(f"{job.name}: done, validation loss {head['validation_loss']:.4f}, "
                      f"{head['tokens_per_s']:,.0f} tokens/s", flush=True)  # fmt: skip
            else:
                print(f"{job.name}: stopped; the next start goes on")
                break
            gc.collect()  # the graph of the job, with its memory
    print(f"{sum(result_of(job, options).exists() for job in jobs)} of {len(jobs)} jobs are done")
    return failed


def plan(jobs: list[Job], options: argparse.Namespace, text: Any) -> None:
    import torch
    from lm.model import LanguageModel

    s = settings_of(jobs[0], options)
    with torch.device("meta"):
        weights = sum(p.numel() for p in LanguageModel(s, text.vocabulary).parameters())
    tokens = s.steps * s.batch * s.accumulate * s.context
    print(f"{weights / 1e6:.1f} M weights; {tokens / 1e6:.1f} M tokens a job, "
          f"{tokens / len(text.train):.1f} epochs of {text.source}")  # fmt: skip
    done = 0
    for job in jobs:
        s = settings_of(job, options)
        rows = s.batch * s.context * s.top_k / s.experts
        state = "waits"
        if result_of(job, options).exists():
            state, done = "done", done + 1
        elif (s.out / "latest").exists():
            state = f"has {(s.out / 'latest').read_text().strip()}"
        print(f"{job.name:18s} {rows:6.0f} rows an expert  {state}")
    print(f"{done} of {len(jobs)} done, {(len(jobs) - done) * tokens / 1e6:.1f} M tokens to train")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quality.py", description=__doc__.splitlines()[0])
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--plan", action="store_true", help="list the jobs and what is done")
    does.add_argument("--report", action="store_true", help="receipt, table and picture")
    does.add_argument("--draw", action="store_true", help="table and picture, from the receipt")
    parser.add_argument("--text", nargs="+", type=Path, default=(), metavar="PATH",
                        help="files or folders (default: Python's standard library)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("quality"), help="default: %(default)s")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"),
                        help="auto: a GPU where there is one")  # fmt: skip
    parser.add_argument("--minutes", type=number, default=0, help="save and stop; 0: never")
    parser.add_argument("--seeds", type=positive, default=3, help="default: %(default)s")
    parser.add_argument("--jobs", nargs="+", type=job, metavar="JOB", help="default: see --plan")
    parser.add_argument("--quick", action="store_true",
                        help="top-K and NR-f, one seed, 10 M tokens, in a folder of its own")  # fmt: skip
    parser.add_argument("--small", action="store_true", help="a model for tests on a CPU")
    receipts = ROOT / "receipts" / "quality.json"
    parser.add_argument("--json", type=report_file, default=receipts, help="the receipt")
    picture = ROOT / "docs" / "token-rounding-quality.svg"
    parser.add_argument("--picture", type=Path, default=picture)
    return parser


def main(arguments: list[str] | None = None) -> int:
    began, parser = time.monotonic(), make_parser()
    options = parser.parse_args(arguments)
    jobs = options.jobs or ([job(n) for n in QUICK] if options.quick else jobs_of(options.seeds))
    until = began + 60 * options.minutes if options.minutes else math.inf
    try:
        if options.report:
            quality_report.write(options.out, options.json)
        if options.report or options.draw:
            quality_report.show(options.json, options.picture)
            return 0
        text = load_text(options)
        check_study(options, text)
        if options.plan:
            plan(jobs, options, text)
            return 0
        from lm import parallel

        parallel.device_and_precision(settings_of(jobs[0], options))
    except ValueError as error:
        parser.error(str(error))
    return run(jobs, options, text, until)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of gloo may abort the process while Python shuts down
