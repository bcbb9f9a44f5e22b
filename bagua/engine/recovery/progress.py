"""How far the user's loop is, which travels with the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Division", "Progress"]

_MAX_DIVISIONS = 1000  # kept for a loop that takes none over


@dataclass(frozen=True)
class Division:
    """Among which ranks the samples of a step are divided.

    Attributes:
        step: the first one; the number of steps that the rank furthest ahead had completed when the groups were opened.
        rank: this one.
        size: number of ranks.
    """

    step: int
    rank: int
    size: int


@dataclass(eq=False)
class Progress:
    """State of the user's loop beside weights and optimizers: the place in the data, schedulers, counters.

    Attributes:
        tell: returns it, as of the last step that counts; None if no loop has registered any.
        received: that of the job, which the loop of this rank has yet to take over; None if there is none.
        divisions: those that the loop has yet to take over, oldest first.
        repeats: the loop repeats a step that was lost, with the same samples. So no rank skips one.
        begun: the step in progress has begun before its batch was chosen.
    """

    tell: Callable[[], bytes] | None = None
    received: bytes | None = None
    divisions: list[Division] = field(default_factory=list)
    repeats: bool = False
    begun: bool = False

    def report(self) -> bytes:
        """For ranks that lack it; empty if there is none."""
        if self.received is not None:
            return self.received
        return self.tell() if self.tell is not None else b""

    def receive(self, report: bytes) -> None:
        """Keep the report of another rank until the loop takes it over."""
        if report:
            self.received = report

    def divide(self, step: int, rank: int, size: int) -> None:
        """New groups are in use. A rank that is behind the others gets there with the samples that it had before."""
        if self.tell is None:
            self.divisions.clear()
        self.divisions.append(Division(step, rank, size))
        del self.divisions[:-_MAX_DIVISIONS]
