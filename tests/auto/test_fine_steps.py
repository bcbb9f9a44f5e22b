"""Bits and rank follow links that change a little, one rung at a time, and do not swing with them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from bagua.auto.facts import StepTimes
from bagua.auto.judge import Judge, Outcome
from bagua.auto.ranking import Ranking
from bagua.auto.watch import Drift
from bagua.plan import CPU, Workload, predict
from tests.auto.test_adapting import World, pretend, run
from tests.auto.test_judge import COMPUTE_S, facts
from tests.rank_threads import run_teams

RUNGS = [f"bytegrad:codec=eden:bits={bits}" for bits in (1, 2, 4)] + ["bytegrad"]


def fed(drift: Drift, *runs: tuple[float, int]) -> Drift:
    for seconds, count in runs:
        for _ in range(count):
            drift.add(seconds)
    return drift


@pytest.mark.parametrize(("seconds", "sign"), [(0.12, 1), (0.085, -1), (0.11, 0), (0.092, 0)])
def test_small_changes_for_good_are_noticed(seconds: float, sign: int) -> None:
    assert fed(Drift(), (0.1, 32), (seconds, 12)).sign == sign
    assert fed(Drift(), (0.1, 8), (seconds, 12)).sign == 0  # too early
    assert fed(Drift(), (0.1, 32), (seconds, 11), (0.1, 1), (seconds, 11)).sign == 0


def test_fine_steps_that_turn_back_are_ever_rarer() -> None:
    drift = Drift()
    for direction, dwell in ((-1, 32), (-1, 32), (1, 64), (-1, 128)):
        drift.stepped(direction)
        assert not fed(drift, (0.1, dwell - 1)).rested
        assert fed(drift, (0.1, 1)).rested
    drift.rest()
    assert fed(drift, (0.2, 127)).sign == 0
    assert fed(drift, (0.2, 1)).sign == 1
    assert drift.ratio == 2.0


def settled(bits_per_s: float, gap: float | None = None, family: str = "adam") -> tuple[Judge, Any]:
    """A judge that has settled at predicted times, and what predicts them."""
    given = facts(bits_per_s, family=family, gap=gap)
    workload = Workload.of(given.model, 0.9 * COMPUTE_S, 0.1 * COMPUTE_S)

    def seconds(name: str, rate: float) -> float:
        return predict(name, workload, facts(rate).cluster, CPU).step_s

    judge = Judge(given)
    order = judge.begin()
    while order.count:
        step_s = seconds(given.candidates[order.candidate].name, bits_per_s)
        times = [StepTimes(step_s, max(0.0, step_s - COMPUTE_S), 0.03, 0.01)] * order.count
        order = judge.next(Outcome([times] * 4, 20))
    return judge, seconds


def test_bits_follow_the_rate_one_rung_at_a_time_within_the_loss_limit() -> None:
    judge, _ = settled(8e8)
    assert judge.explanation.chosen == "bytegrad"
    judge.refine(1.5, 100, 0.3)
    assert judge.explanation.chosen == "bytegrad:codec=eden:bits=4"
    assert judge.explanation.reason == (
        "bytegrad:codec=eden:bits=4 instead of bytegrad, a fine step: exchanges take 1.50 times as long."
    )
    assert {row.name: row.verdict for row in judge.explanation.rows}["bytegrad"] == "ran before"
    judge.refine(2.0, 200, 0.2)
    assert judge.explanation.chosen == "bytegrad:codec=eden:bits=2"
    judge.refine(2.0, 300, 0.2)
    assert judge.explanation.chosen == "bytegrad:codec=eden:bits=2"  # 1 bit learns worse than the limit with Adam
    for step, name in ((400, "bytegrad:codec=eden:bits=4"), (500, "bytegrad"), (600, "bytegrad")):
        judge.refine(0.4, step, 0.1)
        assert judge.explanation.chosen == name
    assert judge.explanation.step == 500


def test_less_than_a_drift_changes_nothing() -> None:
    judge, _ = settled(8e8)
    before = judge.explanation
    for slower in (1.0, 1.1, 0.9):
        judge.refine(slower, 100, 0.1)
    assert judge.explanation == before


def test_a_fine_step_that_made_steps_longer_is_taken_back() -> None:
    judge, _ = settled(8e8)
    judge.refine(1.5, 100, 0.30)
    judge.refine(1.0, 140, 0.33)
    assert judge.explanation.chosen == "bytegrad"
    assert judge.explanation.reason.endswith("a fine step: steps took 300.0 ms with it, and 330.0 ms since.")


def test_a_fine_step_is_not_taken_back_because_links_became_slower_still() -> None:
    judge, _ = settled(8e8)
    judge.refine(1.5, 100, 0.30)
    judge.refine(1.3, 140, 0.33)
    assert judge.explanation.chosen == "bytegrad:codec=eden:bits=4"


@pytest.mark.parametrize("period", [8, 25, 60, 150, 400])
@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("bits_per_s", [3e8, 7e8])
def test_a_rate_that_swings_by_thirty_percent_causes_one_fine_step_in_thirty_two_at_most(
    period: int, square: bool, bits_per_s: float
) -> None:
    judge, seconds = settled(bits_per_s)
    drift = Drift()
    known: dict[tuple[str, float], float] = {}
    made: list[int] = []
    for step in range(1200):
        wave = math.sin(2 * math.pi * step / period)
        rate = round(bits_per_s * (1 + 0.3 * (math.copysign(1, wave) if square else round(wave, 1))))
        chosen = judge.explanation.chosen
        if (chosen, rate) not in known:
            known[chosen, rate] = seconds(chosen, rate)
        drift.add(known[chosen, rate] - 0.09)
        if step % 4 == 0 and drift.sign:
            judge.refine(drift.ratio, step, known[chosen, rate])
            after = judge.explanation.chosen
            if after == chosen:
                drift.rest()
                continue
            drift.stepped(1 if RUNGS.index(after) > RUNGS.index(chosen) else -1)
            made.append(step)
    assert all(later - earlier >= 32 for earlier, later in itertools.pairwise(made))
    assert len(made) <= 2  # the coarser setting is hardly slower at the higher rate, but not the other way round


def test_all_ranks_make_a_fine_step_at_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = pretend(monkeypatch, World(1e8, 7.5e7, at=60))

    def predicted(self: Ranking, position: int, slower: float = 1.0) -> float | None:
        candidate = self.facts.candidates[position]
        return 1.0 if position == 0 else 0.01 + 0.01 * candidate.rung * slower if candidate.ladder else None

    monkeypatch.setattr(Ranking, "step_s", predicted)

    def train(team: Any) -> Any:
        return run(team, 100)

    (first, explained, in_force, weights), (_, same, other, equal) = run_teams(2, train)
    assert first == "bytegrad:codec=eden:bits=2"
    assert explained == same
    assert explained.reason.endswith("a fine step: exchanges take 1.33 times as long.")
    assert 60 < explained.step <= 80
    assert "bits=1" in in_force
    assert in_force == other
    assert torch.equal(weights, equal)
    assert len(looks) == 4  # links were measured again, on two ranks: they had not changed by half
