"""`bagua top`: what is said of jobs that train with two ranks, and of those that are not there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bagua.cli.main import main
from bagua.status.frames import MAX_STATUS, StatusError, answer, ask, receive
from bagua.status.host_status import SOCKET, HostStatus, ask_socket
from bagua.status.rank_status import STATUS, serve_rank
from bagua.top.looking import Observer, TopError
from bagua.top.picture import picture_of
from bagua.top.text import lines_of
from tests.elastic.launchers import LIMIT_S, launch_here
from tests.fork_server import ForkServer
from tests.ports import free_ports

TOKEN = b"sixteen bytes or more"
RANK = """
import os, sys, time
from pathlib import Path
import torch, bagua
tolerant = bagua.elastic.is_fault_tolerant()
if not tolerant:
    bagua.init_process_group()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
bagua.distribute(model, optimizer, "bytegrad", fault_tolerant=tolerant)
def enough():
    # Of rank 0: without fault tolerance all ranks must end at the same step. The file is empty while it is written.
    stop = torch.tensor(bagua.stats(model).steps >= int(Path(sys.argv[1]).read_text() or 10**6), dtype=torch.int32)
    if not tolerant:
        torch.distributed.broadcast(stop, 0)
    return bool(stop)
while not enough():
    model(torch.randn(4, 100)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
"""


class Launchers:
    """Launchers of `RANK`, and what `bagua top` says of them."""

    def __init__(self, fork_server: ForkServer, folder: Path) -> None:
        self._server, self._folder = fork_server, folder
        self._pipes: list[Any] = []
        self._pids: list[int] = []
        self._steps = folder / "steps"
        self._steps.write_text("1000000")
        (folder / "train.py").write_text(RANK)

    def start(self, *flags: str) -> None:
        words = [*flags, str(self._folder / "train.py"), str(self._steps)]
        self._pipes.append(self._server.fork(launch_here, words, str(self._folder), {}))
        assert self._pipes[-1].poll(LIMIT_S)
        self._pids.append(self._pipes[-1].recv())

    def look_until(self, observer: Observer, found: Callable[[Any], bool]) -> Any:
        end, said = time.monotonic() + LIMIT_S, None
        while time.monotonic() < end:
            try:
                said = observer.look()
                if found(said):
                    return said
            except TopError as error:
                said = error
            time.sleep(0.1)
        raise AssertionError(f"not seen within {LIMIT_S:g} s: {said}\n{(self._folder / 'output').read_text()}")

    def end(self) -> None:
        """The ranks have trained enough: no thread of the launchers is left."""
        self._steps.write_text("1")
        for pipe in self._pipes:
            assert pipe.poll(LIMIT_S), (self._folder / "output").read_text()
            assert pipe.recv() == [0, {}]
        self._pids.clear()

    def close(self) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)  # so that it ends its ranks


@pytest.fixture
def launchers(fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launchers]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Launchers(fork_server, tmp_path)
    yield made
    made.close()


def trains(num: int) -> Callable[[Any], bool]:
    """Rates are known of so many ranks."""
    return lambda picture: sum((rank.steps_per_s or 0) > 0 for rank in picture.ranks) == num


def state_of(task: Path) -> str:
    """Linux's letter for what a thread does."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.process
def test_two_ranks_of_one_host(launchers: Launchers, capsys: pytest.CaptureFixture[str]) -> None:
    launchers.start("--nproc-per-node", "2")
    launchers.look_until(Observer(None, None, None), trains(2))
    assert main(["top", "--json", "--every", "0.3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["fault_tolerant"] and told["job"].startswith("train.")
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    for rank in told["ranks"]:
        assert rank["algorithm"] == "bytegrad" and rank["steps_per_s"] > 0 and rank["bytes_sent"] > 0
        assert 0 <= rank["exposed"] <= 1 and rank["sent_per_s"] > 0
    stopped = told["ranks"][1]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    until = time.monotonic() + LIMIT_S
    while any(state_of(task) != "T" for task in Path(f"/proc/{stopped}/task").iterdir()):  # its threads, one by one
        assert time.monotonic() < until
        time.sleep(0.01)
    assert main(["top", "--once", "--every", "0.1"]) == 0
    text = capsys.readouterr().out
    os.kill(stopped, signal.SIGCONT)
    assert "does not answer" in text and text.startswith("job train."), text
    launchers.end()
    assert main(["top"]) == 1
    assert capsys.readouterr().err.startswith("bagua top: no job runs here")


@pytest.mark.process
@pytest.mark.slow
def test_a_fault_tolerant_job_from_another_machine(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its addresses, since the folders of the launchers are not there. A rank is killed and comes again."""
    ports = free_ports(2)
    endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
    for _ in ports:
        launchers.start("--fault-tolerant", "--nnodes=2", "--max-restarts=1", "--rdzv-endpoint", endpoints)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    observer = Observer(f"127.0.0.1:{ports[0]}", None, None)
    picture = launchers.look_until(observer, trains(2))
    assert picture.fault_tolerant and picture.epoch == 1 and len(picture.hosts) == 2 and not picture.events
    victim = picture.ranks[1]
    os.kill(victim.pid, signal.SIGKILL)
    came = launchers.look_until(observer, lambda now: any(event.joined for event in now.events) and trains(2)(now))
    lost = next(event for event in came.events if event.lost)
    joined = next(event for event in came.events if event.joined)
    assert lost.lost == joined.joined == (victim.host,) and lost.time < joined.time
    assert f"lost {victim.host}" in "\n".join(lines_of(came))
    monkeypatch.setenv("BAGUA_JOB_TOKEN", "another token, long enough")
    assert main(["top", "--once", f"127.0.0.1:{ports[1]}"]) == 1
    assert capsys.readouterr().err == (
        f"bagua top: 127.0.0.1:{ports[1]}: BAGUA_JOB_TOKEN is not the one that the hosts of this job were given\n"
    )
    launchers.end()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["127.0.0.1:{port}"], "127.0.0.1:{port}: nobody answers: Connection refused"),
        (["node1"], "node1: expected HOST:PORT"),
        ([], "no job runs here"),
    ],
    ids=["nobody there", "no port", "no job"],
)
def test_what_is_not_there(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (port,) = free_ports(1)
    assert main(["top", "--once", *(word.format(port=port) for word in words)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"bagua top: {says.format(port=port)}") and error.count("\n") == 1


@pytest.mark.parametrize("every", ["x", "0", "-1", "nan", "inf"])
def test_seconds_that_are_none(every: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "--every", every])
    assert f"--every: must be a positive number of seconds, not '{every}'" in capsys.readouterr().err


def test_one_of_several_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    served: list[HostStatus] = []
    for name in ("first", "second", "second"):  # the last two are hosts of one job
        directory = tmp_path / f"bagua-run-{len(served)}"
        directory.mkdir(mode=0o700)
        host = f"host{len(served)}"
        served.append(HostStatus(directory, lambda name=name, host=host: {"job": name, "host": host}))
    with pytest.raises(TopError, match="several jobs run here; choose one with --job: first, second"):
        Observer(None, None, None).look()
    with pytest.raises(TopError, match="--job third: no such job; there are: first, second"):
        Observer(None, "third", None).look()
    assert Observer(None, "sec", None).look().hosts == ("host1", "host2")
    for each in served:
        each.close()


def test_a_process_that_trains_nothing_yet_and_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = HostStatus(tmp_path, lambda: {"job": "j", "host": "h"})
    assert status.ranks.stat().st_mode & 0o077 == 0
    monkeypatch.setenv(STATUS, str(status.ranks))
    serve_rank(lambda: {"pid": os.getpid(), "clock": 1.0})
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(status.ranks / "12345"))
    told = ask_socket(tmp_path / SOCKET, time.monotonic() + LIMIT_S)
    assert told["ranks"] == [{"pid": os.getpid(), "clock": 1.0}]
    assert not (status.ranks / "12345").exists()
    assert "not distributed yet" in "\n".join(lines_of(picture_of([told], {}, None)))
    status.close()


def test_connections_that_say_nothing_hold_nobody_up(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    address = listener.getsockname()
    status = HostStatus(tmp_path, lambda: {"job": "j"}, listener, TOKEN)
    began = time.monotonic()
    idle = [socket.create_connection(address) for _ in range(100)]
    assert ask_socket(tmp_path / SOCKET, soon())["job"] == "j"
    with socket.create_connection(address) as sock:
        assert ask(sock, TOKEN, soon())["job"] == "j"
    assert time.monotonic() - began < 60  # one after the other they take 200 s
    for each in idle:
        each.close()
    status.close()
    while any(thread.name == "bagua-observer" for thread in threading.enumerate()):
        assert time.monotonic() - began < LIMIT_S
        time.sleep(0.01)


def exchange(serve: Callable[[socket.socket], None], call: Callable[[socket.socket], Any]) -> Any:
    """`call` at one end of a connection, `serve` at the other, which is closed then."""
    ours, theirs = socket.socketpair()

    def run() -> None:
        with theirs:
            try:
                serve(theirs)
            except (StatusError, OSError):
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with ours:
            return call(ours)
    finally:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "who serves has not ended"


def soon() -> float:
    return time.monotonic() + LIMIT_S


def test_the_token_is_proven_by_both_ends() -> None:
    asked: list[int] = []

    def describe() -> list[int]:
        asked.append(1)
        return asked

    assert exchange(lambda s: answer(s, describe, TOKEN, soon()), lambda s: ask(s, TOKEN, soon())) == [1]
    with pytest.raises(StatusError, match="it does not accept the token"):
        exchange(lambda s: answer(s, describe, TOKEN, soon()), lambda s: ask(s, b"another one of 16", soon()))
    assert asked == [1]  # nothing was even collected

    def impostor(sock: socket.socket) -> None:
        answer(sock, describe, b"another one of 16", soon())

    def call_impostor(sock: socket.socket) -> Any:
        return ask(sock, TOKEN, soon())

    with pytest.raises(StatusError):
        exchange(impostor, call_impostor)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((MAX_STATUS + 1).to_bytes(4, "big"), "a frame of 1048577 bytes"),
        (b"\0\0\0\2{]", "not JSON"),
        (b"\0\0\0\x64" + b"[" * 100, "not JSON"),
    ],
    ids=["too long", "no JSON", "nested"],
)
def test_what_is_no_status(data: bytes, says: str) -> None:
    with pytest.raises(StatusError, match=says):
        exchange(lambda sock: sock.sendall(data), lambda sock: receive(sock, soon()))


def test_a_silent_peer_is_not_waited_for() -> None:
    with pytest.raises(TimeoutError):
        exchange(lambda _: time.sleep(0.1), lambda sock: receive(sock, time.monotonic() + 0.01))


def test_fields_of_wrong_types_and_control_characters_do_no_harm() -> None:
    told = {"job": "a\x1b[2Jb", "host": 3, "ranks": [{"rank": 0, "pid": "x", "total": 4, "changes": [7, {}]}, None]}
    picture = picture_of([{**told, "epoch": "many", "events": [[1], "no"]}], {}, None)
    assert picture.job == "a?[2Jb" and picture.epoch == 0 and picture.ranks[0].pid == 0
    assert lines_of(picture)


def test_the_change_of_the_ranks_is_one_event_with_the_longest_stall() -> None:
    def rank(number: int, stalled_s: float, lost: list[str]) -> dict[str, Any]:
        change = {"epoch": 2, "step": 7, "lost": lost, "joined": [], "reason": "h2 is lost", "skipped": number == 1}
        return {"rank": number, "pid": number, "changes": [{**change, "stalled_s": stalled_s, "time": 10.0 + number}]}

    told = {"job": "j", "host": "h", "ranks": [rank(0, 0.5, []), rank(1, 0.25, ["h2"])]}
    (event,) = picture_of([told], {}, None).events
    assert (event.lost, event.stalled_s, event.skipped, event.time) == (("h2",), 0.5, True, 10.0)
