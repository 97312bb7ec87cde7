"""What compiling the device files said is judged, for the build and for other architectures."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import check_architectures
import check_device_build
from test_checks import plant

GOOD_LOG = (
    "ptxas info    : Compiling entry function 'kernel' for 'sm_90a'\n"
    "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 168 registers, used 2 barriers\n"
    "device_build: 12.3 s 0.31 GB, launch 1-2\n"
)


@pytest.mark.parametrize(
    "log, expected",
    [
        (GOOD_LOG, "1 files, 0 of them from the cache, nothing to object to"),
        # What compiling it said and cost is in the cache, and judged like any other.
        (GOOD_LOG + "device_build: from the cache\n", "0.31 GB cached\n"),
        (GOOD_LOG.replace("12.3", "45.1") + "device_build: from the cache\n", "took 45.1 s"),
        (GOOD_LOG.replace("0.31 GB", "3.10 GB"), "took 3.1 GB, allowed: 3"),
        (GOOD_LOG.replace("0 bytes spill stores", "8 bytes spill stores"), "8 bytes spill stores"),
        (GOOD_LOG + "warning (C7510): wgmma serialized\n", "C7510"),
        (GOOD_LOG.replace("device_build", "device"), "the log says no cost"),
        (None, "there is no "),
    ],
)
def test_device_build(tmp_path, capsys, log, expected):
    entry = {"directory": str(tmp_path), "file": "src/a.cu", "output": "a.cu.o"}
    plant(tmp_path, {"compile_commands.json": json.dumps([entry])})
    if log is not None:
        plant(tmp_path, {"a.cu.o.log": log})
    failed = check_device_build.check(tmp_path)
    text = capsys.readouterr().out
    assert expected in text
    assert failed == ("nothing to object to" not in text)


def test_architectures(tmp_path, capsys):
    (nvcc := tmp_path / "nvcc").write_text(
        f"""#!/bin/sh
case "$*" in
  *bad.cu*sm_120*) echo "{GOOD_LOG.splitlines()[1].replace("0 bytes spill", "8 bytes spill")}" >&2 ;;
  *gone.cu*) exit 1 ;;
esac
for last; do :; done
echo "$*" >>{tmp_path}/commands
"""
    )
    nvcc.chmod(0o755)

    def checked(*names):
        entries = [
            {
                "file": f"src/cuda/{name}",
                "command": f"ccache {nvcc} -O3 -gencode=arch=compute_90a,code=sm_90a -c {name} -o {name}.o",
            }
            for name in names
        ]
        plant(tmp_path, {"compile_commands.json": json.dumps(entries)})
        failed = check_architectures.check(tmp_path, ("80", "120"))
        return failed, capsys.readouterr().out

    failed, text = checked("rows/a.cu", "sm90/b.cu", "c.cpp")
    assert not failed and "2 compilations for 80, 120, none spills" in text
    commands = (tmp_path / "commands").read_text().splitlines()
    assert all(command.startswith("-O3 -cubin rows/a.cu -o /") for command in commands)
    assert not any("-gencode" in command or "a.cu.o" in command for command in commands)
    assert sorted(re.findall(r"-arch=(\w+)", "".join(commands))) == ["sm_120", "sm_80"]
    assert not check_architectures.check(tmp_path, ("80",), "rows")
    assert "1 compilations for 80" in capsys.readouterr().out
    assert check_architectures.check(tmp_path, ("80",), "sm80")
    capsys.readouterr()
    tool = [sys.executable, check_architectures.__file__]
    done = subprocess.run([*tool, tmp_path, "rows", "120"], capture_output=True, text=True)
    assert done.returncode == 0 and "1 compilations for 120, none spills" in done.stdout
    done = subprocess.run([*tool, tmp_path, "rows", "90"], capture_output=True, text=True)
    assert done.returncode == 2 and "architectures: got 90, allowed: 80, 100, 120" in done.stderr
    failed, text = checked("rows/a.cu", "rows/bad.cu")
    assert failed and "rows/bad.cu sm_120: ?: 8 bytes spill stores" in text
    failed, text = checked("rows/gone.cu")
    assert failed and "rows/gone.cu sm_80: nvcc failed" in text
    failed, text = checked("sm90/b.cu")
    assert failed and "has no device files" in text
