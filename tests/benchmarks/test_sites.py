"""The benchmark of unequal sites: its bounds by hand, and that the figures of its result file follow from the steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagua.lab import Link
from benchmarks.sites import PAIRS, SYSTEMS, bound_s, drawn, fastest_ring, rate_of, rates_of, rows_of, share_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
FILES = [
    "2026-11-27-order/sites.json",
    *(f"2026-11-29-routes/{n}.json" for n in ("sites", "seed_101", "seed_102", "seed_103")),
]


def test_rings_and_bounds() -> None:
    assert fastest_ring() in ([0, 2, 1, 3], [0, 3, 1, 2])
    assert rate_of([0, 2, 1, 3]) == 400e6 and rate_of([0, 1, 2, 3]) == 50e6 and rate_of([0, 1, 3, 2]) == 50e6
    # 6 M elements, 3/4 of them twice, 32 bits each, at 400 Mbit/s, after a third of 150 ms
    assert bound_s("ring all-reduce", [0, 2, 1, 3], 6_000_000, 0.15) == pytest.approx(0.05 + 0.72)
    assert bound_s("ring all-reduce", [0, 2, 1, 3], 1000, 0.15) == 0.15
    assert bound_s("ring gossip, 8 bits", [0, 1, 2, 3], 6_000_000, 0.15) == pytest.approx(0.96)


def test_bounds_of_all_reduces_are_those_of_the_best_routes() -> None:
    assert share_of() == 300e6, "0-1 through 3, 2-3 through 0"
    # 6 M elements, a quarter of them twice, 8 bits each, at 300 Mbit/s, after a third of 30 ms
    assert bound_s("all-reduce, 8 bits", [0, 1, 2, 3], 6_000_000, 0.03) == pytest.approx(0.01 + 0.08)
    assert bound_s("all-reduce, 2 bits", [0, 1, 2, 3], 6_000_000, 0.03) == pytest.approx(0.03)


@pytest.mark.parametrize("seed", [1, 2])
def test_drawn_links(seed: int) -> None:
    pairs = drawn(seed)
    assert pairs == drawn(seed) and pairs != drawn(seed + 1) and pairs.keys() == PAIRS.keys()
    assert all(49e6 < rate < 1.01e9 for a, row in enumerate(rates_of(pairs)) for b, rate in enumerate(row) if a != b)
    assert share_of(pairs) >= min(min(row[:a] + row[a + 1 :]) for a, row in enumerate(rates_of(pairs)))


@pytest.mark.parametrize("name", FILES)
def test_rows_follow_from_the_steps(name: str) -> None:
    report = json.loads((RESULTS / name).read_text())
    settings = report["settings"]
    pairs = {(int(a), int(b)): Link(*link) for (a, _, b), link in report["links"].items()}
    rows = rows_of(report["measured"], settings["num_elements"], settings["compute_ms"] / 1000, pairs)
    assert rows == report["rows"]
    assert {row["system"] for row in rows} <= set(SYSTEMS) and len(rows) >= 2
    for each in report["measured"]:
        assert all(len(turns) == settings["rounds"] for turns in each["times_s"].values())


def test_pairs_are_of_neighbouring_turns() -> None:
    times = {"ranks": [[4.0, 4.0], [2.0, 2.0], [9.0, 9.0]], "measured": [[1.0, 1.0], [1.0, 1.0], [3.0, 3.0]]}
    found = [{"system": "ring all-reduce", "times_s": times, "notices": {"measured": ["told"]}}]
    (row,) = rows_of(found, 1000, 0.5)
    assert row["paired"] == 3.0 and row["ordered_ms"] == 1000 and row["plain_ms"] == 4000
    assert row["efficiency"] == 0.5 and row["notices"] == ["told"]
