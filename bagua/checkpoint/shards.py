"""`Shards`: the same state through `torch.distributed.checkpoint`."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bagua.checkpoint.agree import share, team_of
from bagua.checkpoint.errors import CheckpointError
from bagua.checkpoint.items import Item, check_objects, collect
from bagua.checkpoint.restore import Found, restore, wanted
from bagua.checkpoint.tolerant import SAVE_TOGETHER, refuse_fault_tolerant

__all__ = ["Shards"]

_TENSOR = "\0tensor"  # key of a dict that stands for a tensor; no state dict has it
_KEY = re.compile(r"@(?P<item>[\w.]+)@(?P<size>\d+)@(?P<owner>\d+)@(?P<index>\d+)")


class Shards:
    """Modules with their algorithms' state, optimizers and more as one `Stateful` of `torch.distributed.checkpoint`.

        dcp.save({"training": Shards(objects)}, checkpoint_id=path)
        dcp.load({"training": Shards(objects, reading=path)}, checkpoint_id=path)

    Items that are equal on all ranks are shared entries; items that differ are one entry per rank. All
    entries are tensors. Loading works with another number of ranks, as `bagua.checkpoint.load` does.

    Args:
        objects: as in `bagua.checkpoint.save`.
        reading: the path or `StorageReader` that `dcp.load` will read; its content must be known beforehand. None
            for saving.
        rng: restore torch's random state too, if the number of ranks is the same.
        process_group: a `ProcessGroup` or one-dimensional `DeviceMesh`; None for all ranks.

    Attributes:
        data: plain data by name, after loading.

    Raises:
        TypeError, ValueError: `objects` is not a dict, or a name is not an identifier.

    Examples:
        >>> import torch.distributed.checkpoint as dcp
        >>> objects = {"model": model, "optimizer": optimizer, "epoch": 3}
        >>> metadata = dcp.save({"training": bagua.checkpoint.Shards(objects)}, checkpoint_id=path)
        >>> shards = bagua.checkpoint.Shards(objects, reading=path)
        >>> dcp.load({"training": shards}, checkpoint_id=path)
        >>> shards.data
        {'epoch': 3}
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        *,
        reading: Any = None,
        rng: bool = True,
        process_group: Any = None,
    ) -> None:
        self.data: dict[str, Any] = {}
        self._objects = check_objects(objects)
        self._reading, self._rng, self._process_group = reading, rng, process_group

    def state_dict(self) -> dict[str, Tensor]:
        """Entries to save, or empty ones to read into. Collective.

        Raises:
            CheckpointError: a rank cannot give its part; or there is nothing for an object where `reading` points.
        """
        return self._entries_to_save() if self._reading is None else self._entries_to_read()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Put back what was read. Collective.

        Raises:
            CheckpointError: something does not go with the number of ranks that there are now.
            ValueError: something does not fit an object; names it.
        """
        team = team_of(self._process_group)
        pieces: dict[tuple[str, int], dict[int, Tensor]] = {}
        size = 0
        for key, tensor in state_dict.items():
            match = _parse(key)
            size = int(match["size"])
            pieces.setdefault((match["item"], int(match["owner"])), {})[int(match["index"])] = tensor
        copies: dict[str, dict[int, Any]] = {}
        kinds: dict[str, str] = {}
        for (item, owner), tensors in pieces.items():
            kinds[item], value = _join(tensors)
            copies.setdefault(item, {})[owner] = value
        where = "torch.distributed.checkpoint"
        parts = {
            item: [by_owner.get(rank, by_owner.get(0)) for rank in ([team.rank] if size == team.size else range(size))]
            for item, by_owner in copies.items()
        }
        needed = wanted(kinds, self._objects, where)
        found = Found(where, size, {item: kinds[item] for item in needed}, {item: parts[item] for item in needed})
        self.data = restore(found, self._objects, team, rng=self._rng)

    def _entries_to_save(self) -> dict[str, Tensor]:
        what = "saving through torch.distributed.checkpoint"
        refuse_fault_tolerant(self._objects, what, SAVE_TOGETHER)
        team = team_of(self._process_group)
        items: dict[str, Item] = {}
        problem: BaseException | None = None
        try:
            items = collect(self._objects)
            for item in items.values():
                _check_plain(item)
        except Exception as error:  # the other ranks must hear of it
            problem = error
        owners = share(team, what, items, problem)
        return {
            f"@{name}@{team.size}@{owners[name][team.rank]}@{index}": tensor
            for name, item in items.items()
            for index, tensor in enumerate(_split(item))
        }

    def _entries_to_read(self) -> dict[str, Tensor]:
        """Everything, unless the number of ranks is the same: then this rank's part only."""
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        reader = FileSystemReader(self._reading) if isinstance(self._reading, str | os.PathLike) else self._reading
        rank, size = (team := team_of(self._process_group)).rank, team.size
        found = {
            match[0]: (match, entry)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if (match := _KEY.search(name)) and name.endswith(match[0])
        }
        if not found:
            raise CheckpointError(f"{self._reading}: nothing in it was saved by bagua.checkpoint.Shards")
        owned = {(match["item"], int(match["owner"])) for match, _ in found.values()}
        empty: dict[str, Tensor] = {}
        for key, (match, entry) in found.items():
            owner = int(match["owner"])
            mine = owner == (rank if (match["item"], rank) in owned else 0)
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{self._reading}: entry {key!r} is not a tensor")
            if int(match["size"]) != size or mine:
                empty[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        return empty


def _parse(key: str) -> re.Match[str]:
    match = _KEY.fullmatch(key)
    if match is None:
        raise CheckpointError(f"entry {key!r} was not written by bagua.checkpoint.Shards")
    return match


def _split(item: Item) -> list[Tensor]:
    """The tensors of `item`, after an outline of it as a tensor of bytes."""
    tensors: list[Tensor] = []

    def outline(value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel():  # an empty one has nothing that could be stored elsewhere
            tensors.append(value)
            return {_TENSOR: len(tensors)}
        if isinstance(value, dict):
            return {key: outline(each) for key, each in value.items()}
        if isinstance(value, list):
            return [outline(each) for each in value]
        return tuple(outline(each) for each in value) if type(value) is tuple else value

    stream = io.BytesIO()
    torch.save([item.kind, outline(item.value)], stream)
    return [torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8), *tensors]


def _join(tensors: Mapping[int, Tensor]) -> tuple[str, Any]:
    """Kind and value of what `_split` took apart."""

    def build(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {_TENSOR}:
                return tensors[value[_TENSOR]]
            return {key: build(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(build(each) for each in value)
        return value

    kind, value = torch.load(io.BytesIO(bytes(tensors[0].tolist())), weights_only=True)
    return kind, build(value)


def _check_plain(item: Item) -> None:
    """Refuse now what could not be read without unpickling arbitrary classes.

    Raises:
        CheckpointError: says what it is.
    """
    try:
        _join(dict(enumerate(_split(item))))
    except Exception as error:
        raise CheckpointError(
            f"a {item.kind} holds something that is not plain data ({str(error).splitlines()[0]})"
        ) from error
