"""Every test has one tier, and a unit test that starts a process fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import TIERS, holds_no_unit_test, running, tier_of, wants_unit_tests_only


def test_a_unit_test_that_starts_a_process_fails(request: pytest.FixtureRequest) -> None:
    assert tier_of(request.node) == "unit"
    with pytest.raises(RuntimeError, match="starts no process"), running("unit"):
        subprocess.run([sys.executable, "-c", ""], check=True)


@pytest.mark.process
def test_other_tiers_may(request: pytest.FixtureRequest) -> None:
    assert tier_of(request.node) == "process"
    with running("process"):
        subprocess.run([sys.executable, "-c", ""], check=True)


def test_every_collected_test_has_one_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        assert len([tier for tier in TIERS if item.get_closest_marker(tier) is not None]) == 1, item.nodeid


def test_files_that_are_not_imported_for_unit_tests_hold_none(request: pytest.FixtureRequest) -> None:
    """Of those that this run has imported: all of them in a run of the whole suite."""
    for item in request.session.items:
        assert tier_of(item) != "unit" or not holds_no_unit_test(Path(item.path)), item.nodeid


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("pytestmark = pytest.mark.process\n", True),
        ("import x\n\npytestmark = [pytest.mark.lab, pytest.mark.slow]\n", True),
        ("pytestmark = pytest.mark.slow\n", False),
        ("@pytest.mark.process\ndef test_it(): ...\n", False),
    ],
)
def test_a_file_that_marks_all_of_its_tests_is_known_by_its_text(source: str, answer: bool) -> None:
    path = Path(__file__).parent / "engine" / "test_made_up.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda self, encoding: source)
        assert holds_no_unit_test(path) is answer


@pytest.mark.parametrize(
    ("markexpr", "answer"),
    [("unit", True), ("unit and not slow", True), ("unit or docs", False), ("not unit", False), ("", False)],
)
def test_only_a_choice_of_unit_tests_leaves_files_out(markexpr: str, answer: bool) -> None:
    assert wants_unit_tests_only(markexpr) is answer
