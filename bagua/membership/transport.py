"""Runs an agent over TCP: one thread with connections of its own, which no data of the training can hold up."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bagua.membership.actions import Action, Persist, Send
from bagua.membership.agent import Agent
from bagua.membership.encoding import decode, encode
from bagua.membership.frames import FrameReader, pack
from bagua.membership.messages import MessageError
from bagua.membership.record_file import RecordFile

__all__ = ["Transport"]

_MAX_UNSENT = 1 << 20  # bytes for one peer; what is more is dropped, as a network would
_MAX_INCOMING = 1024  # connections
_MAX_STRANGERS = 64  # of them, those by which nobody was heard yet
_RETRY_S = 0.2
_PAUSE_S = 0.1  # without accepting connections while no file can be opened
_COMPLAIN_S = 10.0  # between two warnings
_READ = 1 << 16
_log = logging.getLogger("bagua")
_T = TypeVar("_T")


class _Incoming:
    """A connection that a peer opened, and by which it is heard."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        self.sock, self.frames, self.name = sock, FrameReader(token), ""


class _Outgoing:
    """A connection to a peer's listener, opened for the peer `name`; "" if only its address is known."""

    def __init__(self, sock: socket.socket, address: str, name: str) -> None:
        self.sock, self.address, self.name, self.unsent = sock, address, name, bytearray()


class Transport:
    """The driver of one agent.

    A message that cannot be delivered soon is dropped: the protocol repeats what matters. A frame without the token's
    HMAC closes its connection. Of too many connections without a frame the oldest is closed.

    Args:
        agent: on the clock `time.monotonic`. Addresses are numeric: a name would be looked up in the thread.
        listener: a listening socket at the agent's address; this object closes it. Bind it to the interface of the job.
        token: a secret that all hosts of the job share, at least 16 bytes.
        record: file for the agent's record; None if the host comes back under another name. If it cannot be written for
            half a minute the thread ends.

    Attributes:
        events: actions for the engine, in order: all but `Send` and `Persist`.

    Raises:
        ValueError: the token is too short, or the agent's address is not numeric.
    """

    def __init__(self, agent: Agent, listener: socket.socket, token: bytes, record: Path | None = None) -> None:
        if len(token) < 16:
            raise ValueError(f"token: {len(token)} bytes, at least 16 are needed")
        _numeric(agent.record.address)
        # Not SimpleQueue: its timed `get` never ends if a signal handler outlasts the timeout (CPython).
        self.events: queue.Queue[Action] = queue.Queue()
        self._agent, self._listener, self._token = agent, listener, token
        self._record = None if record is None else RecordFile(record)
        self._waiting: list[Action] = []  # for the record, which the first of them writes
        self._lock = threading.Lock()  # of the agent, its actions, its record and `_outbox`
        self._outbox: list[Send] = []
        self._outgoing: dict[str, _Outgoing] = {}
        self._retry: dict[str, float] = {}
        self._incoming: dict[_Incoming, None] = {}  # the oldest first
        self._complain_at = 0.0
        self._accept_at: float | None = None  # when connections are accepted again, if they are not now
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        for sock in (listener, self._wake_read, self._wake_write):
            sock.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._run, name="bagua-membership", daemon=True)
        self._thread.start()

    def call(self, what: Callable[[Agent, float], _T]) -> _T:
        """Give the agent a local event, or ask it: `call(lambda agent, now: agent.finish_step(group, step))`."""
        with self._lock:
            result = what(self._agent, time.monotonic())
            self._drain()
        self._wake()
        return result

    @property
    def connected(self) -> list[str]:
        """Hosts that have a connection to this one."""
        return sorted({peer.name for peer in self._incoming.copy() if peer.name})

    @property
    def failed(self) -> bool:
        """Whether its thread has ended by itself, with an error that was logged."""
        return self._ended and not self._closing

    def close(self) -> None:
        """Stop. Peers see the connections close, so they count this host as lost unless it left before."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: it has ended
            self._wake_write.send(b"x")

    def _drain(self) -> None:
        """Carry out the agent's actions. With the lock held, since their order matters.

        While the record cannot be written what comes after it waits, and messages are dropped: they may promise it.
        """
        self._waiting += self._agent.take()
        while self._waiting:
            action = self._waiting[0]
            if isinstance(action, Persist):
                if self._record is not None and not self._record.write(action.record):
                    self._complain(f"the record was not written: {self._record.error}; this is tried again")
                    self._waiting = [each for each in self._waiting if not isinstance(each, Send)]
                    return
            elif isinstance(action, Send):
                if not self._ended:
                    self._outbox.append(action)
            else:
                self.events.put(action)
            del self._waiting[0]

    def _run(self) -> None:
        try:
            while not self._closing:
                with self._lock:
                    now = time.monotonic()
                    if now >= self._agent.next_tick:
                        self._agent.tick(now)
                    self._drain()
                    outbox, self._outbox = self._outbox, []
                    due = self._agent.next_tick
                    if self._record is not None and self._record.due is not None:
                        due = min(due, self._record.due)
                        if self._record.hopeless and self._record.error is not None:
                            raise self._record.error
                if self._accept_at is not None:
                    if now >= self._accept_at:
                        self._accept_at = None
                        self._selector.register(self._listener, selectors.EVENT_READ)
                    else:
                        due = min(due, self._accept_at)
                for send in outbox:
                    self._post(send, now)
                for key, _ in self._selector.select(max(0.001, min(due - time.monotonic(), 1.0))):
                    self._ready(key.fileobj, key.data)
        except Exception:
            _log.exception("membership: the thread of this host's agent has failed; others will count the host as lost")
        finally:
            self._ended = True
            for each in (*self._incoming, *self._outgoing.values()):
                each.sock.close()
            for sock in (self._listener, self._wake_read, self._wake_write):
                sock.close()
            self._selector.close()

    def _ready(self, sock: object, peer: object) -> None:
        if isinstance(peer, _Incoming):
            if peer in self._incoming:  # else closed for a newer one since it was found ready
                self._read(peer)
        elif isinstance(peer, _Outgoing):
            self._flush(peer)
        elif sock is self._listener:
            self._accept()
        else:
            with contextlib.suppress(OSError):
                self._wake_read.recv(_READ)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # too many open files: the listener would be ready again at once
            self._complain(f"no connection was accepted: {error}")
            self._selector.unregister(self._listener)
            self._accept_at = time.monotonic() + _PAUSE_S
            return
        strangers = [peer for peer in self._incoming if not peer.name]
        if len(strangers) >= _MAX_STRANGERS:
            self._end(strangers[0])
        if len(self._incoming) >= _MAX_INCOMING:
            accepted.close()
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # its host may have lost power
        incoming = _Incoming(accepted, self._token)
        self._incoming[incoming] = None
        self._selector.register(accepted, selectors.EVENT_READ, incoming)

    def _read(self, peer: _Incoming) -> None:
        try:
            data = peer.sock.recv(_READ)
            envelopes = [decode(frame) for frame in peer.frames.feed(data)]
        except BlockingIOError:
            return
        except MessageError as error:
            _log.warning("membership: a connection was closed: %s", error)
            return self._end(peer)
        except OSError:
            return self._end(peer)
        if not data:
            return self._end(peer)
        with self._lock:
            for envelope in envelopes:
                peer.name = envelope.sender
                self._agent.receive(time.monotonic(), envelope)
            self._drain()

    def _end(self, peer: _Incoming) -> None:
        """A connection has ended at its other end. Its host is lost, unless another connection of it is there."""
        self._selector.unregister(peer.sock)
        peer.sock.close()
        del self._incoming[peer]
        if peer.name and all(other.name != peer.name for other in self._incoming):
            with self._lock:
                self._agent.closed(time.monotonic(), peer.name)
                self._drain()

    def _refused(self, name: str) -> None:
        """A connection that was opened for `name` was refused or reset. It is lost, unless one that it opened is there.

        A newcomer may die before it has opened one: its silence would be waited for.
        """
        with self._lock:
            if name and name not in self._agent.suspected and all(peer.name != name for peer in self._incoming):
                self._agent.closed(time.monotonic(), name)
            self._drain()

    def _post(self, send: Send, now: float) -> None:
        peer = self._outgoing.get(send.address) or self._connect(send.address, send.envelope.receiver, now)
        if peer is not None and len(peer.unsent) < _MAX_UNSENT:
            peer.name = peer.name or send.envelope.receiver
            peer.unsent += pack(encode(send.envelope), self._token)
            self._flush(peer)

    def _connect(self, address: str, name: str, now: float) -> _Outgoing | None:
        if now < self._retry.get(address, 0.0):
            return None
        if len(self._retry) > 4 * _MAX_INCOMING:
            self._retry.clear()
        self._retry[address] = now + _RETRY_S
        try:
            host, port = _numeric(address)
        except ValueError as error:
            _log.warning("membership: %s", error)
            return None
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:  # too many open files: tried again, as after a silence
            self._complain(f"no connection to {address}: {error}")
            return None
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A connection over a link that was cut would stay silent long after the link is back.
        silent_ms = int(1000 * self._agent.options.detect_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_ms)
        try:
            sock.connect((host, port))
        except BlockingIOError:
            pass
        except OSError as error:
            sock.close()
            if isinstance(error, ConnectionError):
                self._refused(name)
            return None
        peer = self._outgoing[address] = _Outgoing(sock, address, name)
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
        return peer

    def _complain(self, what: str) -> None:
        """Of something that is tried again soon."""
        now = time.monotonic()
        if now >= self._complain_at:
            self._complain_at = now + _COMPLAIN_S
            _log.warning("membership: %s", what)

    def _flush(self, peer: _Outgoing) -> None:
        try:
            if peer.unsent:
                del peer.unsent[: peer.sock.send(peer.unsent)]
            with contextlib.suppress(BlockingIOError):
                if not peer.sock.recv(_READ):  # nothing is ever sent this way, so this is its end
                    raise ConnectionResetError
        except BlockingIOError:
            pass
        except OSError as error:
            self._selector.unregister(peer.sock)
            peer.sock.close()
            del self._outgoing[peer.address]
            if isinstance(error, ConnectionError):  # not if packets are lost: that is silence
                self._refused(peer.name)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.sock, wanted, peer)


def _numeric(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    try:
        return str(ipaddress.ip_address(host.strip("[]"))), int(port)
    except ValueError:
        raise ValueError(f"address {address!r}: it must be a numeric host and a port") from None
