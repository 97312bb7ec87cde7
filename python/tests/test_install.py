"""Where the package finds its extension. tools/check_wheel.sh tries installations themselves."""

import os
import subprocess
import sys
from pathlib import Path

import sonicmoe
from sonicmoe import _info, _ops


def library(folder: Path, seconds: int) -> Path:
    file = folder / "lib" / "libsonicmoe_torch.so"
    file.parent.mkdir(parents=True)
    file.touch()
    os.utime(file, (seconds, seconds))
    return file


def test_the_extension_is_found_in_every_folder_of_the_package(tmp_path):
    tree, packages = str(tmp_path / "tree"), str(tmp_path / "packages")
    assert _ops._find([tree, packages]) is None
    installed = library(tmp_path / "packages", 1000)
    assert _ops._find([tree]) is None
    assert _ops._find([tree, packages]) == installed


def test_the_newest_extension_counts(tmp_path):
    folders = [str(tmp_path / name) for name in ("tree", "packages")]
    built, installed = library(tmp_path / "tree", 1000), library(tmp_path / "packages", 2000)
    assert _ops._find(folders) == _ops._find(reversed(folders)) == installed
    os.utime(built, (3000, 3000))
    assert _ops._find(folders) == _ops._find(reversed(folders)) == built


def test_the_version_tells_whether_there_are_cuda_kernels(monkeypatch):
    assert sonicmoe.__version__ == _info.version()
    assert sonicmoe.__version__.endswith("+cpu") != sonicmoe.has_cuda()
    monkeypatch.setattr(_ops, "AVAILABLE", False)
    assert _info.version() == "0+unbuilt"


def printed(script: str) -> list[str]:
    """What a fresh process prints."""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_import_leaves_compilers_to_those_who_use_them():
    script = (
        "import sys, torch\n"
        "known = set(sys.modules)\n"
        "import sonicmoe\n"
        "print(*set(sys.modules) - known)"
    )
    imported = printed(script)
    assert "sonicmoe._flops" in imported
    slow = "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton", "sympy"
    assert [name for name in imported if name.startswith(slow)] == []


def test_flops_are_counted_whichever_is_imported_first():
    use = (
        "x = sonicmoe.MoE(4, 2, 8, 8, 'swiglu', False, 0.3)\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    x(torch.zeros(16, 8))\n"
        "print(counter.get_total_flops())"
    )
    first, second = "import sonicmoe, torch\n", "from torch.utils.flop_counter import *\n"
    flops = str(6 * 16 * 2 * 8 * 8 + 2 * 16 * 4 * 8)
    assert printed(first + second + use) == printed(second + first + use) == [flops]
