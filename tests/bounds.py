"""A bound on each test, below the one of pytest-timeout, whose thread ends the whole process.

The signal of a timer interrupts what waits in Python: a lock, a queue, a pipe, another process. The test fails with the
stacks of its threads, and the tests after it run. Clean-up that waits as well is interrupted in its turn. What waits in
compiled code is left to pytest-timeout.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

__all__ = [
    "AGAIN",
    "LEFT",
    "SHARE",
    "bound_of",
    "pytest_runtest_call",
    "pytest_runtest_protocol",
    "pytest_runtest_setup",
]

SHARE = 5 / 6  # of the time that pytest-timeout gives a test: for its set-up and itself
LEFT = 1 / 12  # at least, for its end
AGAIN = 1 / 60  # until the next interruption: clean-up, as of a process that is waited for, may wait as well
_end = pytest.StashKey[float]()


def bound_of(item: pytest.Item) -> float:
    """Seconds that pytest-timeout gives the test; 0: no end."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    given = item.config.getoption("timeout", None)
    return float(item.config.getini("timeout") or 0) if given is None else float(given)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """The time of a test begins."""
    item.stash[_end] = time.monotonic() + bound_of(item) * SHARE
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Fixtures count."""
    with _bounded(item, item.stash[_end] - time.monotonic()):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Together with the fixtures."""
    with _bounded(item, item.stash[_end] - time.monotonic()):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Also of a test that was late."""
    with _bounded(item, max(item.stash[_end] - time.monotonic(), bound_of(item) * LEFT)):
        return (yield)


@contextmanager
def _bounded(item: pytest.Item, seconds: float) -> Iterator[None]:
    if not bound_of(item) or item.config.getoption("usepdb", False) or not _can_interrupt():
        yield
        return

    def late(_number: int, _frame: FrameType | None) -> None:
        pytest.fail(f"{item.nodeid}: not done within {bound_of(item) * SHARE:g} s; other threads:\n{_stacks()}")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), bound_of(item) * AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _can_interrupt() -> bool:
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()


def _stacks() -> str:
    """Of the threads beside this one, whose own is that of the failure."""
    frames = sys._current_frames()
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    found = {each.name: frames[each.ident] for each in others if each.ident in frames}
    return "\n".join(f"{name}:\n{''.join(traceback.format_stack(at, limit=12))}" for name, at in found.items())
