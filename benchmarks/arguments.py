"""What benchmarks take on their command lines. Each function is the `type` of an argument."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path


def sizes(names: str) -> Callable[[str], list[int]]:
    """Positive ints, one for each of `names`, E and K among them: "T,H,I,E,K". 8 divides H and I."""
    wanted = names.split(",")

    def parse(text: str) -> list[int]:
        try:
            values = [int(value) for value in text.split(",")]
        except ValueError:
            values = []
        if len(values) != len(wanted) or min(values) < 1:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, allowed: {len(wanted)} positive ints {names}"
            )
        shape = dict(zip(wanted, values, strict=True))
        for name in ("H", "I"):
            if shape.get(name, 8) % 8 != 0:
                raise argparse.ArgumentTypeError(
                    f"got {name} = {shape[name]}, allowed: multiples of 8"
                )
        if shape["K"] > shape["E"]:
            raise argparse.ArgumentTypeError(
                f"got K = {shape['K']}, allowed: 1 to E = {shape['E']}"
            )
        return values

    return parse


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: an int of at least 1")
    return int(text)


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: numbers above 0")
    return value


def report_file(text: str) -> Path:
    """Where a report goes, in a folder that is made. Refused now, and not when all is measured."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError:
        writable = False
    if path.is_dir() or not writable:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a file that can be written")
    return path
