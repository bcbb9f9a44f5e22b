"""When the engine tunes: after a hand-over or a fallback, with uneven inputs, from the environment; and when not."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import bagua
from bagua.autotune import Settings
from bagua.autotune.progress import Progress
from tests.autotune.training import QUICK, START, WIDTH, Training, engine_of, make_model
from tests.rank_threads import run_teams


def handing_over(team: Any) -> tuple[list[str], Progress]:
    phases = []
    algorithm = bagua.algorithms.Warmup(5, "gradient_allreduce", "bytegrad")
    training = Training(team, algorithm, autotune=QUICK, bucket_bytes=START)
    for _ in range(8):
        training.steps(1)
        phases.append(training.progress.phase)
    return phases, training.until_tuned().progress


def test_what_runs_after_a_hand_over_is_tuned() -> None:
    for phases, progress in run_teams(2, handing_over):
        assert phases[:4] == ["waiting"] * 4
        assert "warm-up" in phases[4:]
        assert progress.tuned == ("num_lanes",)


def falling_back(team: Any) -> tuple[Progress, str, Settings]:
    guard = bagua.Guard(every=12, min_cosine=1.0)
    training = Training(team, "bytegrad", autotune=QUICK, guard=guard, bucket_bytes=START).steps(20)
    engine = engine_of(training)
    return training.progress, engine.algorithm.name, engine.binding.settings


def test_a_fallback_is_tuned_anew() -> None:
    for progress, name, _ in run_teams(2, falling_back):
        assert name == "gradient_allreduce"
        assert progress.tuned == ("bucket_bytes", "part_bytes", "num_lanes")


def off(team: Any, algorithm: str, optimizer: Any = None) -> tuple[Progress | None, tuple[str, ...]]:
    model = make_model()
    made = optimizer(model.parameters()) if optimizer else torch.optim.SGD(model.parameters(), lr=0.01)
    bagua.distribute(model, made, algorithm, process_group=team, autotune=True)
    for _ in range(3):
        made.zero_grad()
        model(torch.ones(2, WIDTH)).square().mean().backward()
        made.step()
    stats = bagua.stats(model)
    bagua.detach(model)
    return stats.tuning, stats.notices


@pytest.mark.parametrize(
    ("algorithm", "size", "optimizer", "reason"),
    [
        ("gradient_allreduce", 1, None, "there is only one rank"),
        ("async", 2, None, "no step waits for the exchanges of 'async'"),
        (bagua.algorithms.DiLoCo(64), 2, None, "'diloco' exchanges only every 64 steps"),
        ("qadam", 2, bagua.optim.QAdam, "the steps of 'qadam' are not all alike"),
        ("bytegrad", 2, None, "no setting has an effect on this module"),
    ],
)
def test_where_nothing_can_be_tuned_that_is_said(algorithm: Any, size: int, optimizer: Any, reason: str) -> None:
    for progress, notices in run_teams(size, off, algorithm, optimizer):
        assert (progress.phase, progress.reason) == ("off", reason)
        assert f"autotune: not tuning: {reason}" in notices


def test_a_simulation_is_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")
    simulation = bagua.simulate(
        "gradient_allreduce",
        ranks=2,
        model=lambda: torch.nn.Linear(4, 4),
        loss=lambda module, rank, step: module(torch.ones(1, 4)).sum(),
        steps=3,
    )
    for stats in simulation.stats:
        assert stats.tuning is not None
        assert (stats.tuning.phase, stats.tuning.reason) == ("off", "simulated steps cannot be timed")


def test_a_dropped_module_is_freed_while_it_is_tuned() -> None:
    def train(team: Any) -> None:
        training = Training(team, autotune=QUICK, bucket_bytes=START).steps(6)
        gc.collect()
        gc.disable()
        try:
            ref = weakref.ref(engine_of(training))
            del training
            assert ref() is None
        finally:
            gc.enable()

    run_teams(2, train)


def test_plain_training_is_as_before() -> None:
    def train(team: Any) -> Any:
        training = Training(team).steps(3)
        assert engine_of(training).binding.tuning is None
        return bagua.stats(training.model).tuning

    assert run_teams(2, train) == [None, None]


def in_a_process() -> tuple[Progress, Tensor]:
    training = Training(None, rank=dist.get_rank(), bucket_bytes=START).until_tuned()
    return training.progress, training.steps(2).weights


def uneven() -> tuple[str, int, Tensor]:
    rank = dist.get_rank()
    training = Training(None, rank=rank, bucket_bytes=START, autotune={**QUICK, "max_turns": 20})
    with bagua.join(training.model):
        training.steps(5 if rank else 30)
    return training.progress.phase, bagua.stats(training.model).steps, training.weights


def test_ranks_that_have_run_out_of_inputs_follow(pool: Any) -> None:
    (first, steps, weights), (second, others, same) = pool.run(2, uneven, timeout_s=60)
    assert first == second == "done"
    assert steps == others == 30
    assert torch.equal(weights, same)


def test_the_launchers_environment_tunes(pool: Any) -> None:
    env = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0", "BAGUA_AUTOTUNE_MAX_SAMPLES": "6"}
    (first, weights), (second, others) = pool.run(2, in_a_process, env=env, timeout_s=60)
    assert first == second
    assert first.phase == "done"
    assert 2 <= first.num_samples <= 6
    assert torch.equal(weights, others)
