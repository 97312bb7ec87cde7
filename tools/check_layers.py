#!/usr/bin/env python3
"""Checks that includes point one way only (docs/architecture.md):

    include <- src/core <- src/math <- src/cpu, src/cuda <- python, cli, examples, benchmarks, testkit

Each layer lists what it may include of this tree, and which headers from outside. Inside src/cuda
there are layers, too: INNER lists them from the lowest to the highest.
"""

import re
import sys
from pathlib import Path

SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}
# Where the compiler looks, besides the including file's own directory.
SEARCH = ("include", "src", ".")

STANDARD = r"[a-z0-9_]+"  # <vector>, <cstdint>: no suffix, no directory
HOST = r"(?!cuda|cute/|cutlass/|torch/|ATen/|c10/).*"
ANY = r".*"

# layer: (layers it may include besides itself, pattern of headers from outside the tree)
RULES = {
    "include": ((), STANDARD),
    "src/core": (("include",), HOST),
    "src/math": (("include", "src/core"), HOST),
    "src/cpu": (("include", "src/core", "src/math"), HOST),
    "src/cuda": (("include", "src/core", "src/math"), r"(?!torch/|ATen/|c10/).*"),
    "testkit": (("include",), HOST),
    "cli": (("include", "testkit"), HOST),
    "python": (("include",), ANY),
    "demo": (("include",), ANY),
    "examples": (("include",), ANY),
    "benchmarks": (("include",), ANY),
    "fuzz": (("include", "testkit"), HOST),
    "tests": (("include", "src", "testkit", "cli"), ANY),
}
# Layers inside src/cuda, from the lowest to the highest. A file belongs to the last one that matches
# it, and may include files of its own layer and of the layers that it names.
SM90 = "src/cuda/sm90/"
SM80 = "src/cuda/sm80/"
INNER = {
    "base": (("src/cuda/*",), ()),
    "device": (("src/cuda/device/*",), ("base",)),
    "rows": (("src/cuda/rows/*",), ("base", "device")),
    "routing": (("src/cuda/routing/*",), ("base", "device")),
    "router": (("src/cuda/router_*.cuh",), ("base", "device")),
    "host": ((f"{SM90}tensor_map.*", f"{SM90}tile_choice.h", f"{SM90}layouts.h"), ("base",)),
    "traits": ((f"{SM90}traits.cuh",), ("device",)),
    "pipeline": ((f"{SM90}pipeline.cuh",), ("device", "traits")),
    "scheduler": ((f"{SM90}scheduler.cuh",), ("pipeline",)),
    "mainloop": ((f"{SM90}mainloop.cuh", f"{SM90}boxes.cuh", f"{SM90}load_b_n.cuh", f"{SM90}rows_are_k.cuh",
                  f"{SM90}gather_?.cuh"), ("device", "traits", "pipeline")),
    "epilogue": ((f"{SM90}epilogue/*",), ("device", "traits", "pipeline")),
    "kernel": ((f"{SM90}grouped_gemm.cuh",), ("scheduler", "mainloop", "epilogue")),
    "launch": ((f"{SM90}launch.cuh", f"{SM90}kernel_file.*"), ("base", "host", "kernel")),
    "operations": ((f"{SM90}*.cu", f"{SM90}up_proj*.cuh", f"{SM90}down_proj*.cuh",
                    f"{SM90}router_gemm.cuh", f"{SM90}transposed.cuh", f"{SM90}wgrad.cuh"),
                   ("base", "device", "router", "host", "epilogue", "launch")),
    "portable parts": ((f"{SM80}tile.cuh", f"{SM80}mma.cuh", f"{SM80}operands.cuh"),
                       ("base", "device")),
    "portable kernel": ((f"{SM80}grouped_gemm.cuh", f"{SM80}epilogues.cuh"),
                        ("base", "device", "portable parts")),
    "portable operations": ((f"{SM80}*.cu", f"{SM80}launch.cuh", f"{SM80}compiled.cuh", f"{SM80}rows.cuh",
                             f"{SM80}matrices.cuh", f"{SM80}router_gemm.cuh", f"{SM80}up_proj.cuh",
                             f"{SM80}down_proj_dgrad.cuh"),
                            ("base", "router", "portable parts", "portable kernel")),
}  # fmt: skip
# What may speak to the device outside of its backend, so that the rest of its layer need not.
CUDA = {"testkit/device_memory.cpp", "cli/bench/device_clock.cpp", "cli/bench/cublas_bound.cpp"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)


def within(path, layer):
    return path.parts[: len(Path(layer).parts)] == Path(layer).parts


def resolve(root, source, name, quoted):
    """The included file relative to root, or None when it comes from outside the tree."""
    places = [root / place for place in SEARCH]
    if quoted:
        places.insert(0, source.parent)
    for place in places:
        path = (place / name).resolve()
        if path.is_file() and path.is_relative_to(root):
            return path.relative_to(root)
    return None


def inner_layer(path):
    """The layer inside src/cuda that a file belongs to; None elsewhere."""
    layers = [layer for layer, (patterns, _) in INNER.items()
              if any(path.match(pattern) for pattern in patterns)]  # fmt: skip
    return layers[-1] if layers else None


def inner_problem(source, target):
    """Why a file of src/cuda may not include another one; None if it may."""
    layer, other = inner_layer(source), inner_layer(target)
    if layer is None or other is None or layer == other or other in INNER[layer][1]:
        return None
    return f"{layer} of src/cuda includes {target}; it may include {list(INNER[layer][1])}"


def check(root):
    root = Path(root).resolve()
    sources, problems = 0, []
    for layer, (allowed, outside) in RULES.items():
        for source in sorted((root / layer).rglob("*")):
            if source.suffix not in SUFFIXES:
                continue
            sources += 1
            text = source.read_text()
            if layer == "src/cuda" and inner_layer(source.relative_to(root)) is None:
                problems.append(f"{source.relative_to(root)}: in no layer of INNER")
            for match in INCLUDE.finditer(text):
                quoted, name = match[1] == '"', match[2]
                where = f"{source.relative_to(root)}:{text.count(chr(10), 0, match.start(2)) + 1}"
                target = resolve(root, source, name, quoted)
                if target is not None:
                    if not any(within(target, each) for each in (layer, *allowed)):
                        problems.append(
                            f"{where}: {layer} includes {target}; it may include {list(allowed)}"
                        )
                    elif why := inner_problem(source.relative_to(root), target):
                        problems.append(f"{where}: {why}")
                elif name.startswith("sonicmoe/"):
                    problems.append(f"{where}: no public header {name}")
                elif str(source.relative_to(root)) in CUDA and name.startswith("cu"):
                    continue
                elif not re.fullmatch(outside, name):
                    problems.append(f"{where}: {layer} must not include {name}")
    unknown = {path.name for path in (root / "src").iterdir() if path.is_dir()} - {
        Path(layer).name for layer in RULES if layer.startswith("src/")
    }
    problems += [f"src/{name}: no rule for this layer in {Path(__file__).name}" for name in unknown]
    return sources, problems


if __name__ == "__main__":
    sources, problems = check(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)
    print("\n".join(problems) if problems else f"layers: {sources} files, every include allowed")
    sys.exit(bool(problems))
