#!/usr/bin/env python3
"""Writes the figures of receipts into the README and the documents; --check only compares.

Each figure has a place, a pattern that must be there once: a document that no longer has it is an
error, not a figure left out. Pictures are compared byte for byte.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pictures

ROOT = Path(__file__).resolve().parent.parent
RECEIPT = "receipts/h200.json"
OPERATIONS = ("up_proj", "down_proj", "down_proj_dgrad", "up_proj_dgrad", "down_proj_wgrad",
              "up_proj_wgrad")  # fmt: skip
NUMBER = r"[\d.]+"


class Rows:
    """One benchmark of a receipt, by configuration and operation."""

    def __init__(self, rows: list[dict]) -> None:
        self.at = {(row["config"], row["what"]): row for row in rows}
        # The published shapes; "small" is not one of them.
        self.configs = {row["config"]: row["thiek"] for row in rows if row["config"] != "small"}

    def ms(self, config: str, what: str) -> float:
        return self.at[config, what]["ms"]

    def of_dense_bound(self, config: str, what: str) -> float:
        return self.at[config, what]["dense_bound_ms"] / self.ms(config, what)

    def mean(self, what: str) -> float:
        """Geometric, over the published shapes."""
        logs = [math.log(self.of_dense_bound(config, what)) for config in self.configs]
        return math.exp(sum(logs) / len(logs))


def table_row(name: str, cells: list[str]) -> tuple[str, str]:
    """The edit of the one row that starts with `name`, which may be several cells."""
    return rf"\| {re.escape(name)} \|.*\n", f"| {' | '.join([name, *cells])} |\n"


def layer(rows: Rows, bmm: Rows | None = None) -> list[tuple[str, list[str]]]:
    """Of two shapes, by name: milliseconds, times the bound, and times torch.bmm."""
    shapes = {"7B-n256": "7B-n256", "small": "4096, 2048, 768, 128, 8"}
    return [
        (name, [
            f"{rows.ms(config, 'layer'):.2f}",
            f"{1 / rows.of_dense_bound(config, 'layer'):.2f}",
            f"{1 / bmm.of_dense_bound(config, 'layer'):.2f}" if bmm else "-",
        ])
        for config, name in shapes.items()
    ]  # fmt: skip


def beside_bmm(hot: Rows, dense: list[dict]) -> Rows:
    """The steady-state benchmark with torch.bmm as its dense bound, where that is measured."""
    rows = []
    for gemms in dense:
        forward, backward, config = gemms["forward_ms"], gemms["backward_ms"], gemms["config"]
        bounds = {"forward": forward, "backward": backward, "layer": forward + backward}
        bounds |= gemms["gemms"]
        rows += [hot.at[config, what] | {"dense_bound_ms": ms} for what, ms in bounds.items()]
    return Rows(rows)


def readme(bench: Rows, hot: Rows, bmm: Rows) -> list[tuple[str, str]]:
    rows = [
        ("cuBLAS | interleaved", bench),
        ("cuBLAS | steady state", hot),
        ("`torch.bmm` | steady state", bmm),
    ]
    return [table_row(name, [f"{of.mean(what):.2f}" for what in ("forward", "backward")])
            for name, of in rows]  # fmt: skip


def performance(bench: Rows, hot: Rows, bmm: Rows) -> list[tuple[str, str]]:
    cells = []
    for config, thiek in bench.configs.items():
        values = [f"{bench.ms(config, what):.2f} | {bench.of_dense_bound(config, what):.2f}"
                  for what in ("forward", "backward")]  # fmt: skip
        cells.append((", ".join(map(str, thiek)), values))
    cells += [(f"{shape} | interleaved", values) for shape, values in layer(bench)]
    cells += [(f"{shape} | steady state", values) for shape, values in layer(hot, bmm)]
    return [table_row(name, values) for name, values in cells]


def kernel_page(operation: str, bench: Rows, text: str) -> list[tuple[str, str]]:
    """The rows that the page has chosen to show."""
    edits = []
    for config in re.findall(r"^\| (\S+-n\d+) \| \d+ \| \d+ \| \d+ \|$", text, re.M):
        row = bench.at[config, operation]
        edits.append((
            rf"\| {re.escape(config)} \| \d+ \| \d+ \| \d+ \|",
            f"| {config} | {row['ms'] * 1e3:.0f} | {row['dense_bound_ms'] * 1e3:.0f} | "
            f"{row['tflops']:.0f} |",
        ))  # fmt: skip
    return edits


def aggregate_page(bench: Rows, text: str) -> list[tuple[str, str]]:
    """Microseconds of a copy of as many bytes, and of both sums behind a flush, in a layer, and what
    share of the copy's speed that is."""
    edits = []
    for config in re.findall(r"^\| (\S+-n\d+) \|", text, re.M):
        copy = bench.ms(config, "aggregate_o.copy")
        cells = [f"{copy * 1e3:.1f}"]
        for what in ("aggregate_o", "aggregate_dx"):
            flushed, layer = bench.ms(config, what), bench.ms(config, f"{what}.in_layer")
            cells += [f"{flushed * 1e3:.1f}", f"{layer * 1e3:.1f}", f"{copy / layer:.2f}"]
        edits.append(table_row(config, cells))
    return edits


def small_kernels(bench: Rows) -> dict[str, list[tuple[str, str]]]:
    """Sentences and rows, by page: microseconds at 24576,1536,256,128,8 or as they say."""

    def us(what: str, digits: int, config: str = "7B-n256") -> str:
        return f"{bench.ms(config, what) * 1e3:.{digits}f}"

    return {
        "metadata": [
            table_row("metadata", [us("metadata", 1)]),
            table_row("top_k and metadata", [us("routing", 1)]),
        ],
        "router_gemm": [(
            r"logits \d+ us, dx \d+ us, dWr \d+ us",
            f"logits {us('router_gemm', 0)} us, dx {us('router_dgrad', 0)} us, "
            f"dWr {us('router_wgrad', 0)} us",
        )],
        "score_grad": [(
            rf"{NUMBER} and {NUMBER} in the receipt",
            f"{us('score_grad', 1)} and {us('score_grad', 1, '1.4B-n256')} in the receipt",
        )],
    }  # fmt: skip


def means(bench: Rows, hot: Rows, bmm: Rows) -> list[tuple[str, str]]:
    edits = []
    for name, rows in (("interleaved", bench), ("steady state", hot), ("beside torch.bmm", bmm)):
        cells = [f"{rows.mean(w):.2f}" for w in ("forward", "backward", "layer", *OPERATIONS)]
        edits.append(table_row(name, cells))
    return edits


def edited(text: str, edits: list[tuple[str, str]], where: str) -> str:
    for pattern, new in edits:
        found = re.findall(pattern, text)
        if len(found) != 1:
            sys.exit(f"figures: {where}: {len(found)} places for {pattern!r}, allowed: one")
        text = re.sub(pattern, lambda _: new, text)
    return text


def documents(receipt: dict) -> dict[str, list[tuple[str, str]]]:
    """What belongs into each document."""
    bench, hot = Rows(receipt["bench"]), Rows(receipt["steady_state"])
    bmm = beside_bmm(hot, receipt["torch_bmm"])

    def page(operation: str) -> str:
        return f"docs/kernels/{operation}.md"

    def text(operation: str) -> str:
        return (ROOT / page(operation)).read_text()

    return {
        "README.md": readme(bench, hot, bmm),
        "docs/performance.md": performance(bench, hot, bmm),
        "docs/findings/sustained.md": means(bench, hot, bmm),
        **{page(name): kernel_page(name, bench, text(name)) for name in OPERATIONS},
        page("aggregate"): aggregate_page(bench, text("aggregate")),
        **{page(name): edits for name, edits in small_kernels(bench).items()},
    }


def drawn() -> dict[str, bytes]:
    """The pictures."""

    def receipt(name: str) -> dict[str, Any]:
        return json.loads((ROOT / "receipts" / f"{name}.json").read_text())

    return {
        "docs/activation-memory.svg": pictures.activation_memory(receipt("activation_memory")),
        "docs/throughput.svg": pictures.throughput(receipt("h200"), receipt("grouped_mm")),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a document would change")
    options = parser.parse_args()
    said = "is not what the receipt says" if options.check else "written"
    places = documents(json.loads((ROOT / RECEIPT).read_text()))
    stale = 0
    for name, edits in places.items():
        old = (ROOT / name).read_text()
        new = edited(old, edits, name)
        if new != old:
            stale += 1
            print(f"figures: {name} {said}")
            if not options.check:
                (ROOT / name).write_text(new)
    made = drawn()
    for name, picture in made.items():
        file = ROOT / name
        if not file.exists() or file.read_bytes() != picture:
            stale += 1
            print(f"figures: {name} {said}")
            if not options.check:
                file.write_bytes(picture)
    print(f"figures: {len(places)} documents, {sum(map(len, places.values()))} places, "
          f"{len(made)} pictures")  # fmt: skip
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
