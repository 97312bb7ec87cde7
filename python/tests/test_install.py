"""Where the package finds its extension. tools/check_wheel.sh tries installations themselves."""

import os
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
