"""The socket between a launcher and its rank: who may connect, what is refused, and the end of either side."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bagua.membership import MessageError, Verdict
from bagua.membership.epoch import NO_MODEL
from bagua.membership.remote_seat import LauncherLost, RemoteSeat
from bagua.membership.seat import View
from bagua.membership.seat_frames import MAX_SEAT_FRAME, SeatFrames, pack, view_from_wire, view_to_wire
from bagua.membership.seat_service import SeatService, short_path
from tests.elastic.hosts import LIMIT_S, Hosts, wait_for


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name in ("bagua-seat", "bagua-membership")]


def group_of(seat: Any) -> int:
    view = seat.view()
    assert view is not None
    return view.group


def test_a_new_view_comes_without_a_request(hosts: Hosts) -> None:
    """All calls but `view` are kept from the rank: it reads what has been pushed."""
    hosts.lose(2)
    wait_for(lambda: group_of(hosts.seats[0]) > 1 and group_of(hosts.seats[1]) > 1, "view without n2")


def test_an_answer_never_overtakes_the_view_it_was_given_in(hosts: Hosts) -> None:
    """A rank that is denied a step finds the new group at once."""
    seat = hosts.seats[0]
    wait_for(lambda: hosts.seats[1].view() is not None, "view")
    hosts.seats[1].exchange_failed(1)
    end = time.monotonic() + LIMIT_S
    step = 0
    while seat.start_step(1, step) is not Verdict.DENIED:
        assert time.monotonic() < end, "the group stays in use"
        step += seat.finish_step(1, step) is Verdict.GRANTED
    assert group_of(seat) > 1


def test_a_rank_that_has_ended_asks_in_vain(hosts: Hosts) -> None:
    """A request that a killed rank had sent must not count, whenever it is read."""
    first, second = hosts.seats[0], RemoteSeat(str(hosts.services[0].path))
    hosts.transports[0].call(lambda agent, now: agent.rank_ended(now, 0))
    assert first.start_step(1, 0) is Verdict.DENIED and second.finish_step(1, 0) is Verdict.DENIED
    first.wants_weights()
    assert hosts.transports[0].call(lambda agent, _: agent.held) == NO_MODEL
    hosts.services[0].close()
    for seat in (first, second):
        with pytest.raises(LauncherLost, match="the launcher of host n0 has ended"):
            seat.start_step(1, 0)
    second.close()


def test_a_seat_that_was_closed(hosts: Hosts) -> None:
    hosts.seats[0].close()
    with pytest.raises(LauncherLost, match="this seat was closed"):
        hosts.seats[0].view()


def test_each_rank_of_a_host_has_a_seat_of_its_own(hosts: Hosts, tmp_path: Path) -> None:
    """The second one arrives while the first trains, and gets a place beside it. Each is granted its own steps."""
    transport, first = hosts.transports[0], hosts.seats[0]
    service = SeatService(transport, tmp_path / "0", 1)
    transport.call(lambda agent, _: agent.rank_started(1))
    second = RemoteSeat(str(service.path))
    view = second.view()
    assert view is not None and view.rank is None and view.lists("n0") and not view.learns
    assert first.start_step(1, 0) is Verdict.GRANTED and second.start_step(1, 0) is Verdict.DENIED
    second.wants_weights()
    wait_for(lambda: group_of(first) > 1, "a group with both")
    service.refresh()
    wait_for(lambda: group_of(second) == group_of(first), "the view of both")
    view, group = second.view(), group_of(first)
    assert view is not None and view.rank is not None and len(view.members) == len(hosts.seats) + 1
    assert second.start_step(group, 0) is Verdict.DENIED  # it has no weights yet
    assert second.weights_fetched(view.epoch, 0) is Verdict.GRANTED
    assert second.start_step(group, 0) is Verdict.GRANTED
    second.close()
    service.close()


def test_the_end_of_the_launcher_is_an_error_of_every_call(hosts: Hosts) -> None:
    seat = hosts.seats[1]
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(seat.await_group, 1000, LIMIT_S)
        hosts.services[1].close()
        with pytest.raises(LauncherLost, match="the launcher of host n1 has ended .* cannot go on"):
            waits.result(LIMIT_S)
    for call in (seat.view, lambda: seat.start_step(1, 0), lambda: seat.exchange_failed(1)):
        with pytest.raises(LauncherLost, match="the launcher of host n1 has ended"):
            call()
    with pytest.raises(LauncherLost, match="does not serve the seat"):
        RemoteSeat(str(hosts.services[1].path))
    assert not hosts.services[1].path.exists()


def test_a_launcher_that_is_stopped_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        with short_path(tmp_path / "seat") as short:
            silent.bind(short)
        silent.listen()
        with pytest.raises(LauncherLost, match=r"has not answered for 0\.1 s; it may be stopped"):
            RemoteSeat(str(tmp_path / "seat"), timeout_s=0.1)


def test_only_the_owner_can_connect(hosts: Hosts, tmp_path: Path) -> None:
    assert stat.S_IMODE(hosts.services[0].path.parent.stat().st_mode) == 0o700
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="a seat needs a directory of mode 0700"):
        SeatService(hosts.transports[0], open_to_all)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", MAX_SEAT_FRAME + 1),
        struct.pack(">I", 3) + b"abc",
        pack(["start_step", 1, 0]),
        pack([1, "start_step", 1]),
        pack([1, "start_step", 1, -1]),
        pack([1, "start_step", 1, True]),
        pack([1, "leave"]),
        pack([1, ["start_step"], 1, 0]),
        struct.pack(">I", 2) + b"{}",
    ],
)
def test_what_is_no_request_ends_its_connection_only(hosts: Hosts, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger, short_path(hosts.services[0].path) as short:
        stranger.settimeout(LIMIT_S)
        stranger.connect(short)
        stranger.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    assert hosts.seats[0].start_step(1, 0) is Verdict.GRANTED


def test_a_rank_that_does_not_read_holds_up_nobody(hosts: Hosts) -> None:
    """Its requests are not read any more, so what waits for it stays bounded."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf, short_path(hosts.services[0].path) as short:
        deaf.connect(short)
        deaf.setblocking(False)
        request, sent = pack([1, "suspected"]) * 1000, 0
        with contextlib.suppress(BlockingIOError):
            while sent < 1 << 26:
                sent += deaf.send(request)
        assert sent < 1 << 26
        assert hosts.seats[0].start_step(1, 0) is Verdict.GRANTED


def test_bad_numbers_are_refused_before_they_are_sent(hosts: Hosts) -> None:
    with pytest.raises(ValueError, match="step=-1: must not be negative"):
        hosts.seats[0].start_step(1, -1)
    with pytest.raises(TypeError):
        hosts.seats[0].start_step(1, 0.5)  # type: ignore[arg-type]
    assert hosts.seats[0].start_step(1, 0) is Verdict.GRANTED


def test_a_script_without_a_launcher_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAGUA_SEAT", raising=False)
    with pytest.raises(ValueError, match="start the script with `bagua run --fault-tolerant`"):
        RemoteSeat()


def test_frames_are_bounded_and_views_checked() -> None:
    view = View(7, 5, 90, ("a", "b"), 1, "10.0.0.1:4", "a is lost")
    wire = json.loads(json.dumps(view_to_wire(view)))
    frames, frame = SeatFrames(), pack(["view", wire])
    assert [m for at in range(len(frame)) for m in frames.feed(frame[at : at + 1])] == [["view", wire]]
    assert view_from_wire(wire) == view and view_from_wire(view_to_wire(None)) is None
    for place, wrong in ((0, -1), (1, "5"), (2, None), (3, "ab"), (3, [1]), (4, 2), (4, True), (5, None), (6, 3)):
        with pytest.raises(MessageError):
            view_from_wire([*wire[:place], wrong, *wire[place + 1 :]])
    with pytest.raises(MessageError):
        view_from_wire(wire[:-1])


FORKED = """
import os, sys
from bagua.membership.remote_seat import RemoteSeat
assert "torch" not in sys.modules, "a seat needs no torch"
seat = RemoteSeat()
if os.fork() == 0:
    try:
        seat.view()
    except RuntimeError as error:
        os._exit(0 if "a forked process has no seat" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print(seat.name, seat.view().rank, seat.start_step(1, 0).value, seat.finish_step(1, 0).value)
"""


@pytest.mark.process
def test_a_rank_in_a_process_of_its_own(hosts: Hosts) -> None:
    """Its forked children, such as the workers of a data loader, have no seat."""
    env = {**os.environ, "BAGUA_SEAT": str(hosts.services[2].path)}
    done = subprocess.run([sys.executable, "-c", FORKED], env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.split() == ["n2", "2", "granted", "granted"], done.stderr
