"""How exact the emulated links are: `python -m benchmarks.lab [--json FILE] [--quick]`.

For each link: the rate of TCP streams between two hosts, the round trip of one byte, the relay's share of a core
and the frames that it released over 1 ms late. Rates count payload from the receiver's side.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua.bench import progress, results_file
from bagua.bench.layout import markdown_row, markdown_table
from bagua.bench.machine import describe_machine, now
from bagua.lab import Cluster, LabError, Link
from bagua.lab.traffic import measure_rate, measure_round_trips

# (what carries the frames, link)
CASES: list[tuple[str, Link]] = [
    ("veth", Link()),
    ("tap", Link()),
    ("packet", Link()),
    ("tbf", Link("10gbit")),
    ("tbf", Link("1gbit")),
    ("tbf", Link("250mbit")),
    ("tbf", Link("100mbit")),
    ("tap", Link("10gbit")),
    ("tap", Link("1gbit")),
    ("tap", Link("1gbit", "1ms")),
    ("tap", Link("1gbit", "2ms")),
    ("tap", Link("1gbit", "5ms")),
    ("tap", Link("250mbit")),
    ("tap", Link("100mbit")),
    ("tap", Link("100mbit", "5ms")),
    ("packet", Link("1gbit", "1ms")),
    ("packet", Link("100mbit", "5ms")),
]

_HEAD = ("wire", "bandwidth", "latency ms", "1 stream", "4 streams", "rtt min ms", "median", "relay cores", "late")


def measure(wire: str, link: Link, seconds: float) -> dict[str, Any]:
    """One row of the table."""
    with Cluster(2, link, mode="namespaces", wire=wire) as cluster:
        a, b = cluster.hosts
        trips_ms = [1e3 * trip for trip in measure_round_trips(a, b, 40)]
        before = cluster.report()
        one = measure_rate(a, b, seconds)
        report = cluster.report().since(before)
        four = measure_rate(a, b, seconds, streams=4)
        bandwidth, latency_ns, *_ = link.settings()
        return {
            "wire": wire,
            "bandwidth_mbit": bandwidth / 1e6,
            "latency_ms": latency_ns / 1e6,
            "rate_mbit": one / 1e6,
            "rate_4_streams_mbit": four / 1e6,
            "round_trip_min_ms": min(trips_ms),
            "round_trip_median_ms": statistics.median(trips_ms),
            "relay_cores": report.relay_cpu_s / report.wall_s,
            "late_share": None if report.late_frames is None else report.late_frames / max(report.frames, 1),
            "late_max_ms": report.late_max_ms,
        }


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    limit = f"{row['bandwidth_mbit']:g} Mbit/s" if row["bandwidth_mbit"] else "no limit"
    late = "" if row["late_share"] is None else f"{row['late_share']:.1%}"
    rates = [f"{row['rate_mbit']:.0f}", f"{row['rate_4_streams_mbit']:.0f}"]
    trips = [f"{row['round_trip_min_ms']:.2f}", f"{row['round_trip_median_ms']:.2f}"]
    return markdown_row(
        [row["wire"], limit, f"{row['latency_ms']:g}", *rates, *trips, f"{row['relay_cores']:.2f}", late]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases and print them.

    Returns:
        0, or 1 where the machine allows no namespaces.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab", description="How exact the emulated links are.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows with date and hardware")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each stream (1.5)")
    parser.add_argument("--quick", action="store_true", help="four cases, half a second each")
    args = parser.parse_args(argv)
    cases = [CASES[0], CASES[4], CASES[9], CASES[14]] if args.quick else CASES
    print(markdown_table(_HEAD, []))
    rows = []
    for number, (wire, link) in enumerate(cases, 1):
        progress.show(f"{number} of {len(cases)}: {wire}")
        try:
            rows.append(measure(wire, link, 0.5 if args.quick else args.seconds))
        except LabError as error:
            print(f"benchmarks.lab: {error}", file=sys.stderr)
            return 1
        progress.clear()
        print(show(rows[-1]), flush=True)
    if args.json:
        machine = {**describe_machine(), "kernel": platform.release()}
        results_file.write(args.json, {"date": now(), "machine": machine, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
