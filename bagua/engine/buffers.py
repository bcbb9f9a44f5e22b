"""Broadcast of rank 0's buffers, such as running statistics, before forward passes."""

from __future__ import annotations

import torch
from torch import nn

from bagua.algorithms.base import Algorithm, Exactness
from bagua.engine.engine import Engine
from bagua.engine.startup.broadcast import replicate_tensors

__all__ = ["broadcast_buffers", "check_broadcast", "tell_of_sparse_buffers"]


def check_broadcast(algorithm: Algorithm) -> None:
    """Refuse algorithms that do not synchronise the ranks at each step.

    Raises:
        ValueError: names the algorithm.
    """
    if algorithm.exactness is Exactness.ASYNCHRONOUS:
        raise ValueError(
            f"broadcast_buffers: {algorithm.name!r} does not synchronise the ranks, so buffers cannot be broadcast "
            "before each forward pass"
        )


def tell_of_sparse_buffers(engine: Engine) -> None:
    """Notice that a broadcast leaves some buffers out."""
    names = ", ".join(map(repr, engine.inventory.sparse_buffers))
    if names and engine.tracker.broadcasts_buffers:
        engine.state.notice(
            f"broadcast_buffers: sparse buffers are not broadcast ({names}); they are equal on all ranks now, and what "
            "changes in one later stays on its rank",
            urgent=engine.team.rank == 0,
        )


@torch.no_grad()
def broadcast_buffers(module: nn.Module, engine: Engine, src: int) -> None:
    """Overwrite the buffers with those of rank `src`. Collective; the buffers are those the module holds now.

    Raises:
        RuntimeError: they are not those of `distribute`.
    """
    left = engine.inventory.ignored.union(engine.inventory.sparse_buffers)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in left}
    if buffers.keys() != engine.inventory.buffers.keys():
        changed = ", ".join(sorted(buffers.keys() ^ engine.inventory.buffers.keys()))
        raise RuntimeError(
            f"buffers were added or removed since bagua.distribute() ({changed}); call it again on all ranks"
        )
    if buffers:
        # As under DDP, autograd does not count this as a change: batch norm in training mode saves its running
        # statistics, with which its backward pass computes nothing, and an earlier forward pass may still need its own.
        kept = torch.autograd._unsafe_preserve_version_counter(tuple(buffers.values()))
        with engine.dispatcher.side_exchange("buffers") as group, kept:
            replicate_tensors(list(buffers.values()), group, engine.inventory.device, src)
