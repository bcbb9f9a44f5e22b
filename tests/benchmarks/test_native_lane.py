"""The benchmark of the native transport runs and writes what it says. Its figures are not judged here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bagua.bench.conditions import parse
from bagua.comm.mesh import why_no_mesh
from benchmarks.native_lane import SYSTEMS, model_of, summarise
from tests.benchmarks.quick_run import run_quickly
from tests.fork_server import ForkServer

PACKET = 1514 / 1448  # bytes on the wire for a byte of payload


@pytest.mark.process
@pytest.mark.skipif(bool(why_no_mesh()), reason=why_no_mesh() or "there is one")
@pytest.mark.slow
def test_quick_run(fork_server: ForkServer, tmp_path: Path) -> None:
    report, printed = run_quickly(fork_server, "native_lane", tmp_path, "--only", "int4")
    (row,) = report["rows"]
    assert (row["condition"], row["system"], row["ranks"]) == ("loopback", "int4", 2)
    assert row["gloo_sent_mb"] == row["native_sent_mb"] > 0
    assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
    assert "int4" in printed
    # What the file has is not measured again, and what it lacks is.
    options = ("--only", "int4,gossip", "--transports", "gloo,native,ddp", "--resume")
    again, printed = run_quickly(fork_server, "native_lane", tmp_path, *options)
    assert again["rows"][0] == row and [each["system"] for each in again["rows"]] == ["int4", "gossip"]
    assert again["rows"][1]["ddp_sent_mb"] > 0 and "int4" in printed and "gossip" in printed


def test_cpu_of_steps_without_an_exchange_is_taken_off() -> None:
    def turn(step_s: float, cpu_s: float, sent: float) -> dict[str, float]:
        return {"step_s": step_s, "cpu_s": cpu_s, "sent_bytes": sent}

    rank: dict[str, Any] = {
        "None": [turn(0.01, 0.1, 0)] * 3,
        "gloo": [turn(0.4, 0.5, 1e8)] * 3,
        "native": [turn(0.2, 0.3, 1e8)] * 3,
    }
    model, link = model_of("equal", 16 * 100**2), parse("1gbit/20ms")
    row = summarise("sign", [rank] * 2, link, model, compute_ms=0.0)
    assert (row["gloo_cpu_s_per_gb"], row["native_cpu_s_per_gb"]) == pytest.approx((4.0, 2.0))
    assert (row["native_cpu_ratio"], row["native_step_ratio"]) == pytest.approx((0.5, 0.5))
    bits = 1 + 32 / 2048
    assert row["bound_ms"] == pytest.approx(10 + 1000 * 160_000 * bits * PACKET / 1e9 + 2 * 20)
    assert row["native_share"] == pytest.approx(row["bound_ms"] / 200)
    assert "native_faster_than_ddp" not in row
    rank["ddp"] = [turn(0.5, 0.6, 1e8)] * 3
    row = summarise("allreduce", [rank] * 2, link, model, compute_ms=0.0)
    assert (row["native_faster_than_ddp"], row["gloo_faster_than_ddp"]) == pytest.approx((2.5, 1.25))
    assert row["bound_ms"] == pytest.approx(10 + 1000 * 160_000 * 32 * PACKET / 1e9 + 2 * 20)
    assert "ddp_share" not in row


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_has_a_bound(system: str) -> None:
    assert SYSTEMS[system].traffic(model_of("equal", 16 * 100**2), 4).bytes_per_host > 0
