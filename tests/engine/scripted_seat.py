"""A connection to an agent that answers as it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagua.membership.actions import Verdict
from bagua.membership.seat import View

__all__ = ["ScriptedSeat", "view"]


def view(group: int, *members: str, rank: int | None = 0, store: str = "nowhere:1", reason: str = "start") -> View:
    """The groups of an epoch of that number."""
    return View(epoch=group, group=group, step=0, members=members, rank=rank, store=store, reason=reason)


class ScriptedSeat:
    """A `Seat`.

    Args:
        now: what `view` returns.
        answers: of the agent to what it is asked, one after the other; then it grants everything, or repeats the last.

    Attributes:
        asked: name and arguments of each call but `view`.
        then: what `view` returns once the rank has said that it wants weights, and has looked; None: the same.
    """

    def __init__(self, now: View | None, answers: Sequence[Verdict] = (), repeats: bool = False) -> None:
        self.name, self.now = "n0", now
        self.then: View | None = None
        self.asked: list[tuple[Any, ...]] = []
        self._answers, self._repeats = list(answers), repeats

    def _answer(self, *call: Any) -> Verdict:
        self.asked.append(call)
        if not self._answers:
            return Verdict.GRANTED
        return self._answers[0] if self._repeats else self._answers.pop(0)

    def view(self) -> View | None:
        """See `Seat`."""
        now = self.now
        if self.then is not None and ("wants_weights",) in self.asked:
            self.now, self.then = self.then, None
        return now

    def wants_weights(self) -> None:
        """See `Seat`."""
        self.asked.append(("wants_weights",))

    def await_group(self, after: int, timeout_s: float) -> View:
        """See `Seat`."""
        if self.now is None or self.now.group <= after:
            raise TimeoutError(f"no new epoch within {timeout_s:g} s")
        return self.now

    def start_step(self, group: int, step: int) -> Verdict:
        """See `Seat`."""
        return self._answer("start", group, step)

    def finish_step(self, group: int, step: int) -> Verdict:
        """See `Seat`."""
        return self._answer("finish", group, step)

    def arrived(self, group: int, step: int) -> None:
        """See `Seat`."""
        self.asked.append(("arrived", group, step))

    def weights_fetched(self, epoch: int, step: int) -> Verdict:
        """See `Seat`."""
        return self._answer("fetched", epoch, step)

    def exchange_failed(self, group: int) -> None:
        """See `Seat`."""
        self.asked.append(("failed", group))

    def close(self) -> None:
        """See `Seat`."""
