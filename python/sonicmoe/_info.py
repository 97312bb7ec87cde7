"""What this build has and what it can run on, as the library says."""

import functools
import json
from typing import Any

import torch

from . import _ops


@functools.cache
def _info() -> dict[str, list[dict[str, Any]]]:
    if not _ops.AVAILABLE:
        return {"devices": [], "kernels": []}
    return json.loads(torch.ops.sonicmoe.info())


def version() -> str:
    """The version of the extension, with `+cpu` if it has no kernels for CUDA devices. `0+unbuilt`
    without the extension."""
    return torch.ops.sonicmoe.build_version() if _ops.AVAILABLE else "0+unbuilt"


def has_cuda() -> bool:
    """Whether this build has kernels for CUDA devices; :func:`devices` says whether there are any.
    False without the extension."""
    return any(kernel["device"] == "cuda" for kernel in _info()["kernels"])


def devices() -> list[str]:
    """The devices that can run a layer of this build: "cpu", "cuda:0 NVIDIA H200", ...

    The first word of each is torch's name of the device. Empty without the extension.
    """
    names = []
    for device in _info()["devices"]:
        if device["usable"] and device["type"] == "cpu":
            names.append("cpu")
        elif device["usable"]:
            names.append(f"{device['type']}:{device['index']} {device['name']}")
    return names


def kernels() -> list[tuple[str, str, str]]:
    """All kernels of this build: (operation, name, "cpu" or "cuda"), best first within an
    operation. Empty without the extension."""
    return [(kernel["op"], kernel["name"], kernel["device"]) for kernel in _info()["kernels"]]
