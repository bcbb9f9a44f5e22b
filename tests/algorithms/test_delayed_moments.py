"""`mean_moments` where averages arrive late: a numpy oracle, and moments that are exactly those of mean gradients."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import AsyncModelAverage, delayed_moments, round_moments
from bagua.algorithms.async_model_average import _Rounds
from bagua.algorithms.mean_moments import Slot
from bagua.codecs import native
from bagua.comm.team import Team
from bagua.engine.hooks import attachments
from benchmarks.convergence.delayed import DelayedAverage
from tests.algorithms.quadratic import Quadratic, follow, start, targets
from tests.algorithms.test_round_moments import B1, B2, DECAY, EPS, LR, STEPS, TOLERANCE, adamw, second_moment
from tests.rank_threads import run_teams


def oracle(size: int, inferred: bool = True) -> np.ndarray:
    """Weights after each step, [STEPS, size, N]. There is a snapshot after each, whose mean comes a step later."""
    x = np.tile(start(), (size, 1))
    m, v, seen = np.zeros_like(x), np.zeros_like(x), []
    snapshot, g_s, moved = x, np.zeros_like(x), 0.0
    for step in range(STEPS):
        g = x - targets(size, step)
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        rate, divisor = LR / (1 - B1 ** (step + 1)), np.sqrt(v / (1 - B2 ** (step + 1))) + EPS
        x = x * (1 - LR * DECAY) - rate * m / divisor
        if step:
            mean = snapshot.mean(0)
            x = x + mean - snapshot
            if inferred:
                all_g = g_s + divisor * (snapshot - mean) / moved
                lacks = (1 - B1) * (all_g - g_s)
                m, v = m + B1 * lacks, v + B2 * (1 - B2) * (all_g**2 - g_s**2)
                x = x - rate * B1 * lacks / divisor  # what the weights have moved without it
        snapshot, g_s, moved = x, g, rate * (1 - B1)
        seen.append(x)
    return np.stack(seen)


def delayed(delay: int, every: int, means: bool = True) -> DelayedAverage:
    return DelayedAverage(delay, every, mean_moments=means)


@pytest.mark.parametrize("size", [2, 3])
def test_is_the_oracles(size: int) -> None:
    want = oracle(size)
    results = run_teams(size, partial(follow, bucket_bytes=8), delayed(1, 1), STEPS, adamw)
    assert max(np.abs(result[0] - want[:, rank]).max() for rank, result in enumerate(results)) < TOLERANCE
    assert np.abs(want - oracle(size, inferred=False)).max() > 50 * TOLERANCE


@pytest.mark.parametrize(("delay", "every"), [(1, 4), (4, 4), (4, 5)])
def test_from_rounds_of_many_steps_nothing_is_inferred(delay: int, every: int) -> None:
    """But from the first one, which has one step, if its mean does not come after many more."""
    for counts in run_teams(3, corrected_rounds, delayed(delay, every)):
        assert counts == [2 if delay == 1 else 0]


def test_large_parameters_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_moments, "_BLOCK", 8)
    want = oracle(3)
    for rank, result in enumerate(run_teams(3, follow, delayed(1, 1), STEPS, adamw)):
        assert np.abs(result[0] - want[:, rank]).max() < TOLERANCE


class Line(nn.Module):
    """Its gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(7))

    def forward(self, g: torch.Tensor) -> torch.Tensor:
        return self.w @ g


class Seen(NamedTuple):
    """Both moments and the weights after a step, and its number."""

    m: np.ndarray
    v: np.ndarray
    step: int
    w: np.ndarray


def constant(team: Team, algorithm: Any, every: int = 1) -> list[Seen]:
    """What is seen after each step, where each rank's gradient is always the same.

    A large epsilon makes D the same on all ranks.

    Args:
        every: there is a gradient in one of so many steps.
    """
    model, found = Line(), []
    own = torch.optim.Adam(model.parameters(), lr=1.0, betas=(B1, B2), eps=1e6)
    bagua.distribute(model, own, algorithm, process_group=team)
    for step in range(15):
        own.zero_grad()
        model(gradient(team.rank)).backward()
        if step % every:
            model.w.grad = None
        own.step()
        state = own.state[model.w]
        m, v, w = (each.detach().double().numpy() for each in (state["exp_avg"], state["exp_avg_sq"], model.w))
        found.append(Seen(m, v, step, w))
    bagua.detach(model)
    return found


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(rank)) + 1.0


def test_the_momentum_is_that_of_the_mean_gradient_up_to_the_last_snapshot() -> None:
    """Exactly: what the formulas leave out is zero here. Since then it is the rank's own."""
    size = 3
    mean = torch.stack([gradient(rank) for rank in range(size)]).mean(0).double().numpy()
    for rank, found in enumerate(run_teams(size, constant, delayed(1, 1))):
        g = gradient(rank).double().numpy()
        for m, _, step, _ in found:
            want = (B1 - B1 ** (step + 1)) * mean + (1 - B1) * g
            assert np.abs(m - want).max() < 2e-3 * np.abs(g - mean).max(), step


def test_weights_are_where_the_mean_gradient_leads() -> None:
    """When a mean has come, only the rank's own last step is left of what sets the ranks apart."""
    size, apart = 3, []
    for means in (True, False):
        found = [found[-1].w[0] for found in run_teams(size, constant, delayed(1, 1, means))]
        apart.append(max(found) - min(found))
    grads = [gradient(rank)[0].item() for rank in range(size)]
    # Without a correction the momentum holds nearly all of the rank's own gradient.
    assert apart[0] == pytest.approx((1 - B1) / (1 - B1**15) * (max(grads) - min(grads)) / 1e6, rel=0.05)
    assert apart[1] > 5 * apart[0]


def test_a_parameter_that_rests_while_the_mean_comes_has_exactly_the_moments_of_mean_gradients() -> None:
    """It makes a step every other time, before a snapshot."""
    size = 3
    mean = torch.stack([gradient(rank) for rank in range(size)]).mean(0).double().numpy()
    for found in run_teams(size, partial(constant, every=2), delayed(1, 2)):
        for m, v, step, _ in found[1::2]:
            made = step // 2 + 1
            assert np.allclose(m, (1 - B1**made) * mean, rtol=2e-3)
            assert np.allclose(v, (1 - B2**made) * mean**2, rtol=5e-3)


def test_second_moments_are_those_of_mean_gradients() -> None:
    exact = np.mean(run_teams(4, second_moment, "gradient_allreduce"))
    assert abs(np.mean(run_teams(4, second_moment, delayed(1, 1))) / exact - 1) < 0.15
    assert np.mean(run_teams(4, second_moment, delayed(1, 1, False))) / exact > 1.4


def corrected_rounds(team: Team, algorithm: Any) -> list[int]:
    """How often the moments of a parameter were changed between the optimizer's steps."""
    model, changed = Quadratic(), 0
    own = adamw(model.parameters())
    bagua.distribute(model, own, algorithm, process_group=team)
    for step in range(12):
        own.zero_grad()
        model(torch.tensor(targets(3, step)[team.rank], dtype=torch.float32)).backward()
        held = [(own.state[each].get("exp_avg", torch.zeros(())).clone(), each) for each in model.parameters()]
        own.step()
        for before, each in held:
            beta, g, now = own.param_groups[0]["betas"][0], each.grad, own.state[each]["exp_avg"]
            assert g is not None
            changed += not torch.allclose(now, beta * before + (1 - beta) * g, atol=1e-6)
    bagua.detach(model)
    return [changed]


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
    for ours, plain in zip(*(run_teams(3, masked, delayed(1, 1, each)) for each in (True, False)), strict=True):
        assert torch.equal(ours["w"], plain["w"]) and not torch.equal(ours["b"], plain["b"])


def test_it_contradicts_the_estimate() -> None:
    with pytest.raises(ValueError, match="mean_moments and scale_second_moment contradict"):
        AsyncModelAverage(mean_moments=True, scale_second_moment=True)
    assert repr(AsyncModelAverage()) == repr(AsyncModelAverage(mean_moments=None)) and "mean" not in repr(
        AsyncModelAverage()
    )


def test_a_rank_that_made_more_steps_has_moved_further() -> None:
    """Rank 1 is ahead by two steps when rank 0 begins the second round, so it makes three steps in the third one."""
    size, barrier = 2, threading.Barrier(2, timeout=30)
    g = [gradient(rank).double().numpy() for rank in range(size)]

    def rank_main(team: Team) -> tuple[np.ndarray, float]:
        model = Line()
        own = torch.optim.Adam(model.parameters(), lr=1.0, betas=(B1, B2), eps=1e6)
        zeros = [torch.zeros(7), torch.zeros(7)]  # of a training in which corrections of the bias are over
        own.state[model.w] = dict(zip(("step", "exp_avg", "exp_avg_sq"), (torch.tensor(1e3), *zeros), strict=True))
        bagua.distribute(model, own, AsyncModelAverage(codec="identity"), process_group=team)

        def train(steps: int) -> None:
            for _ in range(steps):
                own.zero_grad()
                model(gradient(team.rank)).backward()
                own.step()

        def meet() -> None:
            barrier.wait()
            pending = attachments[model].engine.context.keep("rounds", _Rounds).pending
            assert pending is not None
            for ticket in pending.tickets:
                ticket.wait()
            barrier.wait()

        train(1)
        meet()
        train(3 if team.rank else 0)
        barrier.wait()
        train(0 if team.rank else 1)
        meet()
        train(1)
        meet()
        train(1)
        found = own.state[model.w]["exp_avg"].double().numpy(), bagua.stats(model).extra["corrected"].mean
        bagua.detach(model)  # it completes another round
        return found

    (m, all_rounds), (_, some_rounds) = run_teams(size, rank_main)
    whole = [1 - B1, sum(1 - B1**k for k in (1, 2, 3))]
    in_third = (whole[0] * g[0] + whole[1] * g[1]) / sum(whole)
    mean = (g[0] + g[1]) / 2
    want = B1**2 * (1 - B1**2) * mean + B1 * (1 - B1) * in_third + (1 - B1) * g[0]
    assert np.abs(m - want).max() < 5e-3 * np.abs(g[0] - g[1]).max()
    assert all_rounds == some_rounds == 1


@pytest.mark.parametrize(
    ("means", "steps"),
    [((1.0, 0.0, 0.0), 1), ((0.0, 1.0, 0.0), 2), *(((0.5, 0.25, 0.25), steps) for steps in (1, 2, 3))],
)
def test_compiled_code_computes_the_same(means: tuple[float, ...], steps: int) -> None:
    """To a few roundings, with weights that are too large and numbers that are not finite."""
    kernels = [each.correct_late for each in native.native_backends()[0].values() if each.correct_late is not None]
    if not kernels:
        pytest.skip("no compiled code")
    slot = Slot({}, {"betas": (B1, B2), "eps": EPS, "lr": LR})
    part, closed = delayed_moments._Part(20, 1, LR, 0.9 * LR), delayed_moments._Closed(0.2 * LR, steps)
    formulas = delayed_moments._Formulas.of(slot, part, closed, means, 4, torch.finfo(torch.float32).eps)
    made = torch.Generator().manual_seed(1)
    tensors = [torch.randn(1003, generator=made) for _ in range(6)]
    tensors[1].square_()
    tensors[1][:7] = 0.0
    tensors[4].mul_(LR)
    tensors[5][10:20] = 1e9
    tensors[4][30] = torch.nan
    want = [each.clone() for each in tensors]
    formulas.apply_torch(want, torch.tensor(True))
    for kernel in kernels:
        got = [each.clone() for each in tensors]
        kernel(got, formulas)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7, equal_nan=True)
        assert all(torch.equal(x[10:20], y[10:20]) for x, y in zip(got, tensors, strict=True)), "too large"


@pytest.mark.parametrize(
    "options", [{"betas": (0.0, 0.9)}, {"eps": 0.0}, {"betas": (0.0, 0.0), "eps": 0.0}, {"lr": 1e-22}]
)
@pytest.mark.parametrize("every", [1, 2])
def test_settings_at_their_limits(options: dict[str, Any], every: int) -> None:
    """Of seven weights one has no gradient on any rank, one on one rank only."""

    def rank_main(team: Team) -> torch.Tensor:
        model = Line()
        own = torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "eps": 1e-8, **options})
        bagua.distribute(model, own, DelayedAverage(1, every, mean_moments=True), process_group=team)
        for step in range(8):
            own.zero_grad()
            g = torch.randn(7, generator=torch.Generator().manual_seed(10 * step + team.rank))
            g[0], g[1] = 0.0, g[1] * (team.rank == 0)
            model(g).backward()
            own.step()
        bagua.detach(model)
        state = own.state[model.w]
        return torch.stack([model.w.detach(), state["exp_avg"], state["exp_avg_sq"]])

    for found in run_teams(3, rank_main):
        if "eps" in options:  # Adam itself divides by zero where there never was a gradient
            found = found[:, 2:]
        assert bool(found.isfinite().all()) and bool((found[2] >= 0).all())
