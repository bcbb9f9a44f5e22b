"""Threads of the library that call torch: they end before the interpreter does.

A daemon thread that returns from C++ while the interpreter ends is ended there by Python, and the process aborts:
`terminate called without an active exception` (before Python 3.14). What such a thread belongs to may be gone long
before: a script's `main` returns, and its model is dropped. So the threads themselves are known here. At exit they are
asked to end, and waited for.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from contextlib import suppress

__all__ = ["end_threads", "start_thread"]

_PATIENCE_S = 3.0  # for all of them together
_LOOK_S = 0.02
_own: dict[threading.Thread, Callable[[], object] | None] = {}  # without a lock, which a fork could find held


def start_thread(work: Callable[[], object], name: str, end: Callable[[], object] | None = None) -> threading.Thread:
    """Start a daemon thread that is waited for at exit.

    Args:
        end: asks it to end, or frees what it waits for. Called at exit, from another thread; must not block.
    """

    def run() -> None:
        try:
            work()
        finally:
            _own.pop(threading.current_thread(), None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _own[thread] = end
    try:
        thread.start()
    except BaseException:
        del _own[thread]
        raise
    return thread


def end_threads(patience_s: float = _PATIENCE_S) -> None:
    """Ask all of them to end, and wait for a while. One that does not is left behind."""
    deadline = time.monotonic() + patience_s
    asked: set[threading.Thread] = set()
    while alive := [(thread, end) for thread, end in list(_own.items()) if thread.is_alive()]:
        for thread, end in alive:
            if thread not in asked and end is not None:
                with suppress(Exception):
                    end()
            asked.add(thread)
        if time.monotonic() > deadline:
            return
        alive[0][0].join(_LOOK_S)  # the others may need it, or it them


# Registered before all others, so it runs after them: lanes take leave of the other ranks first.
atexit.register(end_threads)
