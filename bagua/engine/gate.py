"""Meetings of all ranks' lanes, through the store: everyone takes part in the n-th, or nobody does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Gate"]

_PAUSE_S = (0.0005, 0.05)  # first and longest sleep between two looks into the store
_GO, _OFF, _LEFT = b"go", b"off", b"left "


class Gate:
    """Where a lane's thread waits for the other ranks' before it starts what cannot be broken off.

    Ranks pass meetings 0, 1, 2, ... in order. Each meeting gets one verdict, the first that anybody writes: "go"
    by the last rank that enters, "off" by one that gives up, "left" by one whose lane has ended. So all ranks
    agree which meetings took place, however early, late or not at all they come; and since they wait here and not
    in a collective, a rank may stay away for as long as it likes, or for good.

    Args:
        store: shared by all ranks.
        prefix: new in the store and the same on all ranks.
        patience_s: after so long the ranks that are late are named in `remark`.

    Attributes:
        over: no meeting will take place any more.
        remark: why, or who is late; "" if there is nothing to say.
        urgent: whether `remark` tells of trouble; a rank that has ended in order is none.
        waited_s: seconds spent in `enter`.
        closing: set when this rank's lane is to end.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int, patience_s: float) -> None:
        self.over = False
        self.remark = ""
        self.urgent = False
        self.waited_s = 0.0
        self.closing = threading.Event()
        self._store, self._prefix, self._rank, self._size = store, prefix, rank, size
        self._patience_s = patience_s
        self._next = 0
        self._oldest = 0  # first meeting whose keys are still in the store

    def enter(self, give_up: Callable[[], bool]) -> bool:
        """Wait for the next meeting; whether it takes place. Once it does, every rank must do its part.

        Args:
            give_up: asked now and then; true calls the meeting off, unless all have entered.
        """
        if self.over:
            return False
        number, self._next = self._next, self._next + 1
        started = time.perf_counter()
        try:
            verdict = self._verdict(number, give_up)
        except (RuntimeError, OSError) as error:
            self._end(f"the store is out of reach, the rank that serves it is probably gone: {error}", True)
            return False
        finally:
            self.waited_s += time.perf_counter() - started
        if verdict.startswith(_LEFT):
            self._end(f"rank {int(verdict[len(_LEFT) :])} has left", False)
        return verdict == _GO

    def leave(self) -> None:
        """Call all further meetings off, for every rank. For the lane's own thread, when it ends."""
        if not self.over:
            try:
                self._decide(self._next, _LEFT + str(self._rank).encode())
            except (RuntimeError, OSError):
                self.urgent = True  # there is no store left to tell it to
            self.over = True

    def _verdict(self, number: int, give_up: Callable[[], bool]) -> bytes:
        self._store.set(f"{self._prefix}/at/{self._rank}", str(number))
        if self._store.add(f"{self._prefix}/{number}/entered", 1) == self._size:
            return self._decide(number, _GO)
        deadline, pause = time.monotonic() + self._patience_s, _PAUSE_S[0]
        # Polling, not store.wait(): that holds the client's lock, which other threads of this rank need.
        while not self._store.check([f"{self._prefix}/{number}/verdict"]):
            if self.closing.is_set():
                return self._decide(number, _LEFT + str(self._rank).encode())
            if give_up():
                return self._decide(number, _OFF)
            if time.monotonic() > deadline:
                late = ", ".join(map(str, self._late(number)))
                self.remark, self.urgent = (
                    f"rank {late} did not come within {self._patience_s:g} s and is still awaited",
                    True,
                )
                deadline = float("inf")
            self.closing.wait(pause)
            pause = min(2 * pause, _PAUSE_S[1])
        return self._seen(number, bytes(self._store.get(f"{self._prefix}/{number}/verdict")))

    def _decide(self, number: int, verdict: bytes) -> bytes:
        """Write the verdict unless there is one; return the one that holds."""
        return self._seen(number, bytes(self._store.compare_set(f"{self._prefix}/{number}/verdict", "", verdict)))

    def _seen(self, number: int, verdict: bytes) -> bytes:
        if verdict == _GO and self._rank == 0:  # all have entered it, so all have done with those before
            for old in range(self._oldest, number):
                self._store.delete_key(f"{self._prefix}/{old}/entered")
                self._store.delete_key(f"{self._prefix}/{old}/verdict")
            self._oldest = number
        return verdict

    def _late(self, number: int) -> list[int]:
        late = []
        for rank in range(self._size):
            key = f"{self._prefix}/at/{rank}"
            if not self._store.check([key]) or int(self._store.get(key)) < number:
                late.append(rank)
        return late

    def _end(self, remark: str, urgent: bool) -> None:
        self.over, self.remark, self.urgent = True, remark, urgent
