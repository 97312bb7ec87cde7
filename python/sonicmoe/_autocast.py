from typing import overload

import torch

_TYPES = (torch.bfloat16, torch.float16)


def autocasts(x: torch.Tensor) -> bool:
    """Whether autocast is on where x is."""
    # Flags first, for x.device.type makes a text.
    device = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)  # meta has no autocast


def to_fp32(x: torch.Tensor) -> bool:
    """Whether autocast to fp32 is on, which makes the router's logits fp32 and casts nothing."""
    return autocasts(x) and torch.get_autocast_dtype(x.device.type) == torch.float32


@overload
def autocast(x: torch.Tensor) -> tuple[torch.Tensor]: ...


@overload
def autocast(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    w1_up: torch.Tensor | None,
    b1_up: torch.Tensor | None,
    /,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
]: ...


def autocast(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors in autocast's type where it is on, so that gradients come back in their own.

    Autocast to fp32, which CUDA has, is for operations that lose too much in 16 bits: not for this
    layer, which sums in fp32 anyway.
    """
    if not autocasts(x):
        return x, *others
    dtype = torch.get_autocast_dtype(x.device.type)
    if dtype not in _TYPES:
        return x, *others
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in (x, *others))
