"""The store that each launcher of a fault-tolerant job serves, and what is noted in it: the job, founders, ends."""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import TCPStore

from bagua.distributed.failover import unreachable
from bagua.membership import Epoch, MessageError
from bagua.membership.encoding import checked_text, epoch_from_wire, epoch_to_wire
from bagua.membership.messages import MAX_ADDRESS, MAX_MEMBERS, MAX_NAME

__all__ = ["JobNote", "ServedStore", "ask", "connect", "fingerprint", "in_threads", "status_address"]

_KEY = "bagua/job"
_STATUS_KEY = "bagua/status"
_PROBE_S = 2.0  # for a host to answer
_CONNECT_S = 1.0  # for a connection to a host that has answered just before; torch tries again once, after a pause
_ANSWER_S = 5.0  # for its store to answer
_MAX_NOTE = 1 << 19
_log = logging.getLogger("bagua")


@dataclass(frozen=True)
class JobNote:
    """What a launcher knows of the job, for those that come later.

    Attributes:
        run_id: `--rdzv-id`.
        job: random name; the same command started again is another job.
        founders: the first epoch.
        number: of the newest epoch that the launcher knows.
        contacts: addresses of agents in that epoch.
        token: of the agents, as hex; "" if every host has it from its user.
        check: `fingerprint` of the token.
    """

    run_id: str
    job: str
    founders: Epoch
    number: int
    contacts: tuple[str, ...]
    token: str
    check: str

    def to_text(self) -> str:
        """As JSON."""
        fields = [self.run_id, self.job, epoch_to_wire(self.founders), self.number, list(self.contacts)]
        return json.dumps([*fields, self.token, self.check])

    @classmethod
    def parse(cls, text: bytes) -> JobNote:
        """What `to_text` wrote.

        Raises:
            MessageError: it is no such note.
        """
        if len(text) > _MAX_NOTE:
            raise MessageError(f"a note of {len(text)} bytes")
        try:
            run_id, job, founders, number, contacts, token, check = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            raise MessageError("not a note of a job") from None
        if type(number) is not int or type(contacts) is not list or len(contacts) > MAX_MEMBERS:
            raise MessageError("not a note of a job")
        if checked_text(token, 128) and not re.fullmatch("([0-9a-f]{2}){16,}", token):
            raise MessageError("a note of a job with a token that is none")
        return cls(
            checked_text(run_id, _MAX_NOTE),
            checked_text(job, MAX_NAME),
            epoch_from_wire(founders),
            number,
            tuple(checked_text(each, MAX_ADDRESS) for each in contacts),
            token,
            checked_text(check, 128),
        )


def fingerprint(token: bytes, job: str) -> str:
    """By which a host finds that its token is not that of the job, without it being told."""
    return hmac.new(token, job.encode(), hashlib.sha256).hexdigest()


class ServedStore:
    """A `TCPStore` that this launcher serves, as long as it lives, on the interface of the job alone.

    Args:
        endpoints: (host, port) of the hosts that newcomers ask. If one of them is this host and its port is free, the
            store is served there; otherwise on another port, at the address from which the first one is reached.

    Attributes:
        place: in the list; None if this host is not in it.
        host: numeric address.
        address: host:port of the store.

    Raises:
        OSError: no endpoint of the list can be resolved or reached.
    """

    def __init__(self, endpoints: Sequence[tuple[str, int]]) -> None:
        self.place, listener, busy = None, None, ""
        for place, (host, port) in enumerate(endpoints):
            try:
                listener = _listen(host, port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    busy = f"{host}:{port}"
                elif error.errno != errno.EADDRNOTAVAIL and not isinstance(error, socket.gaierror):
                    raise
                continue
            self.place = place
            if (problem := unreachable(host, listener.getsockname()[0])) is not None:
                _log.warning("rendezvous: %s", problem)
            break
        if listener is None:
            listener = _listen(_own_address(*endpoints[0]), 0)
            if busy:
                _log.info("rendezvous: %s is in use; hosts that come later cannot ask this one", busy)
        self.host, port = listener.getsockname()[:2]
        self.address = f"{self.host}:{port}"
        self.store = TCPStore(
            self.host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=30),
        )  # fmt: skip

    def note(self, note: JobNote) -> None:
        """Let those that come later find the job here."""
        self.store.set(_KEY, note.to_text())

    def note_status(self, address: str) -> None:
        """Let observers find the status of this host (`bagua.status`) at host:port."""
        self.store.set(_STATUS_KEY, address)


def connect(address: str) -> TCPStore:
    """A client of the store at `address`. Call it in a thread that may be left behind: a stopped host blocks it.

    Raises:
        OSError, RuntimeError: it does not answer.
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    # The host may end between the two. torch gives up after twice this time and a pause that grows with it.
    limit = timedelta(seconds=_CONNECT_S)
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    return store


def status_address(store: TCPStore) -> str | None:
    """Where the host of this store answers observers; None if it does not.

    Raises:
        RuntimeError: the store does not answer.
    """
    if not store.check([_STATUS_KEY]):
        return None
    text = store.get(_STATUS_KEY)
    return text.decode(errors="replace") if len(text) <= MAX_ADDRESS else None


def ask(addresses: Sequence[str]) -> tuple[list[JobNote | None], list[TCPStore | None]]:
    """The notes of the launchers at `addresses`, and clients of their stores; None for those that do not answer.

    A host that is stopped accepts connections but does not answer. It is not waited for.
    """
    notes: list[JobNote | None] = [None] * len(addresses)
    stores: list[TCPStore | None] = [None] * len(addresses)

    def look(at: int) -> None:
        try:
            store = connect(addresses[at])
            if store.check([_KEY]):
                notes[at] = JobNote.parse(store.get(_KEY))
            stores[at] = store
        except (OSError, RuntimeError):
            pass
        except MessageError as error:
            _log.warning("rendezvous: %s serves something else: %s", addresses[at], error)

    in_threads([partial(look, at) for at in range(len(addresses))])
    return notes.copy(), stores.copy()


def in_threads(calls: Sequence[Callable[[], None]]) -> None:
    """Make calls to stores that may never return. Those that take too long are left behind."""
    threads = [threading.Thread(target=call, name="bagua-ask", daemon=True) for call in calls]
    deadline = time.monotonic() + _PROBE_S + _ANSWER_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def _family(host: str) -> int:
    """IPv4 for names, as in `_serve` of the failover: all hosts of a job need the same."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _own_address(host: str, port: int) -> str:
    """Of the interface that reaches `host`. Nothing is sent."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        own: Any = probe.getsockname()
        return own[0]
