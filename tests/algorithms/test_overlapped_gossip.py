"""`low_precision_decentralized` with overlap: a numpy oracle, exact replicas, and what ends early."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import bagua
from bagua import codecs, topologies
from bagua.algorithms import LowPrecisionDecentralized, Warmup
from bagua.comm.groups import Groups
from bagua.comm.team import Team
from bagua.exchanges import DifferenceGossip
from tests.algorithms.momentum import interrupted
from tests.algorithms.quadratic import Quadratic, flat, start, target, targets
from tests.algorithms.test_oracles import quantise
from tests.rank_threads import run_teams

STEPS, LR, PATIENCE_S = 10, 0.1, 20.0


def oracle(size: int, interval: int, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Weights after each step, with the last exchange still under way, [steps, size, N]; and with it, [size, N]."""
    x = np.tile(start(), (size, 1))
    me, pending, seen = x.copy(), np.zeros_like(x), []
    for step in range(steps):
        x = x - LR * (x - targets(size, step)) + pending
        pending = np.zeros_like(x)
        if step % interval == 0 and size > 1:
            share = 1 / 4 if size == 2 else 1 / 3  # two ranks have one neighbour, of weight 1/2
            d = (x - me) + share * (np.roll(me, 1, 0) - me) + share * (np.roll(me, -1, 0) - me)
            me = me + np.stack([quantise(row) for row in d])
            pending = me - x
        seen.append(x)
    return np.stack(seen), x + pending


class Run:
    """One rank's training loop."""

    def __init__(self, team: Team, algorithm: Any, **options: Any) -> None:
        self.team, self.step, self.model = team, 0, Quadratic()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        bagua.distribute(self.model, self.optimizer, algorithm, process_group=team, **options)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.tensor(target(self.team.rank, self.step), dtype=torch.float32)).backward()
            self.optimizer.step()
            self.step += 1

    def x(self) -> np.ndarray:
        return flat(self.model).detach().double().numpy().copy()


def followed(team: Team, interval: int) -> tuple[list[np.ndarray], list[Tensor], list[Tensor], np.ndarray]:
    """Weights after each step; what this rank and its replicas of the peers were then; weights after detaching."""
    run = Run(team, LowPrecisionDecentralized(communication_interval=interval, overlap=True))
    seen, mine, peers = [], [], []
    for step in range(STEPS):
        run.train()
        seen.append(run.x())
        if step % 3 == 0:  # at the others nobody looks, and the exchange is beside the next pass
            (state,) = [each for each in bagua.state_dict(run.model)["states"] if "me" in each["tensors"]] or [None]
            if state is not None:
                mine.append(state["tensors"]["me"])
                peers.append(state["tensors"]["peers"])
    bagua.detach(run.model)
    return seen, mine, peers, run.x()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("interval", [1, 3])
def test_it_is_the_oracle_and_replicas_are_exact(size: int, interval: int) -> None:
    results = run_teams(size, followed, interval)
    want, settled = oracle(size, interval)
    for rank, (seen, mine, peers, last) in enumerate(results):
        # The oracle counts in fp64: a value that lies between two codes may get the other one, which then stays.
        apart = np.abs(np.stack(seen) - want[:, rank])
        assert apart.max() < 0.005 and np.mean(apart > 1e-5) < 0.02
        ended = np.abs(last - settled[rank])
        assert ended.max() < 0.005 and np.mean(ended > 1e-5) < 0.1, "detaching completes what is under way"
        whom = topologies.get("ring").peers(rank, size, 0)
        assert len(mine) == len(range(0, STEPS, 3)) and all(len(each) == len(whom) for each in peers)
        for moment, copies in enumerate(peers):
            for copy, (peer, _) in zip(copies, whom, strict=True):
                assert torch.equal(copy, results[peer][1][moment]), (rank, peer, moment)


def test_the_mean_is_that_of_sgd_and_ranks_stay_near() -> None:
    """Gossip keeps the mean; the ranks' distance stays that of a few steps' drift, as without overlap."""
    size, steps = 4, 200
    seen, settled = oracle(size, 1, steps)
    mean = start()
    for step in range(steps):
        mean = mean - LR * (mean - targets(size, step).mean(0))
    assert np.abs(settled.mean(0) - mean).max() < 0.05
    drift = LR * max(np.linalg.norm(targets(size, step) - targets(size, step).mean(0)) for step in range(steps))
    rate = np.sort(np.abs(np.linalg.eigvalsh(np.array(topologies.get("ring").matrix(size, 0)))))[-2]
    apart = [np.linalg.norm(x - x.mean(0)) for x in seen]
    assert max(apart) < 2 * drift / (1 - rate)


def test_resume_with_an_exchange_under_way_is_bit_identical() -> None:
    algorithm, stops = LowPrecisionDecentralized(overlap=True, communication_interval=2), (1, 2, 5)
    for whole, resumed in run_teams(3, interrupted, lambda p: torch.optim.SGD(p, lr=LR), algorithm, stops, 9):
        assert [stop for stop in stops if not torch.equal(whole, resumed[stop])] == []


@dataclass(frozen=True)
class Held(DifferenceGossip):
    """Does not begin before somebody says so."""

    go: ClassVar[tuple[threading.Event, ...]] = (threading.Event(), threading.Event())

    def run(self, x_N: Tensor, state: dict[str, Tensor], groups: Groups, step: int) -> None:
        assert self.go[groups.rank].wait(PATIENCE_S)
        super().run(x_N, state, groups, step)


class HeldGossip(LowPrecisionDecentralized):
    """Uses `Held`."""

    exchange = Held(topologies.get("ring"), codecs.get("minmax_uint8"))  # pyright: ignore[reportAssignmentType]


def test_forward_and_backward_pass_run_beside_it() -> None:
    """The exchange of a step is let go in the next step's backward pass only; who waited before would wait forever."""
    for event in Held.go:
        event.clear()

    def rank_main(team: Team) -> np.ndarray:
        run = Run(team, HeldGossip(overlap=True))
        run.train()
        x = run.x()
        run.model.eval()
        run.model(torch.zeros(46))  # evaluation between steps neither waits nor changes anything
        run.model.train()
        assert np.array_equal(run.x(), x) and not Held.go[team.rank].is_set()
        run.model.w.register_hook(lambda grad: Held.go[team.rank].set())
        run.train()
        return run.x()

    results = run_teams(2, rank_main)
    assert np.abs(np.stack(results) - oracle(2, 1, 2)[0][-1]).max() < 1e-5


def test_average_accumulation_and_switching_take_the_pending_over() -> None:
    def rank_main(team: Team) -> list[np.ndarray]:
        run = Run(team, "low_precision_decentralized", overlap=True)
        run.train(3)
        with bagua.no_sync(run.model):
            run.model(torch.zeros(46)).backward()
        run.model.zero_grad()
        bagua.pause(run.model)
        bagua.resume(run.model)
        seen = [run.x()]
        bagua.average_parameters(run.model)
        seen.append(run.x())
        bagua.average_parameters(run.model)
        seen.append(run.x())
        run.train(2)
        bagua.distribute(run.model, run.optimizer, "gradient_allreduce")
        run.train(2)
        seen.append(run.x())
        return seen

    results = run_teams(3, rank_main)
    settled = oracle(3, 1, 3)[1]
    for rank, seen in enumerate(results):
        assert np.abs(seen[0] - settled[rank]).max() < 1e-5
        assert np.abs(seen[1] - settled.mean(0)).max() < 1e-5
        assert np.array_equal(seen[1], results[0][1]) and np.abs(seen[2] - seen[1]).max() < 1e-6
        assert np.array_equal(seen[3], results[0][3])


def test_a_hand_over_starts_from_equal_replicas() -> None:
    def rank_main(team: Team) -> np.ndarray:
        run = Run(team, Warmup(4, LowPrecisionDecentralized(overlap=True), "gradient_allreduce"))
        run.train(6)
        return run.x()

    results = run_teams(2, rank_main)
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("nodes", [[0, 0, 1]])
def test_hierarchical(nodes: list[int]) -> None:
    """Among nodes the ring; when all is taken over, a node's ranks are equal."""

    def rank_main(team: Team) -> np.ndarray:
        run = Run(team, LowPrecisionDecentralized(hierarchical=True, overlap=True))
        run.train(6)
        bagua.detach(run.model)
        return run.x()

    first, second, third = run_teams(3, rank_main, nodes=nodes)
    assert np.abs(first - second).max() < 1e-6 < np.abs(first - third).max()


def test_bad_option() -> None:
    with pytest.raises(ValueError, match="overlap.*1"):
        LowPrecisionDecentralized(overlap=1)  # type: ignore[arg-type]
