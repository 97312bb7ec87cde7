"""What a layer is measured against: its six products as dense batched GEMMs, experts even.

    python benchmarks/dense_bound.py --thiek 24576,1536,256,128,8

times them by themselves, one after the other, with triton.testing.do_bench: less than 50 ms of one
GEMM that are not timed, then 100 ms that are, L2 flushed before each run; the median. Before that
all six take turns: for 6 s, until the chip has settled under load (docs/findings/sustained.md), and
for 1 s at the next shapes. `sonicmoe bench --steady-state 100` times a layer in much the same way.
"""

import argparse
import json
import sys
from collections.abc import Callable

import torch
from arguments import report_file, sizes

GEMMS = {
    "forward": ("up_proj", "down_proj"),
    "backward": ("down_proj_dgrad", "up_proj_dgrad", "down_proj_wgrad", "up_proj_wgrad"),
}


def dense_gemms(thiek: list[int], width: int, dtype: torch.dtype) -> dict[str, list[Callable]]:
    """Calls of torch.bmm, in the order of GEMMS. `width` is 2I with a gate, else I."""
    tokens, hidden, intermediate, experts, top_k = thiek
    rows = max(1, tokens * top_k // experts)

    def normal(scale: float, *shape: int) -> torch.Tensor:
        return (torch.randn(experts, *shape, device="cuda") * scale).to(dtype)

    x, h, a = normal(0.2, rows, hidden), normal(0.02, rows, width), normal(0.02, rows, intermediate)
    w1, w2 = normal(0.02, width, hidden), normal(0.02, hidden, intermediate)
    return {
        "forward": [lambda: torch.bmm(x, w1.mT), lambda: torch.bmm(a, w2.mT)],
        "backward": [
            lambda: torch.bmm(x, w2),
            lambda: torch.bmm(h, w1),
            lambda: torch.bmm(x.mT, a),
            lambda: torch.bmm(h.mT, x),
        ],
    }


def measure(thiek: list[int], settle_ms: int) -> dict[str, float]:
    """Milliseconds of each GEMM of a bf16 layer with a gate."""
    from triton.testing import do_bench

    runs = dense_gemms(thiek, 2 * thiek[2], torch.bfloat16)
    everything = [run for which in runs.values() for run in which]
    do_bench(lambda: [run() for run in everything], warmup=settle_ms, rep=1)
    return {
        name: do_bench(run, warmup=50, rep=100, return_mode="median")
        for which, names in GEMMS.items()
        for name, run in zip(names, runs[which], strict=True)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thiek", type=sizes("T,H,I,E,K"), action="append", metavar="T,H,I,E,K",
                        required=True)  # fmt: skip
    parser.add_argument(
        "--json", type=report_file, metavar="FILE", help="a list, in the same order"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}, milliseconds")
    results = []
    for thiek in options.thiek:
        torch.manual_seed(0)
        ms = measure(thiek, 1000 if results else 6000)
        sums = {which: sum(ms[name] for name in names) for which, names in GEMMS.items()}
        results.append({"thiek": thiek, **{f"{k}_ms": v for k, v in sums.items()}, "gemms": ms})
        print(f"{','.join(map(str, thiek)):24s}", *(f"{k} {v:.3f}" for k, v in (sums | ms).items()),
              sep="  ", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
