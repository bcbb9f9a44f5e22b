"""Average weights and optimizer state over the ranks, where replicas have differed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagua.comm.collectives import all_reduce_
from bagua.comm.groups import Group
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.engine.startup.broadcast import replicate_optimizers, replicate_tensors
from bagua.engine.startup.optimizer_outline import build, contained, describe, leaves, skeleton, slots

__all__ = ["mean_optimizers", "mean_tensors"]

_CHUNK_BYTES = 32 * 2**20


@torch.no_grad()
def mean_tensors(
    tensors: Sequence[Tensor], group: Group, device: torch.device, counts: Sequence[int] | None = None
) -> None:
    """Replace `tensors`, in place, by their means over the ranks. All ranks hold the same shapes and dtypes.

    Sums are taken in fp32, or in fp64 for tensors of that type; all ranks get the same bits.

    Args:
        counts: what the sum of each tensor is divided by; None: the number of ranks.
    """
    if group.size == 1:
        return
    packs: dict[torch.dtype, list[tuple[Tensor, int]]] = {torch.float32: [], torch.float64: []}
    nbytes = dict.fromkeys(packs, 0)
    for tensor, count in zip(tensors, counts or [group.size] * len(tensors), strict=True):
        wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
        packs[wide].append((tensor, count))
        nbytes[wide] += tensor.numel() * wide.itemsize
        if nbytes[wide] >= _CHUNK_BYTES:
            _mean_pack(packs[wide], wide, group, device)
            packs[wide], nbytes[wide] = [], 0
    for wide, pack in packs.items():
        if nbytes[wide]:
            _mean_pack(pack, wide, group, device)


def _mean_pack(pack: list[tuple[Tensor, int]], wide: torch.dtype, group: Group, device: torch.device) -> None:
    flat = torch.cat([tensor.detach().reshape(-1).to(device, wide) for tensor, _ in pack])
    all_reduce_(group, flat)
    parts = flat.split([tensor.numel() for tensor, _ in pack])
    for (tensor, count), part in zip(pack, parts, strict=True):
        tensor.copy_(part.div_(count).view(tensor.shape))


def mean_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    params: dict[str, nn.Parameter],
    team: Team,
    group: Group,
    device: torch.device,
) -> None:
    """Make the optimizers' state of `params` equal on all ranks. Collective.

    Floating tensors with dimensions (momentum, both moments of Adam) become their mean over the ranks that have them; a
    parameter that a rank has not used yet has none there. Step counts, numbers, integers and tensor subclasses, which
    have no mean, become rank 0's, or the first rank's that has them; options of the groups rank 0's.

    Raises:
        ValueError: the state holds something that is neither a tensor nor plain data.
    """
    if team.size == 1:
        return
    ours = {id(param) for param in params.values()}
    outlines = _outlines(optimizers, ours, team)
    tensors: list[Tensor] = []
    counts: list[int] = []
    others: dict[int, list[Tensor]] = {}  # those without a mean that rank 0 lacks, by the first rank that has them
    for number, optimizer in enumerate(optimizers):
        for place, param in enumerate(slots(optimizer, ours)):
            copies = [each[number][place] for each in outlines]
            for key in sorted({key for copy in copies for key in copy}):
                src = _first(copies, key)
                wanted = skeleton(copies[src][key])
                holders = [rank for rank, copy in enumerate(copies) if key in copy and skeleton(copy[key]) == wanted]
                whole = next(contained(copies[src][key], "subclass"), None) is not None
                if whole and len(holders) < team.size:
                    raise ValueError(
                        f"optimizers: number {number} ({type(optimizer).__name__}), state {key!r}: the ranks "
                        "hold tensor "
                        "subclasses of different layouts, which cannot be averaged"
                    )
                for leaf in _made(optimizer, param, key, copies[src][key], team.rank in holders):
                    if not whole and leaf.is_floating_point() and leaf.dim() > 0:
                        tensors.append(leaf)
                        counts.append(len(holders))
                    elif src != 0:
                        others.setdefault(src, []).append(leaf)
    mean_tensors(tensors, group, device, counts)
    for src, found in sorted(others.items()):
        replicate_tensors(found, group, device, src)
    replicate_optimizers(optimizers, params, team, group, device)


def _outlines(
    optimizers: Sequence[torch.optim.Optimizer], ours: set[int], team: Team
) -> list[list[list[dict[str, Any]]]]:
    """Outlines of state by rank, optimizer and parameter. Raises on all ranks if one cannot describe its state."""
    own: Any
    try:
        own = [describe(number, optimizer, ours)["state"] for number, optimizer in enumerate(optimizers)]
    except ValueError as error:
        own = {"error": str(error)}
    outlines = [decode(message) for message in team.all_gather_bytes("outlines of optimizer state", encode(own))]
    for rank, each in enumerate(outlines):
        if isinstance(each, dict):
            raise ValueError(f"rank {rank}: {each['error']}")
    return outlines


def _first(copies: Sequence[dict[str, Any]], key: str) -> int:
    """The first rank that has tensors under `key`, or else anything."""
    having = [rank for rank, copy in enumerate(copies) if key in copy]
    return next((rank for rank in having if isinstance(copies[rank][key], dict)), having[0])


def _made(
    optimizer: torch.optim.Optimizer, param: nn.Parameter, key: str, outline: Any, is_holder: bool
) -> list[Tensor]:
    """The tensors under `key` in the state of `param`; zeros where this rank has none."""
    state = optimizer.state[param]
    if is_holder:
        return next(leaves(value) for name, value in state.items() if str(name) == key)
    state[key] = build(outline, None, param)
    found = leaves(state[key])
    for leaf in found:
        leaf.zero_()
    return found
