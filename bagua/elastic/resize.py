"""`Resize`: passed to the training when the number of ranks has changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Resize"]


@dataclass(frozen=True)
class Resize:
    """A change of the number of ranks.

    Attributes:
        old: number of ranks that made the commit which was restored.
        new: number of ranks now.
    """

    old: int
    new: int

    def scale_lr(self, optimizer: torch.optim.Optimizer, *schedulers: Any, power: float = 1.0) -> float:
        """Multiply learning rates by (new / old) ** power, for a batch per rank that stays the same.

        Args:
            optimizer: its `lr` and `initial_lr` are changed in place.
            schedulers: of torch; their `base_lrs` are changed too.
            power: 1 is the linear rule (arXiv:1706.02677, section 2.1), 0.5 the square root rule, often used with Adam.

        Returns:
            the factor.
        """
        factor = (self.new / self.old) ** power
        for group in optimizer.param_groups:
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] = group[name] * factor
        for scheduler in schedulers:
            scheduler.base_lrs = [lr * factor for lr in scheduler.base_lrs]
        return factor

    def split(self, global_batch: int) -> int:
        """Samples of a rank in a step, for a batch of all ranks that stays the same.

        Raises:
            ValueError: it cannot be divided by the number of ranks.
        """
        if global_batch % self.new:
            raise ValueError(f"global_batch: {global_batch} cannot be divided by {self.new} ranks")
        return global_batch // self.new
