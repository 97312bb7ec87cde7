import torch


def autocast(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors in autocast's type where it is on, so that gradients come back in their own."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast
        return x, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in (x, *others))
