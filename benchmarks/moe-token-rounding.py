"""Times one MoE layer with token rounding beside plain top-K, forward and backward.

    python benchmarks/moe-token-rounding.py --minutes 1.5
    python benchmarks/moe-token-rounding.py --draw

Without options it times sweeps over the number of experts: the published grids, and one that goes
on to 1,024 experts. Each shape is timed with its router (logits, choice or rounding, and their
gradients) and without it, from ids or lists that are there. A round times all variants once, one
after the other; medians are over rounds, and gains over the ratios of each round.

--json gets each shape as it is done; a start skips what is there. --draw makes the table and the
picture from it. T tokens, H hidden, I intermediate, E experts, K experts a token, Q the tile.
"""

import argparse
import datetime
import functools
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from arguments import minutes, positive, report_file, sizes
from timers import DeviceTimer, HostTimer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))
import token_rounding_report  # noqa: E402

from sonicmoe import MoE, functional  # noqa: E402
from sonicmoe._check import ROUNDING_RULES  # noqa: E402

#: Hidden, intermediate and K of each sweep, and its numbers of experts.
SWEEPS = (
    (1536, 256, 8, (64, 128, 256, 512)),
    (1536, 1024, 2, (16, 32, 64, 128)),
    (4096, 512, 8, (64, 128, 256, 512)),
    (4096, 1024, 4, (32, 64, 128, 256)),
    (2048, 512, 10, (64, 128, 256, 512, 1024)),
)
TOKENS, TILE = 16384, 128
SMALL = ([64, 16, 8, 8, 2, 8], [64, 16, 8, 16, 2, 8])
SLEEP = 16_000_000  # cycles, some 8 ms


def grid() -> list[list[int]]:
    """The shapes with published gains, then the largest E of each sweep, then its next."""
    first = [[TOKENS, *shape, TILE] for shape in token_rounding_report.PUBLISHED]
    columns = max(len(experts) for *_, experts in SWEEPS)
    rest = [
        [TOKENS, hidden, intermediate, experts[-1 - column], top_k, TILE]
        for column in range(columns)
        for hidden, intermediate, top_k, experts in SWEEPS
        if column < len(experts)
    ]
    return first + [shape for shape in rest if shape not in first]


class Layer:
    """A layer's leaves, and each variant as (forward, backward)."""

    def __init__(self, shape: list[int], rule: str, device: str) -> None:
        tokens, hidden, intermediate, experts, self.top_k, self.tile = shape
        self.rule = rule
        generator = torch.Generator(device).manual_seed(0)

        def normal(scale: float, *size: int) -> torch.Tensor:
            made = torch.empty(size, dtype=torch.bfloat16, device=device)
            return made.normal_(0, scale, generator=generator)

        self.x = normal(0.2, tokens, hidden)
        self.dout = normal(0.2, tokens, hidden)
        sizes = experts, self.top_k, hidden, intermediate
        with torch.device(device):
            top_k, rounding = (
                MoE(*sizes, "swiglu", False, 0.02, losses={}, **options)
                for options in ({}, dict(routing="token_rounding", rounding=rule, tile=self.tile))
            )
        for name, size in (
            ("router", (experts, hidden)),
            ("c_fc", (experts, 2 * intermediate, hidden)),
            ("c_proj", (experts, hidden, intermediate)),
        ):
            weight = torch.nn.Parameter(normal(0.02, *size))
            for moe in (top_k, rounding):
                moe.get_submodule(name).weight = weight
        self.router_w, self.w1, self.w2 = top_k.parameters()
        self.x.requires_grad_()
        with torch.no_grad():
            logits = F.linear(self.x, self.router_w)
            weights, self.ids = functional.route(logits, self.top_k)
            scores, *self.lists, self.counts = self._rounded(logits)
        self.weights, self.scores = weights.requires_grad_(), scores.requires_grad_()
        with_router = self.x, self.router_w, self.w1, self.w2
        without = self.x, self.w1, self.w2
        self.variants = {
            ("top_k", "with_router"): (lambda: top_k(self.x)[0], with_router),
            (rule, "with_router"): (lambda: rounding(self.x)[0], with_router),
            ("top_k", "experts"): (self._given_top_k, (*without, self.weights)),
            (rule, "experts"): (self._given_rounding, (*without, self.scores)),
        }

    def _rounded(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return functional.token_rounding(logits, self.top_k, rule=self.rule, tile=self.tile)

    def _routed(self, scores: torch.Tensor, *lists: torch.Tensor) -> torch.Tensor:
        of_experts = self.w1, None, self.w2, None
        return functional.moe_general_routing_inputs(self.x, scores, *lists, *of_experts)[0]

    def _given_top_k(self) -> torch.Tensor:
        return functional.experts(self.x, self.ids, self.weights, self.w1, self.w2)[0]

    def _given_rounding(self) -> torch.Tensor:
        return self._routed(self.scores, *self.lists)

    def parts(self, variant: tuple[str, str]) -> tuple:
        forward, leaves = self.variants[variant]
        return forward, functools.partial(self._backward, leaves)

    def _backward(self, leaves: tuple[torch.Tensor, ...], out: torch.Tensor) -> tuple:
        return torch.autograd.grad(out, leaves, self.dout)

    def rows(self) -> dict[str, Any]:
        """Rows of both routings, and how many more a GEMM with tiles of Q rows computes."""
        frequency = torch.bincount(self.ids.flatten(), minlength=len(self.router_w))
        counts = {"top_k": frequency, self.rule: self.counts}
        return {
            name: {"rows": int(some.sum()), "padded_rows": int((-some % self.tile).sum())}
            for name, some in counts.items()
        }


def measure(shape: list[int], options: argparse.Namespace) -> dict[str, Any]:
    layer = Layer(shape, options.routing, options.device)
    timer = DeviceTimer(SLEEP) if options.device == "cuda" else HostTimer()
    rounds: dict[tuple[str, str], list[list[float]]] = {name: [] for name in layer.variants}
    for variant in rounds:  # the first calls load kernels
        forward, backward = layer.parts(variant)
        backward(forward())
    order = list(rounds)
    for _ in range(options.repeats):
        for variant in order:
            rounds[variant].append(timer(*layer.parts(variant)))
        order.reverse()
    rows = layer.rows()
    report: dict[str, Any] = {"thiekq": shape, "rule": options.routing, "repeats": options.repeats}
    report["variants"] = {
        routing: rows[routing]
        | {part: token_rounding_report.times_of(rounds[routing, part])
           for part in token_rounding_report.PARTS}
        for routing in rows
    }  # fmt: skip
    report["gains"] = {
        part: token_rounding_report.gains_of(rounds["top_k", part], rounds[options.routing, part])
        for part in token_rounding_report.PARTS
    }
    return report


def about(options: argparse.Namespace) -> dict[str, Any]:
    """What all shapes of a file share."""
    library = ROOT / "python" / "sonicmoe" / "lib" / "libsonicmoe_torch.so"
    cuda = options.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "library": hashlib.sha256(library.read_bytes()).hexdigest() if library.exists() else None,
    }


def command_of(shape: list[int], options: argparse.Namespace) -> str:
    line = ["python", "benchmarks/moe-token-rounding.py", "--routing", options.routing]
    line += ["--repeats", str(options.repeats), "--device", options.device]
    return shlex.join([*line, "--thiekq", ",".join(map(str, shape))])


def commit() -> str | None:
    git = ("git", "-C", str(ROOT), "rev-parse", "HEAD")
    try:
        done = subprocess.run(git, capture_output=True, text=True)
    except OSError:  # a machine without git
        return None
    return done.stdout.strip() or None


def load(file: Path, head: dict[str, Any]) -> dict[str, Any]:
    """What is there; ValueError where it is of another device or library."""
    if not file.exists():
        return head | {"shapes": []}
    content = json.loads(file.read_text())
    differ = [key for key, value in head.items() if content.get(key) != value]
    if differ:
        raise ValueError(
            f"--json: got {file}, which has another {', '.join(differ)}, allowed: a file of this "
            "one, or a new file"
        )
    return content


def save(file: Path, content: dict[str, Any]) -> None:
    """Whole, also where this process ends meanwhile."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(new, file)


def run(shapes: list[list[int]], content: dict[str, Any], options: argparse.Namespace) -> None:
    """Times what is not there yet, until the time is not enough for one more."""
    began, longest = time.monotonic(), 0.0
    there = [(shape["thiekq"], shape["rule"]) for shape in content["shapes"]]
    for shape in shapes:
        if (shape, options.routing) in there:
            continue
        started = time.monotonic()
        if options.minutes and started - began + longest > 60 * options.minutes:
            print("No time is left for another shape; the next start goes on.")
            break
        report = measure(shape, options)
        report["command"] = command_of(shape, options)
        report["commit"] = commit()
        report["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        if options.device == "cuda":
            torch.cuda.empty_cache()
        content["shapes"].append(report)
        save(options.json, content)
        print(token_rounding_report.line_of(report), flush=True)
        longest = max(longest, time.monotonic() - started)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thiekq", type=sizes("T,H,I,E,K,Q"), action="append",
                        metavar="T,H,I,E,K,Q", help="a shape in place of the sweeps; repeat it")  # fmt: skip
    parser.add_argument("--routing", choices=[*ROUNDING_RULES], default="nr")
    cuda = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=cuda)
    parser.add_argument("--repeats", type=positive, default=10, help="default: %(default)s")
    parser.add_argument("--minutes", type=minutes, help="start no shape that may end later")
    parser.add_argument("--quick", action="store_true", help="the shapes with published gains")
    parser.add_argument("--small", action="store_true", help="shapes for tests on a CPU")
    parser.add_argument("--draw", action="store_true", help="table and picture, from --json")
    receipt = ROOT / "receipts" / "token_rounding.json"
    parser.add_argument("--json", type=report_file, default=receipt, help="default: %(default)s")
    picture = ROOT / "docs" / "token-rounding-speed.svg"
    parser.add_argument("--picture", type=Path, default=picture, help="default: %(default)s")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    published = len(token_rounding_report.PUBLISHED)
    shapes = options.thiekq or ([*SMALL] if options.small else grid())
    shapes = shapes[:published] if options.quick else shapes
    try:
        if options.draw:
            token_rounding_report.show(options.json, options.picture)
        else:
            run(shapes, load(options.json, about(options)), options)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
