"""Broadcast rank 0's parameters, buffers and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bagua.comm.collectives import broadcast_
from bagua.comm.groups import Group
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.engine.startup.optimizer_outline import adopt, describe, leaves, slots

__all__ = ["replicate_optimizers", "replicate_structure", "replicate_tensors"]

_CHUNK_BYTES = 32 * 2**20


@torch.no_grad()
def replicate_tensors(tensors: Sequence[Tensor], group: Group, device: torch.device, src: int = 0) -> None:
    """Overwrite `tensors`, in place, with those of rank `src` of the team. All ranks hold the same shapes and dtypes.

    Packed as bytes into pieces of 32 MiB, so any dtype goes, and CPU tensors go over a GPU backend.
    """
    if group.size == 1:
        return
    src = group.ranks.index(src)
    pack: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        pack.append(tensor)
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= _CHUNK_BYTES:
            _replicate_pack(pack, group, device, src)
            pack, nbytes = [], 0
    _replicate_pack(pack, group, device, src)


def _replicate_pack(pack: list[Tensor], group: Group, device: torch.device, src: int) -> None:
    flats = [tensor.detach().contiguous().view(-1) for tensor in pack if tensor.numel()]
    if not flats:
        return
    wire = torch.cat([flat.view(torch.uint8).to(device) for flat in flats])
    broadcast_(group, wire, src)
    if group.rank == src:
        return
    offset = 0
    for tensor in pack:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            # clone: a slice may start at an offset that the dtype's alignment forbids
            part = wire[offset : offset + nbytes].clone().view(tensor.dtype).view(tensor.shape)
            tensor.copy_(part)
        offset += nbytes


def replicate_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    params: dict[str, nn.Parameter],
    team: Team,
    group: Group,
    device: torch.device,
    src: int = 0,
    replicate: Callable[[Sequence[Tensor], Group, torch.device, int], object] | None = None,
) -> None:
    """Give every rank the hyperparameters of rank `src` and per-parameter state; it may have had none before.

    Only the state of `params` is touched. The structure travels as JSON, tensors over `group`.

    Args:
        replicate: in place of `replicate_tensors`.

    Raises:
        ValueError: the state of rank `src` holds something that is neither a tensor nor plain data.
    """
    if team.size == 1:
        return
    (replicate or replicate_tensors)(replicate_structure(optimizers, params, team, src), group, device, src)


def replicate_structure(
    optimizers: Sequence[torch.optim.Optimizer], params: dict[str, nn.Parameter], team: Team, src: int = 0
) -> list[Tensor]:
    """Give every rank the hyperparameters of rank `src`, and state of the same shapes. Collective over the team.

    Returns:
        the tensors of this state, in the same order on all ranks. They do not hold the content of rank `src` yet.

    Raises:
        ValueError: the state of rank `src` holds something that is neither a tensor nor plain data.
    """
    ours = {id(param) for param in params.values()}
    outline: bytes | None = None
    problem: ValueError | None = None
    if team.rank == src:
        try:
            outline = encode([describe(number, optimizer, ours) for number, optimizer in enumerate(optimizers)])
        except ValueError as error:
            outline, problem = encode({"error": str(error)}), error
    what = "broadcast of optimizer state"
    message = decode(
        team.broadcast_bytes(what, outline) if src == 0 else team.all_gather_bytes(what, outline or b"")[src]
    )
    if problem is not None:
        raise problem
    if isinstance(message, dict):
        raise ValueError(f"rank {src}: {message['error']}")
    tensors: list[Tensor] = []
    for optimizer, described in zip(optimizers, message, strict=True):
        if team.rank != src:
            adopt(optimizer, described, ours)
            if (recount := getattr(optimizer, "recount", None)) is not None:
                recount()  # what it has counted beside its state
        tensors += _tensors(optimizer, ours)
    return tensors


def _tensors(optimizer: torch.optim.Optimizer, ours: set[int]) -> list[Tensor]:
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for key in sorted(key for key in group if key != "params"):
            found += leaves(group[key])
    for param in slots(optimizer, ours):
        state = optimizer.state.get(param, {})
        for key in sorted(state, key=str):
            found += leaves(state[key])
    return found
