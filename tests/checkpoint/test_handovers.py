"""A state that was saved before or after another algorithm took over."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import bagua
from bagua.algorithms import ByteGrad, DiLoCo, LocalSGD, LowPrecisionDecentralized, PowerSGD, Warmup
from bagua.comm.team import Team
from bagua.contrib import SignSGD
from tests.checkpoint.runs import Case, Run
from tests.engine.training import equal
from tests.rank_threads import run_teams

STRICT = bagua.Guard(every=1, min_cosine=0.9999999)  # no codec is as good as that


def _there_and_back(first: Any, second: Any) -> Warmup:
    """Begins and ends with the same algorithm."""
    return Warmup(3, first, Warmup(6, second, first))


def make(case: Case, team: Team, options: dict[str, Any]) -> Run:
    run = Run.start(case, team)
    if options:
        bagua.distribute(run.model, run.optimizer, case.algorithm, bucket_bytes=2000, num_lanes=2, **options)
    setattr(run.model, "dropout", 0.0)  # noqa: B010  (threads share a generator)
    return run


def put(run: Run, state: dict[str, Any]) -> None:
    for name, value in run.objects.items():
        value.load_state_dict(copy.deepcopy(state[name]))  # an optimizer keeps the tensors
    bagua.load_state_dict(run.model, state["algorithm"])


def there_and_back(team: Team, case: Case, options: dict[str, Any], stop: int, steps: int) -> list[bool]:
    """Saved after `stop` of `steps`; loaded by the run itself, which has gone on, and by a fresh one."""
    run = make(case, team, options)
    run.train(range(stop), team.rank)
    saved = copy.deepcopy({key: value for key, value in run.state().items() if key != "random"})
    run.train(range(stop, steps), team.rank)
    want = {key: value for key, value in copy.deepcopy(run.state()).items() if key != "random"}
    put(run, saved)
    run.train(range(stop, steps), team.rank)
    back = {key: value for key, value in copy.deepcopy(run.state()).items() if key != "random"}
    bagua.detach(run.model)
    fresh = make(case, team, options)
    put(fresh, saved)
    fresh.train(range(stop, steps), team.rank)
    new = {key: value for key, value in copy.deepcopy(fresh.state()).items() if key != "random"}
    bagua.detach(fresh.model)
    return [equal(back, want), equal(new, want)]


@pytest.mark.parametrize(
    ("case", "options", "stop"),
    [
        (Case(Warmup(4, "gradient_allreduce", ByteGrad(codec="int4"))), {}, 2),
        (Case(Warmup(4, "gradient_allreduce", LowPrecisionDecentralized(overlap=True))), {}, 2),
        (Case(Warmup(4, "gradient_allreduce", LowPrecisionDecentralized())), {}, 5),
        (Case(ByteGrad(codec="int4")), {"guard": STRICT}, 3),
        (Case(_there_and_back("gradient_allreduce", DiLoCo(communication_interval=3))), {}, 1),
        (Case(_there_and_back(ByteGrad(codec="int4"), LocalSGD())), {}, 2),
        (Case(ByteGrad(codec="int4")), {}, 0),
        (Case(PowerSGD(rank=1, min_compression=1.0)), {}, 0),
        (Case(SignSGD()), {}, 0),
        (Case(DiLoCo(communication_interval=3)), {}, 0),
    ],
)
def test_there_and_back(case: Case, options: dict[str, Any], stop: int) -> None:
    assert run_teams(2, there_and_back, case, options, stop, 8) == [[True, True]] * 2


def astray(team: Team) -> str:
    run = make(Case(ByteGrad()), team, {})
    run.train(range(2), team.rank)
    with pytest.raises(ValueError, match="saved while Something ran") as caught:
        bagua.load_state_dict(run.model, {**bagua.state_dict(run.model), "bound": "Something"})
    bagua.detach(run.model)
    return str(caught.value)


def test_an_algorithm_out_of_nowhere_is_refused() -> None:
    assert all(run_teams(2, astray))
