"""A change for good is suspected, a few slow steps are not."""

from __future__ import annotations

import pytest

from bagua.auto.watch import Watch


def fed(watch: Watch, *runs: tuple[float, int]) -> Watch:
    for seconds, count in runs:
        for _ in range(count):
            watch.add(seconds)
    return watch


@pytest.mark.parametrize(("seconds", "suspicion"), [(0.2, 1), (0.05, -1), (0.13, 0), (0.08, 0)])
def test_changes_by_half_are_suspected(seconds: float, suspicion: int) -> None:
    assert fed(Watch(), (0.1, 8), (seconds, 4)).suspicion == suspicion


def test_one_step_as_before_takes_the_suspicion_away() -> None:
    assert fed(Watch(), (0.1, 8), (0.2, 3)).suspicion == 0
    assert fed(Watch(), (0.1, 8), (0.2, 3), (0.1, 1), (0.2, 3)).suspicion == 0


def test_a_false_alarm_makes_a_pause_that_doubles() -> None:
    watch = fed(Watch(), (0.1, 8), (0.2, 4))
    watch.false_alarm()
    assert fed(watch, (0.2, 50 + 8 + 4)).suspicion == 0
    assert fed(watch, (0.4, 4)).suspicion == 1
    watch.false_alarm()
    assert fed(watch, (0.4, 100 + 8), (0.8, 3)).suspicion == 0
    assert fed(watch, (0.8, 1)).suspicion == 1


def test_a_whole_period_counts() -> None:
    watch = fed(Watch(period=8), (0.1, 8), (0.2, 7))
    assert watch.suspicion == 0
    assert fed(watch, (0.2, 1)).suspicion == 1
