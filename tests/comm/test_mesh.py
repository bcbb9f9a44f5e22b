"""The native transport's sockets: who gets in, what is refused, and that nobody waits for ever."""

from __future__ import annotations

import errno
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

import bagua.comm.mesh_connect as mesh_connect
import bagua.comm.team_sockets as team_sockets
from bagua.comm.groups import Groups
from bagua.comm.mesh import Mesh, why_no_mesh
from bagua.comm.mesh_connect import CONGESTION
from bagua.comm.pipelined import scatter_gather_rows
from bagua.comm.team import Team
from bagua.errors import CommunicationError
from tests.rank_threads import run_teams

pytestmark = pytest.mark.skipif(bool(why_no_mesh()), reason=why_no_mesh() or "there is one")
FRAME = struct.Struct("<IIIIQ")
MAGIC = 0x4E414742
WAIT_S = 60.0


def sockets() -> int:
    """Open TCP sockets of this process."""
    gc.collect()
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


@pytest.fixture
def pair() -> Iterator[Callable[..., tuple[Mesh, socket.socket]]]:
    """A mesh of rank 0 of 2, and the socket of its peer."""
    opened: list[Any] = []

    def make(timeout_s: float = WAIT_S) -> tuple[Mesh, socket.socket]:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        mine.setblocking(False)
        theirs.settimeout(WAIT_S)
        mesh = Mesh(0, [-1, mine.detach()], timeout_s)
        opened.extend((mesh, theirs))
        return mesh, theirs

    yield make
    for each in opened:
        each.close()


PHASES = {"exchange": 0, "sum": 3, "swap": 4}  # of the first frame
every_kind = pytest.mark.parametrize("kind", PHASES)


def begin(mesh: Mesh, kind: str, numel: int) -> None:
    """An exchange in which rank 1's first frame has `numel` bytes; this rank's has as many."""
    rows, peers = torch.zeros(2, numel, dtype=torch.uint8), torch.zeros(2, numel, dtype=torch.uint8)
    if kind == "exchange":
        mesh.exchange(list(rows), list(peers), lambda row: None, lambda: None, lambda row: None)
    elif kind == "sum":
        mesh.sum_(rows[0].view(torch.float16))
    else:
        mesh.swap([(1, rows[0])], [(1, peers[0])])


def run_in_thread(mesh: Mesh, numel: int = 8, kind: str = "exchange") -> Callable[[], BaseException | None]:
    """Exchange `numel` bytes in a thread; returns what waits for it and returns its error."""
    found: list[BaseException | None] = []

    def work() -> None:
        try:
            begin(mesh, kind, numel)
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def join() -> BaseException | None:
        thread.join(WAIT_S)
        assert not thread.is_alive()
        return found[0]

    return join


def frame(sequence: int = 0, bucket: int = 0, phase: int = 0, nbytes: int = 8, magic: int = MAGIC) -> bytes:
    return FRAME.pack(magic, sequence, bucket, phase, nbytes)


def test_a_peer_that_follows_the_protocol_is_served(pair: Any) -> None:
    mesh, peer = pair()
    join = run_in_thread(mesh)
    peer.sendall(frame() + bytes(8))
    assert peer.recv(32, socket.MSG_WAITALL) == frame() + bytes(8)
    peer.sendall(frame(phase=1) + bytes(8))
    assert peer.recv(32, socket.MSG_WAITALL) == frame(phase=1) + bytes(8)
    assert join() is None


def test_a_sum_with_a_peer_that_follows_the_protocol(pair: Any) -> None:
    mesh, peer = pair()
    x_N = torch.tensor([1.0, 2, 3, 4])
    thread = threading.Thread(target=mesh.sum_, args=(x_N,), daemon=True)
    thread.start()
    # The second half begins here, and the first one there; then the sums follow in the same frame.
    assert peer.recv(32, socket.MSG_WAITALL) == frame(phase=3, nbytes=16) + struct.pack("<2f", 3, 4)
    peer.sendall(frame(phase=3, nbytes=16) + struct.pack("<2f", 10, 20))
    assert peer.recv(8, socket.MSG_WAITALL) == struct.pack("<2f", 11, 22)
    peer.sendall(struct.pack("<2f", 33, 44))
    thread.join(WAIT_S)
    assert x_N.tolist() == [11, 22, 33, 44]


@every_kind
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"nbytes": 9}, "rank 1 sent a row of 9 bytes instead of 8"),
        ({"nbytes": 2**63}, "rank 1 sent a row of 9223372036854775808 bytes instead of 8"),
        ({"sequence": 3}, "rank 1 is at exchange 3 of this lane, this rank at 0"),
        ({"bucket": 5}, "rank 1 exchanges bucket 5, this rank bucket 0"),
        ({"phase": 1}, "rank 1 sent phase 1 instead of {phase}"),
        ({"magic": 7}, "rank 1 sent what is no frame"),
    ],
)
def test_a_wrong_frame_is_refused_with_the_peers_rank(pair: Any, changed: Any, told: str, kind: str) -> None:
    mesh, peer = pair()
    join = run_in_thread(mesh, kind=kind)
    told = told.format(phase=PHASES[kind])
    peer.sendall(frame(**{"phase": PHASES[kind], **changed}) + bytes(64))
    error = join()
    assert isinstance(error, CommunicationError) and told in str(error)
    # Out of step for good: the peer is told, and later exchanges are refused.
    while data := peer.recv(64):
        assert data
    again = run_in_thread(mesh)()
    assert isinstance(again, CommunicationError) and "were cut" in str(again)


def swap_rows_in(mesh: Mesh, mine: int, theirs: int) -> None:
    rows = [torch.zeros(n, dtype=torch.uint8) for n in (mine, theirs)]
    peers = [torch.zeros(mine, dtype=torch.uint8) for _ in range(2)]
    mesh.exchange(rows, peers, lambda row: None, lambda: None, lambda row: None, swapped=True)


def test_rows_of_two_lengths_cannot_be_swapped(pair: Any) -> None:
    mesh, peer = pair()
    with pytest.raises(CommunicationError, match="2 ranks cannot swap rows of 8 and 16 bytes"):
        swap_rows_in(mesh, 8, 16)
    assert peer.recv(1) == b""


def test_a_peer_that_averages_does_not_understand_one_that_swaps(pair: Any) -> None:
    mesh, peer = pair()
    peer.sendall(frame() + bytes(8) + frame(phase=1) + bytes(8))
    with pytest.raises(CommunicationError, match="rank 1 sent phase 1 instead of 5"):
        swap_rows_in(mesh, 8, 8)


@every_kind
@pytest.mark.parametrize("after", [0, 10, 24, 30])
def test_a_peer_that_dies_in_mid_exchange(pair: Any, after: int, kind: str) -> None:
    mesh, peer = pair()
    join = run_in_thread(mesh, kind=kind)
    peer.sendall((frame(phase=PHASES[kind]) + bytes(8))[:after])
    peer.shutdown(socket.SHUT_RDWR)
    error = join()
    assert isinstance(error, CommunicationError) and "rank 1" in str(error)


def test_an_error_in_a_group_of_some_ranks_says_which_these_are(pair: Any) -> None:
    mesh, peer = pair()
    mesh.ranks = (4, 2)
    join = run_in_thread(mesh)
    peer.shutdown(socket.SHUT_RDWR)
    assert "rank 1: " in str(join()) and str(join()).endswith("(numbers are places in the group of ranks 4, 2)")


@every_kind
@pytest.mark.parametrize("numel", [8, 1 << 24])
def test_a_silent_peer_is_named_at_the_timeout(pair: Any, numel: int, kind: str) -> None:
    mesh, _ = pair(timeout_s=0.3)  # with the larger row, it is also the peer's socket that is full
    error = run_in_thread(mesh, numel, kind)()
    assert isinstance(error, CommunicationError) and "no answer from rank 1 within 0.3 s" in str(error)


def test_a_round_trip_that_is_not_known_is_none(pair: Any) -> None:
    mesh, _ = pair()  # no TCP
    assert mesh.round_trip_s == 0


def round_trip(team: Team) -> float:
    groups = team.open("lane", native=True)
    mesh = groups.world.mesh
    assert mesh is not None
    found = mesh.round_trip_s
    groups.leave(abort=False)
    return found


def test_round_trips_are_those_of_tcp() -> None:
    for seconds in run_teams(2, round_trip):
        assert 0 < seconds < WAIT_S


@every_kind
@pytest.mark.parametrize("close", [False, True])
def test_abort_frees_a_blocked_exchange(pair: Any, close: bool, kind: str) -> None:
    mesh, peer = pair()
    join = run_in_thread(mesh, kind=kind)
    sent = 28 if kind == "sum" else 32
    assert len(peer.recv(sent, socket.MSG_WAITALL)) == sent  # it waits for this peer now
    before = sockets()
    mesh.close() if close else mesh.abort()
    error = join()
    assert isinstance(error, CommunicationError) and "were cut" in str(error)
    assert sockets() == before - close
    assert peer.recv(1) == b""


def test_what_a_step_raises_ends_the_exchange(pair: Any) -> None:
    mesh, peer = pair()
    rows, peers = torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 8, dtype=torch.uint8)

    def write(row: int) -> None:
        raise KeyError("in a codec")

    with pytest.raises(KeyError, match="in a codec"):
        mesh.exchange(list(rows), list(peers), write, lambda: None, lambda row: None)
    assert peer.recv(1) == b""


def test_only_one_exchange_at_a_time(pair: Any) -> None:
    mesh, peer = pair()
    join = run_in_thread(mesh)
    assert len(peer.recv(32, socket.MSG_WAITALL)) == 32
    error = run_in_thread(mesh)()
    assert isinstance(error, CommunicationError) and "in flight" in str(error)
    mesh.abort()
    assert join() is not None


@pytest.mark.process
def test_a_forked_child_does_not_hold_the_connections() -> None:
    mine, theirs = socket.socketpair()
    fd = mine.detach()
    mesh = Mesh(0, [-1, fd], WAIT_S)
    theirs.settimeout(WAIT_S)
    child = os.fork()
    if child == 0:
        try:
            os.fstat(fd)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    join = run_in_thread(mesh)  # the parent's connection is not shut down
    assert theirs.recv(32, socket.MSG_WAITALL) == frame() + bytes(8)
    mesh.close()
    assert join() is not None
    theirs.close()


@pytest.mark.process
def test_a_child_that_is_forked_in_an_exchange_can_close_its_copy() -> None:
    """The thread that would end the exchange is not in the child."""
    mine, theirs = socket.socketpair()
    mesh = Mesh(0, [-1, mine.detach()], WAIT_S)
    theirs.settimeout(WAIT_S)
    join = run_in_thread(mesh)
    assert len(theirs.recv(32, socket.MSG_WAITALL)) == 32
    child = os.fork()
    if child == 0:
        error = run_in_thread(mesh)()
        mesh.abort()
        mesh.close()
        os._exit(0 if "cut" in str(error) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    mesh.close()
    assert join() is not None
    theirs.close()


def test_a_process_without_descriptors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays in the queue: it must not be tried again and again until the time is over."""
    own = team_sockets.listen("127.0.0.1", 2)
    refused = [OSError(errno.EMFILE, "Too many open files"), ConnectionAbortedError(), InterruptedError()]

    def accept(self: socket.socket) -> None:
        raise refused.pop()

    with own.listener, socket.create_connection(own.listener.getsockname()):
        monkeypatch.setattr(socket.socket, "accept", accept)
        with pytest.raises(CommunicationError, match="cannot accept: .*Too many open files"):
            mesh_connect._accept(0, own, 2, team_sockets.Patience(time.monotonic() + WAIT_S))
    assert not refused


def exchanged(team: Team) -> int:
    """Two exchanges; the sum of what this rank has in the end."""
    groups = team.open("lane", native=True)
    for _ in range(2):
        rows, peers = torch.zeros(team.size, 4, dtype=torch.uint8), torch.zeros(team.size, 4, dtype=torch.uint8)
        add_up(groups, rows, peers)
    groups.leave(abort=False)
    return int(rows.sum())


def add_up(groups: Groups, rows: torch.Tensor, peers: torch.Tensor) -> None:
    rank = groups.rank
    scatter_gather_rows(
        groups.world,
        rows,
        peers,
        write=lambda lo, hi, out: out.fill_(rank + 1),
        combine=lambda: rows[rank].copy_(peers.sum(0)),
        read=lambda lo, hi: None,
    )


@pytest.mark.parametrize("size", [2, 3, 5])
def test_connected_ranks_leave_no_sockets_behind(size: int) -> None:
    before = sockets()
    assert run_teams(size, exchanged) == [4 * size * size * (size + 1) // 2] * size
    assert sockets() <= before


def stranger(port: int, said: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    sock.sendall(said)
    return sock


def test_strangers_neither_get_in_nor_hold_the_ranks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    listen, met = mesh_connect.listen, list[socket.socket]()
    wrong = mesh_connect._HELLO.pack(b"BAGUAMSH", 1, 1, bytes(16), bytes(32))

    def listen_and_be_visited(host: str | None, size: int) -> team_sockets.Offer:
        offer = listen("127.0.0.1", size)
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(80), wrong):  # all before any rank connects
            met.append(stranger(offer.published["port"], said))
        return offer

    monkeypatch.setattr(mesh_connect, "listen", listen_and_be_visited)
    assert run_teams(3, exchanged) == [72] * 3
    assert len(met) == 9
    for sock in met:
        with sock, suppress(ConnectionResetError):
            assert sock.recv(64) == b""  # never a word to them


class _WrongReply:
    """In the place of the `Struct` of replies."""

    size = 32

    def pack(self, digest: bytes) -> bytes:
        return bytes(len(digest))


def test_who_answers_without_the_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_connect, "_REPLY", _WrongReply())
    with pytest.raises(AssertionError, match="who answers for rank 0 does not know its secret"):
        run_teams(2, exchanged, timeout_s=5)


def test_a_rank_that_cannot_listen_fails_on_all_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    listen, lock, calls = mesh_connect.listen, threading.Lock(), []

    def listen_but_once(host: str | None, size: int) -> team_sockets.Offer:
        with lock:
            calls.append(host)
            if len(calls) == 2:
                raise CommunicationError("cannot listen on 192.0.2.1: no such address")
        return listen(host, size)

    monkeypatch.setattr(mesh_connect, "listen", listen_but_once)
    before = sockets()
    with pytest.raises(AssertionError) as failed:
        run_teams(3, exchanged)  # and none that waits for connections
    assert str(failed.value).count("native transport cannot be opened: rank") == 3
    assert sockets() <= before


def test_a_congestion_control_that_the_kernel_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONGESTION, "no_such_one")
    with pytest.raises(AssertionError, match="BAGUA_NATIVE_CONGESTION=no_such_one: the kernel refuses"):
        run_teams(2, exchanged)


def test_the_congestion_control_is_that_of_all_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONGESTION, "reno")  # always there
    seen: list[bytes] = []
    made = mesh_connect.Mesh

    def mesh(rank: int, fds: list[int], timeout_s: float) -> Mesh:
        for fd in fds:
            if fd >= 0:
                with socket.socket(fileno=os.dup(fd)) as sock:
                    seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0"))
        return made(rank, fds, timeout_s)

    monkeypatch.setattr(mesh_connect, "Mesh", mesh)
    run_teams(3, exchanged)
    assert seen == [b"reno"] * 6


def listening_addresses(team: Team) -> str | None:
    groups = team.open("lane", native=True)
    groups.leave(abort=False)
    return groups.world.address


def test_the_interface_is_that_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert run_teams(2, listening_addresses) == ["127.0.0.1"] * 2
