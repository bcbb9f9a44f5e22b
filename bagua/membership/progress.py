"""Which steps the weights of this host have completed, and whether the next one may count."""

from __future__ import annotations

from collections import deque

from bagua.membership.actions import Verdict
from bagua.membership.epoch import NO_MODEL, Epoch, Member

__all__ = ["Progress"]

_BOUNDARIES = 256  # epochs for which fetched weights can stay valid


class Progress:
    """The host's side of the commit rule.

    Attributes:
        held: steps that its weights have completed, or `NO_MODEL`.
        started: steps that it has begun.
        broken: the last group that has failed here.
        fenced: it has promised to stay at `held` until the next epoch.
    """

    def __init__(self) -> None:
        self.held, self.started, self.broken = NO_MODEL, 0, -1
        self.fenced = False
        self._epoch: Epoch | None = None
        self._me: Member | None = None
        self._boundaries: deque[tuple[int, int]] = deque(maxlen=_BOUNDARIES)  # number, step: since it is a member

    def adopt(self, epoch: Epoch, me: Member | None) -> None:
        """An epoch is decided. Weights that it does not know of are those of nobody."""
        previous, was = self._epoch, self._me
        self._epoch, self._me, self.fenced = epoch, me, False
        if me is None or me.held != self.held:
            self.held = NO_MODEL
        if me is None or was is None:
            self._boundaries.clear()
        if me is not None:
            self._boundaries.append((epoch.number, epoch.step))
        if previous is None or epoch.group != previous.group:
            self.started = max(self.held, 0)

    def found(self) -> None:
        """This host is one of the founders: its weights are those that the job begins with."""
        if self._me is not None:
            self.held = self.started = self._me.held

    @property
    def behind(self) -> bool:
        """Whether it trains, but must fetch weights first: when the groups opened, others had completed more."""
        me, epoch = self._me, self._epoch
        return me is not None and epoch is not None and me.trains and self.held < epoch.group_step

    def start(self, group: int, step: int) -> Verdict:
        """See `Agent.start_step`."""
        if not self._trains_in(group) or step != self.held:
            return Verdict.DENIED
        if self.fenced:
            return Verdict.WAIT
        self.started = max(self.started, step + 1)
        return Verdict.GRANTED

    def finish(self, group: int, step: int) -> Verdict:
        """See `Agent.finish_step`."""
        if not self._trains_in(group) or step > self.held:
            return Verdict.DENIED
        if step < self.held:
            return Verdict.GRANTED
        if self.fenced:
            return Verdict.WAIT
        self.held = step + 1
        return Verdict.GRANTED

    def fetch(self, epoch: int, step: int) -> Verdict:
        """See `Agent.weights_fetched`."""
        if self._me is None or (self._me.trains and not self.behind) or step < self.held:
            return Verdict.DENIED
        if self.fenced:
            return Verdict.WAIT
        later = [boundary for number, boundary in self._boundaries if number > epoch]
        if not self._boundaries[0][0] <= epoch <= self._boundaries[-1][0] or any(step > each for each in later):
            return Verdict.DENIED
        self.held = step
        return Verdict.GRANTED

    def _trains_in(self, group: int) -> bool:
        me, epoch = self._me, self._epoch
        return me is not None and epoch is not None and me.trains and epoch.group == group and not self.behind
