"""A client of a `TCPStore` that another process serves, made without waiting for a host that is gone."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from bagua.errors import CommunicationError

__all__ = ["connect_store"]

_PROBE_S = 1.0  # for the host to answer
_POLL_S = 0.01


def connect_store(address: str, prefix: str, timeout_s: float, alert: Callable[[], object]) -> dist.Store:
    """The keys below `prefix` of the store at host:port.

    Args:
        alert: called between two attempts; may raise.

    Raises:
        CommunicationError: the store did not answer within `timeout_s`.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
            limit = timedelta(seconds=timeout_s)
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
            return dist.PrefixStore(prefix, store)
        except (OSError, RuntimeError) as error:
            alert()
            if time.monotonic() > deadline:
                raise CommunicationError(f"the store at {address} does not answer: {error}") from error
            time.sleep(_POLL_S)
