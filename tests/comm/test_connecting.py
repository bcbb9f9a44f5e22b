"""A group is not waited for once one of its ranks is known to be lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from bagua.comm.connecting import connect_gloo
from bagua.comm.store import BoundedStore, RendezvousStore
from bagua.comm.team import Team
from bagua.errors import CommunicationError
from tests.rank_threads import run_teams

LIMIT_S, NEVER_S = 100.0, 600.0


def rendezvous(store: dist.Store, alert: Callable[[], object] = lambda: None) -> RendezvousStore:
    return RendezvousStore(BoundedStore(dist.PrefixStore("connecting", store), NEVER_S), range(2), alert)


def await_threads() -> None:
    """Those that were left behind end, since what they wait for is cut or knows the alert."""
    for thread in threading.enumerate():
        if thread.name == "bagua-connect":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("comes", [False, True])
def test_who_connects_is_freed_when_a_rank_is_lost(comes: bool) -> None:
    """Before it has connected, or connected and not heard of again."""
    store, never = dist.HashStore(), timedelta(seconds=NEVER_S)
    connected, ended = threading.Event(), threading.Event()

    def rank(team: Team) -> None:
        if team.rank == 1:
            if comes:
                group = dist.ProcessGroupGloo(rendezvous(store), 1, 2, never)
                connected.set()
                assert ended.wait(LIMIT_S)
                with pytest.raises(RuntimeError):  # its connections are cut as well
                    group.barrier().wait()
            connected.set()
            return
        alerts: list[bool] = []

        def alert() -> None:
            alerts.append(connected.is_set())
            if alerts[-3:] == [True] * 3:
                raise CommunicationError("rank 1 is lost")

        with pytest.raises(CommunicationError, match="rank 1 is lost"):
            connect_gloo(rendezvous(store, alert), 0, 2, never, alert)
        ended.set()

    run_teams(2, rank)
    await_threads()


def test_a_member_that_does_not_come_is_named_by_its_rank() -> None:
    store = BoundedStore(dist.HashStore(), NEVER_S)
    with pytest.raises(RuntimeError, match=r"rank 7 published no address within 0\.2 s"):
        connect_gloo(RendezvousStore(store, [3, 7]), 0, 2, timedelta(seconds=0.2))


def test_an_error_of_connecting_is_raised() -> None:
    with pytest.raises(RuntimeError, match="rank 1 published no address"):
        connect_gloo(rendezvous(dist.HashStore()), 0, 2, timedelta(seconds=0.2), lambda: None)
    await_threads()


@pytest.mark.parametrize("noticed", [True, False])
def test_a_loss_may_be_noticed_later_than_by_its_connections(noticed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks for the missing ranks hears of it."""
    calls: list[None] = []

    def fail(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    def alert() -> None:
        calls.append(None)
        if noticed and len(calls) > 3:
            raise CommunicationError("rank 1 is lost")

    monkeypatch.setattr("bagua.comm.team.connect_gloo", fail)
    monkeypatch.setattr(Team.describe_missing, "__defaults__", (0.3, None, ""))
    team = Team(0, 2, dist.HashStore(), timedelta(seconds=LIMIT_S), "gloo", "team", "", alert=alert)
    told = (
        "rank 1 is lost" if noticed else "Connection closed by peer; no response from rank 1: it has exited or is late"
    )
    with pytest.raises(CommunicationError, match=told):
        team.open("lane", native=False)
    assert len(calls) >= 4
