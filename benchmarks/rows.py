"""Times sonicmoe.grouped_experts beside PyTorch's grouped products, on rows in expert order.

    python benchmarks/rows.py
    python benchmarks/rows.py --thiek 24576,1536,256,128,8 --repeats 50 --json FILE
    python benchmarks/rows.py --steady-state

The other side is F.grouped_mm, a compiled SwiGLU, F.grouped_mm. Both get the same R = T*K rows in
bf16 and the same weights, and their results are compared before anything is timed. Each token picks
K experts at random, so that counts are near even. No side routes, gathers, or has scores.

Both sides run in one process, one repeat of each after the other, the first of them by turns. Times
are medians of device time between CUDA events: of a forward, and of its backward with all
gradients. The device sleeps before each, so that the host is ahead, and L2 is flushed before that.

With --steady-state the device never rests, as in training, and its power cap slows it. It works for
some seconds before anything is timed. Then a repeat is a run of steps of one side, L2 flushed
before each part.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from arguments import positive, report_file, sizes
from step_time import normal
from timers import DeviceTimer, SteadyTimer

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

SHAPES = {
    "7B-n256": [24576, 1536, 256, 128, 8],
    "Qwen3-30B": [32768, 2048, 768, 128, 8],
    "30B-n1024": [32768, 4096, 1024, 64, 4],
}
DIFFERENCE = 0.02  # between the two sides, of a tensor's norm: both round to bf16 all the way


class Side:
    """Calls of one side; backward takes the graph of the last forward."""

    def __init__(self, experts, leaves: list[torch.Tensor], dout: torch.Tensor):
        self.experts, self.leaves, self.dout = experts, leaves, dout
        self.out = None

    def forward(self, *_) -> None:
        self.out = self.experts(*self.leaves)

    def backward(self, *_) -> tuple[torch.Tensor, ...]:
        out, self.out = self.out, None
        return torch.autograd.grad(out, self.leaves, self.dout)

    def parts(self):
        return self.forward, self.backward


def sides(thiek: list[int]) -> dict[str, Side]:
    from sonicmoe import grouped_experts

    tokens, hidden, intermediate, experts, top_k = thiek
    ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.flatten()
    counts = ids.bincount(minlength=experts).int()
    ends = counts.cumsum(0, dtype=torch.int32)
    leaves = [
        normal(0.2, tokens * top_k, hidden).requires_grad_(),
        normal(0.02, experts, 2 * intermediate, hidden).requires_grad_(),
        normal(0.02, experts, hidden, intermediate).requires_grad_(),
    ]
    dout = normal(0.2, tokens * top_k, hidden)

    @torch.compile
    def swiglu(h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up

    def ours(rows, w1, w2):
        return grouped_experts(rows, counts, w1, w2, layout="concatenated")

    def torchs(rows, w1, w2):
        h = F.grouped_mm(rows, w1.mT, offs=ends)
        return F.grouped_mm(swiglu(h), w2.mT, offs=ends)

    return {"sonicmoe": Side(ours, leaves, dout), "grouped_mm": Side(torchs, leaves, dout)}


def check(pair: list[Side]) -> None:
    """Both sides compute the same; and what is made once (plans, compiled code) is there."""
    results = []
    for side in pair:
        side.forward()
        results.append([side.out.detach(), *side.backward()])
    for name, a, b in zip(("out", "drows", "dw1", "dw2"), *results, strict=True):
        difference = ((a - b).float().norm() / b.float().norm()).item()
        if not difference <= DIFFERENCE:
            raise SystemExit(f"{name}: the sides differ by {difference:.3g}, allowed: {DIFFERENCE}")


def measure(thiek: list[int], repeats: int, steady: bool) -> dict[str, dict[str, float]]:
    """Milliseconds of each side's forward and backward."""
    by_name = sides(thiek)
    check(list(by_name.values()))
    timer = SteadyTimer() if steady else DeviceTimer()
    if steady:
        timer.heat(*by_name["sonicmoe"].parts())
    times = {name: {"forward_ms": [], "backward_ms": []} for name in by_name}
    order = list(by_name)
    for _ in range(repeats + 2):
        for name in order:
            side = by_name[name]
            if steady:
                forward, backward = timer(*side.parts())
            else:
                (forward,), (backward,) = timer(side.forward), timer(side.backward)
            times[name]["forward_ms"].append(forward)
            times[name]["backward_ms"].append(backward)
        order.reverse()
    return {
        name: {part: statistics.median(values[2:]) for part, values in parts.items()}
        for name, parts in times.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thiek", type=sizes("T,H,I,E,K"), action="append", metavar="T,H,I,E,K",
                        help="default: three published shapes")  # fmt: skip
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--steady-state", action="store_true", help="the device never rests")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="results as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, and both sides are timed on one")
    if not hasattr(F, "grouped_mm"):
        parser.error(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm")

    shapes = SHAPES
    if options.thiek:
        shapes = {",".join(map(str, thiek)): thiek for thiek in options.thiek}
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}, bf16, median of "
          f"{options.repeats}{', steady state' * options.steady_state}")  # fmt: skip
    print(
        f"{'':24s} {'':8s} {'sonicmoe ms':>12s} {'grouped_mm ms':>14s} {'ratio':>6s} {'TFLOP/s':>8s}"
    )
    results = []
    for name, thiek in shapes.items():
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        torch._dynamo.reset()  # a shape's activation is compiled for that shape
        result = measure(thiek, options.repeats, options.steady_state)
        results.append({"name": name, "thiek": thiek, **result})
        tokens, hidden, intermediate, _, top_k = thiek
        flops = 6 * tokens * top_k * hidden * intermediate
        for part, work in (("forward", flops), ("backward", 2 * flops)):
            ours, theirs = (result[side][f"{part}_ms"] for side in ("sonicmoe", "grouped_mm"))
            print(f"{name:24s} {part:8s} {ours:12.3f} {theirs:14.3f} {theirs / ours:6.2f} "
                  f"{work / ours * 1e-9:8.0f}", flush=True)  # fmt: skip
    if options.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                 "repeats": options.repeats,
                 "steady_state": options.steady_state, "shapes": results}  # fmt: skip
        options.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
