"""All scenarios for one system and algorithm, in as few jobs as it takes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from bagua.algorithms import LostStep, LowPrecisionDecentralized, get
from bagua.algorithms.rounds import interval_of
from bagua.bench import progress
from benchmarks.faults.analysis import Fault, cost_of, splits
from benchmarks.faults.job import Job, Stuck
from benchmarks.faults.scenarios import SCENARIOS
from benchmarks.faults.systems import Settings
from benchmarks.faults.task import configuration_of, longest_interval

__all__ = ["tour"]

_SETTLE_S = 1.0
_STEPS = 15  # before a fault, so that a step's usual time is known and systems that restart have saved something


def tour(settings: Settings, names: Sequence[str], limit_s: float = 120.0) -> list[dict[str, Any]]:
    """Play the scenarios one after the other; where a job does not go on, the next one begins another.

    Returns:
        a row for each.
    """
    rows: list[dict[str, Any]] = []
    waiting = list(names)
    while waiting:
        played: list[tuple[str, Fault]] = []
        with Job(settings, limit_s) as job:
            problem = ""
            try:
                job.await_everyone(0.0)
                while waiting and not problem:
                    name = waiting.pop(0)
                    progress.show(f"{settings.system}, {settings.algorithm}, {settings.hosts} hosts: {name}")
                    fault = Fault(name, [], time.monotonic())
                    played.append((name, fault))
                    problem = _play(job, name, fault)
                if not problem:
                    problem = _end(job)
            except Stuck as error:
                problem = str(error)
                if not played:
                    played.append((waiting.pop(0), Fault("none", [], time.monotonic())))
            if problem:
                played[-1][1].problems.append(problem)
                played[-1][1].facts["said"] = job.texts()[-2000:]
            rows += [_row(job, settings, name, fault) for name, fault in played]
        progress.clear()
    return rows


def _play(job: Job, name: str, fault: Fault) -> str:
    """One scenario; returns what did not come about, or ""."""
    began = time.monotonic()
    try:
        job.await_steps(range(job.settings.hosts), began, _STEPS, job.settings.hosts)
        SCENARIOS[name].play(job, fault)
        back = fault.at if fault.until is None else fault.until
        job.await_everyone(back)
        time.sleep(_SETTLE_S)
    except Stuck as error:
        return str(error)
    finally:
        fault.over = time.monotonic()
    return ""


def _end(job: Job) -> str:
    try:
        codes = job.stop()
    except Stuck as error:
        return str(error)
    bad = {index: code for index, code in codes.items() if code}
    left = {index: count for index, count in job.left_over().items() if count > 0}
    ended = [process for process in job.journals.update() if process.finished]
    if bad:
        return f"exit codes by host: {bad}"
    if left:
        return f"processes left by host: {left}"
    return "" if len(ended) == job.settings.hosts else f"{len(ended)} ranks came to the end"


def _row(job: Job, settings: Settings, name: str, fault: Fault) -> dict[str, Any]:
    processes = job.journals.update()
    scenario = SCENARIOS[name]
    everyone = range(settings.hosts)
    survivors = [host for host in everyone if host not in fault.hosts] if scenario.goes_on else []
    cost = cost_of(fault, processes, survivors, settings.hosts)
    facts = dict(fault.facts)
    received = facts.pop("received", [])
    state = max((process.state_bytes for process in processes), default=0)
    equal = settings.system != "bagua" or get(settings.algorithm).exactness.replicas_equal
    problems = list(fault.problems)
    apart = 0
    if settings.system == "bagua":
        apart = splits(processes, get(settings.algorithm).lost_step, longest_interval(settings.algorithm))
    problems += [f"{apart} steps made by two groups"] if apart else []
    if equal and cost.unequal:
        problems.append(f"weights differ after {cost.unequal} of {cost.compared} steps")
    return {
        "system": settings.system,
        "algorithm": settings.label,
        "hosts": settings.hosts,
        "fault": name,
        "local_steps": local_steps(settings),
        "waits": settings.system != "bagua" or get(settings.algorithm).lost_step is not LostStep.FREE,
        "equal_expected": equal,
        **cost.as_dict(),
        **facts,
        "state_bytes": state,
        "transfer_s": transfer_s(received, state),
        "problems": problems,
    }


def local_steps(settings: Settings) -> int:
    """Return how many steps a rank makes without the others: 0 unless the algorithm exchanges now and then.

    With one that waits for nobody those until the silence of the others is a loss, and one in progress at either end.
    In low-precision gossip ranks wait for their neighbours on the ring only, and for what these have sent in the step
    before: those until the wait has come from the ends of the longest part to its middle.
    """
    if settings.system != "bagua":
        return 0
    algorithm = configuration_of(settings.algorithm).make(10_000)
    if algorithm.lost_step is LostStep.FREE:
        return math.ceil(settings.detect_s / (settings.step_ms / 1000)) + 2
    if isinstance(algorithm, LowPrecisionDecentralized):
        return settings.hosts // 4
    return interval_of(algorithm) - 1


def transfer_s(received: Sequence[tuple[float, int]], state: int) -> float | None:
    """Return how long the middle 80 % of the state took to arrive; None if less than all has.

    Args:
        received: times, and bytes that had come by then.
        state: bytes of weights and optimizer state.
    """
    if not state or not received or received[-1][1] < state:
        return None
    first = next(at for at, got in received if got >= 0.1 * state)
    last = next(at for at, got in received if got >= 0.9 * state)
    return round(last - first, 3)
