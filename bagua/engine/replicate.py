"""Make every rank equal to rank 0: parameters, buffers, and what the optimizers remember."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagua.comm.collectives import broadcast_
from bagua.comm.groups import Group
from bagua.comm.team import Team, decode, encode

__all__ = ["replicate_optimizers", "replicate_tensors"]

_CHUNK_BYTES = 32 * 2**20


@torch.no_grad()
def replicate_tensors(tensors: Sequence[Tensor], group: Group, device: torch.device, src: int = 0) -> None:
    """Overwrite `tensors`, in place, with those of rank `src`. All ranks hold the same shapes and dtypes.

    Packed as bytes into pieces of 32 MiB, so any dtype goes, and CPU tensors go over a GPU backend.
    """
    if group.size == 1:
        return
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
) -> None:
    """Give every rank the hyperparameters of rank `src` and per-parameter state; it may have had none before.

    Only the state of `params` is touched. The structure travels as JSON, tensors over `group`.

    Raises:
        ValueError: the state of rank `src` holds something that is neither a tensor nor plain data.
    """
    if team.size == 1:
        return
    ours = {id(param) for param in params.values()}
    outline: bytes | None = None
    problem: ValueError | None = None
    if team.rank == src:
        try:
            outline = encode([_describe(number, optimizer, ours) for number, optimizer in enumerate(optimizers)])
        except ValueError as error:
            outline, problem = encode({"error": str(error)}), error
    what = "broadcast of optimizer state"
    message = decode(team.tell(what, outline) if src == 0 else team.meet(what, outline or b"")[src])
    if problem is not None:
        raise problem
    if isinstance(message, dict):
        raise ValueError(f"rank {src}: {message['error']}")
    tensors: list[Tensor] = []
    for optimizer, described in zip(optimizers, message, strict=True):
        if team.rank != src:
            _adopt(optimizer, described, ours)
        tensors += _tensors(optimizer, ours)
    replicate_tensors(tensors, group, device, src)


def _slots(optimizer: torch.optim.Optimizer, ours: set[int]) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) in ours:
                yield param


def _describe(number: int, optimizer: torch.optim.Optimizer, ours: set[int]) -> dict[str, Any]:
    where = f"optimizers: number {number} ({type(optimizer).__name__})"
    groups = [
        {key: _outline(value, f"{where}, option {key!r}") for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state = [
        {str(key): _outline(value, f"{where}, state {key!r}") for key, value in optimizer.state.get(param, {}).items()}
        for param in _slots(optimizer, ours)
    ]
    return {"groups": groups, "state": state}


def _adopt(optimizer: torch.optim.Optimizer, described: dict[str, Any], ours: set[int]) -> None:
    for group, outline in zip(optimizer.param_groups, described["groups"], strict=True):
        anchor = group["params"][0] if group["params"] else None
        for key, value in outline.items():
            group[key] = _build(value, group.get(key), anchor)
    for param, outline in zip(_slots(optimizer, ours), described["state"], strict=True):
        if outline:
            old = optimizer.state.get(param, {})
            optimizer.state[param] = {key: _build(value, old.get(key), param) for key, value in outline.items()}
        else:
            optimizer.state.pop(param, None)


def _tensors(optimizer: torch.optim.Optimizer, ours: set[int]) -> list[Tensor]:
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for key in sorted(key for key in group if key != "params"):
            found += _leaves(group[key])
    for param in _slots(optimizer, ours):
        state = optimizer.state.get(param, {})
        for key in sorted(state, key=str):
            found += _leaves(state[key])
    return found


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in _leaves(value[key])]
    return []


def _outline(value: Any, where: str) -> Any:
    """Plain data as JSON, in which containers and tensors are tagged."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), value.device.type]}
    if isinstance(value, list | tuple):
        return {type(value).__name__ if type(value) in (list, tuple) else "tuple": [_outline(v, where) for v in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _outline(item, where) for key, item in value.items()}}
    raise ValueError(f"{where}: a {type(value).__name__} cannot be broadcast to the other ranks")


def _build(outline: Any, old: Any, anchor: Tensor | None) -> Any:
    """The value that `outline` describes; keeps `old`'s memory where it fits. Tensors still lack their content."""
    if not isinstance(outline, dict):
        return outline
    ((kind, content),) = outline.items()
    if kind == "tensor":
        dtype, shape, device_type = content
        dtype = getattr(torch, dtype)
        if isinstance(old, Tensor) and old.dtype == dtype and list(old.shape) == shape:
            return old
        device = anchor.device if anchor is not None and device_type != "cpu" else torch.device("cpu")
        if anchor is not None and list(anchor.shape) == shape:
            return torch.empty_like(anchor, dtype=dtype, device=device, memory_format=torch.preserve_format).detach()
        return torch.empty(shape, dtype=dtype, device=device)
    if kind == "dict":
        previous = old if isinstance(old, dict) else {}
        return {key: _build(item, previous.get(key), anchor) for key, item in content.items()}
    previous = old if isinstance(old, list | tuple) and len(old) == len(content) else [None] * len(content)
    items = [_build(item, was, anchor) for item, was in zip(content, previous, strict=True)]
    return tuple(items) if kind == "tuple" else items
