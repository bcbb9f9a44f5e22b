"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.rank_pool import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Processes that stand for ranks."""
    made = RankPool()
    yield made
    made.close()


def _devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is; ranks share a GPU if there are fewer GPUs than ranks."""
    return torch.device(request.param)
