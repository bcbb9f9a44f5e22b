"""A settled choice is made again, on all ranks at the same step, when links change for good."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bagua
from bagua.auto import Link, Links
from bagua.auto import session as sessions
from bagua.auto.facts import StepTimes
from bagua.auto.session import ChoiceSession
from bagua.engine.choosing import EngineChoices
from bagua.engine.stats import StepStats
from tests.auto.training import until_settled
from tests.autotune.training import Training, engine_of
from tests.rank_threads import run_teams


class World:
    """Links and step times that change at a step."""

    def __init__(self, before: float, after: float, at: int) -> None:
        self.before, self.after, self.at = before, after, at

    def rate(self, step: int) -> float:
        return self.before if step < self.at else self.after

    def comm_s(self, name: str, step: int) -> float:
        return {"gradient_allreduce": 32, "bytegrad": 8}.get(name, 6) * 1e6 / self.rate(step)


def pretend(monkeypatch: Any, world: World, measured: World | None = None) -> list[int]:
    """Let training happen in `world`, and links be measured as those of `measured`; returns where that was."""
    looks: list[int] = []

    def measure(team: Any, nodes: Any, device: Any) -> Links:
        step = team.steps
        looks.append(step)
        rate = (measured or world).rate(step)
        return Links((), tuple(Link(a, 1 - a, rate, rate, 1e-4) for a in (0, 1)), 0.0)

    def last(self: EngineChoices) -> StepStats:
        self.team.steps = self.step  # pyright: ignore[reportAttributeAccessIssue]
        return StepStats(comm_s=world.comm_s(name_of(self.algorithm), self.step))

    def step_times(self: ChoiceSession, exposed_s: float) -> StepTimes:
        comm_s = world.comm_s(self.explanation.chosen, self._team_step)
        return StepTimes(0.01 + comm_s, comm_s, 0.003, 0.002)

    original = ChoiceSession.step_ended

    def step_ended(self: ChoiceSession, engine: Any) -> None:
        self._team_step = engine.step
        engine.team.steps = engine.step
        original(self, engine)

    monkeypatch.setattr(sessions, "measure_links", measure)
    monkeypatch.setattr(EngineChoices, "last", property(last))
    monkeypatch.setattr(ChoiceSession, "_step_times", step_times)
    monkeypatch.setattr(ChoiceSession, "step_ended", step_ended)
    return looks


def name_of(algorithm: Any) -> str:
    return "bytegrad" if getattr(algorithm, "codec", "") == "minmax_uint8" else algorithm.name


def run(team: Any, steps: int, **options: Any) -> tuple[str, Any, str, torch.Tensor]:
    training = Training(team, "auto", **options)
    first = until_settled(training).chosen
    training.steps(steps - training.made)
    explained = bagua.explain(training.model)
    return first, explained, repr(engine_of(training).algorithm), training.weights


def test_a_link_that_becomes_slow_is_answered_within_twenty_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, World(1e11, 1e8, at=40))
    found = run_teams(2, run, 60)
    for first, explained, in_force, weights in found:
        assert first == "gradient_allreduce"
        assert explained.phase == "settled"
        assert explained.chosen != "gradient_allreduce"
        assert explained.reason.startswith("links changed from 100.00 Gbit/s to 100 Mbit/s: ")
        assert 40 < explained.step <= 60
        assert "GradientAllReduce(hierarchical=False, average=True, codec='identity'" not in in_force
        assert explained == found[0][1]
        assert torch.equal(weights, found[0][3])


@pytest.mark.parametrize(("factor", "steps", "at"), [(1.3, 17, 50), (1.3, 17, 51), (1 / 1.3, 17, 51), (4.0, 14, 50)])
def test_a_second_choice_stands_within_twenty_steps_of_any_change(
    monkeypatch: pytest.MonkeyPatch, factor: float, steps: int, at: int
) -> None:
    """Exchanges change by `factor`, as little as is noticed, and the links by more."""
    rate = 1e8
    links = World(rate, rate / factor**2.5, at)
    pretend(monkeypatch, World(rate, rate / factor, at), measured=links)
    found = run_teams(2, run, at + 24)
    for _, explained, _, weights in found:
        assert explained.phase == "settled"
        assert explained.reason.startswith("links changed from ")
        assert explained.step - at <= steps
        assert explained == found[0][1]
        assert torch.equal(weights, found[0][3])


def test_slower_exchanges_on_the_same_links_are_a_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = pretend(monkeypatch, World(1e11, 1e8, at=40), measured=World(1e11, 1e11, at=0))
    for first, explained, *_ in run_teams(2, run, 70):
        assert explained.chosen == first
        assert explained.step < 40
    assert len(looks) == 4  # at the start and once later, on two ranks


def test_adapting_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = pretend(monkeypatch, World(1e11, 1e8, at=40))

    def fixed(team: Any) -> Any:
        return run(team, 60, adapt=False)

    for first, explained, *_ in run_teams(2, fixed):
        assert explained.chosen == first
    assert len(looks) == 2
