"""A change for good is suspected, the sooner the larger it is; a few slow steps and noise are not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from bagua.auto.watch import Watch


def fed(watch: Watch, *runs: tuple[float, int]) -> Watch:
    for seconds, count in runs:
        for _ in range(count):
            watch.add(seconds)
    return watch


@pytest.mark.parametrize(("factor", "steps"), [(4.0, 5), (1.5, 5), (1.3, 8), (1.2, None)])
def test_the_larger_a_change_the_sooner_it_is_suspected(factor: float, steps: int | None) -> None:
    for sign, seconds in ((1, 0.1 * factor), (-1, 0.1 / factor)):
        watch = fed(Watch(), (0.1, 8))
        assert watch.suspicion == 0
        seen = next((n for n in range(1, 40) if fed(watch, (seconds, 1)).suspicion), None)
        assert seen == steps
        if seen is not None:
            assert watch.suspicion == sign
            assert watch.lasting == seen


def test_one_step_as_before_takes_the_suspicion_away() -> None:
    assert fed(Watch(), (0.1, 8), (0.3, 4)).suspicion == 0
    assert fed(Watch(), (0.1, 8), (0.3, 4), (0.1, 1), (0.3, 4)).suspicion == 0
    assert fed(Watch(), (0.1, 8), (0.13, 7), (0.1, 1), (0.13, 7)).suspicion == 0


def test_steps_as_slow_as_some_before_are_none_of_a_change() -> None:
    watch = fed(Watch(), (0.1, 7), (0.3, 1), (0.1, 20), (0.3, 2), (0.1, 10))
    assert fed(watch, (0.29, 8)).suspicion == 0
    assert fed(watch, (0.31, 8)).suspicion == 1


def test_the_reference_grows_but_not_while_steps_drift() -> None:
    watch = fed(Watch(), (0.1, 8), (0.102, 20), (0.12, 100))
    assert fed(watch, (0.125, 8)).suspicion == 0  # 1.25 times 0.102 are more
    assert fed(watch, (0.13, 8)).suspicion == 1
    assert watch.lasting == 8


def test_a_false_alarm_makes_a_pause_that_doubles() -> None:
    watch = fed(Watch(), (0.1, 8), (0.2, 5))
    assert watch.suspicion == 1
    watch.false_alarm()
    assert fed(watch, (0.2, 50 + 8 + 8)).suspicion == 0
    assert fed(watch, (0.5, 5)).suspicion == 1
    watch.false_alarm()
    assert fed(watch, (0.4, 100 + 8), (0.9, 4)).suspicion == 0
    assert fed(watch, (0.9, 1)).suspicion == 1


def test_whole_periods_count() -> None:
    """Steps that exchange, and steps that do not."""
    watch = Watch(period=4)
    for seconds in [0.0, 0.0, 0.0, 0.4] * 4 + [0.0, 0.0, 0.9, 0.0] * 4 + [0.0, 0.0, 0.9]:
        watch.add(seconds)
        assert watch.suspicion == 0
    assert fed(watch, (0.0, 1)).suspicion == 1
    assert watch.lasting == 20


def independent(source: random.Random, spread: float) -> Iterator[float]:
    while True:
        yield math.exp(source.gauss(0.0, spread))


def lingering(source: random.Random, spread: float) -> Iterator[float]:
    """Noise of which two thirds last from a step to the next."""
    value = 0.0
    while True:
        value = 0.67 * value + source.gauss(0.0, spread * math.sqrt(1 - 0.67**2))
        yield math.exp(value)


def bursts(source: random.Random, spread: float) -> Iterator[float]:
    """One step in ten takes one and a half to four times as long."""
    while True:
        yield math.exp(source.gauss(0.0, spread)) * (source.uniform(1.5, 4.0) if source.random() < 0.1 else 1.0)


@pytest.mark.parametrize(("noise", "spread"), [(independent, 0.25), (lingering, 0.1), (bursts, 0.15)])
def test_noise_is_rarely_a_change(noise: Callable[[random.Random, float], Iterator[float]], spread: float) -> None:
    """Trainings of 250 steps that see one, of 60."""
    alarms = 0
    for seed in range(60):
        steps, watch = noise(random.Random(seed), spread), Watch()
        for _ in range(250):
            watch.add(next(steps))
            if watch.suspicion:
                alarms += 1
                break
    assert alarms <= 3
