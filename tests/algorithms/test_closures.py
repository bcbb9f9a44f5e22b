"""`optimizer.step(closure)` trains as a loop without closures does, whatever is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bagua
from bagua.algorithms import AsyncModelAverage, Decentralized, Warmup
from bagua.comm.team import Team
from tests.algorithms.quadratic import N, Quadratic, flat, start, target, targets
from tests.rank_threads import run_teams

STEPS, LR = 9, 0.1
ALGORITHMS = [
    "gradient_allreduce",
    "bytegrad",
    Decentralized(),
    Decentralized(peer_selection_mode="shift_one", communication_interval=2),
    "low_precision_decentralized",
    bagua.algorithms.LowPrecisionDecentralized(overlap=True),
    bagua.algorithms.LocalSGD(communication_interval=2),
    bagua.algorithms.DiLoCo(communication_interval=2),
    Warmup(3, "gradient_allreduce", "decentralized"),
    Warmup(3, "decentralized", "gradient_allreduce"),
    Warmup(3, "local_sgd", "decentralized"),
]


def loss_of(model: Quadratic, rank: int, step: int) -> Tensor:
    return model(torch.tensor(target(rank, step), dtype=torch.float32))


def train(team: Team, algorithm: Any, closures: bool, pieces: int = 1, every: int = 1, fused: int = 0) -> np.ndarray:
    """Weights after each step; with two optimizers the second one steps `every` so often."""
    model = Quadratic()
    groups = [[model.w, model.b]] if pieces == 1 else [[model.w], [model.b]]
    optimizers = [torch.optim.SGD(group, lr=LR, momentum=0.5) for group in groups]
    bagua.distribute(model, optimizers, algorithm, process_group=team)
    if fused:
        optimizers = [bagua.optim.fuse(optimizer) for optimizer in optimizers]
    seen = []
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(model, team.rank, step)
            loss.backward()
            return loss

        if not closures:
            closure()
        first, *rest = optimizers
        first.step(closure) if closures else first.step()
        for optimizer in rest:
            if step % every == 0:
                optimizer.step()
        seen.append(flat(model).detach().double().numpy().copy())
    assert bagua.stats(model).steps >= STEPS - 1, "the end of the last step may be noticed at the next forward pass"
    bagua.detach(model)
    return np.stack(seen)


def both(team: Team, algorithm: Any, *options: int) -> tuple[np.ndarray, np.ndarray]:
    return train(team, algorithm, False, *options), train(team, algorithm, True, *options)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_a_closure_changes_nothing(algorithm: Any) -> None:
    for plain, closed in run_teams(3, both, algorithm):
        assert np.array_equal(plain, closed)
        assert np.abs(plain[-1] - start()).max() > 0.1


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized", "local_sgd"])
def test_with_two_optimizers(algorithm: str, every: int) -> None:
    for plain, closed in run_teams(2, both, algorithm, 2, every):
        assert np.array_equal(plain, closed)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized"])
def test_with_a_fused_optimizer(algorithm: str) -> None:
    for plain, closed in run_teams(2, both, algorithm, 1, 1, 1):
        assert np.array_equal(plain, closed)


def test_async_keeps_the_optimizers_steps() -> None:
    """Averages in full precision never move the mean of the ranks, which is known if gradients ignore the weights."""

    def rank_main(team: Team) -> np.ndarray:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.distribute(model, optimizer, AsyncModelAverage(codec="identity"), process_group=team)
        for step in range(30):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = model(torch.zeros(N)) * 0 - (flat(model) * torch.tensor(target(team.rank, step))).sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        bagua.pause(model)
        found = flat(model).detach().double().numpy()
        bagua.detach(model)
        return found

    x = start() + LR * sum(targets(2, step).mean(0) for step in range(30))
    assert np.abs(np.mean(run_teams(2, rank_main), 0) - x).max() < 1e-5


def search(team: Team, algorithm: Any, line_search: str | None) -> tuple[np.ndarray, list[int], int]:
    """Weights before and after each step of LBFGS, and how often the closure was evaluated."""
    model = Quadratic()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    seen, counts = [], []
    for step in range(5):
        count = 0

        def closure(step: int = step) -> Tensor:
            nonlocal count
            count += 1
            optimizer.zero_grad()
            loss = loss_of(model, team.rank, step) * (1 + team.rank)
            loss.backward()
            return loss

        optimizer.step(closure)
        counts.append(count)
        seen.append(flat(model).detach().double().numpy().copy())
    steps = bagua.stats(model).steps
    bagua.detach(model)
    return np.stack(seen), counts, steps


def alone(size: int, line_search: str | None, mix: Callable[[list[Any], int], None], joint: bool) -> np.ndarray:
    """The same in one place: `mix` changes the ranks' weights before each step, or they share all losses."""
    models: list[Any] = [Quadratic() for _ in range(size)]
    made = [torch.optim.LBFGS(m.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search) for m in models]
    seen = []
    for step in range(5):
        mix(models, step)
        for rank, (model, optimizer) in enumerate(zip(models, made, strict=True)):

            def closure(model: Any = model, rank: int = rank, optimizer: Any = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                ranks = range(size) if joint else [rank]
                loss = sum((loss_of(model, each, step) * (1 + each) for each in ranks), torch.zeros(())) / len(ranks)
                loss.backward()
                return loss

            optimizer.step(closure)
        seen.append([flat(model).detach().double().numpy().copy() for model in models])
    return np.stack(seen, 1)


@torch.no_grad()
def mean_of(models: list[Any], _step: int) -> None:
    for params in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack([param.detach() for param in params]).mean(0)
        for param in params:
            param.copy_(mean)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized", "local_sgd"])
def test_lbfgs(algorithm: str, line_search: str | None) -> None:
    """Gradients: as one process with all data. Weights: each rank searches with its own, from averaged ones."""
    size = 2
    options = {"communication_interval": 100} if algorithm == "local_sgd" else {}
    results = run_teams(size, search, bagua.algorithms.get(algorithm, **options), line_search)
    mix = mean_of if algorithm == "decentralized" else lambda models, step: None
    want = alone(size, line_search, mix, joint=algorithm == "gradient_allreduce")
    for rank, (seen, counts, steps) in enumerate(results):
        assert steps == 5 and max(counts) > 1
        assert np.abs(seen - want[rank]).max() < 2e-4, (rank, np.abs(seen - want[rank]).max(1))
        assert algorithm != "gradient_allreduce" or counts == results[0][1]


def warned(team: Team, algorithm: Any, steps: int) -> list[str]:
    """What was remarked on LBFGS in so many steps."""
    model = Quadratic()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    bagua.distribute(model, optimizer, algorithm, process_group=team)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, team.rank, 0)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    notices = bagua.stats(model).notices
    bagua.detach(model)
    return [each for each in notices if each.startswith("LBFGS with ")]


@pytest.mark.parametrize("algorithm", ["local_sgd", "decentralized", Warmup(2, "gradient_allreduce", "local_sgd")])
def test_lbfgs_with_averaged_weights_warns_once(algorithm: Any, caplog: pytest.LogCaptureFixture) -> None:
    for told in run_teams(2, warned, algorithm, 4):
        assert len(told) == 1 and "can diverge; use 'gradient_allreduce'" in told[0]
    logged = [each for each in caplog.records if "LBFGS with" in each.message]
    assert len(logged) == 2 and all(each.levelname == "WARNING" for each in logged), "each rank once"


def test_lbfgs_on_one_rank_or_with_gradients_does_not_warn() -> None:
    assert run_teams(1, warned, "local_sgd", 2) == [[]]
    assert run_teams(2, warned, "gradient_allreduce", 2) == [[], []]


class WithBuffer(Quadratic):
    """A buffer that each forward pass changes, on each rank by something else."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, target: Tensor) -> Tensor:
        self.seen += target[0]
        return super().forward(target)


def search_with_buffers(team: Team, algorithm: str) -> tuple[int, int]:
    """Evaluations and steps."""
    count, model = 0, WithBuffer()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3)
    bagua.distribute(model, optimizer, algorithm, process_group=team, broadcast_buffers=True)
    optimizer.param_groups[0]["max_iter"] = 1 + 3 * team.rank
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            nonlocal count
            count += 1
            optimizer.zero_grad()
            loss = loss_of(model, team.rank, step)
            loss.backward()
            return loss

        optimizer.step(closure)
    steps = bagua.stats(model).steps
    bagua.detach(model)
    return count, steps


def test_ranks_that_search_for_differently_long_share_buffers_once_a_step() -> None:
    (few, steps), (many, others) = run_teams(2, search_with_buffers, "local_sgd")
    assert few < many and steps == others == 3


def interrupted(team: Team, algorithm: str) -> np.ndarray:
    """A closure that raises leaves the next step what it would have been."""
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, team.rank, step)
            loss.backward()
            return loss

        def failing() -> Tensor:
            raise KeyError("no batch")

        if step == 2:
            with pytest.raises(KeyError):
                optimizer.step(failing)
        optimizer.step(closure)
    assert bagua.stats(model).steps == 4
    found = flat(model).detach().double().numpy()
    bagua.detach(model)
    return found


@pytest.mark.parametrize("algorithm", ["decentralized", "gradient_allreduce"])
def test_after_a_closure_that_raised(algorithm: str) -> None:
    x = np.tile(start(), (2, 1))
    for step in range(4):
        gradient = x - targets(2, step)
        own = algorithm == "decentralized"
        x = x.mean(0, keepdims=True) - LR * (gradient if own else gradient.mean(0, keepdims=True))
    for rank, found in enumerate(run_teams(2, interrupted, algorithm)):
        assert np.abs(found - np.broadcast_to(x, (2, N))[rank]).max() < 1e-5
