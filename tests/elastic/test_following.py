"""The place of a loop in the data: after lost steps, with other ranks, for ranks that were behind or are new."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua import elastic
from bagua.checkpoint.errors import CheckpointError
from bagua.elastic import following
from bagua.elastic.following import Following
from bagua.engine.recovery.progress import Progress
from bagua.errors import CommunicationError
from tests.sampler_script import RunsAhead

EPOCHS = 3


class Gate:
    """A `StepGate` of a rank whose members are what a test says."""

    def __init__(self, rank: int, size: int) -> None:
        self.progress = Progress()
        self.rank, self.size = rank, size
        self.steps = self.attempts = 0
        self.ending = False
        self.opening: Callable[[], None] | None = None  # what happens when the next step begins

    def settle(self) -> bool:
        """See `StepGate`."""
        return False

    def begin(self) -> None:
        """See `StepGate`."""
        self.progress.repeats = True
        opening, self.opening = self.opening, None
        if opening is not None:
            opening()


class Halving:
    """A scheduler: each step halves the learning rate."""

    def __init__(self, optimizer: Any) -> None:
        self._groups, self._count = optimizer.param_groups, 0

    def step(self) -> None:
        """See `LRScheduler`."""
        self._count += 1
        self._groups[0]["lr"] = 0.5**self._count

    def state_dict(self) -> dict[str, int]:
        """See `LRScheduler`."""
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """See `LRScheduler`."""
        self._count = state["count"]


class Rank:
    """One rank with the loop of a user, up to the batch of its next step.

    Attributes:
        batch: epoch and samples of the step that it has begun; None after the last epoch.
        resizes: of which it was told.
    """

    def __init__(self, world: World, rank: int, size: int) -> None:
        self.gate, self._world = Gate(rank, size), world
        self.batch: tuple[int, list[int]] | None = None
        self.resizes: list[tuple[int, int]] = []
        self._loop: Iterator[tuple[int, list[int]]] | None = None

    def _start(self) -> None:
        """What a script does up to its loop, when the groups are open."""
        world, module = self._world, torch.nn.Linear(1, 1)
        world.patch.setattr(following, "StepGate", lambda _: self.gate)
        world.patch.setenv("BAGUA_SEAT", "a test's")
        self.optimizer: Any = SimpleNamespace(param_groups=[{"params": [], "lr": 1.0}])
        self.sampler = elastic.Sampler(range(world.num_samples), seed=7, global_batch_size=world.global_batch)
        self.user: dict[str, Any] = {"scheduler": Halving(self.optimizer), "steps": 0, "epochs": []}
        self.following = Following(module, self.optimizer, self.sampler, self.user, self._resized)
        self.following.restore()
        self._loop = self._train(RunsAhead(self.sampler, world.batch_size, world.ahead))

    def _resized(self, change: elastic.Resize) -> None:
        self.resizes.append((change.old, change.new))

    def _train(self, loader: Any) -> Iterator[tuple[int, list[int]]]:
        for epoch in range(self.sampler.epoch, EPOCHS):
            self.sampler.set_epoch(epoch)
            for batch in self.sampler.track(loader):
                yield self.sampler.epoch, batch
                self.user["steps"] += 1
            self.user["scheduler"].step()
            self.user["epochs"].append(epoch)
            self.following.number += 1

    def advance(self) -> None:
        """Run the loop to its next batch."""
        if self._loop is None:
            if self.gate.opening is not None:
                self.gate.begin()  # in `bagua.distribute`
            self._start()
        assert self._loop is not None
        self.batch = next(self._loop, None)

    def end_step(self, counts: bool) -> None:
        """The step whose batch it has ended."""
        self.gate.attempts += 1
        self.gate.steps += counts

    @property
    def place(self) -> tuple[Any, ...]:
        """What is equal on all ranks that have begun a step."""
        lr = self.optimizer.param_groups[0]["lr"]
        counters = self.gate.steps, self.user["steps"], tuple(self.user["epochs"]), self.following.number
        return *counters, lr, self.sampler.epoch, self.sampler.position, self.following.size

    @property
    def at_the_end(self) -> bool:
        """Whether the step that it has begun is the last one."""
        return self.sampler.epoch == EPOCHS - 1 and self.sampler.position >= self.sampler.num_samples


class World:
    """Ranks that are lost, left out and join at random, also in a step that counts on some ranks only.

    Attributes:
        used: by epoch, samples of steps that count.
        size: by epoch, ranks of the last step.
    """

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self.patch, self.random = patch, random.Random(seed)
        rng = self.random
        self.num_samples, self.ahead = rng.randint(1, 40), rng.randint(0, 3)
        by_batch = rng.random() < 0.5
        self.global_batch = rng.randint(1, 12) if by_batch else None
        self.batch_size = None if by_batch else rng.randint(1, 4)
        self.used: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.size: dict[int, int] = {}
        self.steps = self.changes = 0
        size = rng.randint(1, 4)
        self.ranks = [Rank(self, rank, size) for rank in range(size)]
        self._left_out: list[Rank] = []
        self._advance()

    def _advance(self) -> None:
        for rank in self.ranks:  # the one that leads first: the others need its report
            rank.advance()
        self.ranks.sort(key=lambda rank: rank.gate.rank)

    def step(self) -> None:
        """One step of all ranks, and what happens to them in it."""
        rng, ranks = self.random, self.ranks
        places = {rank.place for rank in ranks}
        assert len(places) == 1
        assert ranks[0].gate.steps == ranks[0].user["steps"] == self.steps
        happens = rng.random() < 0.3 and not ranks[0].at_the_end
        lost = [rank for rank in ranks[1:] if happens and rng.random() < 0.3]
        if happens and len(ranks) > len(lost) + 1 and rng.random() < 0.3:
            lost.append(ranks[0])
        left = [rank for rank in ranks if rank not in lost]
        chance = rng.choice([0.0, 0.5, 1.0]) if happens else 1.0
        counted = [rank for rank in left if rng.random() < chance]
        if counted:
            self.steps += 1
            for rank in ranks:
                assert rank.batch is not None
                self.used[rank.batch[0]].update(rank.batch[1])
                self.size[rank.batch[0]] = len(ranks)
        for rank in ranks:
            rank.end_step(rank in counted)
        if happens:
            returning = [rank for rank in self._left_out if rng.random() < 0.4]
            self._left_out = [rank for rank in self._left_out if rank not in returning]
            self._left_out += [rank for rank in lost if rng.random() < 0.5]  # the others are dead
            came = [Rank(self, 0, 1) for _ in range(rng.choice([0, 0, 1, 2]))]
            self._reopen(left, [*returning, *came], (counted or left)[0])
        self._advance()

    def _reopen(self, left: list[Rank], came: list[Rank], lead: Rank) -> None:
        members, step, told = [*left, *came], lead.gate.steps, [b""]
        self.changes += 1

        def opens(rank: Rank) -> Callable[[], None]:
            def opening() -> None:
                if rank is lead:
                    told[0] = rank.gate.progress.report()
                elif rank in came or rank.gate.steps < step:
                    rank.gate.steps = step
                    rank.gate.progress.receive(told[0])
                rank.gate.progress.divide(step, rank.gate.rank, rank.gate.size)

            return opening

        for at, rank in enumerate(members):
            rank.gate.rank, rank.gate.size = at, len(members)
            rank.gate.opening = opens(rank)
        self.ranks = [lead, *(rank for rank in members if rank is not lead)]

    def check_each_sample_once(self) -> None:
        """In each epoch; at its end some more, if fewer than ranks are left."""
        assert sorted(self.used) == list(range(EPOCHS))
        for epoch, counts in self.used.items():
            assert set(counts) == set(range(self.num_samples))
            assert counts.total() - self.num_samples < self.size[epoch]


def run_world(patch: pytest.MonkeyPatch, seed: int) -> World:
    """One training; raises what is wrong with it."""
    world = World(patch, seed)
    while world.ranks[0].batch is not None:
        world.step()
        assert len({rank.batch is None for rank in world.ranks}) == 1
    world.check_each_sample_once()
    return world


def test_each_sample_counts_once_whoever_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = [run_world(monkeypatch, seed) for seed in range(40)]
    assert sum(world.changes for world in worlds) > 40


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 4000, 500))
def test_each_sample_counts_once_with_many_seeds(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    for seed in range(first, first + 500):
        run_world(monkeypatch, seed)


def lone_world(patch: pytest.MonkeyPatch, size: int, num_samples: int = 40) -> World:
    """Ranks to which nothing happens by chance; four samples a step."""
    world = World(patch, 0)
    world.num_samples, world.global_batch, world.batch_size, world.ahead = num_samples, 4, None, 1
    world.ranks = [Rank(world, rank, size) for rank in range(size)]
    for rank in world.ranks:
        rank.advance()
    return world


def test_ranks_that_are_apart_are_divided_anew_where_the_first_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with local SGD: between two exchanges, one has made more steps than another when a third one is lost."""
    world = lone_world(monkeypatch, 3)
    first, second, lost = world.ranks
    steps: defaultdict[int, list[int]] = defaultdict(list)

    def make(rank: Rank, num: int) -> None:
        for _ in range(num):
            assert rank.batch is not None
            steps[rank.gate.steps].extend(rank.batch[1])
            rank.end_step(True)
            rank.advance()

    make(first, 5)
    make(second, 2)
    make(lost, 3)
    for at, rank in enumerate((first, second)):
        rank.end_step(True)  # the step that it had begun
        steps[rank.gate.steps - 1].extend(rank.batch[1] if rank.batch else [])
        rank.gate.progress.divide(6, at, 2)
        rank.advance()
    assert first.resizes == [(3, 2)] and second.resizes == []
    make(first, 4)
    make(second, 7)
    assert (first.gate.steps, second.gate.steps) == (10, 10) and second.resizes == [(3, 2)]
    assert first.batch is not None and second.batch is not None
    assert first.batch[0] == second.batch[0] == 1, "ten steps are an epoch on both"
    order = [index for step in range(10) for index in steps[step]]
    assert len(order) == len(set(order)), "none comes twice"
    assert [len(steps[step]) for step in range(10)] == [4, 4, 4, 3, 3, 3, 4, 4, 4, 4], (
        "what the lost one had is left out"
    )


def test_a_rank_whose_epochs_do_not_count_has_to_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    behind, ahead = lone_world(monkeypatch, 1).ranks[0], lone_world(monkeypatch, 1).ranks[0]
    for _ in range(10):
        ahead.end_step(True)
        ahead.advance()
    ahead.gate.progress.receive(behind.gate.progress.report())
    ahead.end_step(False)
    with pytest.raises(CommunicationError, match="this rank is in epoch 1 and the job in epoch 0"):
        ahead.advance()


def test_what_cannot_be_followed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = lone_world(monkeypatch, 1).ranks[0]
    module = torch.nn.Linear(1, 1)

    def follow(sampler: Any = None, **user: Any) -> Following:
        return Following(module, rank.optimizer, sampler, user, None)

    with pytest.raises(TypeError, match="ema: Linear is not kept equal by a fault-tolerant module"):
        follow(ema=module)
    with pytest.raises(ValueError, match="sampler: leave out num_replicas and rank"):
        follow(elastic.Sampler(range(4), num_replicas=1, rank=0))
    with pytest.raises(CheckpointError, match="progress of the training loop: holds something that is neither"):
        follow(counter=Halving(rank.optimizer).step)
    sampler = elastic.Sampler(range(4))
    with pytest.raises(RuntimeError, match=r"sampler: with fault_tolerant, pass it to bagua.elastic.State"):
        list(sampler)
    follow(sampler)
    with pytest.raises(RuntimeError, match=r"sampler: with fault_tolerant, iterate with sampler.track\(loader\)"):
        iter(sampler)


def test_an_epoch_that_is_over_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = lone_world(monkeypatch, 1).ranks[0]
    while rank.sampler.epoch == 0:
        rank.end_step(True)
        rank.advance()
    sampler = rank.sampler
    while not sampler.over:
        rank.end_step(True)
        rank.advance()
    rank.end_step(True)
    sampler.go_on()  # as when the members have changed meanwhile
    again = rank.following.track(RunsAhead(sampler, None, 1), 1)
    with pytest.raises(RuntimeError, match=r"sampler: epoch 1 is over; call sampler.set_epoch\(\)"):
        next(again)
