"""Optimizers that are sharded over the ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from bagua.algorithms.base import Algorithm, Payload

__all__ = ["check_sharded"]


def check_sharded(optimizers: Sequence[torch.optim.Optimizer], algorithm: Algorithm) -> None:
    """Refuse optimizers that are sharded over the ranks, with algorithms that step with local gradients.

    Raises:
        ValueError: names the optimizer and the algorithm.
    """
    sharded = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if sharded is None or Payload.PARAM not in algorithm.payloads:
        return
    for position, optimizer in enumerate(optimizers):
        if isinstance(optimizer, sharded.ZeroRedundancyOptimizer):
            raise ValueError(
                f"optimizers: number {position} (ZeroRedundancyOptimizer) steps each parameter on one rank only, and "
                f"{algorithm.name!r} exchanges weights instead of gradients, so that each parameter would learn from "
                "one rank's data; use an algorithm that exchanges gradients, or an optimizer that is not sharded"
            )
