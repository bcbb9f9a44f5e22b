"""The lanes of one distributed module: opened and closed together, shared by its exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from bagua.comm.groups import Groups, Meter
from bagua.comm.shutdown import script_failed
from bagua.comm.team import Team
from bagua.engine.lanes.gate import Gate
from bagua.engine.lanes.lane import BackgroundLane, InlineLane, Lane, ThreadLane
from bagua.engine.lanes.quorum import QuorumGate
from bagua.engine.lanes.selection import make_lane
from bagua.engine.reducer.bucketing import WIDE
from bagua.exchanges import AllReduce, Exchange

__all__ = ["LanePool", "narrowness"]

_LOOK_S = 0.02  # between two looks at a lane whose connections were cut
_PATIENCE_S = 60.0  # how long a lane in the background waits for a rank before it names it; it then waits on


class LanePool:
    """Opens, counts and closes lanes. All ranks open lanes in the same order.

    Args:
        first: the lane that `distribute` has opened.
        team: the ranks.
        device: of the parameters.
        key: a name that is new for the team and equal on all ranks.
        num_lanes: lanes that may share the exchanges.
        lanes_of_sums: number of these lanes used by plain sums; None: all.
        lanes_of_wide: number of these lanes used by exchanges with 8 bits per element or more; None: all.
        straight_chunk_bytes: of all groups; see `Group`.
        bdp_bytes: see `EngineConfig`.
        watch: called with the byte counters of each lane that is opened.

    Attributes:
        shared: lanes that share the launches of training.
        extra: lanes that the algorithm has opened for itself.
        device: of the parameters.
        num_opened: lanes ever opened beside the first one; part of the names of process groups.
    """

    def __init__(
        self,
        first: Lane,
        team: Team,
        device: torch.device,
        key: str,
        num_lanes: int,
        lanes_of_sums: int | None,
        lanes_of_wide: int | None,
        straight_chunk_bytes: int,
        bdp_bytes: int,
        watch: Callable[[Sequence[Meter]], None],
    ) -> None:
        # Slices pay where threads carry them; a stream or a simulation would only run them one after the other. On a
        # GPU each thread has a stream, and nothing orders those of the parts behind the one that ran `before`.
        self.slices = isinstance(first, ThreadLane) and team.size > 1 and device.type == "cpu"
        self.num_lanes = num_lanes if self.slices else 1
        self.lanes_of_sums, self.lanes_of_wide = lanes_of_sums, lanes_of_wide
        self.shared = [first]
        self.extra: list[Lane] = []
        self.num_opened = 0
        self._side: InlineLane | None = None
        self._given = self.num_lanes  # a number that was tuned holds for all exchanges
        self.device = device
        self._team, self._key, self._watch = team, key, watch
        self._straight_chunk_bytes, self.bdp_bytes = straight_chunk_bytes, bdp_bytes
        self._set_limits(first.groups)

    @property
    def groups(self) -> Groups:
        """Rank, size and nodes."""
        return self.shared[0].groups

    @property
    def all(self) -> Sequence[Lane]:
        """Every open lane."""
        return (*self.shared, *self.extra) if self._side is None else (*self.shared, *self.extra, self._side)

    @property
    def side_groups(self) -> Groups:
        """Groups for collectives of the training thread; opened when first used, so by all ranks at once."""
        if self._side is None:
            self._side = InlineLane(self._open_groups(native=False))
        return self._side.groups

    def width(self, exchange: Exchange) -> int:
        """Return how many lanes share the parts of `exchange`; changes no result."""
        return min(self.most_lanes(exchange), len(self.shared))

    def most_lanes(self, exchange: Exchange) -> int:
        """Return how many lanes would share them if that many were open."""
        width = self.num_lanes
        if self.num_lanes != self._given:
            return width
        if exchange.streaming and self.lanes_of_sums is not None:
            width = min(width, self.lanes_of_sums)
        if self.lanes_of_wide is not None and exchange.elementwise and narrowness(exchange, self._team.size) <= WIDE:
            width = min(width, self.lanes_of_wide)
        return width

    def adopt(self, tensor: Tensor) -> None:
        """Tell all lanes that they will use `tensor`."""
        for lane in self.all:
            lane.adopt(tensor)

    def open_shared(self, wanted: int) -> None:
        """Have at least `wanted` shared lanes. Collective."""
        missing, first = wanted - len(self.shared), self.groups
        if missing > 1 and first.native:
            self._prepare(missing)
        while len(self.shared) < wanted:
            groups = self._open_groups()
            groups.share_connections(self.groups, len(self.shared))
            self.shared.append(make_lane(groups, self.device))

    def close_shared(self, keep: int) -> None:
        """Close the shared lanes beyond the first `keep`, between steps."""
        while len(self.shared) > keep:
            self.shared.pop().close()

    def open_extra(self, tensors: Sequence[Tensor]) -> Lane:
        """Open a lane for the algorithm, which will use `tensors`. Collective."""
        lane = make_lane(self._open_groups(), self.device)
        for tensor in tensors:
            lane.adopt(tensor)
        self.extra.append(lane)
        return lane

    def open_background(self, owner: str, quorum: tuple[int, float] | None = None) -> BackgroundLane:
        """Open a lane with a gate. Collective.

        Args:
            owner: who asks, for the message.
            quorum: of a gate whose rounds close without the ranks that are late, and its grace.

        Raises:
            ValueError: the ranks are simulated.
        """
        if self.groups.world.backend not in ("gloo", "nccl"):
            raise ValueError(f"{owner}: background exchanges depend on time, which is not simulated")
        groups, team = self._open_groups(), self._team
        patience_s = min(_PATIENCE_S, team.timeout.total_seconds())
        place = team.store, f"gate/{self._key}/{self.num_opened}", team.rank, team.size, patience_s
        gate = Gate(*place) if quorum is None else QuorumGate(*place, *quorum)
        lane = BackgroundLane(groups, gate, self.device, team.timeout.total_seconds())
        self.extra.append(lane)
        return lane

    def close_extra(self) -> None:
        """Close the algorithm's lanes."""
        for lane in self.extra:
            lane.close()
            if isinstance(lane, BackgroundLane):
                self._team.retire(lane.gate.keys())
        self.extra.clear()

    def close(self) -> None:
        """Close every lane; what is queued still runs."""
        for lane in self.all:
            lane.close()

    def forget_background(self) -> None:
        """Leave abandoned lanes in the background to themselves: they may be waiting for a store that is gone."""
        self.extra = [lane for lane in self.extra if not isinstance(lane, BackgroundLane)]

    def drain(self) -> None:
        """Return when no shared lane works on a tensor any more. Soon, once connections are cut."""
        for lane, ticket in [(lane, lane.submit(_nothing, "drain")) for lane in self.shared]:
            while not ticket.ends_within(_LOOK_S):
                lane.leave_stuck()

    def sever(self) -> None:
        """Cut the connections of all lanes, so that what is in flight fails, here and at the peers. From any thread."""
        for lane in self.all:
            lane.sever()

    def leave_stuck(self) -> None:
        """After `sever`: fail what does not end by itself; see `Lane.leave_stuck`."""
        for lane in self.all:
            lane.leave_stuck()

    def abandon(self) -> None:
        """Abandon every lane at once, after a failure. Closes connections, so peers fail soon too."""
        for lane in self.all:
            lane.abandon()

    def stop(self, timeout_s: float) -> None:
        """End the lanes at the end of the process; one that is stuck is left behind after `timeout_s`."""
        for lane in self.extra:
            if isinstance(lane, BackgroundLane):
                lane.gate.failing = script_failed()
                lane.gate.closing.set()  # all at once, before waiting for each
        for lane in self.all:
            lane.stop(timeout_s)

    def _open_groups(self, native: bool | None = None) -> Groups:
        self.num_opened += 1
        first = self.groups
        native = first.native if native is None else native
        name = self._name_of(self.num_opened)
        groups = self._team.open(name, first.intra is not None, first.nodes, native, first.or_gloo, beside=first)
        self._watch(groups.meters)
        self._set_limits(groups)
        return groups

    def _prepare(self, lanes: int) -> None:
        """Connect so many lanes at once."""
        first, team = self.groups, self._team
        names = [self._name_of(self.num_opened + number + 1) for number in range(lanes)]
        names = [name for name in names if name not in team.prepared]  # the same on all ranks
        if len(names) > 1:
            team.prepare(names, first.intra is not None, first.nodes, True, first.or_gloo, beside=first)

    def _name_of(self, number: int) -> str:
        return f"lane/{self._key}/{number}"

    def _set_limits(self, groups: Groups) -> None:
        for group in groups.between:
            group.straight_chunk_bytes = self._straight_chunk_bytes


def _nothing() -> None: ...


@lru_cache(maxsize=64)  # asked at every launch
def narrowness(exchange: Exchange, size: int) -> float:
    """Return how many times fewer bytes than an all-reduce of fp32 an element-wise exchange sends."""
    n, size = 1 << 20, max(size, 2)
    return AllReduce().bytes_per_rank(n, size) / max(exchange.bytes_per_rank(n, size), 1.0)
