"""Meetings of the ranks between two steps: which is next, and which ranks have begun a step instead of coming to it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from bagua.comm.team import Team
from bagua.errors import CommunicationError

__all__ = ["Meetings", "Number"]

Number = tuple[int, int]
"""Of a meeting: the steps that count when it is held, and its place among those of that step."""
_AT_ANY_STEP = 1 << 62  # in place of the steps where each rank counts its own


class Meetings:
    """What one rank knows of meetings.

    Attributes:
        last: the last one that has ended, on whichever rank; equal on all ranks when groups have been opened.
        outdated: keys of the last one, with the group whose store holds them.
    """

    def __init__(self) -> None:
        self.last: Number = (-1, 0)
        self.outdated: tuple[int, list[str]] = (0, [])
        self._begun = 0  # group in which this rank has made a step

    def next(self, step: int, free: bool) -> Number:
        """The one that this rank comes to now.

        Args:
            step: steps that count.
            free: each rank counts its own; the same on all ranks.
        """
        step = _AT_ANY_STEP if free else step
        return step, self.last[1] + 1 if self.last[0] == step else 1

    def hear(self, lasts: Sequence[Sequence[int]]) -> None:
        """The ranks have told each other their last ones."""
        self.last = max((int(step), int(place)) for step, place in lasts)

    def begins(self, team: Team, group: int, step: int) -> None:
        """This rank begins a step after `step` others. If it is its first in `group`, others may wait for it there.

        They took over weights, or it did, so that it is beyond the place in the user's loop at which they meet.
        """
        if self._begun == group or team.size == 1:
            return
        self._begun = group
        with suppress(CommunicationError):  # then the step is lost, too, and with it the group
            team.store.set(_key(team.rank), str(step))

    @staticmethod
    def passed_over(team: Team, rank: int, step: int) -> bool:
        """Whether the first step of `rank` in this group was the one after `step`.

        Raises:
            CommunicationError: the members have changed, or the store is lost.
        """
        return team.store.check([_key(rank)]) and int(team.store.get(_key(rank))) == step


def _key(rank: int) -> str:
    return f"begun/{rank}"
