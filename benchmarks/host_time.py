"""Host time of an eager MoE: what Python, PyTorch and the library take to queue a step on a GPU.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --thiek 512,1536,256,128,8 --json FILE

A fresh process first imports sonicmoe and runs one step, which loads kernels and makes plans. torch
is imported, the CUDA context made and a product of PyTorch's own differentiated before; the
module's weights are drawn in between, outside both figures. Then bursts of steps run without a
synchronisation inside. A burst is short enough that the queue of the device
never fills up, so that the host waits for nothing.
"""

import argparse
import importlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from arguments import positive, report_file, sizes

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))


BURST = 20  # steps of some 30 launches each: a queue holds 1024


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def step_of(thiek: list[int]) -> Callable[[], None]:
    from sonicmoe import MoE

    tokens, hidden, intermediate, experts, top_k = thiek
    with torch.device("cuda"):
        moe = MoE(experts, top_k, hidden, intermediate, "swiglu", False, 0.02).bfloat16()
    x = 0.2 * torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)
    leaves = [x.requires_grad_(), *moe.parameters()]
    dout = 0.2 * torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)

    def step() -> None:
        out, _ = moe(x)
        out.backward(dout)
        # Gradients are dropped as an optimizer's zero_grad() does: nothing is added to them.
        for leaf in leaves:
            leaf.grad = None

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thiek", type=sizes("T,H,I,E,K"), default=[512, 1536, 256, 128, 8])
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--json", type=report_file, metavar="FILE", help="results as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    # The context, and what PyTorch imports for the first backward from a given gradient.
    one = torch.ones(1, device="cuda", requires_grad=True)
    (2 * one).backward(torch.ones_like(one))
    torch.cuda.synchronize()

    began = time.perf_counter()
    importlib.import_module("sonicmoe")
    imported = time.perf_counter() - began
    step = step_of(options.thiek)
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began

    times = []
    while len(times) < BURST + options.steps:
        torch.cuda.synchronize()
        for _ in range(BURST):
            began = time.perf_counter()
            step()
            times.append(1e6 * (time.perf_counter() - began))
    times = times[BURST:]  # the first burst warms up
    median, lowest = statistics.median(times), min(times)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {processor()}")
    print(f"import of sonicmoe {imported:.3f} s, first step {first:.3f} s, both "
          f"{imported + first:.3f} s")  # fmt: skip
    print(f"host time of forward + backward: median {median:.0f} us, least {lowest:.0f} us, of "
          f"{len(times)} steps")  # fmt: skip
    if options.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                 "processor": processor(), "thiek": options.thiek, "steps": options.steps,
                 "import_s": imported, "first_step_s": first,
                 "host_us": median, "least_host_us": lowest}  # fmt: skip
        options.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
