"""Ranks that take turns: the same numbers as on real groups, the same every time, and no endless waits."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

import bagua
import bagua.engine.failures
from bagua.comm.collectives import all_reduce_
from bagua.comm.team import Team
from bagua.exchanges import Exchange
from bagua.simulation.ranks import run_in_turns
from bagua.simulation.turns import Deadlock
from tests.algorithms.quadratic import Quadratic, flat, follow, target
from tests.rank_threads import run_teams


def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    return module(torch.tensor(target(rank, step), dtype=torch.float32))


def run(algorithm, ranks: int = 4, steps: int = 12, **options) -> bagua.Simulation:
    return bagua.simulate(
        algorithm,
        ranks=ranks,
        model=Quadratic,
        loss=loss,
        steps=steps,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        **options,
    )


ALGORITHMS = [
    name
    for name, *_ in bagua.algorithms.available(builtin_only=True)
    if name in ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "local_sgd")
]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_same_numbers_as_on_gloo(name: str, ranks: int) -> None:
    simulated = run(name, ranks)
    for rank, (seen, stats) in enumerate(run_teams(ranks, follow, name, 12)):
        ours = flat(simulated.models[rank]).detach().double().numpy()
        # gloo's ring adds in another order.
        assert np.abs(ours - seen[-1]).max() < (1e-5 if name != "bytegrad" else 0.02)
        in_flight = name == "low_precision_decentralized" and simulated.stats[rank].total.bytes_sent // 12
        assert 0 <= simulated.stats[rank].total.bytes_sent - stats.total.bytes_sent <= in_flight


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_same_every_time(name: str) -> None:
    first, second = run(name), run(name)
    assert torch.equal(first.losses, second.losses) and torch.equal(first.consensus, second.consensus)
    assert all(torch.equal(flat(a), flat(b)) for a, b in zip(first.models, second.models, strict=True))
    assert first.losses.shape == (12, 4) and first.losses[-1].mean() < first.losses[0].mean()


def test_consensus_tells_the_families_apart() -> None:
    assert run("gradient_allreduce").consensus.max() == 0
    local = run("local_sgd", communication_interval=4).consensus
    assert local[3] == local[7] == 0
    assert local[:3].min() > 0
    assert run("decentralized", peer_selection_mode="shift_one").consensus.min() > 0


def test_nodes() -> None:
    hierarchical = run("low_precision_decentralized", nodes=[0, 0, 1, 1], hierarchical=True)
    assert torch.equal(flat(hierarchical.models[0]), flat(hierarchical.models[1]))
    assert not torch.equal(flat(hierarchical.models[0]), flat(hierarchical.models[2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_smallest_and_largest(dtype: torch.dtype) -> None:
    given = torch.tensor([[3, -1, 2], [0, 5, 2], [1, -4, 2]], dtype=dtype)

    def reduced(team: Team) -> tuple[torch.Tensor, torch.Tensor]:
        group = team.open(team.next_lane()).world
        own = given[team.rank]
        return all_reduce_(group, own.clone(), "min"), all_reduce_(group, own.clone(), "max")

    for least, most in run_in_turns(3, reduced):
        assert torch.equal(least, given.amin(0)) and torch.equal(most, given.amax(0))


def test_ranks_skip_the_same_steps_with_a_scaler() -> None:
    """One rank's gradient overflows in step 1; without an agreement the others would step."""

    def train(team: Team) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, "local_sgd", process_group=team, communication_interval=10)
        scaler, seen = bagua.GradScaler("cpu", init_scale=4.0), []
        for step in range(3):
            optimizer.zero_grad()
            factor = torch.inf if (team.rank, step) == (1, 1) else 1.0
            scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(round(model.weight[0, 0].item(), 4))
        bagua.detach(model)
        return [*seen, scaler.get_scale()]

    assert run_in_turns(3, train) == [[0.9, 0.9, 0.8, 2.0]] * 3


class Never(Exchange):
    """Rank 0 waits for a message that nobody sends."""

    def run(self, x_N, state, groups, step) -> None:
        if groups.rank == 0:
            groups.world.pg.recv([torch.zeros(1)], 1, 0).wait()

    def bytes_per_rank(self, n: int, size: int) -> float:
        return 0


class Waits(bagua.algorithms.GradientAllReduce):
    """Uses `Never`."""

    exchange = Never()


@pytest.fixture
def short_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that failed wait less for the others to fail too."""
    monkeypatch.setattr(bagua.engine.failures, "_SIGN_OF_LIFE_S", 0.05)


@pytest.mark.usefixtures("short_sign_of_life")
def test_a_deadlock_is_an_error() -> None:
    before = threading.active_count()
    with pytest.raises(bagua.CommunicationError, match="a message from rank 1") as error:
        run(Waits())
    assert isinstance(error.value.__cause__, Deadlock)
    assert threading.active_count() == before


@pytest.mark.usefixtures("short_sign_of_life")
def test_an_exception_of_one_rank_ends_all() -> None:
    def explode(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        if (rank, step) == (2, 3):
            raise ZeroDivisionError("deliberate")
        return loss(module, rank, step)

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="deliberate"):
        bagua.simulate("bytegrad", ranks=4, model=Quadratic, loss=explode, steps=5)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [({"ranks": 0}, "ranks.*0"), ({"steps": 1.5}, "steps.*1.5"), ({"nodes": [0]}, "nodes.*1 entries for 4")],
)
def test_bad_arguments(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run("bytegrad", **options)
    with pytest.raises(ValueError, match="unknown"):
        run("nothing")
