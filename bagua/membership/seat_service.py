"""Serves the agent of a host to one of its ranks, over a UNIX socket. The other end: `bagua.membership.remote_seat`."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bagua.membership.actions import Verdict
from bagua.membership.agent import Agent
from bagua.membership.epoch import Epoch
from bagua.membership.messages import MessageError
from bagua.membership.seat import View, view_of
from bagua.membership.seat_frames import SEAT_VERSION, SeatFrames, number, pack, view_to_wire
from bagua.membership.transport import Transport

__all__ = ["SEAT", "SeatService", "short_path"]

SEAT = "BAGUA_SEAT"  # environment variable: path of the socket
_MAX_CONNECTIONS = 64
_READ = 1 << 16
_CREDENTIALS = struct.Struct("3i")
_log = logging.getLogger("bagua")

# verb -> how many numbers it takes, and what it asks of the agent
_VERBS: dict[str, tuple[int, Callable[..., Any]]] = {
    "wants_weights": (0, lambda agent, now, seat: agent.rank_wants_weights(now, seat)),
    "start_step": (2, lambda agent, now, seat, group, step: agent.start_step(group, step, seat, now)),
    "arrived": (2, lambda agent, now, seat, group, step: agent.arrived(now, group, step, seat)),
    "finish_step": (2, lambda agent, _, seat, group, step: agent.finish_step(group, step, seat)),
    "weights_fetched": (2, lambda agent, _, seat, epoch, step: agent.weights_fetched(epoch, step, seat)),
    "exchange_failed": (1, lambda agent, now, _, group: agent.exchange_failed(now, group)),
    "suspected": (0, lambda agent, _, __: agent.suspected),
}


class _Rank:
    """A connection of the rank."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.frames, self.unsent = sock, SeatFrames(), bytearray()
        self.seen: View | None = None  # what was sent last


class SeatService:
    """The launcher's end of the seat of one rank. A thread answers requests and pushes each new view.

    A view is sent before any answer that was given in its epoch: a rank that is denied a step knows why.

    Args:
        transport: runs the agent.
        directory: of the socket. Only its owner may enter it.
        seat: number of the rank. Whoever connects asks for this one.

    Attributes:
        path: of the socket, for the rank's environment (`SEAT`).

    Raises:
        PermissionError: other users can enter the directory.
    """

    def __init__(self, transport: Transport, directory: Path, seat: int = 0) -> None:
        if directory.stat().st_mode & 0o077:
            raise PermissionError(f"{directory}: other users can enter it; a seat needs a directory of mode 0700")
        self.path = directory / (f"seat{seat}" if seat else "seat")
        self._transport, self._seat = transport, seat
        self._name = transport.call(lambda agent, _: agent.name)
        self._view: View | None = None
        self._seen: tuple[Epoch | None, bool] = None, True  # what `_view` was made of
        self._ranks: set[_Rank] = set()
        self._closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(self.path) as short:
            self._listener.bind(short)
        self._listener.listen(_MAX_CONNECTIONS)
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for sock in (self._listener, self._wake_read, self._wake_write):
            sock.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="bagua-seat", daemon=True)
        self._thread.start()

    def refresh(self) -> None:
        """An epoch was decided, or another rank of this host has ended: push the view."""
        self._wake()

    def close(self) -> None:
        """Stop, and remove the socket. A rank that is still connected is told by the end of its connection."""
        self._closing = True
        self._wake()
        self._thread.join()
        self.path.unlink(missing_ok=True)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: it has ended
            self._wake_write.send(b"x")

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select():
                    self._ready(key.fileobj, key.data, events)
        except Exception:
            _log.exception("membership: the thread that serves this host's ranks has failed")
        finally:
            for each in self._ranks:
                each.sock.close()
            for sock in (self._listener, self._wake_read, self._wake_write):
                sock.close()
            self._selector.close()

    def _ready(self, sock: object, rank: _Rank | None, events: int) -> None:
        if sock is self._listener:
            with contextlib.suppress(OSError):
                self._accept(self._listener.accept()[0])
        elif rank is None:
            with contextlib.suppress(OSError):
                self._wake_read.recv(_READ)
            self._woken()
        elif rank not in self._ranks:
            pass  # closed by an event before this one
        elif events & selectors.EVENT_WRITE:
            self._flush(rank)
        else:
            self._read(rank)

    def _woken(self) -> None:
        self._ask(lambda *_: None)
        for rank in self._ranks.copy():
            if not rank.unsent:  # else it gets the newest one with its next answer, or by `_flush`
                self._send_view(rank)
                self._flush(rank)

    def _accept(self, sock: socket.socket) -> None:
        _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.geteuid() or len(self._ranks) >= _MAX_CONNECTIONS:
            sock.close()
            return
        sock.setblocking(False)
        rank = _Rank(sock)
        self._ranks.add(rank)
        self._selector.register(sock, selectors.EVENT_READ, rank)
        self._ask(lambda *_: None)
        rank.seen = self._view
        rank.unsent += pack(["hello", SEAT_VERSION, self._name, view_to_wire(self._view)])
        self._flush(rank)

    def _read(self, rank: _Rank) -> None:
        try:
            data = rank.sock.recv(_READ)
            for message in rank.frames.feed(data):
                self._answer(rank, message)
        except BlockingIOError:
            return
        except MessageError as error:
            _log.warning("membership: the connection of a rank was closed: %s", error)
            return self._end(rank)
        except OSError:
            return self._end(rank)
        if not data:
            return self._end(rank)
        self._flush(rank)

    def _answer(self, rank: _Rank, message: list[Any]) -> None:
        verb = message[1] if len(message) > 1 else None
        count, what = _VERBS.get(verb, (-1, None)) if type(verb) is str else (-1, None)
        if what is None or len(message) != 2 + count:
            raise MessageError(f"no request: {message!r:.80}")
        number(message[0])
        result = self._ask(what, *map(number, message[2:]))
        self._send_view(rank)
        value = result.value if isinstance(result, Verdict) else result
        rank.unsent += pack(["answer", message[0], value])

    def _ask(self, what: Callable[..., Any], *arguments: int) -> Any:
        """Ask the agent, and take its newest epoch at the same moment."""

        def asked(agent: Agent, now: float) -> tuple[Any, Epoch | None, bool, int]:
            result = what(agent, now, self._seat, *arguments)
            return result, agent.epoch, agent.learns(self._seat), agent.record.incarnation

        result, epoch, learns, incarnation = self._transport.call(asked)
        if epoch is not None and (epoch is not self._seen[0] or learns != self._seen[1]):
            self._seen, self._view = (epoch, learns), view_of(epoch, self._name, incarnation, self._seat, learns)
        return result

    def _send_view(self, rank: _Rank) -> None:
        if rank.seen is not self._view:
            rank.seen = self._view
            rank.unsent += pack(["view", view_to_wire(self._view)])

    def _flush(self, rank: _Rank) -> None:
        try:
            while rank.unsent:
                del rank.unsent[: rank.sock.send(rank.unsent)]
                if not rank.unsent:
                    self._send_view(rank)
        except BlockingIOError:
            pass
        except OSError:
            return self._end(rank)
        # A rank that does not read its answers is not listened to meanwhile.
        self._selector.modify(rank.sock, selectors.EVENT_WRITE if rank.unsent else selectors.EVENT_READ, rank)

    def _end(self, rank: _Rank) -> None:
        if rank in self._ranks:
            self._ranks.discard(rank)
            self._selector.unregister(rank.sock)
            rank.sock.close()


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name for `path` that fits the 107 bytes of the address of a UNIX socket, however long `path` is."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
