"""Connects the ranks of a team for the native transport.

Each rank listens on the address that gloo has chosen, and publishes it in the store with a secret of its own. The
higher rank of a pair connects. Both ends prove that they know the listener's secret, which never travels: it is the key
of a digest. Who is not of the team is closed and otherwise ignored.

All ranks publish, whether they can listen or not, and afterwards whether they are connected. So a rank that cannot
fails on all ranks at once.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from bagua.comm.groups import Groups
from bagua.comm.mesh import Mesh, why_no_mesh
from bagua.errors import CommunicationError

__all__ = ["CONGESTION", "MeshError", "Offer", "add_meshes", "congestion_control", "connect", "listen"]

CONGESTION = "BAGUA_NATIVE_CONGESTION"
_MAGIC = b"BAGUAMSH"
_HELLO = struct.Struct("<8sII16s32s")  # magic, version, rank, nonce, digest
_REPLY = struct.Struct("<32s")
_VERSION = 1
_CONNECT_S = 60.0  # to connect all ranks, once all listen
_ALERT_S = 0.05  # between two alerts
_MAX_STRANGERS = 64  # connections at once that have not said who they are


class MeshError(CommunicationError):
    """The ranks cannot be connected for the native transport. Raised on all of them alike, with the same message."""


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


def add_meshes(
    lanes: Sequence[Groups],
    all_gather: Callable[[str, bytes], list[bytes]],
    timeout: timedelta,
    alert: Callable[[], object] | None = None,
) -> None:
    """Connect the ranks of the world, and those that exchange for nodes. Collective over the world. Groups stay open.

    Args:
        lanes: groups of gloo of one lane or more, opened with the addresses at which it listens.
        all_gather: of the name of a stage and a small message; returns those of all ranks, by rank of the world.
        timeout: for later exchanges.
        alert: called now and then while this rank waits for others; may raise a `CommunicationError`.

    Raises:
        MeshError: on all ranks; names those that cannot listen or connect, and why.
        CommunicationError: a rank did not take part.
    """
    among = {
        f"{lane}/{kind}": group
        for lane, groups in enumerate(lanes)
        for kind, group in (("world", groups.world), ("inter", groups.inter or groups.column))
    }
    mine = {kind: group for kind, group in among.items() if group is not None and group.size > 1}
    made: dict[str, Mesh] = {}
    with ExitStack() as offers, ExitStack() as on_failure:
        own: dict[str, Offer] = {}

        def offer() -> Any:
            for kind, group in mine.items():
                own[kind] = listen(group.address, group.size)
                offers.callback(own[kind].close)
            return {kind: each.published for kind, each in own.items()}

        published = _agree(offer, partial(all_gather, "offers"))

        def join() -> Any:
            for kind, group in mine.items():
                theirs = [published[rank][kind] for rank in group.ranks]
                made[kind] = connect(group.rank, own[kind], theirs, timeout.total_seconds(), alert)
                on_failure.callback(made[kind].close)

        _agree(join, partial(all_gather, "connections"))
        on_failure.pop_all()
    for kind, group in mine.items():
        group.mesh = made[kind]
        group.mesh.ranks = group.ranks


def _agree(act: Callable[[], Any], all_gather: Callable[[bytes], list[bytes]]) -> list[Any]:
    """What `act` returns on all ranks.

    Raises:
        MeshError: on all ranks, if it raised on one.
    """
    try:
        answer = {"done": act()}
    except (OSError, CommunicationError) as error:
        answer = {"problem": str(error)}
    answers = [json.loads(each) for each in all_gather(json.dumps(answer).encode())]
    problems = [f"rank {rank}: {each['problem']}" for rank, each in enumerate(answers) if "problem" in each]
    if problems:
        raise MeshError(f"the native transport cannot be opened: {'; '.join(problems)}")
    return [each["done"] for each in answers]


def congestion_control() -> str | None:
    """`BAGUA_NATIVE_CONGESTION` of the environment: congestion control of the sockets; None: the kernel's choice."""
    return os.environ.get(CONGESTION) or None


def listen(host: str | None, size: int) -> Offer:
    """Listen at `host` on a free port.

    Args:
        host: the address of gloo's listener.
        size: number of ranks.

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


def connect(
    rank: int,
    own: Offer,
    offers: Sequence[dict[str, Any]],
    timeout_s: float,
    alert: Callable[[], object] | None = None,
) -> Mesh:
    """Connect to all ranks. Collective.

    Args:
        rank: this process's rank among `offers`.
        own: its offer; the caller closes it.
        offers: what the ranks have published, by rank.
        timeout_s: for later exchanges, and at most that long for the connections.
        alert: called now and then; may raise.

    Raises:
        CommunicationError: names the ranks that are missing.
    """
    patience = _Patience(time.monotonic() + min(timeout_s, _CONNECT_S), alert)
    with ExitStack() as on_failure:
        socks: dict[int, socket.socket] = {}
        proofs: dict[int, bytes] = {}
        for peer in range(rank):
            offer = offers[peer]
            sock = _connect_to(offer, own.published["host"], peer, patience)
            on_failure.callback(sock.close)
            socks[peer], nonce = sock, secrets.token_bytes(16)
            digest = _digest(offer, b"hello", rank, peer, nonce)
            proofs[peer] = _digest(offer, b"reply", rank, peer, nonce)
            sock.sendall(_HELLO.pack(_MAGIC, _VERSION, rank, nonce, digest))
        for peer, sock in socks.items():
            _await_reply(sock, peer, proofs[peer], patience)
        accepted = _accept(rank, own, len(offers), patience)
        for sock in accepted.values():
            on_failure.callback(sock.close)
        socks.update(accepted)
        on_failure.pop_all()
    fds = [socks[peer].detach() if peer != rank else -1 for peer in range(len(offers))]
    return Mesh(rank, fds, timeout_s)


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


def _digest(offer: dict[str, Any], what: bytes, connecting: int, listening: int, nonce: bytes) -> bytes:
    about = what + struct.pack("<II", connecting, listening) + nonce
    return hmac.digest(bytes.fromhex(offer["secret"]), about, hashlib.sha256)


@dataclass(frozen=True)
class _Patience:
    """How long to wait for other ranks, and what may end it before."""

    deadline: float
    alert: Callable[[], object] | None

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


def _connect_to(offer: dict[str, Any], source: str, peer: int, patience: _Patience) -> socket.socket:
    """A connection that does not block."""
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
        raise CommunicationError(
            f"cannot connect to rank {peer} at {offer['host']} port {offer['port']}: {error}"
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _await_reply(sock: socket.socket, peer: int, proof: bytes, patience: _Patience) -> None:
    data = b""
    try:
        while len(data) < _REPLY.size:
            patience.await_ready(sock, selectors.EVENT_READ)
            part = sock.recv(_REPLY.size - len(data))
            if not part:
                raise CommunicationError(f"rank {peer} has closed the connection instead of greeting")
            data += part
    except OSError as error:
        raise CommunicationError(f"rank {peer} does not greet: {error}") from error
    if not hmac.compare_digest(data, proof):
        raise CommunicationError(f"who answers for rank {peer} does not know its secret")


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


def _accept(rank: int, own: Offer, size: int, patience: _Patience) -> dict[int, socket.socket]:
    """The connections of all higher ranks. Strangers neither get in nor hold anybody up."""
    missing, found = set(range(rank + 1, size)), dict[int, socket.socket]()
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
                ranks = ", ".join(map(str, sorted(missing)))
                raise CommunicationError(f"rank {ranks} did not connect in time")
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
                if sock not in greetings:
                    continue  # closed in this round
                peer = _hear(sock, greetings, own, rank, missing)
                if peer is None:
                    continue
                drop(sock)
                if peer < 0:
                    sock.close()
                else:
                    found[peer] = sock
                    missing.remove(peer)
        for sock in list(greetings):
            drop(sock)
            sock.close()
        on_failure.pop_all()
    return found


def _hear(
    sock: socket.socket, greetings: dict[socket.socket, bytes], own: Offer, rank: int, missing: set[int]
) -> int | None:
    """Read of a greeting what has come, and answer it: the peer's rank, -1 for a stranger, None if it is incomplete."""
    try:
        part = sock.recv(_HELLO.size - len(greetings[sock]))
    except BlockingIOError:
        return None
    except OSError:
        return -1
    data = greetings[sock] = greetings[sock] + part
    if not part:
        return -1
    if len(data) < _HELLO.size:
        return None
    magic, version, peer, nonce, digest = _HELLO.unpack(data)
    known = magic == _MAGIC and version == _VERSION and peer in missing
    if not known or not hmac.compare_digest(digest, _digest(own.published, b"hello", peer, rank, nonce)):
        return -1
    try:
        sock.sendall(_REPLY.pack(_digest(own.published, b"reply", peer, rank, nonce)))
    except OSError:
        return -1
    return peer
