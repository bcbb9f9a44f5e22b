"""Agents over TCP on loopback: processes that are killed or stopped, and strangers that connect."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from bagua.membership import (
    Agent,
    Blocked,
    Epoch,
    EpochBegan,
    Member,
    MessageError,
    Options,
    Record,
    Verdict,
    record_file,
)
from bagua.membership.frames import FrameReader, pack
from bagua.membership.messages import MAX_FRAME
from bagua.membership.transport import _MAX_STRANGERS, Transport
from tests.fork_server import ForkServer

TOKEN = b"sixteen bytes or more"
LIMIT_S = 90.0


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def founders(listeners: list[socket.socket]) -> Epoch:
    return Epoch.first([Member(f"n{i}", 0, f"127.0.0.1:{s.getsockname()[1]}") for i, s in enumerate(listeners)])


def wait_for(found: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < end, f"no {what} within {LIMIT_S} s"
        time.sleep(0.02)


def names(transport: Transport) -> list[str]:
    epoch = transport.call(lambda agent, now: agent.epoch)
    return [] if epoch is None else [m.name for m in epoch.members if m.trains]


@pytest.fixture
def three() -> Iterator[list[Transport]]:
    listeners = [listener() for _ in range(3)]
    epoch = founders(listeners)
    options = Options(detect_s=20.0)  # only closed connections count, so that a busy machine makes no difference
    transports = [
        Transport(Agent(Record("job", m.name, 0, m.address), options, time.monotonic(), epoch=epoch), sock, TOKEN)
        for m, sock in zip(epoch.members, listeners, strict=True)
    ]
    yield transports
    for transport in transports:
        transport.close()
    assert not [t for t in threading.enumerate() if t.name == "bagua-membership"]


def heard_all(transports: list[Transport]) -> bool:
    """Whether all have connected to all, which a closed connection takes for granted."""
    return all(len(each.connected) >= len(transports) - 1 for each in transports)


def test_a_host_that_closes_is_left_out_and_a_newcomer_is_let_in(three: list[Transport]) -> None:
    wait_for(lambda: heard_all(three), "connections")
    assert three[0].call(lambda agent, now: agent.finish_step(1, 0)) is Verdict.GRANTED
    three[2].close()
    wait_for(lambda: names(three[0]) == names(three[1]) == ["n0", "n1"], "epoch without n2")
    assert three[1].call(lambda agent, now: agent.behind)
    sock = listener()
    record = Record("job", "n3", 0, f"127.0.0.1:{sock.getsockname()[1]}")
    contact = three[1].call(lambda agent, now: agent.record.address)
    late = Agent(record, Options(detect_s=20.0), time.monotonic(), contacts=[contact])
    newcomer = Transport(late, sock, TOKEN)
    try:
        wait_for(lambda: newcomer.call(lambda agent, now: agent.member) is not None, "admission")
        epoch = newcomer.call(lambda agent, now: agent.epoch)
        assert epoch is not None and names(newcomer) == ["n0", "n1"] and epoch.step == 1
        fetched = newcomer.call(lambda agent, now: agent.weights_fetched(epoch.number, 1))
        assert fetched in (Verdict.GRANTED, Verdict.WAIT)
        wait_for(
            lambda: (
                newcomer.call(lambda agent, now: agent.weights_fetched(epoch.number, 1)) is not Verdict.WAIT
                and names(three[0]) == ["n0", "n1", "n3"]
            ),
            "promotion",
        )
    finally:
        newcomer.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_host_that_dies_before_it_has_connected_is_left_out(when: str) -> None:
    """Its silence is not waited for: its address refuses connections, or resets those that it never read from."""
    listeners = [listener() for _ in range(3)]
    epoch, options, dead = founders(listeners), Options(detect_s=600.0), listeners[2]
    if when == "before":
        dead.close()
    transports = [
        Transport(Agent(Record("job", m.name, 0, m.address), options, time.monotonic(), epoch=epoch), sock, TOKEN)
        for m, sock in zip(epoch.members[:2], listeners[:2], strict=True)
    ]
    try:
        wait_for(lambda: heard_all(transports), "connections")
        if when == "after":
            assert names(transports[0]) == names(transports[1]) == ["n0", "n1", "n2"]
            dead.close()
        wait_for(lambda: names(transports[0]) == names(transports[1]) == ["n0", "n1"], "epoch without n2")
    finally:
        for transport in transports:
            transport.close()


class Disk:
    """Records are written to it, unless it fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails, self.attempts, write = False, 0, record_file._replace

        def replace(path: Path, data: bytes) -> None:
            self.attempts += self.fails
            if self.fails:
                raise OSError(errno.EMFILE, "Too many open files")
            write(path, data)

        monkeypatch.setattr(record_file, "_replace", replace)


@contextlib.contextmanager
def recorded(size: int, folder: Path) -> Iterator[list[Transport]]:
    listeners, options = [listener() for _ in range(size)], Options(detect_s=60.0)
    epoch = founders(listeners)
    transports = [
        Transport(
            Agent(Record("job", m.name, 0, m.address), options, time.monotonic(), epoch=epoch),
            *(sock, TOKEN, folder / m.name),
        )
        for m, sock in zip(epoch.members, listeners, strict=True)
    ]
    try:
        wait_for(lambda: heard_all(transports), "connections")
        yield transports
    finally:
        for transport in transports:
            transport.close()


def test_a_record_that_cannot_be_written_is_tried_again_before_anything_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch)
    with recorded(3, tmp_path) as (first, second, third):
        disk.fails = True
        third.close()
        wait_for(lambda: disk.attempts > 4, "attempts")
        assert names(first) == names(second) == ["n0", "n1", "n2"], "nobody can promise the next epoch"
        assert not first.failed and not second.failed
        disk.fails = False
        wait_for(lambda: names(first) == names(second) == ["n0", "n1"], "epoch without n2")
        for place, each in enumerate((first, second)):
            assert isinstance(each.events.get(timeout=LIMIT_S), EpochBegan), "the first one"
            began = each.events.get(timeout=LIMIT_S)
            assert isinstance(began, EpochBegan) and began.epoch.number == 2
            assert Record.recover((tmp_path / f"n{place}").read_bytes()).epoch == began.epoch
    assert "the record was not written: [Errno 24] Too many open files; this is tried again" in caplog.text


def test_a_record_that_cannot_be_written_for_long_ends_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    monkeypatch.setattr(record_file, "_GIVE_UP_S", 0.3)
    with recorded(2, tmp_path) as (first, second):
        disk.fails = True
        second.close()
        first.call(lambda agent, now: agent.exchange_failed(now, 1))
        wait_for(lambda: first.failed, "end of its thread")
        assert names(first) == ["n0", "n1"]


def test_a_stranger_without_the_token_is_cut_off(three: list[Transport]) -> None:
    wait_for(lambda: heard_all(three), "connections")
    address = three[0].call(lambda agent, now: agent.record.address)
    port = int(address.rpartition(":")[2])
    for frame in (pack(b"[]", b"another token, as long"), b"\xff" * 64, pack(b"not a message", TOKEN)):
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as stranger:
            stranger.sendall(frame)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    assert names(three[0]) == ["n0", "n1", "n2"] and three[0].call(lambda agent, now: agent.suspected) == {}


def test_of_many_strangers_that_say_nothing_the_oldest_are_cut_off(three: list[Transport]) -> None:
    wait_for(lambda: heard_all(three), "connections")
    host, _, port = three[0].call(lambda agent, now: agent.record.address).rpartition(":")
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=LIMIT_S))
            for _ in range(_MAX_STRANGERS + 5)
        ]
        for stranger in silent[:5]:
            assert stranger.recv(1) == b""
        for stranger in silent[5:]:
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.recv(1)
        assert three[0].connected == ["n1", "n2"]
    assert names(three[0]) == ["n0", "n1", "n2"] and three[0].call(lambda agent, now: agent.suspected) == {}


def test_frames_are_bounded_and_authenticated() -> None:
    reader = FrameReader(TOKEN)
    frames = pack(b"one", TOKEN) + pack(b"two", TOKEN)
    assert [m for at in range(len(frames)) for m in reader.feed(frames[at : at + 1])] == [b"one", b"two"]
    with pytest.raises(MessageError, match="at most"):
        FrameReader(TOKEN).feed((MAX_FRAME + 1).to_bytes(4, "big"))
    with pytest.raises(MessageError, match="token"):
        FrameReader(TOKEN).feed(pack(b"one", TOKEN)[:-1] + b"x")
    with listener() as sock, pytest.raises(ValueError, match="token: 5 bytes"):
        Transport(Agent(Record("job", "n0", 0, "127.0.0.1:1"), Options(), 0.0), sock, b"short")
    with listener() as sock, pytest.raises(ValueError, match="address 'h:1': it must be a numeric host"):
        Transport(Agent(Record("job", "n0", 0, "h:1"), Options(), 0.0), sock, TOKEN)


SCRIPT = """
import json, socket, sys, time
from pathlib import Path
from bagua.membership import Agent, Epoch, Member, Options, Record
from bagua.membership.transport import Transport
place, fd, addresses, detect_s, folder = json.loads(sys.argv[1])
epoch = Epoch.first([Member(f"n{i}", 0, address) for i, address in enumerate(addresses)])
record = Record("job", f"n{place}", 0, addresses[place])
agent = Agent(record, Options(detect_s=detect_s), time.monotonic(), epoch=epoch)
transport = Transport(agent, socket.socket(fileno=fd), b"sixteen bytes or more", Path(folder) / f"n{place}")
while True:
    event = transport.events.get()
    epoch = getattr(event, "epoch", None)
    print(json.dumps([type(event).__name__, epoch and [m.name for m in epoch.members if m.trains]]), flush=True)
"""


@pytest.mark.process
def test_survivors_of_killed_and_stopped_processes_decide(tmp_path: Path) -> None:
    listeners = [listener() for _ in range(4)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in listeners]
    processes: list[subprocess.Popen[str]] = []
    events: list[queue.SimpleQueue[list[object]]] = []
    try:
        for place, sock in enumerate(listeners):
            arguments = json.dumps([place, sock.fileno(), addresses, 3.0, str(tmp_path)])
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, arguments],
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[sock.fileno()],
            )
            sock.close()
            processes.append(process)
            events.append(queue.SimpleQueue())
            threading.Thread(target=_collect, args=(process, events[-1]), daemon=True).start()
        for each in events:
            _expect(each, ["n0", "n1", "n2", "n3"])
        processes[3].kill()
        for each in events[:3]:
            _expect(each, ["n0", "n1", "n2"])
        os.kill(processes[0].pid, signal.SIGSTOP)
        for each in events[1:3]:
            _expect(each, ["n1", "n2"])
        os.kill(processes[0].pid, signal.SIGCONT)
        _expect(events[0], None, "Excluded")
        assert Record.recover((tmp_path / "n1").read_bytes()).epoch is not None
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _collect(process: subprocess.Popen[str], into: queue.SimpleQueue[list[object]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        into.put(json.loads(line))


def _expect(events: queue.SimpleQueue[list[object]], trains: list[str] | None, kind: str = EpochBegan.__name__) -> None:
    """Wait for an epoch; epochs before it are false alarms of a busy machine, or steps on the way."""
    end = time.monotonic() + LIMIT_S
    seen: list[object] = []
    while True:
        try:
            event = events.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"no {kind} {trains} within {LIMIT_S} s, but {seen}") from None
        seen.append(event)
        if event[0] == kind and (trains is None or event[1] == trains):
            return


def test_blocked_reaches_the_engine() -> None:
    """A host of two that never hears the other says so."""
    listeners = [listener(), listener()]
    epoch = founders(listeners)
    member = epoch.members[0]
    listeners[1].close()
    agent = Agent(Record("job", "n0", 0, member.address), Options(detect_s=0.2), time.monotonic(), epoch=epoch)
    transport = Transport(agent, listeners[0], TOKEN)
    try:
        seen = [transport.events.get(timeout=LIMIT_S) for _ in range(2)]
        assert isinstance(seen[0], EpochBegan) and isinstance(seen[1], Blocked) and "n1" in seen[1].reason
    finally:
        transport.close()


def test_a_slow_signal_handler_does_not_hold_up_who_waits_for_events(fork_server: ForkServer) -> None:
    """A launcher waits for events in its main thread: it would never notice that its rank has ended."""
    pipe = fork_server.fork(_interrupted)
    assert pipe.poll(LIMIT_S), "the wait for an event has not ended"
    assert pipe.recv() == "nothing came"


def _interrupted(pipe: Connection) -> None:
    """In a process of its own: wait for an event, and handle a signal for longer than the wait was to be."""
    sock = listener()
    transport = Transport(Agent(Record("job", "n0", 0, "127.0.0.1:1"), Options(), time.monotonic()), sock, TOKEN)
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(0.3))
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        pipe.send(repr(transport.events.get(timeout=0.1)))
    except queue.Empty:
        pipe.send("nothing came")


@pytest.mark.process
def test_an_agent_outlasts_a_lack_of_files(fork_server: ForkServer) -> None:
    """It can neither accept a connection nor open one, and does both once others have closed their files."""
    pipe = fork_server.fork(_short_of_files)
    assert pipe.poll(LIMIT_S), "not connected"
    failed, busy_s = pipe.recv()
    assert not failed and busy_s < 0.25
    assert pipe.poll(LIMIT_S), "not connected"
    assert pipe.recv() == ["n1"]


def _short_of_files(pipe: Connection) -> None:
    """In a process of its own."""
    listeners = [listener() for _ in range(2)]
    epoch = founders(listeners)
    agents = [
        Agent(Record("job", m.name, 0, m.address), Options(detect_s=20.0), time.monotonic(), epoch=epoch)
        for m in epoch.members
    ]
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    stranger = socket.create_connection(listeners[0].getsockname())
    files: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            files.append(os.dup(stranger.fileno()))
    for _ in range(3):  # those that the first agent has from the start
        os.close(files.pop())
    first = Transport(agents[0], listeners[0], TOKEN)
    began_s = time.process_time()
    time.sleep(1.0)
    pipe.send((first.failed, time.process_time() - began_s))
    for each in files:
        os.close(each)
    second = Transport(agents[1], listeners[1], TOKEN)
    wait_for(lambda: heard_all([first, second]), "connections")
    pipe.send(first.connected)
    second.close()
    first.close()
