"""Opens the groups of the next lanes, beside the transfer for which the ranks wait, if there is one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from bagua.comm.groups import Groups
from bagua.comm.own_threads import start_thread
from bagua.comm.team import Team
from bagua.errors import CommunicationError

__all__ = ["NextLanes"]

_LOOK_S = 0.05  # between two looks at the members


class NextLanes:
    """Groups of one lane or more, of ranks that have agreed on the members already. Collective.

    All ranks of the team make it with the same arguments and then call `take`, or fail. So whether they are opened
    early or late is no matter of agreement: who cannot open them fails as without a thread.

    Args:
        team: of all ranks of the epoch. Its `alert` must go on raising once the members have changed, whatever is
            opened after it.
        names: of the lanes, new for the team.
        hierarchical, nodes, native, or_gloo: see `Team.open`.
        beside: open them in a thread of their own, from now on. Else `take` opens them.
    """

    def __init__(
        self,
        team: Team,
        names: Sequence[str],
        hierarchical: bool,
        nodes: Sequence[Sequence[int]],
        beside: bool,
        native: bool = False,
        or_gloo: bool = False,
    ) -> None:
        self._team, self._names, self._how = team, tuple(names), (hierarchical, nodes, native, or_gloo)
        self._dropped = threading.Event()
        self._ended: threading.Event | None = None
        self._opened: dict[str, Groups] = {}
        self._error: BaseException | None = None
        self._counters = team.counters
        if beside and team.size > 1:
            own = copy.copy(team)
            own.prepared, own.alert = self._opened, partial(_check, self._dropped, team.alert)
            own.store = team.store.alerted_by(own.alert)
            own.counters = self._counters = replace(team.counters, retired=[])
            self._ended = threading.Event()
            start_thread(lambda ended=self._ended: self._work(own, ended), "bagua-lanes", self._dropped.set)

    def take(self) -> Groups:
        """The groups of the first lane. `team.open` returns those of the others.

        Raises:
            CommunicationError: a member is lost, or the members have changed.
        """
        team = self._team
        if self._ended is None:
            team.prepare(self._names, *self._how)
        else:
            while not self._ended.wait(_LOOK_S):
                if team.alert is not None:
                    team.alert()
            error, self._error = self._error, None
            try:
                if error is not None:
                    raise error
            finally:
                del error  # its traceback holds this frame: no cycle
            team.prepared.update(self._opened)
            self._opened.clear()
            team.retire(self._counters.retired)
        return team.open(self._names[0], *self._how)

    def drop(self) -> None:
        """Nobody takes them. Does not wait: what a thread opens meanwhile is closed when the thread has ended."""
        self._dropped.set()
        _leave(self._team.prepared)
        if self._ended is not None and self._ended.is_set():
            _leave(self._opened)

    def _work(self, team: Team, ended: threading.Event) -> None:
        try:
            team.prepare(self._names, *self._how)
        except Exception as error:  # raised by `take`
            self._error = error.with_traceback(None)
        finally:
            ended.set()
            if self._dropped.is_set():
                _leave(self._opened)


def _check(dropped: threading.Event, alert: Callable[[], object] | None) -> None:
    """For the store of a group, which gloo may hold as long as the group: so it leads to no groups."""
    if dropped.is_set():
        raise CommunicationError("these lanes are not wanted any more")
    if alert is not None:
        alert()


def _leave(opened: dict[str, Groups]) -> None:
    while opened:
        _, groups = opened.popitem()
        groups.leave(abort=True)
