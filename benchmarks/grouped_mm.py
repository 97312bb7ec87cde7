"""Times the experts of the published shapes beside those of PyTorch's grouped products.

    python benchmarks/grouped_mm.py

Both sides get x, expert ids and weights (T, K) in bf16, and end with the sum over each token's
experts. torch_experts.py has the other side. Results are compared before anything is timed. Times
are medians of interleaved repeats on the device, after a flush of L2. TFLOP/s count 6 and 12 times
T*K*H*I. --json gets each shape as it is done, and a start skips what is there; tools/figures.py
draws it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_experts
from arguments import positive, report_file, sizes
from timers import DeviceTimer, HostTimer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))
from sonicmoe.functional import experts  # noqa: E402

DIFFERENCE = 0.02  # between the two sides, of a tensor's norm: both round to bf16 on their way
SLEEP = 16_000_000  # cycles, some 8 ms


def published() -> dict[str, list[int]]:
    """The shapes of the receipt of tools/gpu_check.py, by name."""
    bench = json.loads((ROOT / "receipts" / "h200.json").read_text())["bench"]
    return {row["config"]: row["thiek"] for row in bench if row["config"] != "small"}


class Layer:
    """Leaves, and both sides as forwards of them."""

    def __init__(self, thiek: list[int], device: str) -> None:
        tokens, hidden, intermediate, self.experts, self.top_k = thiek
        generator = torch.Generator(device).manual_seed(0)

        def normal(scale: float, *size: int) -> torch.Tensor:
            made = torch.empty(size, dtype=torch.bfloat16, device=device)
            return made.normal_(0, scale, generator=generator).requires_grad_()

        logits = torch.rand(tokens, self.experts, device=device, generator=generator)
        weights, ids = logits.topk(self.top_k)
        self.ids = ids.int()
        self.weights = (weights / weights.sum(1, keepdim=True)).requires_grad_()
        self.x = normal(0.2, tokens, hidden)
        self.w1 = normal(0.02, self.experts, 2 * intermediate, hidden)
        self.w2 = normal(0.02, self.experts, hidden, intermediate)
        self.dout = normal(0.2, tokens, hidden).detach()
        self.leaves = self.x, self.weights, self.w1, self.w2
        self.sides = {"sonicmoe": self.ours, "grouped_mm": self.torchs}

    def ours(self) -> torch.Tensor:
        return experts(self.x, self.ids, self.weights, self.w1, self.w2, layout="concatenated")[0]

    def torchs(self) -> torch.Tensor:
        return torch_experts.experts(self.x, self.ids, self.weights, self.w1, self.w2)

    def backward(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, self.dout)

    def check(self) -> None:
        """Both sides compute the same; and what is made once (plans, compiled code) is there."""
        results = []
        for side in self.sides.values():
            out = side()
            results.append([out.detach(), *self.backward(out)])
        for name, a, b in zip(("out", "dx", "dweights", "dw1", "dw2"), *results, strict=True):
            difference = ((a - b).float().norm() / b.float().norm()).item()
            if not difference <= DIFFERENCE:
                raise SystemExit(f"{name}: the sides differ by {difference}, allowed: {DIFFERENCE}")


def measure(thiek: list[int], options: argparse.Namespace) -> dict[str, Any]:
    torch._dynamo.reset()  # a function compiled for eight shapes runs the next one uncompiled
    layer = Layer(thiek, options.device)
    layer.check()
    timer: Callable = DeviceTimer(SLEEP) if options.device == "cuda" else HostTimer()
    times: dict[str, list[list[float]]] = {name: [] for name in layer.sides}
    order = list(layer.sides)
    for _ in range(options.repeats):
        for name in order:
            times[name].append(timer(layer.sides[name], layer.backward))
        order.reverse()
    tokens, hidden, intermediate, _, top_k = thiek
    flops = 6 * tokens * top_k * hidden * intermediate
    report: dict[str, Any] = {"thiek": thiek}
    for name, rounds in times.items():
        both = [statistics.median(column) for column in zip(*rounds, strict=True)]
        for what, ms, factor in zip(("forward", "backward"), both, (1, 2), strict=True):
            report[f"{name}_{what}_ms"] = ms
            report[f"{name}_{what}_tflops"] = factor * flops / ms * 1e-9
    return report


def load(file: Path, head: dict[str, Any]) -> dict[str, Any]:
    """What is there; ValueError where it is of another device or version."""
    if not file.exists():
        return head | {"rows": []}
    content = json.loads(file.read_text())
    differ = [key for key, value in head.items() if content.get(key) != value]
    if differ:
        raise ValueError(
            f"--json: got {file}, which has another {', '.join(differ)}, allowed: a file of this "
            "one, or a new file"
        )
    return content


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thiek", type=sizes("T,H,I,E,K"), action="append", metavar="T,H,I,E,K",
                        help="default: the published shapes")  # fmt: skip
    cuda = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=cuda)
    parser.add_argument("--repeats", type=positive, default=10, help="default: %(default)s")
    receipt = ROOT / "receipts" / "grouped_mm.json"
    parser.add_argument("--json", type=report_file, default=receipt, help="default: %(default)s")
    options = parser.parse_args(arguments)
    shapes = published()
    if options.thiek:
        shapes = {",".join(map(str, thiek)): thiek for thiek in options.thiek}
    head = {
        "command": f"python benchmarks/grouped_mm.py --repeats {options.repeats}",
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    try:
        content = load(options.json, head)
    except ValueError as error:
        parser.error(str(error))
    there = [row["config"] for row in content["rows"]]
    for config, thiek in shapes.items():
        if config not in there:
            row = {"config": config} | measure(thiek, options)
            content["rows"].append(row)
            options.json.write_text(json.dumps(content, indent=1) + "\n")
            print(config, *(f"{row[f'{side}_{what}_tflops']:.0f}"
                            for side in ("sonicmoe", "grouped_mm")
                            for what in ("forward", "backward")), flush=True)  # fmt: skip
            if options.device == "cuda":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
