"""A rank that takes over state holds its own again if that fails, once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bagua.engine.recovery.backup import Backup
from bagua.engine.recovery.catch_up import unless_interrupted
from bagua.engine.startup.inventory import Inventory, take_inventory


def make() -> tuple[nn.Sequential, torch.optim.Optimizer, Inventory]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step(model, optimizer)
    return model, optimizer, take_inventory(model, [optimizer])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = list(model.state_dict().values())
    for each in optimizer.state_dict()["state"].values():
        found += each.values()
    return [tensor.clone() for tensor in found]


@pytest.mark.parametrize("early", [False, True])
def test_a_transfer_that_fails_leaves_weights_buffers_and_optimizer_state(early: bool) -> None:
    model, optimizer, inventory = make()
    backup = Backup.of(inventory, [optimizer]) if early else None
    before, kept = state(model, optimizer), torch.zeros(2)
    with pytest.raises(RuntimeError, match="lost"), unless_interrupted(inventory, [optimizer], [kept], backup):
        step(model, optimizer)
        with torch.no_grad():
            next(iter(inventory.frozen.values())).add_(1.0)
        optimizer.param_groups[0]["lr"] = 0.5
        kept.add_(1.0)
        raise RuntimeError("lost")
    after = state(model, optimizer)
    assert all(torch.equal(now, was) for now, was in zip(after, before, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1 and torch.equal(kept, torch.zeros(2))


def test_a_backup_is_a_copy() -> None:
    model, optimizer, inventory = make()
    backup = Backup.of(inventory, [optimizer])
    held = copy.deepcopy((backup.tensors, backup.states))
    step(model, optimizer)
    assert all(torch.equal(now, was) for now, was in zip(backup.tensors, held[0], strict=True))
    assert torch.equal(backup.states[0]["state"][0]["exp_avg"], held[1][0]["state"][0]["exp_avg"])
