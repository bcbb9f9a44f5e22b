"""The rounds of Decoupled DiLoCo: what a rank's training thread and its lane share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bagua.algorithms.base import Bucket, Context, QuorumGate, QuorumLane, Ticket
from bagua.comm.groups import Groups
from bagua.exchanges import AllReduce, Exchange, State

__all__ = ["COUNTS", "Merging", "Outer", "Rounds", "SharedRounds", "serve"]


@dataclass(frozen=True)
class Outer:
    """The options of a round.

    Attributes:
        exchange: takes the mean over all ranks.
        interval: inner steps after which a rank is ready.
        least: inner steps with which it takes part in a round that others close.
        lr, momentum, nesterov: of the outer optimizer.
    """

    exchange: Exchange
    interval: int
    least: int
    lr: float
    momentum: float
    nesterov: bool


COUNTS = 4  # steps, tokens, rounds, merged; the first one is -1 while the numbers are in `SharedRounds`


@dataclass(frozen=True, eq=False)
class Merging:
    """Tensors of one bucket, [N] each.

    Attributes:
        anchor: fp32 or wider.
        momentum: like it; None without.
        pull: like it; x + pull = anchor + u, where u is what this rank has learnt and not contributed.
        delta: like the weights: -u as offered, then the mean of the round.
        state: of the exchange.
    """

    anchor: Tensor
    momentum: Tensor | None
    pull: Tensor
    delta: Tensor
    state: State


@dataclass(eq=False)
class SharedRounds:
    """What the training thread and the lane's thread share. It must lead neither to the lane nor to the context.

    `delta` belongs to the lane while `fixed`; all other tensors are changed under the lock. The training thread never
    waits for the lock.
    """

    outer: Outer
    merging: Sequence[Merging]
    counts: Tensor
    lock: threading.Lock = field(default_factory=threading.Lock)
    unwanted: threading.Event = field(default_factory=threading.Event)
    log: deque[tuple[float, float, float]] = field(default_factory=deque)  # values to report
    steps: int = 0  # inner steps since the deposit, and their tokens
    tokens: float = 0.0
    offered_steps: int = 0  # in the deposit; 0: there is none
    offered_tokens: float = 0.0
    rounds: int = 0
    merged: float = 0.0
    fixed: bool = False  # a round has closed with this deposit, or without any
    taken: bool = False  # `pull` lacks the outer step of the round under way
    pending: bool = False  # `pull` is to be added to the weights
    mark: torch.cuda.Event | None = None  # on a GPU: the last work of the training thread on the tensors

    # -- in the training thread, with the lock or while the lane rests -----------------------------------------------

    def count(self, tokens: float) -> None:
        """An inner step is over."""
        self.recall()
        self.steps += 1
        self.tokens += tokens

    def recall(self) -> None:
        """Take the numbers that were saved, and maybe loaded since, before the lane changes them."""
        if self.counts[0] < 0:
            return
        steps, self.tokens, rounds, self.merged = self.counts.tolist()
        self.steps, self.rounds, self.pending = int(steps), int(rounds), True
        self.counts[0] = -1

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Add to the weights what rounds have made of the anchor, less what this rank has contributed to them."""
        self.recall()
        if self.taken or not self.pending:
            return
        for each, bucket in zip(self.merging, buckets, strict=True):
            flat, pull = bucket.flat, each.pull
            if flat.dtype == pull.dtype:
                flat.add_(pull)
                pull.zero_()
            else:  # what is rounded off stays
                before = flat.to(pull.dtype)
                flat.copy_(before.add(pull))
                pull.sub_(flat.to(pull.dtype).sub_(before))
        self.pending = False
        self._record()

    def renew(self, buckets: Sequence[Bucket]) -> None:
        """The weights were replaced before this rank has learnt anything: u = 0. On a GPU the lane works behind it."""
        with self.lock:
            for each, bucket in zip(self.merging, buckets, strict=True):
                torch.add(each.pull, bucket.flat, out=each.anchor)
            self._record()

    def deposit(self, buckets: Sequence[Bucket]) -> None:
        """Offer what this rank has learnt, or more of it, once it is worth a copy."""
        due = max(1, self.outer.interval // 8) if self.offered_steps else self.outer.least
        if self.fixed or self.steps < due:
            return
        for each, bucket in zip(self.merging, buckets, strict=True):
            each.delta.copy_(torch.sub(each.anchor, bucket.flat).sub_(each.pull))
        self.offered_steps, self.steps = self.offered_steps + self.steps, 0
        self.offered_tokens, self.tokens = self.offered_tokens + self.tokens, 0.0
        self._record()

    def withdraw(self) -> None:
        """Take back what is offered, which the weights still hold, and put the numbers where they are saved."""
        self.recall()
        self.steps, self.offered_steps = self.steps + self.offered_steps, 0
        self.tokens, self.offered_tokens = self.tokens + self.offered_tokens, 0.0
        self.counts.copy_(
            torch.tensor([self.steps, self.tokens, self.rounds, self.merged], dtype=torch.float64, device="cpu")
        )

    def _record(self) -> None:
        device = self.merging[0].anchor.device
        if device.type == "cuda":
            self.mark = torch.cuda.Event()
            self.mark.record(torch.cuda.current_stream(device))

    # -- on the lane ---------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether this rank has made H steps."""
        return self.offered_steps >= self.outer.interval

    def withdrawn(self) -> bool:
        """Whether the training thread wants the rounds to rest."""
        return self.unwanted.is_set()

    def offer(self) -> Sequence[float]:
        """Steps and tokens, rounds and their weight so far. From now on the deposit stays as it is."""
        with self.lock:
            self.fixed = True
            return [float(self.offered_steps), self.offered_tokens, float(self.rounds), self.merged]

    def release(self) -> None:
        """The round was called off."""
        with self.lock:
            self.fixed = False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock; on a GPU work on the tensors behind the training thread, and end before it goes on."""
        with self.lock:
            if self.mark is not None:
                self.mark.wait()
            yield
            if self.merging[0].anchor.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def run(self, offers: Sequence[Sequence[float]], groups: Groups | None) -> None:
        """One round, among all ranks. `groups` is None for a single rank."""
        weights = _weights(offers)
        if groups is not None and len({offer[2] for offer in offers}) > 1:
            self._catch_up(offers, groups)
        own, total = self.offered_tokens or float(self.offered_steps), sum(weights)
        with self._alone():
            self.taken = True
            for each in self.merging:
                if self.offered_steps:
                    each.pull.add_(each.delta)
                    each.delta.mul_(own * len(offers) / total)  # the exchange divides by the number of ranks
                else:
                    each.delta.zero_()
        if groups is not None:
            for index, each in enumerate(self.merging):
                groups.begin(index)
                self.outer.exchange.run(each.delta, each.state, groups, self.rounds)
        with self._alone():
            for each in self.merging:
                self._step(each)
            self.rounds, self.merged = self.rounds + 1, self.merged + total
            self.offered_steps, self.offered_tokens = 0, 0.0
            self.fixed = self.taken = False
            self.pending = True
            self.log.append((sum(weight > 0 for weight in weights), self.merged, self.steps))

    def _step(self, each: Merging) -> None:
        lr, mu, d = self.outer.lr, self.outer.momentum, each.delta
        momentum = d if each.momentum is None else each.momentum.mul_(mu).add_(d)
        for x in (each.anchor, each.pull):
            if self.outer.nesterov:
                x.add_(d, alpha=-lr).add_(momentum, alpha=-lr * mu)
            else:
                x.add_(momentum, alpha=-lr)

    def _catch_up(self, offers: Sequence[Sequence[float]], groups: Groups) -> None:
        """Ranks that were saved at different moments have seen different rounds: take over the latest anchor."""
        latest = max(offer[2] for offer in offers)
        holders = sum(offer[2] == latest for offer in offers)
        share = 1 / holders if self.rounds == latest else 0.0
        for each in self.merging:
            for tensor in (each.anchor, each.momentum):
                if tensor is None:
                    continue
                common = tensor * share
                AllReduce(average=False).run(common, {}, groups, self.rounds)
                with self._alone():
                    if tensor is each.anchor:
                        each.pull.add_(common).sub_(tensor)
                    tensor.copy_(common)
        with self.lock:
            self.rounds = int(latest)
            self.merged = max(offer[3] for offer in offers if offer[2] == latest)


@dataclass(eq=False)
class Rounds:
    """What the training thread knows."""

    lane: QuorumLane | None = None
    shared: SharedRounds | None = None
    ticket: Ticket | None = None  # of the job that serves the rounds

    def end(self, ctx: Context) -> None:
        """The job is over; raises what has failed."""
        ticket, self.ticket = self.ticket, None
        assert ticket is not None and self.lane is not None
        if ticket.error is not None:
            self.lane.abandon()
        ctx.wait(ticket)

    def rest(self, ctx: Context) -> None:
        """Return when no round is under way, and none will be until the end of the next step."""
        if self.shared is None:
            return
        if self.ticket is not None:
            self.shared.unwanted.set()
            self.ticket.wait()  # bounded by the group's timeout: all ranks' lanes are in an exchange, or none
            self.shared.unwanted.clear()
            self.shared.fixed = False
            self.end(ctx)
        self.shared.withdraw()


def serve(shared: SharedRounds, gate: QuorumGate, groups: Groups) -> bool:
    """On the lane: one round after the other, until the training thread or the gate ends them."""
    while not shared.withdrawn() and not gate.over:
        offers = gate.merge(shared)
        if offers is None:
            shared.release()
        else:
            shared.run(offers, groups)
    return False


def _weights(offers: Sequence[Sequence[float]]) -> list[float]:
    """Of all ranks, 0 for those that are late.

    Raises:
        ValueError: some count tokens and others do not.
    """
    without = [rank for rank, (steps, tokens, *_) in enumerate(offers) if steps and not tokens]
    if any(tokens for _, tokens, *_ in offers) and without:
        ranks = ", ".join(map(str, without))
        raise ValueError(f"count_tokens: not called on rank {ranks}, but on others; call it on all ranks or on none")
    return [tokens or steps for steps, tokens, *_ in offers]
