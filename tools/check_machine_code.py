#!/usr/bin/env python3
"""Judges the loops in which producers gather, by the machine code of a build folder's kernels.

Fails on a wide multiplication (IMAD.WIDE) in one: beside wgmma four a block cost the weight
gradients 2 to 3 %, eight the other products 2 to 9 (docs/findings/machine-code.md, 24). Neither the
source nor what ptxas says shows it, for ptxas makes one of additions and shifts, too.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from check_device_build import demangled, device_files, verdict

FUNCTION = re.compile(r"Function : (\w+)")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+([^;]+);")
BRANCH = re.compile(r"\bBRA\b.* 0x([0-9a-f]+)")
WIDE = re.compile(r"(?<!U)IMAD\.WIDE")
# Loops over k blocks have up to 225 instructions, the loops around them 374 and more. Where the
# last block stands by itself, behind a loop of several in turn, its loop is the one around.
LONGEST = 300


def gather_loops(part: str) -> list[list[str]]:
    """The innermost loops of a function that fetch by cp.async (LDGSTS) and do not multiply."""
    code = [(int(at, 16), text.strip()) for at, text in INSTRUCTION.findall(part)]
    place = {at: i for i, (at, _) in enumerate(code)}
    loops = []
    for i, (_, text) in enumerate(code):
        if (branch := BRANCH.search(text)) and place.get(int(branch[1], 16), i) < i:
            loops.append((place[int(branch[1], 16)], i + 1))
    innermost = {
        min(around, key=lambda loop: loop[1] - loop[0])
        for i, (_, text) in enumerate(code)
        if "LDGSTS." in text and (around := [loop for loop in loops if loop[0] <= i < loop[1]])
    }
    bodies = [[text for _, text in code[first:end]] for first, end in sorted(innermost)]
    return [body for body in bodies if not any("HGMMA" in text for text in body)]


def judge(sass: str) -> tuple[int, list[str]]:
    """How many loops over k blocks gather, and what is wrong with them."""
    judged, problems = 0, []
    for part in re.split(r"(?=Function : )", sass):
        if not (function := FUNCTION.match(part)):
            continue  # what comes before the first one
        loops = gather_loops(part)
        short = [body for body in loops if len(body) <= LONGEST]
        judged += len(short)
        wrong = [text for body in short for text in body if WIDE.search(text)]
        problem = f"{len(wrong)} times IMAD.WIDE where it gathers: {wrong[0]}" if wrong else ""
        if loops and not short:
            problem = f"gathers in no loop of at most {LONGEST} instructions"
        if problem:
            problems.append(f"{demangled(function[1])}: {problem}")
    return judged, problems


def cuobjdump() -> str:
    beside = [Path(folder) / "nvidia" / "cu13" / "bin" / "cuobjdump" for folder in sys.path]
    found = next((str(path) for path in beside if path.exists()), None) or shutil.which("cuobjdump")
    if found is None:
        sys.exit("check_machine_code: there is no cuobjdump (tools/requirements.txt)")
    return found


def check(build: Path) -> int:
    program = cuobjdump()
    files = [(name, file) for name, file in device_files(build) if "/sm90/" in name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        dumps = pool.map(
            lambda file: subprocess.run(
                [program, "-sass", file[1]], capture_output=True, text=True
            ),
            files,
        )
        loops, problems = 0, []
        for (name, machine_code), dump in zip(files, dumps, strict=True):
            if dump.returncode != 0:
                problems.append(f"{name}: {machine_code}: {dump.stderr.strip()}")
                continue
            found, wrong = judge(dump.stdout)
            loops += found
            problems += [f"{name}: {problem}" for problem in wrong]
    good = f"machine code: {loops} loops gather, nothing to object to"
    return verdict(build, loops, "kernel that gathers", problems, good)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check_machine_code.py BUILD_FOLDER")
    sys.exit(check(Path(sys.argv[1])))
