"""Peak memory: what the kernel counts, the table beside DDP, and contenders in processes of their own."""

from __future__ import annotations

import pytest
import torch

from bagua.bench import counters, memory
from bagua.bench.main import main
from bagua.bench.measure import Job

JOB = Job("layers25m/10", 5.0, 1 / 3, 2, 1.0, 1.0, True, 60.0, (), False)
MB = 2**20


def test_the_peak_of_this_process_is_that_since_it_was_forgotten() -> None:
    counters.forget_peak()
    before = counters.resident_bytes()
    x = torch.ones(64 * MB, dtype=torch.uint8)
    assert counters.peak_bytes() - before > 48 * MB
    assert x.sum().item() == 64 * MB
    del x
    assert counters.peak_bytes() - before > 48 * MB, "it stays when the memory is freed"


def test_the_table_is_beside_ddp() -> None:
    rows = [
        {"entrant": "ddp", "memory_bytes": 200_000_000},
        {"entrant": "bytegrad", "memory_bytes": 250_000_000},
        {"entrant": "off", "memory_bytes": None},
        {"entrant": "old"},
    ]
    assert memory.cells(rows) == [["ddp", "200", "+0", "1.00"], ["bytegrad", "250", "+50", "1.25"]]
    assert "### Peak memory of a rank" in memory.markdown(rows)
    assert memory.cells(rows[1:]) == [["bytegrad", "250", "", ""]]
    assert memory.markdown(rows[2:]) == ""


@pytest.mark.process
@pytest.mark.slow
def test_a_contender_is_measured_and_one_that_fails_is_left_out() -> None:
    lines: list[str] = []
    found = memory.measure(["off", "bytegrad:bucket_bytes=-1"], 1, JOB, 60.0, lines.append)
    assert list(found) == ["off"]
    assert found["off"] > 3 * 10_000_000, "weights, gradients and the numbers that they are made of"
    assert "bucket_bytes" in lines[1]


def test_not_with_held_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tradeoff", "--held-out", "--memory"]) == 2
    assert "--memory: not with --held-out" in capsys.readouterr().err
