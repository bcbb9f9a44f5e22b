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

from bagua import codecs
from bagua.algorithms.base import Algorithm, BackgroundLane, Context, Exactness, Gate, LostStep, Payload, Ticket
from bagua.algorithms.delayed_moments import DelayedMoments
from bagua.algorithms.feedback import fit_feedback
from bagua.algorithms.gradient_allreduce import GradientAllReduce
from bagua.algorithms.mean_moments import check_mean_moments
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.options import check_corrections, check_keeps_changes, shown
from bagua.algorithms.registry import register
from bagua.algorithms.second_moment import (
    check_scalable,
    fit_scaling,
    fits_adam,
    rescale_second_moments,
    set_up_second_moments,
    told_of_mean_moments,
)
from bagua.algorithms.warmup import Warmup
from bagua.codecs import Codec
from bagua.exchanges import Exchange, mix

__all__ = ["AsyncModelAverage"]

_CODEC = "int4"
_MANY, _BITS = 1 << 20, 4  # with fewer bits what is inferred of moments is mostly noise of the codec


@register
@dataclass(frozen=True)
class AsyncModelAverage(Algorithm):
    """Averages weights in the background: x_i <- x_i + (mean of snapshots - own snapshot), when it is ready.

    Every rank steps with local gradients. In a round of averaging, each rank takes a snapshot of its weights after a
    step and continues to train. A thread waits until every rank has taken its own, averages the snapshots and subtracts
    this rank's. The rank adds the difference at the end of the step at which it is ready, so steps made meanwhile are
    kept, and no weight changes between a forward and its backward pass. The differences of a round sum to zero:
    averaging never moves the mean of the replicas, only gradients do. With a lossy codec it moves by what the codec
    loses of the changes since the last mean, which are sent then in place of the weights.

    No rank ever waits for another. A rank that is slow, evaluates or has paused (`bagua.pause`) delays the rounds but
    not the training of others. Once a rank has exited normally (its script ends, it detaches), the others continue
    without averaging for any time, and `bagua.stats(module).notices` says so. If a rank was killed, ended by an
    exception, hangs or is unreachable, the others continue too, with a warning, but only up to `max_alone_s`.
    Call `bagua.distribute` to restart averaging. With `fault_tolerant` the ranks that are left go on averaging instead,
    in groups that are opened beside training.

    Ranks hold different weights: call `bagua.average_parameters` before you evaluate, save or switch. A round in
    progress is not part of `bagua.state_dict`; loading drops it, and with a lossy codec the next round sends the
    weights themselves, uncompressed. `bagua.pause` and `bagua.resume` need not be called at the same steps everywhere.

    Reports, in `bagua.stats(module).extra`: "round_s", seconds from a snapshot to its mean, of each round;
    "staleness_steps", steps that this rank made between taking the snapshot and adding the difference;
    "corrected", with `mean_moments`, the part of the weights whose moments were corrected.

    Args:
        sync_interval_ms: pause between the end of a round and the next snapshot, which is taken at the end of a step.
            None means 0: a round follows the other.
        warmup_steps: training steps of gradient all-reduce before that.
        codec: of rounds; None means "int4". With few bits rounds take less time on a slow network, so replicas stay
            closer together. A lossy codec sends changes since the last mean, and a biased one of less than 8 bits
            feeds errors back into the next round, but not with `mean_moments`; with "identity" the weights are
            averaged themselves.
        hierarchical: sum within each node first. None does so where nodes have several ranks and the codec is not
            linear: their ranks would share the node's link; and where there are sites (BAGUA_SITE).
        scale_second_moment: correct the second moments of Adam, which come from local gradients, every 8 steps to what
            mean gradients would give. Nothing is exchanged; a copy of the second moments is kept. It helps some models
            and harms others (docs/algorithms/local_sgd.md), so it is off by default. None: with `torch.optim.Adam` and
            `AdamW` without amsgrad and weights of at least 32 bits, in place of `mean_moments`; a notice says so.
        mean_moments: when a mean has come, set both moments of Adam to those of the mean gradients, which it shows.
            Exact after rounds of one step, where the network is fast beside a step, and estimated after 2 and 3 steps;
            after longer rounds nothing is done. Six numbers for each parameter are sent. For `torch.optim.Adam` and
            `AdamW` without amsgrad, and weights of at least 32 bits. None: with these, unless `sync_interval_ms`, a
            codec of less than 4 bits or `scale_second_moment` is given; a notice says so.
        max_alone_s: after so many seconds without a round because a rank failed, exited abnormally or does not
            respond, the next `optimizer.step` raises `CommunicationError` and names the rank. None is the process
            group's timeout; `math.inf` never raises. No effect with `fault_tolerant`.

    Bytes: 2 (R-1)/R times the encoded weights per round; `bytes_per_rank` assumes a round in every step. Memory: two
        copies of the weights, three with a lossy codec, one and 1/R more with error feedback, two more with
        `mean_moments`.
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
    not_compared: ClassVar[tuple[str, ...]] = ("max_alone_s",)

    sync_interval_ms: float | None = None
    warmup_steps: int = 0
    hierarchical: bool | None = None
    max_alone_s: float | None = None
    scale_second_moment: bool | None = False
    codec: str | Codec | None = None
    mean_moments: bool | None = None

    def __repr__(self) -> str:
        """As of any dataclass, but without `codec` and `mean_moments` if they are open."""
        return shown(self, ("codec", "mean_moments"))

    def __post_init__(self) -> None:
        check_corrections(self.mean_moments, self.scale_second_moment)
        interval, steps = self.sync_interval_ms, self.warmup_steps
        if interval is not None and not (_is_number(interval) and 0 <= interval < math.inf):
            raise ValueError(f"sync_interval_ms: expected a number of milliseconds >= 0 or None, got {interval!r}")
        alone = self.max_alone_s
        if alone is not None and (isinstance(alone, bool) or not isinstance(alone, int | float) or not alone > 0):
            raise ValueError(f"max_alone_s: expected a number of seconds > 0 or None, got {alone!r}")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"warmup_steps: expected a number of steps >= 0, got {steps!r}")
        check_keeps_changes(self._codec)
        _ = self.exchange  # refuse what does not mix now, not in the middle of a run

    @property
    def _codec(self) -> Codec:
        return codecs.get(_CODEC if self.codec is None else self.codec)

    @property
    def effective_options(self) -> Mapping[str, object]:
        """The codec, and the pause between rounds."""
        return {"codec": self.codec or _CODEC, "sync_interval_ms": self.sync_interval_ms or 0}

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
        # What is fed back would be taken for gradients where moments are inferred.
        feedback = not self.mean_moments and fit_feedback(None, self._codec)
        return mix("complete", self._codec, hierarchical=bool(self.hierarchical), error_feedback=feedback)

    @cached_property
    def _first(self) -> Exchange:
        """Of the weights themselves: after it all ranks know the same mean."""
        return mix("complete", "identity", hierarchical=bool(self.hierarchical))

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Resolve `hierarchical`; it has no effect on one node, or with one rank per node."""
        return fit_hierarchy(self, nodes, default=not self._codec.linear)

    def for_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> Algorithm:
        """Resolve `mean_moments`."""
        bits = 8 * self._codec.wire_bytes(_MANY) / _MANY
        left_open = self.mean_moments is None and self.scale_second_moment is False and not self.sync_interval_ms
        return replace(self, mean_moments=True) if left_open and bits >= _BITS and fits_adam(optimizers) else self

    def check(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """An optimizer must have moments where they are to be corrected."""
        if self.mean_moments:
            check_mean_moments(params, optimizers)
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
            rounds = ctx.keep("rounds", _Rounds)
            rounds.lane = ctx.background_lane()
            if self.mean_moments:
                ctx.notice(told_of_mean_moments(self.name))
                rounds.moments = _first_moments(ctx)
            if not self._codec.lossless:
                self._set_up_changes(ctx, rounds)

    def _set_up_changes(self, ctx: Context, rounds: _Rounds) -> None:
        """All ranks begin with the same base: their weights, or the mean of the first round where these may differ."""
        rounds.whole = ctx.fault_tolerant
        ctx.prepare(self._first)
        for bucket in ctx.buckets:
            ctx.scratch("base", bucket).copy_(bucket.flat)

    @property
    def keeps_weights(self) -> bool:
        """The base, from which a lossy codec sends differences."""
        return not self._codec.lossless

    def on_start(self, ctx: Context) -> None:
        """The weights are no longer the base, and the moments at hand are those that rounds begin with."""
        if fit_scaling(self.scale_second_moment, ctx, self.name):
            set_up_second_moments(ctx)
        rounds = ctx.keep("rounds", _Rounds)
        if rounds.moments is not None:
            rounds.moments = _first_moments(ctx)
        if self.keeps_weights and rounds.lane is not None:
            rounds.whole |= any(not torch.equal(ctx.scratch("base", each), each.flat) for each in ctx.buckets)

    def on_step_end(self, ctx: Context) -> None:
        """Add the difference if it is there; begin the next round if it is time. Never waits."""
        if fit_scaling(self.scale_second_moment, ctx, self.name):
            rescale_second_moments(ctx)
        rounds = ctx.keep("rounds", _Rounds)
        lane = rounds.lane
        if lane is None:
            return
        if rounds.moments is not None:
            rounds.moments.record(ctx)
        if rounds.pending is not None and all(ticket.done for ticket in rounds.pending.tickets):
            _take_over(ctx, rounds)
        if ctx.fault_tolerant:
            if rounds.broken or lane.gate.over:
                ctx.give_up(f"async: {rounds.broken or lane.gate.remark}")
        elif lane.gate.remark:
            ctx.notice(f"async: {lane.gate.remark}; training continues without averaging", lane.gate.urgent)
        if not (ctx.paused or ctx.fault_tolerant):
            lane.gate.give_up_after(lane.timeout_s if self.max_alone_s is None else self.max_alone_s)
        if rounds.pending is None and self._due(rounds) and not (lane.gate.over or rounds.broken or ctx.paused):
            made = None if rounds.moments is None else rounds.moments.close(ctx)
            rounds.pending = self._begin(ctx, lane.gate, lane, made)
        if rounds.moments is not None:
            rounds.moments.note_weights(ctx)

    def on_step_begin(self, ctx: Context) -> None:
        """Moments are inferred from the optimizers' steps alone."""
        rounds = ctx.keep("rounds", _Rounds)
        if rounds.moments is not None:
            rounds.moments.look_for_changes(ctx)

    def on_pause(self, ctx: Context) -> None:
        """Cancel the round in flight, or complete it if all ranks have entered it."""
        rounds = ctx.keep("rounds", _Rounds)
        if rounds.pending is not None:
            rounds.pending.settle()
            _take_over(ctx, rounds)
            if rounds.moments is not None:
                rounds.moments.note_weights(ctx)

    def on_load(self, ctx: Context) -> None:
        """Drop the round in flight, and what changes are counted from: both belong to other weights."""
        rounds = ctx.keep("rounds", _Rounds)
        if rounds.pending is not None:
            rounds.pending.settle()
            rounds.pending = None
        rounds.whole = self.keeps_weights
        if rounds.moments is not None:
            rounds.moments = DelayedMoments(ctx)
            rounds.moments.call_off()

    def _due(self, rounds: _Rounds) -> bool:
        return time.monotonic() >= rounds.ended + (self.sync_interval_ms or 0) / 1000

    def _begin(self, ctx: Context, gate: Gate, lane: BackgroundLane, made: Tensor | None) -> _Round:
        whole = ctx.keep("rounds", _Rounds).whole
        this = _Round(ctx.step, time.monotonic(), made, whole)
        for bucket in ctx.buckets:
            # Here, not on the lane: the next step changes weights, and not only in its end (nn.Embedding with max_norm
            # does in the forward pass, SAM between two passes).
            snapshot, mean = ctx.scratch("snapshot", bucket).copy_(bucket.flat), ctx.scratch("mean", bucket)
            base = None if self._codec.lossless else ctx.scratch("base", bucket)
            first = partial(_enter, this, gate, ctx.groups.size) if bucket.index == 0 else None
            this.tickets.append(
                ctx.launch(
                    self._first if whole else self.exchange,
                    bucket,
                    mean,
                    before=partial(_join, this, first, snapshot, mean, None if whole else base),
                    after=partial(_leave, this, snapshot, mean, base, whole),
                    lane=lane,
                )
            )
        if made is not None:
            this.tickets.append(ctx.launch_sum(made.view(-1), lane=lane, before=lambda: this.on))
        return this


@dataclass(eq=False)
class _Round:
    """One round, as this rank sees it. The lane holds it too, so it must lead neither to the lane nor the context."""

    step: int
    began: float
    made: Tensor | None = None  # of `DelayedMoments.close`, then the sum over all ranks
    whole: bool = False  # this rank sends its weights themselves
    ended: float = 0.0
    tickets: list[Ticket] = field(default_factory=list)
    on: bool = False  # every rank takes part; written by the lane, read once the tickets are done
    wanted_whole: bool = False  # by a rank, so the next one is; written and read in the same way
    unwanted: threading.Event = field(default_factory=threading.Event)

    def settle(self) -> None:
        """Return when it is over or called off. Bounded by the group's timeout: all ranks' lanes are in it, or none."""
        self.unwanted.set()
        for ticket in self.tickets:
            ticket.wait()


@dataclass(eq=False)
class _Rounds:
    """What the training thread knows."""

    lane: BackgroundLane | None = None
    moments: DelayedMoments | None = None
    pending: _Round | None = None
    ended: float = -math.inf  # when the last one was over; the same moment on all ranks, so that they stay in phase
    broken: str = ""  # why an exchange failed
    whole: bool = False  # the next round sends the weights themselves, whatever the codec


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _enter(this: _Round, gate: Gate, size: int) -> bool:
    """On the lane, before the first exchange: whether the round takes place.

    Where only some ranks send their weights themselves, no rank takes part, and all of them do in the next round.
    """
    entered = gate.enter(this.unwanted.is_set, int(this.whole))
    this.wanted_whole = entered and gate.total > 0
    return entered and gate.total in (0, size)


def _join(this: _Round, enter: Callable[[], bool] | None, snapshot: Tensor, mean: Tensor, base: Tensor | None) -> bool:
    """On the lane, before an exchange: of the snapshot, or of its difference from `base`."""
    if enter is not None:
        this.on = enter()
    if this.on and base is not None:
        torch.sub(snapshot, base, out=mean)
    elif this.on:
        mean.copy_(snapshot)
    return this.on


def _leave(this: _Round, snapshot: Tensor, mean: Tensor, base: Tensor | None, whole: bool) -> None:
    """On the lane, after an exchange: `mean` becomes the difference, and `base` the mean.

    Args:
        whole: the mean is of the snapshots, not of their differences from `base`.
    """
    if base is None:
        mean.sub_(snapshot)
    else:
        base.copy_(mean) if whole else base.add_(mean)
        torch.sub(base, snapshot, out=mean)
    this.ended = time.monotonic()


def _first_moments(ctx: Context) -> DelayedMoments:
    made = DelayedMoments(ctx)
    if ctx.fault_tolerant:  # the ranks may hold different weights
        made.call_off()
    return made


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
        rounds.whole |= this.wanted_whole
        if rounds.moments is not None:
            rounds.moments.call_off()
        return
    differences = [ctx.scratch("mean", bucket) for bucket in ctx.buckets]
    for ticket in this.tickets:
        ctx.wait(ticket)  # done already; it keeps the books
    if rounds.moments is not None and this.made is not None:
        snapshots = [ctx.scratch("snapshot", bucket) for bucket in ctx.buckets]
        ctx.report("corrected", rounds.moments.infer(ctx, differences, snapshots, this.made))
    for bucket, difference in zip(ctx.buckets, differences, strict=True):
        bucket.flat.add_(difference)
    rounds.ended, rounds.whole = this.ended, False
    ctx.report("round_s", this.ended - this.began)
    ctx.report("staleness_steps", ctx.step - this.step)
