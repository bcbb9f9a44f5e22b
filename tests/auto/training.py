"""Trainings under "auto" whose links and step times are given: what is chosen does not depend on the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bagua
from bagua.auto import Explanation, Link, Links
from bagua.auto import session as sessions
from bagua.auto.facts import StepTimes
from bagua.auto.session import ChoiceSession
from tests.autotune.training import Training

MOST_STEPS = 40
COMPUTE_S = 0.01
FAST = "bytegrad:codec=eden:bits=2"


def slow_links(team: Any, nodes: Any, device: Any) -> Links:
    """20 Mbit/s."""
    pairs = [(a, b) for a in range(team.size) for b in range(team.size) if a != b]
    return Links((), tuple(Link(a, b, 2e7, 2e7, 1e-4) for a, b in pairs), 0.0)


def pretend(monkeypatch: Any, seconds: Callable[[str], float]) -> None:
    """Let links seem slow, and steps of a setting seem to take `seconds(name)`."""

    def step_times(self: ChoiceSession, exposed_s: float) -> StepTimes:
        step_s = seconds(self.explanation.chosen)
        return StepTimes(step_s, step_s - COMPUTE_S, COMPUTE_S / 4, COMPUTE_S / 4)

    monkeypatch.setattr(sessions, "measure_links", slow_links)
    monkeypatch.setattr(ChoiceSession, "_step_times", step_times)


def compressed_is_fast(name: str) -> float:
    """For `pretend`."""
    return 0.1 if name == "gradient_allreduce" else 0.02 if name == FAST else 0.03


def nothing_is_faster(name: str) -> float:
    """For `pretend`."""
    return 0.1


def until_settled(training: Training) -> Explanation:
    """Make steps until the choice is made."""
    while bagua.explain(training.model).phase != "settled":
        assert training.made < MOST_STEPS, bagua.explain(training.model)
        training.steps(1)
    return bagua.explain(training.model)
