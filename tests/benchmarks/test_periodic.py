"""The comparison of periodic algorithms runs, and its arithmetic is right. Its figures are not judged."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import bagua
from bagua import codecs
from bagua.algorithms import DiLoCo, Warmup, ZeroOneAdam
from bagua.codecs import Eden
from benchmarks.convergence.byte_gpt import TASKS, ByteGPT, Job, make_optimizers
from benchmarks.convergence.periodic import ROWS, Run, make_algorithm, summarise, table, train
from tests.algorithms.quadratic import N, follow, start, targets
from tests.rank_threads import run_teams


@pytest.mark.parametrize("row", ROWS)
def test_rows_are_algorithms(row: str) -> None:
    assert make_algorithm(row, 100).name == row.split(":")[0]


def test_a_row_names_options_and_warmup() -> None:
    made = make_algorithm("diloco:communication_interval=16:codec=int4:outer_momentum=0.5@0.25", 100)
    assert made == Warmup(25, "gradient_allreduce", DiLoCo(16, codec="int4", outer_momentum=0.5))
    with pytest.raises(ValueError, match="unheard_of"):
        make_algorithm("diloco:unheard_of=1", 100)


def test_rows_of_codecs_with_options_and_of_other_optimizers() -> None:
    made = make_algorithm("zero_one_adam:codec=eden/bits~2", 100)
    assert isinstance(made, ZeroOneAdam) and codecs.get(made.codec) == Eden(bits=2)
    params = list(ByteGPT(TASKS["small"]).parameters())
    (own,) = make_optimizers(made.name, params, TASKS["small"])
    assert isinstance(own, bagua.optim.ZeroOneAdam) and own.param_groups[0]["decoupled_weight_decay"]
    run = train(Job("small", "adamw", "qadam:codec=eden", 1, 2))
    assert run.optimizer == "adamw" and run.mb > 0


def test_muon_takes_the_matrices_of_the_blocks() -> None:
    task = TASKS["small"]
    params = list(ByteGPT(task).parameters())
    muon, adamw = make_optimizers("muon", params, task)
    held = [[p for group in each.param_groups for p in group["params"]] for each in (muon, adamw)]
    assert isinstance(muon, torch.optim.Muon) and len(held[0]) == 4 * task.layers
    assert sum(map(len, held)) == len(params)


@pytest.mark.parametrize(("delay", "every"), [(1, 1), (2, 2), (2, 3), (1, 4)])
def test_delayed_averages_are_the_oracles(delay: int, every: int) -> None:
    size, steps, lr = 3, 12, 0.1
    x, snapshot = np.tile(start(), (size, 1)), np.zeros((size, N))
    algorithm = make_algorithm(f"delayed:{delay=}:{every=}", steps)
    results = run_teams(size, partial(follow, bucket_bytes=8), algorithm, steps)
    for step in range(steps):
        x = x - lr * (x - targets(size, step))
        if step >= delay and (step - delay) % every == 0:
            x = x + snapshot.mean(0) - snapshot
        if step % every == 0:
            snapshot = x.copy()
        assert all(np.abs(seen[step] - mine).max() < 1e-5 for (seen, _), mine in zip(results, x, strict=True)), step
    with pytest.raises(ValueError, match=r"delay.*3 and 2"):
        make_algorithm("delayed:delay=3:every=2", steps)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_a_run(kind: str) -> None:
    run = train(Job("small", kind, "sparse_loco:communication_interval=2", 1, 4))
    assert 0 < run.loss < 10 and run.loss_rank0 > 0 and run.mb > 0


def test_summary() -> None:
    runs = [
        Run("adamw", "gradient_allreduce", 1, 2.0, 2.0, 100.0, 1.0),
        Run("adamw", "gradient_allreduce", 2, 3.0, 3.0, 100.0, 1.0),
        Run("adamw", "diloco", 1, 2.1, 2.2, 1.0, 1.0),
        Run("adamw", "diloco", 2, 3.3, 3.4, 1.0, 1.0),
    ]
    (exact, diloco) = summarise(runs)
    assert exact["percent_behind"] == 0 and diloco["percent_behind"] == pytest.approx(7.5)
    assert diloco["loss"] == pytest.approx(2.7) and diloco["loss_rank0"] == pytest.approx(2.8)
    assert "| adamw | diloco | 2.700 | +7.5 | +5.0, +10.0 | 2.800 | 1.00 |" in table([exact, diloco])
