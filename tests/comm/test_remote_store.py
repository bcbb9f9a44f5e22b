"""Connecting to a store that another process serves: it answers, does not, or only seems to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from bagua.comm.remote_store import connect_store
from bagua.errors import CommunicationError

LIMIT_S = 60.0


class Left(Exception):
    """The members have changed."""


def nothing() -> None:
    """No alert."""


def leave_after(number: int) -> Callable[[], None]:
    """An alert that raises when it is called so many times."""
    calls = iter(range(number - 1))

    def alert() -> None:
        if next(calls, None) is None:
            raise Left

    return alert


def serve(listener: socket.socket) -> dist.TCPStore:
    """A store of this process."""
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@contextmanager
def stopped() -> Iterator[str]:
    """The address of a store whose process is stopped: it accepts connections and does not answer. Later it goes on."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    store = serve(listener)
    for thread in threading.enumerate():  # left behind while the store was stopped
        if thread.name == "bagua-connect":
            thread.join(LIMIT_S)
            assert not thread.is_alive()
    del store


def closed_port() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_keys_are_below_the_prefix() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address, server = f"127.0.0.1:{listener.getsockname()[1]}", serve(listener)
    store = connect_store(address, "bagua/group/3", LIMIT_S, nothing)
    store.set("who", "me")
    assert server.get("bagua/group/3/who") == b"me"
    server.set("bagua/group/3/others", "you")
    assert store.get("others") == b"you"


def test_a_store_that_comes_late_is_found() -> None:
    address, made = closed_port(), []

    def alert() -> None:
        if not made:
            made.append(serve(socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))))

    connect_store(address, "x", LIMIT_S, alert).set("key", "value")
    assert made[0].get("x/key") == b"value"


def test_nobody_listens() -> None:
    address = closed_port()
    with pytest.raises(CommunicationError, match=f"the store at {address} does not answer: .*refused"):
        connect_store(address, "x", 0.05, nothing)


def test_an_alert_ends_the_wait_for_a_host_that_is_gone() -> None:
    with pytest.raises(Left):
        connect_store(closed_port(), "x", LIMIT_S, leave_after(3))


def test_an_alert_ends_the_wait_for_a_process_that_is_stopped() -> None:
    with stopped() as address, pytest.raises(Left):
        connect_store(address, "x", LIMIT_S, leave_after(2))


def test_a_process_that_is_stopped_is_given_up_in_time() -> None:
    with (
        stopped() as address,
        pytest.raises(CommunicationError, match=f"the store at {address} does not answer: it accepts connections"),
    ):
        connect_store(address, "x", 0.3, nothing)


@pytest.mark.parametrize("address", ["", "host", "host:", ":29400", "host:http", "host:-1"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        connect_store(address, "x", LIMIT_S, nothing)
