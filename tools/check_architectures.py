#!/usr/bin/env python3
"""Compiles the device files of a build folder for the architectures that it leaves out.

    tools/check_architectures.py BUILD               all of them, for 80, 100 and 120
    tools/check_architectures.py BUILD FOLDER        those of src/cuda/FOLDER
    tools/check_architectures.py BUILD FOLDER 80     for this architecture, or some

Nothing is kept but what the compiler says, which check_device_build.py judges: spills, warnings,
time and memory of each file and architecture. src/cuda/sm90 is for Hopper alone and is left out.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compile_device
from check_device_build import judge, verdict

OTHERS = ("80", "100", "120")


def command_for(command: list[str], architecture: str, output: str) -> list[str]:
    """A file's compilation (compile_commands.json) for one architecture, without the host's part."""
    command = [part for part in command if not part.startswith("-gencode")]
    command[command.index("-c")] = "-cubin"
    command[command.index("-o") + 1] = output
    return [*command, f"-arch=sm_{architecture}", "-Xptxas=-v"]


def compilations(build: Path, architectures: tuple[str, ...], folder: str = ""):
    """(name, command without output, architecture) of each."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = Path(entry["file"])
        wanted = source.parent.name == folder if folder else source.parent.name != "sm90"
        if source.suffix == ".cu" and wanted:
            command = shlex.split(entry["command"])
            nvcc = next(i for i, part in enumerate(command) if Path(part).name == "nvcc")
            for architecture in architectures:
                yield (
                    f"{'/'.join(source.parts[-2:])} sm_{architecture}",
                    command[nvcc:],
                    architecture,
                )


def compiled(name: str, command: list[str], architecture: str) -> tuple[str, int, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as output:
        done = subprocess.run(
            [sys.executable, compile_device.__file__, *command_for(command, architecture, output.name)],
            env=os.environ | {compile_device.MEASURING: name},
            capture_output=True,
            text=True,
        )  # fmt: skip
    return name, done.returncode, done.stderr


def check(build: Path, architectures: tuple[str, ...] = OTHERS, folder: str = "") -> int:
    wanted = list(compilations(build, architectures, folder))
    problems = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, code, log in pool.map(lambda one: compiled(*one), wanted):
            problems += judge(name, log)
            if code:
                problems.append(f"{name}: nvcc failed\n{log}")
    good = f"architectures: {len(wanted)} compilations for {', '.join(architectures)}, none spills"
    return verdict(build, len(wanted), "device files", problems, good)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("folder", nargs="?", default="", help="of src/cuda; default: all")
    parser.add_argument("architectures", nargs="*", help=f"default: {' '.join(OTHERS)}")
    options = parser.parse_args()
    for architecture in options.architectures:
        if architecture not in OTHERS:
            parser.error(f"architectures: got {architecture}, allowed: {', '.join(OTHERS)}")
    sys.exit(check(options.build, tuple(options.architectures) or OTHERS, options.folder))
