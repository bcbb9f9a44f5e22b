"""Relays: the same exchanges through a third rank, who may use one, and how they end."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua.comm import mesh_connect, relays, team_sockets
from bagua.comm.mesh import why_no_mesh
from bagua.comm.pipelined import scatter_gather_rows
from bagua.comm.relays import Relaying, await_quiet
from bagua.comm.team import Team
from bagua.errors import CommunicationError
from tests.rank_threads import run_teams

pytestmark = pytest.mark.skipif(bool(why_no_mesh()), reason=why_no_mesh() or "there is one")
WAIT_S = 60.0
ROUTES = {(0, 1): 2, (1, 3): 0}  # ranks 0 and 2 pass on for others, and 0 has a way through 2 itself


def sockets() -> int:
    gc.collect()
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


def until(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
    return done()


@pytest.fixture(autouse=True)
def _only_relays_of_this_test() -> Iterator[None]:
    relays._forget_ended()
    assert not relays._alive
    yield
    assert until(lambda: all(each.ended for each in relays._alive)), "a relay outlives its connections"
    relays._forget_ended()


def exchanged(team: Team, routes: Any, numel: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and a sum, twice each."""
    team.routes = routes
    groups = team.open("lane", native=True)
    mesh = groups.world.mesh
    assert mesh is not None
    for k in range(2):
        rows, peers = (torch.zeros(team.size, numel, dtype=torch.uint8) for _ in range(2))
        scatter_gather_rows(
            groups.world,
            rows,
            peers,
            write=lambda lo, hi, out: out.fill_(team.rank + 1),
            combine=lambda rows=rows, peers=peers: rows[team.rank].copy_(peers.sum(0)),
            read=lambda lo, hi: None,
        )
        x_N = torch.arange(numel, dtype=torch.float32) * (team.rank + 1 + k)
        mesh.sum_(x_N)
    groups.leave(abort=False)
    return rows, x_N


@pytest.mark.parametrize("numel", [4, 1_000_000])  # more than all buffers on the way hold
@pytest.mark.parametrize("size", [4, 5])
def test_exchanges_through_relays_are_those_without(size: int, numel: int) -> None:
    before = sockets()
    direct = run_teams(size, exchanged, {}, numel)
    routed = run_teams(size, exchanged, ROUTES, numel)
    for (rows, x_N), (same_rows, same_x_N) in zip(direct, routed, strict=True):
        assert torch.equal(rows, same_rows) and torch.equal(x_N, same_x_N)
    assert len(relays._alive) == 2
    assert sum(each.num_bytes for each in relays._alive) > 4 * 2 * numel
    assert until(lambda: all(each.ended for each in relays._alive))
    assert until(lambda: sockets() <= before)


def test_relays_carry_the_groups_of_nodes_too() -> None:
    """Leaders 0, 2 and 3 exchange; rank 1, which is in no such group, passes on for 2 and 3."""

    def main(team: Team) -> float:
        team.routes = {(2, 3): 1}
        groups = team.open("lane", hierarchical=True, nodes=[[0, 1], [2], [3]], native=True)
        x_N = torch.full((6,), float(team.rank))
        if groups.inter is not None:
            assert groups.inter.mesh is not None
            groups.inter.mesh.sum_(x_N)
        groups.leave(abort=False)
        return float(x_N[0])

    assert run_teams(4, main, nodes=[0, 0, 1, 2]) == [5, 1, 5, 5]
    assert len(relays._alive) == 1


def test_strangers_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not know the relay's secret, or asks for a way that is nobody's, is closed."""
    listen, met = mesh_connect.listen, list[socket.socket]()

    def listen_and_be_visited(host: str | None, size: int) -> team_sockets.Offer:
        offer = listen(host, size)
        wrong = relays._GREETING.pack(b"BAGUARLY", 1, 1, 0, b"0/world", bytes(16), bytes(32))
        nonce, other = bytes(16), relays.Way("0/world", 3, 2)
        proof = relays._proof(offer.published, other, nonce)
        known = relays._GREETING.pack(b"BAGUARLY", 1, other.source, other.target, other.kind.encode(), nonce, proof)
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(200), wrong, known):
            sock = socket.create_connection((offer.published["host"], offer.published["port"]), timeout=WAIT_S)
            sock.sendall(said)
            met.append(sock)
        return offer

    monkeypatch.setattr(mesh_connect, "listen", listen_and_be_visited)
    found = run_teams(4, exchanged, ROUTES)
    assert all(torch.equal(rows, torch.full((4, 4), 10, dtype=torch.uint8)) for rows, _ in found)
    assert len(met) == 4 * (4 + 2)
    for sock in met:
        with sock, suppress(ConnectionResetError):
            assert sock.recv(64) == b""


def test_a_relay_that_cannot_reach_a_rank_fails_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(offer: Any, source: str, who: str, patience: Any) -> Any:
        raise CommunicationError(f"cannot connect to {who}: no route to host")

    monkeypatch.setattr(relays, "connect_to", refuse)
    before = sockets()
    with pytest.raises(AssertionError) as failed:
        run_teams(4, exchanged, ROUTES, timeout_s=3)  # for which the others wait
    text = str(failed.value)
    assert text.count("native transport cannot be opened: ") >= 4
    assert "cannot connect to rank 0 for rank 1: no route to host" in text
    assert until(lambda: sockets() <= before)


def test_an_end_that_fails_is_known_at_the_other_end() -> None:
    """Ranks 0 and 1, which reach each other through 2 only: rank 0 gives up, and rank 1 learns it at once."""

    def main(team: Team) -> str:
        team.routes = {(0, 1): 2}
        groups = team.open("lane", native=True)
        mesh = groups.world.mesh
        assert mesh is not None
        team.all_gather_bytes("connected", b"-")
        if team.rank == 0:
            time.sleep(0.2)
            mesh.abort()
        elif team.rank == 1:
            with pytest.raises(CommunicationError, match="rank 0"):
                mesh.swap([], [(0, torch.zeros(8, dtype=torch.uint8))])
        groups.leave(abort=False)
        return "done"

    started = time.monotonic()
    assert run_teams(3, main, timeout_s=60) == ["done"] * 3
    assert time.monotonic() - started < 20


def pair_of_ways() -> tuple[Relaying, socket.socket, socket.socket]:
    """A relay, and both ends of what goes through it."""
    near, one = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    other, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    near.settimeout(WAIT_S)
    far.settimeout(WAIT_S)
    return Relaying([one, other]), near, far


def test_bytes_pass_both_ways_at_once_and_a_slow_reader_holds_up_its_writer() -> None:
    relaying, near, far = pair_of_ways()
    data = os.urandom(3_000_000)
    got: dict[socket.socket, bytes] = {}

    def read(sock: socket.socket) -> None:
        time.sleep(0.2)
        parts = b""
        while len(parts) < len(data):
            parts += sock.recv(50_000)
        got[sock] = parts

    threads = [threading.Thread(target=read, args=(sock,), daemon=True) for sock in (near, far)]
    threads += [threading.Thread(target=sock.sendall, args=(data,), daemon=True) for sock in (near, far)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert got[near] == data and got[far] == data
    assert relaying.num_bytes == 2 * len(data)
    near.close()
    assert far.recv(1) == b"" and until(lambda: relaying.ended)
    far.close()


def test_what_was_sent_before_the_end_arrives() -> None:
    relaying, near, far = pair_of_ways()
    data = os.urandom(2_000_000)
    writer = threading.Thread(target=lambda: (near.sendall(data), near.close()), daemon=True)
    writer.start()
    time.sleep(0.1)
    parts = b""
    while part := far.recv(1 << 20):
        parts += part
    assert parts == data
    writer.join(WAIT_S)
    assert until(lambda: relaying.ended)
    far.close()


def test_a_rank_that_ends_stays_while_others_exchange() -> None:
    relaying, near, far = pair_of_ways()
    stop = threading.Event()

    def chat() -> None:
        while not stop.wait(0.05):
            near.sendall(b"x")
            far.recv(1)

    thread = threading.Thread(target=chat, daemon=True)
    thread.start()
    started = time.monotonic()
    threading.Timer(1.5, stop.set).start()
    await_quiet()
    assert time.monotonic() - started > 2.3, "1.5 s of bytes, and a second of silence"
    thread.join(WAIT_S)
    started = time.monotonic()
    await_quiet(most_s=0.0)
    relaying.cut()
    assert until(lambda: relaying.ended)
    await_quiet()
    assert time.monotonic() - started < 10
    near.close()
    far.close()


@pytest.mark.process
def test_a_forked_child_does_not_keep_the_connections() -> None:
    relaying, near, far = pair_of_ways()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        near.close()
        far.close()
        os.read(reading, 1)  # as long as a data loader
        os._exit(0)
    try:
        relaying.cut()
        assert near.recv(1) == b"" and far.recv(1) == b""
        assert until(lambda: relaying.ended)
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        near.close()
        far.close()


def test_a_greeting_fits_its_names() -> None:
    assert struct.calcsize(relays._GREETING.format) == 8 + 3 * 4 + 32 + 16 + 32
