"""The ranks of one host: whose weights have completed which steps, who waits for weights, and who is to be listed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bagua.membership.actions import Verdict
from bagua.membership.epoch import NO_MODEL, Epoch, Member
from bagua.membership.messages import MAX_SEAT, MAX_SEATS
from bagua.membership.progress import Progress

__all__ = ["Seats"]

_TOGETHER_S = 10.0  # for the ranks of a host to come in one change of the members


@dataclass
class _Seat:
    progress: Progress
    ready: bool = False  # it waits for the weights, or has had them
    over: bool = False


class Seats:
    """Progress of each rank of a host. Each obeys the commit rule by itself; one promise fences them all.

    Args:
        numbers: of the ranks that the host begins with.

    Raises:
        ValueError: there are too many.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._seats: dict[int, _Seat] = {}
        self._epoch: Epoch | None = None
        self._me: Member | None = None
        self._broken = -1  # the last group that has failed here
        self._fenced = False
        self._learner: int | None = None  # the rank that fetches the weights
        self._waits_since = math.inf  # since when a rank without weights is ready to train
        for number in numbers:
            self.add(number)
            self._seats[number].ready = True

    # -- which ranks there are -----------------------------------------------------------------------------------

    def add(self, number: int) -> None:
        """A rank was started, which has no weights.

        Raises:
            ValueError: there are too many, or one of that number.
        """
        if number in self._seats or not 0 <= number <= MAX_SEAT or len(self._seats) >= MAX_SEATS:
            raise ValueError(f"seat {number}: a host has up to {MAX_SEATS} ranks, with numbers of their own")
        seat = self._seats[number] = _Seat(Progress())
        if self._epoch is not None:
            seat.progress.adopt(self._epoch, self._me is not None, trains=False)
        seat.progress.fenced = self._fenced

    def remove(self, number: int) -> None:
        """A rank has ended, and its weights are lost."""
        self._seats.pop(number, None)

    def ready(self, number: int, now: float) -> None:
        """A rank waits for the weights."""
        if (seat := self._seats.get(number)) is not None:
            seat.ready = True
            self._choose_learner()
            self._waits_since = min(self._waits_since, now)

    def over(self, number: int) -> None:
        """A rank has trained to the end: nobody waits for its next step."""
        if (seat := self._seats.get(number)) is not None:
            seat.over = True

    def progress(self, number: int) -> Progress | None:
        """Of a rank."""
        seat = self._seats.get(number)
        return None if seat is None else seat.progress

    def standing(self, number: int | None) -> tuple[int, bool]:
        """Steps that the weights of a rank have completed, `NO_MODEL` without any; and whether it is in a step."""
        seat = None if number is None else self._seats.get(number)
        return (NO_MODEL, False) if seat is None else (seat.progress.held, seat.progress.in_step)

    def learns(self, number: int) -> bool:
        """Whether this rank is to fetch the weights for its host, which has none: one transfer, not one for each."""
        is_learner = self._me is not None and not self._me.trains
        return is_learner and self.held == NO_MODEL and number == self._choose_learner()

    def _choose_learner(self) -> int | None:
        """The rank that was ready first, as long as it lives: a transfer takes its time."""
        waiting = [each for each, seat in self._seats.items() if seat.ready]
        if self._learner not in waiting:
            self._learner = min(waiting, default=None)
        return self._learner

    def fetched(self, number: int, epoch: int, step: int, now: float) -> Verdict:
        """See `Agent.weights_fetched`. With the first weights of a host all its ranks are to train."""
        if (progress := self.progress(number)) is None:
            return Verdict.DENIED
        verdict = progress.fetch(epoch, step, ask=True)
        if verdict is Verdict.GRANTED and self.held == NO_MODEL and self._awaits(now):
            return Verdict.WAIT
        return progress.fetch(epoch, step)

    def listed(self, now: float) -> tuple[int, ...]:
        """Ranks that should train: those with weights, and those that wait for them, as soon as all have come that
        were started. None while no rank has weights: a host without history never trains.
        """
        if self.held == NO_MODEL:
            return ()
        ready = not self._awaits(now)
        known = () if self._me is None else self._me.seats

        def trains(number: int, seat: _Seat) -> bool:
            return number in known or seat.progress.held != NO_MODEL or (seat.ready and ready)

        return tuple(sorted(number for number, seat in self._seats.items() if trains(number, seat)))

    def _awaits(self, now: float) -> bool:
        """Whether a rank that was started has not come yet, and the others still wait for it."""
        return any(not seat.ready for seat in self._seats.values()) and now - self._waits_since < _TOGETHER_S

    # -- the membership ------------------------------------------------------------------------------------------

    def adopt(self, epoch: Epoch, me: Member | None) -> None:
        """An epoch is decided, in which this host is `me`."""
        self._epoch, self._me, self._fenced = epoch, me, False
        for number, seat in self._seats.items():
            had = seat.progress.held != NO_MODEL
            seat.progress.adopt(epoch, me is not None, trains=me is not None and number in me.seats)
            # One that still trains has to find out first that its weights do not count.
            seat.ready &= seat.progress.trains or not had
        if all(seat.progress.trains for seat in self._seats.values() if seat.ready):
            self._waits_since = math.inf

    def found(self) -> None:
        """This host is one of the founders: its weights are those that the job begins with."""
        if self._me is not None:
            for number in self._me.seats:
                if (progress := self.progress(number)) is not None:
                    progress.held = progress.started = self._me.held

    @property
    def fenced(self) -> bool:
        """See `Agent.fenced`."""
        return self._fenced

    @fenced.setter
    def fenced(self, value: bool) -> None:
        self._fenced = value
        for seat in self._seats.values():
            seat.progress.fenced = value

    @property
    def held(self) -> int:
        """Steps that the weights of the rank that is furthest have completed; `NO_MODEL` if none has any."""
        return max((seat.progress.held for seat in self._seats.values()), default=NO_MODEL)

    @property
    def goes_on(self) -> bool:
        """Whether a rank has weights that has not trained to the end yet."""
        return any(not seat.over and seat.progress.held != NO_MODEL for seat in self._seats.values())

    @property
    def behind(self) -> bool:
        """Whether this host trains, but none of its ranks has the weights with which the groups were opened."""
        me, epoch = self._me, self._epoch
        return me is not None and epoch is not None and me.trains and self.held < epoch.group_step

    @property
    def waits(self) -> bool:
        """Whether all its ranks train, so that it may be kept waiting by others."""
        me = self._me
        return me is not None and me.trains and not any(seat.progress.behind for seat in self._seats.values())

    @property
    def training(self) -> list[int]:
        """Ranks that train, and not to the end yet."""
        return [number for number, seat in self._seats.items() if seat.progress.trains and not seat.over]

    @property
    def started(self) -> int:
        """Steps that all ranks that train have begun, or can begin as those before are completed."""
        return self._last[0]

    @property
    def arrived(self) -> bool:
        """Whether its ranks that have begun no more than these wait for other hosts in the exchange of the last one."""
        return self._last[1]

    @property
    def _last(self) -> tuple[int, bool]:
        """`started` and `arrived` of the rank that is least far."""
        seats = [seat for seat in self._seats.values() if seat.progress.trains]
        seats = [seat for seat in seats if not seat.over] or seats
        return min(((seat.progress.started, seat.progress.arrived) for seat in seats), default=(0, False))

    @property
    def broken(self) -> bool:
        """Whether connections of the groups in use have failed here."""
        return self._epoch is not None and self._broken == self._epoch.group

    def fail(self, group: int) -> None:
        """Connections of `group` have failed here."""
        if self._epoch is not None and group == self._epoch.group:
            self._broken = group
