"""`bagua bench tradeoff`: step times and bytes of every contender under every condition, and the physical bound."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import bagua
from bagua.bench import bounds, conditions, contenders, machine, memory, models, tables
from bagua.bench.conditions import Condition
from bagua.bench.contenders import ADAMS, OFF
from bagua.bench.hosts import Hosts, LabHosts, LocalHosts
from bagua.bench.measure import Job
from bagua.bench.rows import DDP, STOLEN, Row, rank_step_s, rows_of, stolen
from bagua.bench.runner import Outcome, run_cases

__all__ = [
    "CURVE_CONDITIONS",
    "FULL_CONDITIONS",
    "QUICK_CONDITIONS",
    "QUICK_CONTENDERS",
    "QUICK_CURVE_CONDITIONS",
    "QUICK_WAN_CONDITIONS",
    "WAN_CONDITIONS",
    "WAN_CONTENDERS",
    "Plan",
    "calmest",
    "cases_for",
    "check",
    "run",
]

# The bandwidths at 0 ms and the latencies at 1 Gbit/s make the two figures; then the corners, jitter, a straggler.
FULL_CONDITIONS = (
    "1gbit/0ms,1gbit/1ms,1gbit/2ms,1gbit/5ms,500mbit/0ms,250mbit/0ms,100mbit/0ms,100mbit/5ms,nolimit,"
    "1gbit/2ms/jitter2ms,1gbit/0ms/slow0.5"
)
QUICK_CONDITIONS = "1gbit/0ms,1gbit/5ms,100mbit/0ms"
QUICK_CONTENDERS = (
    "ddp,ddp_fp16,ddp_powersgd,gradient_allreduce,bytegrad,qadam_1bit,low_precision_decentralized,async,local_sgd"
)
WAN_CONDITIONS = ",".join(f"{rate}/{ms}ms" for rate in ("100mbit", "400mbit", "1gbit") for ms in (0, 5, 20, 50))
QUICK_WAN_CONDITIONS = "100mbit/0ms,100mbit/20ms,100mbit/50ms"
# The bandwidths without latency and the latencies at 100 Mbit/s make one figure each; those that matter most first.
CURVE_CONDITIONS = (
    "100mbit/0ms,50mbit/0ms,250mbit/0ms,1gbit/0ms,nolimit,100mbit/20ms,100mbit/50ms,"
    "500mbit/0ms,100mbit/5ms,100mbit/10ms"
)
QUICK_CURVE_CONDITIONS = "100mbit/0ms,1gbit/0ms,100mbit/20ms"
WAN_CONTENDERS = "ddp,gradient_allreduce,bytegrad,int4,qadam_1bit,low_precision_decentralized"
_BYTES_PER_ELEMENT = 4
_TIMEOUT_S = 120.0  # of a contender whose memory is measured
_COPIES = 7  # of the model that a rank holds at most: weights, gradients, buckets, residuals, scratch


@dataclass(frozen=True)
class Plan:
    """What `bagua bench tradeoff` was asked for.

    Attributes:
        conditions: to be run, in this order.
        contenders: names, in the order of the table.
        hosts: how many, one rank each.
        local: plain processes instead of an emulated cluster.
        memory: measure the peak memory of each contender, too.
        again: how often contenders are repeated at most that the machine's own host has disturbed.
        others: see `Job`.
    """

    conditions: tuple[Condition, ...]
    contenders: tuple[str, ...]
    hosts: int
    model: str
    compute_ms: float
    forward_share: float
    steps: int
    budget_s: float
    emulated: bool
    local: bool = False
    profile: str = ""
    again: int = 0
    memory: bool = False


def cases_for(names: Sequence[str], emulated: bool) -> list[str]:
    """The order of a condition: no communication and DDP at both ends, so that drift of the machine shows in both."""
    middle = [name for name in names if name not in (OFF, DDP)]
    adams = [f"{OFF}_{contenders.get(n).optimizer}" for n in names if contenders.get(n).optimizer in ADAMS]
    extra = [] if emulated else list(dict.fromkeys(adams))
    base = [DDP] if DDP in names else []
    return [OFF, *base, *(name for name in middle if name not in extra), *extra, *base, OFF]


def check(plan: Plan) -> list[str]:
    """Refuse what cannot work, and say what will be left out.

    Raises:
        ValueError: names the argument.
    """
    for condition in plan.conditions:
        condition.check_hosts(plan.hosts)
    model = models.get(plan.model)
    needed = plan.hosts * _COPIES * _BYTES_PER_ELEMENT * model.num_elements
    there = _available_bytes()
    if needed > there:
        raise ValueError(
            f"model {plan.model!r} on {plan.hosts} hosts may need {needed / 1e9:.0f} GB of memory, "
            f"{there / 1e9:.0f} GB are free; use {plan.model.removesuffix('/10')}/10 or fewer hosts"
        )
    return [f"{name}: {contenders.get(name).missing}" for name in plan.contenders if contenders.get(name).missing]


def run(plan: Plan, folder: Path | None, told: Callable[[str], None], keep: Callable[[dict[str, Any]], None]) -> None:
    """Run everything.

    Args:
        folder: where timelines go.
        told: called with each line for the terminal.
        keep: called with the report, as far as it goes, after each condition.
    """
    rows: list[Row] = []
    names = [name for name in plan.contenders if not contenders.get(name).missing]
    for number, condition in enumerate(plan.conditions, 1):
        told(f"\n{condition.name} ({number} of {len(plan.conditions)})\n{tables.line(tables.HEAD[:2])}")
        rows += _run_condition(plan, condition, names, folder, told)
        keep(report(plan, rows))
    if plan.memory:
        told("\npeak memory of a rank, in processes of its own")
        peaks = memory.measure(names, plan.hosts, _job(plan, ()), _TIMEOUT_S, told)
        rows = [replace(row, memory_bytes=peaks.get(row.contender)) for row in rows]
        told("\n" + memory.text([row.as_dict() for row in rows]))
        keep(report(plan, rows))


def report(plan: Plan, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of a results file."""
    model = models.get(plan.model)
    settings = {**asdict(plan), "conditions": [_plain(each) for each in plan.conditions]}
    settings["entrants"] = settings.pop("contenders")  # the key of results files
    settings["headers"] = "each packet"  # files of before 2026-11-28 without it: each frame of up to 64 KB
    return {
        "kind": "tradeoff",
        "date": machine.now(),
        "bagua": bagua.__version__,
        "machine": {**machine.describe_machine(), "kernel": platform.release()},
        "settings": settings,
        "model": {"name": model.name, "num_elements": model.num_elements, "num_layers": len(model.layers)},
        "left_out": check(plan),
        "rows": [each.as_dict() for each in rows],
    }


def _plain(condition: Condition) -> dict[str, Any]:
    return {key: None if value == math.inf else value for key, value in asdict(condition).items()}


def _run_condition(
    plan: Plan, condition: Condition, names: Sequence[str], folder: Path | None, told: Callable[[str], None]
) -> list[Row]:
    model = models.get(plan.model)
    dense_s = bounds.all_to_all_mean(model.num_elements, plan.hosts, 32).bytes_per_host
    dense_s *= 8 / min(condition.bits_per_s, *(each.bits_per_s for each in condition.pairs), math.inf)
    step_s = plan.compute_ms / 1000 / min(condition.slow, 1.0)
    timeout_s = 90 + 8 * dense_s + 2 * plan.budget_s + 80 * step_s
    cases = cases_for(names, plan.emulated)
    job = replace(
        _job(plan, tuple(enumerate(cases))), round_s=min(1.2 * dense_s + 3 * step_s, 40.0), timeout_s=timeout_s
    )

    def say(outcome: Outcome) -> None:
        place = f"[{outcome.number + 1}/{len(cases)}]"
        if outcome.error:
            told(f"{outcome.name:<36}        -  {place} {outcome.error}")
        else:
            contender = contenders.get(outcome.name)
            fastest = min(rank_step_s(contender, each) for each in outcome.ranks)
            told(f"{outcome.name:<36}{1000 * fastest:9.0f}  {place}")

    def measured(cases: Sequence[tuple[int, str]]) -> list[Outcome]:
        these = replace(job, cases=tuple(cases))
        return run_cases(partial(_make_hosts, plan, condition), plan.hosts, these, timeout_s, say, folder)

    outcomes = calmest(measured, tuple(enumerate(cases)), plan.again, told)
    rows = rows_of(condition, model, plan.hosts, outcomes)
    told(tables.text([each.as_dict() for each in rows]))
    return rows


def _job(plan: Plan, cases: tuple[tuple[int, str], ...]) -> Job:
    return Job(
        model=plan.model,
        compute_ms=plan.compute_ms,
        forward_share=plan.forward_share,
        steps=plan.steps,
        budget_s=plan.budget_s,
        round_s=1.0,
        emulated=plan.emulated,
        timeout_s=_TIMEOUT_S,
        cases=cases,
        switches=False,
        profile=plan.profile,
    )


def calmest(
    measured: Callable[[Sequence[tuple[int, str]]], list[Outcome]],
    cases: Sequence[tuple[int, str]],
    again: int,
    told: Callable[[str], None],
) -> list[Outcome]:
    """Measure `cases`; those from which a virtual machine's host took cores once more, and so on.

    What counts is how much was taken, whatever the step times, so no contender is favoured.

    Args:
        measured: runs cases (number and name) and returns their outcomes.
        cases: all of them.
        again: how often some are repeated at most.
        told: called with lines for the terminal.

    Returns:
        the least disturbed outcome of each case, in the order of `cases`.
    """
    best = {outcome.number: outcome for outcome in measured(cases)}
    for _ in range(again):
        disturbed = [(number, each.name) for number, each in best.items() if stolen(each.ranks) >= STOLEN]
        if not disturbed:
            break
        told(f"again, since the machine's own host took cores: {', '.join(name for _, name in disturbed)}")
        for outcome in measured(disturbed):
            if not outcome.error and stolen(outcome.ranks) < stolen(best[outcome.number].ranks):
                best[outcome.number] = outcome
    return [best[number] for number, _ in cases]


def _make_hosts(plan: Plan, condition: Condition) -> Hosts:
    return LocalHosts(plan.hosts) if plan.local else LabHosts(plan.hosts, condition)


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Conditions separated by commas.

    Raises:
        ValueError: one is wrong, or there is none.
    """
    found = tuple(conditions.parse(word.strip()) for word in text.split(",") if word.strip())
    if not found:
        raise ValueError("conditions: none given")
    return found


def _available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
