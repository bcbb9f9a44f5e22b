"""The sockets of a gloo group are found and shut down; all others stay open."""

from __future__ import annotations

import os
import random
import select
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from bagua.comm.gloo_connections import GlooConnections
from bagua.comm.team import Team
from tests.rank_threads import run_teams

LIMIT_S = 60.0
NEVER_S = 600.0  # gloo's own timeout, which must not be what ends a wait


def sockaddr(address: str, port: int) -> bytes:
    """As the operating system keeps it."""
    if ":" in address:
        head = int(socket.AF_INET6).to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + bytes(4)
        return head + socket.inet_pton(socket.AF_INET6, address) + bytes(4)
    head = int(socket.AF_INET).to_bytes(2, sys.byteorder) + port.to_bytes(2, "big")
    return head + socket.inet_pton(socket.AF_INET, address) + bytes(8)


@contextmanager
def connected(address: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listener, and both ends of a connection to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        with socket.create_connection(listener.getsockname()[:2], timeout=LIMIT_S) as near:
            far, _ = listener.accept()
            far.settimeout(LIMIT_S)
            with far:
                yield listener, near, far


def is_open(near: socket.socket, far: socket.socket) -> bool:
    """Whether data still passes both ways."""
    near.sendall(b"there")
    far.sendall(b"back!")
    return far.recv(5, socket.MSG_WAITALL) == b"there" and near.recv(5, socket.MSG_WAITALL) == b"back!"


def sever_while_blocked(team: Team, opened: threading.Barrier, ended: threading.Barrier) -> tuple[str, float]:
    team.alert = lambda: None  # somebody would cut connections: only then are they looked for
    first, second = (team.open(name, False, team.discover_nodes(["n"] * team.size)) for name in ("first", "second"))
    opened.wait(LIMIT_S)
    errors: list[str] = []
    if team.rank == 0:
        started = threading.Event()

        def block() -> None:
            started.set()
            try:
                first.world.recv(torch.empty(4), 1, 7).wait()  # rank 1 sends nothing
            except RuntimeError as error:
                errors.append(str(error))

        blocked = threading.Thread(target=block, daemon=True)
        blocked.start()
        assert started.wait(LIMIT_S)
        blocked.join(0.2)  # it may well be within the collective by now
        first.sever()
        blocked.join(LIMIT_S)
        assert not blocked.is_alive()
    ended.wait(2 * LIMIT_S)
    total = torch.ones(1)
    second.world.pg.allreduce([total]).wait()  # another group of the same ranks
    return "".join(errors), total.item()


def test_a_thread_that_is_blocked_in_a_collective_is_freed() -> None:
    with connected() as (listener, near, far):
        opened, ended = threading.Barrier(2, timeout=LIMIT_S), threading.Barrier(2, timeout=LIMIT_S)
        (error, total), (_, other) = run_teams(2, sever_while_blocked, opened, ended, timeout_s=NEVER_S)
        assert error and "timed out" not in error.lower(), error
        assert total == other == 2.0
        assert is_open(near, far)
        with socket.create_connection(listener.getsockname(), timeout=LIMIT_S):
            listener.settimeout(LIMIT_S)
            listener.accept()[0].close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("before", [b"", b"\x00\x01\xff", bytes(40)])
def test_connections_to_published_addresses_are_shut_down(address: str, before: bytes) -> None:
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this machine has no {address}")
    with connected(address) as (mine, near, far), connected(address) as (theirs, other_near, other_far):
        connections = GlooConnections()
        connections.published(before + sockaddr(address, mine.getsockname()[1]) + b"more")
        assert connections.shut_down() == 2
        assert near.recv(1) == far.recv(1) == b""
        assert is_open(other_near, other_far)
        # Of another rank it is read where it was found in what this rank has published.
        connections.found(before + sockaddr(address, theirs.getsockname()[1]) + b"more")
        connections.shut_down()
        assert other_near.recv(1) == other_far.recv(1) == b""
        with socket.create_connection(theirs.getsockname()[:2], timeout=LIMIT_S):  # listeners are left alone
            theirs.accept()[0].close()


def test_values_that_hold_no_address_shut_nothing_down() -> None:
    random.seed(0)
    values: list[bytes | str] = [b"", b"\x02", "", "rank 0 is here", random.randbytes(64)]
    values += [sockaddr("127.0.0.1", 0), sockaddr("127.0.0.1", 9)[:7], sockaddr("::1", 9)[:23]]
    with connected() as (_, near, far):
        connections = GlooConnections()
        for value in values:
            connections.published(value)
            connections.found(value)
        assert connections.shut_down() == 0
        assert is_open(near, far)


def test_what_another_rank_wrote_is_not_read_before_the_own_address_is_known() -> None:
    with connected() as (listener, near, far):
        connections = GlooConnections()
        connections.found(sockaddr("127.0.0.1", listener.getsockname()[1]))
        assert connections.shut_down() == 0
        assert is_open(near, far)


def test_a_connection_that_is_still_being_made_is_shut_down() -> None:
    """Its other end has no name yet: the peer is silent, or its queue is full."""
    with ExitStack() as open_ones, socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        for _ in range(64):
            near = open_ones.enter_context(socket.socket())
            near.setblocking(False)
            near.connect_ex(listener.getsockname())
            if not select.select([], [near], [], 0.2)[1]:
                break
        else:
            pytest.skip("this machine has no limit for connections that are not accepted")
        connections = GlooConnections()
        connections.published(sockaddr("127.0.0.1", listener.getsockname()[1]))
        assert connections.shut_down() > 0
        assert select.select([near], [near], [], LIMIT_S)[0]
        with pytest.raises(OSError):
            near.getpeername()


@pytest.mark.parametrize("ours", [False, True])
def test_sockets_stay_blocking_under_a_default_timeout(ours: bool) -> None:
    """gloo and the store of torch read them: they would fail at once where a blocking read waits."""
    with connected() as (mine, near, far), connected() as (other, *_):
        near.settimeout(None)
        port = (mine if ours else other).getsockname()[1]
        socket.setdefaulttimeout(LIMIT_S)
        try:
            connections = GlooConnections()
            connections.published(sockaddr("127.0.0.1", port))
            assert connections.shut_down() == 2
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(near.fileno())
        if not ours:
            assert is_open(near, far)


def test_looking_for_sockets_leaves_no_file_open() -> None:
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        GlooConnections().published(b"anything")
        GlooConnections().shut_down()
        os.close(writing)
        assert os.read(reading, 1) == b""  # its other end is closed; a duplicate would keep it open
    finally:
        os.close(reading)
