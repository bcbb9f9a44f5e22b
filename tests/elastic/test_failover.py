"""Launchers as threads that look for the host that leads, while hosts go and come back."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters, RendezvousTimeoutError

from bagua.distributed.failover import BACKEND, Endpoints, FailoverRendezvous, parse_endpoints, unreachable
from tests.ports import free_ports


class Hosts:
    """Each serves at the first free port, so they are started in the order of the list."""

    def __init__(self, num: int) -> None:
        self.list = [("127.0.0.1", port) for port in free_ports(num)]
        self.up: dict[int, Any] = {}
        for at in range(num):
            self.start(at)

    def start(self, at: int) -> None:
        self.up[at] = Endpoints(self.list, "job")
        assert self.up[at].mine == at

    def kill(self, at: int) -> None:
        del self.up[at]._server
        del self.up[at]

    def find(self, *which: int) -> list[tuple[int, int]]:
        """The terms that these launchers find, all looking at the same time."""
        deadline = time.monotonic() + 60
        with ThreadPoolExecutor(len(which)) as threads:
            futures = [threads.submit(self.up[at].find, deadline) for at in which]
            return [future.result(90)[0] for future in futures]


def test_the_first_host_leads_first() -> None:
    hosts = Hosts(3)
    assert hosts.find(0, 1, 2) == [(1, 0)] * 3
    assert hosts.find(2, 1) == [(1, 0)] * 2


def test_nobody_but_the_first_host_begins() -> None:
    hosts = Hosts(2)
    hosts.kill(0)
    with pytest.raises(RendezvousTimeoutError):
        hosts.up[1].find(time.monotonic() + 0.5)


def test_the_next_host_leads_when_the_leader_is_lost() -> None:
    hosts = Hosts(3)
    hosts.find(0, 1, 2)
    hosts.kill(0)
    assert hosts.find(1, 2) == [(2, 1)] * 2
    hosts.start(0)
    assert hosts.find(0) == [(2, 1)]
    hosts.kill(1)
    assert hosts.find(0, 2) == [(3, 0)] * 2


def test_a_leader_that_came_back_empty_does_not_lead_the_same_term() -> None:
    hosts = Hosts(3)
    hosts.find(0, 1, 2)
    hosts.kill(0)
    hosts.start(0)
    assert hosts.find(0, 1, 2) == [(2, 1)] * 3


def test_a_host_that_was_lost_and_leads_nothing_changes_nothing() -> None:
    hosts = Hosts(3)
    hosts.find(0, 1, 2)
    hosts.kill(2)
    assert hosts.find(0, 1) == [(1, 0)] * 2
    hosts.start(2)
    assert hosts.find(2, 0) == [(1, 0)] * 2


def test_two_of_three_hosts_are_lost_one_after_the_other() -> None:
    hosts = Hosts(3)
    hosts.find(0, 1, 2)
    hosts.kill(0)
    hosts.find(1, 2)
    hosts.kill(1)
    assert hosts.find(2) == [(3, 2)]


def test_hosts_of_another_job_are_refused() -> None:
    hosts = Hosts(2)
    hosts.find(0, 1)
    with pytest.raises(RendezvousClosedError, match="'job', not 'other'"):
        Endpoints(hosts.list, "other").find(time.monotonic() + 5)


@pytest.mark.process
def test_a_host_that_counted_as_lost_meets_the_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for longer than its heartbeats may be late. The host that comes then does not wait for it."""
    endpoint = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the launcher does
    # A host that waits looks each second: a round that closed sooner could close without it.
    beats = {"keep_alive_interval": "1", "keep_alive_max_attempt": "5", "last_call_timeout": "4"}
    first, second = (
        FailoverRendezvous(RendezvousParameters(BACKEND, endpoint, "late", 1, 2, local_addr="127.0.0.1", **beats))
        for _ in range(2)
    )
    assert first.next_rendezvous().world_size == 1
    assert first.num_nodes_waiting() == 0
    stop_heartbeats(first)  # what a SIGSTOP does
    time.sleep(6)
    assert second.next_rendezvous().world_size == 1
    assert first.num_nodes_waiting() == 1
    with ThreadPoolExecutor(2) as threads:
        late = threads.submit(first.next_rendezvous)
        deadline = time.monotonic() + 60
        while not second.num_nodes_waiting():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert [each.result(90).world_size for each in (threads.submit(second.next_rendezvous), late)] == [2, 2]
    for handler in (first, second):
        stop_heartbeats(handler)


def stop_heartbeats(handler: FailoverRendezvous) -> None:
    inner: Any = handler._inner
    inner._stop_heartbeats()


def test_endpoints_are_parsed() -> None:
    assert parse_endpoints("a:1, b:2") == [("a", 1), ("b", 2)]
    assert parse_endpoints("[::1]:5,c:6") == [("::1", 5), ("c", 6)]
    for wrong in ("a", "a:1,", "a:x,b:1", "a:70000,b:1", ":1,b:1"):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            parse_endpoints(wrong)
    with pytest.raises(ValueError, match="is listed twice"):
        parse_endpoints("a:1,a:1")


def test_a_name_that_means_loopback_is_told_of() -> None:
    """Some systems map a host's own name to 127.0.1.1: its store would be served to itself alone."""
    assert "node1 is 127.0.1.1 on this host" in str(unreachable("node1", "127.0.1.1"))
    for host, bound in (("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("node1", "10.0.0.5")):
        assert unreachable(host, bound) is None


def test_a_heartbeat_that_may_be_missed_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    """With two attempts torch takes hosts that live for dead, and trains without them."""
    for attempts, told in (("2", True), ("3", False)):
        endpoint = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
        FailoverRendezvous(RendezvousParameters(BACKEND, endpoint, "job", 1, 2, keep_alive_max_attempt=attempts))
        assert ("keep_alive_max_attempt=2 would count live hosts as dead" in capsys.readouterr().err) == told
