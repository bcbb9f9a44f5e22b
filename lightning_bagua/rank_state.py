"""What ranks hold that one checkpoint of Lightning's, written by rank 0, does not: gathered, and put back.

An entry is made of items: the algorithm's state, and the optimizers' states and the weights if they differ by rank.

    {"version": 1, "size": ranks, "items": {name: {"owners": [rank whose copy it is, by rank], "copies": {rank: data}}}}
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bagua.checkpoint.agree import agree, agree_on, share
from bagua.checkpoint.items import Item, collect
from bagua.checkpoint.reshard import load_algorithm, mean, mean_optimizer
from bagua.comm.team import Team
from bagua.engine.hooks import attachments

__all__ = ["KEY", "gather", "put_back"]

KEY = "bagua"  # in Lightning's checkpoint
_VERSION = 1
_SAVING, _LOADING = "saving a checkpoint", "loading a checkpoint"


def gather(
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    team: Team,
    device: torch.device,
) -> dict[str, Any]:
    """Return the entry on rank 0, an empty dict elsewhere. Collective.

    Args:
        state: the algorithm's, of this rank.
        device: what the group's backend sends.

    Raises:
        CheckpointError: something is no plain data on some rank.
        CommunicationError: a rank did not come.
    """
    items: dict[str, Item] = {}
    problem: Exception | None = None
    try:
        objects = {f"optimizer_{number}": optimizer for number, optimizer in enumerate(optimizers)}
        items = {name: item for name, item in collect(objects).items() if name in objects}
        items["weights"] = Item("data", {name: param.detach().cpu() for name, param in _trainable(module).items()})
        items["algorithm"] = collect({"algorithm": state})["algorithm"]
    except Exception as error:  # the other ranks must hear of it
        problem = error
    owners = share(team, _SAVING, items, problem)
    needed = {name for name, ranks in owners.items() if name == "algorithm" or any(ranks)}
    mine = {name: items[name].value for name in sorted(needed) if owners[name][team.rank] == team.rank}
    copies = _send_to_first(mine, team, device)
    return (
        {
            "version": _VERSION,
            "size": team.size,
            "items": {
                name: {
                    "owners": owners[name],
                    "copies": {rank: copies[rank][name] for rank in sorted(set(owners[name]))},
                }
                for name in sorted(needed)
            },
        }
        if team.rank == 0
        else {}
    )


def put_back(
    entry: dict[str, Any], module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], team: Team
) -> str | None:
    """Give this rank what `gather` took; with another number of ranks, what `docs/checkpointing.md` says. Collective.

    Lightning has loaded the module and the optimizers as rank 0 had them.

    Returns:
        None, or why the algorithm starts anew.

    Raises:
        CheckpointError: no rule for another number of ranks, or another rank failed.
        ValueError: the entry does not fit; names what.
    """
    return agree_on(team, _LOADING, lambda: _put_back(entry, module, optimizers, team))


def _put_back(
    entry: dict[str, Any], module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], team: Team
) -> str | None:
    if entry.get("version") != _VERSION:
        raise ValueError(f"checkpoint: entry {KEY!r} has version {entry.get('version')!r}, expected {_VERSION}")
    engine = attachments[module].engine
    items: dict[str, Any] = entry["items"]
    saved_with = items["algorithm"]["copies"][0]["algorithm"]
    same_algorithm, same_size = engine.form_of(saved_with) is not None, entry["size"] == team.size
    exact = same_algorithm and same_size
    if same_algorithm:
        engine.check_parameters(items["algorithm"]["copies"][0])
    if "weights" in items:
        copies = _by_rank(items["weights"])
        with torch.no_grad():
            for name, param in _trainable(module).items():
                value = copies[team.rank][name] if exact else mean([copy[name] for copy in copies])
                param.copy_(value)
    for number, optimizer in enumerate(optimizers):
        item = items.get(f"optimizer_{number}")
        if item is not None:
            copies = _by_rank(item)
            optimizer.load_state_dict(copies[team.rank] if exact else mean_optimizer(copies))
    states = _by_rank(items["algorithm"])
    if not same_algorithm:
        return f"the checkpoint was made with {saved_with}; {engine.state.root!r} starts anew"
    if same_size:
        engine.load_state_dict(states[team.rank])
    else:
        load_algorithm(engine, states, "checkpoint")
    return None


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def _by_rank(item: dict[str, Any]) -> list[Any]:
    return [item["copies"][owner] for owner in item["owners"]]


def _send_to_first(value: dict[str, Any], team: Team, device: torch.device) -> list[dict[str, Any]]:
    """Everyone's `value`, by rank, on rank 0; the others get a list without meaning."""
    if team.size == 1:
        return [value]
    buffer = io.BytesIO()
    if team.rank:
        torch.save(value, buffer)
    sizes = agree(team, _SAVING, buffer.tell(), None)
    if team.rank:
        dist.send(torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(device), 0)
        return []
    found = [value]
    for rank in range(1, team.size):
        wire = torch.empty(sizes[rank], dtype=torch.uint8, device=device)
        dist.recv(wire, rank)
        found.append(torch.load(io.BytesIO(wire.cpu().numpy().tobytes()), map_location="cpu", weights_only=True))
    return found
