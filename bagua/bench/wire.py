"""`bagua bench primitives`: every collective, at several sizes, under several conditions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import bagua
from bagua.bench import machine
from bagua.bench.conditions import Condition
from bagua.bench.hosts import Hosts, LabHosts, LocalHosts
from bagua.bench.primitives import OPERATIONS, SIZES, Transfers, row_of
from bagua.bench.runner import Outcome, run_cases
from bagua.bench.tables import PRIMITIVE_HEAD, primitive_cells, primitive_line

__all__ = ["CONDITIONS", "QUICK_SIZES", "run_primitives"]

CONDITIONS = "1gbit/0ms,1gbit/2ms,1gbit/5ms,100mbit/0ms"
QUICK_SIZES = (16 << 10, 1 << 20)


def run_primitives(
    conditions: Sequence[Condition],
    hosts: int,
    local: bool,
    sizes: Sequence[int] = SIZES,
    budget_s: float = 2.0,
    told: Callable[[str], None] = print,
    names: Sequence[str] = tuple(OPERATIONS),
    keep: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Measure; returns the content of a results file, of which `keep` is told after each condition."""
    cases = tuple(enumerate(f"{name}/{size}" for name in names for size in sizes))
    rows: list[dict[str, Any]] = []
    report = {
        "kind": "primitives",
        "date": machine.now(),
        "bagua": bagua.__version__,
        "machine": machine.describe_machine(),
        "settings": {"hosts": hosts, "local": local, "sizes": list(sizes), "budget_s": budget_s},
        "rows": rows,
    }
    for condition in conditions:
        condition.check_hosts(hosts)
    for condition in conditions:
        told(f"\n{condition.name}, {hosts} hosts\n" + primitive_line(PRIMITIVE_HEAD))

        def say(outcome: Outcome, condition: Condition = condition) -> None:
            rows.append(_row(outcome, condition, hosts))
            told(primitive_line(primitive_cells(rows[-1])))

        slowest_s = (
            8 * 2 * max(sizes) / min(condition.bits_per_s, *(pair.bits_per_s for pair in condition.pairs), math.inf)
        )
        timeout_s = 60 + 10 * slowest_s
        job = Transfers(budget_s=budget_s, timeout_s=timeout_s, cases=cases)
        run_cases(partial(_make, hosts, local, condition), hosts, job, timeout_s, say)
        keep(report)
    return report


def _make(hosts: int, local: bool, condition: Condition) -> Hosts:
    """Small messages would cross token buckets for nothing after each pause: the relay times each frame."""
    if local:
        return LocalHosts(hosts)
    limited = condition.wire == "auto" and not math.isinf(condition.bits_per_s)
    return LabHosts(hosts, replace(condition, wire="relay") if limited else condition)


def _least(condition: Condition, hosts: int) -> tuple[float, float]:
    return condition.host_bits_per_s(hosts), condition.least_latency_s(hosts)


def _row(outcome: Outcome, condition: Condition, hosts: int) -> dict[str, Any]:
    carrier = outcome.report.wire if outcome.report is not None else ""
    base = {"condition": condition.name, "wire": carrier, "hosts": hosts, "error": outcome.error}
    if outcome.error:
        operation, _, size = outcome.name.partition("/")
        return {**base, "operation": operation, "size_bytes": int(size)}
    row = {**base, **row_of(outcome.name, outcome.ranks, *_least(condition, hosts))}
    if math.isinf(condition.host_bits_per_s(hosts)):
        row["efficiency"] = None  # nothing but the machine limits it
    return row
