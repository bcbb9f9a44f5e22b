"""What ranks hold besides a checkpoint that a framework writes on rank 0, in a directory of its own.

The framework has saved the module and the optimizers as rank 0 holds them. This adds the state of the algorithm, and
of weights and optimizers what differs between ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bagua.checkpoint.agree import agree_on, team_of
from bagua.checkpoint.archive import read_last, save_items
from bagua.checkpoint.errors import CheckpointError
from bagua.checkpoint.items import Item, collect
from bagua.checkpoint.reshard import load_algorithm, mean, mean_optimizer
from bagua.checkpoint.restore import Found
from bagua.comm.team import Team
from bagua.engine.hooks import attachments

__all__ = ["load_rank_state", "save_rank_state"]

Trained = Sequence[tuple[nn.Module, Sequence[torch.optim.Optimizer]]]
"""Distributed modules with the optimizers that step them."""


def save_rank_state(directory: str | os.PathLike[str], trained: Trained, *, step: int) -> None:
    """Write what rank 0's state dicts of modules and optimizers do not hold. Collective.

    Args:
        directory: seen by all ranks; what it held before is replaced once the new state is complete.
        trained: in the same order on all ranks.
        step: for the name of a directory.

    Raises:
        CheckpointError: a rank could not write its part; names the rank.
        CommunicationError: a rank did not arrive within the timeout.
    """
    names = [name for number, (_, held) in enumerate(trained) for name in _optional(number, len(held))]
    save_items(directory, lambda: _items(trained), step=step, keep=1, only_if_different=names)


def load_rank_state(directory: str | os.PathLike[str], trained: Trained) -> list[str] | None:
    """Give every rank what `save_rank_state` saved. Collective; call it after modules and optimizers are loaded.

    On another number of ranks it does what docs/checkpointing.md says.

    Returns:
        For each module: "", or why its algorithm starts anew. None if nothing was saved there.

    Raises:
        CheckpointError: files are damaged, or there is no rule for another number of ranks.
        ValueError: the state does not fit; names what.
    """
    found = read_last(directory)
    if found is None:
        return None
    team = team_of(None)
    if found.size == team.size and any(not _goes_on(found, n, module) for n, (module, _) in enumerate(trained)):
        found = read_last(directory, all_copies=True)  # for the mean of what differs
        assert found is not None

    def put_back() -> list[str]:
        return [_put_back(found, number, *each, team) for number, each in enumerate(trained)]

    return agree_on(team, f"loading from {found.where}", put_back)


def _optional(number: int, num_optimizers: int) -> list[str]:
    return [f"weights_{number}", *[f"optimizer_{number}_{position}" for position in range(num_optimizers)]]


def _items(trained: Trained) -> dict[str, Item]:
    data: dict[str, Any] = {}
    for number, (module, optimizers) in enumerate(trained):
        data[f"algorithm_{number}"] = attachments[module].engine.state_dict()
        weights, *others = _optional(number, len(optimizers))
        # copies: a parameter may be a view of a bucket, of which torch.save would write all
        data[weights] = {name: param.detach().clone() for name, param in _trainable(module).items()}
        data |= {name: optimizer.state_dict() for name, optimizer in zip(others, optimizers, strict=True)}
    return {name: item for name, item in collect(data).items() if name in data}


def _saved_with(found: Found, number: int) -> str | None:
    states = found.parts.get(f"algorithm_{number}")
    return None if states is None else states[0]["algorithm"]


def _goes_on(found: Found, number: int, module: nn.Module) -> bool:
    return attachments[module].engine.form_of(_saved_with(found, number)) is not None


def _put_back(
    found: Found, number: int, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], team: Team
) -> str:
    if f"algorithm_{number}" not in found.parts:
        raise CheckpointError(f"{found.where} holds the state of {number} distributed modules, and there are more now")
    saved_with, states = _saved_with(found, number), found.parts[f"algorithm_{number}"]
    if _goes_on(found, number, module):
        attachments[module].engine.check_parameters(states[0])
    weights, *others = _optional(number, len(optimizers))
    exact = len(states) == 1 and (found.size == team.size)
    if weights in found.parts:
        copies = found.parts[weights]
        with torch.no_grad():
            for name, param in _trainable(module).items():
                param.copy_(copies[0][name] if exact else mean([copy[name] for copy in copies]))
    for name, optimizer in zip(others, optimizers, strict=True):
        if name in found.parts:
            copies = found.parts[name]
            optimizer.load_state_dict(copies[0] if exact else mean_optimizer(copies))
    if not _goes_on(found, number, module):
        return f"the checkpoint was made with {saved_with}; {attachments[module].engine.state.root!r} starts anew"
    if found.size == team.size:
        attachments[module].engine.load_state_dict(states[0] if exact else states[team.rank])
    else:
        load_algorithm(attachments[module].engine, states, found.where)
    return ""


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}
