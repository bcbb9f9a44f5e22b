"""`Shards`: the same state through `torch.distributed.checkpoint`."""

from __future__ import annotations

import io
import os
import re
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua.checkpoint.agree import agree, share, team_of
from bagua.checkpoint.errors import CheckpointError
from bagua.checkpoint.items import Item, check_objects, collect
from bagua.checkpoint.restore import Found, restore, wanted
from bagua.checkpoint.subclasses import is_subclass
from bagua.checkpoint.tolerant import SAVE_TOGETHER, refuse_fault_tolerant
from bagua.comm.team import Team

__all__ = ["Shards"]

_TENSOR = "\0tensor"  # key of a dict that stands for a tensor; no state dict has it
_WHERE = "torch.distributed.checkpoint"
_OVERWRITTEN = (
    "a later save to the same checkpoint_id has not been completed; load another checkpoint, and give each save a "
    "checkpoint_id of its own"
)
_KEY = re.compile(r"@(?P<item>[\w.]+)@(?P<size>\d+)@(?P<owner>\d+)@(?P<index>\d+)")


class Shards:
    """Modules with their algorithms' state, optimizers and more as one `Stateful` of `torch.distributed.checkpoint`.

        dcp.save({"training": Shards(objects)}, checkpoint_id=path)
        dcp.load({"training": Shards(objects, reading=path)}, checkpoint_id=path)

    Items that are equal on all ranks are shared entries; items that differ are one entry per rank. All
    entries are tensors. Loading works with another number of ranks, as `bagua.checkpoint.load` does.

    Give each save a `checkpoint_id` of its own: torch's writers overwrite files in place. What a save that was broken
    off has left of two saves is refused when it is loaded.

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
            CheckpointError: a tensor is not as it was saved, or two saves are mixed; names the rank and the item.
                Nothing has changed then. Or something does not go with the number of ranks that there are now.
            ValueError: something does not fit an object; names it.
        """
        team, what = team_of(self._process_group), f"loading from {_WHERE}"
        found, save, problem = None, "", None
        try:
            found, save = self._read(state_dict, team)
        except Exception as error:  # the other ranks must hear of it
            problem = error
        saves = agree(team, what, save, problem)
        for rank, other in enumerate(saves):
            if other != saves[0]:
                raise CheckpointError(f"{what}: ranks 0 and {rank} have read different saves: {_OVERWRITTEN}")
        assert found is not None
        self.data = restore(found, self._objects, team, rng=self._rng)

    def _read(self, state_dict: Mapping[str, Tensor], team: Team) -> tuple[Found, str]:
        """What was read, and the identity of the save that wrote all of it.

        Raises:
            CheckpointError: not all of it was written by one save, or a tensor is not as it was saved; names the item.
        """
        tensors: dict[tuple[str, int], dict[int, Tensor]] = {}
        size = 0
        for key, tensor in state_dict.items():
            match = _parse(key)
            size = int(match["size"])
            tensors.setdefault((match["item"], int(match["owner"])), {})[int(match["index"])] = tensor
        copies: dict[str, dict[int, _Copy]] = {}
        for (item, owner), those in tensors.items():
            copies.setdefault(item, {})[owner] = _Copy.read(those)
        saves = {copy.save: item for item, by_owner in copies.items() for copy in by_owner.values()}
        if len(saves) > 1:
            one, other, *_ = saves.values()
            between = f"{one!r} and {other!r}" if one != other else f"copies of {one!r}"
            raise CheckpointError(f"different saves have written {between}: {_OVERWRITTEN}")
        kinds = {item: copy.kind for item, by_owner in copies.items() for copy in by_owner.values()}
        needed = wanted(kinds, self._objects, _WHERE)
        parts: dict[str, list[Any]] = {}
        for item in needed:
            values = {owner: copy.value(item) for owner, copy in copies[item].items()}
            ranks = [team.rank] if size == team.size else range(size)
            parts[item] = [values.get(rank, values.get(0)) for rank in ranks]
        return Found(_WHERE, size, {item: kinds[item] for item in needed}, parts), next(iter(saves), "")

    def _entries_to_save(self) -> dict[str, Tensor]:
        what = f"saving through {_WHERE}"
        refuse_fault_tolerant(self._objects, what, SAVE_TOGETHER)
        team = team_of(self._process_group)
        save = team.broadcast_bytes(what, secrets.token_bytes(8) if team.rank == 0 else None).hex()
        items: dict[str, Item] = {}
        entries: dict[str, list[Tensor]] = {}
        problem: BaseException | None = None
        try:
            items = collect(self._objects)
            entries = {name: _split(item, save) for name, item in items.items()}
        except Exception as error:  # the other ranks must hear of it
            problem = error
        owners = share(team, what, items, problem)
        return {
            f"@{name}@{team.size}@{owners[name][team.rank]}@{index}": tensor
            for name, tensors in entries.items()
            for index, tensor in enumerate(tensors)
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
                empty[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        return empty


def _parse(key: str) -> re.Match[str]:
    match = _KEY.fullmatch(key)
    if match is None:
        raise CheckpointError(f"entry {key!r} was not written by bagua.checkpoint.Shards")
    return match


def _split(item: Item, save: str) -> list[Tensor]:
    """The tensors of `item`, after an outline of it as a tensor of bytes.

    Outline and tensors may be written to different files, so the outline has checksums of the tensors beside the
    identity of the save.

    Raises:
        CheckpointError: it holds what could not be read without unpickling arbitrary classes; says what.
    """
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

    try:
        stream = io.BytesIO()
        value = outline(item.value)
        torch.save([item.kind, value, save, [_checksum(tensor) for tensor in tensors]], stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"a {item.kind} holds something that is not plain data ({str(error).splitlines()[0]})"
        ) from error
    return [torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8), *tensors]


@dataclass(frozen=True)
class _Copy:
    """What `_split` took apart, as it was read.

    Attributes:
        kind: of the item.
        save: identity of the save; empty if it was saved without one, by an older version.
        outline: the value, without its tensors.
        checksums: of the tensors; None if there are none, as in older versions.
        tensors: by index, from 1 on.
    """

    kind: str
    save: str
    outline: Any
    checksums: list[int] | None
    tensors: Mapping[int, Tensor]

    @classmethod
    def read(cls, tensors: Mapping[int, Tensor]) -> _Copy:
        """Take the outline from the tensor of index 0."""
        kind, outline, *more = torch.load(io.BytesIO(bytes(tensors[0].tolist())), weights_only=True)
        save, checksums = more or ("", None)
        return cls(kind, save, outline, checksums, tensors)

    def value(self, item: str) -> Any:
        """The value of `item`.

        Raises:
            CheckpointError: a tensor is not the one that belongs to the outline.
        """
        for index, checksum in enumerate(self.checksums or (), 1):
            if index not in self.tensors or _checksum(self.tensors[index]) != checksum:
                raise CheckpointError(f"{item!r}: a tensor is not as it was saved: it is damaged, or {_OVERWRITTEN}")
        return self._build(self.outline)

    def _build(self, outline: Any) -> Any:
        if isinstance(outline, dict):
            if outline.keys() == {_TENSOR}:
                return self.tensors[outline[_TENSOR]]
            return {key: self._build(each) for key, each in outline.items()}
        if isinstance(outline, list | tuple):
            return type(outline)(self._build(each) for each in outline)
        return outline


def _checksum(tensor: Tensor) -> int:
    """CRC-32 of the elements, in the order of their indices."""
    if is_subclass(tensor):  # torch.distributed.checkpoint reads it into a plain tensor
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32(plain.view(-1).view(torch.uint8).numpy().data)
