"""What a fault has cost, from the records of all ranks: how long nobody trained, what was lost, who was restarted."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bagua.algorithms import LostStep
from benchmarks.faults.records import Process, Step

__all__ = ["Cost", "Fault", "cost_of", "differing", "intervals", "participation", "shares", "splits", "step_s"]

_WARM = 3  # steps of a process that are not typical: connections are opened


@dataclass
class Fault:
    """Something that was done to hosts.

    Attributes:
        kind: of `benchmarks.faults.scenarios`, or of a chaos run.
        hosts: to which it was done.
        at: when it began.
        until: when it was undone: the network healed, the host was started again.
        over: when the next one may begin, all being well again.
        problems: what went wrong.
    """

    kind: str
    hosts: list[int]
    at: float
    until: float | None = None
    over: float = float("inf")
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Cost:
    """Of a fault. None where it does not apply or cannot be known from the records.

    Attributes:
        detected_s: from the fault until the first survivor dropped what was in flight, as it says itself.
        resumed_s: from then until the last survivor's next step began.
        gap_s: from the fault until the last survivor's next step began.
        step_s: of an undisturbed step before the fault.
        lost_steps: steps that a survivor had to drop, or had made and made again.
        compared, unequal: steps whose digests were compared between ranks, and those in which they differ.
        restarted: hosts whose rank was restarted, among those to which nothing was done.
        trained_apart: steps that ranks made which were cut off, after the one that was in flight.
        back_s: from the return of the host, or the healing of the network, until it trains with the others.
        start_s: part of it: until its process could train.
        arrival_steps: how long the others waited for it, in steps.
        arrival_lost_steps: what they lost as it joined, in steps: that wait, and a step that was broken off.
        arrival_slowed_steps: what they lost before, while it fetched the weights beside training, in steps.
    """

    detected_s: float | None = None
    resumed_s: float | None = None
    gap_s: float | None = None
    step_s: float | None = None
    lost_steps: int | None = None
    compared: int = 0
    unequal: int = 0
    restarted: list[int] = field(default_factory=list)
    trained_apart: int | None = None
    back_s: float | None = None
    start_s: float | None = None
    arrival_steps: float | None = None
    arrival_lost_steps: float | None = None
    arrival_slowed_steps: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, rounded to milliseconds."""
        return {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(self).items()}


def step_s(processes: Iterable[Process], begin: float, end: float) -> float | None:
    """Return the median time from one step's begin to the next one's on the ranks, within a span of time."""
    found: list[float] = []
    for process in processes:
        steps = [each for each in process.trained[_WARM:] if begin <= each.begin and each.end <= end]
        found += [after.begin - before.begin for before, after in itertools.pairwise(steps)]
    return statistics.median(found) if found else None


def cost_of(fault: Fault, processes: Sequence[Process], survivors: Sequence[int], num_hosts: int) -> Cost:
    """Return what a fault has cost.

    Args:
        processes: of the whole job.
        survivors: hosts that should go on during the fault. Empty: none can, as in two halves of a partition.
        num_hosts: of the job.
    """
    cost = Cost(step_s=step_s(processes, fault.at - 30, fault.at))
    after = fault.over
    steps = {
        host: [s for p in processes if p.host == host for s in p.steps if fault.at - 60 < s.begin < after]
        for host in range(num_hosts)
    }
    _resumption(cost, fault, processes, survivors, steps)
    _lost(cost, fault, processes, survivors or range(num_hosts), steps)
    seen = [s for each in steps.values() for s in each if s.end > fault.at]
    cost.compared, cost.unequal = differing(seen)
    began = {host: [p for p in processes if p.host == host and fault.at < p.started < after] for host in steps}
    cost.restarted = [host for host in steps if began[host] and host not in fault.hosts]
    if fault.until is not None:
        _return(cost, fault, fault.until, processes, began, steps, num_hosts)
        if fault.kind.startswith("partition"):
            apart = [host for host in range(num_hosts) if host not in survivors]
            made = [
                sum(s.applied and fault.at < s.begin and s.end < fault.until for s in steps[host]) for host in apart
            ]
            cost.trained_apart = max(max(made, default=0) - 1, 0)
    return cost


def _resumption(
    cost: Cost, fault: Fault, processes: Sequence[Process], survivors: Sequence[int], steps: dict[int, list[Step]]
) -> None:
    noticed: list[float] = []
    resumed: list[float] = []
    for host in survivors:
        changes = [
            c
            for p in processes
            if p.host == host
            for c in p.changes
            if c["lost"] and fault.at < c["begin"] < fault.over
        ]
        if changes:
            noticed.append(changes[0]["begin"] - changes[0]["stalled_s"])
            resumed.append(changes[0]["begin"])
            continue
        # A system that does not say so, or no one was lost: the step after the first pause, or the longest one.
        counted = [s for s in steps[host] if s.applied]
        pauses = [
            (b.begin - a.end, b.begin)
            for a, b in itertools.pairwise(counted)
            if b.begin > fault.at and a.begin < fault.over
        ]
        long = [pause for pause in pauses if pause[0] > 3 * (cost.step_s or 0.0)]
        if pauses:
            resumed.append((long[0] if long else max(pauses))[1])
    if len(noticed) == len(survivors) and noticed:
        cost.detected_s = max(min(noticed) - fault.at, 0.0)
        cost.resumed_s = max(resumed) - min(noticed)
    if survivors and len(resumed) == len(survivors):
        cost.gap_s = max(resumed) - fault.at


def _lost(
    cost: Cost, fault: Fault, processes: Sequence[Process], hosts: Iterable[int], steps: dict[int, list[Step]]
) -> None:
    """Attempts that did not count until a host came back, and steps that were made a second time."""
    ready = [p.ready for p in processes if p.host in fault.hosts and p.started > fault.at and p.ready is not None]
    until = min(ready, default=fault.over)
    lost = 0
    for host in hosts:
        dropped = sum(not s.applied and fault.at < s.end and s.begin < until for s in steps[host])
        reached, repeated = -1, 0
        for each in steps[host]:
            repeated += each.applied and each.step <= reached and each.begin > fault.at
            reached = max(reached, each.step) if each.applied else reached
        lost = max(lost, dropped + repeated)
    cost.lost_steps = lost


def _return(
    cost: Cost,
    fault: Fault,
    until: float,
    processes: Sequence[Process],
    began: dict[int, list[Process]],
    steps: dict[int, list[Step]],
    num_hosts: int,
) -> None:
    """When those that were away train with all others again, and how long the others waited for them."""
    away = fault.hosts or list(range(num_hosts))
    back = [
        next((s.begin for s in steps[h] if s.applied and s.begin > until and s.size == num_hosts), None) for h in away
    ]
    known = [each for each in back if each is not None]
    if len(known) == len(away):
        cost.back_s = max(known) - until
    ready = [p.ready for host in away for p in began[host] if p.ready is not None and p.started >= until - 0.5]
    cost.start_s = max(ready) - until if ready else None
    waits = [
        c["stalled_s"] for p in processes if p.host not in away for c in p.changes
        if c["joined"] and until < c["begin"] < fault.over
    ]  # fmt: skip
    if waits and cost.step_s:
        cost.arrival_steps = max(waits) / cost.step_s
    others = [steps[host] for host in steps if host not in away]
    paces = [_joining_s(each, until, num_hosts) for each in others]
    if cost.step_s and (known_paces := [each for each in paces if each is not None]):
        cost.arrival_lost_steps = max(known_paces) / cost.step_s - 1
    if ready and (
        slowed := [each for h in steps if h not in away for each in _slowed(steps[h], max(ready), num_hosts)]
    ):
        cost.arrival_slowed_steps = max(slowed)


def _joining_s(steps: Iterable[Step], after: float, size: int) -> float | None:
    """From the begin of the last step that counted without all ranks to that of the first one with them."""
    counted = [each for each in steps if each.applied]
    pairs = itertools.pairwise(counted)
    return next((b.begin - a.begin for a, b in pairs if b.begin > after and a.size < size == b.size), None)


def _slowed(steps: Iterable[Step], ready: float, size: int) -> list[float]:
    """Of a rank: steps lost, at the pace before `ready`, from then until all ranks train."""
    smaller = [each for each in steps if each.applied and each.size == size - 1]
    spans = [(a.begin, b.begin - a.begin) for a, b in itertools.pairwise(smaller)]
    before, during = [s for at, s in spans if at + s < ready], [s for at, s in spans if at + s >= ready]
    if not before:
        return []
    pace = statistics.median(before)
    return [sum(each - pace for each in during) / pace]


def _first_with(size: int, steps: Iterable[Step], after: float) -> float | None:
    return next((each.begin for each in steps if each.applied and each.begin > after and each.size == size), None)


def differing(steps: Iterable[Step]) -> tuple[int, int]:
    """Count the steps that several ranks made, and those after which their weights differ."""
    digests: dict[int, list[int]] = defaultdict(list)
    for each in steps:
        if each.applied:
            digests[each.step].append(each.digest)
    several = [found for found in digests.values() if len(found) > 1]
    return len(several), sum(len(set(found)) > 1 for found in several)


def splits(processes: Iterable[Process], rule: LostStep | None = None, interval: int = 1) -> int:
    """Count the steps that two hosts made as the same rank, one such step after another: there were two models.

    A single one is none: a host that is lost may have applied its last step, which then does not count. Between two
    exchanges ranks make steps by themselves, some earlier than others. So a rank that is renumbered may still have to
    make steps that another one has made under its new number: up to an interval of them.

    Args:
        rule: of the algorithm. With `LostStep.FREE` each rank counts its own steps, so that a host which is renumbered
            makes steps of numbers that the rank before it has made: nothing is counted.
        interval: longest number of steps from one exchange to the next.
    """
    if rule is LostStep.FREE:
        return 0
    made: dict[tuple[int, int], set[int]] = defaultdict(set)
    for process in processes:
        for each in process.trained:
            made[each.step, each.rank].add(process.host)
    twice = {step for (step, _), hosts in made.items() if len(hosts) > 1}
    return sum(all(step - back in twice for back in range(1, interval + 1)) for step in twice)


def participation(processes: Sequence[Process], begin: float, end: float) -> float | None:
    """Return the mean of `shares`; None if no step was made."""
    found = shares(processes, begin, end)
    return statistics.fmean(found) if found else None


def shares(processes: Sequence[Process], begin: float, end: float) -> list[float]:
    """Return the share of the live ranks that took part, of each step that began within a span of time.

    A rank is alive from when its process could train until its last record, or until the end if that is later.
    """
    spans = [(p.host, p.ready, p.steps[-1].end if p.steps else p.ready) for p in processes if p.ready is not None]
    latest: dict[int, float] = {}
    for host, ready, _ in spans:
        latest[host] = max(latest.get(host, ready), ready)
    lives = [(ready, last if ready < latest[host] else max(last, end)) for host, ready, last in spans]
    sizes: dict[int, tuple[float, int]] = {}
    for process in processes:
        for each in process.trained:
            if begin <= each.begin <= end:
                sizes.setdefault(each.step, (each.begin, each.size))
    found = []
    for at, size in sizes.values():
        alive = sum(ready <= at <= last for ready, last in lives)
        if alive:
            found.append(min(size / alive, 1.0))
    return found


def intervals(
    processes: Sequence[Process], host: int, up: Sequence[Sequence[float]], typical_s: float
) -> list[list[Any]]:
    """Return what a host did: [state, from, until], for the timeline.

    Args:
        up: from when until when its launcher ran.
        typical_s: of a step; a pause of three times as much is a stall.
    """
    found: list[list[Any]] = []

    def add(state: str, begin: float, end: float) -> None:
        if found and found[-1][0] == state and begin - found[-1][2] < typical_s:
            found[-1][2] = end
        elif end > begin:
            found.append([state, begin, end])

    mine = [process for process in processes if process.host == host]
    for number, process in enumerate(mine):
        following = mine[number + 1].started if number + 1 < len(mine) else float("inf")
        counted = process.trained
        if not counted:
            ends = min([following, *(b for a, b in up if a <= process.started < b)])
            add("arriving", process.started, ends if ends < float("inf") else process.started)
            continue
        add("arriving", process.started, counted[0].begin)
        for before, after in itertools.pairwise(counted):
            if after.begin - before.end > 3 * typical_s:
                add("training", before.begin, before.end)
                add("stalled", before.end, after.begin)
            else:
                add("training", before.begin, after.begin)
        add("training", counted[-1].begin, counted[-1].end)
    return found
