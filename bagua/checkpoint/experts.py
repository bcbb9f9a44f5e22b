"""Experts of a mixture of experts in checkpoints: ranks, global numbers and Bagua 0.9's files.

The state dict of rank r with n experts in a layer has them as `...bagua_experts.0` to `n - 1`; their global numbers are
r n to r n + n - 1, and files have those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bagua.checkpoint.errors import CheckpointError
from bagua.engine.startup.rank_local import is_rank_local, rank_local_names

__all__ = ["check_optimizer", "is_expert", "split_experts", "spread_experts", "to_local", "with_number"]

_EXPERT = re.compile(r"((?:.*\.)?bagua_moe\.experts\.bagua_experts\.)(\d+)(\..*)")


def is_expert(name: str) -> bool:
    """Whether an entry of a state dict belongs to an expert."""
    return _EXPERT.fullmatch(name) is not None


def split_experts(state: Mapping[str, Any], rank: int) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """A state dict without experts; and each expert's entries by its global number, which the names have too.

    Raises:
        ValueError: layers hold different numbers of experts, which Bagua 0.9's files cannot tell apart.
    """
    dense, experts = dict(state), dict[int, dict[str, Any]]()
    local = _counts(state)
    if len(set(local.values())) > 1:
        raise ValueError(f"model: layers hold different numbers of experts ({sorted(set(local.values()))})")
    for name in state:
        if match := _EXPERT.fullmatch(name):
            number = rank * local[match[1]] + int(match[2])
            experts.setdefault(number, {})[f"{match[1]}{number}{match[3]}"] = dense.pop(name)
    return dense, experts


def to_local(name: str, number: int, local: int) -> str | None:
    """The name in a state dict of what is `name` in the file of expert `number`; None: it is not that expert's."""
    match = _EXPERT.fullmatch(name)
    return f"{match[1]}{local}{match[3]}" if match is not None and int(match[2]) == number else None


def with_number(state: Mapping[str, Any], rank: int) -> list[tuple[int, int]]:
    """(global, local) numbers of the experts in the state dict of `rank`."""
    count = max(_counts(state).values(), default=0)
    return [(rank * count + local, local) for local in range(count)]


def spread_experts(
    copies: Sequence[Mapping[str, Any]], module: nn.Module, rank: int, size: int, where: str
) -> dict[str, Any]:
    """The experts that rank `rank` of `size` holds, from the state dicts of another number of ranks.

    Raises:
        CheckpointError: the numbers of experts do not fit, or the module holds other tensors of a rank's own.
    """
    found: dict[str, Any] = {}
    state = module.state_dict()
    now, then = _counts(state), _counts(copies[0])
    for name in rank_local_names(module) & state.keys():
        match = _EXPERT.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{where}: {name!r} differs from rank to rank, so it can only be loaded on the {len(copies)} "
                "ranks that "
                "saved it"
            )
        total, before = now[match[1]] * size, then.get(match[1], 0) * len(copies)
        if total != before:
            raise CheckpointError(
                f"{where}: {match[1]!r} has {total} experts here ({now[match[1]]} on each of {size} ranks) and had "
                f"{before} when it was saved on {len(copies)} ranks"
            )
        number = rank * now[match[1]] + int(match[2])
        owner, local = divmod(number, then[match[1]])
        found[name] = copies[owner][f"{match[1]}{local}{match[3]}"]
    return found


def check_optimizer(
    name: str, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module], size: int, where: str
) -> None:
    """Refuse to load the state of a rank's own parameters on another number of ranks.

    Raises:
        CheckpointError: the optimizer holds one; names it.
    """
    own: dict[int, str] = {}
    for module in modules:
        marked = rank_local_names(module)
        own |= {id(param): path for path, param in module.named_parameters() if path in marked}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) in own or is_rank_local(param):
                raise CheckpointError(
                    f"{where}: {name!r} holds state of expert or other rank-local parameters "
                    f"({own.get(id(param), '?')}), "
                    f"so it can only be loaded on the {size} ranks that saved it; load only the module"
                )


def _counts(state: Mapping[str, Any]) -> dict[str, int]:
    """Experts of each layer, by the beginning of their names."""
    counts: dict[str, int] = {}
    for name in state:
        if match := _EXPERT.fullmatch(name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return counts
