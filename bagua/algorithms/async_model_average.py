"""Asynchronous model averaging: weights are averaged in the background, without blocking."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Algorithm, BackgroundLane, Context, Exactness, Gate, LostStep, Payload, Ticket
from bagua.algorithms.gradient_allreduce import GradientAllReduce
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.registry import register
from bagua.algorithms.second_moment import check_scalable, fit_scaling, rescale_second_moments, set_up_second_moments
from bagua.algorithms.warmup import Warmup
from bagua.exchanges import Exchange, mix

__all__ = ["AsyncModelAverage"]

STEPS = 2  # from a snapshot to the next, unless an interval is given
_LOOK_S = 0.1  # between two looks at whether the lane still lives


@register
@dataclass(frozen=True)
class AsyncModelAverage(Algorithm):
    """Averages weights in the background: x_i <- x_i + (mean of snapshots - own snapshot), when it is ready.

    Every rank steps with local gradients. In a round of averaging, each rank takes a snapshot of its weights after a
    step (on a CPU in a thread, while the next step computes; the optimizer waits for it) and continues to train. The
    thread waits until every rank has taken its own, averages the snapshots and subtracts this rank's. The rank adds
    the difference at the end of the step at which it is ready, so steps made meanwhile are kept, and no weight
    changes between a forward and its backward pass. The differences of a round sum to zero: averaging never moves
    the mean of the replicas, only gradients do.

    No rank ever waits for another. A rank that is slow, evaluates or has paused (`bagua.pause`) delays the rounds but
    not the training of others. Once a rank has exited normally (its script ends, it detaches), the others continue
    without averaging for any time, and `bagua.stats(module).notices` says so. If a rank was killed, ended by an
    exception, hangs or is unreachable, the others continue too, with a warning, but only up to `max_alone_s`.
    Call `bagua.distribute` to restart averaging. With `fault_tolerant` the ranks that are left go on averaging instead,
    in groups that are opened beside training.

    Ranks hold different weights: call `bagua.average_parameters` before you evaluate, save or switch. A round in
    progress is not part of `bagua.state_dict`; loading drops it. `bagua.pause` and `bagua.resume` need not be called at
    the same steps everywhere.

    Reports, in `bagua.stats(module).extra`: "round_s", seconds from a snapshot to its mean, of each round;
    "staleness_steps", steps that this rank made between taking the snapshot and adding the difference.

    Args:
        sync_interval_ms: pause between the end of a round and the next snapshot; 0 averages without pause. None
            (default): the next snapshot is taken when the round is over and two steps have been made since the last.
        warmup_steps: training steps of gradient all-reduce before that.
        hierarchical: sum within each node first; None means False.
        scale_second_moment: correct the second moments of Adam, which come from local gradients, every 8 steps to what
            mean gradients would give. Nothing is exchanged; a copy of the second moments is kept. It helps some models
            and harms others (docs/algorithms/local_sgd.md), so it is off by default. None: with `torch.optim.Adam` and
            `AdamW` without amsgrad and weights of at least 32 bits; a notice says so.
        max_alone_s: after so many seconds without a round because a rank failed, exited abnormally or does not
            respond, the next `optimizer.step` raises `CommunicationError` and names the rank. None is the process
            group's timeout; `math.inf` never raises. No effect with `fault_tolerant`.

    Bytes: 2 (R-1)/R times the weights per round; `bytes_per_rank` assumes a round in every step. Memory: two
        copies of the weights.
    Source: Bagua 0.9's asynchronous model average (its documentation).
    Differs: no lock, so no wait for a round either; rounds that a rank cannot join are called off instead of
        blocking; `abort` and `resume` are not barriers; warm-up counts training steps only.

    Examples:
        >>> algorithm = bagua.algorithms.AsyncModelAverage(sync_interval_ms=200, warmup_steps=100)
        >>> model = bagua.distribute(model, optimizer, algorithm)
    """

    name: ClassVar[str] = "async"
    summary: ClassVar[str] = "local gradients; weights averaged in the background, without blocking"
    exactness: ClassVar[Exactness] = Exactness.ASYNCHRONOUS
    lost_step: ClassVar[LostStep | None] = LostStep.FREE
    kept: ClassVar[tuple[str, ...]] = ("second_moment", "adam_steps")

    sync_interval_ms: float | None = None
    warmup_steps: int = 0
    hierarchical: bool | None = None
    max_alone_s: float | None = None
    scale_second_moment: bool | None = False

    def __post_init__(self) -> None:
        interval, steps = self.sync_interval_ms, self.warmup_steps
        if interval is not None and not (_is_number(interval) and 0 <= interval < math.inf):
            raise ValueError(f"sync_interval_ms: expected a number of milliseconds >= 0 or None, got {interval!r}")
        alone = self.max_alone_s
        if alone is not None and (isinstance(alone, bool) or not isinstance(alone, int | float) or not alone > 0):
            raise ValueError(f"max_alone_s: expected a number of seconds > 0 or None, got {alone!r}")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"warmup_steps: expected a number of steps >= 0, got {steps!r}")

    @property
    def payload(self) -> Payload:
        """Weights; gradients while it warms up."""
        return Payload.GRAD if self.warmup_steps else Payload.PARAM

    @property
    def payloads(self) -> set[Payload]:
        """Gradients first, while it warms up."""
        return {self.payload, Payload.PARAM}

    @cached_property
    def exchange(self) -> Exchange:
        """The mean of all ranks."""
        return mix("complete", "identity", hierarchical=bool(self.hierarchical))

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Resolve `hierarchical`; it has no effect on one node, or with one rank per node."""
        return fit_hierarchy(self, nodes, default=False)

    def check(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """An optimizer must have second moments where they are to be corrected."""
        if self.scale_second_moment:
            check_scalable(optimizers)

    def setup(self, ctx: Context) -> None:
        """Switch to the warm-up, or open the lane."""
        if self.warmup_steps:
            first = GradientAllReduce(hierarchical=self.hierarchical)
            Warmup(self.warmup_steps, first, replace(self, warmup_steps=0)).setup(ctx)
            return
        super().setup(ctx)
        if fit_scaling(self.scale_second_moment, ctx, self.name):
            set_up_second_moments(ctx)
        if ctx.groups.size > 1:
            ctx.keep("rounds", _Rounds).lane = ctx.background_lane()

    def on_step_end(self, ctx: Context) -> None:
        """Add the difference if it is there; begin the next round if it is time. Never waits."""
        if fit_scaling(self.scale_second_moment, ctx, self.name):
            rescale_second_moments(ctx)
        rounds = ctx.keep("rounds", _Rounds)
        lane = rounds.lane
        if lane is None:
            return
        if rounds.pending is not None and all(ticket.done for ticket in rounds.pending.tickets):
            _take_over(ctx, rounds)
        if ctx.fault_tolerant:
            if rounds.broken or lane.gate.over:
                ctx.give_up(f"async: {rounds.broken or lane.gate.remark}")
        elif lane.gate.remark:
            ctx.notice(f"async: {lane.gate.remark}; training continues without averaging", lane.gate.urgent)
        if not (ctx.paused or ctx.fault_tolerant):
            lane.gate.give_up_after(lane.timeout_s if self.max_alone_s is None else self.max_alone_s)
        if rounds.pending is None and self._due(ctx, rounds) and not (lane.gate.over or rounds.broken or ctx.paused):
            rounds.pending = self._begin(ctx, lane.gate, lane)
            rounds.step = ctx.step

    def on_step_begin(self, ctx: Context) -> None:
        """Weights change now, so the snapshot of them must be whole. It has had both passes of a step for that."""
        pending = ctx.keep("rounds", _Rounds).pending
        if pending is not None:
            pending.await_snapshot()

    def on_pause(self, ctx: Context) -> None:
        """Cancel the round in flight, or complete it if all ranks have entered it."""
        rounds = ctx.keep("rounds", _Rounds)
        if rounds.pending is not None:
            rounds.pending.settle()
            _take_over(ctx, rounds)

    def on_load(self, ctx: Context) -> None:
        """Drop the round in flight: it belongs to other weights."""
        rounds = ctx.keep("rounds", _Rounds)
        if rounds.pending is not None:
            rounds.pending.settle()
            rounds.pending = None
        rounds.step = -math.inf  # saved weights may be of an earlier step

    def _due(self, ctx: Context, rounds: _Rounds) -> bool:
        if self.sync_interval_ms is None:
            return ctx.step >= rounds.step + STEPS
        return time.monotonic() >= rounds.ended + self.sync_interval_ms / 1000

    def _begin(self, ctx: Context, gate: Gate, lane: BackgroundLane) -> _Round:
        this = _Round(ctx.step, time.monotonic())
        copies = [(bucket.flat, ctx.scratch("snapshot", bucket)) for bucket in ctx.buckets]
        if copies[0][0].device.type != "cpu":
            _take(this, copies)  # only enqueued, in front of the next step
        for bucket in ctx.buckets:
            snapshot, mean = ctx.scratch("snapshot", bucket), ctx.scratch("mean", bucket)
            first = partial(_enter, this, copies, gate) if bucket.index == 0 else None
            this.tickets.append(
                ctx.launch(
                    self.exchange,
                    bucket,
                    mean,
                    before=partial(_join, this, first, snapshot, mean),
                    after=partial(_leave, this, snapshot, mean),
                    lane=lane,
                )
            )
        return this


@dataclass(eq=False)
class _Round:
    """One round, as this rank sees it. The lane holds it too, so it must lead neither to the lane nor the context."""

    step: int
    began: float
    ended: float = 0.0
    tickets: list[Ticket] = field(default_factory=list)
    on: bool = False  # every rank takes part; written by the lane, read once the tickets are done
    taken: threading.Event = field(default_factory=threading.Event)  # the snapshot is whole
    unwanted: threading.Event = field(default_factory=threading.Event)

    def await_snapshot(self) -> None:
        """Return when the weights may change. A lane that is broken takes no snapshot."""
        while not self.taken.wait(_LOOK_S) and not self.tickets[0].done:
            pass

    def settle(self) -> None:
        """Return when it is over or called off. Bounded by the group's timeout: all ranks' lanes are in it, or none."""
        self.unwanted.set()
        for ticket in self.tickets:
            ticket.wait()


@dataclass(eq=False)
class _Rounds:
    """What the training thread knows."""

    lane: BackgroundLane | None = None
    pending: _Round | None = None
    step: float = -math.inf  # of the last snapshot
    ended: float = -math.inf  # when the last one was over; the same moment on all ranks, so that they stay in phase
    broken: str = ""  # why an exchange failed


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _take(this: _Round, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    for weights, snapshot in copies:
        snapshot.copy_(weights)
    this.taken.set()


def _enter(this: _Round, copies: Sequence[tuple[Tensor, Tensor]], gate: Gate) -> bool:
    """On the lane, before the first exchange: beside the passes of a step, which only read the weights."""
    if not this.taken.is_set():
        _take(this, copies)
    return gate.enter(this.unwanted.is_set)


def _join(this: _Round, enter: Callable[[], bool] | None, snapshot: Tensor, mean: Tensor) -> bool:
    """On the lane, before an exchange."""
    if enter is not None:
        this.on = enter()
    if this.on:
        mean.copy_(snapshot)
    return this.on


def _leave(this: _Round, snapshot: Tensor, mean: Tensor) -> None:
    """On the lane, after an exchange: `mean` becomes the difference."""
    mean.sub_(snapshot)
    this.ended = time.monotonic()


def _take_over(ctx: Context, rounds: _Rounds) -> None:
    """In the training thread, when all tickets are done."""
    this, rounds.pending = rounds.pending, None
    assert this is not None and rounds.lane is not None
    for ticket in this.tickets:
        if ticket.error is not None:
            rounds.broken = f"{type(ticket.error).__name__}: {ticket.error}"
            rounds.lane.abandon()
            if not ctx.fault_tolerant:
                reason = rounds.broken
                ctx.notice(f"async: averaging failed, training continues without it: {reason}", urgent=True)
            return
    if not this.on:
        return
    for bucket, ticket in zip(ctx.buckets, this.tickets, strict=True):
        ctx.wait(ticket)  # done already; it keeps the books
        bucket.flat.add_(ctx.scratch("mean", bucket))
    rounds.ended = this.ended
    ctx.report("round_s", this.ended - this.began)
    ctx.report("staleness_steps", ctx.step - this.step)
