"""Faults at random times, as on hosts that may be taken away at any moment, beside a training without any."""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bagua.algorithms import get
from bagua.bench import progress
from benchmarks.faults.analysis import Fault, differing, intervals, shares, splits, step_s
from benchmarks.faults.job import Job, Stuck
from benchmarks.faults.records import Process
from benchmarks.faults.systems import Settings
from benchmarks.faults.task import longest_interval

__all__ = ["ANCHOR_PER_HOUR", "chaos", "growth", "inject", "lost_s", "mean_loss", "undisturbed"]

ANCHOR_PER_HOUR = 125.0  # the rate of ft-diloco's public chaos run, 32 replicas
_SERVES = "bagua-weights"  # the thread that hands the weights to a host
_LAST = 10  # looks at what a process holds, 2 s each
_LEAST = 3  # hosts that train are never fewer by a fault
_LEAST_LOOKS = 8  # at a store: of fewer, one may be of weights on their way and the next one not


def chaos(
    settings: Settings,
    faults: int,
    per_hour: float,
    seed: int,
    limit_s: float = 180.0,
    calm_s: float = 15.0,
    *,
    multiple: int = 0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train under `faults` faults, then the same number of steps without any.

    Half of the faults kill a rank, which its launcher starts again; half kill a host, which returns after a second.

    Args:
        per_hour: of the Poisson process.
        seed: of times and victims.
        limit_s: for whatever is awaited, and between two faults.
        calm_s: without faults, before the first one and after the last one.
        multiple: the number of steps is a multiple of it, and there is no training without faults; 0: there is one.

    Returns:
        a row, and what each host did, for the timeline.
    """
    rng = random.Random(seed)
    done: list[Fault] = []
    problems: list[str] = []
    with Job(settings, limit_s) as job:
        steps, ended = 0, False
        began = first = over = time.monotonic()
        try:
            job.await_everyone(0.0)
            began = time.monotonic()
            time.sleep(calm_s)
            first = time.monotonic()
            inject(job, done, rng, faults, per_hour)
            over = time.monotonic()
            job.await_everyone(over)
            settled = time.monotonic()
            time.sleep(calm_s)
            steps = job.last_step().step + 20
            steps += -steps % max(multiple, 1)
            job.stop_at(steps)
            codes = job.await_end()
            ended = True
            problems += [f"host {index} ended with {code}" for index, code in codes.items() if code]
            left = sum(max(count, 0) for count in job.left_over().values())
            problems += [f"{left} processes are left"] if left else []
        except Stuck as error:
            problems.append(str(error))
            settled = time.monotonic()
            over = max(over, done[-1].at if done else over)
        processes = job.journals.update()
        row = _measure(settings, processes, done, began, first, over, settled)
        timeline = _timeline(job, processes, done, began, settled)
        said = job.texts()[-3000:] if problems else ""
    problems += [f"{row['splits']} steps made by two groups"] if row["splits"] else []
    if ended and multiple:
        row |= mean_loss(processes)
    elif ended:
        row |= _beside_undisturbed(settings, processes, steps, limit_s, problems)
    row |= {"faults": len(done), "per_hour": per_hour, "seed": seed, "steps": steps, "problems": problems, "said": said}
    return row, timeline


def inject(job: Job, done: list[Fault], rng: random.Random, faults: int, per_hour: float) -> None:
    """Strike `faults` times, whenever more than three hosts train; return when all that were killed are started again.

    Raises:
        Stuck: there were too few for so long that nothing will come of it.
    """
    due = last = time.monotonic()
    away: list[tuple[float, int]] = []
    while len(done) < faults or away:
        now = time.monotonic()
        if now - max(last, due) > job.limit_s:
            raise Stuck(f"{len(done)} faults, and then no more than {_LEAST} hosts trained for {job.limit_s:g} s")
        for at, index in [each for each in away if each[0] <= now]:
            away.remove((at, index))
            job.start(index)
        if len(done) < faults and now >= due:
            last_of = {index: fault.at for fault in done for index in fault.hosts}
            training = [i for i in job.processes if _trains(job, i, now, last_of.get(i, 0.0))]
            if len(training) > _LEAST:
                due = max(due, now - 1) + rng.expovariate(per_hour / 3600)
                _strike(job, done, rng, rng.choice(sorted(training)), away)
                last = now
        time.sleep(0.05)


def _strike(job: Job, done: list[Fault], rng: random.Random, victim: int, away: list[tuple[float, int]]) -> None:
    progress.show(f"{job.settings.algorithm}, chaos: fault {len(done) + 1}")
    if rng.random() < 0.5:
        done.append(Fault("kill-rank", [victim], job.signal_rank(victim, signal.SIGKILL)))
    else:
        done.append(Fault("kill-host", [victim], job.kill_host(victim)))
        away.append((time.monotonic() + 1.0, victim))


def _trains(job: Job, index: int, now: float, struck: float) -> bool:
    """A rank that was started since the host was struck last has made a step not long ago."""
    found = [process for process in job.journals.update() if process.host == index and process.started > struck]
    return bool(found and found[-1].trained) and now - found[-1].trained[-1].end < 2 + job.settings.step_ms / 200


def _measure(
    settings: Settings,
    processes: list[Process],
    done: list[Fault],
    began: float,
    first: float,
    over: float,
    settled: float,
) -> dict[str, Any]:
    typical = step_s(processes, began, first)
    fault_free = _rate(processes, began, first)
    during = _rate(processes, first, over)
    causes = [each.at for each in done]
    took_part = shares(processes, first, over)
    lost = lost_s(processes, first, settled, typical, causes) if typical else None
    per_fault = lost / len(done) if lost is not None and done else None
    compared, unequal = differing(step for process in processes for step in process.steps)
    return {
        "algorithm": settings.algorithm,
        "hosts": settings.hosts,
        "step_s": typical,
        "chaos_s": over - first,
        "lost_s": lost,
        "throughput": during / fault_free if during is not None and fault_free else None,
        "lost_s_per_fault": per_fault,
        "throughput_at_anchor": None if per_fault is None else 1 - per_fault * ANCHOR_PER_HOUR / 3600,
        "stall_s": [round(c["stalled_s"], 3) for p in processes for c in p.changes if first < c["begin"] < settled],
        "participation": statistics.fmean(took_part) if took_part else None,
        "exchanges": len(took_part),
        "exchanges_below_90": sum(each < 0.9 for each in took_part),
        "compared": compared,
        "unequal": unequal,
        "equal_expected": get(settings.algorithm).exactness.replicas_equal,
        "splits": splits(processes, get(settings.algorithm).lost_step, longest_interval(settings.algorithm)),
        "growth": growth(processes, first),
        "keys": keys_of_last_store(processes),
        "new_threads": new_threads(processes, first),
    }


def _rate(processes: list[Process], begin: float, end: float) -> float | None:
    """Steps a second of the job."""
    made = {s.step for p in processes for s in p.trained if begin <= s.end < end}
    return len(made) / (end - begin) if end - begin > 1 else None


def lost_s(processes: list[Process], begin: float, end: float, typical_s: float, causes: Sequence[float] = ()) -> float:
    """Return for how long no rank of the job trained because of faults, beyond the time of a step.

    Args:
        causes: times of faults. Pauses in which one of them lies, or a change of the members, count. Others are those
            of a busy machine.
    """
    ends: dict[int, float] = {}
    causes = [*causes, *(change["begin"] for process in processes for change in process.changes)]
    for process in processes:
        for step in process.trained:
            if begin <= step.end <= end:
                ends[step.step] = min(step.end, ends.get(step.step, step.end))
    times = [begin, *sorted(ends.values()), end]
    return sum(
        b - a - typical_s
        for a, b in itertools.pairwise(times)
        if b - a > 2 * typical_s and any(a <= cause <= b for cause in causes)
    )


def growth(processes: list[Process], after: float) -> dict[str, float]:
    """Return by how much what a survivor holds has grown from before the first fault to its end, at most of all.

    Of the ranks, and of their launchers under `launcher_...`. `threads` are without those that hand weights to hosts
    that arrive, two for each such host; `serving` counts these hosts. `keys_per_change`: of the store in which groups
    met last, from the first half of the changes to the second with as many members, for each change; not if there were
    few.
    """
    found: dict[str, float] = {}
    for prefix, looks in _looks(processes):
        early = [each for at, each in looks if at < after]
        late = [each for at, each in looks if at > after]
        # It may just be opening groups or sending weights: what it held least in the last seconds has stayed. One that
        # was killed before says nothing: it may have sent weights to several all the time.
        for key in late[-1] if early and len(late) >= _LAST else ():
            value = min(each.get(key, float("inf")) for each in late[-_LAST:])
            grown = value - early[-1].get(key, value)
            found[prefix + key] = max(grown, found.get(prefix + key, grown))
    same = keys_of_last_store(processes)
    first, second = same[: len(same) // 2], same[len(same) // 2 :]
    if len(same) >= _LEAST_LOOKS and second[-1][0] > first[0][0]:
        # Those of the groups in use and of the last ones are there, some for each member, and of weights on their way:
        # compare the most with as many members.
        most: list[dict[int, int]] = [{}, {}]
        for half, found_keys in zip((first, second), most, strict=True):
            for _, members, keys in half:
                found_keys[members] = max(keys, found_keys.get(members, 0))
        changes = statistics.fmean(look[0] for look in second) - statistics.fmean(look[0] for look in first)
        if both := most[0].keys() & most[1].keys():
            found["keys_per_change"] = max(most[1][members] - most[0][members] for members in both) / changes
    return found


def _looks(processes: list[Process]) -> list[tuple[str, list[tuple[float, dict[str, int]]]]]:
    """Return "" for a rank or "launcher_", and times and what it held then. A launcher outlives its ranks."""
    ranks = [("", [(each["at"], _apart(each)) for each in process.resources]) for process in processes]
    launchers: dict[tuple[int, int], list[tuple[float, dict[str, int]]]] = defaultdict(list)
    for process in processes:
        for each in process.resources:
            launchers[process.host, each.get("launcher_pid", 0)].append((each["at"], each["launcher"]))
    return [*ranks, *(("launcher_", looks) for looks in launchers.values())]


def _apart(look: dict[str, Any]) -> dict[str, int]:
    """What a rank holds, with threads that serve arriving hosts apart: each has another one, of its store."""
    serving = Counter(look.get("names", ()))[_SERVES]
    held = look["resources"]
    return {**held, "serving": serving} | ({"threads": held["threads"] - 2 * serving} if "threads" in held else {})


def new_threads(processes: list[Process], after: float) -> dict[str, int]:
    """Return names of Python's threads, and how many more of each the rank had at its end whose threads grew most.

    "others" are those of torch and gloo. For whoever looks for a leak.
    """
    most: dict[str, int] = {}
    for process in processes:
        early = [each for each in process.resources if each["at"] < after]
        late = [each for each in process.resources if each["at"] > after]
        if early and late:
            counts = [Counter(each.get("names", ())) for each in (early[-1], late[-1])]
            total = late[-1]["resources"].get("threads", 0) - early[-1]["resources"].get("threads", 0)
            found = dict(counts[1] - counts[0])
            found["others"] = total - (counts[1].total() - counts[0].total())
            most = max(most, found, key=lambda names: sum(names.values()))
    return most


def keys_of_last_store(processes: list[Process]) -> list[tuple[int, int, int]]:
    """Return epochs, numbers of members and of keys of the store in which groups met last."""
    keys = sorted((k for process in processes for k in process.keys), key=lambda each: each["epoch"])
    return [(each["epoch"], each["members"], each["keys"]) for each in keys if each["store"] == keys[-1]["store"]]


def _beside_undisturbed(
    settings: Settings, processes: list[Process], steps: int, limit_s: float, problems: list[str]
) -> dict[str, Any]:
    """The loss after as many steps with all hosts, to which nothing happens."""
    progress.show(f"{settings.algorithm}: undisturbed, {steps} steps")
    here = mean_loss(processes)
    with Job(undisturbed(settings), limit_s + steps) as job:
        job.stop_at(steps)
        try:
            job.await_end()
        except Stuck as error:
            problems.append(f"undisturbed: {error}")
        there = mean_loss(job.journals.update())
    if not here or not there:
        return {}
    calm = {f"undisturbed_{key}": value for key, value in there.items()}
    return {**here, **calm, "loss_ratio": here["loss"] / there["loss"]}


def undisturbed(settings: Settings) -> Settings:
    """Those of a training to which nothing happens. It is not timed, so steps need no emulated compute.

    But those of "async" do: rounds run beside steps, and so how often weights are averaged depends on their length.
    """
    return settings if settings.algorithm == "async" else replace(settings, step_ms=0.0)


def mean_loss(processes: Sequence[Process]) -> dict[str, float]:
    """Return "loss" and "own_loss" of the ranks that came to the end, their means; nothing if none did.

    The first is of the weights that `bagua.average_parameters` gives, as a user would save them, the second of each
    rank's own before it: where ranks count steps on their own, those behind made their last ones alone.
    """
    ends = [process.finished for process in processes if process.finished]
    return {key: statistics.fmean(end[key] for end in ends) for key in ("loss", "own_loss")} if ends else {}


def _timeline(job: Job, processes: list[Process], done: list[Fault], began: float, end: float) -> dict[str, Any]:
    typical = step_s(processes, began, end) or 0.1

    def since(at: float) -> float:
        return round(min(max(at, began), end) - began, 2)

    hosts = []
    for host in range(job.settings.hosts):
        spans = intervals(processes, host, job.up[host], typical)
        hosts.append([[state, since(a), since(b)] for state, a, b in spans if b > began and a < end])
    faults = [[each.kind, each.hosts[0], since(each.at)] for each in done]
    return {"algorithm": job.settings.algorithm, "seconds": since(end), "hosts": hosts, "faults": faults}
