"""Table rows from the ranks' measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bagua.bench import contenders
from bagua.bench.bounds import Moment, Timing, bound_s, payload_bits_per_s
from bagua.bench.conditions import Condition
from bagua.bench.contenders import ADAMS, OFF, Contender
from bagua.bench.models import Model
from bagua.bench.runner import Outcome
from bagua.bench.turns import quartiles

__all__ = ["DDP", "STOLEN", "Row", "rank_step_s", "rows_of", "stolen", "timings_of"]

DDP = "ddp"
WAITS = 0.3  # seconds a second in which threads of a rank waited for a core
STOLEN = 0.03  # share of the cores that the host of a virtual machine gave to others
_PAUSED = 1.5  # times the median
BUSY = 0.9  # share of the machine's cores above which ranks may have waited for a core


@dataclass(frozen=True)
class Row:
    """One contender under one condition. Times are milliseconds per step.

    Attributes:
        condition, contender, family: names. In results files the key of the contender is "entrant".
        hosts: number of hosts, one rank each.
        model: its name.
        step_ms: of the slowest rank, or of the middle one for contenders that do not wait; see `rank_step_s`.
        p25_ms, p75_ms: quartiles of all ranks' steps.
        rank_ms: of each rank.
        num_steps: that were timed.
        ratio_to_ddp: how many times faster than DDP in the same run.
        bytes_per_host: sent in a step.
        formula_bytes: that a host sends in a step by the formula of the bound, without scales and headers.
        bytes_from: "device" (its counters, headers included), "library" (its own count) or "formula".
        bound_ms: the least that physics allows; `bagua.bench.bounds`.
        efficiency: bound / step.
        exposed_ms: step less the step without communication.
        compute_ms, forward_ms, optimizer_ms: C, F and S, measured in the same run with communication switched off.
        busy: share of the machine's cores that were busy.
        steal_share: of the cores that the host of a virtual machine gave to others.
        cpu_share: CPU seconds a second of one rank, the mean.
        wait_share: seconds a second in which threads of a rank were ready to run and had no core, the mean.
        wire: what carried the frames of the emulated network; empty without one.
        congestion: how the hosts' TCP adapted its rate: that of the condition, else the lab's default, or the machine's
            where the kernel refuses that; empty without emulated hosts.
        late_share: of frames that the emulated network released over 1 ms late; None where no relay carries them.
        drop_share: of frames that the emulated switch dropped since its queue to a host was full.
        memory_bytes: the most that a rank had in RAM, less what it had before its model was made, in processes of its
            own; of the rank with most. None unless it was asked for.
        limited: why the machine and not the link may have been the limit; empty if it was not.
        error: why there is no result.
        notices: what the library said.
    """

    condition: str
    contender: str
    family: str
    hosts: int
    model: str
    step_ms: float | None = None
    p25_ms: float | None = None
    p75_ms: float | None = None
    rank_ms: tuple[float, ...] = ()
    num_steps: int = 0
    ratio_to_ddp: float | None = None
    bytes_per_host: float | None = None
    bytes_from: str = ""
    formula_bytes: float | None = None
    bound_ms: float | None = None
    efficiency: float | None = None
    exposed_ms: float | None = None
    compute_ms: float | None = None
    forward_ms: float | None = None
    optimizer_ms: float | None = None
    busy: float | None = None
    steal_share: float | None = None
    cpu_share: float | None = None
    wait_share: float | None = None
    wire: str = ""
    congestion: str = ""
    late_share: float | None = None
    drop_share: float | None = None
    memory_bytes: int | None = None
    limited: str = ""
    error: str = ""
    notices: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the keys that results files have had from the start."""
        return {"entrant" if key == "contender" else key: value for key, value in asdict(self).items()}


def stolen(ranks: Sequence[Mapping[str, Any]]) -> float:
    """Share of the cores that a virtual machine's host gave to others while `ranks` were measured; 0 without ranks."""
    return statistics.fmean(rank["stolen"] for rank in ranks) if ranks else 0.0


def rank_step_s(contender: Contender, measured: Mapping[str, Any]) -> float:
    """Seconds of a step of one rank: the mean of its steps, without those that took over 1.5 times the median.

    Long ones are pauses of the machine or of TCP. The median alone misleads: in a ring the ranks may end a step one
    after the other and take turns at ending first, so that one step in R is short and all others are long. Where steps
    differ by design all count.
    """
    steps = measured["steps"]
    most = math.inf if contender.averaged else _PAUSED * statistics.median(steps)
    return statistics.fmean(step for step in steps if step <= most)


def timings_of(outcomes: Sequence[Outcome], name: str) -> list[Timing]:
    """C, F and S of each rank, means over all runs of `name`, a contender without communication."""
    runs = [outcome.ranks for outcome in outcomes if outcome.name == name and not outcome.error]
    contender = contenders.get(name)
    return [
        Timing(
            statistics.fmean(rank_step_s(contender, each) for each in ranks),
            statistics.fmean(each["forward_s"] for each in ranks),
            statistics.fmean(each["optimizer_s"] for each in ranks),
        )
        for ranks in zip(*runs, strict=True)
    ]


def rows_of(condition: Condition, model: Model, hosts: int, outcomes: Sequence[Outcome]) -> list[Row]:
    """One row for each contender, in order; contenders that ran several times get the median."""
    rows: list[Row] = []
    ddp = _steps_s(outcomes, DDP)
    names = list(dict.fromkeys(outcome.name for outcome in outcomes))
    for name in names:
        contender = contenders.get(name)
        base = Row(condition.name, name, contender.family, hosts, model.name)
        runs = [each for each in outcomes if each.name == name]
        good = [each for each in runs if not each.error]
        if not good:
            rows.append(replace(base, error=runs[0].error))
            continue
        own = f"{OFF}_{contender.optimizer}" if contender.optimizer in ADAMS else OFF
        timings = timings_of(outcomes, own) or timings_of(outcomes, OFF)
        facts = {**_facts(contender, good), **_machine(good)}
        traffic = contender.traffic(model, hosts)
        facts["formula_bytes"] = traffic.bytes_per_host / traffic.every
        if facts["bytes_per_host"] is None:
            facts |= {"bytes_per_host": traffic.bytes_per_host / traffic.every, "bytes_from": "formula"}
        step_s = facts["step_ms"] / 1000
        if ddp:
            facts["ratio_to_ddp"] = statistics.median(ddp) / step_s
        if timings:
            timing = _which(timings, traffic.moment)
            rate, latency_s = payload_bits_per_s(condition.host_bits_per_s(hosts)), condition.least_latency_s(hosts)
            least_s = bound_s(traffic, timing, rate, latency_s, model.layers)
            facts |= {
                "compute_ms": 1000 * timing.step_s,
                "forward_ms": 1000 * timing.forward_s,
                "optimizer_ms": 1000 * timing.optimizer_s,
                "bound_ms": 1000 * least_s,
                "efficiency": least_s / step_s,
                "exposed_ms": 1000 * (step_s - timing.step_s),
            }
        rows.append(replace(base, **facts))
    return rows


def _which(timings: Sequence[Timing], moment: Moment) -> Timing:
    """Of a slow host where all wait for it, else of an ordinary one."""
    ordered = sorted(timings, key=lambda each: each.step_s)
    return ordered[(len(ordered) - 1) // 2] if moment is Moment.BACKGROUND else ordered[-1]


def _steps_s(outcomes: Sequence[Outcome], name: str) -> list[float]:
    return [
        _pace([rank_step_s(contenders.get(name), each) for each in outcome.ranks], contenders.get(name))
        for outcome in outcomes
        if outcome.name == name and not outcome.error
    ]


def _pace(ranks_s: Sequence[float], contender: Contender) -> float:
    """Of all ranks: the slowest where they wait for one another sooner or later, else the middle one."""
    return max(ranks_s) if contender.synchronous else statistics.median(ranks_s)


def _facts(contender: Contender, runs: Sequence[Outcome]) -> dict[str, Any]:
    steps = [1000 * step for run in runs for rank in run.ranks for step in rank["steps"]]
    ranks_s = [[rank_step_s(contender, rank) for rank in run.ranks] for run in runs]
    spread = quartiles(steps)
    facts: dict[str, Any] = {
        "step_ms": 1000 * statistics.median(_pace(run, contender) for run in ranks_s),
        "p25_ms": spread.low,
        "p75_ms": spread.high,
        "rank_ms": tuple(1000 * statistics.median(each) for each in zip(*ranks_s, strict=True)),
        "num_steps": sum(len(run.ranks[0]["steps"]) for run in runs),
        "notices": tuple(runs[0].ranks[0]["extra"].get("notices", ())),
        "bytes_per_host": None,
    }
    for source, key in (("device", "sent_bytes"), ("library", "counted_bytes")):
        found = [rank[key] for run in runs for rank in run.ranks if rank[key] is not None]
        if found:
            return facts | {"bytes_per_host": statistics.fmean(found), "bytes_from": source}
    return facts


def _machine(runs: Sequence[Outcome]) -> dict[str, Any]:
    busy = statistics.fmean(rank["busy"] for run in runs for rank in run.ranks)
    reports = [run.report for run in runs if run.report is not None]
    frames = sum(report.frames for report in reports)
    timed = [report for report in reports if report.late_frames is not None]
    late = sum(report.late_frames for report in timed) / frames if frames and timed else None
    drops = sum(host.queue_drops for report in reports for host in report.hosts)
    waits = statistics.fmean(rank["waited_s"] / rank["wall_s"] for run in runs for rank in run.ranks)
    reasons = [f"cores {busy:.0%} busy"] if busy >= BUSY else []
    taken = stolen([rank for run in runs for rank in run.ranks])
    if taken >= STOLEN:
        reasons.append(f"the machine's own host took {taken:.0%} of the cores")
    if waits >= WAITS:
        reasons.append(f"threads waited for a core {waits:.2f} s a second")
    if any(report.machine_limited for report in reports):
        reasons.append(f"network late for {late or 0:.0%} of frames")
    return {
        "busy": busy,
        "steal_share": taken,
        "cpu_share": statistics.fmean(rank["cpu_s"] / rank["wall_s"] for run in runs for rank in run.ranks),
        "wait_share": waits,
        "wire": reports[0].wire if reports else "",
        "congestion": runs[0].congestion,
        "late_share": late,
        "drop_share": drops / frames if frames else None,
        "limited": ", ".join(reasons),
    }
