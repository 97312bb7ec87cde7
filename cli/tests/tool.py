"""Runs the command-line tool under test."""

import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("SONICMOE_CLI", str(ROOT / "build" / "bin" / "sonicmoe"))


def run(*arguments, timeout=300):
    return subprocess.run(
        [BINARY, *map(str, arguments)],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=timeout,
        check=False,
    )


def assert_refused(result, message):
    """Exit code 2, one line on stderr, nothing else."""
    assert result.returncode == 2
    assert result.stderr == f"sonicmoe: {message}\n"
    assert result.stdout == ""
