"""Times a training step of the package `sonicmoe` in --package: this one, or another with its calls.

    python benchmarks/step_time.py --thiek 24576,1536,256,128,8 --package python
    python benchmarks/step_time.py --thiek 24576,1536,256,128,8 --package DIRECTORY_OF_ANOTHER

Two packages of one name do not fit into one process, so each has its own; what is compared is the
ratio to the bound, six dense torch.bmm with even experts, which every process times as well.

A step is moe_TC_softmax_topk_layer (router, top-K, experts; bf16, SwiGLU) and all its gradients. Device time
is between CUDA events; the device sleeps before a step, so that what is queued then runs without
waiting for the host. L2 is flushed before each step and each GEMM of the bound. Wall time is that of
a loop of steps, without flushes. With --frozen_experts x and the router alone need gradients, and the
bound has no GEMMs of dW1 and dW2.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from arguments import positive, report_file, sizes
from dense_bound import dense_gemms
from timers import DeviceTimer

ROOT = Path(__file__).parents[1]


def normal(scale: float, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


class Step:
    """A layer with its gradients, cut into forward and backward."""

    def __init__(self, layer, thiek: list[int], frozen_experts: bool):
        tokens, hidden, intermediate, experts, self.top_k = thiek
        self.layer = layer
        self.x = normal(0.2, tokens, hidden).requires_grad_()
        self.router_w = normal(0.02, experts, hidden).requires_grad_()
        self.w1 = normal(0.02, experts, 2 * intermediate, hidden).requires_grad_(not frozen_experts)
        self.w2 = normal(0.02, experts, hidden, intermediate).requires_grad_(not frozen_experts)
        self.leaves = [t for t in (self.x, self.router_w, self.w1, self.w2) if t.requires_grad]
        self.dout = normal(0.2, tokens, hidden)

    def forward(self) -> torch.Tensor:
        w1, w2 = self.w1.permute(1, 2, 0), self.w2.permute(1, 2, 0)
        return self.layer(self.x, self.router_w, w1, None, w2, None, self.top_k, 0)[0]

    def backward(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, self.dout)


def measure(layer, thiek: list[int], repeats: int, frozen_experts: bool) -> dict[str, float]:
    step = Step(layer, thiek, frozen_experts)
    began = time.perf_counter()
    step.backward(step.forward())
    torch.cuda.synchronize()
    result = {"first_call_s": time.perf_counter() - began}

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = step.forward()
    result["kept_MiB"] = (torch.cuda.memory_allocated() - before) / 2**20  # the output, too
    del out
    step.backward(step.forward())
    result["peak_MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20

    timer = DeviceTimer()
    bound = dense_gemms(thiek, 2 * thiek[2], torch.bfloat16)
    if frozen_experts:
        del bound["backward"][2:]
    for run in sum(bound.values(), []):
        run()
    torch.cuda.synchronize()
    times: list[list[float]] = []
    bounds: dict[str, list[list[float]]] = {name: [] for name in bound}
    for _ in range(repeats + 1):
        times.append(timer(step.forward, step.backward))
        for name, runs in bound.items():
            bounds[name].append([timer(lambda *_, run=run: run())[0] for run in runs])
    forward, backward = (statistics.median(each) for each in zip(*times[1:], strict=True))
    result |= {"forward_ms": forward, "backward_ms": backward}
    for name, rows in bounds.items():
        each = zip(*rows[1:], strict=True)
        result[f"{name}_bound_ms"] = sum(statistics.median(column) for column in each)

    began = time.perf_counter()
    for _ in range(repeats):
        step.backward(step.forward())
    torch.cuda.synchronize()
    result["wall_ms"] = (time.perf_counter() - began) / repeats * 1e3
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thiek", type=sizes("T,H,I,E,K"), action="append", metavar="T,H,I,E,K",
                        required=True)  # fmt: skip
    parser.add_argument("--package", type=Path, default=ROOT / "python", metavar="DIRECTORY",
                        help="where the package sonicmoe is; default: the one of this repository")  # fmt: skip
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--frozen_experts", action="store_true",
                        help="the experts' weights need no gradients")  # fmt: skip
    parser.add_argument(
        "--json", type=report_file, metavar="FILE", help="one line is added for each shape"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; benchmarks/moe_cpu.py times the CPU")
    sys.path.insert(0, str(options.package))
    import sonicmoe
    from sonicmoe.functional import moe_TC_softmax_topk_layer as layer

    version = getattr(sonicmoe, "__version__", "unknown")
    print(
        f"sonicmoe {version} of {Path(sonicmoe.__file__).parent} on {torch.cuda.get_device_name()}"
    )
    for thiek in options.thiek:
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        result = measure(layer, thiek, options.repeats, options.frozen_experts)
        of_dense_bound = [
            result[f"{n}_bound_ms"] / result[f"{n}_ms"] for n in ("forward", "backward")
        ]
        print(f"{','.join(map(str, thiek)):24s} forward {result['forward_ms']:.3f} ms ({of_dense_bound[0]:.2f} of the bound)  "
              f"backward {result['backward_ms']:.3f} ({of_dense_bound[1]:.2f})  wall {result['wall_ms']:.3f} ms a step  "
              f"first call {result['first_call_s']:.1f} s  kept {result['kept_MiB']:.0f} MiB  peak {result['peak_MiB']:.0f} MiB",
              flush=True)  # fmt: skip
        if options.json:
            line = {"package": str(version), "thiek": thiek, **result}
            with options.json.open("a") as out:
                out.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
