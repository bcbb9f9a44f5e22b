"""Signals that end a command: Ctrl-C and SIGTERM become exceptions while the command runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["end_by_exception"]


@contextmanager
def end_by_exception() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT and SystemExit(143) for SIGTERM until the block ends.

    A shell without job control starts `command &` with SIGINT ignored, and so does `make` under nohup. Python then
    installs no handler, and children inherit the disposition: nobody could be interrupted. A handler that is
    installed here becomes the default action in children, because exec resets what is not ignored.

    SIGHUP is left as it is, so that nohup keeps its meaning. Outside the main thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _terminated}
    earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
