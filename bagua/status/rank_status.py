"""A rank's end: a thread that waits at a UNIX socket until its launcher asks."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bagua.membership.seat_service import short_path
from bagua.status.frames import send

__all__ = ["STATUS", "is_own_user", "serve_rank"]

STATUS = "BAGUA_STATUS"  # environment variable: a folder of mode 0700 for the sockets of the ranks of this host
_CREDENTIALS = struct.Struct("iII")
_SEND_S = 1.0
_PAUSE_S = 0.1
_TRIES = 3
_log = logging.getLogger("bagua")
_serves: set[int] = set()  # process ids: a forked process has no thread


def serve_rank(describe: Callable[[], Any]) -> None:
    """Answer questions of the launcher from now on, in a thread. Without a launcher that asks nothing is started.

    Args:
        describe: plain data for JSON. It is called in the thread, so it must only read. It may raise `RuntimeError` if
            training changes what it reads, and is then called again.
    """
    folder = os.environ.get(STATUS)
    if not folder or os.getpid() in _serves:
        return
    _serves.add(os.getpid())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path = Path(folder) / str(os.getpid())
        path.unlink(missing_ok=True)  # of a process that had the same number
        with short_path(path) as short:
            listener.bind(short)
        listener.listen(8)
    except OSError as error:
        listener.close()
        _log.info("status: `bagua top` cannot see this rank: %s", error)
        return
    threading.Thread(target=_serve, args=(listener, describe), name="bagua-status", daemon=True).start()


def is_own_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a UNIX socket belongs to this user."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user == os.geteuid()


def _serve(listener: socket.socket, describe: Callable[[], Any]) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:  # too many open files
            time.sleep(_PAUSE_S)
            continue
        with sock, contextlib.suppress(OSError):
            sock.settimeout(_SEND_S)
            if is_own_user(sock):
                send(sock, _described(describe))


def _described(describe: Callable[[], Any]) -> Any:
    for _ in range(_TRIES):
        with contextlib.suppress(RuntimeError):
            return describe()
    return None
