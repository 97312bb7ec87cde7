#!/usr/bin/env python3
"""Forward and backward of the layer on the CPU beside PyTorch loops and the dense-GEMM bound.

Everything runs in one process with the same number of threads, a repeat of each after the other,
so that a change of the machine's speed meets them alike. Results are compared before any timing.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from arguments import positive, report_file, sizes
from torch_loops import index_loop, sort_loop

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from sonicmoe import moe_TC_softmax_topk_layer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Largest relative difference (Frobenius) of two correct results. fp32: sums of at most a few
# thousand terms, each rounded with 2^-24, errors adding up like a random walk: below 100 * 2^-24.
# bf16: each result passes through at most five roundings of 2^-9 (logits or scores, H, A, Y, the
# result itself), on both sides.
TOLERANCE = {"fp32": 100 * 2**-24, "bf16": 10 * 2**-9}


def ours(x, router_w, w1, w2, top_k):
    out, _, _ = moe_TC_softmax_topk_layer(
        x,
        router_w,
        w1.permute(1, 2, 0),
        None,
        w2.permute(1, 2, 0),
        None,
        top_k,
        concat_layout=True,
    )
    return out


LAYERS = {"sonicmoe": ours, "index loop": index_loop, "sort loop": sort_loop}
LOOPS = ("index loop", "sort loop")
BOUND = "dense GEMMs"


def make_inputs(thiek, dtype):
    """x, router_w, w1, w2 as leaves that want gradients, and dO; activations of unit scale."""
    tokens, hidden, intermediate, experts, _ = thiek
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(DTYPES[dtype])

    leaves = [
        normal(tokens, hidden),
        normal(experts, hidden, scale=hidden**-0.5),
        normal(experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        normal(experts, hidden, intermediate, scale=intermediate**-0.5),
    ]
    return [leaf.requires_grad_() for leaf in leaves], normal(tokens, hidden)


def step(layer, leaves, dout, top_k):
    """One forward and backward; the output. Gradients land in the leaves."""
    for leaf in leaves:
        leaf.grad = None
    out = layer(*leaves, top_k)
    out.backward(dout)
    return out.detach()


def dense_gemms(thiek, dtype):
    """A function that makes the layer's six GEMMs for every expert with the rows spread evenly.

    Operands are contiguous or transposed views, outputs are allocated before: nothing but GEMMs.
    """
    tokens, d, n, experts, top_k = thiek
    rows = [tokens * top_k // experts + (e < tokens * top_k % experts) for e in range(experts)]
    largest = max(rows)
    new = torch.empty
    x, dout, y, dx = (torch.randn(largest, d).to(DTYPES[dtype]) for _ in range(4))
    h = torch.randn(largest, 2 * n).to(DTYPES[dtype])
    a, da = (torch.randn(largest, n).to(DTYPES[dtype]) for _ in range(2))
    w1 = torch.randn(experts, 2 * n, d).to(DTYPES[dtype])
    w2 = torch.randn(experts, d, n).to(DTYPES[dtype])
    dw1, dw2 = new(experts, 2 * n, d, dtype=DTYPES[dtype]), new(experts, d, n, dtype=DTYPES[dtype])

    def run():
        for e, r in enumerate(rows):
            torch.mm(x[:r], w1[e].t(), out=h[:r])
            torch.mm(a[:r], w2[e].t(), out=y[:r])
        for e, r in enumerate(rows):
            torch.mm(dout[:r], w2[e], out=da[:r])
            torch.mm(h[:r], w1[e], out=dx[:r])
            torch.mm(dout[:r].t(), a[:r], out=dw2[e])
            torch.mm(h[:r].t(), x[:r], out=dw1[e])

    return run


def compare(thiek, dtype):
    """The largest relative difference from the index loop, by layer; exits if one is too large."""
    leaves, dout = make_inputs(thiek, dtype)
    names = ("o", "dx", "drouter_w", "dw1", "dw2")
    results = {}
    for name, layer in LAYERS.items():
        out = step(layer, leaves, dout, thiek[-1])
        results[name] = [tensor.double() for tensor in (out, *(leaf.grad for leaf in leaves))]
    expected = results.pop(LOOPS[0])
    worst = {}
    for name, tensors in results.items():
        for what, got, want in zip(names, tensors, expected, strict=True):
            error = ((got - want).norm() / want.norm().clamp(min=1e-300)).item()
            worst[name] = max(error, worst.get(name, 0.0))
            if not error <= TOLERANCE[dtype]:
                raise SystemExit(
                    f"moe_cpu: {dtype} {what} of {name} differs from the {LOOPS[0]} by {error:.2e},"
                    f" allowed: {TOLERANCE[dtype]:.2e}"
                )
    return worst


def time_all(thiek, dtype, repeats):
    """Milliseconds of every repeat, by name; one untimed round comes first."""
    leaves, dout = make_inputs(thiek, dtype)
    runs = {
        name: lambda layer=layer: step(layer, leaves, dout, thiek[-1])
        for name, layer in LAYERS.items()
    }
    runs[BOUND] = dense_gemms(thiek, dtype)
    times = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if repeat:
                times[name].append((time.perf_counter() - began) * 1e3)
    return times


def _memory(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def _peak_of_step(name, thiek, dtype, threads, pipe):
    torch.set_num_threads(threads)
    # Libraries, code and threads are in place after a tiny step; only the size is new then.
    tiny = (16, 16, 8, 2, 1)
    step(LAYERS[name], *make_inputs(tiny, dtype), tiny[-1])
    leaves, dout = make_inputs(thiek, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _memory("VmRSS")
    step(LAYERS[name], leaves, dout, thiek[-1])
    peak = _memory("VmHWM") - before
    for leaf in leaves:
        leaf.grad = None
    pipe.send((peak, _memory("VmRSS") - before))


def memory_of_step(name, thiek, dtype, threads):
    """How resident memory grows at most during one step, and how much of that stays once the step's
    results are gone, in bytes; in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_peak_of_step, args=(name, thiek, dtype, threads, there))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise SystemExit(f"moe_cpu: the process that measures {name} failed") from None
    finally:
        process.join()


def measure(thiek, dtype, repeats, threads):
    """One record of the result: errors, times with ratios, memory."""
    errors = compare(thiek, dtype)
    times = time_all(thiek, dtype, repeats)
    median = {name: statistics.median(values) for name, values in times.items()}
    spread = {
        name: statistics.median(abs(value - median[name]) for value in values)
        for name, values in times.items()
    }
    faster = min(LOOPS, key=median.get)
    memory = {name: memory_of_step(name, thiek, dtype, threads) for name in LAYERS}
    rows = [
        {
            "what": name,
            "ms": median[name],
            "mad_ms": spread[name],
            "speedup_over_faster_loop": median[faster] / median[name],
            "fraction_of_bound": median[BOUND] / median[name],
            "peak_bytes": memory.get(name, (None, None))[0],
            "kept_bytes": memory.get(name, (None, None))[1],
            "largest_difference": errors.get(name),
        }
        for name in times
    ]
    return {"dtype": dtype, "faster_loop": faster, "rows": rows}


def show(record):
    print(f"\n{record['dtype']}, faster loop: {record['faster_loop']}")
    titles = f"{'ms':>9}{'MAD':>7}{'x loop':>8}{'of bound':>10}"
    print(f"{'':12}{titles}{'peak MB':>9}{'kept MB':>9}{'difference':>12}")
    for row in record["rows"]:
        peak, kept = (
            "-" if row[field] is None else f"{row[field] / 1e6:.1f}"
            for field in ("peak_bytes", "kept_bytes")
        )
        error = row["largest_difference"]
        print(
            f"{row['what']:12}{row['ms']:9.1f}{row['mad_ms']:7.1f}"
            f"{row['speedup_over_faster_loop']:8.2f}{row['fraction_of_bound']:10.2f}"
            f"{peak:>9}{kept:>9}{'-' if error is None else format(error, '.1e'):>12}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--thiek", type=sizes("T,H,I,E,K"), default="4096,512,256,32,4")
    parser.add_argument("--repeats", type=positive, default=15)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument(
        "--json", type=report_file, metavar="FILE", help="write the results there too"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    print(f"T,H,I,E,K = {options.thiek}, {options.threads} threads, {options.repeats} repeats")
    records = []
    for dtype in DTYPES:
        records.append(measure(options.thiek, dtype, options.repeats, options.threads))
        show(records[-1])
    if options.json:
        result = {
            "thiek": options.thiek,
            "threads": options.threads,
            "repeats": options.repeats,
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "results": records,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
