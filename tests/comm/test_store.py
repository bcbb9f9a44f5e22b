"""Calls of a store that does not answer, and keys that nobody reads any more."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from bagua.comm.store import BoundedStore
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
