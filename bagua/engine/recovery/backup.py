"""A copy of the weights, buffers and optimizer state of a rank, to go back to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua.engine.startup.inventory import Inventory

__all__ = ["Backup"]


@dataclass(frozen=True, eq=False)
class Backup:
    """Holds as long as the rank makes no step.

    Attributes:
        tensors: in the order of the inventory.
        states: of the optimizers.
    """

    tensors: list[Tensor]
    states: list[dict[str, Any]]

    @classmethod
    def of(cls, inventory: Inventory, optimizers: Sequence[torch.optim.Optimizer]) -> Backup:
        """What the rank holds now."""
        tensors = [tensor.detach().clone() for tensor in _tensors(inventory)]
        return cls(tensors, [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers])

    @torch.no_grad()
    def restore(self, inventory: Inventory, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Hold it again."""
        for tensor, old in zip(_tensors(inventory), self.tensors, strict=True):
            tensor.copy_(old)
        for optimizer, state in zip(optimizers, self.states, strict=True):
            optimizer.load_state_dict(state)


def _tensors(inventory: Inventory) -> list[Tensor]:
    return [*inventory.parameters.values(), *inventory.frozen.values(), *inventory.buffers.values()]
