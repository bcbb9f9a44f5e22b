"""Weights for a host that joins, given and fetched by two threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua
from bagua.algorithms import ByteGrad
from bagua.engine.hooks import attachments
from bagua.engine.recovery import reopen
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.recovery.transfer import Fetched, WeightServer, fetch_weights
from tests.engine.scripted_seat import ScriptedSeat, view
from tests.rank_threads import teams

pytestmark = pytest.mark.process  # it takes a second
LIMIT_S = 90.0
TRANSFER_S = 900.0  # a transfer that waits for a host that is gone waits longer than the test


def make(value: float, size: int = 4) -> tuple[torch.nn.Linear, Any]:
    """A module whose weights have this value, and its engine."""
    module = torch.nn.Linear(size, size)
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


def test_what_has_changed_since_is_fetched_alone(served: tuple[Any, str]) -> None:
    """Not where most of the weights have: then nothing is, and the rank keeps the copy that it has."""
    _, address = served
    (theirs, giver), (mine, taker) = make(1.0, 512), make(2.0, 512)
    manager = RecoveryManager(ScriptedSeat(view(1, "n0"), ()), bagua.FaultTolerance())
    stopped, ended = threading.Event(), threading.Event()
    server = WeightServer("n1", address, TRANSFER_S, stopped)
    found: list[Fetched | None] = []

    def fetch(most: float) -> None:
        found.append(fetch_weights(taker, "n1", address, TRANSFER_S, _unless(ended), most))

    def changed(rows: int, most: float) -> Fetched | None:
        with torch.no_grad():
            theirs.weight[:rows] += 1.0
        learner = threading.Thread(target=fetch, args=(most,))
        learner.start()
        while learner.is_alive():
            server.offer(giver, 1, manager)
            learner.join(0.02)
        return found[-1]

    try:
        first, few = changed(0, 1.0), changed(8, 0.5)
        assert first is not None and first.nbytes == 512 * 513 * 4
        assert few is not None and few.nbytes == 8 * 512 * 4 and torch.equal(mine.weight, theirs.weight)
        kept = mine.weight.detach().clone()
        assert changed(400, 0.5) is None and torch.equal(mine.weight, kept)
    finally:
        stopped.set()
        ended.set()
        for module in (theirs, mine):
            bagua.detach(module)


def _unless(ended: threading.Event) -> Any:
    def alert() -> None:
        if ended.is_set():
            raise RuntimeError("the test has ended")

    return alert


@contextmanager
def between_steps() -> Iterator[None]:
    """As a thread that opens groups beside training."""
    yield


@pytest.mark.parametrize(("soon_s", "beside_steps"), [(0.0, False), (1000.0, True)])
def test_after_a_long_transfer_what_has_changed_meanwhile_is_fetched(
    monkeypatch: pytest.MonkeyPatch, soon_s: float, beside_steps: bool
) -> None:
    """Until most of the weights have; the last copy counts."""
    at_rest = between_steps if beside_steps else nullcontext
    copies, asked = [Fetched(3, 5, 5, b"", 100), Fetched(3, 8, 8, b"", 10), None], list[float]()

    def fetch(*_: Any, most: float = 1.0) -> Fetched | None:
        asked.append(most)
        return copies[len(asked) - 1]

    monkeypatch.setattr(reopen, "fetch_weights", fetch)
    monkeypatch.setattr(reopen, "_SOON_S", soon_s)
    manager = RecoveryManager(ScriptedSeat(view(1, "n0"), ()), bagua.FaultTolerance())
    held: list[tuple[int, int]] = []
    monkeypatch.setattr(manager, "has_fetched", lambda epoch, count: held.append((epoch, count)))
    inventory = SimpleNamespace(parameters={"w": torch.ones(2)}, frozen={}, buffers={})
    engine: Any = SimpleNamespace(state=SimpleNamespace(step=0), inventory=inventory, optimizers=[])
    reopen._learn(manager, engine, at_rest, view(1, "n0"))
    step, shares = (5, [1.0]) if soon_s else (8, [1.0, 0.5, 0.5])
    assert (asked, held, engine.state.step, manager.round) == (shares, [(3, step)], step, step)
    kept = manager.backup is not None and torch.equal(manager.backup.tensors[0], torch.ones(2))
    assert kept is not beside_steps, "only of weights that no step changes before the groups open"
