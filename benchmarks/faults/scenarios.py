"""The faults, one after another in one job."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from bagua.lab import Link
from benchmarks.faults.analysis import Fault
from benchmarks.faults.job import Job

__all__ = ["SCENARIOS", "Scenario"]

_AWAY_STEPS = 5  # that the others make before a host returns


@dataclass(frozen=True)
class Scenario:
    """One row of the table.

    Attributes:
        title: of the row.
        play: does it; returns when it began and was undone, in a `Fault`.
        goes_on: whether the hosts that it is not done to should go on meanwhile.
        restarting: systems that restart are put to it, too.
    """

    title: str
    play: Callable[[Job, Fault], None]
    goes_on: bool = True
    restarting: bool = False


def kill_rank(job: Job, fault: Fault) -> None:
    """SIGKILL to the last rank; its launcher starts it again."""
    fault.hosts = [job.settings.hosts - 1]
    fault.at = job.signal_rank(fault.hosts[0], signal.SIGKILL)
    fault.until = fault.at


def kill_host(job: Job, fault: Fault, index: int | None = None) -> None:
    """SIGKILL to all processes of a host, which returns when the others have gone on."""
    victim = job.settings.hosts - 2 if index is None else index
    fault.hosts = [victim]
    fault.at = job.kill_host(victim)
    _return(job, fault)


def kill_first(job: Job, fault: Fault) -> None:
    """The same to the host that serves the store of the groups."""
    serves = next((host.index for host in job.hosts if _serves(job, host.index)), 0)
    kill_host(job, fault, serves)


def _serves(job: Job, index: int) -> bool:
    """The store is that of the host of rank 0."""
    steps = job.newest(index).trained
    return bool(steps) and steps[-1].rank == 0


def vanish(job: Job, fault: Fault) -> None:
    """A host loses its network and then its power: no connection is closed."""
    victim = 1 % job.settings.hosts
    fault.hosts = [victim]
    fault.at = time.monotonic()
    job.hosts[victim].cut()
    job.kill_host(victim)
    try:
        job.await_steps(_others(job, fault), fault.at, _AWAY_STEPS, job.settings.hosts - 1)
    finally:
        job.hosts[victim].restore()
    fault.until = job.start(victim)


def _return(job: Job, fault: Fault) -> None:
    job.await_steps(_others(job, fault), fault.at, _AWAY_STEPS)
    before = {host.name: host.received_bytes for host in job.cluster.report().hosts}
    fault.until = job.start(fault.hosts[0])
    fault.facts["received"] = _received(job, fault, before)


def _received(job: Job, fault: Fault, before: dict[str, int]) -> list[tuple[float, int]]:
    """Bytes that the host has received by now and then, until it trains: most of them are the state."""
    host = job.hosts[fault.hosts[0]]
    found: list[tuple[float, int]] = []
    assert fault.until is not None
    since = fault.until
    looked = 0.0

    def trains() -> bool:
        nonlocal looked
        now = time.monotonic()
        got = job.cluster.report().hosts[host.index].received_bytes - before[host.name]
        found.append((now - since, got))
        if now - looked < 0.5:
            return False
        looked = now
        process = job.newest(host.index)
        return process.started > since - 0.5 and len(process.trained) > 0

    deadline = since + job.limit_s
    while not trains() and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _others(job: Job, fault: Fault) -> list[int]:
    return [index for index in range(job.settings.hosts) if index not in fault.hosts]


def partition(seconds: float, minority: bool) -> Callable[[Job, Fault], None]:
    """The last host is cut off from the others, or the network falls into two halves."""

    def play(job: Job, fault: Fault) -> None:
        everyone = list(range(job.settings.hosts))
        at = len(everyone) - 1 if minority else len(everyone) // 2
        fault.hosts = everyone[at:] if minority else []
        fault.at = time.monotonic()
        job.cluster.partition(everyone[:at], everyone[at:])
        time.sleep(seconds)
        job.cluster.heal()
        fault.until = time.monotonic()

    return play


def stop_rank(seconds: float) -> Callable[[Job, Fault], None]:
    """SIGSTOP to a rank; if its launcher has not killed it by then, it wakes."""

    def play(job: Job, fault: Fault) -> None:
        fault.hosts = [1 % job.settings.hosts]
        process = job.newest(fault.hosts[0])
        fault.at = job.signal_rank(fault.hosts[0], signal.SIGSTOP)
        time.sleep(seconds)
        if job.newest(fault.hosts[0]) is process:
            job.signal_rank(fault.hosts[0], signal.SIGCONT)
        fault.until = time.monotonic()

    return play


def stop_host(seconds: float) -> Callable[[Job, Fault], None]:
    """SIGSTOP to all processes of a host, the launcher too."""

    def play(job: Job, fault: Fault) -> None:
        fault.hosts = [job.settings.hosts - 1]
        fault.at = time.monotonic()
        job.hosts[fault.hosts[0]].pause()
        time.sleep(seconds)
        job.hosts[fault.hosts[0]].resume()
        fault.until = time.monotonic()

    return play


def loss(seconds: float) -> Callable[[Job, Fault], None]:
    """2 % of the packets of all links are lost."""

    def play(job: Job, fault: Fault) -> None:
        fault.at = time.monotonic()
        for host in job.hosts:
            host.set_link(replace(job.cluster.link, loss=0.02))
        time.sleep(seconds)
        fault.facts["steps"] = _steps_between(job, fault.at, time.monotonic())
        for host in job.hosts:
            host.set_link(Link(job.settings.bandwidth))
        fault.until = time.monotonic()

    return play


def slow(seconds: float) -> Callable[[Job, Fault], None]:
    """A host computes at a tenth of its speed."""

    def play(job: Job, fault: Fault) -> None:
        victim = 1 % job.settings.hosts
        fault.at = time.monotonic()
        job.hosts[victim].slow(0.1)
        time.sleep(seconds)
        fault.facts["steps"] = _steps_between(job, fault.at, time.monotonic())
        job.hosts[victim].slow(1.0)
        fault.until = time.monotonic()
        fault.facts["named"] = job.texts().count("kept this host waiting")

    return play


def _steps_between(job: Job, begin: float, end: float) -> int:
    return len({s.step for p in job.journals.update() for s in p.trained if begin < s.begin < end})


SCENARIOS: dict[str, Scenario] = {
    "kill-rank": Scenario("kill -9 of a rank", kill_rank, restarting=True),
    "kill-host": Scenario("kill -9 of a host, which returns", kill_host, restarting=True),
    "kill-store": Scenario("kill -9 of the store's host", kill_first, restarting=True),
    "vanish": Scenario("host vanishes (no connection closed)", vanish),
    "partition-minority-10": Scenario("one host cut off for 10 s", partition(10, True)),
    "partition-halves-10": Scenario("two halves for 10 s", partition(10, False), goes_on=False),
    "partition-minority-60": Scenario("one host cut off for 60 s", partition(60, True)),
    "partition-halves-60": Scenario("two halves for 60 s", partition(60, False), goes_on=False),
    "stop-rank": Scenario("SIGSTOP of a rank, 20 s", stop_rank(20)),
    "stop-host": Scenario("SIGSTOP of a host, 20 s", stop_host(20)),
    "loss": Scenario("2 % packet loss, 15 s", loss(15), goes_on=False),
    "slow": Scenario("host at a tenth of the speed, 15 s", slow(15), goes_on=False),
}
