"""Launchers as threads that found a job, find it, or are refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from bagua.distributed.founding import TOKEN, Founding, Job, JoinError, token_of_the_user
from bagua.distributed.job_store import JobNote, ServedStore, ask
from bagua.membership import Epoch, Member, MessageError
from bagua.membership.seat import payload_of
from tests.ports import free_ports

LIMIT_S = 90.0
SECRET = b"given by the user"


class Meeting:
    """Each launcher serves at the first free port of the list."""

    def __init__(self) -> None:
        self.endpoints = [("127.0.0.1", port) for port in free_ports(3)]
        self.listeners: list[socket.socket] = []
        self._threads = ThreadPoolExecutor(8)
        self._hosts: list[Host] = []  # they serve until they are killed

    def host(self, sizes: tuple[int, int] = (3, 3), run_id: str = "job", **options: Any) -> Host:
        self._hosts.append(Host(self, f"h{len(self._hosts) + 1}", sizes, run_id, **options))
        return self._hosts[-1]

    def join(self, *hosts: Host, timeout_s: float = LIMIT_S) -> Callable[[], list[Job]]:
        """All at the same time; returns how to wait for them."""
        futures = [self._threads.submit(host.founding.join, timeout_s, lambda text: None) for host in hosts]
        return lambda: [future.result(2 * LIMIT_S) for future in futures]

    def close(self) -> None:
        self._threads.shutdown()
        for listener in self.listeners:
            listener.close()


class Host:
    def __init__(
        self,
        meeting: Meeting,
        name: str,
        sizes: tuple[int, int],
        run_id: str,
        token: bytes | None = None,
        last_call_s: float = 0.0,
    ) -> None:
        self.served: ServedStore | None = ServedStore(meeting.endpoints)
        self.listener = socket.create_server(("127.0.0.1", 0))
        meeting.listeners.append(self.listener)
        self.me = Member(name, 0, f"127.0.0.1:{self.listener.getsockname()[1]}", payload_of(self.served.address))
        self.founding = Founding(self.served, meeting.endpoints, self.me, sizes, run_id, last_call_s, token)

    def kill(self) -> None:
        self.listener.close()
        self.served = None
        del self.founding


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.close()


def founders(job: Job) -> list[str]:
    return [member.name for member in job.note.founders.members]


def test_all_found_the_same_job_in_the_order_of_the_list(meeting: Meeting) -> None:
    hosts = [meeting.host() for _ in range(3)]
    jobs = meeting.join(*reversed(hosts))()
    assert len({job.note for job in jobs}) == 1 and len({job.token for job in jobs}) == 1
    assert founders(jobs[0]) == ["h1", "h2", "h3"] and all(job.founder for job in jobs)
    assert len(jobs[0].token) == 32


def test_who_comes_later_finds_the_job_at_any_host(meeting: Meeting) -> None:
    hosts = [meeting.host() for _ in range(3)]
    (job, *_) = meeting.join(*hosts)()
    hosts[0].kill()
    again = meeting.host()  # at the first address of the list: only such a host founds
    assert again.served is not None and again.served.place == 0
    (found,) = meeting.join(again)()
    assert not found.founder and found.note.job == job.note.job and found.token == job.token
    assert set(found.note.contacts) == {host.me.address for host in hosts}
    assert again.served is not None and ask([again.served.address])[0][0] == found.note  # it tells others in turn


def test_nobody_but_the_first_host_founds(meeting: Meeting) -> None:
    hosts = [meeting.host() for _ in range(3)]
    hosts[0].kill()
    first = meeting.endpoints[0]
    with pytest.raises(JoinError, match=f"only 127.0.0.1:{first[1]} founds one .*does not answer"):
        meeting.join(*hosts[1:], timeout_s=0.5)()


def test_too_few_hosts_are_counted(meeting: Meeting) -> None:
    with pytest.raises(JoinError, match=r"1 of 3 hosts have come within 0\.5 s"):
        meeting.join(meeting.host(), timeout_s=0.5)()


def test_a_range_of_hosts(meeting: Meeting) -> None:
    """With no last call, the fewest found it; who comes then, even before it is written down, is a newcomer."""
    hosts = [meeting.host((2, 3)) for _ in range(2)]
    jobs = meeting.join(*hosts)()
    assert [founders(job) for job in jobs] == [["h1", "h2"]] * 2
    (late,) = meeting.join(meeting.host((2, 3)))()
    assert not late.founder and late.note.job == jobs[0].note.job


def test_the_last_call_is_waited_for(meeting: Meeting) -> None:
    first, *others = [meeting.host((1, 3), last_call_s=LIMIT_S) for _ in range(3)]
    waits = meeting.join(first)
    meeting.join(*others)()
    assert [founders(job) for job in waits()] == [["h1", "h2", "h3"]]


def test_a_host_that_came_and_was_killed_is_no_founder(meeting: Meeting) -> None:
    """The others wait for the one that comes in its place."""
    first, second, third = [meeting.host() for _ in range(3)]
    with pytest.raises(JoinError):
        meeting.join(first, third, timeout_s=0.5)()  # both are registered
    third.kill()
    jobs = meeting.join(first, second, meeting.host())()
    assert {tuple(founders(job)) for job in jobs} == {("h1", "h2", "h4")}


def test_hosts_of_another_job_are_refused(meeting: Meeting) -> None:
    meeting.join(*[meeting.host((2, 2)) for _ in range(2)])()
    with pytest.raises(JoinError, match="'job', not 'other'"):
        meeting.join(meeting.host(run_id="other"))()


def test_a_token_of_the_user_is_not_written_down(meeting: Meeting) -> None:
    jobs = meeting.join(*[meeting.host((2, 2), token=SECRET) for _ in range(2)])()
    assert [job.token for job in jobs] == [SECRET] * 2 and jobs[0].note.token == ""
    assert SECRET.decode() not in jobs[0].note.to_text() and SECRET.hex() not in jobs[0].note.to_text()
    for token, why in ((None, f"were given a {TOKEN}"), (b"x" * 16, f"{TOKEN} is not the one")):
        with pytest.raises(JoinError, match=why):
            meeting.join(meeting.host((2, 2), token=token))()


def test_a_token_that_nobody_else_has_is_refused(meeting: Meeting) -> None:
    first = meeting.host((1, 1))
    meeting.join(first)()
    with pytest.raises(JoinError, match=f"{TOKEN} is not the one"):
        meeting.join(meeting.host(token=SECRET))()


def test_a_short_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(ValueError, match=f"{TOKEN}: 5 bytes, at least 16 are needed"):
        token_of_the_user()
    monkeypatch.setenv(TOKEN, SECRET.decode())
    assert token_of_the_user() == SECRET
    monkeypatch.delenv(TOKEN)
    assert token_of_the_user() is None


def test_a_note_of_something_else_is_refused() -> None:
    note = JobNote("job", "ab", Epoch.first([Member("a", 0, "a:1")]), 3, ("a:1",), "", "cd")
    assert JobNote.parse(note.to_text().encode()) == note
    wire = json.loads(note.to_text())
    for place, wrong in (
        (0, 1),
        (1, None),
        (2, []),
        (3, "3"),
        (4, "a:1"),
        (4, [1]),
        (5, None),
        (5, "ab"),
        (5, "x" * 32),
        (6, 0),
    ):
        with pytest.raises(MessageError):
            JobNote.parse(json.dumps([*wire[:place], wrong, *wire[place + 1 :]]).encode())
    for text in (b"", b"{}", b"[1]", b"\xff", json.dumps(wire[:-1]).encode()):
        with pytest.raises(MessageError):
            JobNote.parse(text)
    assert JobNote.parse(replace(note, contacts=()).to_text().encode()).contacts == ()


def test_a_host_that_is_not_in_the_list_serves_elsewhere(meeting: Meeting) -> None:
    held = [ServedStore(meeting.endpoints) for _ in range(4)]
    assert [each.place for each in held] == [0, 1, 2, None]
    assert held[3].host == "127.0.0.1" and held[3].address not in {f"{h}:{p}" for h, p in meeting.endpoints}
