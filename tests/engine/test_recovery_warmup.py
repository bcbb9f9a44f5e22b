"""A rank is lost before, at and after the switch of a warm-up from averaged gradients to local steps."""

from __future__ import annotations

from typing import Any

import pytest

import bagua
from bagua.algorithms import DiLoCo, LocalSGD, SparseLoCo, Warmup
from tests.engine.test_recovery_rounds import INTERVAL, ROUNDS, SIZE, check, run

#: What a rank does: two steps of the warm-up, of which "apply" asks whether the mean gradients count; then intervals.
WARM = ["start", "apply"] * INTERVAL
POINTS = WARM + ["start"] * INTERVAL + ["launched", "exchanged", "finish", "committed"]
ALGORITHMS: dict[str, bagua.Algorithm] = {
    "local_sgd": LocalSGD(communication_interval=INTERVAL),
    "diloco": DiLoCo(communication_interval=INTERVAL),
    "sparse_loco": SparseLoCo(communication_interval=INTERVAL, keep=0.0),
}


def furthest(held: int) -> int:
    """The last point that a rank reaches while another one does not go on from its point `held`."""
    for at in range(held + 1, len(POINTS)):
        if POINTS[at] == "apply":
            return at - 1  # its backward pass waits
        if POINTS[at] == "launched":
            return at
    return len(POINTS) - 1


def pairs() -> list[tuple[int, int | None]]:
    """When a rank dies and another one holds, so that each gets there whatever the other one does."""
    found: list[tuple[int, int | None]] = [(dies, None) for dies in range(len(POINTS))]
    for dies in range(len(POINTS)):
        for holds in range(len(POINTS)):
            if dies <= furthest(holds) and holds <= furthest(dies):
                found.append((dies, holds))
    return found


def lose(
    monkeypatch: pytest.MonkeyPatch, store: str, name: str, place: int, dies: int, holds: int | None, after: int = -1
) -> Any:
    """Train through the switch; the survivors must agree."""
    algorithm = Warmup(INTERVAL, "gradient_allreduce", ALGORITHMS[name])
    script, ends = run(monkeypatch, store, algorithm, place, dies, holds, after=after)
    if name == "sparse_loco":  # residuals differ
        ends = [
            {**end, "kept": {key: each for key, each in end["kept"].items() if key[0] != "residual"}} for end in ends
        ]
    check(script, ends, drops=True)
    return script, ends


LAST, AHEAD = 2 * INTERVAL - 1, 2 * INTERVAL + 1
CHOSEN = [
    ("local_sgd", 1, None),  # in the warm-up
    ("local_sgd", LAST, None),  # in its last step, which may count on a survivor
    ("local_sgd", LAST + 1, None),  # at the first local step
    ("diloco", AHEAD, LAST),  # local steps are made, by a rank that has applied a step that another one lacks
    ("sparse_loco", AHEAD, LAST),
    ("diloco", AHEAD + 1, AHEAD),  # after it, as without a warm-up
]


@pytest.mark.parametrize(("name", "dies", "holds"), CHOSEN)
def test_a_rank_is_lost(monkeypatch: pytest.MonkeyPatch, store: str, name: str, dies: int, holds: int | None) -> None:
    _, ends = lose(monkeypatch, store, name, 2, dies, holds)
    if name == "local_sgd":  # every step that counts has moved each rank by one, wherever
        assert ends[0]["weights"].sum().item() == pytest.approx(ROUNDS * INTERVAL, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "holds"), pairs())
@pytest.mark.parametrize(("name", "place"), [("diloco", 0), ("diloco", 2), ("local_sgd", 1)])
def test_a_rank_is_lost_anywhere(
    monkeypatch: pytest.MonkeyPatch, store: str, name: str, place: int, dies: int, holds: int | None
) -> None:
    lose(monkeypatch, store, name, place, dies, holds)


def test_a_rank_that_lacks_the_last_step_of_the_warm_up_takes_over_the_outer_state(
    monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """The one that it follows has moved from its anchor already, so a new anchor would be another one."""
    script, ends = lose(monkeypatch, store, "diloco", 2, AHEAD, LAST, after=AHEAD)
    assert sorted(script.members.reports[0].values()) == [INTERVAL - 1, INTERVAL], "the test shows something"
    assert {key[0] for key in ends[0]["kept"]} == {"anchor", "momentum"}
    assert len(ends) == SIZE - 1
