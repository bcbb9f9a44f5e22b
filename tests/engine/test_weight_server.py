"""Weights for a host that joins, given and fetched by two threads."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua
from bagua.algorithms import ByteGrad
from bagua.engine.hooks import attachments
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.recovery.transfer import WeightServer, fetch_weights
from tests.engine.scripted_seat import ScriptedSeat, view
from tests.rank_threads import teams

pytestmark = pytest.mark.process  # it takes a second
LIMIT_S = 90.0
TRANSFER_S = 900.0  # a transfer that waits for a host that is gone waits longer than the test


def make(value: float) -> tuple[torch.nn.Module, Any]:
    """A module whose weights have this value, and its engine."""
    module = torch.nn.Linear(4, 4)
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(value)
    (team,) = teams(1)
    bagua.distribute(module, torch.optim.SGD(module.parameters(), lr=0.1), "bytegrad", process_group=team)
    return module, attachments[module].engine


@pytest.fixture
def served() -> tuple[Any, str]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    return store, f"127.0.0.1:{store.port}"


@pytest.mark.parametrize("nodes", [(), ((0, 1), (2, 3))])
def test_the_request_of_a_rank_that_was_killed_is_not_waited_for(
    served: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, nodes: tuple[tuple[int, ...], ...]
) -> None:
    """A rank that is started again on the same host asks anew; what it asked for before may still be in the store.

    The others may have a hierarchy of several ranks on each host, of which the rank that is alone knows nothing yet.
    """
    store, address = served
    (theirs, giver), (mine, taker) = make(1.0), make(2.0)
    dist.PrefixStore("bagua/weights/n1", store).set("request", "of a rank that was killed")
    manager = RecoveryManager(ScriptedSeat(view(1, "n0"), ()), bagua.FaultTolerance())
    if nodes:
        manager.algorithm = ByteGrad()
        fitted, _ = manager.algorithm.for_nodes(nodes)
        assert repr(fitted) != repr(taker.state.root)
        monkeypatch.setattr(giver.state, "root", fitted)
        for engine in (giver, taker):
            monkeypatch.setattr(engine.failures, "recovery", manager)
    before = store.num_keys()
    stopped, fetched = threading.Event(), threading.Event()
    server = WeightServer("n1", address, TRANSFER_S, stopped)
    ended, taken = threading.Event(), threading.Event()

    def learn() -> None:
        taken.wait(LIMIT_S)  # the old request is being served
        try:
            fetch_weights(taker, "n1", address, TRANSFER_S, _unless(ended))
        except RuntimeError:
            return
        fetched.set()

    learner = threading.Thread(target=learn)
    learner.start()
    try:
        for _ in range(round(LIMIT_S / 0.02)):
            server.offer(giver, 1, manager)
            if store.num_keys() > before:
                taken.set()
            if fetched.wait(0.02):
                break
        assert fetched.is_set(), "the new request was not served"
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    finally:
        stopped.set()
        ended.set()
        learner.join(LIMIT_S)
        monkeypatch.undo()
        for module in (theirs, mine):
            bagua.detach(module)


def _unless(ended: threading.Event) -> Any:
    def alert() -> None:
        if ended.is_set():
            raise RuntimeError("the test has ended")

    return alert
