"""The comparison of algorithms runs and writes what it says; its arithmetic is right. Its figures are not judged."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import bagua
from benchmarks.char_lm import VOCABULARY, CharLM, load_text
from benchmarks.convergence.configurations import Configuration, all_configurations, by_name, make_optimizer, select
from benchmarks.convergence.report import Row, summarise, table, to_json
from benchmarks.convergence.tasks import RANKS, make_task
from benchmarks.convergence.training import Outcome, simulate
from tests.benchmarks.quick_run import run_quickly
from tests.fork_server import ForkServer

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def quick_run(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path, str]:
    """JSON, folder of the plots and printed text of a quick run of a few configurations."""
    folder = tmp_path_factory.mktemp("convergence")
    chosen = ["--only", "bytegrad,async,decentralized ring", "--workers", "1"]
    report, printed = run_quickly(fork_server, "convergence", folder, "--plots", str(folder), *chosen)
    return report, folder, printed


@pytest.mark.slow
def test_json(quick_run: tuple[dict, Path, str]) -> None:
    report, _, _ = quick_run
    assert {"date", "machine", "quick", "minutes", "ranks", "seeds", "bucket_bytes"} < set(report)
    assert {"targets", "tasks", "configurations", "rows", "runs"} < set(report)
    assert (report["ranks"], report["seeds"], report["quick"]) == (4, 1, True)
    assert report["machine"]["torch"] == torch.__version__
    assert set(report["tasks"]) == {"digits", "char_lm"}
    assert all({"metric", "steps", "parameters", "learning_rates"} <= set(task) for task in report["tasks"].values())
    chosen = {each.name for each in select(["bytegrad", "async", "decentralized ring"])}
    for task in report["tasks"]:
        assert {row["configuration"] for row in report["rows"] if row["task"] == task} == chosen
        assert {run["configuration"] for run in report["runs"] if run["task"] == task} == chosen
    for row in report["rows"]:
        assert set(row) == {field.name for field in fields(Row)}
        assert (row["difference"] is None) == (row["within"] is None) == (not row["algorithm"])
    for run in report["runs"]:
        assert set(run) == {field.name for field in fields(Outcome)}
        assert len(run["curve_steps"]) == len(run["curve_loss"]) == len(run["curve_mb"]) > 3
        assert run["curve_mb"] == sorted(run["curve_mb"]) and run["curve_mb"][0] == 0


@pytest.mark.slow
def test_synchronous_runs_agree_with_each_other(quick_run: tuple[dict, Path, str]) -> None:
    runs = {(run["task"], run["configuration"]): run for run in quick_run[0]["runs"]}
    ddp, bytegrad, ring = (runs["char_lm", name] for name in ("torch DDP", "bytegrad", "decentralized ring"))
    assert bytegrad["curve_loss"][0] == pytest.approx(ddp["curve_loss"][0], abs=1e-5)  # the same weights at first
    assert bytegrad["loss"] == pytest.approx(ddp["loss"], rel=1e-2)
    assert 3.5 < ddp["bytes_per_step"] / bytegrad["bytes_per_step"] < 4
    assert ddp["consensus"] == bytegrad["consensus"] == 0 < ring["consensus"]
    assert bytegrad["loss"] == bytegrad["loss_rank0"]


@pytest.mark.slow
def test_plots_and_table(quick_run: tuple[dict, Path, str]) -> None:
    _, folder, printed = quick_run
    for task in ("digits", "char_lm"):
        assert (folder / f"{task}.png").read_bytes().startswith(b"\x89PNG")
        assert "bytegrad" in (folder / f"{task}.svg").read_text()
        assert f"{task}, torch DDP, seed 0" in printed
    assert "against DDP" in printed and "[1/" in printed


def test_every_algorithm_has_a_row_and_every_row_works() -> None:
    rows = all_configurations()
    assert len({row.name for row in rows}) == len(rows)
    assert {row.name for row in bagua.algorithms.available()} == {row.algorithm for row in rows} - {""}
    for row in rows:
        if row.algorithm:
            row.make(100)
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        make_optimizer(row.optimizer or row.family, [weight], 0.1, 100).step()
        assert weight.max() < 1
    assert by_name("local_sgd after 25 %").make(100).payload is bagua.algorithms.Payload.GRAD
    assert by_name("bytegrad").synchronous and not by_name("local_sgd after 25 %").synchronous


def test_select() -> None:
    assert [row.name for row in select(["bytegrad sign + feedback"])] == ["torch DDP", "bytegrad sign + feedback"]
    assert {row.family for row in select(["lamb"])} == {"lamb"}
    with pytest.raises(ValueError, match="no configuration"):
        select(["nothing"])
    with pytest.raises(ValueError, match="optimizer 'nothing'"):
        make_optimizer("nothing", [], 0.1, 1)


def test_simulated_runs_are_deterministic() -> None:
    task = make_task("char_lm", 1, quick=True)
    first, second = (simulate(by_name("decentralized shift_one"), task, 1) for _ in range(2))
    assert replace(first, seconds=0) == replace(second, seconds=0)


def test_tasks() -> None:
    with pytest.raises(ValueError, match="'nothing'"):
        make_task("nothing")
    first, again, other = (make_task("digits", seed, quick=True) for seed in (0, 0, 1))
    assert len(first.batches[0]) == RANKS
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first.batches[-1], again.batches[-1], strict=True))
    assert not torch.equal(first.batches[0][0][0], other.batches[0][0][0])
    rows = torch.cat([batch[0] for step in first.batches for batch in step]).flatten(1)
    held_out = {tuple(row) for row in first.test[0].flatten(1).tolist()}
    assert not held_out & {tuple(row) for row in rows.tolist()}  # no image is in both parts


def test_text() -> None:
    text = load_text()
    assert 7 < len(text.train) / len(text.test) < 10
    assert len(text.train) > 100_000 and int(text.train.max()) < len(VOCABULARY)
    assert sum(param.numel() for param in CharLM().parameters()) == 49_824
    windows, following = make_task("char_lm", 0, quick=True).batches[0][0]
    assert torch.equal(windows[:, 1:], following[:, :-1])


def outcome(configuration: str, seed: int, value: float) -> Outcome:
    return Outcome(
        "digits", configuration, seed, value, value, value, value, 100.0, 0.0, 1.0, (0, 1), (2.0, 1.0), (0, 1)
    )


def test_comparison_with_ddp() -> None:
    rows = [
        Configuration("DDP", "sgd", ""),
        Configuration("lossy", "sgd", "bytegrad"),
        Configuration("local", "sgd", "local_sgd"),
        Configuration("broken", "sgd", "bytegrad"),
        Configuration("left out", "sgd", "bytegrad"),
    ]
    runs = [outcome("DDP", 0, 0.98), outcome("DDP", 1, 0.96), outcome("local", 0, 0.973)]
    runs += [outcome("lossy", 0, 0.974), outcome("lossy", 1, 0.954)]
    runs += [replace(outcome("broken", 0, math.nan), error="deliberate")]
    accuracy = {row.configuration: row for row in summarise(runs, rows, {"digits": "accuracy"})}
    assert set(accuracy) == {"DDP", "lossy", "local", "broken"}
    assert accuracy["DDP"].mean == pytest.approx(97) and accuracy["DDP"].half_range == pytest.approx(1)
    assert accuracy["DDP"].within is None
    assert accuracy["lossy"].difference == pytest.approx(0.6) and accuracy["lossy"].within is False
    assert accuracy["local"].difference == pytest.approx(0.7) and accuracy["local"].within is True  # the same seed
    assert accuracy["broken"].within is False and accuracy["broken"].seeds == 0
    loss = {row.configuration: row for row in summarise(runs, rows, {"digits": "loss"})}
    assert loss["local"].difference == pytest.approx(100 * (0.973 / 0.98 - 1))
    text = table(list(accuracy.values()))
    assert "MISSED" in text and "within" in text and "+0.70 pt" in text
    written = json.loads(to_json({"a": {"b": math.inf}}, list(accuracy.values()), runs))
    assert written["a"] == {"b": None} and len(written["rows"]) == 4 and len(written["runs"]) == len(runs)
