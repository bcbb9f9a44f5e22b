"""Processes that are forked from one that has imported torch: each costs milliseconds, not seconds, of processor time.

Not for CUDA, which does not survive a fork once it is initialised.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any


class ForkServer:
    """`fork(main, *args)` calls `main(pipe, *args)` in a new process and returns the other end of the pipe.

    The processes of one server have the same seed of string hashes, so sets are in the same order in all of them.
    """

    def __init__(self) -> None:
        self._pipe, child = mp.Pipe()
        self._process = mp.get_context("spawn").Process(target=_serve, args=(child,), daemon=True)
        self._process.start()
        child.close()

    def fork(self, main: Callable[..., None], *args: Any) -> Connection:
        """Return at once, also while the server still imports torch."""
        ours: Any
        ours, theirs = mp.Pipe()
        self._pipe.send((main, args))
        reduction.send_handle(self._pipe, theirs.fileno(), self._process.pid)
        theirs.close()
        return ours

    def close(self) -> None:
        """End the server; what it has forked goes on."""
        self._process.kill()
        self._process.join(5)
        self._pipe.close()


def _serve(pipe: Connection) -> None:
    import pytest  # noqa: F401  imported by every module of tests
    import torch._dynamo
    import torch.distributed.nn  # noqa: F401

    import bagua  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mp.current_process().daemon = False  # what is forked may have workers of its own, such as those of a DataLoader
    gc.freeze()
    while True:
        try:
            main, args = pipe.recv()
            file = reduction.recv_handle(pipe)
        except EOFError:
            return
        if os.fork():  # never waited for, so that the number of one that has ended is nobody else's
            os.close(file)
            continue
        try:
            pipe.close()
            main(Connection(file), *args)
        finally:
            os._exit(0)
