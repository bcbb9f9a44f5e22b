"""`bagua run --preload` without `--fault-tolerant`: torchelastic's workers are forked, too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from bagua.distributed.fork_server import ForkedProcess, ForkServer, ForkServerError

__all__ = ["forked_workers"]


@contextmanager
def forked_workers(server: ForkServer, prog: str) -> Iterator[None]:
    """Until the block ends torchelastic's agent has its workers forked by `server`.

    A worker that is to be bound to CPUs (`--numa-binding`) begins with another program, and is started as ever. So are
    all once the server is lost.

    Args:
        server: forks them.
        prog: what was called, for the log.
    """
    lost = False

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            nonlocal lost
            if not lost and args[0] == sys.executable:
                try:
                    return _start(server, self, args, env)
                except ForkServerError as error:
                    lost = True
                    print(f"{prog}: --preload: {error}; from now on ranks start without it", file=sys.stderr)
            return super()._popen(args, env)

    earlier = api.get_subprocess_handler
    api.get_subprocess_handler = Handler
    try:
        yield
    finally:
        api.get_subprocess_handler = earlier


def _start(
    server: ForkServer, handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]
) -> ForkedProcess | subprocess.Popen[bytes]:
    paths = [None if file is None else file.name for file in (handler._stdout, handler._stderr)]
    return server.start(args, env, *paths)
