"""What ranks do together between two steps, such as a checkpoint, where ranks may be lost meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch import nn

from bagua.algorithms.base import LostStep
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.engine.hooks import attachments
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.recovery.meetings import Number
from bagua.errors import CommunicationError

__all__ = ["those_who_come", "work_together"]

_PATIENCE_S = 10.0  # after so long without a rank the log names it
_POLL_S = 0.005, 0.05
_log = logging.getLogger("bagua")
_T = TypeVar("_T")


def work_together(
    manager: RecoveryManager,
    await_groups: Callable[[nn.Module], None],
    module: nn.Module,
    what: str,
    work: Callable[[Team, int], _T],
    done: Callable[[], _T],
) -> _T:
    """Do `work` with all ranks that come here between the same steps. If the members change it is done anew.

    It counts on all of them once it has ended on one: that one tells the others when the next groups are opened. A rank
    that takes over the weights of another one may be beyond this place in the user's loop; the others do without it.

    Args:
        await_groups: returns when groups are in use whose members have not changed.
        what: is done, for messages.
        work: collective. It is given those that have come, of which the first one has not moved if any has not; and how
            many steps this rank has taken over from others since it came.
        done: in place of `work` where it has ended without this rank.

    Raises:
        CommunicationError: no groups could be opened, or a rank that trains did not come, within `max_blocked_s`.
        whatever `work` raises, which must be raised on all of the ranks that it was given.
    """
    meetings = manager.meetings
    engine = attachments[module].engine
    came_at, wanted = engine.step, meetings.next(engine.step, _is_free(module))
    while True:
        await_groups(module)
        if meetings.last >= wanted:
            return done()
        engine = attachments[module].engine
        wanted = meetings.next(engine.step, _is_free(module))
        moved = engine.step - came_at
        try:
            engine.dispatcher.wait()  # what is in flight may fail, and is not to fail in `work`
            ranks = those_who_come(manager, engine.team, what, wanted, moved, _is_free(module))
            if engine.team.rank not in ranks:
                _await_end(manager, engine.team, what, wanted)
                result = done()
            else:
                part = _part(manager, engine.team, ranks, wanted)
                try:
                    result = work(part, moved)
                finally:
                    if part.rank == 0 and part.size < engine.team.size:
                        engine.team.store.set(f"{_prefix(wanted)}/{_ENDED}", b"1")
                left = [f"{_prefix(wanted)}/{_BELOW}/{key}" for key in part.counters.retired]
                if part.rank == 0 and part.size == engine.team.size:
                    left.append(f"{_prefix(wanted)}/{_RANKS}")
                meetings.outdated = manager.group, [_key(wanted, engine.team.rank), *left]
            meetings.last = wanted
            return result
        except _Late:
            raise
        except CommunicationError as error:
            if not engine.failures.outlives_exchange(error):
                raise


class _Late(CommunicationError):
    """A rank that trains has not come."""


_RANKS, _BELOW, _ENDED = "ranks", "work", "ended"


def _is_free(module: nn.Module) -> bool:
    return attachments[module].engine.state.lost_step is LostStep.FREE


def _prefix(number: Number) -> str:
    return f"meeting/{number[0]}/{number[1]}"


def _key(number: Number, rank: int) -> str:
    return f"{_prefix(number)}/{rank}"


def _part(manager: RecoveryManager, team: Team, ranks: list[int], number: Number) -> Team:
    """`ranks` as a team, in that order."""
    store = team.store.under(f"{_prefix(number)}/{_BELOW}")
    timeout = timedelta(seconds=manager.options.max_blocked_s)
    return Team(ranks.index(team.rank), len(ranks), store, timeout, "gloo", team.name, team.node, alert=team.alert)


def those_who_come(
    manager: RecoveryManager, team: Team, what: str, number: Number, moved: int, free: bool
) -> list[int]:
    """All ranks but those that have begun the next step instead; the same list on all, which one of them has made.

    Raises:
        CommunicationError: the members have changed, the store is lost, or a rank did neither within `max_blocked_s`.
    """
    if team.size == 1:
        return [0]
    store, chosen = team.store, f"{_prefix(number)}/{_RANKS}"
    store.set(_key(number, team.rank), str(moved))
    waiting, steps_taken = set(range(team.size)), dict[int, int]()
    began, told = time.monotonic(), False
    while waiting and not store.check([chosen]):
        manager.check_group()
        for rank in sorted(waiting):
            if store.check([_key(number, rank)]):
                steps_taken[rank] = int(store.get(_key(number, rank)))
                waiting.discard(rank)
            elif not free and manager.meetings.passed_over(team, rank, number[0]):
                waiting.discard(rank)
        waited_s = time.monotonic() - began
        if waiting and waited_s > min(_PATIENCE_S, manager.options.max_blocked_s):
            late = f"{what}: rank {', '.join(map(str, sorted(waiting)))} did not arrive within {waited_s:.3g} s"
            if waited_s > manager.options.max_blocked_s:
                raise _Late(late)
            if not told:
                _log.warning("%s; still waiting for it", late)
            told = True
        time.sleep(min(max(0.1 * waited_s, _POLL_S[0]), _POLL_S[1]) if waiting else 0.0)
    mine = sorted(steps_taken, key=lambda rank: (steps_taken[rank], rank))
    ranks: list[int] = decode(bytes(store.compare_set(chosen, "", encode(mine))))
    group, keys = manager.meetings.outdated
    if group == manager.group:  # all ranks have come here since they read them, or have made steps
        for key in keys:
            store.delete_key(key)
    manager.meetings.outdated = 0, []
    return ranks


def _await_end(manager: RecoveryManager, team: Team, what: str, number: Number) -> None:
    deadline = time.monotonic() + manager.options.max_blocked_s
    while not team.store.check([f"{_prefix(number)}/{_ENDED}"]):
        manager.check_group()
        if time.monotonic() > deadline:
            raise _Late(f"{what}: the other ranks did not end it within {manager.options.max_blocked_s:g} s")
        time.sleep(_POLL_S[1])
