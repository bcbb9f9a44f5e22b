"""A gate whose rounds close once a quorum is ready; ranks that are late take part with nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bagua.algorithms.views import Ballot
from bagua.comm.store import BoundedStore
from bagua.engine.lanes.gate import GO, LEFT, LOST, OFF, PAUSE_S, Gate
from bagua.errors import CommunicationError

__all__ = ["QuorumGate"]

_READY = 0.5  # how far before a round a rank is that is ready for it, while the round is open


class QuorumGate(Gate):
    """Decides once for all ranks when a round closes, and who contributes what.

    A round goes through two phases. While it is open, ranks count themselves as they become ready. A ready rank that
    sees the quorum, and then all ranks or the end of the grace, closes it. Then every rank's lane enters it, at once,
    whatever its training thread does, and leaves an offer, empty if it is not ready. The last one to enter writes the
    verdict with all offers. So the verdicts in the store are a log, and all ranks read the same members and weights.

    Args:
        quorum: ranks that must contribute.
        grace: how long a round stays open once the quorum is ready, relative to the time until then.
    """

    def __init__(
        self, store: BoundedStore, prefix: str, rank: int, size: int, patience_s: float, quorum: int, grace: float
    ) -> None:
        super().__init__(store, prefix, rank, size, patience_s)
        self._quorum, self._grace = quorum, grace

    def merge(self, ballot: Ballot) -> list[tuple[float, ...]] | None:
        """Wait until the next round closes; return the offers of all ranks, or None if it does not take place."""
        if self.over:
            return None
        number, self._next = self._next, self._next + 1
        started = time.perf_counter()
        self._inside = True
        try:
            if not self._await_close(number, ballot):
                verdict = self._decide(number, self._farewell() if self.closing.is_set() else OFF)
            else:
                verdict = self._enter_with(number, ballot)
        except CommunicationError as error:
            self.fail()  # a rank that was not ready has not counted as alone until now
            self._end(str(error), True)
            return None
        finally:
            self.waited_s += time.perf_counter() - started
            self._inside = False
        if verdict.startswith((LOST, LEFT)):
            kind = LOST if verdict.startswith(LOST) else LEFT
            how = "failed" if kind == LOST else "left"
            self.fail()  # nobody merges any more, so this rank is alone
            self._end(f"rank {int(verdict[len(kind) :])} has {how}", True)
            return None
        if not verdict.startswith(GO):
            return None
        self._alone_since = None
        return [_numbers(each) for each in verdict[len(GO) :].split(b";")]

    def _await_close(self, number: int, ballot: Ballot) -> bool:
        """Return True once the round has closed, False if this rank gives it up before."""
        opened, quorum_at, counted, pause = time.monotonic(), None, False, PAUSE_S[0]
        prefix = f"{self._prefix}/{number}"
        while not self._store.check([f"{prefix}/closed"]):
            if self.closing.is_set() or ballot.withdrawn():
                return False
            now = time.monotonic()
            if counted or ballot.ready():
                ready = self._store.add(f"{prefix}/ready", 0 if counted else 1)
                if not counted:
                    counted = True
                    self.fail()  # alone from now on, until a round has taken place
                    self._come_to(number - _READY)
                if ready >= self._quorum and quorum_at is None:
                    quorum_at = now
                if quorum_at is not None and (
                    ready == self._size or now >= quorum_at + self._grace * (quorum_at - opened)
                ):
                    self._store.set(f"{prefix}/closed", b"1")
                    return True
            self.closing.wait(pause)
            pause = min(2 * pause, PAUSE_S[1])
        return True

    def _enter_with(self, number: int, ballot: Ballot) -> bytes:
        prefix = f"{self._prefix}/{number}"
        self._store.set(f"{prefix}/offer/{self._rank}", " ".join(map(repr, ballot.offer())))
        last = self._store.add(f"{prefix}/entered", 1) == self._size
        verdict = self._merged(number) if last else b""
        self._come_to(number)
        return verdict or self._await_verdict(number, ballot.withdrawn)

    def _merged(self, number: int) -> bytes:
        """The verdict of the last rank to enter."""
        offers = [bytes(each) for each in self._store.multi_get(self._offers(number))]
        # A rank may have withdrawn what it was ready with, to save its state.
        enough = sum(_numbers(each)[0] > 0 for each in offers) >= self._quorum
        return self._decide(number, GO + b";".join(offers) if enough else OFF)

    def _decide(self, number: int, verdict: bytes) -> bytes:
        held = super()._decide(number, verdict)
        self._store.set(f"{self._prefix}/{number}/closed", b"1")  # wakes those for whom it is still open
        return held

    def _late(self, number: float, store: BoundedStore) -> list[int]:
        closed = store.check([f"{self._prefix}/{number}/closed"])
        return super()._late(number if closed else number - _READY, store)

    def _offers(self, number: int) -> Sequence[str]:
        return [f"{self._prefix}/{number}/offer/{rank}" for rank in range(self._size)]

    def _keys_of(self, number: int) -> list[str]:
        more = [f"{self._prefix}/{number}/{what}" for what in ("ready", "closed")]
        return [*super()._keys_of(number), *more, *self._offers(number)]


def _numbers(offer: bytes) -> tuple[float, ...]:
    return tuple(float(each) for each in offer.split())
