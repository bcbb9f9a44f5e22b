"""Ranks for the tests of Hugging Face's loops."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.rank_pool import RankPool


def load(module: str) -> None:
    """Import what a job needs, which may take longer than a process group waits."""
    importlib.import_module(module)


class Loops:
    """The rank pool, with time for a busy machine."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what each rank returned."""
        self._pool.run(size, load, function.__module__, init=False, timeout_s=400)
        return self._pool.run(size, function, *args, timeout_s=200, group_timeout_s=120)


@pytest.fixture
def loops(pool: RankPool) -> Loops:
    """Ranks that have imported Hugging Face's packages."""
    return Loops(pool)
