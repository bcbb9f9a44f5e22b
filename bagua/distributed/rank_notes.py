"""What has become of the ranks of other hosts: each launcher writes it into the stores of the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping

from torch.distributed import TCPStore

from bagua.distributed.job_store import connect
from bagua.membership.epoch import NO_MODEL

__all__ = ["ENDED", "RankNotes", "lost", "trained"]

ENDED = "ended"  # for good
_KEY = "bagua/rank"
_RETRY_S = 0.5
_JOIN_S = 8.0  # longer than an attempt to connect takes


def lost(epoch: int) -> str:
    """The rank has ended in this epoch, and its weights with it."""
    return f"lost {epoch}"


def trained(steps: int) -> str:
    """As `ENDED`, and a rank has trained to the end: its weights had completed so many steps."""
    return f"{ENDED} {steps}"


class RankNotes:
    """Tells the other launchers that this host's rank has ended, and hears of theirs.

    An agent may end only when the others do not need its vote any more, so launchers end together. A note is written
    into the store of the launcher that is told: reading the own store never blocks, whatever has become of the writer.

    Args:
        store: of this launcher.
        name: of this host.
    """

    def __init__(self, store: TCPStore, name: str) -> None:
        self._store, self._name = store, name
        self._threads: dict[str, threading.Thread] = {}  # one for each host, so that a note never overtakes another
        self._news = threading.Condition()  # of all below
        self._note, self._closing = "", False
        self._gone: set[str] = set()  # hosts that are not told any more; their threads end
        self._delivered: set[str] = set()

    def tell(self, hosts: Mapping[str, str], note: str) -> None:
        """Write the newest note to these, in the background, until it is delivered. Repeated calls are free.

        Args:
            hosts: names, and the addresses of their stores.
            note: `ENDED`, `trained(steps)` or `lost(epoch)`; nothing is written if it is empty.
        """
        if not note:
            return
        with self._news:
            self._note = note
            self._news.notify_all()
            for name, address in hosts.items():
                self._gone.discard(name)
                if name != self._name and name not in self._threads:
                    arguments = name, address
                    thread = threading.Thread(target=self._deliver, args=arguments, name="bagua-note", daemon=True)
                    self._threads[name] = thread
                    thread.start()

    def settle(self, members: Collection[str], epoch: int) -> None:
        """An epoch has begun with these hosts. Forget the others: a job may see thousands of them come and go.

        Notes of weights that were lost in earlier epochs are deleted. Nobody minds them any more, whoever wrote them.
        """
        with self._news:
            self._gone |= self._threads.keys() - set(members)
            self._news.notify_all()
        for key in self._store.list_keys():
            name = key.removeprefix(f"{_KEY}/")
            word, _, number = self._note_of(name).partition(" ") if name != key else ("", "", "")
            if word == "lost" and number.isdigit() and int(number) < epoch:
                self._store.delete_key(key)

    @property
    def delivered(self) -> Collection[str]:
        """Hosts that know that this host's rank has ended for good, or have ended themselves."""
        return self._delivered

    def without_weights(self, trainers: Collection[str], epoch: int) -> set[str]:
        """Those of the trainers of an epoch whose ranks have ended, as they have told this host."""
        found: set[str] = set()
        for name in trainers:
            word, _, number = self._note_of(name).partition(" ")
            # One that has lost its weights may have fetched others since: then it trains in a later epoch.
            if word == ENDED or (word == "lost" and number.isdigit() and int(number) >= epoch):
                found.add(name)
        return found

    def trained(self, hosts: Collection[str]) -> int:
        """The most steps after which a rank of these hosts has trained to the end; `NO_MODEL` if none has said so."""
        notes = [self._note_of(name).partition(" ") for name in hosts]
        return max((int(n) for word, _, n in notes if word == ENDED and n.isdecimal()), default=NO_MODEL)

    def _note_of(self, name: str) -> str:
        key = f"{_KEY}/{name}"
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""

    def close(self) -> None:
        """Give up what is not delivered yet."""
        with self._news:
            self._closing = True
            self._news.notify_all()
        deadline = time.monotonic() + _JOIN_S
        for thread in tuple(self._threads.values()):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _deliver(self, name: str, address: str) -> None:
        written, store = "", None
        while True:
            with self._news:
                while self._note == written and not self._closing and name not in self._gone:
                    self._news.wait()
                if name in self._gone:  # with the lock held: whoever tells it again starts another thread
                    self._gone.discard(name)
                    del self._threads[name]
                    return
                if self._closing:
                    return
                note = self._note
            try:
                store = store or connect(address)
                store.set(f"{_KEY}/{self._name}", note)
            except (OSError, RuntimeError, ValueError) as error:
                store = None
                # Refused: its launcher has ended, too. One that is only slow to answer may wait for this note.
                if _is_end(self._note_of(name)) and isinstance(error, ConnectionRefusedError):
                    self._delivered.add(name)
                    return
                with self._news:
                    self._news.wait_for(lambda: self._closing or name in self._gone, _RETRY_S)
                continue
            written = note
            if _is_end(note):
                self._delivered.add(name)
                return


def _is_end(note: str) -> bool:
    return note.partition(" ")[0] == ENDED
