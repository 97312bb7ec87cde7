#!/usr/bin/env python3
"""Writes the table of tests/tile_times.h from receipts/tile-times.log; with --check, only compares.

The log holds, for each shape after a line "## T,H,I,E,K", the rows of compiled kernels that
`sonicmoe bench --device cuda --thiek T,H,I,E,K --ops --every-kernel` prints: name, ms, +-, TFLOP/s,
and more. Times come from the TFLOP/s, which have more digits. A line "# ..." becomes a comment.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "receipts" / "tile-times.log"
HEADER = ROOT / "tests" / "tile_times.h"
BEGIN = "inline constexpr TileTimes kTileTimes[] = {\n"
END = "};\n// clang-format on\n"
# Operation, its two tiles, and how many times 2 R n d its flops are.
TILES = (
    ("up_proj", "128x256", "128x128", 2),
    ("down_proj", "128x256", "128x192", 1),
    ("down_proj_dgrad", "128x256", "128x128", 1),
    ("up_proj_dgrad", "128x256", "128x192", 2),
    ("down_proj_wgrad", "128x256", "128x128", 1),
    ("up_proj_wgrad", "256x128", "128x128", 2),
)


def row(shape: str, tflops: dict[str, float]) -> str:
    """A shape's line of the table; empty if a kernel did not run or the log breaks off."""
    tokens, hidden, intermediate, _, top_k = map(int, shape.split(","))
    cells = []
    for operation, *tiles, times in TILES:
        flops = 2 * times * tokens * top_k * hidden * intermediate
        names = [f"{operation}.{tile}" for tile in tiles]
        if any(name not in tflops for name in names):
            return ""
        cells.append("{" + ", ".join(str(round(flops / tflops[n] * 1e-3)) for n in names) + "}")
    return f"    {{{shape.replace(',', ', ')}, {{{', '.join(cells)}}}}},\n"


def table(log: str) -> str:
    lines, shape, tflops = [], "", {}
    for line in [*log.splitlines(), "# end"]:
        if line.startswith("#") and shape:
            lines.append(row(shape, tflops))
            shape = ""
        if line.startswith("## "):
            shape, tflops = line[3:].strip(), {}
        elif line.startswith("# ") and line != "# end":
            lines.append(f"    // {line[2:]}.\n")
        elif found := re.match(r"cuda\.(\S+)\s+\S+\s+\S+\s+(\S+)", line):
            tflops[found[1]] = float(found[2])
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the header would change")
    options = parser.parse_args()
    old = HEADER.read_text()
    begin = old.index(BEGIN) + len(BEGIN)
    new = old[:begin] + table(LOG.read_text()) + old[old.index(END) :]
    if options.check and new != old:
        print(f"tile_times: {HEADER.relative_to(ROOT)} is not what {LOG.relative_to(ROOT)} says")
        return 1
    if not options.check:
        HEADER.write_text(new)
    print(f"tile_times: {new.count('{{')} shapes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
