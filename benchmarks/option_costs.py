"""Times what options of a layer cost on a GPU, each beside the layer without it.

    python benchmarks/option_costs.py
    python benchmarks/option_costs.py --program build-portable/bin/sonicmoe --repeats 10

`sonicmoe bench --ops --beside` times a layer and some variants interleaved in one process, and a
ratio compares two layers of one process. Questions:

- routers: top_k and metadata of other routers over those of a softmax over the top-K;
- activations: up_proj and dgrad over SwiGLU's, with biases and without, at the nine published
  shapes whose variants fit beside each other;
- fp32 logits: the layer with them, and with an fp32 router weight, too, over bf16 logits;
- ids and weights: the layer given them over the layer given logits, at those nine shapes;
- token rounding: with metadata over top-K with metadata.

Ratios over several shapes are geometric means. A chip grows hot while it goes from variant to
variant. So up_proj and dgrad are divided by the mean of those products of the same variant that
the option does not change. Prints a table beside what is asked.

--json gets each process as it ends, with its command. A later run skips what the file has; it must
be of the same device and program.
"""

import argparse
import hashlib
import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from arguments import positive, report_file

ROOT = Path(__file__).resolve().parents[1]

# Products that do not change with the activation.
OF_ACTIVATIONS = ("up_proj_dgrad", "up_proj_wgrad")
SCORED = "router_order=score_then_select"
SIGMOID = f"router_score=sigmoid {SCORED} renormalize=true"
ROUTERS = {
    "softmax over all": SCORED,
    "softmax over all, renormalised": f"{SCORED} renormalize=true",
    "sigmoid, renormalised": SIGMOID,
    "the same with a bias": f"{SIGMOID} selection_bias=true",
    "the same with groups (DeepSeek-V3)":
        f"{SIGMOID} selection_bias=true groups=8 kept_groups=4 group_score=sum_of_two",
    "sqrt_softplus with a bias (DeepSeek-V4)":
        f"router_score=sqrt_softplus {SCORED} selection_bias=true renormalize=true",
}  # fmt: skip
ACTIVATIONS = {
    "swiglu(limit=10)": 1.03,
    "swiglu_clamp_after(limit=10)": 1.03,
    "swiglu_oai": 1.03,
    "situ_glu": 1.08,
}
BIASED = {"": "", " with biases": " bias=true"}
PUBLISHED = [
    [tokens, hidden, n, most * least // n, top_k * least // n]
    for tokens, hidden, least, most, top_k in (
        (40960, 768, 256, 128, 8),
        (24576, 1536, 256, 128, 8),
        (32768, 4096, 256, 256, 16),
    )
    for n in (least, 2 * least, 4 * least)
]
SMALL_EXPERTS = [[24576, 1536, 256, 128, 8]]


class Question(NamedTuple):
    shapes: list[list[int]]
    # Options of the variants, beside a layer without any. That one has more groups timed, a bound
    # among them, which changes its times a little: where that counts a variant is the base.
    processes: list[list[str]]


def of_activations(bias: str, *names: str) -> list[str]:
    return [f"activation={name}{bias}" for name in names]


*CLAMPED, SITU = ACTIVATIONS
QUESTIONS = {
    "routers": Question(
        [[24576, 1536, 256, 128, 8], [16384, 2048, 256, 256, 8]],
        [list(ROUTERS.values())[:4], list(ROUTERS.values())[4:]],
    ),
    "activations": Question(
        PUBLISHED,
        [
            of_activations(bias, "swiglu", *names)
            for bias in BIASED.values()
            for names in (CLAMPED, [SITU])
        ],
    ),
    "fp32 logits": Question(
        SMALL_EXPERTS,
        [[f"f32_logits={flag}" for flag in ("false", "true", "true f32_router_w=true")]],
    ),
    "ids and weights": Question(
        PUBLISHED, [["router_input=logits", "router_input=ids_and_weights"]]
    ),
    "token rounding": Question(
        [[16384, 1536, 256, 256, 8]], [["rounding_rule=nearest rounding_tile=128"]]
    ),
}


class Ratio(NamedTuple):
    """An operation's time with some options over that with others."""

    name: str
    question: str
    what: str
    above: str
    below: str
    asked: float
    shape: str | None = None  # None: the mean of all
    alike: tuple[str, ...] = ()  # what times are divided by
    added_us: bool = False  # the difference in microseconds instead


def ratios() -> Iterable[Ratio]:
    for name, options in ROUTERS.items():
        for thiek in QUESTIONS["routers"].shapes:
            shape = text_of(thiek)
            yield Ratio(f"{name}, {shape}", "routers", "routing", options, "", 1.3, shape)
    for what, bias in BIASED.items():
        base = f"activation=swiglu{bias}"
        for activation, asked in ACTIVATIONS.items():
            for op in ("up_proj", "down_proj_dgrad"):
                yield Ratio(f"{activation}{what}, {op}", "activations", op,
                            f"activation={activation}{bias}", base, asked,
                            alike=OF_ACTIVATIONS)  # fmt: skip
    ((plain, logits, weight),) = QUESTIONS["fp32 logits"].processes
    for name, options, asked in (("fp32 logits", logits, 1.01),
                                 ("fp32 logits and router weight", weight, 1.03)):  # fmt: skip
        yield Ratio(name, "fp32 logits", "layer", options, plain, asked)
    ((logits, ids),) = QUESTIONS["ids and weights"].processes
    yield Ratio("ids and weights over logits", "ids and weights", "layer", ids, logits, 1.0)
    ((rounding,),) = QUESTIONS["token rounding"].processes
    yield Ratio("token rounding and metadata, us more than top-K's", "token rounding", "routing",
                rounding, "", 60, added_us=True)  # fmt: skip


def text_of(thiek: list[int]) -> str:
    return ",".join(map(str, thiek))


def measure(thiek: list[int], variants: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each operation of the layer and its variants."""
    names = ("tokens", "hidden", "intermediate", "experts", "top_k")
    layer = " ".join(f"{name}={size}" for name, size in zip(names, thiek, strict=True))
    words = ["bench", "--device", options.device, "--layer", layer, "--ops",
             "--repeats", str(options.repeats)]  # fmt: skip
    for variant in variants:
        words += ["--beside", variant]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bench.json")
        subprocess.run([options.program, *words, "--json", file], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        report = json.loads(file.read_text())
    made = zip(["", *variants], [report, *report["beside"]], strict=True)
    return {
        "device": report["device"],
        "command": shlex.join(["sonicmoe", *words]),
        "ms": {name: {row["what"]: row["ms"] for row in one["results"]} for name, one in made},
    }


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def value(ratio: Ratio, shapes: dict[str, Any]) -> tuple[float, int] | None:
    """With how many of its shapes were measured; None for none, and where a device lacks it."""
    pairs = []
    for key, processes in shapes.get(ratio.question, {}).items():
        for process in processes if ratio.shape in (None, key) else ():
            ms = process["ms"]
            if {ratio.above, ratio.below} <= ms.keys() and ratio.what in ms[ratio.below]:
                pair = [ms[ratio.above], ms[ratio.below]]
                pairs.append(
                    [one[ratio.what] / mean([one[op] for op in ratio.alike] or [1]) for one in pair]
                )
    if not pairs:
        return None
    if ratio.added_us:
        return 1e3 * sum(above - below for above, below in pairs) / len(pairs), len(pairs)
    return mean([above / below for above, below in pairs]), len(pairs)


def load(options: argparse.Namespace) -> dict[str, Any]:
    """What the file has, or nothing; ValueError where another program made it."""
    program = hashlib.sha256(options.program.read_bytes()).hexdigest()
    content: dict[str, Any] = {
        "command": f"python benchmarks/option_costs.py --repeats {options.repeats}",
        "program": program,
        "shapes": {},
    }
    if options.json.exists():
        content = json.loads(options.json.read_text())
        if content["program"] != program:
            raise ValueError(f"--json: got {options.json}, which is of another program")
    return content


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "bin" / "sonicmoe")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--repeats", type=positive, default=10, help="default: %(default)s")
    parser.add_argument("--only", choices=QUESTIONS, action="append", help="default: all questions")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    receipt = ROOT / "receipts" / "option_costs.json"
    parser.add_argument("--json", type=report_file, default=receipt, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if not options.program.exists():
        parser.error(f"--program: got {options.program}, which is not there; `make build` makes it")
    try:
        content = load(options)
    except ValueError as error:
        parser.error(f"{error}, allowed: a file of this one, or a new file")
    for name, question in QUESTIONS.items():
        if options.only and name not in options.only:
            continue
        for thiek in question.shapes:
            done = content["shapes"].setdefault(name, {}).setdefault(text_of(thiek), [])
            for variants in question.processes:
                if any(list(filter(None, process["ms"])) == variants for process in done):
                    continue
                size = [64, 32, 16, 64, 8] if options.small else thiek
                made = measure(size, variants, options)
                device = made.pop("device")
                if content.setdefault("device", device) != device:
                    parser.error(f"--json: got a file of {content['device']}, allowed: of {device}")
                done.append(made)
                options.json.write_text(json.dumps(content, indent=1) + "\n")
                print(f"{name}: {text_of(size)}", file=sys.stderr, flush=True)
    content["ratios"] = {}
    print(f"{'':64s} {'':>7s} {'asked':>7s} {'shapes':>7s}")
    for ratio in ratios():
        if found := value(ratio, content["shapes"]):
            over = {"value": found[0], "asked": ratio.asked, "shapes": found[1]}
            content["ratios"][ratio.name] = over
            print(f"{ratio.name:64s} {found[0]:7.3f} {ratio.asked:7.2f} {found[1]:7d}")
    options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
