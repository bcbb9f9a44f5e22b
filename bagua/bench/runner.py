"""Runs cases in workers, watches over them, and starts new workers for the rest when one case breaks them."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from bagua.bench import results_file
from bagua.bench.hosts import Hosts, rank_environment, worker_command
from bagua.bench.measure import Job
from bagua.bench.primitives import Transfers
from bagua.bench.worker import TRACE

__all__ = ["Outcome", "run_cases"]

_POLL_S = 0.02
_START_S = 120.0
_GRACE_S = 2.0  # for the other ranks' messages, once one has failed


class Outcome(NamedTuple):
    """What came of one case: one entry per rank, or what went wrong; and what the cluster saw meanwhile.

    `congestion` is how the hosts' TCP adapted its rate, "" if they had none of their own.
    """

    number: int
    name: str
    ranks: list[dict[str, Any]]
    error: str = ""
    report: Any = None
    trace: str = ""
    congestion: str = ""


class _Watch:
    """One set of workers."""

    def __init__(self, hosts: Hosts, folder: Path, content: dict[str, Any], num_hosts: int) -> None:
        self.hosts, self.folder = hosts, folder
        results_file.write(folder / "job.json", content, indent=None)
        # Ranks meet in a store of their own; other systems only look whether these are there.
        env = {
            **rank_environment(hosts, num_hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": hosts.address,
            "MASTER_PORT": "29500",
        }
        self.log = (folder / "log.txt").open("w")
        self.processes: list[subprocess.Popen[Any]] = hosts.start(worker_command(folder), env, self.log)
        self._switched = 0
        self._before: Any = None
        self.report: Any = None

    def attend(self) -> None:
        """Change the links if the workers ask for it."""
        want = self.folder / f"want-{self._switched + 1}.json"
        if want.exists():
            self._switched += 1
            phase = json.loads(want.read_text())
            if phase == "measure":
                self.hosts.set_phase(phase)
                self._before = self.hosts.report()
            else:
                if self._before is not None:
                    self.report, self._before = self.hosts.report().since(self._before), None
                self.hosts.set_phase(phase)
            results_file.write(self.folder / f"done-{self._switched}.json", True, indent=None)

    def failure(self) -> str:
        """The first rank's complaint, if a worker has ended badly; empty otherwise."""
        if not any(process.poll() not in (None, 0) for process in self.processes):
            return ""
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and not list(self.folder.glob("error-*.json")):
            time.sleep(_POLL_S)
        errors = [json.loads(path.read_text()) for path in self.folder.glob("error-*.json")]
        if errors:
            return min(errors, key=lambda each: each["time"])["error"]
        codes = ", ".join(str(process.poll()) for process in self.processes)
        return f"a rank ended without an error message (exit codes {codes}): {self._last_line()}"

    def _last_line(self) -> str:
        self.log.flush()
        lines = [line for line in (self.folder / "log.txt").read_text().splitlines() if line.strip()]
        return lines[-1] if lines else "no output"

    def end(self) -> None:
        """Leave no rank behind."""
        self.hosts.kill()
        for process in self.processes:
            process.wait(30)
        self.log.close()


def run_cases(
    make_hosts: Callable[[], Hosts],
    num_hosts: int,
    job: Job | Transfers,
    timeout_s: float,
    told: Callable[[Outcome], None],
    traces: Path | None = None,
) -> list[Outcome]:
    """Run all cases of `job`; each ends with an outcome, whatever happens.

    Args:
        make_hosts: makes the hosts anew; those after a failure have no connections of the broken ones.
        timeout_s: for one case, set-up included.
        told: called with each outcome as it comes.
        traces: folder for timelines.
    """
    outcomes: list[Outcome] = []
    left = list(job.cases)
    while left:
        hosts = make_hosts()
        try:
            done = _run_some(
                hosts, num_hosts, replace(job, cases=tuple(left), switches=hosts.switches), timeout_s, told
            )
        finally:
            hosts.close()
        outcomes += done
        left = left[len(done) :]
        if traces is not None:
            _keep_traces(done, traces)
    return outcomes


def _run_some(
    hosts: Hosts, num_hosts: int, job: Job | Transfers, timeout_s: float, told: Callable[[Outcome], None]
) -> list[Outcome]:
    """Outcomes up to and with the first that failed."""
    done: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as name:
        folder = Path(name)
        watch = _Watch(hosts, folder, {"kind": job.kind, **asdict(job)}, num_hosts)
        try:
            for place, (number, contender) in enumerate(job.cases):
                limit_s = timeout_s + (_START_S if place == 0 else 0)
                done.append(_await(watch, number, contender, limit_s))
                told(done[-1])
                if done[-1].error:
                    break
        finally:
            watch.end()
    return done


def _await(watch: _Watch, number: int, contender: str, limit_s: float) -> Outcome:
    deadline, result = time.monotonic() + limit_s, watch.folder / f"result-{number}.json"
    while not result.exists():
        watch.attend()
        error = watch.failure()
        if not error and time.monotonic() > deadline:
            error = f"not finished within {limit_s:.0f} s"
        if error and not result.exists():
            return Outcome(number, contender, [], error)
        time.sleep(_POLL_S)
    trace = watch.folder / TRACE.format(number)
    return Outcome(
        number,
        contender,
        json.loads(result.read_text()),
        report=watch.report,
        trace=trace.read_text() if trace.exists() else "",
        congestion=watch.hosts.congestion,
    )


def _keep_traces(outcomes: Sequence[Outcome], folder: Path) -> None:
    for outcome in outcomes:
        if outcome.trace:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{outcome.name.partition(':')[0]}.trace.json").write_text(outcome.trace)
