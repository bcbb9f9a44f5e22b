"""From what the ranks saw to a row."""

from __future__ import annotations

from typing import Any

import pytest

from bagua.bench import conditions, models
from bagua.bench.rows import Row, rows_of
from bagua.bench.runner import Outcome
from bagua.bench.tables import cells, markdown
from bagua.bench.tradeoff import cases_for

MODEL = models.get("layers25m")
PACKET = 1514 / 1448  # bytes on the wire for a byte of payload


def rank(
    *steps: float, busy: float = 0.2, stolen: float = 0.0, waited: float = 0.01, sent: float | None = 1e6
) -> dict[str, Any]:
    return {
        "steps": list(steps),
        "forward_s": 0.1,
        "backward_s": 0.2,
        "optimizer_s": 0.04,
        "wall_s": sum(steps),
        "cpu_s": 0.1 * sum(steps),
        "waited_s": waited,
        "busy": busy,
        "stolen": stolen,
        "sent_bytes": sent,
        "counted_bytes": None,
        "extra": {},
    }


def rows(*outcomes: Outcome, condition: str = "1gbit/0ms") -> dict[str, Row]:
    return {row.contender: row for row in rows_of(conditions.parse(condition), MODEL, 4, outcomes)}


def of(name: str, *ranks: dict[str, Any], error: str = "") -> Outcome:
    return Outcome(0, name, list(ranks), error)


OFF = of("off", *[rank(0.34, 0.34)] * 4)


def test_a_row_says_how_tcp_adapted_its_rate() -> None:
    """As the hosts had it, whatever was the default: a kernel may refuse that."""
    found = rows(OFF, of("ddp", *[rank(1.5)] * 4)._replace(congestion="bbr"))
    assert found["ddp"].as_dict()["congestion"] == "bbr" and found["off"].congestion == ""


def test_pace_ratio_and_efficiency() -> None:
    found = rows(
        OFF,
        of("ddp", *[rank(1.5, 1.6, 1.7, 9.0)] * 4),
        of("bytegrad", rank(0.5, 0.5, 0.5), *[rank(0.4, 0.4, 0.4)] * 3),
        of("ddp", *[rank(1.4, 1.4, 1.4)] * 4),
        OFF,
    )
    assert found["ddp"].step_ms == pytest.approx(1500)  # of 1600 before and 1400 after
    assert found["ddp"].bound_ms == pytest.approx(152.5 + 1200 * PACKET)  # 100 + 200 / 16 + 40, and the link
    assert found["ddp"].ratio_to_ddp == pytest.approx(1)
    row = found["bytegrad"]
    assert row.step_ms == pytest.approx(500)  # as fast as the slowest
    assert row.ratio_to_ddp == pytest.approx(3)
    assert row.bound_ms == pytest.approx(152.5 + 300 * PACKET)
    assert row.efficiency == pytest.approx(row.bound_ms / 500)
    assert row.exposed_ms == pytest.approx(160)
    assert (row.bytes_per_host, row.bytes_from, row.limited) == (1e6, "device", "")


def test_ranks_that_take_turns_at_ending_first() -> None:
    """Each has the same pace, and it is not that of most steps."""
    steps = [0.5, 0.5, 0.5, 0.3]
    found = rows(OFF, of("ddp", *[rank(*steps[at:], *steps[:at], 2.0) for at in range(4)]))
    assert found["ddp"].step_ms == pytest.approx(450)


def test_steps_that_differ_by_design_count_with_their_mean() -> None:
    found = rows(OFF, of("local_sgd", *[rank(0.3, 0.3, 0.3, 1.5)] * 4))
    assert found["local_sgd"].step_ms == pytest.approx(600)
    assert found["local_sgd"].ratio_to_ddp is None


def test_a_straggler_slows_those_that_wait() -> None:
    off = of("off", *[rank(0.3, 0.3)] * 3, rank(0.6, 0.6))
    found = rows(off, of("async", *[rank(0.3, 0.3)] * 3, rank(0.6, 0.6)), condition="1gbit/0ms/slow0.5")
    assert found["async"].step_ms == pytest.approx(300) and found["async"].efficiency == pytest.approx(1)
    assert found["async"].rank_ms == pytest.approx((300, 300, 300, 600))
    assert "by rank 300, 300, 300, 600" in cells(found["async"].as_dict())[-1]
    slowed = rows(off, of("qadam_1bit", *[rank(0.62, 0.62)] * 4), condition="1gbit/0ms/slow0.5")
    assert slowed["qadam_1bit"].bound_ms == pytest.approx(600 + 37.5 * PACKET / 16)  # the first layer leaves at the end


def test_rows_where_the_machine_was_the_limit_are_marked() -> None:
    found = rows(OFF, of("ddp", *[rank(1.5, 1.5, busy=0.97)] * 4))
    assert "97%" in found["ddp"].limited
    assert not found["off"].limited
    assert "waited for a core 0.50 s" in rows(OFF, of("ddp", *[rank(2.0, 2.0, waited=2.0)] * 4))["ddp"].limited
    assert "host took 9% of the cores" in rows(OFF, of("ddp", *[rank(1.5, 1.5, stolen=0.09)] * 4))["ddp"].limited
    assert "machine-limited" in markdown([found["ddp"].as_dict()])


def test_without_counters_the_formula_tells_the_bytes() -> None:
    found = rows(OFF, of("ddp", *[rank(1.5, 1.5, sent=None)] * 4))
    assert (found["ddp"].bytes_per_host, found["ddp"].bytes_from) == (150e6, "formula")


def test_a_failed_case_is_a_row_with_its_error() -> None:
    found = rows(OFF, of("ddp", error="rank 2: RuntimeError: gone"))
    assert found["ddp"].step_ms is None
    assert "error: rank 2: RuntimeError: gone" in cells(found["ddp"].as_dict())[-1]


def test_ddp_runs_at_both_ends() -> None:
    assert cases_for(("bytegrad", "ddp", "async"), True) == ["off", "ddp", "bytegrad", "async", "ddp", "off"]
    assert cases_for(("qadam",), False) == ["off", "qadam", "off_qadam", "off"]
