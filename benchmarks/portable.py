"""Times the portable kernels on a Hopper GPU against what is asked of them.

    cmake -B build-90 ... -DSONICMOE_CUDA_ARCHITECTURES=90 && ninja -C build-90
    python benchmarks/portable.py --build build-90

The build must have no kernels made for Hopper (90 or 80-virtual, not 90a): then the portable ones
run without being asked for by name. Three questions, each with its ratio:

- up_proj at d = 4096 over the peak of mma.sync (mma_peak.cu), both held for 100 ms on a chip that
  has been busy for 5 s, the peak before and after it;
- forward and backward of the layer over ScatterMoE's, which ran on an H200;
- the same from given expert ids and weights over F.grouped_mm's, interleaved (grouped_mm.py).

Prints a table and writes it with all times to --json. Exit code 1 if a ratio is missed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grouped_mm
import torch
from arguments import positive, report_file
from rows import SHAPES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))
import sonicmoe  # noqa: E402

SMALL = {name: [64, 64, 32, 8, 2] for name in SHAPES}

#: Of ScatterMoE, TFLOP/s forward and backward in bf16 on an H200, from given scores and ids.
SCATTERMOE = {"7B-n256": (178.0, 227.0), "30B-n1024": (365.0, 408.0)}

# What is asked, by shape.
OF_PEAK = {"30B-n1024": 0.70}
OVER_SCATTERMOE = {"7B-n256": 1.3, "30B-n1024": 1.0}
OVER_GROUPED_MM = {"7B-n256": 1.5, "Qwen3-30B": 1.2}


def output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def compiled_peak(folder: str) -> Path:
    program = Path(folder, "mma_peak")
    source = ROOT / "benchmarks" / "mma_peak.cu"
    output("nvcc", "-O3", "-std=c++17", "-arch=native", source, "-o", program)
    return program


def bench(
    thiek: list[int], options: argparse.Namespace, held: bool = False
) -> dict[str, dict[str, Any]]:
    """The results of `sonicmoe bench --ops` by name, interleaved or each held for 100 ms."""
    how = ("--steady-state", "100") if held else ("--repeats", str(options.repeats))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "bench.json")
        output(options.build / "bin" / "sonicmoe", "bench", "--device", options.device,
               "--dtype", "bf16", "--thiek", ",".join(map(str, thiek)), "--ops", "--every-kernel",
               *how, "--json", report)  # fmt: skip
        return {row["what"]: row for row in json.loads(report.read_text())["results"]}


def made_for_hopper(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("sm90.")]


def of_peak(results: dict[str, dict[str, Any]], peak: float) -> float:
    """Of the faster tile of up_proj."""
    tiles = [row["tflops"] for name, row in results.items() if ".up_proj." in name]
    return max(tiles or [results["up_proj"]["tflops"]]) / peak


def over_scattermoe(results: dict[str, dict[str, Any]], thiek: list[int], config: str) -> float:
    tokens, hidden, intermediate, _, top_k = thiek
    flops = 6 * tokens * top_k * hidden * intermediate
    forward, backward = SCATTERMOE[config]
    theirs = (flops / forward + 2 * flops / backward) * 1e-9
    return theirs / (results["forward"]["ms"] + results["backward"]["ms"])


def over_grouped_mm(row: dict[str, Any]) -> float:
    ours, theirs = (
        row[f"{side}_forward_ms"] + row[f"{side}_backward_ms"]
        for side in ("sonicmoe", "grouped_mm")
    )
    return theirs / ours


def measure(shapes: dict[str, list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """All times and the ratios: [what, shape, got, asked]."""
    with tempfile.TemporaryDirectory() as folder:
        program = options.mma_peak or compiled_peak(folder)
        peaks, held = [json.loads(output(program))], {}
        for config in OF_PEAK:
            held[config] = bench(shapes[config], options, held=options.device == "cuda")
            if hopper := made_for_hopper(list(held[config])):
                raise SystemExit(f"--build: got {hopper[0]}, allowed: a build without sm90 kernels")
            peaks.append(json.loads(output(program)))
    benches = {config: bench(shapes[config], options) for config in OVER_SCATTERMOE}
    peak = max(found["tflops"] for found in peaks)
    grouped = {config: grouped_mm.measure(shapes[config], options) for config in OVER_GROUPED_MM}
    ratios: list[list[Any]] = []
    for config, asked in OF_PEAK.items():
        ratios.append(["up_proj over the peak", config, of_peak(held[config], peak), asked])
    for config, asked in OVER_SCATTERMOE.items():
        got = over_scattermoe(benches[config], shapes[config], config)
        ratios.append(["layer over ScatterMoE", config, got, asked])
    for config, asked in OVER_GROUPED_MM.items():
        got = over_grouped_mm(grouped[config])
        ratios.append(["experts over grouped_mm", config, got, asked])
    return {
        "peaks": peaks,
        "held": {name: list(rows.values()) for name, rows in held.items()},
        "bench": {name: list(rows.values()) for name, rows in benches.items()},
        "grouped_mm": grouped,
        "ratios": ratios,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build",
                        help="has bin/sonicmoe, made with python/sonicmoe/lib; default: build")  # fmt: skip
    parser.add_argument("--repeats", type=positive, default=10, help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small shapes, to try the program")
    parser.add_argument("--mma-peak", type=Path, metavar="PROGRAM",
                        help="mma_peak.cu, compiled; default: nvcc compiles it")  # fmt: skip
    receipt = ROOT / "receipts" / "portable.json"
    parser.add_argument("--json", type=report_file, default=receipt, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and options.mma_peak is None:
        parser.error("--mma-peak: got nothing, allowed with --device cpu: a program")
    if options.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device: got cuda, but torch sees no CUDA device; allowed: cpu")
        if hopper := made_for_hopper([name for _, name, _ in sonicmoe.kernels()]):
            parser.error(
                f"python/sonicmoe/lib: got a build with {hopper[0]}, allowed: one made with "
                "SONICMOE_CUDA_ARCHITECTURES=90 or 80-virtual"
            )
    head = {
        "command": f"python benchmarks/portable.py --repeats {options.repeats}",
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    content = head | measure(SMALL if options.small else SHAPES, options)
    options.json.write_text(json.dumps(content, indent=1) + "\n")
    for what, config, got, asked in content["ratios"]:
        state = "met" if got >= asked else "missed"
        print(f"{what:24} {config:10} {got:5.2f} of {asked:.2f}  {state}")
    return int(any(got < asked for _, _, got, asked in content["ratios"]))


if __name__ == "__main__":
    sys.exit(main())
