"""Rank 0's part alone: searches on made-up surfaces."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from bagua.autotune import STRATEGIES, Autotune, Measurement, Outcome, Settings, Space, Tuner
from bagua.autotune.log import COLUMNS, open_log, write_line

MIB = 2**20
DEFAULT = Settings(8 * MIB, 4, 8 * MIB, 2 * MIB, False)
AXES = {
    "bucket_bytes": tuple(MIB * 2**k // 4 for k in range(8)),
    "direct_bytes": (0, 2 * MIB, 2**40),
    "num_lanes": (1, 2, 4, 8),
}
Surface = Callable[[Settings], float]


def bowl(settings: Settings) -> float:
    """Best at buckets of 1 MiB and 2 lanes; 0.1 s there and 0.19 s at the default."""
    octaves = math.log2(settings.bucket_bytes / MIB)
    return 0.1 * (1 + 0.08 * octaves**2 + 0.1 * abs(math.log2(settings.num_lanes / 2)))


def flat(settings: Settings) -> float:
    return 0.1


class Run:
    """A tuner and the ranks it believes in."""

    def __init__(
        self, surface: Surface, space: Space, fails: Surface | None = None, noise: float = 0.0, **options: object
    ):
        self.lines: list[Measurement] = []
        self.orders: list[tuple[Settings, int]] = []
        dice = random.Random(1)
        options = {"sampling_confidence_time_s": 0, **options}
        self.tuner = Tuner(Autotune(**options), space, told=self.lines.append)  # type: ignore[arg-type]
        order = self.tuner.begin()
        while order.num_steps:
            self.orders.append((order.settings, order.num_steps))
            if fails is not None and fails(order.settings):
                order = self.tuner.next(Outcome((), "rank 1: no memory"))
                continue
            steps = [surface(order.settings) * (1 + noise * dice.random()) for _ in range(order.num_steps)]
            order = self.tuner.next(Outcome([steps, [step * 0.9 for step in steps], []]))
        self.last = order


@pytest.mark.parametrize("search", STRATEGIES)
def test_every_search_improves_within_its_turns(search: str) -> None:
    run = Run(bowl, Space(DEFAULT, AXES), search=search)
    assert sum(steps for _, steps in run.orders) <= 57, "one of them to warm up"
    assert bowl(run.last.settings) < bowl(DEFAULT)
    assert run.last == (run.tuner.best, 0)
    assert run.tuner.phase == "done"
    assert run.tuner.num_steps == sum(steps for _, steps in run.orders)


def test_the_default_search_comes_near_the_best() -> None:
    space = Space(DEFAULT, AXES)
    run = Run(bowl, space, noise=0.02)
    assert bowl(run.last.settings) <= 1.05 * min(map(bowl, space.grid()))


@pytest.mark.parametrize("search", STRATEGIES)
def test_the_default_stays_where_nothing_is_better(search: str) -> None:
    for noise in (0.0, 0.01):
        assert Run(flat, Space(DEFAULT, AXES), noise=noise, search=search).last.settings == DEFAULT


def test_a_lucky_winner_is_found_out() -> None:
    """What was fast in the search only is measured again beside the default."""
    calls: dict[Settings, int] = {}

    def lucky(settings: Settings) -> float:
        calls[settings] = calls.get(settings, 0) + 1
        return 0.1 if settings == DEFAULT else 0.05 if calls[settings] <= 2 else 0.12

    assert Run(lucky, Space(DEFAULT, AXES)).last.settings == DEFAULT


def test_bad_candidates_cost_one_turn() -> None:
    run = Run(lambda s: 0.1 if s == DEFAULT else 1.0, Space(DEFAULT, AXES))
    others = [line for line in run.lines if line.settings != DEFAULT and line.phase == "search"]
    assert others
    assert len(others) == len({line.settings for line in others}), "a turn said enough"


def test_what_cannot_be_set_up_is_skipped() -> None:
    run = Run(bowl, Space(DEFAULT, AXES), fails=lambda s: s.bucket_bytes < 8 * MIB)
    assert run.last.settings.bucket_bytes == 8 * MIB
    failed = [line for line in run.lines if line.problem]
    assert failed
    assert all(line.step_s is None and line.num_steps == 0 for line in failed)
    asked = [settings for settings, _ in run.orders if settings.bucket_bytes < 8 * MIB]
    assert len(asked) == len(set(asked)), "once is enough"


def test_a_finalist_that_fails_late_does_not_win() -> None:
    tries: dict[Settings, int] = {}

    def fails(settings: Settings) -> bool:
        tries[settings] = tries.get(settings, 0) + 1
        return settings != DEFAULT and tries[settings] > 2

    assert Run(bowl, Space(DEFAULT, AXES), fails=fails).last.settings == DEFAULT


def test_settings_that_come_to_the_same_are_measured_once() -> None:
    space = Space(DEFAULT, AXES, lambda s: min(s.bucket_bytes, 2 * MIB))
    assert len(space.grid()) == 4
    assert not space.trivial
    run = Run(bowl, space, search="exhaustive")
    assert len(run.tuner.trials.samples) == 4
    assert Space(DEFAULT, AXES, lambda s: 0).trivial


def test_limits_hold() -> None:
    run = Run(bowl, Space(DEFAULT, AXES), max_samples=3, search="random")
    assert len(run.tuner.trials.samples) == 3
    run = Run(bowl, Space(DEFAULT, AXES), max_turns=20)
    assert run.tuner.num_steps <= 21


def test_turns_take_the_time_that_was_asked_for() -> None:
    run = Run(lambda s: 0.01, Space(DEFAULT, AXES), sampling_confidence_time_s=0.045, warmup_time_s=0.03)
    warm = [line for line in run.lines if line.phase == "warm-up"]
    assert len(warm) == 3
    assert {line.num_steps for line in run.lines if line.used} == {5}


def test_turns_are_whole_periods() -> None:
    tuner = Tuner(Autotune(sampling_confidence_time_s=0.5), Space(DEFAULT, AXES), period=4)
    order = tuner.begin()
    while order.num_steps:
        assert order.num_steps % 4 == 0
        # Three short steps and a long one: the mean counts.
        order = tuner.next(Outcome([[0.01, 0.01, 0.01, 0.17] * (order.num_steps // 4)]))
    assert tuner.default_s == pytest.approx(0.05)


def test_the_slowest_rank_counts_and_an_interruption_does_not() -> None:
    tuner = Tuner(Autotune(), Space(DEFAULT, AXES))
    assert tuner._step_s(Outcome([[0.1, 0.1, 0.1], [0.1, 0.2, 9.0], []])) == 0.2


def test_the_log_has_the_originals_columns_first(tmp_path: Path) -> None:
    path = open_log(str(tmp_path / "tune.csv"))
    write_line(path, Measurement(DEFAULT, 0.5, "search", True, 2), 17, 2**29)
    write_line(path, Measurement(Settings(3 * MIB, 1, None, 0, True), None, "search", False, 0, 'no, "really"'), 18, 1)
    rows = list(csv.reader(path.read_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert rows[0][:4] == ["bucket_size_2p", "is_hierarchical_reduce", "score", "train_iter"]
    assert rows[1][:4] == ["23", "False", "1.0", "17"]
    first, second = (dict(zip(COLUMNS, row, strict=True)) for row in rows[1:])
    assert float(first["step_ms"]) == 500
    assert second["step_ms"] == second["score"] == second["part_bytes"] == ""
    assert second["problem"] == 'no, "really"'
    with pytest.raises(ValueError, match=r"autotune: log .*cannot be written"):
        open_log(str(tmp_path / "no" / "such" / "folder.csv"))
