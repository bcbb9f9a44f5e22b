"""The benchmark of the engine's cost runs and writes what it says. Its figures are not judged here."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from benchmarks.overhead import Block, Case, Result, compare, make_model, summarise, table
from tests.benchmarks.quick_run import run_quickly
from tests.fork_server import ForkServer

pytestmark = pytest.mark.process


@pytest.mark.slow
def test_quick_run(fork_server: ForkServer, tmp_path: Path) -> None:
    report, printed = run_quickly(fork_server, "overhead", tmp_path)
    assert {"date", "machine", "quick", "parameters", "targets", "ratio", "engine_ms", "results"} == set(report)
    assert {"cpu", "cores", "load_1min", "system", "python", "torch", "threads"} == set(report["machine"])
    assert report["machine"]["torch"] == torch.__version__
    assert report["parameters"] == 300
    assert {(result["ranks"], result["baseline"]) for result in report["results"]} == {
        (1, "engine off"),
        (2, "DDP"),
    }
    for result in report["results"]:
        assert {field.name for field in fields(Result)} == set(result)
        assert all(math.isfinite(value) for value in result.values() if not isinstance(value, str))
        assert result["case"] in printed


def test_the_model_has_300_parameters() -> None:
    assert len(list(make_model(2).parameters())) == 300


def test_medians_of_pairs() -> None:
    case = Case("case", width=1, batch=1)
    times = [(Block(10, 8), Block(11, 9)), (Block(20, 10), Block(24, 12)), (Block(10, 7), Block(9, 6.5))]
    result = summarise(case, 1, "engine off", times, 1)
    assert result.ratio == pytest.approx(1.1)
    assert result.extra_cpu_ms == pytest.approx(1)
    assert result.extra_cpu_ms_of_minima == pytest.approx(-0.5)
    assert "1.100" in table([result])


def test_blocks_alternate() -> None:
    calls: list[str] = []
    pairs = compare(lambda: calls.append("a"), lambda: calls.append("b"), pairs=3, steps=2)
    assert len(pairs) == 3
    assert "".join(calls) == "aabbaabb" + "aabb" + "bbaa" + "aabb"
