"""Parameters that require gradients and are in no optimizer, as a copy of the model with averaged weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from bagua.algorithms.base import Payload
from bagua.engine.engine import Engine

__all__ = ["tell_of_unheld_parameters"]


def tell_of_unheld_parameters(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn if there are some, and the weights of the ranks are exchanged: they are, too."""
    last = engine.state.root.at_step(sys.maxsize)
    if engine.team.size == 1 or not optimizers or Payload.PARAM not in last.payloads:
        return
    held = {id(param) for each in optimizers for group in each.param_groups for param in group["params"]}
    names = [name for name, param in engine.inventory.parameters.items() if id(param) not in held]
    if names:
        engine.state.notice(
            f"{len(names)} parameters require gradients, but no optimizer that was passed holds them ({names[0]!r} is "
            f"the first): {last.name!r} sends them as it sends trained weights, and changes them so. An average over "
            "time that is kept there, as in AveragedModel, becomes inexact; call requires_grad_(False) on what is not "
            "trained before bagua.distribute, or pass the optimizer that trains it",
            urgent=engine.team.rank == 0,
        )
