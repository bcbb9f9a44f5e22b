"""Buffers (running statistics and the like) that every forward pass takes from rank 0."""

from __future__ import annotations

import torch
from torch import nn

from bagua.algorithms.base import Algorithm, Exactness
from bagua.engine.engine import Engine
from bagua.engine.startup.broadcast import replicate_tensors

__all__ = ["broadcast_buffers", "check_broadcast"]


def check_broadcast(algorithm: Algorithm) -> None:
    """Refuse algorithms under which a forward pass waits for nobody.

    Raises:
        ValueError: names the algorithm.
    """
    if algorithm.exactness is Exactness.ASYNCHRONOUS:
        raise ValueError(
            f"broadcast_buffers: with {algorithm.name!r} no rank waits for another, so buffers cannot be broadcast "
            "before each forward pass"
        )


@torch.no_grad()
def broadcast_buffers(module: nn.Module, engine: Engine, src: int) -> None:
    """Overwrite the buffers with those of rank `src`. Collective; the buffers are those the module holds now.

    Raises:
        RuntimeError: they are not those of `distribute`.
    """
    ignored = engine.inventory.ignored
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in ignored}
    if buffers.keys() != engine.inventory.buffers.keys():
        changed = ", ".join(sorted(buffers.keys() ^ engine.inventory.buffers.keys()))
        raise RuntimeError(f"buffers came or went since bagua.distribute() ({changed}); call it again on all ranks")
    if buffers:
        with engine.dispatcher.side_exchange("buffers") as group:
            replicate_tensors(list(buffers.values()), group, engine.inventory.device, src)
