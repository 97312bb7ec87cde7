#!/usr/bin/env python3
"""Judges the loops in which producers gather, by the machine code of a build folder's kernels.

Fails on a wide multiplication (IMAD.WIDE) in one: beside wgmma four of them cost the weight
gradients 2 to 3 %, eight the other products 4 to 9 (docs/findings/machine-code.md, 24). Neither the
source nor what ptxas says shows it, for ptxas makes one of additions and shifts, too.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

FUNCTION = re.compile(r"Function : (\w+)")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+([^;]+);")
BRANCH = re.compile(r"\bBRA\b.* 0x([0-9a-f]+)")
WIDE = re.compile(r"(?<!U)IMAD\.WIDE")
# A loop over k blocks has up to 310 instructions, one over tiles 440 and more.
LONGEST = 350


def gather_loops(sass: str):
    """(function, instructions) of each loop over k blocks that fetches by cp.async (LDGSTS)."""
    for part in re.split(r"(?=Function : )", sass):
        function = FUNCTION.match(part)
        if function is None:
            continue
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
        for first, end in sorted(innermost):
            body = [text for _, text in code[first:end]]
            if len(body) <= LONGEST and not any("HGMMA" in text for text in body):
                yield function[1], body


def judge(sass: str) -> tuple[int, list[str]]:
    """How many loops there are, and what is wrong with them."""
    loops, problems = 0, []
    for function, body in gather_loops(sass):
        loops += 1
        if wide := [text for text in body if WIDE.search(text)]:
            problems.append(f"{function}: {len(wide)} times IMAD.WIDE where it gathers: {wide[0]}")
    return loops, problems


def cuobjdump() -> str:
    beside = [Path(folder) / "nvidia" / "cu13" / "bin" / "cuobjdump" for folder in sys.path]
    found = next((str(path) for path in beside if path.exists()), None) or shutil.which("cuobjdump")
    if found is None:
        sys.exit("check_machine_code: there is no cuobjdump (tools/requirements.txt)")
    return found


def main(build: Path) -> int:
    loops, problems = 0, []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = Path(entry["file"])
        if source.suffix == ".cu" and source.parent.name == "sm90":
            machine_code = Path(entry["directory"]) / entry["output"]
            sass = subprocess.check_output([cuobjdump(), "-sass", machine_code], text=True)
            found, wrong = judge(sass)
            loops += found
            problems += [f"{source.name}: {problem}" for problem in wrong]
    if loops == 0:
        problems = [f"{build}: no kernel gathers: configured with SONICMOE_CUDA=OFF?"]
    good = f"machine code: {loops} loops gather, nothing to object to"
    print("\n".join(problems) if problems else good)
    return 1 if problems else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check_machine_code.py BUILD_FOLDER")
    sys.exit(main(Path(sys.argv[1])))
