"""The gate of a background lane: verdicts are unanimous, and it ends when a rank does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from bagua.comm.store import BoundedStore
from bagua.comm.team import Team
from bagua.engine.lanes.gate import Gate
from bagua.engine.lanes.quorum import QuorumGate
from bagua.errors import CommunicationError
from tests.algorithms.async_run import PATIENCE_S
from tests.rank_threads import _run, teams


@pytest.mark.parametrize("giving_up", [0.0, 0.3])
def test_gate_verdicts_are_unanimous(giving_up: float) -> None:
    """Whatever the timing, a meeting takes place for all or for none."""
    size, meetings = 4, 60
    members = teams(size)
    rng = [np.random.default_rng(rank) for rank in range(size)]

    def rank_main(team: Team) -> list[bool]:
        gate, seen = Gate(team.store, "gate", team.rank, team.size, PATIENCE_S), []
        for _ in range(meetings):
            patience = rng[team.rank].random() * 0.004 if rng[team.rank].random() < giving_up else 99
            end = time.monotonic() + patience
            time.sleep(rng[team.rank].random() * 0.002)
            seen.append(gate.enter(lambda end=end: time.monotonic() > end))
        gate.leave()
        assert not gate.enter(lambda: False) and gate.over
        return seen

    results = _run(members, rank_main, (), 30)
    assert all(seen == results[0] for seen in results)
    assert any(results[0]) and (giving_up > 0) == (not all(results[0]))
    assert members[0].store.num_keys() < 3 * meetings


def test_ranks_know_the_sum_of_what_they_bring_to_a_meeting() -> None:
    """Also after meetings that one called off, unless all were there."""
    size, meetings = 3, 40
    most = [(1 << 47) // size, 0, (1 << 47) // size - 1]

    def rank_main(team: Team) -> list[int | None]:
        gate, seen = Gate(team.store, "gate", team.rank, team.size, PATIENCE_S), []
        for meeting in range(meetings):
            impatient = team.rank == 1 and meeting % 3 == 1
            brought = meeting * (team.rank + 1) if meeting % 2 else most[team.rank]
            seen.append(gate.total if gate.enter(lambda impatient=impatient: impatient, brought) else None)
        return seen

    for seen in _run(teams(size), rank_main, (), 30):
        for meeting, found in enumerate(seen):
            want = 6 * meeting if meeting % 2 else sum(most)
            assert found == want or (found is None and meeting % 3 == 1), meeting


def test_gate_is_over_when_a_rank_leaves_or_the_store_is_gone() -> None:
    first, second = (Gate(team.store, "gate", team.rank, 2, PATIENCE_S) for team in teams(2))
    second.leave()
    second.leave()
    assert not first.enter(lambda: False)
    assert first.over and first.remark == "rank 1 has left" and not first.urgent
    gone = Gate(BoundedStore(Gone(), PATIENCE_S), "gate", 0, 2, PATIENCE_S)
    assert not gone.enter(lambda: False)
    assert gone.over and "probably gone: Broken pipe" in gone.remark and gone.urgent


@pytest.mark.parametrize("failing", [False, True])
def test_only_a_rank_that_failed_is_missed(failing: bool) -> None:
    first, second = (Gate(team.store, "gate", team.rank, 2, PATIENCE_S) for team in teams(2))
    second.failing = failing
    first.give_up_after(0.0)
    second.leave()
    assert not first.enter(lambda: False)
    time.sleep(0.001)
    if not failing:
        first.give_up_after(0.0)
        return
    with pytest.raises(CommunicationError, match="rank 0 gives up: rank 1 has failed"):
        first.give_up_after(0.0)


def test_only_who_does_not_come_is_missed() -> None:
    """The others wait in the same meeting."""
    members = teams(3)
    gates = [Gate(team.store, "gate", team.rank, 3, PATIENCE_S) for team in members]
    threads = [threading.Thread(target=gate.enter, args=(lambda: False,)) for gate in gates[:2]]
    for thread in threads:
        thread.start()
    members[0].store.await_keys(["gate/at/0", "gate/at/1"], time.monotonic() + PATIENCE_S)
    with pytest.raises(CommunicationError, match="rank 0 gives up: no response from rank 2$"):
        gates[0].give_up_after(0.0)
    gates[2].leave()
    for thread in threads:
        thread.join(PATIENCE_S)


def test_who_leaves_is_heard_of_after_meetings_that_were_called_off() -> None:
    first, second = (Gate(team.store, "gate", team.rank, 2, PATIENCE_S) for team in teams(2))
    assert not first.enter(lambda: True) and not first.enter(lambda: True)
    second.leave()
    assert not first.enter(lambda: False)
    assert first.remark == "rank 1 has left"


class Ended(BaseException):
    """A rank has ended."""


class EndsBefore:
    """A store of a rank that ends before it writes a key."""

    def __init__(self, store: BoundedStore, key: str) -> None:
        self._store, self._key = store, key

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(key: Any, *values: Any) -> Any:
            if name in ("set", "add", "compare_set") and self._key in key:
                raise Ended
            return getattr(self._store, name)(key, *values)

        return call


class Ready:
    """Offers one step."""

    def ready(self) -> bool:
        return True

    def offer(self) -> list[float]:
        return [1.0]

    def withdrawn(self) -> bool:
        return False


def go(gate: Gate) -> None:
    """Into the next meeting."""
    if isinstance(gate, QuorumGate):
        gate.merge(Ready())
    else:
        gate.enter(lambda: False)


@pytest.mark.parametrize(
    ("quorum", "key"),
    [(False, "/entered"), (False, "/verdict"), (True, "/ready"), (True, "/at/"), (True, "/offer/"), (True, "/entered")],
)
def test_a_rank_that_ends_on_its_way_into_a_meeting_is_missed(quorum: bool, key: str) -> None:
    stores = [team.store for team in teams(2)]
    places = [(stores[0], "gate", 0, 2, PATIENCE_S), (EndsBefore(stores[1], key), "gate", 1, 2, PATIENCE_S)]
    gates = [QuorumGate(*place, 2, 0.0) if quorum else Gate(*place) for place in places]  # pyright: ignore[reportArgumentType]
    thread = threading.Thread(target=go, args=(gates[0],))
    thread.start()
    stores[0].await_keys(["gate/at/0"], time.monotonic() + PATIENCE_S)
    with pytest.raises(Ended):
        go(gates[1])
    if quorum and key in ("/offer/", "/entered"):
        stores[0].await_keys(["gate/0/offer/0"], time.monotonic() + PATIENCE_S)
    with pytest.raises(CommunicationError, match="rank 0 gives up: no response from rank 1$"):
        gates[0].give_up_after(0.0)
    gates[0].closing.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


class Gone:
    """A store whose server is no more."""

    def add(self, key: str, number: int) -> int:
        raise dist.DistNetworkError("Broken pipe")

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Broken pipe")


class NotReady(Ready):
    """Still on its way to the next round."""

    def ready(self) -> bool:
        return False


def test_a_rank_that_is_not_ready_gives_up_when_the_store_is_gone() -> None:
    gate = QuorumGate(BoundedStore(Gone(), PATIENCE_S), "gate", 0, 3, PATIENCE_S, 2, 0.0)
    assert gate.merge(NotReady()) is None and gate.over
    with pytest.raises(CommunicationError, match="rank 0 gives up: .*probably gone: Broken pipe"):
        gate.give_up_after(0.0)
