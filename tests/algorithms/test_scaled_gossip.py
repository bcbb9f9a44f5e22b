"""`scale_second_moment` of gossip: a numpy oracle."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import bagua
from bagua import topologies
from bagua.algorithms import Decentralized, LowPrecisionDecentralized
from bagua.comm.team import Team
from tests.algorithms.momentum import Plain, interrupted
from tests.algorithms.quadratic import N, Quadratic, follow, start, targets
from tests.rank_threads import run_teams

STEPS, LR, B1, B2, EPS, EVERY = 27, 0.05, 0.9, 0.97, 1e-8, 8
TOLERANCE = 2e-4
DURING = [Decentralized(topology=each, scale_second_moment=True) for each in ("ring", "exponential", "complete")]
AFTER = LowPrecisionDecentralized(codec=Plain(), scale_second_moment=True)


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LR, betas=(B1, B2), eps=EPS, weight_decay=0.1)


def oracle(size: int, topology: str, after: bool, scaled: bool = True) -> np.ndarray:
    """Weights after each step, [STEPS, size, N]. `after`: replicas of before the step pull each other."""
    x = np.tile(start(), (size, 1))
    m, v, old, seen = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x), []
    for k in range(1, STEPS + 1):
        w = np.array(topologies.get(topology).matrix(size, k - 1))
        gradients = x - targets(size, k - 1)
        m, v = B1 * m + (1 - B1) * gradients, B2 * v + (1 - B2) * gradients**2
        mixed = w @ x
        pull = mixed - x if after else 0.0
        x = (x if after else mixed) * (1 - 0.1 * LR) - LR / (1 - B1**k) * m / (np.sqrt(v / (1 - B2**k)) + EPS) + pull
        if scaled and k % EVERY == 0:
            kept = B2**EVERY
            new = v - kept * old
            v = kept * old + new / size + (1 - 1 / size) * np.minimum((1 - kept) * m**2, new)
            old = v.copy()
        seen.append(x)
    return np.stack(seen)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("algorithm", [*DURING, AFTER], ids=["ring", "exponential", "complete", "low_precision"])
def test_is_the_oracles(size: int, algorithm: Any) -> None:
    results = run_teams(size, partial(follow, bucket_bytes=8), algorithm, STEPS, adamw)
    want = partial(oracle, size, algorithm.topology, algorithm is AFTER)
    for rank, result in enumerate(results):
        assert np.abs(result[0] - want()[:, rank]).max() < TOLERANCE
    if size > 1:
        assert np.abs(want() - want(scaled=False)).max() > 100 * TOLERANCE, "the oracle would not notice"


def test_nothing_is_sent_for_it() -> None:
    for algorithm in (Decentralized, LowPrecisionDecentralized):
        off = {"mean_moments": False} if algorithm is Decentralized else {"gradient_interval": 0}
        made = [algorithm(scale_second_moment=True), algorithm(**off)]
        runs = [run_teams(2, follow, each, STEPS, adamw)[0][1] for each in made]
        # The last exchange may be in flight.
        step = made[0].bytes_per_rank(N, 2) if algorithm is LowPrecisionDecentralized else 0
        assert abs(runs[0].total.bytes_sent - runs[1].total.bytes_sent) <= step < runs[1].total.bytes_sent
        sent = {algorithm(scale_second_moment=each).bytes_per_rank(N, 2) for each in (True, False, None)}
        assert len(sent) == 1


@pytest.mark.parametrize("algorithm", [DURING[0], AFTER], ids=["ring", "low_precision"])
def test_resume_is_bit_identical(algorithm: Any) -> None:
    """Between two corrections, and right after one. Weights differ by rank, so each loads its own."""
    for whole, resumed in run_teams(2, interrupted, adamw, algorithm, [6, 12, 16], 20):
        for stop, other in resumed.items():
            assert torch.equal(whole, other), stop


@pytest.mark.parametrize("name", ["decentralized", "low_precision_decentralized"])
def test_bad_options(name: str) -> None:
    with pytest.raises(ValueError, match="scale_second_moment.*expected a bool or None, got 1"):
        bagua.algorithms.get(name, scale_second_moment=1)

    def refused(team: Team) -> str:
        model = Quadratic()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError) as error:
            bagua.distribute(model, sgd, name, process_group=team, scale_second_moment=True)
        return str(error.value)

    assert all("scale_second_moment" in each and "SGD" in each for each in run_teams(2, refused))


def test_both_corrections_are_refused() -> None:
    with pytest.raises(ValueError, match="mean_moments and scale_second_moment"):
        Decentralized(mean_moments=True, scale_second_moment=True)
