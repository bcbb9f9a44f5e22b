"""Sockets between the ranks of a team: to listen, to connect, and to let in who proves that it is of the team.

A rank that listens publishes its address in the store with a secret of its own. Who connects proves that it knows the
secret, which never travels: it is the key of a digest. Who does not know it is closed and otherwise ignored.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from bagua.comm.mesh import why_no_mesh
from bagua.errors import CommunicationError

__all__ = ["CONGESTION", "Offer", "Patience", "admit", "congestion_control", "connect_to", "digest", "listen"]

CONGESTION = "BAGUA_NATIVE_CONGESTION"
_ALERT_S = 0.05  # between two alerts
_MAX_STRANGERS = 64  # connections at once that have not said who they are
_Peer = TypeVar("_Peer", bound=Hashable)


class Offer:
    """A socket that listens, and what this rank publishes of it.

    Attributes:
        published: JSON-able.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        host, port = listener.getsockname()[:2]
        self.published: dict[str, Any] = {"host": host, "port": port, "secret": secrets.token_hex(32)}

    def close(self) -> None:
        """Listen no more."""
        self.listener.close()


@dataclass(frozen=True)
class Patience:
    """How long to wait for other ranks, and what may end it before."""

    deadline: float
    alert: Callable[[], object] | None = None

    def pause_s(self) -> float:
        """For how long to sleep; 0 once the time is over.

        Raises:
            CommunicationError: of `alert`.
        """
        if self.alert is not None:
            self.alert()
        left = max(self.deadline - time.monotonic(), 0.0)
        return left if self.alert is None else min(left, _ALERT_S)

    def await_ready(self, sock: socket.socket, events: int) -> None:
        """Wait for events of `selectors`.

        Raises:
            TimeoutError: the time is over.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(sock, events)
            while pause := self.pause_s():
                if selector.select(pause):
                    return
        raise TimeoutError("timed out")


def congestion_control() -> str | None:
    """`BAGUA_NATIVE_CONGESTION` of the environment: congestion control of the sockets; None: the kernel's choice."""
    return os.environ.get(CONGESTION) or None


def listen(host: str | None, size: int) -> Offer:
    """Listen at `host` on a free port.

    Args:
        host: the address of gloo's listener.
        size: number of connections that are expected.

    Raises:
        CommunicationError: says why this rank cannot.
    """
    problem = why_no_mesh()
    if problem:
        raise CommunicationError(problem)
    if host is None:
        raise CommunicationError("the address at which gloo listens was not found, and the native transport uses it")
    sock = _socket(host)
    try:
        _prepare(sock)
        sock.bind((host, 0))
        sock.listen(size + _MAX_STRANGERS)
    except OSError as error:
        sock.close()
        raise CommunicationError(f"cannot listen on {host}: {error}") from error
    except CommunicationError:
        sock.close()
        raise
    return Offer(sock)


def connect_to(offer: dict[str, Any], source: str, who: str, patience: Patience) -> socket.socket:
    """Return a connection that does not block.

    Args:
        offer: what the other rank has published.
        source: this rank's own address.
        who: the other rank, for messages.

    Raises:
        CommunicationError: names it, and says why it cannot be reached.
    """
    sock = _socket(offer["host"])
    try:
        _prepare(sock)
        sock.setblocking(False)
        with suppress(OSError):  # of another family, or an address that no longer is this host's
            sock.bind((source, 0))
        problem = sock.connect_ex((offer["host"], offer["port"]))
        if problem == errno.EINPROGRESS:
            patience.await_ready(sock, selectors.EVENT_WRITE)
            problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, os.strerror(problem))
    except OSError as error:
        sock.close()
        raise CommunicationError(f"cannot connect to {who} at {offer['host']} port {offer['port']}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def digest(offer: dict[str, Any], *about: bytes) -> bytes:
    """Return what proves that one knows the secret of `offer`: 32 bytes."""
    return hmac.digest(bytes.fromhex(offer["secret"]), b"".join(about), hashlib.sha256)


def admit(
    own: Offer,
    expected: Iterable[_Peer],
    greeting_bytes: int,
    answer: Callable[[socket.socket, bytes], _Peer | None],
    who: Callable[[set[_Peer]], str],
    patience: Patience,
) -> dict[_Peer, socket.socket]:
    """Accept the connections of all who are expected. Strangers neither get in nor hold anybody up.

    Args:
        greeting_bytes: that each sends first.
        answer: to a whole greeting; returns who it is, None for a stranger, also where the answer cannot be sent.
        who: names some of them, for messages.

    Returns:
        sockets that do not block.

    Raises:
        CommunicationError: names those who are missing, or says why this process cannot accept.
    """
    missing, found = set(expected), dict[_Peer, socket.socket]()
    greetings: dict[socket.socket, bytes] = {}
    with ExitStack() as on_failure, selectors.DefaultSelector() as selector:
        own.listener.setblocking(False)
        selector.register(own.listener, selectors.EVENT_READ)

        def drop(sock: socket.socket) -> None:
            selector.unregister(sock)
            del greetings[sock]

        while missing:
            pause = patience.pause_s()
            if not pause:
                raise CommunicationError(f"{who(missing)} did not connect in time")
            for key, _ in selector.select(pause):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is own.listener:
                    with suppress(BlockingIOError, ConnectionAbortedError, InterruptedError):
                        fresh = _take(sock)
                        on_failure.callback(fresh.close)
                        greetings[fresh] = b""
                        selector.register(fresh, selectors.EVENT_READ)
                        if len(greetings) > _MAX_STRANGERS:
                            oldest = next(iter(greetings))
                            drop(oldest)
                            oldest.close()
                    continue
                if sock not in greetings or not _hear(sock, greetings, greeting_bytes):
                    continue  # closed in this round, or incomplete
                greeting = greetings[sock]
                drop(sock)
                peer = answer(sock, greeting) if len(greeting) == greeting_bytes else None
                if peer is None or peer not in missing:
                    sock.close()
                else:
                    found[peer] = sock
                    missing.remove(peer)
        for sock in list(greetings):
            drop(sock)
            sock.close()
        on_failure.pop_all()
    return found


def _hear(sock: socket.socket, greetings: dict[socket.socket, bytes], size: int) -> bool:
    """Read of a greeting what has come; whether no more will be read of it."""
    try:
        part = sock.recv(size - len(greetings[sock]))
    except BlockingIOError:
        return False
    except OSError:
        return True
    greetings[sock] += part
    return not part or len(greetings[sock]) == size


def _take(listener: socket.socket) -> socket.socket:
    """The next connection, if there is one still.

    Raises:
        BlockingIOError, ConnectionAbortedError, InterruptedError: there is none.
        CommunicationError: this process cannot have it. It stays in the queue, so another try would come at once.
    """
    try:
        fresh, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError, InterruptedError):
        raise
    except OSError as error:
        raise CommunicationError(f"cannot accept: {error}") from error
    fresh.setblocking(False)
    return fresh


def _socket(host: str) -> socket.socket:
    version = ipaddress.ip_address(host.partition("%")[0]).version
    return socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM)


def _prepare(sock: socket.socket) -> None:
    """Options that accepted sockets inherit."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    name = congestion_control()
    if name is not None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            why = "this process may not choose it" if error.errno == errno.EPERM else "it is not loaded"
            raise CommunicationError(
                f"{CONGESTION}={name}: the kernel refuses this congestion control: {why} ({error}); "
                "see /proc/sys/net/ipv4/tcp_allowed_congestion_control"
            ) from error
