"""Up to which learning rate gossip is stable on a convex quadratic: numbers of docs/algorithms/decentralized.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bagua.algorithms import Decentralized, GradientAllReduce, LowPrecisionDecentralized
from tests.algorithms.quadratic import simulated

ALL, RING, QUANTISED = Decentralized(), Decentralized(topology="ring"), LowPrecisionDecentralized()


def largest(size: int, algorithm: Any, lr: float, steps: int, momentum: float = 0.0) -> float:
    """Weight at the end. The curvature is 1."""
    results = simulated(size, algorithm, steps, lambda params: torch.optim.SGD(params, lr=lr, momentum=momentum))
    return max(float(np.abs(seen[-1]).max()) for seen, _ in results)


@pytest.mark.parametrize(
    ("size", "algorithm", "limit", "interval"),
    [
        (4, GradientAllReduce(), 2.0, 1),
        (4, ALL, 1.0, 1),
        (4, Decentralized(peer_selection_mode="shift_one"), 1.0, 1),
        (4, Decentralized(topology="exponential"), 1.18, 1),
        (2, RING, 1.0, 1),
        (4, RING, 2 / 3, 1),
        (5, RING, 0.79, 1),
        (2, QUANTISED, 1.0, 1),
        (2, LowPrecisionDecentralized(communication_interval=2), 2.0, 2),
        (4, QUANTISED, 2 / 3, 1),
        (4, LowPrecisionDecentralized(overlap=True), 3 / 4, 1),
        (4, LowPrecisionDecentralized(communication_interval=2), 0.42, 2),
        (4, LowPrecisionDecentralized(communication_interval=4), 0.24, 4),
    ],
)
def test_the_largest_stable_learning_rate(size: int, algorithm: Any, limit: float, interval: int) -> None:
    assert largest(size, algorithm, 0.93 * limit, 120 * interval) < 20
    assert not largest(size, algorithm, 1.07 * limit, 120 * interval) < 20


@pytest.mark.parametrize(("algorithm", "limit"), [(GradientAllReduce(), 2.0), (ALL, 1.0), (RING, 2 / 3)])
def test_momentum_raises_all_limits_alike(algorithm: Any, limit: float) -> None:
    assert largest(4, algorithm, 0.93 * 1.9 * limit, 200, 0.9) < 200
    assert not largest(4, algorithm, 1.07 * 1.9 * limit, 200, 0.9) < 200
