"""The lanes of a group on which its compressed collectives run, one after the other.

Legend: N = elements of a tensor, R = ranks of the group, C = elements of one rank's part, W = bytes of one wire row.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua import exchanges
from bagua.backend.names import Backend
from bagua.backend.reductions import Reduction
from bagua.backend.work import CompressedWork, Outcome
from bagua.comm.collectives import all_to_all_rows
from bagua.comm.groups import Group, Groups
from bagua.comm.shutdown import before_exit
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.comm.transport import goes_native, why_hook_uses_gloo
from bagua.engine.lanes.label import Label
from bagua.engine.lanes.lane import Lane
from bagua.engine.lanes.selection import make_lane
from bagua.errors import CommunicationError, RankMismatchError

__all__ = ["Compression", "Traffic"]

_SIGN_OF_LIFE_S = 3.0  # how long a failed rank waits for the others to fail too, before it names those that did not
_STOP_S = 1.0  # at the end of the process, for a lane that is still busy


@dataclass(frozen=True)
class Traffic:
    """What a group has compressed so far, on this rank.

    Attributes:
        operations: number of compressed collectives.
        bytes_sent: by them.
        bytes_exact: what a ring would have sent without the codec.
    """

    operations: int = 0
    bytes_sent: int = 0
    bytes_exact: int = 0


class Compression:
    """Runs compressed collectives in the order in which they are submitted, over connections of its own.

    Connections are opened when the first collective runs, so a group that compresses nothing has none.

    Args:
        spec: codec and limits.
        team: makes a team of the group's ranks, for tensors on a device.
    """

    def __init__(self, spec: Backend, team: Callable[[torch.device], Team]) -> None:
        self._spec, self._team_for = spec, team
        self._lanes: dict[str, _GroupLane] = {}
        self._closed: str | None = None
        self._operations = self._exact = 0
        _live.add(self)
        before_exit(_stop_all)
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)

    @property
    def traffic(self) -> Traffic:
        """So far."""
        sent = sum(meter.sent for lane in self._lanes.values() for meter in lane.groups.meters)
        return Traffic(self._operations, sent, self._exact)

    def all_reduce(self, tensors: list[Tensor], reduction: Reduction) -> CompressedWork:
        """Reduce the one tensor in the list, in place. Any shape and strides."""
        x = tensors[0].detach()
        exchange = exchanges.mix("complete", self._spec.codec, average=reduction.average)

        def run(groups: Groups) -> None:
            x_N = x.contiguous().view(-1)
            if reduction.factor != 1.0:
                x_N.mul_(reduction.factor)
            exchange.run(x_N, {}, groups, 0)
            if x_N.data_ptr() != x.data_ptr():
                x.copy_(x_N.view(x.shape))

        return self._submit("all_reduce", tensors, [x], 2 * _nbytes([x]), run)

    def reduce_scatter(
        self, out: Tensor, rows: Sequence[Tensor], result: list[Tensor], reduction: Reduction
    ) -> CompressedWork:
        """Reduce row r of everyone into `out` of rank r.

        Shapes: out has C elements, rows are one tensor of R C elements or R tensors of C.
        """
        codec, n = self._spec.codec, out.numel()
        out, rows = out.detach(), [row.detach() for row in rows]

        def run(groups: Groups) -> None:
            group, buffers = groups.world, groups.buffers
            x_RC = (rows[0] if len(rows) == 1 else torch.stack(list(rows))).reshape(group.size, n)
            shape = (group.size, codec.wire_bytes(n, x_RC.dtype))
            wire_RW = buffers.get("wire", shape, torch.uint8, x_RC.device)
            peers_RW = buffers.get("peers", shape, torch.uint8, x_RC.device)
            codec.encode(x_RC, out=wire_RW)
            all_to_all_rows(group, peers_RW, wire_RW)
            out_C = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
            weight = reduction.factor / group.size if reduction.average else reduction.factor
            codec.decode_mean(peers_RW, n, out=out_C.view(-1), weight=weight)
            if out_C is not out:
                out.copy_(out_C)

        return self._submit("reduce_scatter", result, [out, *rows], _nbytes(rows), run)

    def close(self, timeout_s: float) -> None:
        """Let what is queued end, but wait no longer than that."""
        self._closed = self._closed or "was shut down"
        for lane in self._lanes.values():
            lane.lane.stop(timeout_s)

    def abort(self) -> None:
        """Give up the connections at once, so that peers fail soon."""
        self._closed = self._closed or "was aborted"
        for lane in self._lanes.values():
            lane.abort()

    def _submit(
        self, what: str, result: list[Tensor], tensors: Sequence[Tensor], nbytes: int, run: Callable[[Groups], None]
    ) -> CompressedWork:
        if self._closed is not None:
            raise CommunicationError(f"{what}: the process group {self._closed}")
        device = tensors[0].device
        lane = self._lanes.get(device.type)
        if lane is None:
            lane = self._lanes[device.type] = _GroupLane(self._spec, self._team_for(device), device)
        self._operations += 1
        size = lane.groups.size
        self._exact += nbytes * (size - 1) // size
        label = Label(
            f"{what} {self._operations} with {self._spec}",
            f"{what} with {self._spec}",
            {"number": self._operations, "bytes": nbytes},
        )
        return lane.submit(label, result, tensors, run)


class _GroupLane:
    """A lane that opens its connections with its first job, and runs no job after one that failed."""

    def __init__(self, spec: Backend, team: Team, device: torch.device) -> None:
        self._spec, self._team, self._device = spec, team, device
        self.groups = Groups(Group(None, team.rank, team.size, tuple(range(team.size)), team.backend), ())
        self.lane: Lane = make_lane(self.groups, device)
        self._opened = False
        self._error: CommunicationError | None = None

    def submit(
        self, label: Label, result: list[Tensor], tensors: Sequence[Tensor], run: Callable[[Groups], None]
    ) -> CompressedWork:
        """Queue `run`; its errors surface in the work and the future."""
        devices: list[Any] = [self._device] if self._device.type == "cuda" else []
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        outcome = Outcome()

        def job() -> None:  # must not raise: the lane would not run the next job, whose future would never be done
            try:
                if self._error is None:
                    with torch.no_grad():
                        self._open(label.text)
                        run(self.groups)
            except BaseException as error:
                self._fail(label.text, error)
            outcome.error = self._error
            future.set_result(result)

        def deliver(done: torch.futures.Future[list[Tensor]]) -> list[Tensor]:
            # An exception set on the future itself would be a result for C++; one raised by a callback is an error.
            outcome.check()
            return done.value()

        delivered = future.then(deliver)
        for tensor in tensors:
            self.lane.adopt(tensor)
        return CompressedWork(result, self.lane.submit(job, label), delivered, outcome)

    def abort(self) -> None:
        """Give the connections up."""
        pg = self.groups.world.pg
        if pg is not None and self._team.backend == "gloo":
            pg.abort()
        self.lane.abandon()

    def _open(self, label: str) -> None:
        if self._opened:
            return
        team = self._team
        mine = str(self._spec), team.node, why_hook_uses_gloo(team, self._device)
        told = [decode(each) for each in team.all_gather_bytes(label, encode(mine))]
        for rank, (other, *_) in enumerate(told):
            if other != told[0][0]:
                raise RankMismatchError(f"backend: rank {rank} has {other!r}, rank 0 has {told[0][0]!r}")
        nodes, native = team.discover_sites([node for _, node, _ in told]), goes_native(team, [why for *_, why in told])
        name = f"backend/{self._device.type}"
        world, opened = self.groups.world, team.open(name, nodes=nodes, native=native, or_gloo=True).world
        world.pg, world.direct, world.mesh, self.groups.nodes = opened.pg, opened.direct, opened.mesh, nodes
        self._opened = True

    def _fail(self, label: str, error: BaseException) -> None:
        self.groups.leave(abort=True)  # closes the connections, so that peers fail soon too
        missing = self._team.describe_missing(f"failed/{self._device.type}", _SIGN_OF_LIFE_S)
        self._error = CommunicationError(
            f"{label}: rank {self._team.rank} of {self._team.size}: {type(error).__name__}: {error}{missing}"
        )
        self._error.__cause__ = error


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


_live: weakref.WeakSet[Compression] = weakref.WeakSet()


def _stop_all() -> None:
    """Threads that are inside a collective when the interpreter goes down would abort the process."""
    for compression in list(_live):
        compression.close(_STOP_S)
