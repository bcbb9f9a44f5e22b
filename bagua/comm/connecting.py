"""Connects a gloo group, in time also where a rank of it dies meanwhile."""

from __future__ import annotations

import queue
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bagua.comm.own_threads import start_thread
from bagua.comm.store import RendezvousStore

__all__ = ["LateGloo", "connect_gloo"]

_ALERT_S = 0.05  # between two alerts


class LateGloo:
    """A gloo group that is connected when it is first used: by all of its ranks, with the same collective.

    Args:
        connect: returns the group; raises if not all ranks come.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._made = connect, None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = self._connect()
        return getattr(self._made, name)


def connect_gloo(
    rendezvous: RendezvousStore, rank: int, size: int, timeout: timedelta, alert: Callable[[], object] | None = None
) -> Any:
    """Return a gloo group. Collective: returns when all of its ranks have all of their connections.

    gloo waits for a rank that has died, and has no abort. So with `alert` a thread connects, which is left behind when
    `alert` raises; what is connected by then is cut, so that no other rank waits for this one.

    Args:
        rendezvous: in which ranks publish where they listen.
        timeout: of connecting, and of each collective later.
        alert: called again and again; raises if a rank is lost.

    Raises:
        RuntimeError: not all ranks have come in time, or a connection has failed.
    """

    def connect() -> Any:
        pg: Any = dist.ProcessGroupGloo(rendezvous, rank, size, timeout)
        # A rank that gave the group up at once would close connections of ranks that still make theirs.
        pg.barrier().wait()
        return pg

    if alert is None:
        return connect()
    ended: queue.Queue[tuple[Any, RuntimeError | None]] = queue.Queue()

    def work() -> None:
        try:
            ended.put((connect(), None))
        except RuntimeError as error:
            ended.put((None, error.with_traceback(None)))

    start_thread(work, "bagua-gloo")
    while True:
        try:
            pg, error = ended.get(timeout=_ALERT_S)
            break
        except queue.Empty:
            try:
                alert()
            except BaseException:
                if rendezvous.connections is not None:
                    rendezvous.connections.shut_down()
                raise
    if error is not None:
        raise error
    return pg
