"""The distance from consensus shrinks at the rate of the mixing matrix, measured in its slowest direction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagua import topologies
from bagua.comm.groups import Groups
from bagua.exchanges import mix
from tests.rank_threads import run_threads

WIDTH = 5


def slowest(topology: str, size: int, periods: int) -> tuple[float, np.ndarray]:
    """Second-largest singular value of the mixing over `periods` periods, and the start vector [size] that has it."""
    chosen = topologies.get(topology)
    whole = np.eye(size)
    for step in range(periods * chosen.period(size)):
        whole = np.array(chosen.matrix(size, step)) @ whole
    _, values, directions = np.linalg.svd(whole - 1 / size)  # the mean's own direction gone, the second is the first
    return float(values[0]), directions[0]


def mixed(groups: Groups, topology: str, x_N: np.ndarray, periods: int) -> np.ndarray:
    """This rank's row after `periods` periods."""
    exchange = mix(topology)
    value = torch.tensor(x_N[groups.rank], dtype=torch.float32)
    state = exchange.init(value, groups)
    for step in range(periods * topologies.get(topology).period(groups.size)):
        exchange.run(value, state, groups, step)
    return value.double().numpy()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("topology", ["ring", "exponential", "shift_one", "complete"])
def test_the_consensus_distance_contracts_at_the_spectral_rate(topology: str, size: int) -> None:
    """Neither slower nor faster, to 1e-5: a start along the slowest direction shrinks by exactly its singular value."""
    profile = np.linspace(-1.5, 1.0, WIDTH)
    for periods in (1, 3):
        rate, direction = slowest(topology, size, periods)
        x = 3.0 + np.outer(direction, profile)
        after = np.stack(run_threads(size, mixed, topology, x, periods))
        apart = [np.linalg.norm(each - each.mean(0)) for each in (x, after)]
        assert abs(apart[1] / apart[0] - rate) < 1e-5, (rate, apart)
        assert np.abs(after.mean(0) - x.mean(0)).max() < 1e-5
        assert rate < 1
    if topology == "complete":
        assert rate < 1e-12
