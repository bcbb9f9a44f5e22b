"""Decoupled DiLoCo: local training at each rank's own pace; a quorum of ranks steps the outer optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch

from bagua import codecs
from bagua.algorithms.base import Algorithm, Context, Exactness, Payload
from bagua.algorithms.decentralized import check_interval
from bagua.algorithms.options import check_keeps_changes, check_number
from bagua.algorithms.registry import register
from bagua.codecs import Codec
from bagua.contrib.decoupled_rounds import COUNTS, Merging, Outer, Rounds, SharedRounds, serve
from bagua.exchanges import Exchange, mix

__all__ = ["DecoupledDiLoCo", "count_tokens"]

_TOKENS = "bagua_tokens"  # key of the first group of the first optimizer


@register
@dataclass(frozen=True)
class DecoupledDiLoCo(Algorithm):
    """DiLoCo without a common pace: no rank waits for another, and rounds close without the ranks that are late.

    With the anchor a, the same bit for bit on all ranks, and the weights x_r = a + u_r of rank r, where u_r is what
    its own steps have changed since it last contributed. A rank is ready after H inner steps, and trains on. Once a
    quorum is ready and the grace is over, the round closes. With its members M, and the tokens w_r (or inner steps)
    that went into u_r:

        d = -(sum over M of w_r u_r) / (sum over M of w_r);   v = mu v + d;   a -= lr (d + mu v)

    At the end of its next inner step each rank continues from x_r = a + u_r, where u_r of a member is what it
    learnt since the round closed. A slow rank is a member with the fewer steps that it has made; one that has made
    hardly any is not, keeps all of u_r, and contributes it later.

    The lanes of all ranks take part in the exchange of a round, those of late ranks with zeros, whatever their training
    threads do. So a rank that is slow, evaluates or hangs delays neither the training of others nor their rounds. The
    members of a round, and their weights, are decided once, in the store. A single rank never moves the anchor.

    Ranks hold different weights, and make different numbers of steps in the same time. Train until the sum over all
    ranks is reached (`bagua.stats(model).extra["merged"].last`, the same on all ranks after the same round), and call
    `bagua.average_parameters` before you evaluate or save the model. `bagua.pause` stops the rounds of all ranks until
    `bagua.resume`; evaluation needs no pause, since weights change at the end of an optimizer's step only.

    Once a rank has ended, detached or been killed, no round takes place any more: the next optimizer steps of the
    others say so in a warning, and after `max_alone_s` raise `CommunicationError`, which names the rank. If the
    exchange of a round breaks they raise at once. `fault_tolerant` is refused.

    Reports, in `bagua.stats(module).extra`, of each round: "members"; "merged", tokens (or steps) of all rounds
    so far; "behind_steps", the steps that this rank has made and not contributed.

    Args:
        communication_interval: H, inner steps after which a rank is ready.
        quorum: ranks that must be ready; None: a majority. At least 2, unless there is one rank only.
        grace: how long a round stays open once the quorum is ready, relative to the time until then.
        min_steps: inner steps with which a rank that is not ready yet is a member of a round that closes, 1 to H;
            None: H/8.
        outer_lr, outer_momentum, nesterov: the outer optimizer, as in `DiLoCo`.
        codec: encoding of d: "identity", "bf16", "minmax_uint8", "int4", or any codec that leaves no elements out.
        max_alone_s: how long a rank that is ready trains on without a round, in seconds; None: the process group's
            timeout; `math.inf`: without limit.

    State: anchor, momentum, and what is to be added to the weights: three copies of the model.
    Bytes: those of the exchange, once per round, for members and others.
    Source: arXiv:2604.21428 (Decoupled DiLoCo), quorum, grace window, token weights; arXiv:2311.08105 (DiLoCo).
    Differs: no syncer apart, the lanes of the ranks are it. The paper's quorum is 1 or more; here a single rank is
        refused. Weights are tokens, where the paper has tokens times tokens a step. No fragments, and a plain mean in
        place of the separate one of directions and norms. A late rank adopts each round at once. The grace is relative
        to the duration of a round, where the paper derives it from the slack of the syncer.

    Examples:
        >>> import bagua.contrib
        >>> algorithm = bagua.contrib.DecoupledDiLoCo(communication_interval=100)
        >>> model = bagua.distribute(model, optimizer, algorithm)
    """

    name: ClassVar[str] = "decoupled_diloco"
    summary: ClassVar[str] = "diloco at each rank's own pace: a quorum closes a round, late ranks join later"
    exactness: ClassVar[Exactness] = Exactness.ASYNCHRONOUS
    payload_kind: ClassVar[Payload] = Payload.PARAM
    not_compared: ClassVar[tuple[str, ...]] = ("max_alone_s",)

    communication_interval: int = 64
    quorum: int | None = None
    grace: float = 0.1
    min_steps: int | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    nesterov: bool = True
    codec: str | Codec = "identity"
    max_alone_s: float | None = None

    def __post_init__(self) -> None:
        check_interval("communication_interval", self.communication_interval)
        if self.quorum is not None and (isinstance(self.quorum, bool) or not isinstance(self.quorum, int)):
            raise ValueError(f"quorum: expected a number of ranks or None, got {self.quorum!r}")
        if self.quorum is not None and self.quorum < 2:
            raise ValueError(f"quorum: expected 2 ranks or more, got {self.quorum}: one alone would become the model")
        check_number("grace", self.grace, 0.0)
        if self.min_steps is not None:
            check_interval("min_steps", self.min_steps)
            if self.min_steps > self.communication_interval:
                raise ValueError(
                    f"min_steps: {self.min_steps} is more than communication_interval={self.communication_interval}"
                )
        check_number("outer_lr", self.outer_lr, 0.0)
        if not self.outer_lr:
            raise ValueError("outer_lr: expected a number > 0, got 0, which would never change the weights")
        check_number("outer_momentum", self.outer_momentum, 0.0, 1.0)
        if self.nesterov and not self.outer_momentum:
            raise ValueError("nesterov: True needs outer_momentum > 0; pass nesterov=False for plain outer SGD")
        alone = self.max_alone_s
        if alone is not None and (isinstance(alone, bool) or not isinstance(alone, int | float) or not alone > 0):
            raise ValueError(f"max_alone_s: expected a number of seconds > 0 or None, got {alone!r}")
        check_keeps_changes(codecs.get(self.codec), coarse=True)
        _ = self.exchange

    @cached_property
    def exchange(self) -> Exchange:
        """The mean of all ranks."""
        return mix("complete", codecs.get(self.codec))

    def bytes_per_rank(self, n: int, size: int) -> float:
        """The exchange's, spread over the interval."""
        return self.exchange.bytes_per_rank(n, size) / self.communication_interval

    @property
    def keeps_weights(self) -> bool:
        """No: nobody waits for a late rank, not even before the first step."""
        return False

    def setup(self, ctx: Context) -> None:
        """Keep the weights as the first anchor, and open the lane.

        Raises:
            ValueError: `quorum` is more than there are ranks.
        """
        size = ctx.groups.size
        if self.quorum is not None and self.quorum > size > 1:
            raise ValueError(f"quorum: {self.quorum} ranks, but there are {size}")
        ctx.prepare(self.exchange)
        merging = []
        for bucket in ctx.buckets:
            wide = bucket.flat.element_size() >= 4
            anchor = ctx.tensor("anchor", bucket, bucket.flat if wide else bucket.flat.float())
            momentum = ctx.tensor("momentum", bucket, torch.zeros_like(anchor)) if self.outer_momentum else None
            pull = ctx.tensor("pull", bucket, torch.zeros_like(anchor))
            delta, state = ctx.scratch("delta", bucket), self.exchange.init(bucket.flat, ctx.groups)
            merging.append(Merging(anchor, momentum, pull, delta, state))
        counts = ctx.tensor("counts", ctx.buckets[0], torch.zeros(COUNTS, dtype=torch.float64, device="cpu"))
        rounds = ctx.keep("rounds", Rounds)
        interval = self.communication_interval
        outer = Outer(
            self.exchange,
            interval,
            self.min_steps or max(1, interval // 8),
            self.outer_lr,
            self.outer_momentum,
            self.nesterov,
        )
        rounds.shared = SharedRounds(outer, merging, counts)
        if size > 1:
            quorum = size // 2 + 1 if self.quorum is None else self.quorum
            rounds.lane = ctx.quorum_lane(quorum, float(self.grace))
            self._serve(ctx)

    def on_start(self, ctx: Context) -> None:
        """The weights, and what rounds of other ranks have added to them, are the anchor."""
        shared = ctx.keep("rounds", Rounds).shared
        if shared is not None:
            shared.renew(ctx.buckets)

    def on_step_end(self, ctx: Context) -> None:
        """Adopt what was merged, offer what this rank has learnt. Never waits."""
        rounds = ctx.keep("rounds", Rounds)
        shared, lane = rounds.shared, rounds.lane
        assert shared is not None
        group = ctx.optimizers[0].param_groups[0] if ctx.optimizers else {}
        tokens = float(group.pop(_TOKENS, 0))
        if rounds.ticket is not None and rounds.ticket.done:
            rounds.end(ctx)
        shared.count(tokens)
        if shared.lock.acquire(blocking=False):  # or else at the end of the next step
            try:
                shared.adopt(ctx.buckets)
                shared.deposit(ctx.buckets)
            finally:
                shared.lock.release()
        if lane is None and shared.ready():
            shared.run([shared.offer()], None)
            shared.adopt(ctx.buckets)
        while shared.log:
            members, merged, behind = shared.log.popleft()
            ctx.report("members", members)
            ctx.report("merged", merged)
            ctx.report("behind_steps", behind)
        if lane is None or ctx.paused:
            return
        if lane.gate.remark:
            ctx.notice(f"decoupled_diloco: {lane.gate.remark}; training continues without rounds", lane.gate.urgent)
        lane.gate.give_up_after(lane.timeout_s if self.max_alone_s is None else self.max_alone_s)
        self._serve(ctx)

    def _serve(self, ctx: Context) -> None:
        """Have the lane serve rounds, if it does not."""
        rounds = ctx.keep("rounds", Rounds)
        shared, lane = rounds.shared, rounds.lane
        if shared is None or lane is None or rounds.ticket is not None or lane.gate.over or ctx.paused:
            return
        shared.recall()
        # One job for all rounds: a training thread that stands still could not launch the next one.
        first, job = ctx.buckets[0], partial(serve, shared, lane.gate, lane.groups)
        rounds.ticket = ctx.launch(self.exchange, first, ctx.scratch("delta", first), before=job, lane=lane)

    def on_pause(self, ctx: Context) -> None:
        """Let the rounds rest, and adopt the last one."""
        rounds = ctx.keep("rounds", Rounds)
        rounds.rest(ctx)
        if rounds.shared is not None:
            rounds.shared.adopt(ctx.buckets)

    @contextmanager
    def saving(self, ctx: Context) -> Iterator[None]:
        """Let the rounds rest meanwhile."""
        ctx.keep("rounds", Rounds).rest(ctx)
        yield
        self._serve(ctx)

    def on_load(self, ctx: Context) -> None:
        """Let the rounds rest until the end of the next step."""
        ctx.keep("rounds", Rounds).rest(ctx)


def count_tokens(optimizer: torch.optim.Optimizer, number: float) -> None:
    """Add to the tokens (or samples) that went into the next step of `optimizer`, as weights of `DecoupledDiLoCo`.

    Call it before each `optimizer.step()`, on all ranks or on none; without it ranks weigh as many as their steps.

    Args:
        optimizer: the first of those given to `bagua.distribute`.
        number: of tokens, > 0.

    Raises:
        ValueError: `number` is not a positive number.

    Examples:
        >>> bagua.contrib.count_tokens(optimizer, inputs.numel())
    """
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ValueError(f"count_tokens: expected a number > 0, got {number!r}")
    group = optimizer.param_groups[0]
    group[_TOKENS] = group.get(_TOKENS, 0) + number
