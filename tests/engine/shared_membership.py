"""Agents of hosts whose ranks are threads of one process: epochs are decided at once, by the rules of the protocol."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from bagua.membership.actions import Verdict
from bagua.membership.epoch import Epoch, Member
from bagua.membership.progress import Progress
from bagua.membership.seat import View, payload_of, view_of

__all__ = ["SharedMembership", "SharedSeat"]


class SharedMembership:
    """Decides who trains.

    Args:
        names: of the hosts.
        store: host:port of the store in which groups meet.
        on_call: called before each question but `view`, by the thread of the rank, with its name and the question.
        ranks: of each host.

    Attributes:
        epoch: the newest.
        reports: for each decision, what each host that is left held.
    """

    def __init__(self, names: Sequence[str], store: str, on_call: Callable[[str, str], None], ranks: int = 1) -> None:
        payload, seats = payload_of(store, ranks), tuple(range(ranks))
        self.epoch = Epoch.first([Member(name, 0, name, payload, seats=seats) for name in names])
        self.on_call = on_call
        self.reports: list[dict[str, int]] = []
        self.changed = threading.Condition()
        self.progress = {(name, seat): Progress() for name in names for seat in seats}
        for progress in self.progress.values():
            progress.adopt(self.epoch, member=True, trains=True)
            progress.held = progress.started = 0

    def seat(self, name: str, seat: int = 0) -> SharedSeat:
        """Of a rank of one host."""
        return SharedSeat(self, name, seat)

    def lose(self, name: str, seat: int | None = None) -> None:
        """Decide an epoch without this host, or without one of its ranks."""
        with self.changed:
            if seat is None:
                self.decide([each for each in self.epoch.members if each.name != name], f"{name} is lost")
                return
            del self.progress[name, seat]
            self._reseat(name, [each for each in self.epoch.by_name[name].seats if each != seat])

    def add(self, name: str, seat: int) -> None:
        """Decide an epoch with a rank that has no weights, beside another one of its host."""
        with self.changed:
            self.progress[name, seat] = Progress()
            self._reseat(name, [*self.epoch.by_name[name].seats, seat])

    def _reseat(self, name: str, seats: Sequence[int]) -> None:
        members = [replace(each, seats=tuple(seats)) if each.name == name else each for each in self.epoch.members]
        self.decide(members, f"{name} lost or gained ranks")

    def decide(self, members: Sequence[Member], reason: str) -> None:
        """Decide an epoch of these members; the caller holds the lock."""
        held = {each.name: max(self.progress[each.name, seat].held for seat in each.seats) for each in members}
        self.reports.append(held)
        number, step = self.epoch.number + 1, max(held.values())
        stay = tuple(replace(each, held=held[each.name]) for each in members)
        self.epoch = Epoch(number, step, number, step, stay, reason=reason)
        for each in stay:
            for seat in each.seats:
                self.progress[each.name, seat].adopt(self.epoch, member=True, trains=True)
        self.changed.notify_all()


class SharedSeat:
    """A `Seat`."""

    def __init__(self, membership: SharedMembership, name: str, seat: int) -> None:
        self.name = name
        self._all, self._seat = membership, seat

    @property
    def _progress(self) -> Progress:
        return self._all.progress.get((self.name, self._seat), Progress())

    def view(self) -> View:
        """See `Seat`."""
        return view_of(self._all.epoch, self.name, 0, self._seat)

    def wants_weights(self) -> None:
        """See `Seat`."""
        self._all.add(self.name, self._seat)

    def await_group(self, after: int, timeout_s: float) -> View:
        """See `Seat`."""
        with self._all.changed:
            if not self._all.changed.wait_for(lambda: self._all.epoch.group > after, timeout_s):
                raise TimeoutError(f"no group after {after}")
        return self.view()

    def start_step(self, group: int, step: int) -> Verdict:
        """See `Seat`."""
        self._all.on_call(self.name, "start")
        with self._all.changed:
            return self._progress.start(group, step)

    def finish_step(self, group: int, step: int) -> Verdict:
        """See `Seat`."""
        self._all.on_call(self.name, "finish")
        with self._all.changed:
            return self._progress.finish(group, step)

    def arrived(self, group: int, step: int) -> None:
        """See `Seat`."""

    def weights_fetched(self, epoch: int, step: int) -> Verdict:
        """See `Seat`."""
        with self._all.changed:
            return self._progress.fetch(epoch, step)

    def exchange_failed(self, group: int) -> None:
        """See `Seat`: the same members need other groups."""
        with self._all.changed:
            if group == self._all.epoch.group:
                self._all.decide(self._all.epoch.members, f"{self.name} lost a connection")

    def close(self) -> None:
        """See `Seat`."""
