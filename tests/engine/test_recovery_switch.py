"""A rank is lost around the switch of a warm-up from averaged gradients to gossip, background averaging or 0/1 Adam."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import AsyncModelAverage, Decentralized, LowPrecisionDecentralized, Warmup, ZeroOneAdam
from bagua.algorithms.base import LostStep
from bagua.engine.hooks import attachments
from tests.engine.test_recovery_rounds import INTERVAL, ROUNDS, SIZE, Script, run

TOTAL = ROUNDS * INTERVAL
#: What a rank comes to, and the place of the point that another one must have left before this one gets there. In a
#: warm-up "apply" asks whether the mean gradients count, which needs the parts of all.
Points = list[tuple[str, int]]


def warm(steps: int) -> Points:
    """Steps of averaged gradients."""
    return [point for step in range(steps) for point in (("start", -1), ("apply", 2 * step))]


@dataclass(frozen=True)
class Switch:
    """A warm-up.

    Attributes:
        then: what follows.
        steps: of the warm-up.
        points: of a rank, up to two steps or an interval after the switch.
        make_optimizer: for the parameters.
    """

    then: bagua.Algorithm
    steps: int
    points: Points
    make_optimizer: Any

    @property
    def last(self) -> int:
        """The point at which the last step of the warm-up is to count."""
        return 2 * self.steps - 1

    def furthest(self, held: int) -> int:
        """The last point that a rank reaches while another one does not go on from its point `held`."""
        blocked = (at for at in range(held + 1, len(self.points)) if self.points[at][1] >= held)
        return next(blocked, len(self.points)) - 1

    @property
    def pairs(self) -> list[tuple[int, int | None]]:
        """When a rank dies and another one holds, so that each gets there whatever the other one does."""
        every = range(len(self.points))
        both = [(a, b) for a in every for b in every if a <= self.furthest(b) and b <= self.furthest(a)]
        return [*((dies, None) for dies in every), *both]


def sgd(params: Any) -> torch.optim.Optimizer:
    """Steps of length 1."""
    return torch.optim.SGD(params, lr=1.0)


def zero_one_adam(params: Any) -> torch.optim.Optimizer:
    """Four steps that average, then intervals of two."""
    return bagua.optim.ZeroOneAdam(params, lr=0.1, var_freeze_step=2, local_step_scaler=2, local_step_clipper=2)


SWITCHES = {
    "decentralized": Switch(Decentralized(), 2, warm(4), sgd),
    # A rank waits for the others after its step, not within it.
    "low_precision": Switch(
        LowPrecisionDecentralized(), 2, [*warm(2), ("start", -1), ("apply", -1), ("start", 5), ("apply", -1)], sgd
    ),
    # With the lane of its own all ranks meet once at the switch; then nobody waits.
    "async": Switch(AsyncModelAverage(sync_interval_ms=1e9), 2, [*warm(2), ("start", 3), ("start", -1)], sgd),
    "zero_one_adam": Switch(
        ZeroOneAdam(codec="minmax_uint8"), 4,
        [*warm(4), *(("start", -1),) * 2, ("launched", -1), ("exchanged", 10), ("finish", -1), ("committed", -1)],
        zero_one_adam,
    ),
}  # fmt: skip


class Free(Script):
    """Ranks that wait for nobody train on until they have other groups, without averaging: that would move the sums."""

    def goes_on(self, model: nn.Module) -> bool:
        """As `Script.goes_on`."""
        changed = bool(bagua.stats(model).membership)
        assert attachments[model].engine.state.paused or not changed, "forgotten with the engine before"
        bagua.pause(model)
        return super().goes_on(model) or not changed


def lose(
    monkeypatch: pytest.MonkeyPatch, store: str, name: str, place: int, dies: int, holds: int | None, after: int = -1
) -> Script:
    """Train through the switch; the survivors must make all steps, and none that counts may be missing."""
    switch, made = SWITCHES[name], []

    def make_optimizer(params: Any) -> torch.optim.Optimizer:
        made.append(switch.make_optimizer(params))
        return made[-1]

    algorithm = Warmup(switch.steps, "gradient_allreduce", switch.then)
    kind = Free if name == "async" else Script
    script, ends = run(monkeypatch, store, algorithm, place, dies, holds, make_optimizer, kind, after)
    assert len(ends) == SIZE - 1
    for end in ends:
        assert end["steps"] == TOTAL or (name == "async" and end["steps"] > TOTAL)
        assert [change.lost for change in end["changes"] if change.lost] == [(script.names[place],)]
    if name == "zero_one_adam":
        assert torch.equal(ends[0]["weights"], ends[1]["weights"])
        assert sorted(each.num_steps for each in made)[-2:] == [TOTAL] * 2, "all that the optimizers count"
        return script
    # Each step that counts adds one to the sum of a rank's weights, wherever; a mean of ranks at one step keeps it.
    held = sorted(script.members.reports[0].values())
    lacks = [end["steps"] - end["weights"].sum().item() for end in ends]
    # A rank goes on without a step of gossip. The other one may only have begun it, alone: it has ended no more then.
    begins_alone = switch.then.lost_step is LostStep.KEEP
    left_out = switch.steps <= held[0] and (held[0] < held[1] or begins_alone)
    coarse = 0.02 if name == "low_precision" else 1e-4  # what the codec loses
    # With `async` one that gives its weights has made more steps by then than it has told.
    most = math.inf if name == "async" else coarse
    assert all(-most < each < left_out + coarse for each in lacks), (lacks, held)
    return script


CHOSEN = [
    *((name, 1, None) for name in SWITCHES),  # in the warm-up
    *((name, switch.last, None) for name, switch in SWITCHES.items()),  # its last step may count on a survivor
    *((name, switch.last + 1, None) for name, switch in SWITCHES.items()),  # in the first step after it
    # Another one has not applied the last step of the warm-up; the rest may be beyond it.
    *((name, switch.furthest(switch.last), switch.last) for name, switch in SWITCHES.items()),
    ("decentralized", 7, 7),
    ("low_precision", 5, 5),
    ("async", 0, None),  # before the first gradients, when no part of the warm-up is in force yet
    ("zero_one_adam", 1, 1),  # the first step counts on one survivor only
]


@pytest.mark.parametrize(("name", "dies", "holds"), CHOSEN)
def test_a_rank_is_lost(monkeypatch: pytest.MonkeyPatch, store: str, name: str, dies: int, holds: int | None) -> None:
    lose(monkeypatch, store, name, 2, dies, holds)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("name", "dies", "holds"), [(name, *pair) for name, switch in SWITCHES.items() for pair in switch.pairs]
)
def test_a_rank_is_lost_anywhere(
    monkeypatch: pytest.MonkeyPatch, store: str, name: str, place: int, dies: int, holds: int | None
) -> None:
    lose(monkeypatch, store, name, place, dies, holds)


@pytest.mark.parametrize("name", ["decentralized", "low_precision", "zero_one_adam"])
def test_one_rank_lacks_the_last_step_of_the_warm_up(monkeypatch: pytest.MonkeyPatch, store: str, name: str) -> None:
    """Another one is beyond the switch by then. The sums of `lose` show that its step is not lost."""
    switch = SWITCHES[name]
    beyond = switch.furthest(switch.last)
    script = lose(monkeypatch, store, name, 2, beyond, switch.last, after=beyond)
    first, second = sorted(script.members.reports[0].values())
    assert first == switch.steps - 1 and second >= switch.steps, "the test shows something"


class Averaging(Script):
    """Ranks train on until some rounds were over in the groups that they have without the lost one."""

    def goes_on(self, model: nn.Module) -> bool:
        """As `Script.goes_on`."""
        stats = bagua.stats(model)
        over = stats.extra["corrected"].count if "corrected" in stats.extra else 0
        if any(change.lost for change in stats.membership):
            self.here.until = getattr(self.here, "until", over + 5)
        return over < getattr(self.here, "until", math.inf) and stats.steps < 100_000


def test_moments_of_background_rounds_are_corrected_after_a_loss(monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    made = []

    def adamw(params: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(params, lr=0.001))
        return made[-1]

    _, ends = run(monkeypatch, store, AsyncModelAverage(), 2, 3, None, adamw, Averaging)
    assert len(ends) == SIZE - 1
    for end in ends:
        assert end["steps"] < 100_000 and bool(end["weights"].isfinite().all())
    for optimizer in made:
        (state,) = optimizer.state.values()
        assert bool(state["exp_avg"].isfinite().all()) and bool((state["exp_avg_sq"] >= 0).all())
