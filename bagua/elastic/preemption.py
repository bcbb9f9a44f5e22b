"""Preemption: after SIGTERM, a rank commits and exits within a time limit.

The limit holds even where the main thread is stuck.

torch's agent sends SIGTERM to the process group of each rank when it is itself told to end, when another rank of the
node has failed, and when hosts come or go; SIGKILL follows after `--shutdown-timeout` (30 s).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["EXIT_CODE", "PreemptionHandler", "ignore_sigterm", "shield"]

EXIT_CODE = 128 + signal.SIGTERM
_log = logging.getLogger("bagua")
_current: PreemptionHandler | None = None
_registered = False


class PreemptionHandler:
    """Replaces the SIGTERM handler and records the signal. One at a time in a process.

    Args:
        grace_s: after SIGTERM, end the process if it has not ended by itself.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._asked = threading.Event()
        self._over = threading.Event()
        self._previous: Any = None
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        global _current, _registered
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "elastic: State was created outside the main thread, so SIGTERM ends this rank without a commit"
            )
            return
        self._previous = signal.signal(signal.SIGTERM, self._note)
        # Python runs handlers in the main thread, which may be inside a collective: this tells a thread at once.
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        earlier = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        if earlier != -1:
            signal.set_wakeup_fd(earlier)
            _log.warning("elastic: signal.set_wakeup_fd is already in use; SIGTERM may be noticed late")
        self._sockets = (ours, theirs)
        _current = self
        if not _registered:
            _registered = True
            os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._watch, args=(ours,), name="bagua-elastic-sigterm", daemon=True).start()

    @property
    def asked(self) -> bool:
        """Whether SIGTERM has come."""
        return self._asked.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether it comes within `seconds`."""
        return self._asked.wait(seconds)

    def close(self) -> None:
        """Restore the previous SIGTERM handler. Call it in the main thread."""
        global _current
        self._over.set()
        if self._sockets is None:
            return
        ours, theirs = self._sockets
        self._sockets = _current = None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
        with contextlib.suppress(OSError):  # the thread may have ended
            ours.shutdown(socket.SHUT_RDWR)  # wakes it up
        theirs.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked.set()

    def _watch(self, ours: socket.socket) -> None:
        with ours:
            while signal.SIGTERM not in (numbers := ours.recv(64)):
                if not numbers:
                    return
            self._asked.set()
            if self._over.wait(self._grace_s):
                return
            print(
                f"bagua: no commit within {self._grace_s:g} s of SIGTERM; exiting without one",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_CODE)


def _forget() -> None:
    """A forked child has the handler and the socket too: its signals must not count as its parent's."""
    global _current
    if _current is not None:
        _current = None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def ignore_sigterm(worker_id: int = 0) -> None:
    """For `DataLoader(worker_init_fn=...)`: keeps a worker alive after SIGTERM, so that the rank can still commit.

    The launcher sends SIGTERM to a rank's whole process group. A worker that ends takes the rank with it. One that
    ignores the signal ends when its rank does. At the end of a script the rank kills workers that are still there, as
    with `persistent_workers=True`, for which Python would wait for ever; where there is no /proc (macOS), delete such a
    loader yourself.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(inputs, num_workers=1, worker_init_fn=bagua.elastic.ignore_sigterm)
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _kill_ignoring() -> None:
    """At the end of a script, before multiprocessing sends SIGTERM to daemonic processes and waits for them."""
    kept = [each for each in multiprocessing.active_children() if each.daemon and _ignores_sigterm(each.pid)]
    if kept and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would report them as failed
    for each in kept:
        each.kill()


def _ignores_sigterm(pid: int | None) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended, or there is no /proc
        return False
    found = re.search(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) & 1 << signal.SIGTERM - 1)


# In the rank, which imports this module with the function that it gives to its loader.
Finalize(None, _kill_ignoring, exitpriority=100)
shield = ignore_sigterm  # its name until 2026-11-28
