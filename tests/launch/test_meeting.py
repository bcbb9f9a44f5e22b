"""A launcher says that it waits for other nodes, and what to check if they do not come."""

from __future__ import annotations

import pickle
import re
import signal
import socket
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from bagua.distributed import failover, meeting, start
from bagua.distributed.meeting import Meeting, MeetingError
from bagua.distributed.run import get_args_parser
from tests.launch.launching import RUN, Launcher, script
from tests.ports import free_port

C10D = ["--rdzv-backend", "c10d", "--rdzv-endpoint"]


def of(*words: str) -> Meeting | None:
    args = get_args_parser().parse_args([*words, "train.py"])
    if "," in (args.rdzv_endpoint or ""):
        args.rdzv_backend = failover.BACKEND
    return Meeting.of(args)


def found(*words: str) -> Meeting:
    made = of(*words)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("words", "where", "wanted"),
    [
        (["--nnodes", "2"], "127.0.0.1:29500 (--master-addr)", "2 nodes"),
        (["--nnodes", "1:3", "--master-addr", "[::1]", "--master-port", "7"], "::1:7 (--master-addr)", "3 nodes"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:7"], "a:7 (--rdzv-endpoint)", "2 nodes"),
        (["--nnodes", "1:4", *C10D, "a"], "a:29400 (--rdzv-endpoint)", "1 to 4 nodes"),
        (["--nnodes", "2", *C10D, "a:1,[::1]:2"], "a:1, ::1:2 (--rdzv-endpoint)", "2 nodes"),
        (["--master-port", "7"], "127.0.0.1:7 (--master-addr)", "1 node"),
    ],
)
def test_where_and_for_whom(words: list[str], where: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_answers", lambda *place: False)
    assert found(*words).describe().startswith(f"waiting at {where} for {wanted} (no answer from")


@pytest.mark.parametrize(
    "words",
    [[], ["--standalone"], [*C10D, "a-file", "--rdzv-conf", "store_type=file"], ["--rdzv-backend", "etcd"]],
)
def test_nobody_to_wait_for(words: list[str]) -> None:
    assert of(*words) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "two"], "--nnodes two: expected N, or MIN:MAX"),
        (["--nnodes", "2", *C10D, "a:port"], "--rdzv-endpoint: .*port number"),
        (["--nnodes", "2", "--rdzv-endpoint", "a"], "--rdzv-endpoint: 'a' is not HOST:PORT"),
    ],
)
def test_what_is_malformed_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of(*words)


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["--nnodes", "2"], "giving up after 900 s (--rdzv-conf timeout=...)"),
        (["--nnodes", "2", "--rdzv-conf", "timeout=30"], "giving up after 30 s (--rdzv-conf timeout=...)"),
        (["--nnodes", "2", *C10D, "127.0.0.1:1"], "giving up after 60 s (--rdzv-conf read_timeout=...)"),
        (["--nnodes", "2", *C10D, "127.0.0.1:1,127.0.0.1:2"], "giving up after 600 s (--rdzv-conf join_timeout=...)"),
    ],
)
def test_until_when(words: list[str], limit: str) -> None:
    assert found(*words).describe().endswith(limit)


@pytest.mark.parametrize(
    ("nodes", "told"), [("3", "2 came); giving up after 600 s"), ("1:3", "2 came); starting with these after 30 s")]
)
def test_how_many_came(nodes: str, told: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = meeting.C10dRendezvousBackend(store, "job")
    state = _RendezvousState()
    for number in range(2):
        node = _NodeDesc("node", number, 0)
        state.participants[node], state.last_heartbeats[node] = number, datetime.now(timezone.utc)
    state.deadline = datetime.now(timezone.utc)
    backend.set_state(pickle.dumps(state), None)
    assert told in found("--nnodes", nodes, *C10D, f"127.0.0.1:{store.port}", "--rdzv-id", "job").describe()


def refuse(host: str, *rest: Any, **more: Any) -> list[Any]:
    if host == "typo":
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return []


class Call:
    """What a pickle of a stranger may hold."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._file,)


def test_a_state_that_is_not_of_the_rendezvous_is_not_made(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting.C10dRendezvousBackend(store, "job").set_state(pickle.dumps(Call(tmp_path / "called")))
    made = found("--nnodes", "2", "--rdzv-id", "job", *C10D, f"127.0.0.1:{store.port}")
    assert "came" not in made.describe()
    assert not (tmp_path / "called").exists()
    for damaged in (b"\x80", pickle.dumps(_RendezvousState())[:-9], pickle.dumps([1])):
        store.delete_key("torch.rendezvous.job")
        meeting.C10dRendezvousBackend(store, "job").set_state(damaged)
        assert "came" not in made.describe()


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr(meeting, "_LOOK_S", 0.05)
    said: list[str] = []
    with pytest.raises(MeetingError, match=r"^--master-addr typo: the name does not resolve on this host \(Name or"):
        found("--nnodes", "2", "--master-addr", "typo", "--rdzv-conf", "timeout=1").resolve(said.append)
    assert len(said) == 1 and said[0].endswith("trying again for 1 s (--rdzv-conf timeout=...)")
    said.clear()
    found("--nnodes", "2", *C10D, "typo:1,host:1").resolve(said.append)
    assert said == ["--rdzv-endpoint typo: the name does not resolve on this host (Name or service not known)"]


def test_a_name_that_resolves_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler enters the names of its nodes as they start."""
    begun = time.monotonic()
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda host, *rest, **more: refuse(host if time.monotonic() < begun + 0.5 else "host")
    )
    monkeypatch.setattr(meeting, "_LOOK_S", 0.05)
    said: list[str] = []
    found("--nnodes", "2", *C10D, "typo:1").resolve(said.append)
    assert len(said) == 1 and said[0].endswith("trying again for 60 s (--rdzv-conf read_timeout=...)")


@pytest.mark.parametrize(
    ("by_name", "own", "answers", "serves"),
    [
        (True, True, False, None),  # torch finds it
        (False, True, False, True),  # the own name is 127.0.1.1
        (False, True, True, False),  # another launcher of this host serves
        (False, False, False, False),
        (None, True, False, True),  # the own name does not resolve
        (None, False, False, False),
    ],
)
def test_the_host_that_has_the_address_serves(
    by_name: bool | None, own: bool, answers: bool, serves: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def matches(host: str) -> bool:
        if by_name is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return by_name

    monkeypatch.setattr(meeting, "_matches_machine_hostname", matches)
    monkeypatch.setattr(meeting, "is_own", lambda host: own)
    monkeypatch.setattr(meeting, "_answers", lambda host, port: answers)
    made = found("--nnodes", "2", *C10D, "10.0.0.1:29500")
    assert made.serves_here() is serves
    assert found("--nnodes", "2", *C10D, "10.0.0.1:29500", "--rdzv-conf", "is_host=0").serves_here() is None


def test_torch_is_told_who_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    args = get_args_parser().parse_args(["--nnodes", "2", *C10D, "10.0.0.1:29500", "--rdzv-conf", "a=1", "train.py"])
    made = Meeting.of(args)
    assert made is not None
    monkeypatch.setattr(start, "name_problem", lambda: "")
    start._serve_here(args, made)
    assert (args.rdzv_conf, args.local_addr) == ("a=1", None)
    monkeypatch.setattr(start, "name_problem", lambda: "the name of this host, 'x', does not resolve here")
    monkeypatch.setattr(start, "address_towards", lambda host: "10.0.0.2")
    monkeypatch.setattr(Meeting, "serves_here", lambda self: False)
    start._serve_here(args, made)
    assert (args.rdzv_conf, args.local_addr) == ("a=1,is_host=0", "10.0.0.2")


def cause(error: Exception, text: str) -> Exception:
    error.__cause__ = DistNetworkError(text)
    return error


@pytest.mark.parametrize(
    ("error", "started", "words"),
    [
        (
            DistStoreError("Timed out waiting for clients. 1/2 clients joined.\nframe #0"),
            False,
            "not meet .*1/2 clients",
        ),
        (DistStoreError("wait timeout after 900000ms, keys: /x"), False, "2 nodes did not meet .*same --nnodes"),
        (RendezvousTimeoutError(), False, "did not meet at a:1 "),
        (cause(RendezvousConnectionError("see inner"), "timed out"), False, r"no connection to a:1 .*\(timed out\)"),
        (DistNetworkError("failed to listen, name: EADDRINUSE"), False, "a:1 .*: the port is in use on this host"),
        (cause(RendezvousConnectionError("see inner"), "reset"), True, r"lost the store .* a:1 .*\(reset\)"),
        (RendezvousClosedError(), False, "same --rdzv-id"),
    ],
)
def test_what_to_check(error: Exception, started: bool, words: str) -> None:
    text = found("--nnodes", "2", *C10D, "a:1").explain(error, started)
    assert re.search(words, text) and "\n" not in text


def test_ranks_that_have_started_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_TELL_S", 0.2)
    said: list[str] = []
    earlier = signal.getsignal(signal.SIGHUP)
    try:
        with found("--nnodes", "2").told(said.append) as started:
            assert not started()
            signal.signal(signal.SIGHUP, lambda *_: None)  # as torch does
            time.sleep(0.6)
            assert started() and said == []
    finally:
        signal.signal(signal.SIGHUP, earlier)
    with found("--nnodes", "2").told(said.append):
        time.sleep(1)
    assert len(said) == 1


@pytest.mark.process
def test_one_of_two_nodes(tmp_path: Path) -> None:
    """Node 0, a node without node 0, and one of two that are numbered as they come."""
    ways = [
        ["--master-port", str(free_port()), "--rdzv-conf", "timeout=12"],
        ["--master-port", str(free_port()), "--node-rank", "1", "--rdzv-conf", "timeout=12"],
        [*C10D, f"localhost:{free_port()}", "--rdzv-conf", "join_timeout=12"],
    ]
    places = [tmp_path / str(number) for number in range(len(ways))]
    for place in places:
        place.mkdir()
    launchers = [
        Launcher(place, [*RUN, "--nnodes", "2", *way, script(place, "")])
        for place, way in zip(places, ways, strict=True)
    ]
    ended = [launcher.wait() for launcher in launchers]
    last = [each.err.strip().split("\n")[-1] for each in ended]
    assert all(each.code == 1 and "Traceback" not in each.err for each in ended), [each.err for each in ended]
    assert all("bagua run: waiting at" in each.err and "for 2 nodes" in each.err for each in ended)
    assert "2 nodes did not meet" in last[0] and "1/2 clients joined" in last[0]
    assert "no connection to 127.0.0.1:" in last[1]
    assert "(1 came)" in ended[2].err and "2 nodes did not meet" in last[2]
