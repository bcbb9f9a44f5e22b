"""What a virtual machine's host disturbed is measured again, and the calmest measurement counts."""

from __future__ import annotations

from collections.abc import Sequence

from bagua.bench.runner import Outcome
from bagua.bench.tradeoff import calmest

CASES = ((0, "off"), (1, "ddp"), (2, "bytegrad"), (3, "off"))


def run(plan: Sequence[dict[int, float | None]], again: int) -> tuple[list[Outcome], list[list[int]], list[str]]:
    """`plan` says for each round how much was stolen from each case; None: it fails."""
    asked: list[list[int]] = []
    told: list[str] = []

    def measured(cases: Sequence[tuple[int, str]]) -> list[Outcome]:
        taken = plan[len(asked)]
        asked.append([number for number, _ in cases])
        return [
            Outcome(number, name, [], "broken")
            if taken[number] is None
            else Outcome(number, name, [{"stolen": taken[number], "round": len(asked)}] * 2)
            for number, name in cases
        ]

    return calmest(measured, CASES, again, told.append), asked, told


def rounds(outcomes: Sequence[Outcome]) -> list[int]:
    return [outcome.ranks[0]["round"] if outcome.ranks else 0 for outcome in outcomes]


def test_a_calm_machine_measures_once() -> None:
    outcomes, asked, told = run([dict.fromkeys(range(4), 0.02)], 5)
    assert asked == [[0, 1, 2, 3]] and told == [] and rounds(outcomes) == [1, 1, 1, 1]


def test_only_what_was_disturbed_is_repeated() -> None:
    outcomes, asked, told = run([{0: 0.0, 1: 0.5, 2: 0.0, 3: 0.04}, {1: 0.2, 3: 0.1}, {1: 0.4, 3: 0.0}], 2)
    assert asked == [[0, 1, 2, 3], [1, 3], [1, 3]]
    assert rounds(outcomes) == [1, 2, 1, 3]
    assert told[0].endswith("took cores: ddp, off")


def test_failures_are_kept_as_they_came() -> None:
    outcomes, asked, _ = run([{0: 0.0, 1: None, 2: 0.5, 3: 0.0}, {2: None}], 1)
    assert asked == [[0, 1, 2, 3], [2]]
    assert outcomes[1].error == "broken" and not outcomes[2].error
    assert rounds(outcomes) == [1, 0, 1, 1]


def test_never_if_not_asked_to() -> None:
    _, asked, _ = run([dict.fromkeys(range(4), 0.9)], 0)
    assert len(asked) == 1
