"""Checkpoints of modules that go on without lost ranks: of those that are left, whenever one is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import AsyncModelAverage, Decentralized, GradientAllReduce, LocalSGD
from bagua.checkpoint import CheckpointError, Shards
from bagua.comm.store_team import StoreTeam
from bagua.engine.hooks import attachments
from bagua.engine.recovery import together
from bagua.errors import CommunicationError
from tests.daily import one_in
from tests.engine.membership_store import Killed, drop_rank
from tests.engine.shared_membership import SharedMembership
from tests.engine.test_recovery_rounds import Script
from tests.rank_threads import run_teams

SIZE = 3
GATHERS = 5  # of a save: arguments, step, what is equal, what is written, whether it is complete
POINTS = 1 + GATHERS  # the first is where a rank has come
ALGORITHMS = {
    "gradient_allreduce": GradientAllReduce(),
    "decentralized": Decentralized(),
    "local_sgd": LocalSGD(communication_interval=1000),
    "async": AsyncModelAverage(sync_interval_ms=1e9),
}
STEPS = 4


class Saving(Script):
    """Ranks that hold different weights and save them, of which one is lost at a point and another one holds.

    Attributes:
        passes_over: rank that trains on in place of saving.
        trains_on: steps are made afterwards, until the members have changed; they change nothing.
        blocked_s: how long they wait for each other.
        paths: what `save` returned.
    """

    def __init__(
        self,
        store: str,
        folder: Path,
        place: int = -1,
        dies: int = -1,
        holds: int | None = None,
        trains_on: bool = False,
    ) -> None:
        super().__init__(store, place, dies, holds)
        self.folder, self.trains_on, self.blocked_s = folder, trains_on, 600.0
        self.passes_over = -1
        self.paths: dict[int, Path] = {}
        self.members = SharedMembership(self.names, store, lambda *_: None)  # only the points below count

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, SIZE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def take_part(self, team: Any, algorithm: Any) -> None:
        self.here.name = name = self.names[team.rank]
        model = nn.Linear(SIZE, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        options = bagua.FaultTolerance(seat=self.members.seat(name), open_timeout_s=600, max_blocked_s=self.blocked_s)
        bagua.distribute(model, optimizer, algorithm, fault_tolerant=options)
        try:
            for _ in range(STEPS):
                self.step(model, optimizer)
            with torch.no_grad():
                model.weight.fill_(4.0 * team.rank)
            if team.rank != self.passes_over:
                objects = {"model": model, "optimizer": optimizer, "place": team.rank}
                self.paths[team.rank] = bagua.checkpoint.save(self.folder, objects, step=STEPS)
            self.event(name, "done")
            while self.trains_on and not bagua.stats(model).membership:
                self.step(model, optimizer)
            while self.passes_over >= 0 and bagua.stats(model).steps < STEPS + 2:
                self.step(model, optimizer)
        except Killed:
            self.members.lose(name)
            drop_rank(model)
            return
        bagua.detach(model)


def run(monkeypatch: pytest.MonkeyPatch, script: Saving, algorithm: bagua.Algorithm) -> None:
    gather, come = StoreTeam.all_gather_bytes, together.those_who_come

    def gather_at(team: StoreTeam, what: str, payload: bytes) -> list[bytes]:
        saves = what.startswith("saving")
        if saves:
            script.event(script.here.name, "gather")
        gathered = gather(team, what, payload)
        events = script.events[script.here.name] if saves else []
        if events and script.here.name == script.names[script.holder] and len(events) == script.holds == POINTS:
            script.event(script.here.name, "left in doubt")
            raise CommunicationError("the store is lost")
        return gathered

    def come_at(*args: Any) -> list[int]:
        script.event(script.here.name, "come")
        return come(*args)

    monkeypatch.setattr(StoreTeam, "all_gather_bytes", gather_at)
    monkeypatch.setattr(together, "those_who_come", come_at)
    run_teams(SIZE, script.take_part, algorithm)


def weights(folder: Path, moved: int = 0) -> tuple[int, torch.Tensor, Any]:
    """How many ranks have saved the last checkpoint, and what one rank loads.

    Args:
        moved: steps that they may have taken over from others.
    """
    model = nn.Linear(SIZE, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = bagua.checkpoint.load(folder, {"model": model, "optimizer": optimizer})
    assert found is not None and found.step in (STEPS, STEPS + moved)
    return found.size, model.weight.detach()[0], found.data["place"]


def full(value: float) -> torch.Tensor:
    return torch.full((SIZE,), value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_ranks_save_one_checkpoint(monkeypatch: pytest.MonkeyPatch, store: str, tmp_path: Path, name: str) -> None:
    script = Saving(store, tmp_path)
    run(monkeypatch, script, ALGORITHMS[name])
    assert [each.name for each in tmp_path.iterdir()] == [f"checkpoint-000001-step-{STEPS}"]
    assert set(script.paths) == set(range(SIZE)) and len(set(script.paths.values())) == 1
    size, found, place = weights(tmp_path)
    assert size == SIZE and torch.equal(found, full(4.0)) and place == 0


@pytest.mark.parametrize(
    ("name", "dies", "place"), one_in(2, ["gradient_allreduce", "decentralized", "async"], range(POINTS), [0, 2])
)
def test_a_rank_is_lost(
    monkeypatch: pytest.MonkeyPatch, store: str, tmp_path: Path, name: str, dies: int, place: int
) -> None:
    """Those that are left save without it, and nothing half-written stays."""
    script = Saving(store, tmp_path, place, dies)
    run(monkeypatch, script, ALGORITHMS[name])
    left = [rank for rank in range(SIZE) if rank != place]
    assert set(script.paths) == set(left) and len(set(script.paths.values())) == 1
    size, found, first = weights(tmp_path)
    assert size == 2 and first == left[0] and torch.equal(found, full(4.0 * sum(left) / 2))
    assert all(each.name.startswith("checkpoint-") for each in tmp_path.iterdir())


def test_one_survivor_does_not_learn_that_it_is_complete(
    monkeypatch: pytest.MonkeyPatch, store: str, tmp_path: Path
) -> None:
    """The other ones are done, and train on. They say so when the next groups are opened."""
    script = Saving(store, tmp_path, 0, POINTS, POINTS, trains_on=True)
    run(monkeypatch, script, ALGORITHMS["decentralized"])
    assert [each.name for each in tmp_path.iterdir()] == [f"checkpoint-000001-step-{STEPS}"]
    assert script.paths[1] == script.paths[2] == tmp_path / f"checkpoint-000001-step-{STEPS}"


@pytest.mark.parametrize("name", ["gradient_allreduce", "decentralized"])
def test_a_rank_that_has_begun_the_next_step_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, store: str, tmp_path: Path, name: str
) -> None:
    """As one that has taken over the last step of another within its forward pass."""
    script = Saving(store, tmp_path, 1, 0)
    script.passes_over = 2
    run(monkeypatch, script, ALGORITHMS[name])
    size, found, place = weights(tmp_path, moved=name == "decentralized")  # in which a rank makes the step alone
    assert size == 1 and torch.equal(found, full(0.0)) and place == 0


def test_the_store_does_not_grow(store: str, tmp_path: Path) -> None:
    script = Saving(store, tmp_path)

    def train(team: Any) -> list[int]:
        model = nn.Linear(SIZE, 1, bias=False)
        seat = script.members.seat(script.names[team.rank])
        bagua.distribute(model, [torch.optim.SGD(model.parameters())], fault_tolerant=bagua.FaultTolerance(seat=seat))
        numbers: list[int] = []
        for _ in range(8):
            bagua.checkpoint.save(tmp_path, {"model": model}, step=0, keep=1)
            numbers.append(attachments[model].engine.team.store.num_keys())
        bagua.detach(model)
        return numbers

    for numbers in run_teams(SIZE, train):
        assert max(numbers[4:]) < numbers[1] + 8  # each rank still has to delete some of the last one


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch, store: str, tmp_path: Path) -> None:
    script, others = Saving(store, tmp_path), list[str]()
    script.blocked_s = 1.0
    come = together.those_who_come

    def come_at(*args: Any) -> list[int]:
        if script.here.name != script.names[2]:
            return come(*args)
        deadline = time.monotonic() + 60
        while len(others) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        raise Killed

    def train(team: Any) -> None:
        try:
            script.take_part(team, ALGORITHMS["gradient_allreduce"])
        except CommunicationError as error:
            others.append(str(error))

    monkeypatch.setattr(together, "those_who_come", come_at)
    run_teams(SIZE, train)
    assert len(others) == 2 and all(f"saving to {tmp_path}: rank 2 did not arrive" in each for each in others)
    assert not list(tmp_path.iterdir())


def test_loading_into_it_is_refused_before_anything_changes(store: str, tmp_path: Path) -> None:
    names = ["n0"]
    members = SharedMembership(names, store, lambda *_: None)
    model = nn.Linear(SIZE, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    bagua.distribute(model, optimizer, fault_tolerant=bagua.FaultTolerance(seat=members.seat("n0")))
    try:
        objects = {"model": model, "optimizer": optimizer}
        bagua.checkpoint.save(tmp_path, objects, step=1)
        with torch.no_grad():
            model.weight.fill_(7.0)
        for use in (
            lambda: bagua.checkpoint.load(tmp_path, objects),
            lambda: bagua.checkpoint.load_checkpoint(str(tmp_path), model, optimizer),
            lambda: bagua.checkpoint.save_checkpoint(1, str(tmp_path), model, optimizer),
            lambda: Shards(objects).state_dict(),
        ):
            with pytest.raises(CheckpointError, match="Linear is distributed with fault_tolerant; "):
                use()
        assert torch.equal(model.weight.detach()[0], full(7.0))
    finally:
        bagua.detach(model)


def test_ranks_of_such_a_job_do_not_save_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the module each would take itself for the only one."""
    monkeypatch.setenv("BAGUA_SEAT", str(tmp_path / "seat"))
    with pytest.raises(CheckpointError, match="none of the objects is a module distributed with fault_tolerant"):
        bagua.checkpoint.save(tmp_path, {"model": nn.Linear(2, 2)}, step=1)
    assert not list(tmp_path.iterdir())
