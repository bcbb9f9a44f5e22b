"""Asynchronous model averaging with Adam: corrected second moments, and how often rounds begin by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import bagua
from bagua.algorithms import AsyncModelAverage
from bagua.comm.team import Team
from tests.algorithms.async_run import Drift, Run, events
from tests.algorithms.quadratic import N, flat, start, target
from tests.rank_threads import run_teams

LR, B1, B2, EPS, EVERY, MADE = 0.01, 0.9, 0.97, 1e-8, 8, 27


def adam(params: Any, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(params, **{"lr": LR, "betas": (B1, B2), "eps": EPS, **options})


def oracle(rank: int, size: int, begin: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Where a rank's own gradients take it, and its second moments; mean gradients before step `begin`."""
    x, m, v, old, since = start(), np.zeros(N), np.zeros(N), np.zeros(N), begin
    for k in range(1, MADE + 1):
        g = np.mean([target(r, k - 1) for r in range(size)], 0) if k <= begin else target(rank, k - 1)
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        x = x - LR / (1 - B1**k) * m / (np.sqrt(v / (1 - B2**k)) + EPS)
        if k <= begin:
            old = v.copy()
        elif k % EVERY == 0 and size > 1:
            kept = B2 ** (k - since)
            new = v - kept * old
            v = kept * old + new / size + (1 - 1 / size) * np.minimum((1 - kept) * m**2, new)
            old, since = v.copy(), k
    return x, v


@pytest.mark.parametrize(("size", "begin"), [(1, 0), (2, 0), (3, 5)])
def test_second_moments_are_the_oracles_and_rounds_keep_the_mean(size: int, begin: int) -> None:
    """Whatever rounds there are: these gradients do not depend on the weights."""

    def rank_main(team: Team) -> tuple[np.ndarray, np.ndarray]:
        model = Drift()
        optimizer = adam(model.parameters())
        algorithm = AsyncModelAverage(warmup_steps=begin, scale_second_moment=True, codec="identity")
        bagua.distribute(model, optimizer, algorithm, process_group=team)
        for step in range(MADE):
            optimizer.zero_grad()
            model(torch.tensor(target(team.rank, step), dtype=torch.float32)).backward()
            optimizer.step()
        bagua.pause(model)
        seconds = torch.cat([optimizer.state[p]["exp_avg_sq"].reshape(-1) for p in (model.b, model.w)])
        x = flat(model).detach().double().numpy().copy()
        bagua.detach(model)
        return x, seconds.double().numpy()

    results = run_teams(size, rank_main)
    wanted = [oracle(rank, size, begin) for rank in range(size)]
    for (_, seconds), (_, want) in zip(results, wanted, strict=True):
        assert np.abs(seconds / want - 1).max() < 1e-4
    assert np.abs(np.mean([x for x, _ in results], 0) - np.mean([x for x, _ in wanted], 0)).max() < 2e-5


def test_rounds_follow_one_another_by_default_and_after_a_load() -> None:
    """Also after weights of an earlier step were loaded."""
    last = events(2)

    def rank_main(team: Team) -> int:
        run = Run(team, algorithm=AsyncModelAverage())
        saved = run.model.state_dict(), run.optimizer.state_dict(), bagua.state_dict(run.model)
        run.train_rounds(4)
        bagua.pause(run.model)
        bagua.resume(run.model)
        for load, state in zip((run.model.load_state_dict, run.optimizer.load_state_dict), saved, strict=False):
            load(state)
        bagua.load_state_dict(run.model, saved[2])
        run.train_rounds(2, last)
        return run.rounds

    assert min(run_teams(2, rank_main)) >= 6


@pytest.mark.parametrize(("make", "word"), [(torch.optim.SGD, "SGD"), (lambda p: adam(p, amsgrad=True), "amsgrad")])
def test_optimizers_without_what_is_corrected_are_refused(make: Any, word: str) -> None:
    def refused(team: Team) -> str:
        model = Drift()
        with pytest.raises(ValueError) as error:
            bagua.distribute(model, make(model.parameters()), "async", process_group=team, scale_second_moment=True)
        return str(error.value)

    assert all("scale_second_moment" in each and word in each for each in run_teams(2, refused))
