"""Asynchronous model averaging: it mixes, it never moves the mean, and nobody ever waits for anybody."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
import bagua.engine.launcher
from bagua.algorithms import AsyncModelAverage, Warmup
from bagua.comm.team import Team
from bagua.engine.gate import Gate
from bagua.exchanges import AllReduce
from tests.algorithms.quadratic import N, Quadratic, flat, start, target, targets
from tests.rank_pool import RankPool
from tests.rank_threads import _run, run_teams, teams

LR = 0.01
PATIENCE_S = 20.0


class Drift(Quadratic):
    """The gradient is the target itself, whatever the weights are."""

    def forward(self, target: Tensor) -> Tensor:
        return (flat(self) * target).sum()


class Run:
    """One rank's training loop."""

    def __init__(self, team: Any, make: Callable[[], nn.Module] = Drift, algorithm: Any = "async", **options: Any):
        self.team, self.steps, self.model = team, 0, make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        if algorithm == "async":
            options.setdefault("sync_interval_ms", 0)
        bagua.distribute(self.model, self.optimizer, algorithm, process_group=team, **options)

    def train(self, steps: int = 1, pause_s: float = 0.0) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.data()).backward()
            self.optimizer.step()
            self.steps += 1
            time.sleep(pause_s)

    def data(self) -> Tensor:
        return torch.tensor(target(self.team.rank, self.steps) + self.team.rank, dtype=torch.float32)

    def train_until(self, done: Callable[[], bool], pause_s: float = 0.001) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, (self.team.rank, bagua.stats(self.model))
            self.train(1, pause_s)

    @property
    def rounds(self) -> int:
        series = bagua.stats(self.model).extra.get("round_s")
        return series.count if series else 0

    def train_rounds(self, more: int) -> None:
        goal = self.rounds + more
        self.train_until(lambda: self.rounds >= goal)

    def x(self) -> np.ndarray:
        return flat(self.model).detach().double().numpy().copy()

    def local(self) -> np.ndarray:
        """Where this rank's own gradients would have taken it."""
        return start() - LR * sum(target(self.team.rank, step) + self.team.rank for step in range(self.steps))


def together(size: int) -> Callable[[], None]:
    """A bounded barrier for threads."""
    barrier = threading.Barrier(size)
    return lambda: barrier.wait(PATIENCE_S) and None


@pytest.mark.parametrize(
    ("size", "nodes", "hierarchical"),
    [
        (1, None, False),
        (2, None, False),
        (3, None, False),
        (4, [0, 0, 0, 1], True),
        (4, [0, 0, 1, 1], False),
        (3, [0, 1, 1], True),
    ],
)
def test_it_mixes_and_keeps_the_mean(size: int, nodes: list[int] | None, hierarchical: bool) -> None:
    """After the last round the mean of all ranks is what their own gradients made of it, in fp32."""

    def rank_main(team: Team) -> tuple[np.ndarray, np.ndarray, bagua.Stats, np.ndarray]:
        run = Run(team, hierarchical=hierarchical, bucket_bytes=16)
        if size == 1:
            run.train(5)
        else:
            run.train_rounds(10)
        bagua.abort(run.model)
        x, stats = run.x(), bagua.stats(run.model)
        bagua.average(run.model)
        equal = run.x()
        bagua.detach(run.model)
        assert np.array_equal(equal, run.x())
        return x, run.local(), stats, equal

    results = run_teams(size, rank_main, nodes=nodes)
    x, local = (np.stack([result[i] for result in results]) for i in (0, 1))
    assert np.abs(x.mean(0) - local.mean(0)).max() < 2e-5
    for _, _, stats, equal in results:
        assert np.array_equal(equal, results[0][3])
        assert np.abs(equal - local.mean(0)).max() < 2e-5
        assert not stats.notices
        if size > 1:
            assert stats.num_buckets > 1
            assert stats.extra["round_s"].count == results[0][2].extra["round_s"].count >= 10
            staleness = stats.extra["staleness_steps"]
            assert 1 <= staleness.mean <= staleness.max <= stats.steps
            assert stats.total.bytes_sent > 0 and stats.total.comm_s > 0
    if size > 1:
        assert np.linalg.norm(x - x.mean(0)) < 0.5 * np.linalg.norm(local - local.mean(0))


def test_consensus_is_bounded() -> None:
    """The ranks drift apart by LR sqrt(N) per step; the distance stays that of a few steps, not of all."""

    def rank_main(team: Team) -> tuple[np.ndarray, int, float]:
        run = Run(team)
        run.train_until(lambda: run.rounds >= 30 and run.steps >= 200)
        bagua.abort(run.model)
        return run.x(), run.steps, bagua.stats(run.model).extra["staleness_steps"].max

    results = run_teams(2, rank_main)
    steps = max(steps for _, steps, _ in results)
    stale = max(stale for *_, stale in results)
    bound = LR * 3 * np.sqrt(N) * (2 * stale + abs(results[0][1] - results[1][1]) + 2)
    assert np.linalg.norm(results[0][0] - results[1][0]) < bound
    assert steps >= 200


def test_loss_falls_to_that_of_the_mean() -> None:
    def rank_main(team: Team) -> np.ndarray:
        run = Run(team, Quadratic)
        run.data = lambda: torch.tensor(target(team.rank, 0), dtype=torch.float32)  # type: ignore[method-assign]
        run.train_until(lambda: run.rounds >= 40 and run.steps >= 800, 0.0005)
        bagua.average(run.model)
        return run.x()

    x = run_teams(2, rank_main)[0]
    optimum = targets(2, 0).mean(0)
    assert np.linalg.norm(x - optimum) < 0.2 * np.linalg.norm(start() - optimum)


def test_nobody_waits_for_a_straggler() -> None:
    ready, finished = together(3), threading.Event()

    def rank_main(team: Team) -> tuple[int, bagua.Stats]:
        run = Run(team)
        run.train(1)
        ready()
        if team.rank == 2:
            run.train(20, pause_s=0.03)
            finished.set()
        else:
            run.train_until(finished.is_set, 0.003)
        return run.steps, bagua.stats(run.model)

    results = run_teams(3, rank_main)
    (fast, _), (_, _), (slow, _) = results
    assert slow == 21 and fast > 2 * slow
    for _, stats in results:
        assert stats.extra["round_s"].count >= 5
        assert stats.total.exposed_s < 0.05
    assert results[0][1].extra["staleness_steps"].mean > results[2][1].extra["staleness_steps"].mean


def test_evaluation_accumulation_and_loose_forward_passes() -> None:
    """The traps of an implementation that takes a lock in forward and gives it back in backward."""
    evaluated, ready = threading.Event(), together(2)

    def rank_main(team: Team) -> tuple[np.ndarray, np.ndarray]:
        run = Run(team)
        run.train_rounds(2)
        for _ in range(3):
            run.model(run.data())  # in training mode, never followed by a backward pass
        with bagua.no_sync(run.model):
            run.train(2)
        run.train_rounds(2)
        ready()
        if team.rank == 0:
            run.model.eval()
            with torch.no_grad():
                for _ in range(20):
                    run.model(run.data())
                    time.sleep(0.01)
            run.model.train()
            evaluated.set()
        else:
            before = run.steps
            run.train_until(evaluated.is_set)
            assert run.steps > before + 5
        run.train_rounds(2)
        bagua.abort(run.model)
        return run.x(), run.local()

    results = run_teams(2, rank_main)
    x, local = (np.stack([result[i] for result in results]) for i in (0, 1))
    assert np.abs(x.mean(0) - local.mean(0)).max() < 2e-5


@pytest.mark.parametrize("hierarchical", [False, True])
def test_uneven_numbers_of_steps(hierarchical: bool) -> None:
    first_is_gone = threading.Event()

    def rank_main(team: Team) -> tuple[str, ...]:
        run = Run(team, hierarchical=hierarchical)
        run.train_rounds(2)
        if team.rank == 1:
            bagua.detach(run.model)
            first_is_gone.set()
            return ()
        assert first_is_gone.wait(PATIENCE_S)
        run.train_until(lambda: bool(bagua.stats(run.model).notices))
        run.train(20)
        assert bagua.stats(run.model).total.exposed_s < 0.05
        notices = bagua.stats(run.model).notices
        bagua.detach(run.model)
        return notices

    results = run_teams(3, rank_main, nodes=[0, 0, 1])
    assert "rank 1 has left" in results[0][0] + results[2][0]


def test_abort_and_resume_at_different_steps() -> None:
    ready = together(2)

    def rank_main(team: Team) -> tuple[np.ndarray, np.ndarray, list[int]]:
        run, seen = Run(team), []
        for turn in range(2):
            run.train_rounds(3)
            run.train(1 + 3 * team.rank + turn)
            bagua.abort(run.model)
            seen.append(run.rounds)
            run.train(2 + 4 * (1 - team.rank))
            assert run.rounds == seen[-1], "nothing begins after abort"
            ready()
            bagua.resume(run.model)
            run.train(team.rank)
            if turn:
                bagua.resume(run.model)  # once more does nothing
        run.train_rounds(3)
        bagua.abort(run.model)
        bagua.abort(run.model)
        seen.append(run.rounds)
        ready()
        return run.x(), run.local(), seen

    (x0, local0, seen0), (x1, local1, seen1) = run_teams(2, rank_main)
    assert seen0 == seen1, "the ranks agree which rounds took place"
    assert np.abs((x0 + x1 - local0 - local1) / 2).max() < 2e-5


def test_one_rank_aborts_while_the_other_trains() -> None:
    resumed, enough = threading.Event(), threading.Event()

    def rank_main(team: Team) -> int:
        run = Run(team)
        run.train_rounds(2)
        if team.rank == 0:
            bagua.abort(run.model)
            assert enough.wait(PATIENCE_S)
            bagua.resume(run.model)
            resumed.set()
        else:
            run.train(30)
            enough.set()
            run.train_until(resumed.is_set)
        run.train_rounds(2)
        return run.rounds

    assert all(rounds >= 4 for rounds in run_teams(2, rank_main))


def test_average_names_who_stays_away() -> None:
    failed, ready = threading.Event(), together(2)

    def rank_main(team: Team) -> None:
        run = Run(team)
        run.train_rounds(1)
        if team.rank == 0:
            with pytest.raises(bagua.CommunicationError, match=r"bagua.average\(\): rank 1 did not come within 1 s"):
                bagua.average(run.model)
            failed.set()
        run.train_until(failed.is_set)
        run.train_rounds(2)
        ready()

    _run(teams(2, timeout_s=1), rank_main, (), 60)


def test_switching_back_and_forth() -> None:
    """With rounds under way. In between replicas are equal, as gradient all-reduce has them."""

    def rank_main(team: Team) -> tuple[list[np.ndarray], int]:
        run, seen = Run(team), []
        for _ in range(2):
            run.train(5)
            bagua.average(run.model)
            run.train(3)
            bagua.distribute(run.model, run.optimizer, "gradient_allreduce")
            run.train(3)
            seen.append(run.x())
            bagua.distribute(run.model, run.optimizer, "async", sync_interval_ms=0)
            run.train_rounds(2)
        return seen, run.rounds

    (first, _), (second, _) = run_teams(2, rank_main)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("algorithm", ["option", "composition"])
def test_warmup_counts_training_steps_only(algorithm: str) -> None:
    steps, size = 6, 2
    chosen: Any = AsyncModelAverage(sync_interval_ms=1e6, warmup_steps=steps)
    if algorithm == "composition":
        chosen = Warmup(steps, "gradient_allreduce", AsyncModelAverage(sync_interval_ms=1e6))

    def rank_main(team: Team) -> list[np.ndarray]:
        run, seen = Run(team, algorithm=chosen), []
        for _ in range(steps + 2):
            run.train()
            seen.append(run.x())
            run.model.eval()
            for _ in range(3):
                run.model(run.data())
            run.model.train()
            run.model(run.data())
        assert not run.rounds or run.steps > steps
        return seen

    first, second = run_teams(size, rank_main)
    x = start()
    for step in range(steps):
        x = x - LR * (targets(size, step).mean(0) + 0.5)
        assert np.array_equal(first[step], second[step])
        assert np.abs(first[step] - x).max() < 1e-5
    assert not np.array_equal(first[steps], second[steps]), "from here on every rank steps alone"
    assert np.abs(second[steps] - second[steps - 1] + LR * (target(1, steps) + 1)).max() < 1e-5


def test_abort_during_warmup_holds_after_it() -> None:
    def rank_main(team: Team) -> None:
        run = Run(team, warmup_steps=3)
        run.train(1)
        bagua.abort(run.model)
        run.train(6)
        assert run.rounds == 0
        bagua.resume(run.model)
        run.train_rounds(2)
        assert bagua.stats(run.model).steps == run.steps

    run_teams(2, rank_main)


class Broken(AllReduce):
    """Fails on rank 0 after a few rounds."""

    def run(self, x_N, state, groups, step) -> None:
        if groups.rank == 0 and step >= 3:
            raise ZeroDivisionError("deliberate")
        super().run(x_N, state, groups, step)


class Fails(AsyncModelAverage):
    """Uses `Broken`."""

    exchange = Broken()


def test_a_failed_exchange_is_told_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def rank_main(team: Team) -> tuple[tuple[str, ...], int]:
        run = Run(team, algorithm=Fails(sync_interval_ms=0))
        run.train_until(lambda: bool(bagua.stats(run.model).notices))
        run.train(5)
        after = run.rounds
        run.train(20)
        assert run.rounds == after
        return bagua.stats(run.model).notices, run.steps

    with caplog.at_level(logging.INFO, "bagua"):
        first, second = run_teams(2, rank_main)
    assert "ZeroDivisionError: deliberate" in first[0][0] and "goes on without" in first[0][0]
    assert second[0]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert any("ZeroDivisionError" in record.getMessage() for record in warnings)


def test_a_rank_that_does_not_come_is_named_and_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bagua.engine.launcher, "_PATIENCE_S", 0.1)
    named = threading.Event()

    def rank_main(team: Team) -> tuple[str, ...]:
        run = Run(team)
        if team.rank == 1:
            assert named.wait(PATIENCE_S)
        else:
            run.train_until(lambda: bool(bagua.stats(run.model).notices))
            named.set()
        run.train_rounds(2)
        return bagua.stats(run.model).notices

    assert "rank 1 did not come within 0.1 s and is still awaited" in run_teams(2, rank_main)[0][0]


def test_loading_drops_the_round_under_way() -> None:
    loaded = threading.Event()

    def rank_main(team: Team) -> None:
        run = Run(team)
        if team.rank == 1:
            assert loaded.wait(PATIENCE_S)
        else:
            run.train(1)  # its snapshot waits for rank 1
            weights, state = {k: v.clone() for k, v in run.model.state_dict().items()}, bagua.state_dict(run.model)
            run.train(5)
            run.model.load_state_dict(weights)
            bagua.load_state_dict(run.model, state)
            run.steps, want = 1, run.x()
            assert bagua.stats(run.model).steps == 1
            bagua.abort(run.model)
            assert np.array_equal(run.x(), want)
            assert np.abs(want - run.local()).max() < 1e-5
            bagua.resume(run.model)
            loaded.set()
        run.train_rounds(2)

    run_teams(2, rank_main)


def test_a_dropped_module_ends_its_lanes() -> None:
    def lanes() -> int:
        return sum(thread.name == "bagua-lane" for thread in threading.enumerate())

    gc.collect()
    before = lanes()

    def rank_main(team: Team) -> None:
        run = Run(team)
        if team.rank == 0:
            run.train(3)  # waits for rank 1 forever
        del run

    run_teams(2, rank_main)
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while lanes() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ends_of_processes() -> None:
    """Together, early, by detaching, killed, by an exception; with rounds in flight every time."""
    scenarios = ["together", "plain together", "early", "detach", "killed", "killed first", "raise"]
    script = Path(__file__).parent / "async_ranks.py"
    done = subprocess.run(
        [sys.executable, str(script), "2", *scenarios],
        env={**os.environ, "PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    trials = {trial["scenario"]: trial for trial in map(json.loads, done.stdout.splitlines())}
    want = {"killed": [0, 9], "killed first": [9, 0], "raise": [0, 1]}
    for scenario, trial in trials.items():
        assert trial["codes"] == want.get(scenario, [0, 0]), trial
        assert not any("terminate" in text for text in trial["stderr"]), trial
    assert list(trials) == scenarios
    for scenario in ("detach", "raise"):
        assert "rank 1 has left; training goes on" in trials[scenario]["stderr"][0]
    assert "training goes on without" in trials["killed first"]["stderr"][1]
    assert "ValueError: boom" in trials["raise"]["stderr"][1]


@pytest.mark.parametrize("giving_up", [0.0, 0.3])
def test_gate_verdicts_are_unanimous(giving_up: float) -> None:
    """Whatever the timing, a meeting takes place for all or for none."""
    size, meetings = 4, 60
    members = teams(size)
    rng = [np.random.default_rng(rank) for rank in range(size)]

    def rank_main(team: Team) -> list[bool]:
        gate, seen = Gate(team.store, "gate", team.rank, team.size, PATIENCE_S), []
        for _ in range(meetings):
            patience = rng[team.rank].random() * 0.004 if rng[team.rank].random() < giving_up else 99
            end = time.monotonic() + patience
            time.sleep(rng[team.rank].random() * 0.002)
            seen.append(gate.enter(lambda end=end: time.monotonic() > end))
        gate.leave()
        assert not gate.enter(lambda: False) and gate.over
        return seen

    results = _run(members, rank_main, (), 30)
    assert all(seen == results[0] for seen in results)
    assert any(results[0]) and (giving_up > 0) == (not all(results[0]))
    assert members[0].store.num_keys() < 3 * meetings


def test_gate_is_over_when_a_rank_leaves_or_the_store_is_gone() -> None:
    first, second = (Gate(team.store, "gate", team.rank, 2, PATIENCE_S) for team in teams(2))
    second.leave()
    second.leave()
    assert not first.enter(lambda: False)
    assert first.over and first.remark == "rank 1 has left" and not first.urgent
    gone = Gate(Gone(), "gate", 0, 2, PATIENCE_S)
    assert not gone.enter(lambda: False)
    assert gone.over and "probably gone: Broken pipe" in gone.remark and gone.urgent


class Gone:
    """A store whose server is no more."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("Broken pipe")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AsyncModelAverage(sync_interval_ms=-1), ("sync_interval_ms", "-1")),
        (lambda: AsyncModelAverage(sync_interval_ms=float("nan")), ("sync_interval_ms", "nan")),
        (lambda: AsyncModelAverage(sync_interval_ms="1"), ("sync_interval_ms", "'1'")),  # type: ignore[arg-type]
        (lambda: AsyncModelAverage(warmup_steps=-1), ("warmup_steps", "-1")),
        (lambda: AsyncModelAverage(warmup_steps=1.5), ("warmup_steps", "1.5")),  # type: ignore[arg-type]
        (lambda: bagua.algorithms.get("async", peers="all"), ("peers", "sync_interval_ms")),
    ],
)
def test_bad_options(make: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_simulation_refuses() -> None:
    with pytest.raises(ValueError, match="AsyncModelAverage.*time"):
        bagua.simulate("async", ranks=2, model=Drift, loss=lambda model, rank, step: model(torch.zeros(N)), steps=1)


def facade() -> list[int]:
    import bagua.torch_api
    from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm
    from bagua.torch_api.data_parallel import DistributedDataParallel

    with pytest.raises(ValueError, match="peer_selection_mode"):
        AsyncModelAverageAlgorithm("shift_one")
    algorithm = bagua.torch_api.algorithms.Algorithm.init("async", sync_interval_ms=0, warmup_steps=2)
    assert algorithm.core == AsyncModelAverage(sync_interval_ms=0, warmup_steps=2)
    assert AsyncModelAverageAlgorithm().core == AsyncModelAverage()
    counts = []
    for wrap in (False, True):
        model: Any = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        chosen = AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=2)
        if wrap:
            model = DistributedDataParallel(model, optimizers=[optimizer], algorithm=chosen)
        else:
            model.with_bagua([optimizer], chosen)
        inner = model.module if wrap else model
        deadline = time.monotonic() + PATIENCE_S
        model.bagua_algorithm.resume(model)

        def train_rounds(goal: int, model: Any = model, optimizer: Any = optimizer, inner: Any = inner) -> None:
            while (series := bagua.stats(inner).extra.get("round_s")) is None or series.count < goal:
                assert time.monotonic() < deadline  # noqa: B023
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                time.sleep(0.001)

        train_rounds(2)
        model.bagua_algorithm.abort(model)
        counts.append(bagua.stats(inner).extra["round_s"].count)
        model.bagua_algorithm.resume(model)
        train_rounds(counts[-1] + 2)
        model.bagua_algorithm.abort(model)
        dist.barrier()
    return counts


def test_facade(pool: RankPool) -> None:
    first, second = pool.run(2, facade)
    assert len(first) == len(second) == 2
