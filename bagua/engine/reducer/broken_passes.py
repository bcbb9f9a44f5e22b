"""Backward passes interrupted by an exception: all ranks agree on one verdict for each.

An interrupted rank posts the pass in the store. If the same pass was interrupted on every rank, it is void, and
training continues. If one rank completed it, that rank lacks gradients of the others: then the pass
fails on all ranks. This costs nothing without an exception: a rank polls the store only while it waits for longer
than is usual.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["LOOK_S", "BrokenPasses"]

LOOK_S = 0.5  # how long a rank waits for an exchange before it looks whether another has given the pass up
_PATIENCE_S = 30.0  # after an interrupted pass, for ranks that may not wait for it: they have made their last step, say
_POLL_S = (0.001, 0.05)
_VOID = b"void"


class BrokenPasses:
    """The passes of one distributed module.

    Args:
        store: shared by the team; keys are made under `prefix`, which is new for each module and equal on all ranks.
        timeout_s: of the process group.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int, timeout_s: float) -> None:
        self._store, self._prefix, self._rank, self._size = store, prefix, rank, size
        self._patience_s = min(timeout_s, _PATIENCE_S)
        self._posted = -1  # the last pass that was interrupted on this rank
        self._void = -1  # the last pass that was interrupted on all ranks

    def post(self, number: int) -> None:
        """Post that pass `number` was interrupted on this rank."""
        if number != self._posted:
            self._posted = number
            self._store.set(f"{self._prefix}/{number}/{self._rank}", b"1")
            self._store.set(f"{self._prefix}/last", str(number))

    def settle(self, number: int, void: bool) -> list[int]:
        """On a rank whose pass `number` was interrupted: wait for the verdict.

        Args:
            void: whether this rank can still take part in what all ranks would have to do together.

        Returns:
            The ranks on which it was interrupted; none if it was on all.
        """
        self.post(number)
        keys = [f"{self._prefix}/{number}/{rank}" for rank in range(self._size)]
        verdict, deadline, pause = f"{self._prefix}/{number}/verdict", time.monotonic() + self._patience_s, _POLL_S[0]
        while void and not self._store.check([verdict]):
            if self._store.check(keys):
                self._store.compare_set(verdict, "", _VOID)
            elif time.monotonic() > deadline:
                break
            else:
                time.sleep(pause)
                pause = min(2 * pause, _POLL_S[1])
        return self._decide(number, self._store)

    def look(self, number: int, limit_s: float) -> list[int]:
        """Return the ranks on which pass `number` or the one before was interrupted; called while this rank waits.

        Raises:
            CommunicationError: the store gave no answer within `limit_s`. It may be asked again: verdicts stay.
        """
        if self._size == 1:
            return []
        store, key = self._store.within(limit_s), f"{self._prefix}/last"
        if not store.check([key]):
            return []
        last = int(bytes(store.get(key)))
        return self._decide(last, store) if self._void < last <= number and last != self._posted else []

    def _decide(self, number: int, store: Any) -> list[int]:
        """Have a verdict, the one that was written first; returns the ranks to blame."""
        posted = [rank for rank in range(self._size) if store.check([f"{self._prefix}/{number}/{rank}"])]
        text = ",".join(map(str, posted)).encode()
        found = bytes(store.compare_set(f"{self._prefix}/{number}/verdict", "", text))
        if found == _VOID:
            self._void = number
            return []
        return [int(rank) for rank in found.split(b",")]
