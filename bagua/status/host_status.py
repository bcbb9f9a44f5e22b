"""A launcher's end: asks the ranks of its host when an observer asks it."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bagua.membership.seat_service import short_path
from bagua.status.frames import StatusError, answer, receive, send
from bagua.status.rank_status import is_own_user

__all__ = ["SOCKET", "HostStatus", "ask_socket"]

SOCKET = "status"  # in the launcher's directory
_RANK_S = 1.0  # for a rank to answer
_OBSERVER_S = 2.0
_PAUSE_S = 0.1
_MAX_STRANGERS = 32  # connections over TCP that are heard at once


class HostStatus:
    """Answers observers in threads: this user's over a UNIX socket, those of other hosts if they know the token.

    A connection that stays silent holds nobody up. If there are too many, the oldest one of another host is closed.

    Args:
        directory: the launcher's own, of mode 0700.
        describe: plain data for JSON about the launcher; called in one thread at a time. The ranks are added to it.
        listener: a listening socket on the interface of the job, closed by this object; None: this host answers
            observers on this machine only.
        token: of the job. Needed with `listener`.

    Attributes:
        ranks: folder for the ranks' sockets, see `serve_rank`.
    """

    def __init__(
        self,
        directory: Path,
        describe: Callable[[], dict[str, Any]],
        listener: socket.socket | None = None,
        token: bytes = b"",
    ) -> None:
        if listener is not None and not token:
            raise ValueError("token: needed to answer other hosts")
        self.ranks = directory / "ranks"
        self.ranks.mkdir(mode=0o700)
        self._describe, self._token = describe, token
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(directory / SOCKET) as short:
            local.bind(short)
        local.listen(8)
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._listeners = [each for each in (local, listener) if each is not None]
        for sock in (*self._listeners, self._wake_read):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._closing = False
        self._heard: dict[socket.socket, threading.Thread] = {}  # the oldest first
        self._lock = threading.Lock()  # of `_heard`
        self._describing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="bagua-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._closing = True
        self._wake_write.send(b"x")
        self._thread.join()
        with self._lock:
            heard = dict(self._heard)
            for sock in heard:
                _end(sock)
        for thread in heard.values():
            thread.join()
        for sock in (*self._listeners, self._wake_read, self._wake_write):
            sock.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.fileobj in self._listeners and not self._closing:
                    self._accept(key.fileobj)  # pyright: ignore[reportArgumentType]

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # too many open files
            time.sleep(_PAUSE_S)
            return
        thread = threading.Thread(target=self._hear, args=(sock,), name="bagua-observer", daemon=True)
        with self._lock:
            strangers = [each for each in self._heard if each.family != socket.AF_UNIX]
            if len(strangers) >= _MAX_STRANGERS and sock.family != socket.AF_UNIX:
                _end(strangers[0])
                del self._heard[strangers[0]]
            self._heard[sock] = thread
        thread.start()

    def _hear(self, sock: socket.socket) -> None:
        try:
            deadline = time.monotonic() + _OBSERVER_S
            sock.settimeout(_OBSERVER_S)
            if sock.family != socket.AF_UNIX:
                answer(sock, self._status, self._token, deadline)
            elif is_own_user(sock):
                send(sock, self._status())
        except (OSError, StatusError):
            pass  # the observer says why
        finally:
            with self._lock:
                self._heard.pop(sock, None)
                sock.close()

    def _status(self) -> dict[str, Any]:
        with self._describing:
            return {**self._describe(), "ranks": self._ask_ranks()}

    def _ask_ranks(self) -> list[Any]:
        """At the same time: one that is stopped holds nobody up but itself."""
        found: list[Any] = []

        def look(path: Path) -> None:
            try:
                told = ask_socket(path, time.monotonic() + _RANK_S)
                if type(told) is dict:
                    found.append(told)
            except (ConnectionError, FileNotFoundError):  # it has ended
                path.unlink(missing_ok=True)
            except (OSError, StatusError) as error:
                found.append({"pid": int(path.name), "error": str(error) or type(error).__name__})

        paths = [path for path in self.ranks.iterdir() if path.name.isdigit()]
        threads = [threading.Thread(target=look, args=(path,), name="bagua-status-rank") for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(found, key=lambda each: (each.get("rank", 1 << 30), each.get("pid", 0)))


def _end(sock: socket.socket) -> None:
    """What its thread waits for fails. That thread closes it."""
    with contextlib.suppress(OSError):  # the peer has ended it
        sock.shutdown(socket.SHUT_RDWR)


def ask_socket(path: Path, deadline: float) -> Any:
    """What is served at the UNIX socket `path` of this user.

    Raises:
        StatusError, OSError: as in `receive`. ConnectionError, FileNotFoundError: nobody serves it any more.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, short_path(path) as short:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.connect(short)
        if not is_own_user(sock):
            raise StatusError(f"{os.fspath(path)} is served by another user")
        return receive(sock, deadline)
