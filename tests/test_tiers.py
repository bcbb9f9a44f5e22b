"""Every test has one tier, and a unit test that starts a process fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tiers import TIERS, running, tier_of


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
