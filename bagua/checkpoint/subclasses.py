"""Tensor subclasses that are made of tensors, such as 8-bit optimizer states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bagua.checkpoint.errors import CheckpointError

__all__ = ["is_subclass", "on_cpu", "parts_of"]


def is_subclass(value: Tensor) -> bool:
    """Whether `value` is neither a plain tensor nor a parameter."""
    return type(value) not in (Tensor, nn.Parameter)


def parts_of(value: Tensor) -> dict[str, Tensor]:
    """The tensors that `value` is made of, by name."""
    names, _ = _method(value, "__tensor_flatten__")()
    return {name: getattr(value, name) for name in names}


def on_cpu(value: Tensor, where: str) -> Tensor:
    """`value` made of copies of its tensors on the CPU.

    Args:
        where: its place, for messages.

    Raises:
        CheckpointError: it cannot be taken apart, is one rank's part of a tensor, or could not be read again.
    """
    kind = type(value)
    sharded = any(each.__name__ == "DTensor" for each in kind.__mro__)
    if sharded or not (hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")):
        raise CheckpointError(
            f"{where} is a {kind.__name__}; bagua.checkpoint saves plain tensors only, and subclasses made of them by "
            "__tensor_flatten__; use torch.distributed.checkpoint with torch's own state dicts"
        )
    if kind not in torch.serialization.get_safe_globals():
        raise CheckpointError(
            f"{where} is a {kind.__name__}, which torch.load would refuse; call "
            f"torch.serialization.add_safe_globals([{kind.__name__}]) first, also where it is loaded"
        )
    inner = {
        name: on_cpu(part, f"{where}.{name}") if is_subclass(part) else part.detach().to("cpu", copy=True)
        for name, part in parts_of(value).items()
    }
    _, context = _method(value, "__tensor_flatten__")()
    return _method(value, "__tensor_unflatten__")(inner, context, value.size(), value.stride())


def _method(value: Tensor, name: str) -> Callable[..., Any]:
    return getattr(value, name)
