"""One MoE layer with token rounding: checked against plain PyTorch, then timed beside plain top-K.

    python benchmarks/moe-token-rounding.py --routing nr --thiekq 1024,256,128,16,4,128

T tokens, H hidden, I intermediate, E experts, K experts a token, Q the tile that counts are rounded
to. TFLOP/s count the rows that were routed: 6 and 12 times rows*H*I. The router GEMM, top-K and
rounding are part of the time. "padded rows" are what a GEMM with tiles of Q rows computes for
nothing.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from arguments import sizes
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from sonicmoe import ActivationType, KernelBackendMoE, MoE
from sonicmoe._check import ROUNDING_RULES
from sonicmoe._ops import layer_text, router_options

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(options: argparse.Namespace, routing: str) -> MoE:
    _, hidden, intermediate, experts, top_k, tile = options.thiekq
    torch.manual_seed(options.seed)
    rounding = {"routing": "token_rounding", "rounding": routing, "tile": tile}
    moe = MoE(
        experts,
        top_k,
        hidden,
        intermediate,
        ActivationType(options.activation),
        options.add_bias,
        0.02,
        softmax_over_topk=not options.topk_over_softmax,
        norm_topk_probs=options.norm_topk_probs,
        concat_layout=options.concat_layout,
        **({} if routing == "top_k" else rounding),
    )
    return moe.to(DTYPES[options.dtype])


def gradients(moe: MoE, x: torch.Tensor, dout: torch.Tensor, backend: KernelBackendMoE) -> dict:
    torch.manual_seed(0)  # the draws
    moe.zero_grad()
    inputs = x.clone().requires_grad_()
    out, _ = moe(inputs, backend)
    out.backward(dout.to(out.dtype))
    named = {name: parameter.grad.clone() for name, parameter in moe.named_parameters()}
    return {"o": out.detach(), "dx": inputs.grad, **{f"d {name}": g for name, g in named.items()}}


def check(options: argparse.Namespace, x: torch.Tensor, dout: torch.Tensor) -> bool:
    """In fp32, where routing is the same in both: sums of fp32 products in other orders."""
    moe = build(options, options.routing).float()
    ours = gradients(moe, x.float(), dout, KernelBackendMoE.sonicmoe)
    theirs = gradients(moe, x.float(), dout, KernelBackendMoE.torch)
    longest = max(options.thiekq[0], options.thiekq[1], 2 * options.thiekq[2])
    bound = 8 * longest**0.5 * torch.finfo(torch.float32).eps
    good = True
    for name, want in theirs.items():
        error = ((ours[name] - want).norm() / want.norm()).item()
        good &= error <= bound
        print(f"  {name:20s} relative difference {error:.1e}  bound {bound:.1e}")
    print("  check:", "PASS" if good else "FAIL")
    return good


def count_rows(moe: MoE, x: torch.Tensor, options: argparse.Namespace) -> tuple[int, int]:
    """Routed rows, and the rows that tiles of Q add."""
    tile = options.thiekq[5]
    logits = torch.nn.functional.linear(x, moe.router.weight)
    routing = options.routing if moe.routing == "token_rounding" else "up"
    _, _, _, counts, frequency = torch.ops.sonicmoe.token_rounding(
        logits,
        torch.zeros(2, dtype=torch.int64),
        layer_text(
            top_k=moe.top_k,
            **router_options(moe.softmax_over_topk, moe.norm_topk_probs),
            rounding_tile=tile,
            rounding_rule=ROUNDING_RULES[routing],
        ),
    )
    if moe.routing == "top_k":
        counts = frequency
    return counts.sum().item(), (-counts % tile).sum().item()


def timed(moe: MoE, x: torch.Tensor, dout: torch.Tensor) -> tuple[float, float]:
    moe.zero_grad()
    inputs = x.clone().requires_grad_()
    start = time.perf_counter()
    out, _ = moe(inputs)
    middle = time.perf_counter()
    out.backward(dout)
    return middle - start, time.perf_counter() - middle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thiekq", type=sizes("T,H,I,E,K,Q"), default="1024,256,128,16,4,128",
                        metavar="T,H,I,E,K,Q")  # fmt: skip
    parser.add_argument("--routing", choices=["top_k", *ROUNDING_RULES], default="nr")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--activation", choices=[a.value for a in ActivationType], default="swiglu")
    parser.add_argument("--topk_over_softmax", action="store_true")
    parser.add_argument("--norm_topk_probs", action="store_true")
    parser.add_argument("--concat_layout", action="store_true")
    parser.add_argument("--add_bias", action="store_true")
    parser.add_argument("--skip_test", action="store_true", help="do not check, only time")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()

    tokens, hidden, intermediate, _, _, _ = options.thiekq
    generator = torch.Generator().manual_seed(options.seed)
    x = (0.2 * torch.randn(tokens, hidden, generator=generator)).to(DTYPES[options.dtype])
    dout = (0.2 * torch.randn(tokens, hidden, generator=generator)).to(DTYPES[options.dtype])
    if not options.skip_test and not check(options, x, dout):
        return 1

    variants = {name: build(options, name) for name in dict.fromkeys(["top_k", options.routing])}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in tqdm(range(options.repeats + 1), disable=None):
        for name, moe in variants.items():
            times[name].append(timed(moe, x, dout))
    print(f"  {'routing':8s} {'rows':>8s} {'padded':>7s} {'fwd ms':>8s} {'bwd ms':>8s} {'TFLOP/s':>8s}")
    report = {}
    for name, moe in variants.items():
        rows, padded = count_rows(moe, x, options)
        forward = statistics.median(pair[0] for pair in times[name][1:])
        backward = statistics.median(pair[1] for pair in times[name][1:])
        rate = 18 * rows * hidden * intermediate / (forward + backward) / 1e12
        report[name] = {
            "rows": rows,
            "padded_rows": padded,
            "forward_ms": 1e3 * forward,
            "backward_ms": 1e3 * backward,
            "tflops": rate,
        }
        print(f"  {name:8s} {rows:8d} {padded:7d} {1e3 * forward:8.2f} {1e3 * backward:8.2f} {rate:8.3f}")
    if options.json:
        result = {"thiekq": options.thiekq, "dtype": options.dtype, "results": report}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
