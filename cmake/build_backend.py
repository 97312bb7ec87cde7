"""The build backend of pyproject.toml: scikit-build-core's, and the version that it asks for.

A build without CUDA kernels has the version `0.1.0+cpu`, so that pip shows it. scikit-build-core
wants the version before it runs CMake, hence find_nvcc.cmake is run alone here. CMake includes the
same file later, and python/CMakeLists.txt refuses a build that does not match its version.

A source archive has no label. pip takes one that is named, and refuses one that it picks from an
index when the version then gets a label.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from scikit_build_core import build as skbuild
from scikit_build_core.build import (
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)
from scikit_build_core.cmake import CMake

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "dynamic_metadata",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent
Settings = Mapping[str, Any] | None

# What the hook that runs has found; dynamic_metadata is called without its settings.
_label = ""


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, str]:
    """What scikit-build-core asks for (pyproject.toml, tool.dynamic-metadata)."""
    return {"version": _version()}


def _version() -> str:
    text = (ROOT / "CMakeLists.txt").read_text()
    return re.search(r"project\(sonicmoe VERSION ([0-9.]+)", text).group(1) + _label


def _look_for_compiler() -> None:
    """Where there is none, CMake names one that this Python was built with, and no package. It may
    also know one that is named elsewhere, so it has the last word."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        print(
            "*** sonicmoe: there is no C++ compiler c++, g++ or clang++ in PATH.\n"
            "*** On Debian and Ubuntu: apt-get install g++",
            file=sys.stderr,
            flush=True,
        )


def _choose_label(settings: Settings) -> None:
    global _label
    _look_for_compiler()
    cmake = CMake.default_search(version=SpecifierSet(">=3.28"))
    command = [str(cmake.cmake_path)]
    for name in ("SONICMOE_CUDA", "CMAKE_CUDA_COMPILER"):
        value = (settings or {}).get(f"cmake.define.{name}")
        command += [] if value is None else [f"-D{name}={value}"]
    command += ["-P", str(ROOT / "cmake" / "find_nvcc.cmake")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(1)  # CMake has said why
    _label = "" if done.stdout.strip() else "+cpu"


def _say() -> None:
    """The last lines of `pip install -v`."""
    if _label:
        print(
            f"*** sonicmoe {_version()}: this build has NO CUDA KERNELS.\n"
            "*** README.md, section Install, says what a build with them needs.",
            file=sys.stderr,
            flush=True,
        )


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None):
    _choose_label(config_settings)
    return skbuild.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None):
    _choose_label(config_settings)
    return skbuild.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
):
    _choose_label(config_settings)
    name = skbuild.build_wheel(wheel_directory, config_settings, metadata_directory)
    _say()
    return name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
):
    _choose_label(config_settings)
    name = skbuild.build_editable(wheel_directory, config_settings, metadata_directory)
    _say()
    return name


def build_sdist(sdist_directory: str, config_settings: Settings = None):
    return skbuild.build_sdist(sdist_directory, config_settings)
