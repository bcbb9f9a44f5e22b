"""One launch, cut into parts that run on several lanes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bagua.comm.groups import Groups
from bagua.engine.guard import Probe
from bagua.exchanges import Exchange, PayloadSource, State

__all__ = ["InPieces", "Run"]


@dataclass(frozen=True, eq=False)
class Run:
    """One exchange of one part, ready to go.

    Attributes:
        x_N: the part.
        idle: the group has a single rank, with which the exchange does nothing.
        probe: measures the compression error, or None.
        key: bucket and part.
        gathers: see `Group`.
        source: where the elements of `x_N` are, if they are not there yet.
    """

    exchange: Exchange
    x_N: Tensor
    state: State
    groups: Groups
    step: int
    idle: bool
    probe: Probe | None
    key: tuple[int, int]
    gathers: bool
    source: PayloadSource | None = None

    def __call__(self) -> None:
        """Exchange."""
        if self.idle:
            return
        self.groups.begin(self.key[0], self.gathers)
        if self.source is not None:
            self.exchange.run_from(self.source, self.state, self.groups, self.step)
        elif self.probe is None:
            self.exchange.run(self.x_N, self.state, self.groups, self.step)
        else:
            self.probe.run(self.exchange, self.x_N, self.state, self.groups, self.step, self.key)

    def begin(self, held: State) -> None:
        """The first phase of an exchange that has two."""
        self.exchange.begin(self.x_N, self.state, self.groups, held)

    def finish(self, held: State) -> None:
        """The second one."""
        self.groups.begin(self.key[0], self.gathers)
        self.exchange.finish(self.state, self.groups, held)


class InPieces:
    """Runs `before` once, before the first part, and `after` once, after all parts have succeeded.

    The part that was submitted first runs `before`, the others wait for it. That cannot deadlock: lanes are first in
    first out, so what a part waits for was submitted earlier, as was all that this waits for.
    """

    def __init__(self, num_parts: int, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        self._before, self._after = before, after
        self._first, self._single = True, num_parts == 1
        self._begun = threading.Event()
        self._go = False
        self._left = num_parts
        self._lock = threading.Lock()

    def wrap(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return the job of the next part."""
        first, self._first = self._first, False

        def job() -> None:
            try:
                self._run(run, first)
            except BaseException:
                # They may lead to the ticket, and its error through the frame of this function here: no cycle.
                self._before = self._after = None
                raise

        return job

    def _run(self, run: Callable[[], None], first: bool) -> None:
        if self._before is not None or not self._single:
            if first:
                self._begin()
            else:
                self._begun.wait()
            if not self._go:
                return
        run()
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last and self._after is not None:
            self._after()

    def _begin(self) -> None:
        try:
            self._go = self._before is None or self._before() is not False
        finally:
            self._begun.set()
