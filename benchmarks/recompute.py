#!/usr/bin/env python3
"""What recompute="preact" costs and saves on the CPU: time of forward and backward, bytes kept.

Both settings run in one process, a repeat of each after the other, on one thread. The time is the
process's own, so that other programs count less. Their gradients must be equal bit for bit.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from arguments import positive, sizes

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from sonicmoe import experts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SETTINGS = ("none", "preact")


def step(leaves, ids, scores, dout, recompute):
    """Seconds of forward and of backward, and the bytes that autograd keeps besides the leaves."""
    own, kept = {leaf.data_ptr() for leaf in (*leaves, scores)}, {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for leaf in leaves:
        leaf.grad = None
    x, w1, w2 = leaves
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        begin = time.process_time()
        out, _ = experts(x, ids, scores, w1, w2, recompute=recompute)
        forward = time.process_time() - begin
    begin = time.process_time()
    out.backward(dout)
    return forward, time.process_time() - begin, sum(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thiek", type=sizes("T,H,I,E,K"), default=(4096, 512, 256, 32, 4))
    parser.add_argument("--repeats", type=positive, default=15)
    options = parser.parse_args()
    tokens, hidden, intermediate, count, top_k = options.thiek
    torch.set_num_threads(1)
    print("| | forward, ms | backward, ms | kept besides x, MB |")
    print("|---|---:|---:|---:|")
    for name, dtype in DTYPES.items():
        torch.manual_seed(0)
        leaves = [
            torch.randn(shape, dtype=dtype).mul_(scale).requires_grad_()
            for shape, scale in (
                ((tokens, hidden), 1.0),
                ((count, 2 * intermediate, hidden), hidden**-0.5),
                ((count, hidden, intermediate), intermediate**-0.5),
            )
        ]
        scores, ids = torch.topk(torch.randn(tokens, count).softmax(-1), top_k)
        dout = torch.randn(tokens, hidden, dtype=dtype)
        runs, gradients = {setting: [] for setting in SETTINGS}, {}
        for _ in range(options.repeats):
            for setting in SETTINGS:
                runs[setting].append(step(leaves, ids, scores, dout, setting))
                gradients[setting] = [leaf.grad for leaf in leaves]
        if not all(map(torch.equal, gradients["none"], gradients["preact"])):
            sys.exit(f"{name}: the gradients differ")
        for setting, rows in runs.items():
            forward, backward, kept = map(statistics.median, zip(*rows, strict=True))
            times = f"{1e3 * forward:.1f} | {1e3 * backward:.1f}"
            print(f"| {name}, `{setting}` | {times} | {kept / 1e6:.1f} |")


if __name__ == "__main__":
    main()
