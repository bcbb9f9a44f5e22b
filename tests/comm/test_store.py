"""Calls of a store that does not answer, and keys that nobody reads any more."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from bagua.comm.store import BoundedStore, RendezvousStore
from bagua.comm.store_team import StoreTeam
from bagua.comm.team import Team
from bagua.engine.recovery.old_keys import delete_below, delete_old_groups
from bagua.errors import CommunicationError

BOUND_S = 60.0


class Silent:
    """A store whose server is stopped."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def get(self, key: str) -> bytes:
        self.released.wait(BOUND_S)
        raise RuntimeError(f"no {key}")


def test_a_call_without_an_answer_ends_when_the_alert_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua.comm.store._LATE_S", 0.01)
    silent = Silent()

    def alert() -> None:
        raise CommunicationError("the members have changed")

    with pytest.raises(CommunicationError, match="^the members have changed$"):
        BoundedStore(silent, 10 * BOUND_S, alert=alert).within(5 * BOUND_S).get("key")
    silent.released.set()


class Slow:
    """A store whose server answers late."""

    def __init__(self, late_s: float) -> None:
        self.late_s, self.looks, self.alerts = late_s, 0, 0

    def check(self, keys: list[str]) -> bool:
        time.sleep(self.late_s)
        self.looks += 1
        return self.looks > 1

    def get(self, key: str) -> bytes:
        return b"of rank 0"

    def alert(self) -> None:
        self.alerts += 1


def test_a_wait_that_raises_alerts_outlasts_a_store_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has what is left of the whole wait, though alerts are called more often than it is answered."""
    monkeypatch.setattr("bagua.comm.store._GRACE_S", 0.1)
    monkeypatch.setattr("bagua.comm.store._LATE_S", 0.05)
    slow = Slow(late_s=0.5)
    waiting = StoreTeam(1, 2, slow, timedelta(seconds=BOUND_S), alert=slow.alert)
    assert waiting.broadcast_bytes("order", None) == b"of rank 0"
    assert slow.looks == 2 and slow.alerts >= 3
    slow.looks = 0
    RendezvousStore(BoundedStore(slow, BOUND_S), [0, 1], slow.alert).wait(["key"], timedelta(seconds=BOUND_S))


def test_a_wait_for_keys_ends_when_the_alert_raises() -> None:
    store = BoundedStore(dist.HashStore(), BOUND_S)

    def alert() -> None:
        raise CommunicationError("the members have changed")

    with pytest.raises(CommunicationError, match="^the members have changed$"):
        store.await_keys(["key"], time.monotonic() + BOUND_S, alert)
    with pytest.raises(CommunicationError, match="^the members have changed$"):
        RendezvousStore(store, [0, 1], alert).wait(["key"], timedelta(seconds=BOUND_S))


def test_a_call_that_fails_leaves_no_cycle() -> None:
    """It would keep the connection to the store until the garbage collector runs."""
    silent = Silent()
    silent.released.set()
    gone = weakref.ref(silent)
    gc.disable()
    try:
        with pytest.raises(CommunicationError, match="no key"):
            BoundedStore(silent, BOUND_S).get("key")
        del silent
        assert gone() is None
    finally:
        gc.enable()


@pytest.fixture
def store() -> Any:
    made = dist.HashStore()
    for number in (1, 2, 12):
        dist.PrefixStore(f"bagua/group/{number}", made).set("lane/key", "x")
    for learner in ("n1", "n12"):
        dist.PrefixStore(f"bagua/weights/{learner}", made).set("request", "x")
    made.set("other", "x")
    return made


def team(store: Any, rank: int) -> Team:
    return Team(rank, 2, dist.PrefixStore("bagua/group/12", store), timedelta(seconds=BOUND_S))


def test_the_first_rank_deletes_the_keys_of_former_groups(store: Any) -> None:
    everything = sorted(store.list_keys())
    delete_old_groups(team(store, 1), 2, 12)
    assert sorted(store.list_keys()) == everything
    delete_old_groups(team(store, 0), 2, 12)
    assert sorted(store.list_keys()) == [key for key in everything if "group/1/" not in key]


def test_keys_of_another_host_stay(store: Any) -> None:
    delete_below(team(store, 0).store, "bagua/weights/n1")
    assert sorted(key for key in store.list_keys() if "weights" in key) == ["bagua/weights/n12/request"]


def test_a_store_that_is_gone_is_no_error(store: Any) -> None:
    class Gone(dist.Store):
        pass

    delete_old_groups(Team(0, 2, Gone(), timedelta(seconds=BOUND_S)), 1)
