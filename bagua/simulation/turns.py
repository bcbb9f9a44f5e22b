"""Ranks take turns: each has a thread, and exactly one of them runs at any moment."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Deadlock", "Turns"]

_log = logging.getLogger("bagua")


class Deadlock(RuntimeError):
    """Every rank waits for another one."""


class _Cancelled(BaseException):
    """Another rank failed; unwinds this one."""


class Turns:
    """A baton that goes round in rank order, so that a run is the same every time.

    A rank keeps the baton until it waits for something that is not there yet.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0  # whose turn it is
        self._baton = threading.Condition()
        self._over: set[int] = set()
        self._idle = 0  # handed on so many times in a row without anyone getting further
        self._failed: BaseException | None = None

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call `function(rank)` for every rank; returns the results by rank.

        Raises:
            Deadlock: all ranks wait.
            BaseException: the first exception of a rank; the log names the rank.
        """
        results: list[Any] = [None] * self.size

        def main(rank: int) -> None:
            try:
                with self._baton:
                    self._baton.wait_for(lambda: self.rank == rank)
                self._check()
                results[rank] = function(rank)
            except _Cancelled:
                pass
            except BaseException as error:
                if self._failed is None:
                    self._failed = error
                    _log.error("rank %d failed", rank)
            finally:
                self._over.add(rank)
                self._idle = 0
                self._pass_on()

        threads = [threading.Thread(target=main, args=(rank,), name=f"bagua-rank-{rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed
        return results

    def wait_for(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let others run until `ready()`; called by the rank whose turn it is."""
        while not ready():
            self._idle += 1
            if self._idle > 2 * self.size:
                raise Deadlock(f"rank {rank} waits for {what}, and every other rank waits too or has finished")
            self._pass_on()
            with self._baton:
                self._baton.wait_for(lambda: self.rank == rank)
            self._check()
        self._idle = 0

    def _check(self) -> None:
        if self._failed is not None:
            raise _Cancelled

    def _pass_on(self) -> None:
        with self._baton:
            for step in range(1, self.size + 1):
                following = (self.rank + step) % self.size
                if following not in self._over:
                    self.rank = following
                    break
            self._baton.notify_all()
