"""What an algorithm asks of the engine while it runs: launches, waiting, lanes, tensors and reports."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from bagua.algorithms.base import Algorithm
from bagua.algorithms.base import Bucket as BucketView
from bagua.algorithms.base import Lane as LaneView
from bagua.algorithms.base import Ticket as TicketView
from bagua.comm.groups import Groups
from bagua.comm.team import Team
from bagua.engine.backward import Backward
from bagua.engine.bucket import Bucket
from bagua.engine.gate import Gate
from bagua.engine.lane import BackgroundLane, JointTicket, Lane, ThreadLane, Ticket, make_lane
from bagua.engine.params import Inventory
from bagua.engine.pieces import InPieces, Run
from bagua.engine.plan import PART_BYTES, WIDE
from bagua.engine.quality import Guard, Probe
from bagua.engine.retuned import with_direct_bytes
from bagua.engine.state import States
from bagua.engine.stats import Series, Tally
from bagua.errors import CommunicationError
from bagua.exchanges import AllReduce, Exchange, Passage

__all__ = ["Launcher", "fitting_part_bytes"]

_log = logging.getLogger("bagua")
_PATIENCE_S = 60.0  # how long a lane in the background waits for a rank before it names it; it then waits on
_ROLL_CALL_S = 3.0  # how long a failed rank waits for the others to fail too, before it names those that did not


class Launcher:
    """The part of `bagua.Context` that does not depend on where in a training step one is."""

    backward: Backward

    def __init__(
        self,
        algorithm: Algorithm,
        inventory: Inventory,
        optimizers: Sequence[torch.optim.Optimizer],
        team: Team,
        lane: Lane,
        key: str,
        notices: Sequence[str],
        guard: Guard | None,
        num_lanes: int,
    ) -> None:
        self.algorithm = algorithm
        self.inventory = inventory
        self.team = team
        self.lanes = [lane]
        self.notices = tuple(notices)
        self.buckets: list[Bucket] = []
        self.step = 0
        # Slices pay where threads carry them; a stream or a simulation would only run them one after the other.
        threads = isinstance(lane, ThreadLane) and team.size > 1
        self.num_lanes = num_lanes if threads else 1
        self.part_bytes = fitting_part_bytes(algorithm, team.size) if threads else None
        self.lanes_of_sums: int | None = None  # see `bagua.engine.link`; None: all
        self.lanes_of_wide: int | None = None  # of exchanges with 8 bits an element or more; None: all
        self._lanes_given = self.num_lanes  # a number that was tuned holds for all
        self.direct_bytes = AllReduce.direct_bytes
        self._key = key
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._tally = Tally(lane.groups.meters, team.size)
        self._probe = Probe(guard) if guard is not None else None
        self._states: States = {}
        self._tensors: dict[tuple[str, int], Tensor] = {}
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self._kept: dict[str, Any] = {}
        self._extra: dict[str, Series] = {}
        self._tickets: list[Ticket] = []
        self._launched = False
        self.num_opened = 0  # lanes ever opened beside the first one
        self._more_lanes: list[Lane] = []
        self._failed = False

    @property
    def groups(self) -> Groups:
        """Rank, size and nodes."""
        return self.lanes[0].groups

    @property
    def all_lanes(self) -> Sequence[Lane]:
        """Those that share the launches of training, and those opened by the algorithm."""
        return (*self.lanes, *self._more_lanes)

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that still exist."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def prepare(self, exchange: Exchange, bucket: BucketView | None = None) -> None:
        """Make the state of `exchange` for one bucket or all."""
        for each in self.buckets if bucket is None else [bucket]:
            for part, (lo, hi) in enumerate(self._parts(exchange, each.index)):
                self._states[exchange, each.index, part] = exchange.init(each.flat[lo:hi], self.groups)

    def _parts(self, exchange: Exchange, index: int) -> Sequence[tuple[int, int]]:
        """Ranges of bucket `index` that are exchanged on their own."""
        bucket = self.buckets[index]
        return bucket.parts(self.part_bytes) if exchange.elementwise and self.part_bytes else ((0, bucket.numel),)

    @property
    def launched(self) -> bool:
        """Whether something was launched since the last wait."""
        return self._launched

    def tensor(self, name: str, bucket: BucketView, like: Tensor | None = None) -> Tensor:
        """A named tensor of a bucket that is saved."""
        key = (name, bucket.index)
        if key not in self._tensors:
            self._tensors[key] = torch.zeros_like(bucket.flat) if like is None else like.detach().clone()
        return self._tensors[key]

    def scratch(self, name: str, bucket: BucketView) -> Tensor:
        """A named tensor of a bucket that is not saved."""
        key = (name, bucket.index)
        if key not in self._scratch:
            self._scratch[key] = torch.empty_like(bucket.flat)
        return self._scratch[key]

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """An object of the algorithm."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def report(self, name: str, value: float) -> None:
        """One more value of a series."""
        self._extra[name] = self._extra.get(name, Series()).plus(value)

    def notice(self, text: str, urgent: bool = False) -> None:
        """Log and keep."""
        if text not in self.notices:
            self.notices += (text,)
            _log.log(logging.WARNING if urgent else logging.INFO, "rank %d: %s", self.team.rank, text)

    def new_lane(self) -> Lane:
        """Open another lane."""
        lane = make_lane(self._open_groups(), self.inventory.device)
        self._more_lanes.append(lane)
        return lane

    def _width(self, exchange: Exchange) -> int:
        """How many lanes share the parts of this exchange; changes no result."""
        width = min(self.num_lanes, len(self.lanes))
        if self.num_lanes != self._lanes_given:
            return width
        if exchange.streaming and self.lanes_of_sums is not None:
            width = min(width, self.lanes_of_sums)
        if self.lanes_of_wide is not None and exchange.elementwise and narrowness(exchange, self.team.size) <= WIDE:
            width = min(width, self.lanes_of_wide)
        return width

    @property
    def num_busy_lanes(self) -> int:
        """How many lanes can be busy at once."""
        pieces = sum(len(bucket.parts(self.part_bytes)) for bucket in self.buckets if self.part_bytes)
        return max(1, min(self.num_lanes, pieces))

    def _open_lanes(self) -> None:
        """Have as many lanes as can be busy at once. Collective."""
        while len(self.lanes) < self.num_busy_lanes:
            groups = self._open_groups()
            groups.share_connections(self.groups, len(self.lanes))
            self.lanes.append(make_lane(groups, self.inventory.device))

    def close_lanes(self, keep: int) -> None:
        """Close those beyond the first `keep`, between steps."""
        while len(self.lanes) > keep:
            self.lanes.pop().close()

    def background_lane(self) -> BackgroundLane:
        """Open a lane with a gate."""
        if self.groups.world.backend not in ("gloo", "nccl"):
            raise ValueError(
                f"{type(self.algorithm).__name__}: exchanges beside training depend on time, which is not simulated"
            )
        groups, team = self._open_groups(), self.team
        patience_s = min(_PATIENCE_S, team.timeout.total_seconds())
        gate = Gate(team.store, f"gate/{self._key}/{self.num_opened}", team.rank, team.size, patience_s)
        lane = BackgroundLane(groups, gate, self.inventory.device)
        self._more_lanes.append(lane)
        return lane

    def _open_groups(self) -> Groups:
        self.num_opened += 1
        groups = self.team.open(f"lane/{self._key}/{self.num_opened}", self.groups.intra is not None, self.groups.nodes)
        self._tally.watch(groups.meters)
        return groups

    def launch(
        self,
        exchange: Exchange,
        bucket: BucketView,
        x: Tensor | None = None,
        *,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
        passage: Passage | None = None,
        step: int | None = None,
        lane: LaneView | None = None,
    ) -> Ticket:
        """Queue `exchange` on a lane."""
        self._check_alive()
        own = self.buckets[bucket.index]
        if (exchange, own.index, 0) not in self._states:
            raise RuntimeError(
                f"{type(self.algorithm).__name__}: launch of {exchange.name} without ctx.prepare() in setup()"
            )
        if passage is not None and (before is None or after is None):
            raise ValueError("launch: passage needs before and after too, for exchanges that cannot use it")
        now, alone = self.step if step is None else step, self.team.size == 1
        self._tally.launched(own.nbytes)
        self._launched = self._launched or lane is None
        self.backward.exchanged = self.backward.exchanged or lane is None
        label = f"{exchange.name} step {self.step} {own.describe()}"
        if alone and before is None and after is None:
            ticket = Ticket(label)
            ticket.finish(0.0)
            return ticket
        probe = self._probe if exchange.lossy and self._probe is not None and self._probe.due(self.step) else None
        source = None
        if x is None and probe is None and not alone and (passage is not None or (before is None and after is None)):
            source = own.take(passage) if exchange.reads(own.views[0]) else None
        if source is not None:
            before = after = None
        flat = own.flat if x is None else x
        parts = self._parts(exchange, own.index)
        piece = InPieces(len(parts), before, after)
        how = (
            exchange if self.direct_bytes == AllReduce.direct_bytes else with_direct_bytes(exchange, self.direct_bytes)
        )
        width = self._width(exchange)
        tickets: list[Ticket] = []
        for part, (lo, hi) in enumerate(parts):
            chosen = (
                self.lanes[(own.index + part) % width]
                if lane is None
                else next(each for each in self._more_lanes if each is lane)
            )
            key = (own.index, part)
            state, piece_of = self._states[(exchange, *key)], None if source is None else source.part(lo, hi)
            run = Run(how, flat[lo:hi], state, chosen.groups, now, alone, probe, key, piece_of)
            tickets.append(chosen.submit(piece.wrap(run), label))
        if lane is None:
            self._tickets += tickets
        return tickets[0] if len(tickets) == 1 else JointTicket(label, tickets)

    def wait(self, ticket: TicketView | None = None) -> None:
        """Wait for one launch, or for everything on the default lane; raise the first error."""
        if ticket is None:
            self._launched = False
            tickets, self._tickets = self._tickets, []
        else:
            assert isinstance(ticket, Ticket)
            tickets = list(ticket.parts) if isinstance(ticket, JointTicket) else [ticket]
        if not tickets:
            return
        started = time.perf_counter()
        for each in tickets:
            self.lanes[0].wait(each)
        self._tally.waited(tickets, time.perf_counter() - started)
        for each in tickets:
            if each.error is not None:
                self._fail(each)

    def line_up(self) -> None:
        """Return at about the same time on all ranks. Collective; nothing may be under way.

        After a meeting in the store rank 0, which serves it, is several round trips ahead of the others.
        """
        if self.team.size == 1:
            return
        self._check_alive()
        lane, x = self.lanes[0], torch.zeros(1, device=self.inventory.device)
        ticket = lane.submit(partial(AllReduce().run, x, {}, lane.groups, self.step), "start of a turn")
        lane.wait(ticket)
        if ticket.error is not None:
            self._fail(ticket)
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)

    def stop(self, timeout_s: float) -> None:
        """End the lanes at the end of the process."""
        for lane in self._more_lanes:
            if isinstance(lane, BackgroundLane):
                lane.gate.closing.set()  # all at once, before waiting for each
        for lane in self.all_lanes:
            lane.stop(timeout_s)

    @property
    def failed(self) -> bool:
        """Whether an exchange has failed, after which nothing can be exchanged any more."""
        return self._failed

    def _check_alive(self) -> None:
        if self._failed:
            raise CommunicationError(
                "an earlier exchange of this module failed; call bagua.distribute() again on all ranks, or restart"
            )

    def _fail(self, ticket: Ticket) -> None:
        """Raise what went wrong in the lane, with the ranks that give no sign of life."""
        self._failed = True
        for lane in self.all_lanes:
            lane.abandon()
        gone = self.team.missing(f"failed/{self._key}", _ROLL_CALL_S)
        if len(gone) == self.team.size - 1 and self.team.size > 2:
            gone = []  # nobody else failed: the fault is here, or unknowable
        who = f"; no sign of rank {', '.join(map(str, gone))}: gone, or late" if gone else ""
        error = ticket.error
        raise CommunicationError(
            f"rank {self.team.rank}, {ticket.label}: {type(error).__name__}: {error}{who}"
        ) from error


def fitting_part_bytes(algorithm: Algorithm, size: int) -> int:
    """Payload that one lane exchanges at once: more of it the fewer bits an element has on the wire, and of plain sums.

    An exchange costs the same CPU time whatever its size, so small ones do not pay, least where the lanes have nothing
    to do beside moving bytes.
    """
    try:
        exchange = algorithm.exchange
    except TypeError:  # none, or several
        return PART_BYTES
    if exchange.streaming:
        return 2 * PART_BYTES
    return PART_BYTES * min(max(1, round(narrowness(exchange, size) / 4)), 8)


@lru_cache(maxsize=64)  # asked at every launch
def narrowness(exchange: Exchange, size: int) -> float:
    """How many times fewer bytes than an all-reduce of fp32 an exchange that works element by element sends."""
    n, size = 1 << 20, max(size, 2)
    return AllReduce().bytes_per_rank(n, size) / max(exchange.bytes_per_rank(n, size), 1.0)
