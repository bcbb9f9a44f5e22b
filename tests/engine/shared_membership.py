"""Agents of hosts that are threads of one process: epochs are decided at once, by the rules of the protocol."""

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

    Attributes:
        epoch: the newest.
        reports: for each decision, what each survivor held.
    """

    def __init__(self, names: Sequence[str], store: str, on_call: Callable[[str, str], None]) -> None:
        self.epoch = Epoch.first([Member(name, 0, name, payload_of(store)) for name in names])
        self.on_call = on_call
        self.reports: list[dict[str, int]] = []
        self.changed = threading.Condition()
        self.progress = {name: Progress() for name in names}
        for name, progress in self.progress.items():
            progress.adopt(self.epoch, self.epoch.member(name, 0))
            progress.found()

    def seat(self, name: str) -> SharedSeat:
        """Of the rank of one host."""
        return SharedSeat(self, name)

    def lose(self, name: str) -> None:
        """Decide an epoch without this host."""
        with self.changed:
            self.decide([each for each in self.epoch.members if each.name != name], f"{name} is lost")

    def decide(self, members: Sequence[Member], reason: str) -> None:
        """Decide an epoch of these members; the caller holds the lock."""
        held = {each.name: self.progress[each.name].held for each in members}
        self.reports.append(held)
        number, step = self.epoch.number + 1, max(held.values())
        stay = tuple(replace(each, held=held[each.name]) for each in members)
        self.epoch = Epoch(number, step, number, step, stay, reason=reason)
        for each in stay:
            self.progress[each.name].adopt(self.epoch, each)
        self.changed.notify_all()


class SharedSeat:
    """A `Seat`."""

    def __init__(self, membership: SharedMembership, name: str) -> None:
        self.name = name
        self._all = membership

    def view(self) -> View:
        """See `Seat`."""
        return view_of(self._all.epoch, self.name, 0)

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
            return self._all.progress[self.name].start(group, step)

    def finish_step(self, group: int, step: int) -> Verdict:
        """See `Seat`."""
        self._all.on_call(self.name, "finish")
        with self._all.changed:
            return self._all.progress[self.name].finish(group, step)

    def weights_fetched(self, epoch: int, step: int) -> Verdict:
        """See `Seat`."""
        with self._all.changed:
            return self._all.progress[self.name].fetch(epoch, step)

    def exchange_failed(self, group: int) -> None:
        """See `Seat`: the same members need other groups."""
        with self._all.changed:
            if group == self._all.epoch.group:
                self._all.decide(self._all.epoch.members, f"{self.name} lost a connection")

    def close(self) -> None:
        """See `Seat`."""
