#!/usr/bin/env python3
"""Launches nvcc for one device file (CMAKE_CUDA_COMPILER_LAUNCHER), through ccache if there is one.

What ptxas reports and what the compilation cost go into OBJECT.log for tools/check_device_build.py;
warnings also go to the terminal. ccache keeps stderr beside the object, so the log of a file taken
from the cache tells what compiling it cost.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

MEASURING = "SONICMOE_MEASURE_DEVICE_BUILD"
# What ptxas -v says of every function, wanted or not.
CHATTER = re.compile(r"^(ptxas info|device_build:|\s*\d+ bytes stack frame|$)")


def measure(command: list[str]) -> int:
    code = subprocess.call(command)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: what others do at the same time does not count.
    seconds, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
    print(f"device_build: {seconds:.1f} s {peak:.2f} GB", file=sys.stderr)
    return code


def main(command: list[str]) -> int:
    if MEASURING in os.environ:
        return measure(command)
    if "-c" not in command:
        return subprocess.call(command)
    this = str(Path(__file__).resolve())
    ccache = shutil.which("ccache")
    environment = os.environ | {MEASURING: "1", "CCACHE_PREFIX": this}
    done = subprocess.run(
        [ccache or this, *command, "-Xptxas=-v"], env=environment, stderr=subprocess.PIPE, text=True
    )
    Path(command[command.index("-o") + 1] + ".log").write_text(done.stderr)
    for line in done.stderr.splitlines():
        if done.returncode or not CHATTER.match(line):
            print(line, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
