"""FLOPs of the operators' matrix products, for torch.utils.flop_counter.

They count the rows that shapes say: T*K, the length of lists, or the capacity R. How many of those
are sentinels or belong to no expert is known to the device alone.
"""

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

import torch

from ._fakes import options_of, recomputes, row_capacity, rows_of_ids


def _chosen(given: dict[str, Any]) -> int:
    return row_capacity(options_of(given["layer"]), given["x"].shape[0], given["w1"].shape[0])


#: Rows of each forward operator, of its arguments by name.
_ROWS = {
    "layer_forward": _chosen,
    "routed_forward": lambda given: given["scores"].shape[0],
    "ids_forward": lambda given: rows_of_ids(given["layer"], given["ids"].numel()),
    "ids_experts_forward": lambda given: rows_of_ids(given["layer"], given["ids"].numel()),
    "logits_forward": _chosen,
    "grouped_forward": lambda given: given["rows"].shape[0],
    "grouped_forward_out": lambda given: given["rows"].shape[0],
}
_BACKWARDS = tuple(f"{kind}_backward" for kind in ("layer", "routed", "ids", "logits", "grouped"))


def _product(rows: int, weights: torch.Tensor | None) -> int:
    """Of rows with their experts' weights (E, out, in)."""
    return 0 if weights is None else 2 * rows * weights.shape[1] * weights.shape[2]


def _router(given: dict[str, Any]) -> int:
    return 2 * given["x"].shape[0] * given["router_w"].numel() if "router_w" in given else 0


def _forward(rows_of: Callable[[dict[str, Any]], int], given: dict[str, Any]) -> int:
    weights, rows = (given["w1"], given["w1_up"], given["w2"]), rows_of(given)
    return sum(_product(rows, w) for w in weights) + _router(given)


def _backward(given: dict[str, Any]) -> int:
    """One product for dA, one for an H that is made again, and one for each of dx, dW1, dW2 and the
    router's that is wanted."""
    rows = given["preact"].shape[0]
    up = _product(rows, given["w1"]) + _product(rows, given["w1_up"])
    down = _product(rows, given["w2"])
    wants_dw1 = given["wants_dw1"] or (given["w1_up"] is not None and given["wants_dw1_up"])
    again = recomputes(options_of(given["layer"]))
    of_experts = up * (again + given["wants_dx"] + wants_dw1) + down * (1 + given["wants_dw2"])
    return of_experts + _router(given) * (given["wants_dx"] + given.get("wants_drouter_w", False))


def _w1_gradient(given: dict[str, Any]) -> int:
    if not (given["wants_dw1"] or (given["w1_up"] is not None and given["wants_dw1_up"])):
        return 0
    return sum(_product(given["dpreact"].shape[0], w) for w in (given["w1"], given["w1_up"]))


def _register(name: str, formula: Callable[[dict[str, Any]], int]) -> None:
    packet = getattr(torch.ops.sonicmoe, name)
    arguments = packet.default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}

    @sys.modules[_COUNTER].register_flop_formula(packet, get_raw=True)
    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return formula(defaults | dict(zip(defaults, args, strict=False)) | kwargs)


def _register_all() -> None:
    for name, rows_of in _ROWS.items():
        _register(name, functools.partial(_forward, rows_of))
    for name in _BACKWARDS:
        _register(name, _backward)
    _register("up_proj_wgrad", _w1_gradient)


_COUNTER = "torch.utils.flop_counter"


class _Loader(SourceFileLoader):
    """Loads the counter and gives it the formulas."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _register_all()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the counter once, with that loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


def register() -> None:
    """Gives the counter the formulas. Its import takes longer than that of this package, for it
    imports Triton: it happens when the caller wants it."""
    if _COUNTER in sys.modules:
        _register_all()
    else:
        sys.meta_path.insert(0, _Finder())
