"""Messages between all ranks over separate connections: a dead rank is noticed at once, not after a timeout."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from bagua.comm.collectives import all_gather_rows, broadcast_, swap
from bagua.comm.team import Team
from bagua.errors import CommunicationError

__all__ = ["Link"]

_MESSAGE_BYTES = 64 * 2**20  # at most
_T = TypeVar("_T")


class Link:
    """One process group for messages of any length. Collective over the team.

    Attributes:
        nodes: ranks by node.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self._key = f"elastic/{team.next_lane()}"
        self._group = team.open(self._key).world
        self._device = torch.device("cuda") if team.backend == "nccl" else torch.device("cpu")
        self.nodes = team.discover_nodes(self.gather("nodes", team.node))

    def gather(self, what: str, message: Any) -> list[Any]:
        """All-gather messages, by rank. JSON, never pickle.

        Raises:
            CommunicationError: a connection was lost, or a rank did not arrive within the team's timeout.
        """
        if self.team.size == 1:
            return [message]
        mine = json.dumps(message).encode()
        lengths = (
            self._do(what, lambda: self._rows(torch.tensor([len(mine)], dtype=torch.int64, device="cpu")))
            .view(-1)
            .tolist()
        )
        if not all(0 < length <= _MESSAGE_BYTES for length in lengths):
            raise CommunicationError(f"{what}: messages of {lengths} bytes, at most {_MESSAGE_BYTES} are allowed")
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: len(mine)] = _tensor(mine)
        rows = self._do(what, lambda: self._rows(padded))
        return [json.loads(_bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]

    def pass_on(
        self, what: str, sends: Sequence[tuple[int, bytes]], receives: Sequence[tuple[int, int]]
    ) -> list[bytes]:
        """Send bytes to ranks, (rank, bytes), and receive from ranks, (rank, number of bytes). All at once.

        Raises:
            CommunicationError: the connection to a rank was lost.
        """
        places = [torch.empty(length, dtype=torch.uint8, device=self._device) for _, length in receives]
        outgoing = [(to, _tensor(data).to(self._device)) for to, data in sends if data]
        incoming = [(source, place) for (source, _), place in zip(receives, places, strict=True) if place.numel()]
        if outgoing or incoming:
            self._do(what, lambda: swap(self._group, outgoing, incoming))
        return [_bytes(place) for place in places]

    def broadcast(self, what: str, data: bytes | None, nbytes: int, source: int) -> bytes:
        """Broadcast the `data` of rank `source`; other ranks pass None.

        Raises:
            CommunicationError: the connection to a rank was lost.
        """
        place = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if data is None else _tensor(data)
        place = place.to(self._device)
        if nbytes:
            self._do(what, lambda: broadcast_(self._group, place, source))
        return _bytes(place)

    def close(self) -> None:
        """Drop the connections."""
        self._group.pg = None

    def _rows(self, mine: Tensor) -> Tensor:
        rows = torch.zeros(self.team.size, mine.numel(), dtype=mine.dtype, device=self._device)
        rows[self.team.rank] = mine.to(self._device)
        return all_gather_rows(self._group, rows).cpu()

    def _do(self, what: str, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as error:
            self._group.pg = None  # closes the connections, so that the other ranks fail soon too
            gone = self.team.describe_missing(f"failed/{self._key}")
            raise CommunicationError(f"{what}: the connection to a rank was lost ({error}){gone}") from error


def _tensor(data: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _bytes(tensor: Tensor) -> bytes:
    here = tensor.cpu().contiguous()
    return ctypes.string_at(here.data_ptr(), here.numel()) if here.numel() else b""
