"""A module's state dict without the buckets that its tensors are views of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["module_state_dict"]


@torch.no_grad()
def module_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return `module.state_dict()` with compact copies, so that you can save a part of a distributed module.

    With algorithms that exchange weights, parameters are views of buckets, and `torch.save` writes the whole storage
    behind a view: `torch.save(model.head.state_dict(), ...)` writes whole buckets. This function copies every tensor
    to storage of its own. The copies do not change when training continues. Tied weights stay tied.

    The weights are this rank's. To save the average of all ranks, call `bagua.average_parameters` first.

    Args:
        module: any module: a distributed one, a submodule of one, or a plain one.

    Returns:
        What `module.load_state_dict` takes, metadata included.

    Raises:
        TypeError: `module` is not a module.

    Examples:
        >>> torch.save(bagua.module_state_dict(model), path)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    state = module.state_dict()
    copies: dict[Any, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = _copy(value, copies)
    return state


def _copy(tensor: Tensor, copies: dict[Any, Tensor]) -> Tensor:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel():
        return tensor.clone()
    place = tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride()
    if place not in copies:
        copies[place] = tensor.clone(memory_format=torch.preserve_format)
    return copies[place]
