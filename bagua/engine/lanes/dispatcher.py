"""Dispatches exchanges to lanes, in parts, and waits for them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from bagua import codecs
from bagua.algorithms.base import Algorithm, Payload
from bagua.algorithms.base import Bucket as BucketView
from bagua.algorithms.base import Lane as LaneView
from bagua.algorithms.base import Ticket as TicketView
from bagua.comm.groups import Group
from bagua.comm.store_team import is_loss
from bagua.comm.team import Team
from bagua.engine.algorithm_memory import AlgorithmMemory
from bagua.engine.failures import Failures
from bagua.engine.guard import Probe
from bagua.engine.lanes.chunks import InPieces, Run
from bagua.engine.lanes.label import Label, span
from bagua.engine.lanes.lane import BackgroundLane, JointTicket, Lane, Ticket
from bagua.engine.lanes.pool import LanePool, narrowness
from bagua.engine.lanes.spread import lanes_of_parts
from bagua.engine.reducer.bucket import Bucket
from bagua.engine.reducer.bucketing import DEFAULT_NUM_LANES, PART_BYTES, last_part_bytes
from bagua.engine.stats import Tally
from bagua.engine.training_state import TrainingState
from bagua.errors import CommunicationError
from bagua.exchanges import AllReduce, ElementwiseHook, Exchange, Hierarchical, ScatterGather
from bagua.exchanges.gathering import gathers

__all__ = ["Dispatcher", "fitting_part_bytes", "is_plain_sum"]

_SMALL_SUM = ScatterGather(codecs.get("identity"), average=False)


class Dispatcher:
    """Launches exchanges of buckets and waits for them; refuses to launch after the first failure.

    Attributes:
        part_bytes: payload that one lane exchanges at once; None: buckets are not cut.
        direct_bytes: sums of up to so many bytes go over the library's own sends.
        launched: something was launched on them since the last `wait`.
    """

    def __init__(
        self,
        state: TrainingState,
        team: Team,
        pool: LanePool,
        memory: AlgorithmMemory,
        failures: Failures,
        tally: Tally,
        probe: Probe | None,
    ) -> None:
        self.part_bytes = fitting_part_bytes(state.algorithm, team.size) if pool.slices else None
        self.direct_bytes = AllReduce.direct_bytes
        self.launched = False
        self._state, self._team, self._pool, self._memory = state, team, pool, memory
        self._failures, self._tally, self._probe = failures, tally, probe
        self._tickets: list[Ticket] = []
        self._spread: dict[tuple[Exchange, int, int | None], Sequence[Sequence[int]]] = {}
        self._spread_of: Sequence[Bucket] | None = None  # the buckets for which it holds
        self._total, self._sizes_of = 0, self._spread_of  # elements, and of which buckets

    @property
    def failed(self) -> bool:
        """Whether exchanges have ended for good."""
        return self._failures.final

    def check_alive(self) -> None:
        """Raise if an exchange has failed.

        Raises:
            CommunicationError: says what failed.
        """
        self._failures.check_alive()

    @property
    def num_busy_lanes(self) -> int:
        """How many lanes can be busy at once."""
        buckets, part_bytes = self._state.buckets, self.part_bytes
        if part_bytes is None or not buckets:
            return 1
        last = last_part_bytes(buckets[-1].nbytes, part_bytes) if is_plain_sum(self._state.algorithm) else part_bytes
        pieces = sum(len(bucket.parts(part_bytes)) for bucket in buckets[:-1]) + len(buckets[-1].parts(last))
        return max(1, min(self._most_lanes(), pieces))

    def _most_lanes(self) -> int:
        """More than the default only if the algorithm uses them: each takes time to open where latency is high."""
        pool = self._pool
        try:
            wanted = pool.most_lanes(self._state.algorithm.exchange)
        except TypeError:  # none, or several
            return pool.num_lanes
        return max(wanted, min(pool.num_lanes, DEFAULT_NUM_LANES))

    def _is_last(self, index: int) -> bool:
        return index == len(self._state.buckets) - 1

    def _gathers(self, exchange: Exchange, index: int) -> bool:
        """See `Group`. It follows from sizes and what the ranks have agreed on, so all of them find the same."""
        bdp_bytes = self._pool.bdp_bytes
        if not bdp_bytes:
            return False
        buckets, inner, size = self._state.buckets, exchange, self._team.size
        if isinstance(exchange, Hierarchical):
            inner, size = exchange.inner, len(self._pool.groups.nodes)
        if self._sizes_of is not buckets:
            self._sizes_of, self._total = buckets, sum(bucket.numel for bucket in buckets)
        return gathers(inner, buckets[index].numel, self._total, self._is_last(index), size, bdp_bytes)

    def parts(self, exchange: Exchange, index: int) -> Sequence[tuple[int, int]]:
        """Return the ranges of bucket `index` that are exchanged on their own."""
        bucket = self._state.buckets[index]
        if not (exchange.elementwise and self.part_bytes):
            return ((0, bucket.numel),)
        if exchange.streaming and self._is_last(index):
            return bucket.parts(last_part_bytes(bucket.nbytes, self.part_bytes))
        return bucket.parts(self.part_bytes)

    def _lanes_of(self, exchange: Exchange, index: int) -> Sequence[Lane]:
        """Return the shared lanes that carry the parts of a bucket. They follow from sizes, so all ranks agree."""
        buckets, width = self._state.buckets, self._pool.width(exchange)
        if self._spread_of is not buckets:
            self._spread_of, self._spread = buckets, {}
        key = exchange, width, self.part_bytes
        if key not in self._spread:
            sizes = [[hi - lo for lo, hi in self.parts(exchange, each.index)] for each in buckets]
            self._spread[key] = lanes_of_parts(sizes, width)
        return [self._pool.shared[lane] for lane in self._spread[key][index]]

    def prepare(self, exchange: Exchange, bucket: BucketView | None = None) -> None:
        """Make the state of `exchange` for one bucket or all."""
        for each in self._state.buckets if bucket is None else [bucket]:
            groups = self._pool.groups.as_of(self._gathers(exchange, each.index))
            for part, (lo, hi) in enumerate(self.parts(exchange, each.index)):
                made = exchange.init(each.flat[lo:hi], groups)
                self._memory.states[exchange, each.index, part] = made
                for tensor in (each.flat, *made.values()):
                    self._pool.adopt(tensor)

    def renew(self) -> None:
        """Make the state of all exchanges anew, as the ranks hold other equal weights now. Nothing is in flight."""
        for (exchange, index, part), state in self._memory.states.items():
            lo, hi = self.parts(exchange, index)[part]
            groups = self._pool.groups.as_of(self._gathers(exchange, index))
            for name, made in exchange.init(self._state.buckets[index].flat[lo:hi], groups).items():
                state[name].copy_(made)

    def rebuild(self) -> None:
        """Complete the state of all exchanges where the ranks hold different weights. Collective, between steps.

        Raises:
            CommunicationError: a rank is lost.
        """
        if self._team.size == 1:
            return
        lane = self._pool.shared[0]
        for (exchange, index, part), state in self._memory.states.items():
            lo, hi = self.parts(exchange, index)[part]
            x = self._state.buckets[index].flat[lo:hi]
            self.submit(partial(exchange.rebuild, x, state, lane.groups), f"{exchange.name}: replicas of peers")
        self.wait()

    def launch(
        self,
        exchange: Exchange,
        bucket: BucketView,
        x: Tensor | None = None,
        *,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
        hook: ElementwiseHook | None = None,
        step: int | None = None,
        lane: LaneView | None = None,
        passage: ElementwiseHook | None = None,
    ) -> Ticket:
        """Queue `exchange`; see `bagua.Context.launch`."""
        if passage is not None:
            if hook is not None:
                raise ValueError("launch: passage is the old name of hook; pass only hook")
            warnings.warn("Context.launch: the argument passage is called hook now", FutureWarning, stacklevel=2)
            hook = passage
        self._failures.check_alive()
        state, pool, states = self._state, self._pool, self._memory.states
        own = state.buckets[bucket.index]
        label = self._label(exchange, own)
        if hook is not None and (before is None or after is None):
            raise ValueError(
                "launch: with hook, pass before and after too; exchanges that cannot use the hook call those"
            )
        now, alone = state.step if step is None else step, self._team.size == 1
        idle = alone and not exchange.runs_alone
        self._tally.launched(own.nbytes)
        self.launched = self.launched or lane is None
        state.exchanged = state.exchanged or lane is None
        if idle and before is None and after is None:
            ticket = Ticket(label)
            ticket.finish(0.0)
            return ticket
        if alone and x is None and state.algorithm.payload is Payload.GRAD:
            own.gather()  # the reducer leaves the gradients of a single rank where they are
        # In a background round every rank is at a step of its own, so they would not agree on what is measured.
        together = not isinstance(lane, BackgroundLane)
        due = self._probe is not None and self._probe.due(state.step)
        probe = self._probe if exchange.lossy and due and together else None
        source = None
        if x is None and probe is None and not alone and (hook is not None or (before is None and after is None)):
            source = own.take(hook) if exchange.reads(own.views[0]) else None
        if source is not None:
            before = after = None
        flat = own.flat if x is None else x
        parts = self.parts(exchange, own.index)
        pieces = InPieces(len(parts), before, after)
        how = exchange
        if self.direct_bytes != AllReduce.direct_bytes:
            how = _with_direct_bytes(exchange, self.direct_bytes)
        extra = None if lane is None else next(each for each in pool.extra if each is lane)
        lanes = self._lanes_of(exchange, own.index) if extra is None else [extra] * len(parts)
        tickets: list[Ticket] = []
        gathers = self._gathers(exchange, own.index)
        for part, (lo, hi) in enumerate(parts):
            chosen = lanes[part]
            key = (own.index, part)
            piece = None if source is None else source.part(lo, hi)
            run = Run(how, flat[lo:hi], states[(exchange, *key)], chosen.groups, now, idle, probe, key, gathers, piece)
            tickets.append(chosen.submit(pieces.wrap(run), label))
        if lane is None:
            self._tickets += tickets
        return tickets[0] if len(tickets) == 1 else JointTicket(label, tickets)

    def launch_sum(
        self, x_P: Tensor, *, before: Callable[[], object] | None = None, lane: LaneView | None = None
    ) -> Ticket:
        """Queue the sum of a small tensor; see `bagua.Context.launch_sum`."""
        self._failures.check_alive()
        step, idle = self._state.step, self._team.size == 1 or not x_P.numel()
        # The last of the shared ones has least to do.
        chosen = self._pool.shared[-1] if lane is None else next(each for each in self._pool.extra if each is lane)
        chosen.adopt(x_P)
        # Rows of all ranks in one latency where it is high; of a size at which bytes count nowhere.
        run = Run(_SMALL_SUM, x_P, {}, chosen.groups, step, idle, None, (0, 0), bool(self._pool.bdp_bytes))
        facts = {"step": step, "bucket": 0, "bytes": x_P.nbytes}
        label = Label(f"{_SMALL_SUM.name} step {step} of {x_P.numel()} numbers", _SMALL_SUM.name, facts)
        ticket = chosen.submit(InPieces(1, before, None).wrap(run), label)
        if lane is None:
            self._tickets.append(ticket)
            self.launched = self._state.exchanged = True
        return ticket

    def launch_early(self, exchange: Exchange, buckets: Sequence[BucketView]) -> None:
        """Exchange `buckets`, and return when they may be used; `wait` waits for the rest. See `bagua.Context`."""
        due = self._probe is not None and self._probe.due(self._state.step)
        if not exchange.two_phases or self._team.size == 1 or due:
            for bucket in buckets:
                self.launch(exchange, bucket)
            self.wait()
            return
        self._failures.check_alive()
        state, finishes = self._state, []
        for bucket in buckets:
            own = state.buckets[bucket.index]
            label = self._label(exchange, own)
            self._tally.launched(own.nbytes)
            lanes = self._lanes_of(exchange, own.index)
            for part, (lo, hi) in enumerate(self.parts(exchange, own.index)):
                key = exchange, own.index, part
                run = Run(
                    exchange, own.flat[lo:hi], self._memory.states[key], lanes[part].groups, state.step, False, None,
                    (own.index, part), False,
                )  # fmt: skip
                held = self._memory.held.setdefault(key, {})
                self._tickets.append(lanes[part].submit(partial(run.begin, held), label))
                finishes.append((lanes[part], partial(run.finish, held), label))
        begins = list(self._tickets)
        # Behind all first phases: a lane does one thing after the other.
        self._tickets += [lane.submit(finish, label) for lane, finish, label in finishes]
        self.launched = state.exchanged = True
        started = time.perf_counter()
        self._await(begins)
        self._tally.waited([], time.perf_counter() - started)
        for each in begins:
            if each.error is not None:
                self._failures.fail(each)

    def time_s(self, exchange: Exchange, payloads: Mapping[int, Tensor]) -> float:
        """Exchange other tensors in place of buckets, once all ranks are here; return the seconds it took.

        Collective, between steps. It changes nothing but these tensors; neither statistics nor states know of it.

        Args:
            payloads: by bucket; of its first elements, or of all.
        """
        self._failures.check_alive()
        jobs: list[tuple[Lane, Run]] = []
        for index, x in payloads.items():
            gathers, lanes = self._gathers(exchange, index), self._lanes_of(exchange, index)
            for part, (lo, hi) in enumerate(self.parts(exchange, index)):
                hi = min(hi, x.numel())
                if lo >= hi:
                    break
                groups, key = lanes[part].groups, (index, part)
                made = exchange.init(x[lo:hi], groups.as_of(gathers))
                for tensor in (x, *made.values()):
                    lanes[part].adopt(tensor)
                run = Run(exchange, x[lo:hi], made, groups, self._state.step, False, None, key, gathers)
                jobs.append((lanes[part], run))
        with self._tally.uncounted():
            self.line_up()
            started = time.perf_counter()
            tickets = [lane.submit(run, f"trial of {exchange.name}") for lane, run in jobs]
            self._await(tickets)
            seconds = time.perf_counter() - started
        for each in tickets:
            if each.error is not None:
                self._failures.fail(each)
        return seconds

    @contextmanager
    def as_of(self, algorithm: Algorithm) -> Iterator[None]:
        """Cut buckets meanwhile as for `algorithm`, unless they are cut as the user or tuning wants it."""
        before, size = self.part_bytes, self._team.size
        if before == fitting_part_bytes(self._state.algorithm, size):
            self.part_bytes = fitting_part_bytes(algorithm, size)
        try:
            yield
        finally:
            self.part_bytes = before

    def _label(self, exchange: Exchange, bucket: Bucket) -> Label:
        """Of a launch, which it refuses if the exchange has no state."""
        step = self._state.step
        if (exchange, bucket.index, 0) not in self._memory.states:
            name = type(self._state.algorithm).__name__
            raise RuntimeError(f"{name}: {exchange.name} was launched without ctx.prepare() in setup()")
        facts = {"step": step, "bucket": bucket.index, "bytes": bucket.nbytes}
        return Label(f"{exchange.name} step {step} {bucket.describe()}", exchange.name, facts)

    def submit(self, run: Callable[[], None], label: Label | str) -> None:
        """Queue `run` on the first lane; `wait` waits for it."""
        self._tickets.append(self._pool.shared[0].submit(run, label))

    def wait(self, ticket: TicketView | None = None) -> None:
        """Wait for one launch, or for everything on the shared lanes; raise the first error.

        Raises:
            CommunicationError: an exchange failed; names the ranks that did not respond.
        """
        if ticket is None:
            self.launched = False
            tickets, self._tickets = self._tickets, []
        else:
            assert isinstance(ticket, Ticket)
            tickets = list(ticket.parts) if isinstance(ticket, JointTicket) else [ticket]
        if not tickets:
            return
        started = time.perf_counter()
        try:
            self._await(tickets)
        except BaseException:  # Ctrl-C, or another rank has given the pass up
            if ticket is None:
                self._tickets = tickets + self._tickets
            raise
        self._tally.waited(tickets, time.perf_counter() - started)
        for each in tickets:
            if each.error is not None:
                self._failures.fail(each)

    def _await(self, tickets: Sequence[Ticket]) -> None:
        first = self._pool.shared[0]
        with span("wait"):
            for each in tickets:
                while not each.ends_within(self._failures.look_s):
                    self._failures.look_for_broken()
                first.wait(each)

    @contextmanager
    def side_exchange(self, what: str) -> Iterator[Group]:
        """Yield a group for collectives of the training thread; a failure ends all exchanges.

        Args:
            what: is done, for messages.

        Raises:
            CommunicationError: one failed; names the ranks that are gone.
        """
        self._failures.check_alive()
        groups = self._pool.side_groups
        with self._team.naming_missing_ranks(f"{what}, step {self._state.step}", self._failures.key, groups):
            try:
                yield groups.world
            except RuntimeError as error:
                if is_loss(error) or isinstance(error, CommunicationError):
                    self._failures.give_up()
                raise

    def begin_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Begin to sum a few numbers over the ranks, beside training; call what this returns for the sums. Collective.

        To be called between steps, and its result at the end of a later step: nothing waits in between.
        """
        self._failures.check_alive()
        lane, x = self._pool.shared[0], torch.tensor(values, dtype=torch.float32, device=self._pool.device)
        run = partial(AllReduce(average=False).run, x, {}, lane.groups, self._state.step)
        ticket = lane.submit(run, f"sum of {len(values)} numbers step {self._state.step}")

        def sums() -> list[float]:
            lane.wait(ticket)
            if ticket.error is not None:
                self._failures.fail(ticket)
            return x.tolist()

        return sums

    def line_up(self) -> None:
        """Barrier: return at about the same time on all ranks. Collective; no exchange may be in flight.

        After an all-gather in the store, rank 0, which serves it, is several round trips ahead of the others.
        """
        if self._team.size == 1:
            return
        self._failures.check_alive()
        lane, x = self._pool.shared[0], torch.zeros(1, dtype=torch.float32, device=self._pool.device)
        ticket = lane.submit(partial(AllReduce().run, x, {}, lane.groups, self._state.step), "start of a turn")
        self._await([ticket])
        if ticket.error is not None:
            self._failures.fail(ticket)
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)


def fitting_part_bytes(algorithm: Algorithm, size: int) -> int:
    """Return the payload in bytes that one lane exchanges at once: the fewer bits per element, the more.

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


def is_plain_sum(algorithm: Algorithm) -> bool:
    """Whether its exchange only moves and adds, so that one more costs next to nothing."""
    try:
        return algorithm.exchange.streaming
    except TypeError:  # none, or several
        return False


@lru_cache(maxsize=256)
def _with_direct_bytes(exchange: Exchange, direct_bytes: int) -> Exchange:
    """Return `exchange` with another limit up to which full-precision sums go over the library's own sends."""
    if isinstance(exchange, AllReduce):
        return replace(exchange, direct_bytes=direct_bytes)
    if isinstance(exchange, Hierarchical):
        return replace(exchange, inner=_with_direct_bytes(exchange.inner, direct_bytes))
    return exchange
