"""`Spread`: the ranks that hold the experts, and the exchange of rows between them.

Legend: R = ranks, T = rows that leave, U = rows that come, M = elements of a row, n = experts of a rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.codecs import Codec
from bagua.comm.all_to_all import all_to_all, all_to_all_v
from bagua.comm.groups import Groups
from bagua.comm.team import Team
from bagua.comm.world import is_initialized
from bagua.errors import RankMismatchError

__all__ = ["Spread"]

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class _Lane:
    """Separate connections for the layers of one process group and device."""

    def __init__(self, team: Team) -> None:
        self.name = team.next_lane()
        self.groups: Groups = team.open(f"lane/{self.name}")
        self.calls = itertools.count(1)


_lanes: weakref.WeakKeyDictionary[Any, dict[str, _Lane]] = weakref.WeakKeyDictionary()


class Spread:
    """The ranks of a process group. Connections are opened when the first rows are exchanged.

    Attributes:
        size: number of ranks; 1 where there is no process group.
        rank: this one.
        together: whether there is a process group at all.
    """

    def __init__(self, process_group: Any = None) -> None:
        self._process_group = process_group
        self.together = process_group is not None or is_initialized()
        team = self._team(None) if self.together else None
        self.size, self.rank = (team.size, team.rank) if team is not None else (1, 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Spread:
        return self  # a copy of a layer talks to the same ranks

    def __reduce__(self) -> Any:
        return _alone_or_default, (self.size,)

    def count(self, counts_E: Sequence[int], rows: Tensor) -> list[list[int]]:
        """Exchange the numbers of rows that each rank's experts will get. Collective.

        Returns:
            [R][n]: rows from each rank for each of my experts.

        Raises:
            RankMismatchError: a rank has rows of another width or dtype: it runs another layer now.
            CommunicationError: the connection to a rank was lost.
        """
        width, num_local = rows.shape[1], len(counts_E) // self.size
        if self.size == 1:
            return [list(counts_E)]
        mine = (width, _DTYPES.index(rows.dtype))
        sent = torch.tensor(counts_E, dtype=torch.int64, device="cpu").view(self.size, num_local)
        sent = (
            torch.cat([sent, torch.tensor(mine, device="cpu").expand(self.size, 2)], dim=1).contiguous().to(rows.device)
        )
        got = torch.empty_like(sent)
        self._run("counts", rows.device, lambda groups: all_to_all(groups.world, sent, got))
        table = got.tolist()
        for rank, row in enumerate(table):
            if tuple(row[-2:]) != mine or min(row) < 0:
                raise RankMismatchError(
                    f"MoE: rank {rank} sends rows of {row[-2]} elements ({_name(row[-1])}) where this rank has "
                    f"{width} ({rows.dtype}): all ranks must run the same layers in the same order"
                )
        return [row[:-2] for row in table]

    def gather(self, number: Tensor) -> Tensor:
        """Return every rank's `number`, a scalar, as [R] in the order of the ranks. Collective.

        Raises:
            CommunicationError: the connection to a rank was lost.
        """
        sent = number.detach().expand(self.size).contiguous()
        if self.size == 1:
            return sent
        got = torch.empty_like(sent)
        self._run("norms", number.device, lambda groups: all_to_all(groups.world, sent, got))
        return got

    def exchange(self, rows_TM: Tensor, to: Sequence[int], fro: Sequence[int], codec: Codec | None) -> Tensor:
        """Send the first `to[0]` rows to rank 0, the next `to[1]` to rank 1, and so on. Collective.

        Args:
            rows_TM: in the order of the ranks that they go to.
            to: rows to each rank.
            fro: rows from each rank.
            codec: of each row; None sends them as they are. What stays on this rank is not encoded.

        Returns:
            [U, M]: the rows of rank 0 first.
        """
        width = rows_TM.shape[1]
        rows_TM = rows_TM.detach().contiguous()
        if self.size == 1:
            return rows_TM.clone()
        sent = rows_TM if codec is None else codec.encode(rows_TM)
        got = sent.new_empty(sum(fro), sent.shape[1])

        def send(groups: Groups) -> None:
            out = [count * sent.shape[1] for count in to]
            back = [count * sent.shape[1] for count in fro]
            all_to_all_v(groups.world, sent.view(-1), out, _starts(out), got.view(-1), back, _starts(back))

        self._run("rows", rows_TM.device, send)
        if codec is None:
            return got
        out_UM = codec.decode(got, width, dtype=rows_TM.dtype)
        begin, end = sum(fro[: self.rank]), sum(to[: self.rank])
        out_UM[begin : begin + fro[self.rank]] = rows_TM[end : end + to[self.rank]]
        return out_UM

    def bytes_sent(self) -> int:
        """Bytes that layers of this process group have put on the wire from this rank so far."""
        team = self._team(None) if self.size > 1 else None
        lanes = _lanes.get(team.counters, {}) if team is not None else {}
        return sum(meter.sent for lane in lanes.values() for meter in lane.groups.meters)

    def _run(self, what: str, device: torch.device, send: Any) -> None:
        team = self._team(device)
        if team.size != self.size:
            raise RuntimeError(
                f"MoE: made for {self.size} ranks, but the process group has {team.size} now; construct it again"
            )
        lanes = _lanes.setdefault(team.counters, {})
        lane = lanes.get(device.type)
        if lane is None:
            lane = lanes[device.type] = _Lane(team)
        key = f"moe/{lane.name}/{next(lane.calls)}"
        try:
            with team.naming_missing_ranks(f"MoE: {what} of an all-to-all", key, lane.groups):
                send(lane.groups)
        except BaseException:
            lanes.pop(device.type, None)
            raise

    def _team(self, device: torch.device | None) -> Team:
        if device is not None:
            return Team.of(self._process_group, device)
        try:
            return Team.of(self._process_group, torch.device("cpu"))
        except ValueError:
            return Team.of(self._process_group, torch.device("cuda"))  # a group of GPUs only; nothing is sent here


def _alone_or_default(size: int) -> Spread:
    """What is unpickled: over the default group of the process that loads it.

    Raises:
        RuntimeError: it has another number of ranks.
    """
    made = Spread()
    if made.size != size:
        raise RuntimeError(
            f"MoE: its experts were sharded over {size} ranks when it was pickled; this group has {made.size}"
        )
    return made


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)][: len(counts)]


def _name(index: int) -> str:
    return str(_DTYPES[index]) if 0 <= index < len(_DTYPES) else "of no dtype"
