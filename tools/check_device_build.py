#!/usr/bin/env python3
"""Judges the device files of a build folder by what compiling them said (tools/compile_device.py).

Fails on spilled registers, on wgmma that the compiler serialised (C7510), on setmaxnreg that it
ignored (C7508 and kin), and on a file that takes more than 45 s of processor time or 3 GB. A file
that came from the compiler's cache is judged by what compiling it said and cost then, for the same
source, flags and compiler; it is marked.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

MAX_SECONDS, MAX_GB = 45, 3
FUNCTION = re.compile(r"Compiling entry function '(\w+)'")
SPILL = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
COST = re.compile(r"device_build: ([0-9.]+) s ([0-9.]+) GB")
CACHED = "device_build: from the cache"
BAD = re.compile(r".*(C75\d\d|setmaxnreg.*ignored|wgmma.*serializ).*", re.IGNORECASE)


def demangled(name: str) -> str:
    if shutil.which("c++filt") is None:
        return name
    return subprocess.check_output(["c++filt", name], text=True).strip()


def judge(name: str, log: str) -> list[str]:
    problems = [match[0].strip() for match in BAD.finditer(log)]
    function = "?"
    for line in log.splitlines():
        if match := FUNCTION.search(line):
            function = match[1]
        elif (match := SPILL.search(line)) and match[
            0
        ] != "0 bytes spill stores, 0 bytes spill loads":
            problems.append(f"{demangled(function)}: {match[0]}")
    registers = [int(count) for count in REGISTERS.findall(log)]
    cost = COST.search(log)
    if cost is None:
        return [f"{name}: the log says no cost: was it compiled by tools/compile_device.py?"]
    seconds, gigabytes = float(cost[1]), float(cost[2])
    print(f"{name:48s} {len(registers):3d} kernels {max(registers, default=0):4d} registers "
          f"{seconds:6.1f} s {gigabytes:5.2f} GB{' cached' * (CACHED in log)}")  # fmt: skip
    if seconds > MAX_SECONDS:
        problems.append(f"took {seconds} s, allowed: {MAX_SECONDS}")
    if gigabytes > MAX_GB:
        problems.append(f"took {gigabytes} GB, allowed: {MAX_GB}")
    return [f"{name}: {problem}" for problem in problems]


def device_files(build: Path):
    """(name, object file) of each."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = Path(entry["file"])
        if source.suffix == ".cu":
            yield "/".join(source.parts[-3:]), Path(entry["directory"]) / entry["output"]


def verdict(build: Path, judged: int, what: str, problems: list[str], good: str) -> int:
    """Of so many of what is judged; none is a problem, too."""
    if judged == 0 and not problems:
        problems = [f"{build} has no {what}: configured with SONICMOE_CUDA=OFF?"]
    print("\n".join(problems) if problems else good)
    return 1 if problems else 0


def check(build: Path) -> int:
    problems, files, cached = [], 0, 0
    for name, machine_code in device_files(build):
        log = machine_code.with_name(machine_code.name + ".log")
        files += 1
        if not log.exists():
            problems.append(f"{name}: there is no {log}")
            continue
        text = log.read_text()
        problems += judge(name, text)
        cached += CACHED in text
    good = f"device build: {files} files, {cached} of them from the cache, nothing to object to"
    return verdict(build, files, "device files", problems, good)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check_device_build.py BUILD_FOLDER")
    sys.exit(check(Path(sys.argv[1])))
