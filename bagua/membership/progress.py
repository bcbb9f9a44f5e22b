"""Which steps the weights of one rank have completed, and whether the next one may count."""

from __future__ import annotations

from collections import deque

from bagua.membership.actions import Verdict
from bagua.membership.epoch import NO_MODEL, Epoch

__all__ = ["Progress"]

_BOUNDARIES = 256  # epochs for which fetched weights can stay valid


class Progress:
    """The commit rule for one rank.

    Attributes:
        held: steps that its weights have completed, or `NO_MODEL`.
        started: steps that it has begun, or can begin as those before are completed.
        begun: steps that it has asked to begin, in the groups in use.
        arrived: it has given its part to the exchange of the last one of these, and waits for the others.
        in_step: it has begun a step, and has not completed it, or fetched the weights of others, since.
        trains: the epoch lists it, with or without the weights.
        fenced: its host has promised that it stays at `held` until the next epoch.
    """

    def __init__(self) -> None:
        self.held, self.started, self.begun = NO_MODEL, 0, 0
        self.arrived = self.in_step = self.trains = self.fenced = False
        self._epoch: Epoch | None = None
        self._boundaries: deque[tuple[int, int]] = deque(maxlen=_BOUNDARIES)  # number, step: since it is a member

    def adopt(self, epoch: Epoch, member: bool, trains: bool) -> None:
        """An epoch is decided. Weights that it does not know of are those of nobody.

        Args:
            epoch: the newest one.
            member: its host is in it.
            trains: it is listed itself.
        """
        previous = self._epoch
        self._epoch, self.trains, self.fenced = epoch, trains, False
        if not trains:
            self.held = NO_MODEL
        if not member:
            self._boundaries.clear()
        else:
            self._boundaries.append((epoch.number, epoch.step))
        if previous is None or epoch.group != previous.group:
            self.started, self.begun, self.arrived = max(self.held, 0), 0, False

    @property
    def behind(self) -> bool:
        """Whether it trains, but must fetch weights first: when the groups opened, others had completed more."""
        return self.trains and self._epoch is not None and self.held < self._epoch.group_step

    def start(self, group: int, step: int, ask: bool = False) -> Verdict:
        """See `Agent.start_step`. With `ask` nothing changes."""
        if not self._trains_in(group) or step != self.held:
            return Verdict.DENIED
        if self.fenced:
            return Verdict.WAIT
        if not ask:
            self.begun, self.in_step = step + 1, True
            if step + 1 > self.started:
                self.started, self.arrived = step + 1, False
        return Verdict.GRANTED

    def arrive(self, group: int, step: int) -> None:
        """See `Agent.arrived`."""
        if self._trains_in(group) and step + 1 == self.started:
            self.arrived = True

    def finish(self, group: int, step: int) -> Verdict:
        """See `Agent.finish_step`."""
        if not self._trains_in(group) or step > self.held:
            return Verdict.DENIED
        if step < self.held:
            return Verdict.GRANTED
        if self.fenced:
            return Verdict.WAIT
        self.held, self.in_step = step + 1, False
        self.started, self.arrived = step + 2, False
        return Verdict.GRANTED

    def fetch(self, epoch: int, step: int, ask: bool = False) -> Verdict:
        """See `Agent.weights_fetched`. With `ask` nothing changes."""
        if not self._boundaries or (self.trains and not self.behind) or step < self.held:
            return Verdict.DENIED
        if self.fenced:
            return Verdict.WAIT
        later = [boundary for number, boundary in self._boundaries if number > epoch]
        if not self._boundaries[0][0] <= epoch <= self._boundaries[-1][0] or any(step > each for each in later):
            return Verdict.DENIED
        if not ask:
            self.held, self.in_step = step, False
        return Verdict.GRANTED

    def _trains_in(self, group: int) -> bool:
        return self.trains and self._epoch is not None and self._epoch.group == group and not self.behind
