"""A client of a `TCPStore` that another process serves, made without waiting for a host that is gone or stopped."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from bagua.comm.own_threads import start_thread
from bagua.errors import CommunicationError

__all__ = ["connect_store"]

_PROBE_S = 1.0  # for the host to answer
_POLL_S = 0.01  # between two attempts
_ALERT_S = 0.1  # between two alerts while a client waits for the server's first answer


def connect_store(address: str, prefix: str, timeout_s: float, alert: Callable[[], object]) -> dist.Store:
    """The keys below `prefix` of the store at host:port.

    Args:
        alert: called now and then while it is not connected; may raise.

    Raises:
        CommunicationError: the store did not answer within `timeout_s`.
        ValueError: `address` is not host:port.
    """
    host, _, digits = address.rpartition(":")
    if not host or not digits.isdecimal():
        raise ValueError(f"address {address!r}: expected host:port")
    port, deadline = int(digits), time.monotonic() + timeout_s
    while True:
        outcome = _attempt(host, port, timeout_s, deadline, alert)
        if isinstance(outcome, dist.Store):
            return dist.PrefixStore(prefix, outcome)
        alert()
        if time.monotonic() > deadline:
            raise CommunicationError(f"the store at {address} does not answer: {outcome}") from outcome
        time.sleep(_POLL_S)


def _attempt(
    host: str, port: int, timeout_s: float, deadline: float, alert: Callable[[], object]
) -> dist.Store | Exception:
    """A client, or why there is none."""
    try:
        socket.create_connection((host, port), timeout=_PROBE_S).close()
    except OSError as error:
        return error
    made: queue.Queue[dist.Store | Exception] = queue.Queue()

    def connect() -> None:
        try:
            limit = timedelta(seconds=timeout_s)
            made.put(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))
        except (OSError, RuntimeError) as error:
            made.put(error)

    # A server that is stopped accepts the connection, and torch reads its first answer without a limit. So this is done
    # in a thread that may be left behind.
    start_thread(connect, "bagua-connect")
    while True:
        try:
            return made.get(timeout=_ALERT_S)
        except queue.Empty:
            alert()
            if time.monotonic() > deadline:
                return TimeoutError("it accepts connections, but its process may be stopped")
