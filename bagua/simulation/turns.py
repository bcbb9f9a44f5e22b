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
        self._baton = [threading.Lock() for _ in range(size)]  # held while it is not the rank's turn
        self._waits: dict[int, Callable[[], bool]] = {}  # of ranks that wait: whether they could go on
        self._over: set[int] = set()
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
                self._baton[rank].acquire()
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
                self._waits.pop(rank, None)
                following = None if self._failed is not None else self._following()
                self._hand_on(self._following(anyone=True) if following is None else following)

        for baton in self._baton[1:]:
            baton.acquire()
        threads = [threading.Thread(target=main, args=(rank,), name=f"bagua-rank-{rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed
        return results

    def wait_for(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let others run until `ready()`; called by the rank whose turn it is.

        `ready` is called by other ranks' threads too, and has no side effects.
        """
        while not ready():
            self._waits[rank] = ready
            following = self._following()
            if following is None:
                del self._waits[rank]
                raise Deadlock(f"rank {rank} waits for {what}, and every other rank waits too or has finished")
            self._hand_on(following)
            self._baton[rank].acquire()
            del self._waits[rank]
            self._check()

    def _check(self) -> None:
        if self._failed is not None:
            raise _Cancelled

    def _following(self, anyone: bool = False) -> int | None:
        """The next rank in order that could go on; with `anyone`, the next that has not finished."""
        for step in range(1, self.size + 1):
            rank = (self.rank + step) % self.size
            if rank not in self._over and (anyone or self._could_go_on(rank)):
                return rank
        return None

    def _could_go_on(self, rank: int) -> bool:
        ready = self._waits.get(rank)
        try:
            return ready is None or ready()
        except Exception:  # the rank gets it when it asks by itself
            return True

    def _hand_on(self, rank: int | None) -> None:
        if rank is not None:
            self.rank = rank
            self._baton[rank].release()
