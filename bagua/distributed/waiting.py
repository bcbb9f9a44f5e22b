"""Ends a launcher that waits for other nodes within a call of torch in which no Python code runs."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["end_while_waiting"]

_REACTS_S = 1.0  # for a launcher that runs Python code to end by itself
_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def end_while_waiting(prog: str) -> Iterator[None]:
    """Until the block ends or ranks are started, SIGINT and SIGTERM end this process within about a second.

    Python runs a signal handler between two instructions of the main thread. A launcher that connects to the store of
    a rendezvous is inside torch for minutes, so its handlers do not run. The number of a signal is written to a socket
    at once, though (`signal.set_wakeup_fd`), and a thread reads it there.

    Handlers have to be installed when the block begins. Once torch has installed its own, which it does as it starts
    the ranks, the thread leaves signals to these. Outside the main thread this does nothing.

    Args:
        prog: the command, for the message.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    over = threading.Event()

    def watch() -> None:
        while received := reader.recv(1):
            number = signal.Signals(received[0])
            if number not in handlers or over.wait(_REACTS_S) or signal.getsignal(number) != handlers[number]:
                continue
            with suppress(OSError, ValueError):  # the terminal may be gone
                print(f"{prog}: ended by {number.name} while it waited for other nodes", file=sys.stderr, flush=True)
            os._exit(128 + number)

    earlier = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="bagua-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(earlier)
        writer.close()
        thread.join()
        reader.close()
