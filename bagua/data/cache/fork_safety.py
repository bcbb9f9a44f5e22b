"""Forking while files are mapped: everything is closed before a fork and opened again after it, on both sides.

LMDB must not be used, nor even closed, in a process that inherited it (LMDB's documentation, "Caveats").
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Protocol

__all__ = ["ForkLock"]

_PATIENCE_S = 10.0  # a fork waits that long for a transaction to end


class Closable(Protocol):
    """Something that reopens by itself."""

    def suspend(self) -> None:
        """Close for now. Nobody holds the lock."""
        ...

    def abandon(self) -> None:
        """Forget what was inherited from the parent process, without touching it."""
        ...


class ForkLock:
    """Shared lock between threads and forks: `with lock:` around every use of the members.

    A fork waits until no thread holds the lock, and suspends the members.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._members: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._holders = 0
        self._forking = False
        self._registered = False

    def add(self, member: Closable) -> None:
        """Have `member` suspended at every fork, as long as it lives."""
        with self._condition:
            self._members.add(member)
            if not self._registered:
                self._registered = True
                os.register_at_fork(
                    before=self._before, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
                )

    def __enter__(self) -> None:
        with self._condition:
            while self._forking:
                self._condition.wait()
            self._holders += 1

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._condition:
            self._holders -= 1
            if self._forking:
                self._condition.notify_all()

    def _before(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._forking, _PATIENCE_S)
            self._forking = True
            # After that long the fork goes ahead with open members; the child then cannot use them, and computes.
            if self._condition.wait_for(lambda: self._holders == 0, _PATIENCE_S):
                for member in list(self._members):
                    member.suspend()

    def _after_in_parent(self) -> None:
        with self._condition:
            self._forking = False
            self._condition.notify_all()

    def _after_in_child(self) -> None:
        self._condition = threading.Condition()
        self._holders, self._forking = 0, False
        for member in list(self._members):
            member.abandon()
