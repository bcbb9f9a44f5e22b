"""A gate in the store for background rounds: all ranks take part in a round, or none does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bagua.comm.store import BoundedStore
from bagua.errors import CommunicationError

__all__ = ["GO", "LEFT", "LOST", "OFF", "PAUSE_S", "Gate"]

PAUSE_S = (0.0005, 0.05)  # first and longest sleep between two looks into the store
_COUNT = 1 << 16  # more than there are ranks
_GRACE_S = 3.0  # to find out who is missing, once this rank gives up
GO, OFF, LEFT, LOST, _ENDED = b"go", b"off", b"left ", b"lost ", b"ended"


class Gate:
    """Where a lane's thread waits for the other ranks before it starts a collective, which cannot be cancelled.

    Ranks pass rounds 0, 1, 2, ... in order. Each round gets one verdict, the first that any rank writes: "go"
    by the last rank that enters, "off" by one that gives up, "left" by one whose lane has ended, "lost" by one that an
    exception ends. So all ranks
    agree on which rounds took place, whether a rank arrives early, late or never. Since they wait here and not
    in a collective, a rank may stay away for any time without a timeout.

    Args:
        store: shared by all ranks; its calls end within the process group's timeout.
        prefix: new in the store and the same on all ranks.
        patience_s: after so long the ranks that are late are named in `remark`.

    Attributes:
        over: no further round will take place.
        remark: why, or who is late; "" if there is nothing to say.
        urgent: whether `remark` is a warning; a rank that exited normally is not.
        waited_s: seconds spent in `enter`.
        total: sum of what the ranks have brought to the last round that took place.
        closing: set when this rank's lane is to end.
        failing: an exception ends this rank.
    """

    def __init__(self, store: BoundedStore, prefix: str, rank: int, size: int, patience_s: float) -> None:
        self.over = False
        self.remark = ""
        self.urgent = False
        self.waited_s = 0.0
        self.total = 0
        self.closing = threading.Event()
        self.failing = False
        self._alone_since: float | None = None  # no round has taken place since then, though no rank cancelled one
        self._store, self._prefix, self._rank, self._size = store, prefix, rank, size
        self._patience_s = patience_s
        self._next = 0
        self._inside = False  # a round has been entered and has no verdict
        self._oldest = 0  # first round whose keys are still in the store

    def enter(self, give_up: Callable[[], bool], number: int = 0) -> bool:
        """Wait for the next round; returns whether it takes place. If it does, every rank must take part.

        Args:
            give_up: polled; true cancels the round, unless all ranks have entered.
            number: what this rank brings, from 0 to less than 2^47 over all ranks; `total` is the sum.
        """
        if self.over:
            return False
        at, self._next = self._next, self._next + 1
        started = time.perf_counter()
        self._alone_since, self._inside = time.monotonic(), True
        try:
            verdict = self._verdict(at, give_up, number)
        except CommunicationError as error:
            self._end(str(error), True)
            return False
        finally:
            self.waited_s += time.perf_counter() - started
            self._inside = False
        if verdict.startswith(LOST):
            self._end(f"rank {int(verdict[len(LOST) :])} has failed", True)
            return False
        self._alone_since = None
        if verdict.startswith(LEFT):
            self._end(f"rank {int(verdict[len(LEFT) :])} has left", False)
        if not verdict.startswith(GO):
            return False
        self.total = int(verdict[len(GO) :])
        return True

    def leave(self) -> None:
        """Cancel all further rounds for every rank. Called by the lane's own thread when it ends."""
        if not self.over:
            try:
                self._store.set(f"{self._prefix}/at/{self._rank}", _ENDED)
                # Others may have cancelled rounds that this rank never entered.
                while not self._decide(self._next, self._farewell()).startswith((LEFT, LOST)):
                    self._next += 1
            except CommunicationError:
                self.urgent = True  # the store is gone
            self.over = True

    def give_up_after(self, seconds: float) -> None:
        """Limit how long this rank continues without the others. Costs nothing while rounds take place.

        Args:
            seconds: longest time without a round because a rank failed, is gone or does not respond. A rank that exited
                normally, or cancels rounds, does not count.

        Raises:
            CommunicationError: that time is over; names the ranks.
        """
        since = self._alone_since
        if since is not None and (alone_s := time.monotonic() - since) > seconds:
            raise CommunicationError(f"no exchange for {alone_s:.0f} s, rank {self._rank} gives up: {self._trouble()}")

    def fail(self) -> None:
        """Record that an exchange failed; no other will start."""
        if self._alone_since is None:
            self._alone_since = time.monotonic()

    def keys(self) -> list[str]:
        """What this rank may delete when all lanes of this gate have ended."""
        rounds = range(self._oldest, self._next + 1)
        return [f"{self._prefix}/at/{self._rank}", *(key for number in rounds for key in self._keys_of(number))]

    def _keys_of(self, number: int) -> list[str]:
        return [f"{self._prefix}/{number}/{what}" for what in ("entered", "verdict")]

    def _trouble(self) -> str:
        if self.over and self.remark:
            return self.remark
        try:
            number = self._next - self._inside  # the round in progress, or the one that never started
            late = [rank for rank in self._late(number, self._store.within(_GRACE_S)) if rank != self._rank]
        except CommunicationError as error:
            return str(error)
        return f"no response from rank {', '.join(map(str, late))}" if late else "an exchange failed"

    def _farewell(self) -> bytes:
        return (LOST if self.failing else LEFT) + str(self._rank).encode()

    def _verdict(self, number: int, give_up: Callable[[], bool], brought: int) -> bytes:
        total, entered = divmod(self._store.add(f"{self._prefix}/{number}/entered", 1 + _COUNT * brought), _COUNT)
        verdict = self._decide(number, GO + str(total).encode()) if entered == self._size else b""
        self._come_to(number)
        return verdict or self._await_verdict(number, give_up)

    def _come_to(self, number: float) -> None:
        """Record that this rank has entered a round.

        After the count and the verdict: a rank that ends between them would hold the round up and not be named.
        """
        self._store.set(f"{self._prefix}/at/{self._rank}", str(number))

    def _await_verdict(self, number: int, give_up: Callable[[], bool]) -> bytes:
        """After this rank has entered the round."""
        deadline, pause = time.monotonic() + self._patience_s, PAUSE_S[0]
        # Polling, not store.wait(): that holds the client's lock, which other threads of this rank need.
        while not self._store.check([f"{self._prefix}/{number}/verdict"]):
            if self.closing.is_set():
                return self._decide(number, self._farewell())
            if give_up():
                return self._decide(number, OFF)
            if time.monotonic() > deadline:
                late = ", ".join(map(str, self._late(number, self._store)))
                self.remark, self.urgent = (
                    f"rank {late} did not arrive within {self._patience_s:g} s; still waiting for it",
                    True,
                )
                deadline = float("inf")
            self.closing.wait(pause)
            pause = min(2 * pause, PAUSE_S[1])
        return self._seen(number, bytes(self._store.get(f"{self._prefix}/{number}/verdict")))

    def _decide(self, number: int, verdict: bytes) -> bytes:
        """Write the verdict unless there is one; return the one that holds."""
        return self._seen(number, bytes(self._store.compare_set(f"{self._prefix}/{number}/verdict", "", verdict)))

    def _seen(self, number: int, verdict: bytes) -> bytes:
        if verdict.startswith(GO):  # all have entered it, so all have done with those before
            for old in range(self._oldest, number) if self._rank == 0 else ():
                for key in self._keys_of(old):
                    self._store.delete_key(key)
            self._oldest = number
        return verdict

    def _late(self, number: float, store: BoundedStore) -> list[int]:
        """Ranks that have not entered a round."""
        late = []
        for rank in range(self._size):
            key = f"{self._prefix}/at/{rank}"
            at = bytes(store.get(key)) if store.check([key]) else b"-1"
            if at != _ENDED and float(at) < number:
                late.append(rank)
        return late

    def _end(self, remark: str, urgent: bool) -> None:
        self.over, self.remark, self.urgent = True, remark, urgent
