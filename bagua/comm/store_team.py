"""Ranks that share a store: collectives on a few bytes through it, and who is missing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bagua.comm.store import BoundedStore
from bagua.errors import CommunicationError, RankMismatchError

__all__ = ["Counters", "StoreTeam", "decode", "decode_alike", "encode", "is_loss"]

_GRACE_S = 3.0  # for what remains to be asked when the time of a wait is over
_POLL_S = 0.05
_MAX_BROADCASTS = 8  # messages of `broadcast_bytes` in the store, until an all-gather lets them be deleted


@dataclass(eq=False)
class Counters:
    """Counters for store keys; equal on all ranks, because they count collectives.

    Attributes:
        collectives: number of all-gathers and broadcasts of bytes so far.
        broadcasts: number of broadcasts since the last all-gather.
        retired: this rank's keys, which no rank reads any more once it has begun the next all-gather.
    """

    collectives: int = 0
    lanes: int = 0
    broadcasts: int = 0
    retired: list[str] = field(default_factory=list)


@dataclass(eq=False)
class StoreTeam:
    """Ranks that share a store.

    Attributes:
        rank: this process's rank.
        size: number of ranks.
        store: a `torch.distributed` store that all members share, under a prefix of this team's own. Its calls end.
        timeout: how long to wait for a rank.
        counters: shared by all teams of the same process group.
        alert: called now and then while this rank waits for others in the store; may raise.
    """

    rank: int
    size: int
    store: Any
    timeout: timedelta
    counters: Counters = field(default_factory=Counters, kw_only=True)
    alert: Callable[[], object] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.store is not None and not isinstance(self.store, BoundedStore):
            self.store = BoundedStore(self.store, self.timeout.total_seconds(), alert=self.alert)

    def all_gather_bytes(self, what: str, payload: bytes) -> list[bytes]:
        """All-gather small messages through the store; returns those of all ranks, by rank. Collective over the team.

        Raises:
            CommunicationError: ranks did not arrive within `timeout`; names them.
        """
        if self.size == 1:
            return [payload]
        counters, deadline = self.counters, self._deadline()
        serial = self._next_serial()
        keys = [f"all_gather/{serial}/{rank}" for rank in range(self.size)]
        # A rank that begins this all-gather has read the results of all earlier collectives.
        retired, counters.retired, counters.broadcasts = counters.retired, [keys[self.rank]], 0
        self._store(what, lambda: self.store.set(keys[self.rank], payload))
        self._wait(keys, what, deadline)
        gathered = [bytes(each) for each in self._store(what, lambda: self._until(deadline).multi_get(keys))]
        self._delete(retired)
        return gathered

    def all_gather_bytes_once(
        self, what: str, name: str, payload: bytes, alert: Callable[[], object] | None = None
    ) -> list[bytes]:
        """As `all_gather_bytes`, under a name that is used once, beside other collectives.

        A rank may skip it. A thread may call it on a copy of the team with its own `counters.retired`.

        Args:
            alert: called now and then while this rank waits; may raise. Default: the team's.
        """
        if self.size == 1:
            return [payload]
        keys, deadline = [f"all_gather_once/{name}/{rank}" for rank in range(self.size)], self._deadline()
        self._store(what, lambda: self.store.set(keys[self.rank], payload))
        self._wait(keys, what, deadline, alert)
        self.retire([keys[self.rank]])
        return [bytes(each) for each in self._store(what, lambda: self._until(deadline).multi_get(keys))]

    def broadcast_bytes(self, what: str, payload: bytes | None) -> bytes:
        """Broadcast rank 0's `payload` through the store. Collective over the team; ranks other than 0 pass None.

        Raises:
            CommunicationError: rank 0 did not post it within `timeout`.
        """
        if self.size == 1:
            assert payload is not None
            return payload
        self.counters.broadcasts += 1
        if self.counters.broadcasts > _MAX_BROADCASTS:
            return self.all_gather_bytes(what, payload or b"")[0]
        deadline, key = self._deadline(), f"broadcast/{self._next_serial()}/0"
        if self.rank == 0:
            assert payload is not None
            self.counters.retired.append(key)
            self._store(what, lambda: self.store.set(key, payload))
            return payload
        self._wait([key], what, deadline)
        return bytes(self._store(what, lambda: self._until(deadline).get(key)))

    def retire(self, keys: Sequence[str]) -> None:
        """Delete keys of this team's store once all ranks have begun the next all-gather."""
        self.counters.retired += keys

    def delete_retired(self) -> None:
        """Delete retired keys now: the caller knows that all ranks have read them.

        Raises:
            CommunicationError: the store is unreachable.
        """
        retired, self.counters.retired = self.counters.retired, []
        self._delete(retired)

    def missing_ranks(self, key: str, seconds: float) -> list[int]:
        """Check in under `key` and return the ranks that do not within `seconds`. Never raises."""
        return self._find_missing(key, seconds)[0]

    def describe_missing(
        self, key: str, seconds: float = _GRACE_S, alert: Callable[[], object] | None = None, remedy: str = ""
    ) -> str:
        """The result of `missing_ranks` as the end of an error message; "" if all other ranks are missing, or none.

        Args:
            alert: called while ranks are waited for; may raise, as it knows better why they are missing.
            remedy: what to do if ranks are missing, a sentence.
        """
        gone, problem = self._find_missing(key, seconds, alert)
        if problem is not None:
            return f"; {problem}"
        if not gone or (len(gone) == self.size - 1 and self.size > 2):  # nobody else failed: the fault is here
            return ""
        who = f"; no response from rank {', '.join(map(str, gone))}: it has exited or is late"
        return f"{who}. {remedy}" if remedy else who

    def _find_missing(
        self, key: str, seconds: float, alert: Callable[[], object] | None = None
    ) -> tuple[list[int], CommunicationError | None]:
        waiting, store, here = set(range(self.size)), self.store.within(seconds), False
        deadline = time.monotonic() + seconds
        while True:
            try:
                if not here:
                    store.set(f"{key}/{self.rank}", b"1")
                    here = True
                waiting = {rank for rank in waiting if not store.check([f"{key}/{rank}"])}
            except CommunicationError as error:  # the store lives in rank 0
                return sorted(waiting) if 0 not in waiting else [0] if self.rank else [], error
            if not waiting or time.monotonic() > deadline:
                return sorted(waiting), None
            if alert is not None:
                alert()
            time.sleep(_POLL_S)

    def _next_serial(self) -> int:
        self.counters.collectives += 1
        return self.counters.collectives

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout.total_seconds()

    def _until(self, deadline: float) -> BoundedStore:
        return self.store.within(max(deadline - time.monotonic(), _GRACE_S))

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self.store.delete_key(key)

    def _wait(self, keys: list[str], what: str, deadline: float, alert: Callable[[], object] | None = None) -> None:
        absent = self._store(what, lambda: self.store.await_keys(keys, deadline, alert or self.alert))
        if absent:
            ranks = ", ".join(key.rpartition("/")[2] for key in absent)
            raise CommunicationError(
                f"{what}: rank {ranks} did not arrive within "
                f"{self.timeout.total_seconds():g} s (this is rank {self.rank} of {self.size})"
            )

    def _store(self, what: str, call: Any) -> Any:
        try:
            return call()
        except CommunicationError as error:
            raise CommunicationError(f"{what}: {error}") from error


def is_loss(error: BaseException) -> bool:
    """Whether the error may come from a collective, unlike running out of memory."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def encode(message: Any) -> bytes:
    """Bytes of a JSON-able message for `Team.all_gather_bytes`."""
    return json.dumps(message).encode()


def decode(payload: bytes) -> Any:
    """The message in `payload`. JSON, never pickle: bytes from the network must not name classes."""
    return json.loads(payload)


def decode_alike(what: str, payloads: Sequence[bytes], keys: Collection[str]) -> list[dict[str, Any]]:
    """The messages of all ranks, which have `keys` if they come from the same call.

    Raises:
        RankMismatchError: a message comes from another call; names the rank.
    """
    messages = []
    for rank, payload in enumerate(payloads):
        try:
            message = decode(payload)
        except ValueError:  # bytes of another kind
            message = None
        if not isinstance(message, dict) or message.keys() != set(keys):
            raise RankMismatchError(
                f"{what}: rank {rank} is in another collective call; ranks must make the same calls in the same order, "
                "also after an error that the script catches on one of them"
            )
        messages.append(message)
    return messages
