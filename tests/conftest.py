"""Fixtures shared by all tests."""

from __future__ import annotations

import fcntl
import gc
import sys
from collections.abc import Generator, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import again, bounds
from tests.fork_server import ForkServer
from tests.rank_pool import RankPool
from tests.tiers import assign_tier, holds_no_unit_test, install_guard, running, tier_of, wants_unit_tests_only

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Keep unit tests from starting processes, end tests that wait without end, and outlive the loss of a worker."""
    install_guard()
    config.pluginmanager.register(bounds)
    config.pluginmanager.register(again)
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(import_module("tests.scheduling"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of other tiers for `-m unit`."""
    return True if wants_unit_tests_only(config.option.markexpr) and holds_no_unit_test(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    """Of workers that find a file not compiled yet one compiles it, with its assertions, and the others read that."""
    path = collector.path
    if (
        sys.dont_write_bytecode
        or not hasattr(collector.config, "workerinput")
        or not isinstance(collector, pytest.Module)
        or any(path.parent.glob(f"__pycache__/{path.stem}.*-pytest-*.pyc"))
    ):
        return (yield)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test its tier."""
    for item in items:
        if " at 0x" in item.nodeid:  # workers that collect other names refuse to run anything
            raise pytest.UsageError(f"{item.nodeid}: an address in the name of a test differs in each process")
        assign_tier(item)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was imported and collected out of later garbage collections, which some tests ask for many times."""
    if len(session.items) > 100:
        import torch._dynamo  # noqa: F401  the first optimizer imports it: most of all objects
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Hold the test to its tier."""
    # On a GPU, Triton starts a compiler.
    with running("process" if item.get_closest_marker("gpu") else tier_of(item)):
        return (yield)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """One for all tests of this process: it imports torch, which takes seconds of processor time."""
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Processes that stand for ranks."""
    made = RankPool(None if torch.cuda.is_available() else request.getfixturevalue("fork_server"))
    yield made
    made.close()


def _devices() -> list[Any]:
    return ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is; ranks share a GPU if there are fewer GPUs than ranks."""
    return torch.device(request.param)
