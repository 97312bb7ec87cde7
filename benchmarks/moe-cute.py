"""One MoE layer on the GPU: checked against plain PyTorch, then timed beside its dense GEMMs.

    python benchmarks/moe-cute.py --thiek 32768,4096,1024,128,8 --activation swiglu

T tokens, H hidden, I intermediate, E experts, K experts a token. Times are between CUDA events, from
Python and with the router, the cache flushed before each; the bound is six dense torch.bmm with even
experts, each timed alone. TFLOP/s count 6TKHI forward and 12TKHI backward (4 and 8 without a gate).
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from arguments import positive, report_file, sizes
from dense_bound import dense_gemms
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from sonicmoe import ActivationType, functional, is_glu, reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = ("x", "router_w", "w1", "b1", "w2", "b2")


def make_leaves(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    tokens, hidden, intermediate, experts, _ = options.thiek
    width = 2 * intermediate if is_glu(options.activation) else intermediate
    torch.manual_seed(options.seed)

    def normal(scale, *shape):
        values = torch.randn(shape, device="cuda", dtype=torch.float32) * scale
        return values.to(DTYPES[options.dtype]).requires_grad_()

    leaves = {
        "x": normal(0.2, tokens, hidden),
        "router_w": normal(0.02, experts, hidden),
        "w1": normal(0.02, experts, width, hidden),
        "w2": normal(0.02, experts, hidden, intermediate),
    }
    if options.add_bias:
        leaves["b1"] = normal(0.02, experts, width)
        leaves["b2"] = normal(0.02, experts, hidden)
    return leaves


def forward(leaves: dict[str, torch.Tensor], options: argparse.Namespace):
    return functional.moe_TC_softmax_topk_layer(
        leaves["x"],
        leaves["router_w"],
        leaves["w1"].permute(1, 2, 0),
        leaves.get("b1"),
        leaves["w2"].permute(1, 2, 0),
        leaves.get("b2"),
        options.thiek[4],
        activation_type=options.activation,
        is_softmax_over_topk=not options.topk_over_softmax,
        norm_topk_probs=options.norm_topk_probs,
        concat_layout=options.concat_layout,
    )


def exact_type(leaves, options) -> torch.dtype:
    """fp64 if a plain layer in it fits into the device's memory, else fp32."""
    tokens, hidden, intermediate, _, top_k = options.thiek
    weights = sum(tensor.numel() for tensor in leaves.values())
    # Weights with their gradients; rows of x, y and their sums, H and A, and the gradients of all.
    elements = 2 * weights + tokens * top_k * (8 * hidden + 8 * intermediate)
    torch.cuda.empty_cache()
    fits = 8 * elements < 0.8 * torch.cuda.mem_get_info()[0]
    return torch.float64 if fits else torch.float32


def plain(leaves, ids, dout, options, dtype):
    """o and the gradients by PyTorch in `dtype`, for the experts that the layer chose."""
    copies = {name: t.detach().to(dtype).requires_grad_() for name, t in leaves.items()}
    logits = F.linear(copies["x"], copies["router_w"])
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    if not options.topk_over_softmax:
        scores = logits.gather(1, ids).softmax(1)
    else:
        scores = logits.softmax(1).gather(1, ids)
        if options.norm_topk_probs:
            scores = scores / scores.sum(1, keepdim=True)
    tokens = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    o, _ = reference.routed_layer(
        copies["x"], scores.flatten(), tokens, ids.flatten(), copies["w1"], copies.get("b1"),
        copies["w2"], copies.get("b2"), options.activation,
        layout="concatenated" if options.concat_layout else "interleaved",
    )  # fmt: skip
    gradients = torch.autograd.grad(o, list(copies.values()), dout.to(dtype))
    return {"o": o.detach(), **{f"d{name}": g for name, g in zip(copies, gradients, strict=True)}}


def check(leaves, dout, options, errors) -> bool:
    """At most twice the error of plain PyTorch in the same type, both against fp64 (or fp32)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    o, logits, _ = forward(leaves, options)
    gradients = torch.autograd.grad(o, list(leaves.values()), dout)
    ours = {"o": o.detach(), **{f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}}
    order = "score_then_select" if options.topk_over_softmax else "select_then_score"
    renormalize = str(options.norm_topk_probs).lower()
    layer = f"top_k={options.thiek[4]} router_order={order} renormalize={renormalize}"
    ids = torch.ops.sonicmoe.top_k(logits.detach(), layer)[1].long()
    same_type = plain(leaves, ids, dout, options, DTYPES[options.dtype])
    exact = plain(leaves, ids, dout, options, exact_type(leaves, options))
    good = True
    for name, want in exact.items():
        norm = want.norm()
        error = ((ours[name].to(want.dtype) - want).norm() / norm).item()
        bound = 2 * ((same_type[name].to(want.dtype) - want).norm() / norm).item()
        good &= error <= bound
        errors[name] = error
        print(f"  {name:10s} relative error {error:.2e}  bound {bound:.2e}")
    print("  check:", "PASS" if good else "FAIL")
    return good


class Timer:
    def __init__(self):
        self.flush = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, run) -> float:
        self.flush.fill_(1)
        self.begin.record()
        run()
        self.end.record()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thiek", type=sizes("T,H,I,E,K"), metavar="T,H,I,E,K",
                        default="32768,4096,1024,128,8")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--activation", type=ActivationType, default=ActivationType.SWIGLU,
                        metavar="|".join(a.value for a in ActivationType))  # fmt: skip
    parser.add_argument("--topk_over_softmax", action="store_true")
    parser.add_argument("--norm_topk_probs", action="store_true")
    parser.add_argument("--concat_layout", action="store_true")
    parser.add_argument("--add_bias", action="store_true")
    parser.add_argument("--skip_test", action="store_true", help="do not check, only time")
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=report_file, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; benchmarks/moe_cpu.py times the CPU")

    tokens, hidden, intermediate, _, top_k = options.thiek
    leaves = make_leaves(options)
    dout = (torch.randn(tokens, hidden, device="cuda") * 0.2).to(DTYPES[options.dtype])
    errors: dict[str, float] = {}
    if not options.skip_test and not check(leaves, dout, options, errors):
        return 1

    width = 2 * intermediate if is_glu(options.activation) else intermediate
    timer, bound = Timer(), dense_gemms(options.thiek, width, DTYPES[options.dtype])
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    bounds: dict[str, list[list[float]]] = {"forward": [], "backward": []}
    parameters = list(leaves.values())
    for _ in tqdm(range(options.repeats + 1), disable=None):
        kept = []
        times["forward"].append(timer(lambda: kept.append(forward(leaves, options)[0])))
        times["backward"].append(timer(lambda: torch.autograd.grad(kept[0], parameters, dout)))
        for name, runs in bound.items():
            bounds[name].append([timer(run) for run in runs])
    matrices = 3 if is_glu(options.activation) else 2
    flops = {"forward": 2 * matrices * tokens * top_k * hidden * intermediate}
    flops["backward"] = 2 * flops["forward"]
    report = {}
    print(f"  {'':9s} {'ms':>9s} {'TFLOP/s':>8s} {'bound ms':>9s} {'of bound':>8s}")
    for name in ("forward", "backward"):
        ms = statistics.median(times[name][1:])
        least = sum(statistics.median(each) for each in zip(*bounds[name][1:], strict=True))
        report[name] = {"ms": ms, "dense_bound_ms": least, "flops": flops[name]}
    report["total"] = {
        key: report["forward"][key] + report["backward"][key] for key in report["forward"]
    }
    for name, row in report.items():
        print(f"  {name:9s} {row['ms']:9.3f} {row['flops'] / row['ms'] * 1e-9:8.1f} "
              f"{row['dense_bound_ms']:9.3f} {row['dense_bound_ms'] / row['ms']:8.2f}")  # fmt: skip
    if options.json:
        result = {
            "thiek": options.thiek,
            "dtype": options.dtype,
            "results": report,
            "errors": errors,
        }
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
