#!/usr/bin/env python3
"""Runs code blocks of the documents, so that what a reader copies works.

A block runs when the line before it is the comment <!-- run -->:

    <!-- run -->
    ```python
    import sonicmoe
    ```

Each block is complete by itself and succeeds when it exits with 0:
    ```cpp     a whole program; compiled with -Wall -Wextra -Werror in a project of its own that
               does find_package(sonicmoe), then run
    ```python  run by the interpreter that runs this file
    ```sh      run by bash -euo pipefail, in the root of the tree
A marked block in another language, or a file without a marked block, is an error.

Usage: tools/run_snippets.py PREFIX [FILE.md...]    PREFIX: where sonicmoe is installed
Without FILE.md: README.md and every page of docs/ that has a mark.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^<!-- run -->\s*\n+```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^<!-- run -->", re.MULTILINE)
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(snippet LANGUAGES CXX)
find_package(sonicmoe CONFIG REQUIRED)
add_executable(snippet snippet.cpp)
target_compile_options(snippet PRIVATE -Wall -Wextra -Werror)
target_link_libraries(snippet PRIVATE sonicmoe::sonicmoe)
"""


def run_cpp(code, folder, prefix):
    (folder / "CMakeLists.txt").write_text(PROJECT)
    (folder / "snippet.cpp").write_text(code)
    build = folder / "build"
    for command in (
        [
            "cmake",
            "-S",
            folder,
            "-B",
            build,
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_PREFIX_PATH={prefix}",
            "--log-level=WARNING",
        ],
        ["cmake", "--build", build],
        [build / "snippet"],
    ):
        subprocess.run(command, check=True, cwd=folder)


def run_python(code, folder, prefix):
    (folder / "snippet.py").write_text(code)
    path = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, "snippet.py"],
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
    )


def run_sh(code, folder, prefix):
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code], check=True, cwd=ROOT, stdin=subprocess.DEVNULL
    )


RUNNERS = {"cpp": run_cpp, "python": run_python, "sh": run_sh}


def marked():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in pages if MARK.search(page.read_text())]


def main(prefix, *names):
    prefix = Path(prefix).resolve()
    for name in names or marked():
        text = (ROOT / name).read_text()
        blocks = list(BLOCK.finditer(text))
        if not blocks or len(blocks) != len(MARK.findall(text)):
            sys.exit(f"{name}: {len(MARK.findall(text))} marks, {len(blocks)} runnable blocks")
        for block in blocks:
            language, where = block[1], f"{name}:{text.count(chr(10), 0, block.start(1)) + 1}"
            print(f"--- {where} ({language})", flush=True)
            if language not in RUNNERS:
                sys.exit(f"{where}: cannot run '{language}', only {sorted(RUNNERS)}")
            with tempfile.TemporaryDirectory() as folder:
                try:
                    RUNNERS[language](block[2], Path(folder), prefix)
                except subprocess.CalledProcessError as error:
                    sys.exit(f"{where}: {error}")
        print(f"snippets: {len(blocks)} of {name} run")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
