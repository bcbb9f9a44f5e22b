"""`bagua run --preload` without `--fault-tolerant`: torchelastic's workers are forked, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from bagua.distributed.fork_server import ForkServer

__all__ = ["forked_workers"]


@contextmanager
def forked_workers(server: ForkServer) -> Iterator[None]:
    """Until the block ends torchelastic's agent has its workers forked by `server`.

    A worker that is to be bound to CPUs (`--numa-binding`) begins with another program, and is started as ever. So are
    all once the server is lost.
    """

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            paths = [None if file is None else file.name for file in (self._stdout, self._stderr)]
            forked = server.start(args, env, *paths) if args[0] == sys.executable else None
            return forked or super()._popen(args, env)

    earlier = api.get_subprocess_handler
    api.get_subprocess_handler = Handler
    try:
        yield
    finally:
        api.get_subprocess_handler = earlier
