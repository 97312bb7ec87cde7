#!/usr/bin/env python3
"""Launches nvcc for one device file (CMAKE_CUDA_COMPILER_LAUNCHER), through ccache if there is one.

What ptxas reports and what the compilation cost go into OBJECT.log for tools/check_device_build.py;
warnings also go to the terminal. ccache keeps stderr beside the object, so the log of a file taken
from the cache is that of the compilation that filled it, and says that it is.
"""

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

MEASURING = "SONICMOE_MEASURE_DEVICE_BUILD"  # inside ccache; what tells this launch from others
# What ptxas -v says of every function, wanted or not.
CHATTER = re.compile(r"^(ptxas info|device_build:|\s*\d+ bytes stack frame|$)")


def measure(command: list[str]) -> int:
    code = subprocess.call(command)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: what others do at the same time does not count.
    seconds, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
    cost = f"{seconds:.1f} s {peak:.2f} GB"
    print(f"device_build: {cost}, launch {os.environ[MEASURING]}", file=sys.stderr)
    return code


def main(command: list[str]) -> int:
    if MEASURING in os.environ:
        return measure(command)
    if "-c" not in command:
        return subprocess.call(command)
    this = str(Path(__file__).resolve())
    ccache = shutil.which("ccache")
    launch = f"{os.getpid()}-{time.time_ns()}"
    environment = os.environ | {MEASURING: launch, "CCACHE_PREFIX": this}
    # ccache takes -gencode for -g and, for the sake of debug information that there is not, would
    # keep what one folder has compiled from all others.
    environment["CCACHE_NOHASHDIR"] = "1"
    done = subprocess.run(
        [ccache or this, *command, "-Xptxas=-v"], env=environment, stderr=subprocess.PIPE, text=True
    )
    cached = launch not in done.stderr
    log = done.stderr + ("device_build: from the cache\n" if cached else "")
    Path(command[command.index("-o") + 1] + ".log").write_text(log)
    for line in done.stderr.splitlines():
        if done.returncode or not CHATTER.match(line):
            print(line, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
