"""Tiers of tests: `unit` starts no process, `process` does, `lab` needs emulated hosts, `docs` reads the documentation.

A test's tier is its explicit marker, else that of its folder, else `process` if it asks for the rank pool, else `unit`.
A unit test that starts a process fails: an audit hook of the interpreter sees it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

__all__ = [
    "TIERS",
    "assign_tier",
    "holds_no_unit_test",
    "install_guard",
    "running",
    "starts_processes",
    "tier_of",
    "wants_unit_tests_only",
]

TIERS = ("unit", "process", "lab", "docs")
_FOLDERS = {
    "lab": "lab",
    "docs": "docs",
    "examples": "process",
    "launch": "process",
    "lightning": "process",  # almost all; and the import of Lightning takes seconds
    "net": "process",
    "scripts": "process",
}
_MARKS_THE_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.(process|lab|docs)\b", re.MULTILINE)
_STARTS_A_PROCESS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
_MARKS_A_TEST = re.compile(
    r"^@pytest\.mark\.(process|lab|docs)\b|\b(pool: RankPool|fork_server: ForkServer)\b", re.MULTILINE
)
_running: list[str] = []  # tier of the test that runs now; an audit hook cannot be removed, so it reads this
_started: list[str] = []  # events of a unit test that started a process


def tier_of(item: pytest.Item) -> str:
    """The tier that `item` belongs to.

    Raises:
        ValueError: it is marked with several.
    """
    marked = [tier for tier in TIERS if item.get_closest_marker(tier) is not None]
    if len(marked) > 1:
        raise ValueError(f"{item.nodeid}: marked with several tiers ({', '.join(marked)}); keep one")
    if marked:
        return marked[0]
    folder = _folder_of(item.path)
    if folder in _FOLDERS:
        return _FOLDERS[folder]
    return "process" if "pool" in getattr(item, "fixturenames", ()) else "unit"


@cache  # an item a test: many for each file
def _folder_of(path: Path) -> str:
    return path.relative_to(Path(__file__).parent).parts[0]


def assign_tier(item: pytest.Item) -> None:
    """Mark `item` with its tier, so that `-m unit` selects it."""
    tier = tier_of(item)
    if item.get_closest_marker(tier) is None:
        item.add_marker(getattr(pytest.mark, tier))


def wants_unit_tests_only(markexpr: str) -> bool:
    """Whether `-m markexpr` is `unit`, perhaps with further conditions that must hold too.

    Examples:
        >>> wants_unit_tests_only("unit and not slow"), wants_unit_tests_only("unit or docs")
        (True, False)
    """
    words = markexpr.split()
    return words[:1] == ["unit"] and "or" not in words


def holds_no_unit_test(path: Path) -> bool:
    """Whether a folder or file below `tests` says that all of its tests are of another tier, without importing it."""
    parts = path.relative_to(Path(__file__).parent).parts
    if parts and parts[0] in _FOLDERS:
        return True
    return path.suffix == ".py" and _MARKS_THE_FILE.search(path.read_text(encoding="utf-8")) is not None


def starts_processes(path: Path) -> bool:
    """Whether a file holds tests that start processes, and so wait for them, by its text."""
    if not path.is_relative_to(Path(__file__).parent):
        return False
    return holds_no_unit_test(path) or _MARKS_A_TEST.search(path.read_text(encoding="utf-8")) is not None


def install_guard() -> None:
    """Watch for new processes while a unit test runs. Call it once in an interpreter."""
    sys.addaudithook(_note)


@contextmanager
def running(tier: str) -> Iterator[None]:
    """Run a test of `tier`.

    Raises:
        RuntimeError: it is a unit test and started a process.
    """
    _running[:], _started[:] = [tier], []
    try:
        yield
    finally:
        _running.clear()
    started = _started.copy()
    _started.clear()
    if started:
        raise RuntimeError(f"{started[0]}: a test of the unit tier starts no process; mark it with pytest.mark.process")


def _note(event: str, _args: tuple[object, ...]) -> None:
    if event in _STARTS_A_PROCESS and _running == ["unit"]:
        _started.append(event)
