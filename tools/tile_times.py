#!/usr/bin/env python3
"""Writes the table of tests/tile_times.h from docs/findings/tile-times.log; --check only compares.

The log holds, for each shape after a line "## T,H,I,E,K", the rows of compiled kernels that
`sonicmoe bench --device cuda --thiek T,H,I,E,K --ops --every-kernel` prints: name, ms, +-, TFLOP/s,
and more. Times come from the TFLOP/s, which have more digits. A line "# ..." becomes a comment.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "docs" / "findings" / "tile-times.log"
HEADER = ROOT / "tests" / "tile_times.h"
BEGIN = "inline constexpr TileTimes kTileTimes[] = {\n"
END = "};\n// clang-format on\n"


def row(shape: str, tiles: list[list[str]], tflops: dict[str, str]) -> str:
    """A shape's line of the table; empty if a kernel did not run or the log breaks off."""
    tokens, hidden, intermediate, _, top_k = map(int, shape.split(","))
    cells = []
    for operation, *sizes in tiles:
        names = [f"{operation}.{tile}" for tile in sizes]
        if any(name not in tflops for name in names):
            return ""
        # Gate and up make two matrices.
        flops = (4 if operation.startswith("up") else 2) * tokens * top_k * hidden * intermediate
        nanoseconds = [str(round(flops / float(tflops[name]) * 1e-3)) for name in names]
        cells.append("{" + ", ".join(nanoseconds) + "}")
    return f"    {{{shape.replace(',', ', ')}, {{{', '.join(cells)}}}}},\n"


def table(log: str, tiles: list[list[str]]) -> str:
    lines = []
    for section in re.split(r"^(?=#)", log, flags=re.M):
        head, _, body = section.partition("\n")
        if head.startswith("## "):
            # Kernels of older logs are named by the backend, not by the architecture.
            tflops = re.findall(r"^(?:cuda|sm90)\.(\S+)\s+\S+\s+\S+\s+(\S+)", body, re.M)
            lines.append(row(head[3:], tiles, dict(tflops)))
        elif head:
            lines.append(f"    //{head[1:]}.\n")
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the header would change")
    options = parser.parse_args()
    old = HEADER.read_text()
    # kTiles: an operation and its tiles.
    tiles = [re.findall(r'"(\w+)"', words) for words in re.findall(r'\{("\w+"(?:, "\w+")+)\}', old)]
    begin = old.index(BEGIN) + len(BEGIN)
    new = old[:begin] + table(LOG.read_text(), tiles) + old[old.index(END) :]
    if options.check and new != old:
        print(f"tile_times: {HEADER.relative_to(ROOT)} is not what {LOG.relative_to(ROOT)} says")
        return 1
    if not options.check:
        HEADER.write_text(new)
    print(f"tile_times: {new.count('{{')} shapes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
