"""Simulated time, and links that delay, lose and repeat messages or are down."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable


class Network:
    """The clock of a run, what is to happen when, and the links between addresses.

    Args:
        draws: decides everything; shared with the rest of the run.
        faulty: False for links that lose nothing.

    Attributes:
        trace: the last events, for people.
        count: of events so far.
        cut: one-way links that are down.
        loss: chance that a message is lost.
    """

    def __init__(self, draws: random.Random, faulty: bool) -> None:
        self.random, self.now, self.count = draws, 0.0, 0
        self.trace: deque[str] = deque(maxlen=60)
        self.cut: set[tuple[str, str]] = set()
        self.loss = draws.choice((0.0, 0.02, 0.1, 0.3)) if faulty else 0.0
        self.slowest_s = draws.choice((0.01, 0.05, 0.3)) if faulty else 0.01
        self._events: list[tuple[float, int, Callable[[], None], str]] = []

    def at(self, when: float, what: Callable[[], None], text: str = "") -> None:
        """Do something later, and note `text` then."""
        self.count += 1
        heapq.heappush(self._events, (when, self.count, what, text))

    def after(self, wait_s: float, what: Callable[[], None], text: str = "") -> None:
        """Do something `wait_s` from now."""
        self.at(self.now + wait_s, what, text)

    def note(self, text: str) -> None:
        """Add to the trace."""
        self.trace.append(f"{self.now:8.3f} {text}")

    def run(self, until: float) -> None:
        """Run all events up to a time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, what, text = heapq.heappop(self._events)
            if text:
                self.note(text)
            what()
        self.now = until

    def delay(self) -> float:
        """Seconds that the next message takes."""
        return self.random.uniform(0.001, self.slowest_s)

    def copies(self) -> int:
        """How often the next message arrives."""
        return 0 if self.random.random() < self.loss else 2 if self.loss and self.random.random() < 0.05 else 1

    def linked(self, source: str, target: str) -> bool:
        """Whether messages get from one address to another now."""
        return (source, target) not in self.cut

    def sever(self, links: set[tuple[str, str]], lasts: float) -> None:
        """Cut one-way links for a while."""
        self.cut |= links
        self.note(f"cut {' '.join(f'{a}>{b}' for a, b in sorted(links))}")
        self.after(lasts, lambda: self.cut.difference_update(links), "heal")

    def calm(self) -> None:
        """From now on nothing is lost, and delays are short."""
        self.cut.clear()
        self.loss, self.slowest_s = 0.0, min(self.slowest_s, 0.05)
