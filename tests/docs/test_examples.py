"""Every public function, and every class that users make, has examples in its docstring, and they run."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import pytest

import bagua
from tests.docs.markdown import ROOT
from tests.docs.run_examples import examples

# Results of functions, errors, and base classes, whose example is docs/new-algorithm.md.
NOT_MADE = {
    "Algorithm",
    "CommunicationError",
    "Context",
    "Quality",
    "RankMismatchError",
    "Simulation",
    "Stats",
    "StepStats",
    # Earlier names, whose docstrings lead to the new ones.
    "abort",
    "average",
}
PUBLIC = {name: getattr(bagua, name) for name in bagua.__all__}
NAMES = sorted(
    f"bagua.{name}"
    for name, value in PUBLIC.items()
    if name not in NOT_MADE and (inspect.isfunction(value) or inspect.isclass(value))
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    command = [sys.executable, "-W", "error", "-m", "tests.docs.run_examples", *NAMES]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = {**alone, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


def test_functions_are_found_and_what_has_no_example_fails() -> None:
    assert {"bagua.distribute", "bagua.no_sync", "bagua.simulate", "bagua.Guard"} <= set(NAMES)
    assert not examples("bagua.CommunicationError")


def test_docstrings_open_with_what_the_name_is_or_does() -> None:
    """A whole sentence, which opens with a verb or with what the class is."""
    for name, value in PUBLIC.items():
        first = (inspect.getdoc(value) or "").split("\n", 1)[0]
        assert first.endswith((".", ":")), f"bagua.{name}: {first!r}"
        assert not first.startswith(("What ", "How ", "When ", "Who ", "Within it", "Is ")), f"bagua.{name}: {first!r}"
