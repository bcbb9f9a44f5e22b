"""The engine of one distributed module: tells an algorithm the moments of each training step."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bagua.algorithms.base import Algorithm, Exactness, Payload
from bagua.algorithms.base import Bucket as BucketView
from bagua.algorithms.base import Lane as LaneView
from bagua.algorithms.base import Ticket as TicketView
from bagua.comm.groups import Groups
from bagua.comm.team import Team, decode, encode
from bagua.engine.backward import Backward
from bagua.engine.bucket import Bucket
from bagua.engine.gate import Gate
from bagua.engine.lane import BackgroundLane, Lane, StreamLane, Ticket, make_lane
from bagua.engine.params import Inventory
from bagua.engine.plan import Entry, Plan, make_plan
from bagua.engine.quality import Guard, Probe
from bagua.engine.state import check_header, load_states, pack
from bagua.engine.stats import Series, Stats, Tally
from bagua.engine.usage import UsageBoard
from bagua.errors import CommunicationError
from bagua.exchanges import AllReduce, Exchange, State

__all__ = ["Engine"]

_log = logging.getLogger("bagua")
_PATIENCE_S = 60.0  # how long a lane in the background waits for a rank before it names it; it then waits on
_ROLL_CALL_S = 3.0  # how long a failed rank waits for the others to fail too, before it names those that did not


class Engine:
    """Runs one algorithm for one module. Implements `bagua.Context`.

    Holds no reference to the module: the module's entry in a weak dictionary holds the engine.

    Args:
        key: a name that is new for the team and equal on all ranks.
        order: parameter names in the order in which gradients become ready, if that is known already.
        notices: what the user should know of the options.
        guard: when to measure what compression loses, and what to do about it.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        inventory: Inventory,
        optimizers: Sequence[torch.optim.Optimizer],
        team: Team,
        lane: Lane,
        bucket_bytes: int,
        key: str,
        order: Sequence[str] | None = None,
        notices: Sequence[str] = (),
        guard: Guard | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.inventory = inventory
        self.team = team
        self.lane = lane
        self.bucket_bytes = bucket_bytes
        self.notices = tuple(notices)
        self._warned = False  # of quality, if nothing takes over
        self._probe = Probe(guard) if guard is not None else None
        self.buckets: list[Bucket] = []
        self.step = 0
        self._key = key
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._names = list(inventory.trainable)
        self._tally = Tally(lane.groups.meters, team.size)
        self._states: dict[tuple[Exchange, int], State] = {}
        self._tickets: list[Ticket] = []
        self._launched = False
        self._num_lanes = 0  # ever opened beside the default one
        self._more_lanes: list[Lane] = []
        self._stepped: set[int] = set()
        self._root = algorithm  # what distribute() was given; `algorithm` changes when it hands over
        self._schedule: dict[int, Algorithm] = {}
        self._tensors: dict[tuple[str, int], Tensor] = {}
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self._kept: dict[str, Any] = {}
        self._extra: dict[str, Series] = {}
        self.paused = False
        self._order = list(order) if order is not None else None
        self._forward_seen = False  # in this step
        self._failed = False
        self.backward = Backward(
            self._names,
            list(inventory.trainable.values()),
            UsageBoard(team.store, f"usage/{key}", team.rank, team.size, len(self._names)),
            views_are_gradients=algorithm.payload is Payload.GRAD,
            alone=team.size == 1,
            **_weak_callbacks(self),
        )
        self._start()

    # -- Context -----------------------------------------------------------------------------------------------

    @property
    def groups(self) -> Groups:
        """Rank, size and nodes."""
        return self.lane.groups

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that still exist."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def prepare(self, exchange: Exchange, bucket: BucketView | None = None) -> None:
        """Make the state of `exchange` for one bucket or all."""
        for each in self.buckets if bucket is None else [bucket]:
            self._states[exchange, each.index] = exchange.init(each.flat, self.groups)

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

    def at(self, step: int, algorithm: Algorithm) -> None:
        """Schedule a hand-over."""
        self._schedule[step] = algorithm

    def bind(self, algorithm: Algorithm) -> None:
        """Hand over now."""
        self.wait()
        self._close_more_lanes()
        same_payload = algorithm.payload is self.algorithm.payload
        plan = self.plan
        self.algorithm = algorithm
        self._states.clear()
        self._tensors.clear()
        self._scratch.clear()
        self.backward.views_are_gradients = algorithm.payload is Payload.GRAD
        if plan is not None and same_payload:
            algorithm.setup(self)
            return
        self._release_buckets()
        self.backward.set_buckets(())
        self._start()

    def new_lane(self) -> Lane:
        """Open another lane."""
        lane = make_lane(self._open_groups(), self.inventory.device)
        self._more_lanes.append(lane)
        return lane

    def background_lane(self) -> BackgroundLane:
        """Open a lane with a gate."""
        if self.lane.groups.world.backend not in ("gloo", "nccl"):
            raise ValueError(
                f"{type(self.algorithm).__name__}: exchanges beside training depend on time, which is not simulated"
            )
        groups, team = self._open_groups(), self.team
        patience_s = min(_PATIENCE_S, team.timeout.total_seconds())
        gate = Gate(team.store, f"gate/{self._key}/{self._num_lanes}", team.rank, team.size, patience_s)
        lane = BackgroundLane(groups, gate, self.inventory.device)
        self._more_lanes.append(lane)
        return lane

    def _open_groups(self) -> Groups:
        self._num_lanes += 1
        groups = self.team.open(
            f"lane/{self._key}/{self._num_lanes}", self.algorithm.hierarchical_groups, self.lane.groups.nodes
        )
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
        step: int | None = None,
        lane: LaneView | None = None,
    ) -> Ticket:
        """Queue `exchange` on a lane."""
        self._check_alive()
        state = self._states.get((exchange, bucket.index))
        if state is None:
            raise RuntimeError(
                f"{type(self.algorithm).__name__}: launch of {exchange.name} without ctx.prepare() in setup()"
            )
        own = self.buckets[bucket.index]
        chosen = self.lane if lane is None else next(each for each in self._more_lanes if each is lane)
        groups, now, alone = chosen.groups, self.step if step is None else step, self.team.size == 1
        tensor = own.flat if x is None and not alone else x

        probe = self._probe if exchange.lossy and self._probe is not None and self._probe.due(self.step) else None

        def run() -> None:
            if before is not None and before() is False:
                return
            if not alone:
                assert tensor is not None
                if probe is None:
                    exchange.run(tensor, state, groups, now)
                else:
                    probe.run(exchange, tensor, state, groups, now)
            if after is not None:
                after()

        self._tally.launched(own.nbytes)
        label = f"{exchange.name} step {self.step} {own.describe()}"
        self._launched = self._launched or lane is None
        self.backward.exchanged = self.backward.exchanged or lane is None
        if alone and before is None and after is None:
            ticket = Ticket(label)
            ticket.finish(0.0)
            return ticket
        ticket = chosen.submit(run, label)
        if lane is None:
            self._tickets.append(ticket)
        return ticket

    def wait(self, ticket: TicketView | None = None) -> None:
        """Wait for one launch, or for everything on the default lane; raise the first error."""
        if ticket is None:
            self._launched = False
            tickets, self._tickets = self._tickets, []
        else:
            assert isinstance(ticket, Ticket)
            tickets = [ticket]
        if not tickets:
            return
        started = time.perf_counter()
        for each in tickets:
            self.lane.wait(each)
        self._tally.waited(tickets, time.perf_counter() - started)
        for each in tickets:
            if each.error is not None:
                self._fail(each)

    # -- moments of a step, called by the hooks ----------------------------------------------------------------

    def forward_begins(self) -> None:
        """Before a forward pass in training mode."""
        if self.backward.open and torch._C._current_graph_task_id() == -1:
            self.end_backward()  # the last backward pass was broken off by an exception
        if self._stepped:
            self._end_step()  # not all optimizers made a step
        for name, param in self.inventory.frozen.items():
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was frozen at bagua.distribute() and now requires a gradient; "
                    "call bagua.distribute() again after unfreezing, on all ranks"
                )
        if self.buckets and not self._forward_seen:
            self._forward_seen = True
            self.algorithm.on_forward(self)

    def end_backward(self) -> None:
        """Close the backward pass if one is open: its end went unnoticed, or an exception broke it off."""
        if self.backward.open:
            self.backward.end()

    def optimizer_stepped(self, number: int) -> None:
        """After a step of optimizer `number`."""
        self._stepped.add(number)
        if len(self._stepped) >= len(self.optimizers):
            self._end_step()

    def _end_step(self) -> None:
        self._stepped.clear()
        if self.buckets:
            self.algorithm.on_step_end(self)
            self._check_quality()
        self.step += 1
        self._forward_seen = False
        if self.step in self._schedule:
            self._average_weights()  # what takes over starts from equal replicas, and no rank's work is lost
            self.bind(self._schedule.pop(self.step))
        self._tally.step_ended()

    def _check_quality(self) -> None:
        probe = self._probe
        if probe is None or not probe.due(self.step) or self.team.size == 1:
            return
        if self.algorithm.exactness is Exactness.DECENTRALIZED and self.algorithm.payload is Payload.PARAM:
            flats, groups, step = [bucket.flat for bucket in self.buckets], self.groups, self.step
            run = partial(probe.compare_weights, flats, groups, step)
            self._tickets.append(self.lane.submit(run, f"consensus step {step}"))
            self.wait()
        reason = probe.measured(self.step)
        if not reason:
            return
        fallback = probe.guard.fallback_on(self.groups.nodes)
        what = f"; {fallback!r} takes over" if fallback is not None else ""
        if what or not self._warned:
            self._warned = True
            self.notice(f"step {self.step}, {self.algorithm.name}: {reason}{what}", urgent=self.team.rank == 0)
        if fallback is not None:
            self.bind(fallback)

    def _on_first(self, seen: list[int]) -> None:
        """End of the first pass: agree on rank 0's order and make the buckets."""
        order = seen + [index for index in reversed(range(len(self._names))) if index not in set(seen)]
        names = encode([self._names[index] for index in order]) if self.team.rank == 0 else None
        self._order = decode(self.team.tell("agreement on the order of gradients", names))
        self._start()

    def _on_ready(self, bucket: Bucket) -> None:
        self.algorithm.on_ready(self, bucket)

    def _on_end(self) -> None:
        self._check_alive()
        self.algorithm.on_backward_end(self)
        if not self._optimizers:
            self._end_step()

    def _finish(self) -> None:
        self.wait()
        if isinstance(self.lane, StreamLane):  # over, not only enqueued
            torch.cuda.current_stream(self.inventory.device).synchronize()

    # -- plan --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Make buckets if their order is known or does not matter; else the first backward pass will tell."""
        if self._order is not None or self.algorithm.payload is Payload.PARAM:
            self.adopt_plan(self._make_plan(self._order or list(reversed(self._names))))

    def _make_plan(self, order: Sequence[str]) -> Plan:
        params = self.inventory.trainable
        return make_plan(
            [
                Entry(name, params[name].numel() * params[name].element_size(), str(params[name].dtype))
                for name in order
            ],
            self.bucket_bytes,
        )

    def adopt_plan(self, plan: Plan) -> None:
        """Make buckets after `plan` and set the algorithm up on them.

        Raises:
            ValueError: the plan is not one of this module.
        """
        params, payload = self.inventory.trainable, self.algorithm.payload
        if sorted(plan.order) != sorted(self._names):
            raise ValueError("plan: its parameters are not those of the module")
        for names in plan.buckets:
            if len({params[name].dtype for name in names}) != 1:
                raise ValueError(f"plan: the bucket of {names[0]!r} mixes dtypes")
        self._close_more_lanes()
        self._release_buckets()
        self.buckets = [
            Bucket(index, names, [params[name] for name in names], payload) for index, names in enumerate(plan.buckets)
        ]
        self.backward.set_buckets(self.buckets)
        self._states.clear()
        self._tensors.clear()
        self._scratch.clear()
        self.algorithm.setup(self)

    @property
    def plan(self) -> Plan | None:
        """The agreed plan, None before there is one."""
        return Plan(tuple(bucket.names for bucket in self.buckets)) if self.buckets else None

    @property
    def learned_order(self) -> Sequence[str] | None:
        """Parameter names in the order in which their gradients become ready, if that is known."""
        return self._order

    # -- state, statistics, end --------------------------------------------------------------------------------

    def _circumstances(self) -> dict[str, Any]:
        return {"algorithm": repr(self._root), "size": self.team.size, "rank": self.team.rank}

    def state_dict(self) -> dict[str, Any]:
        """The algorithm's own state on this rank; tensors are copies."""
        self.wait()
        plan = self.plan
        header = {
            **self._circumstances(),
            "step": self.step,
            "order": self._order,
            "plan": plan.to_json() if plan else None,
        }
        return pack(header, self._states, self._tensors)

    def load_state_dict(self, data: dict[str, Any]) -> None:
        """Go on from `data`, made by `state_dict` of the same algorithm, world size and rank.

        Raises:
            ValueError: it was made under other circumstances, or does not fit the module; names what differs.
        """
        self.wait()
        check_header(data, self._circumstances())
        self.algorithm.on_load(self)
        self._order = data["order"]
        for step in sorted(step for step in self._schedule if step <= data["step"]):
            self.bind(self._schedule.pop(step))
        self.step = data["step"]
        if data["plan"] is not None:
            plan = Plan.from_json(data["plan"])
            if self.plan != plan:
                self.adopt_plan(plan)
            if self.plan != plan:
                raise ValueError("state dict: its buckets were made with another bucket_bytes")
        load_states(data, self._states, self._tensors, self.buckets)

    def stats(self) -> Stats:
        """A snapshot."""
        last, total = self._tally.snapshot()
        return Stats(
            algorithm=repr(self._root),
            steps=self.step,
            num_buckets=len(self.buckets),
            bucket_bytes=tuple(bucket.nbytes for bucket in self.buckets),
            scratch_bytes=self.groups.buffers.nbytes,
            last=last,
            total=total,
            notices=self.notices,
            quality=self._probe.last if self._probe is not None else None,
            extra=dict(self._extra),
        )

    # -- what users ask for --------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Stop what runs in the background, or let it run again."""
        self.paused = paused
        if paused:
            self.algorithm.on_pause(self)

    def average(self) -> None:
        """Make the replicas' weights equal to their mean."""
        self._check_alive()
        self.algorithm.on_pause(self)
        if self.algorithm.payload is not Payload.PARAM or self.team.size == 1:
            return
        # Before the exchange, so that a rank that stays away is named and breaks nothing.
        self.team.meet("bagua.average()", b"")
        self._average_weights()

    def _average_weights(self) -> None:
        if self.algorithm.payload is not Payload.PARAM or self.team.size == 1:
            return
        exchange = AllReduce()
        for bucket in self.buckets:
            self._states.setdefault((exchange, bucket.index), {})
            self.launch(exchange, bucket)
        self.wait()

    def close(self) -> None:
        """Wait for the lanes, give the parameters storage of their own again, and end the lanes."""
        try:
            if not self._failed:
                self.end_backward()
                self.wait()
        finally:
            self._close_more_lanes()
            self._release_buckets()
            self.lane.close()

    def stop(self, timeout_s: float) -> None:
        """End the lanes at the end of the process."""
        for lane in self._more_lanes:
            if isinstance(lane, BackgroundLane):
                lane.gate.closing.set()  # all at once, before waiting for each
        for lane in (self.lane, *self._more_lanes):
            lane.stop(timeout_s)

    def _close_more_lanes(self) -> None:
        if self.buckets and not self._failed:
            self.algorithm.on_pause(self)
        self._kept.clear()
        for lane in self._more_lanes:
            lane.close()
        self._more_lanes.clear()

    def _release_buckets(self) -> None:
        for bucket in self.buckets:
            bucket.release(self.algorithm.payload)
        self.buckets = []

    # -- failure -----------------------------------------------------------------------------------------------

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
        for lane in (self.lane, *self._more_lanes):
            lane.abandon()
        gone = self.team.missing(f"failed/{self._key}", _ROLL_CALL_S)
        if len(gone) == self.team.size - 1 and self.team.size > 2:
            gone = []  # nobody else failed: the fault is here, or unknowable
        who = f"; no sign of rank {', '.join(map(str, gone))}: gone, or late" if gone else ""
        error = ticket.error
        raise CommunicationError(
            f"rank {self.team.rank}, {ticket.label}: {type(error).__name__}: {error}{who}"
        ) from error


def _weak_callbacks(engine: Engine) -> dict[str, Any]:
    """The engine's ends of `Backward`, without a cycle: a dropped module is freed at once, not by the collector."""
    ref = weakref.ref(engine)

    def weak(name: str) -> Any:
        def call(*args: Any) -> None:
            alive = ref()
            if alive is not None:
                getattr(alive, name)(*args)

        return call

    return {name: weak(f"_{name}") for name in ("on_first", "on_ready", "on_end", "finish")}
