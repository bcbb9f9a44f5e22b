"""`mean_moments` where averages arrive late: a numpy oracle, and moments that are exactly those of mean gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import AsyncModelAverage, delayed_moments, round_moments
from bagua.comm.team import Team
from benchmarks.convergence.delayed import DelayedAverage
from tests.algorithms.quadratic import Quadratic, follow, start, targets
from tests.algorithms.test_round_moments import B1, B2, DECAY, EPS, LR, STEPS, TOLERANCE, adamw, second_moment
from tests.rank_threads import run_teams

CASES = [(1, 1), (1, 2), (2, 2), (2, 3), (1, 4), (3, 4)]


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas hold for any round."""
    monkeypatch.setattr(delayed_moments, "_LONGEST", 9)
    monkeypatch.setattr(delayed_moments, "_LATEST", 9)


def oracle(size: int, delay: int, every: int, inferred: bool = True) -> np.ndarray:
    """Weights after each step, [STEPS, size, N]. The rank's own average gradient is made of its gradients."""
    x = np.tile(start(), (size, 1))
    m, v, seen = np.zeros_like(x), np.zeros_like(x), []
    since, rates = [], []  # the snapshot: gradients, and l of each step
    v_0, correction, closed = v.copy(), np.zeros_like(x), None
    lag, waits = 0.0, False
    for step in range(STEPS):
        g = x - targets(size, step)
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        rate, divisor = LR / (1 - B1 ** (step + 1)), np.sqrt(v / (1 - B2 ** (step + 1))) + EPS
        x = x * (1 - LR * DECAY) - rate * m / divisor
        since, rates = [*since, g], [*rates, rate]
        if waits:
            lag += rate * B1 ** len(since)
        if closed is not None and step >= delay and (step - delay) % every == 0:
            snapshot, v_s, divisor_s, gradients, moved, lag_of_it = closed
            mean, steps, late = snapshot.mean(0), len(gradients), len(since)
            if inferred:
                weights = np.array([1 - B1 ** (steps - j) for j in range(steps)])
                own = np.einsum("k,krn->rn", weights / weights.sum(), np.stack(gradients))
                apart = (divisor_s * (snapshot - mean) - lag_of_it * correction) / moved
                spread = (weights**2).sum() / weights.sum() ** 2
                mix = (1 - spread) / (size - spread)
                added = (v_s - B2**steps * v_0) / (1 - B2**steps)
                v_0 = B2**steps * v_0 + (1 - B2**steps) * ((1 - mix) * (own + apart) ** 2 + mix * added)
                correction = (1 - B1**steps) * apart
                m, v = m + B1**late * correction, v + B2**late * (v_0 - v_s)
            x, waits = x + mean - snapshot, False
        if step % every == 0:
            moved = sum(each * (1 - B1 ** (j + 1)) for j, each in enumerate(rates))
            closed = x.copy(), v.copy(), np.sqrt(v / (1 - B2 ** (step + 1))) + EPS, since, moved, lag
            since, rates, lag, waits = [], [], 0.0, True
        seen.append(x)
    return np.stack(seen)


def delayed(delay: int, every: int, means: bool = True) -> DelayedAverage:
    return DelayedAverage(delay, every, mean_moments=means)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize(("delay", "every"), CASES)
def test_is_the_oracles(size: int, delay: int, every: int) -> None:
    want = oracle(size, delay, every)
    results = run_teams(size, partial(follow, bucket_bytes=8), delayed(delay, every), STEPS, adamw)
    assert max(np.abs(result[0] - want[:, rank]).max() for rank, result in enumerate(results)) < TOLERANCE
    assert np.abs(want - oracle(size, delay, every, inferred=False)).max() > 50 * TOLERANCE


@pytest.mark.parametrize(("delay", "every", "longest"), [(2, 2, 2), (2, 3, 2), (1, 2, 0)])
def test_after_long_rounds_or_late_means_nothing_is_inferred(
    delay: int, every: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delayed_moments, "_LONGEST", longest)
    for ours, plain in zip(*(run_teams(3, masked, delayed(delay, every, on)) for on in (True, False)), strict=True):
        assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_large_parameters_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_moments, "_BLOCK", 8)
    want = oracle(3, 1, 2)
    for rank, result in enumerate(run_teams(3, follow, delayed(1, 2), STEPS, adamw)):
        assert np.abs(result[0] - want[:, rank]).max() < TOLERANCE


class Line(nn.Module):
    """Its gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(7))

    def forward(self, g: torch.Tensor) -> torch.Tensor:
        return self.w @ g


def constant(team: Team, algorithm: Any) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Both moments after each step, and its number, where each rank's gradient is always the same.

    A large epsilon makes D the same on all ranks.
    """
    model, found = Line(), []
    own = torch.optim.Adam(model.parameters(), lr=1.0, betas=(B1, B2), eps=1e6)
    bagua.distribute(model, own, algorithm, process_group=team)
    for step in range(15):
        own.zero_grad()
        model(gradient(team.rank)).backward()
        own.step()
        state = own.state[model.w]
        found.append((state["exp_avg"].double().numpy().copy(), state["exp_avg_sq"].double().numpy().copy(), step))
    bagua.detach(model)
    return found


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(rank)) + 1.0


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize(("delay", "every"), CASES)
def test_the_momentum_is_that_of_the_mean_gradient_up_to_the_last_snapshot(delay: int, every: int) -> None:
    """Exactly, whatever the delay: what the formulas leave out is zero here. Since then it is the rank's own."""
    size = 3
    mean = torch.stack([gradient(rank) for rank in range(size)]).mean(0).double().numpy()
    for rank, found in enumerate(run_teams(size, constant, delayed(delay, every))):
        g = gradient(rank).double().numpy()
        for m, _, step in found:
            arrived = (step - delay) // every * every  # of the last snapshot whose mean is there
            t = step - arrived if arrived >= 0 else step + 1
            want = (B1**t - B1 ** (step + 1)) * mean + (1 - B1**t) * g
            assert np.abs(m - want).max() < 2e-3 * np.abs(g - mean).max(), (step, t)


def test_second_moments_are_those_of_mean_gradients() -> None:
    exact = np.mean(run_teams(4, second_moment, "gradient_allreduce"))
    assert abs(np.mean(run_teams(4, second_moment, delayed(1, 2))) / exact - 1) < 0.15
    assert np.mean(run_teams(4, second_moment, delayed(1, 2, False))) / exact > 1.4


def masked(team: Team, algorithm: Any) -> dict[str, torch.Tensor]:
    """Second moments after 12 steps, by name. Something else changes one parameter in each step."""
    model = Quadratic()
    own = adamw(model.parameters())
    bagua.distribute(model, own, algorithm, process_group=team)
    for step in range(12):
        own.zero_grad()
        model(torch.tensor(targets(3, step)[team.rank], dtype=torch.float32)).backward()
        model.w.data.mul_(0.99)
        own.step()
    bagua.detach(model)
    return {name: own.state[param]["exp_avg_sq"] for name, param in model.named_parameters()}


def test_a_parameter_that_something_else_changes_keeps_its_own_moments() -> None:
    for ours, plain in zip(*(run_teams(3, masked, delayed(1, 2, each)) for each in (True, False)), strict=True):
        assert torch.equal(ours["w"], plain["w"]) and not torch.equal(ours["b"], plain["b"])


def test_it_contradicts_the_estimate() -> None:
    with pytest.raises(ValueError, match="mean_moments and scale_second_moment contradict"):
        AsyncModelAverage(mean_moments=True, scale_second_moment=True)
    assert repr(AsyncModelAverage()) == repr(AsyncModelAverage(mean_moments=None)) and "mean" not in repr(
        AsyncModelAverage()
    )
