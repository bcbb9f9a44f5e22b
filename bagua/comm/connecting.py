"""Connects a group of gloo or NCCL, in time also where a rank of it dies meanwhile."""

from __future__ import annotations

import queue
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua.comm import abortable_nccl
from bagua.comm.abortable_nccl import AbortableNccl
from bagua.comm.own_threads import start_thread
from bagua.comm.store import RendezvousStore

__all__ = ["LateGloo", "connect_gloo", "connect_nccl"]

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

    connections = rendezvous.connections
    return _unless_alerted(connect, alert, lambda: None if connections is None else connections.shut_down())


def connect_nccl(
    rendezvous: RendezvousStore,
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    device: torch.device,
    alert: Callable[[], object],
) -> AbortableNccl:
    """Return an NCCL group that can be aborted. Collective: returns when all of its ranks are connected.

    Args:
        rendezvous: in which the ranks say that they are there, before NCCL waits for them without a look at anything.
        store: torch's, in which NCCL meets.
        timeout: of connecting, and of each operation later.
        device: of this rank.
        alert: called again and again; raises if a rank is lost.

    Raises:
        RuntimeError: not all ranks have come in time, or a connection has failed.
    """
    rendezvous.set(f"here/{rank}", b"1")
    rendezvous.wait([f"here/{each}" for each in range(size)], timeout)
    pg = abortable_nccl.make_nccl(store, rank, size, timeout)
    made = AbortableNccl(pg, device, timeout.total_seconds(), alert)
    _unless_alerted(made.connect, alert, made.abort)
    return made


def _unless_alerted(connect: Callable[[], Any], alert: Callable[[], object] | None, cut: Callable[[], object]) -> Any:
    """What `connect` returns, from a thread that is left behind when `alert` raises. Then `cut` is called."""
    if alert is None:
        return connect()
    ended: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()

    def work() -> None:
        try:
            ended.put((connect(), None))
        except Exception as error:
            ended.put((None, error.with_traceback(None)))

    start_thread(work, "bagua-connect")
    while True:
        try:
            pg, error = ended.get(timeout=_ALERT_S)
            break
        except queue.Empty:
            try:
                alert()
            except BaseException:
                cut()
                raise
    if error is not None:
        raise error
    return pg
