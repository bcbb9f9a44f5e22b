"""What an algorithm says of an option that was left open, and keeps for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import bagua
from bagua.comm.team import Team


def told_and_kept(
    team: Team,
    algorithm: str,
    model: nn.Module,
    make: Callable[[Any], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int], Tensor],
    **options: Any,
) -> tuple[tuple[str, ...], set[str]]:
    """Notices, and names of the tensors in the state, after two steps with `loss` of the model and the step."""
    optimizer = make(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team, **options)
    for step in range(2):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    bagua.pause(model)
    kept = {entry["name"] for entry in bagua.state_dict(model)["tensors"]}
    notices = bagua.stats(model).notices
    bagua.detach(model)
    return notices, kept
