"""Accidents in an emulated cluster, again and again: does the elastic training go on, and what does it lose?

    python -m benchmarks.elastic --runs 20 --json elastic.json
    python -m benchmarks.elastic --runs 1 --scenario kill-host-0

Each run trains `examples/elastic_digits.py` on hosts of an emulated cluster (one rank each), lets one thing happen at a
step that the seed decides, and reads what every rank wrote down: which images each step used, what was committed, what
was restored. A run is good if it ends by itself, has lost at most the steps since the last commit, and if the steps
that count used every image of each epoch once (but for the repetitions at the end of an epoch that make ranks equal).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bagua.lab import Cluster

__all__ = ["SCENARIOS", "Run", "judge", "main", "run"]

ROOT = Path(__file__).resolve().parent.parent
COMMIT_EVERY = 10
NUM_IMAGES = 1437
PORT = 29400
CONFIG = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=90,read_timeout=20"


@dataclass
class Run:
    """What came of one run.

    Attributes:
        hung: it did not end by itself.
        step: of the accident.
        recovered_s: from the accident to the next step that a training made.
        meetings: how often ranks were started together.
        lost_steps: at each restart, steps made since the commit that was restored.
        problems: what went wrong; nothing in a good run.
    """

    scenario: str
    seed: int
    hosts: int
    hung: bool = False
    step: int = 0
    seconds: float = 0.0
    recovered_s: float | None = None
    meetings: int = 0
    lost_steps: list[int] = field(default_factory=list)
    repeated: int = 0
    accuracy: float | None = None
    problems: list[str] = field(default_factory=list)


def journals(folder: Path) -> list[list[dict[str, Any]]]:
    """What the ranks wrote, the first to begin at the beginning. The last line of one that was killed may be cut."""
    found = []
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().split("\n")[:-1]
        if lines:
            found.append([json.loads(line) for line in lines])
    return sorted(found, key=lambda journal: journal[0]["began"])


def meetings(found: list[list[dict[str, Any]]]) -> list[list[list[dict[str, Any]]]]:
    """The journals by the ranks that were started together, in time; those that got to their first step."""
    by_name: dict[str, list[list[dict[str, Any]]]] = {}
    for journal in found:
        if any("samples" in line for line in journal):
            by_name.setdefault(journal[0]["meeting"], []).append(journal)
    return list(by_name.values())


def judge(result: Run, found: list[list[dict[str, Any]]], epochs: int) -> None:
    """Compare what was done with what should have been; fills in `result`."""
    together = meetings(found)
    result.meetings = len(together)
    if not together:
        result.problems.append("no training took place")
        return
    starts = [next(line["step"] for line in each[0] if "restored" in line) for each in together]
    for each, start in zip(together[:-1], starts[1:], strict=True):
        done = max(line["step"] for journal in each for line in journal if "samples" in line)
        result.lost_steps.append(done - start)
        if not 0 <= done - start <= COMMIT_EVERY:
            result.problems.append(f"lost {done - start} steps")
    used = [Counter[int]() for _ in range(epochs)]
    for each, start, end in zip(together, starts, [*starts[1:], 10**9], strict=True):
        if len({journal[0]["rank"] for journal in each}) != each[0][0]["size"]:
            result.problems.append("a rank left no journal")
        for journal in each:
            for line in journal:
                if "samples" in line and start < line["step"] <= end:
                    used[line["epoch"]].update(line["samples"])
    for epoch, counts in enumerate(used):
        missing, extra = NUM_IMAGES - len(counts), sum(counts.values()) - len(counts)
        result.repeated += extra
        if missing or extra >= result.hosts:
            result.problems.append(f"epoch {epoch}: {missing} images left out, {extra} repeated")
    ends = [line["accuracy"] for journal in found for line in journal if "ended" in line]
    if not ends:
        result.problems.append("no rank came to the end")
    result.accuracy = ends[0] if ends else None


def _now(folder: Path) -> tuple[int, float]:
    """The newest meeting's last step, and when that meeting began."""
    together = meetings(journals(folder))
    if not together:
        return 0, 0.0
    last = together[-1]
    return max(line.get("step", 0) for journal in last for line in journal), last[0][0]["began"]


@dataclass
class Stage:
    """A training that runs, for the scenarios to meddle with."""

    cluster: Cluster
    folder: Path
    start: Callable[[int], subprocess.Popen[Any]]
    processes: dict[int, subprocess.Popen[Any]]
    rng: random.Random
    deadline: float

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Look again and again.

        Raises:
            TimeoutError: it did not come about before the deadline, or the training has ended.
        """
        while not condition():
            if time.monotonic() > self.deadline or all(p.poll() is not None for p in self.processes.values()):
                raise TimeoutError(what)
            time.sleep(0.1)

    def kill_host(self, index: int) -> None:
        """All its processes at once."""
        self.cluster.hosts[index].kill()
        self.processes.pop(index).wait(20)


def kill_rank(stage: Stage) -> None:
    """SIGKILL to one rank."""
    newest = meetings(journals(stage.folder))[-1]
    journal = stage.rng.choice(newest)[0]
    code = f"import os; os.kill({journal['pid']}, 9)"
    stage.cluster.hosts[journal["host"]].run([sys.executable, "-I", "-S", "-c", code], timeout=20)


def kill_host(stage: Stage) -> None:
    """A host that does not serve the rendezvous."""
    stage.kill_host(stage.rng.randrange(1, len(stage.cluster.hosts)))


def kill_host_0(stage: Stage) -> None:
    """The host that serves the rendezvous, and has rank 0."""
    stage.kill_host(0)


def host_returns(stage: Stage) -> None:
    """4 -> 3 -> 4: any host, the first one too; it comes back when the others have gone on for a while."""
    index = stage.rng.randrange(len(stage.cluster.hosts))
    _, before = _now(stage.folder)
    stage.kill_host(index)
    stage.wait_until(lambda: _now(stage.folder)[1] > before, "the others did not go on")
    time.sleep(stage.rng.uniform(0, 2))
    stage.processes[index] = stage.start(index)
    stage.wait_until(
        lambda: len(meetings(journals(stage.folder))[-1]) == len(stage.cluster.hosts), "the host was not taken in"
    )


SCENARIOS: dict[str, tuple[Callable[[Stage], None], int]] = {  # and the number of hosts
    "kill-rank": (kill_rank, 3),
    "kill-host": (kill_host, 3),
    "kill-host-0": (kill_host_0, 3),
    "host-returns": (host_returns, 4),
}


def run(scenario: str, seed: int, *, epochs: int = 6, step_ms: float = 30, limit_s: float = 300) -> Run:
    """One training with one accident."""
    accident, hosts = SCENARIOS[scenario]
    rng = random.Random(f"{scenario} {seed}")
    result = Run(scenario, seed, hosts, step=rng.randrange(12, 60))
    folder = Path(tempfile.mkdtemp(prefix="bagua-elastic-"))
    began = time.monotonic()
    if scenario == "host-returns":
        epochs, step_ms = epochs * 2, step_ms * 2  # the training must still be there when the host is back
    try:
        with Cluster(hosts, seed=seed) as cluster:
            command = _command(cluster, seed, epochs, step_ms, folder)

            def start(index: int) -> subprocess.Popen[Any]:
                out = open(folder / f"host{index}-{time.time_ns()}.txt", "w")  # noqa: SIM115
                with out:
                    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
                    return cluster.hosts[index].popen(command, env=env, stdout=out, stderr=out, cwd=str(ROOT))

            processes = {index: start(index) for index in range(hosts)}
            stage = Stage(cluster, folder, start, processes, rng, began + limit_s)
            try:
                stage.wait_until(lambda: _now(folder)[0] >= result.step, "the training did not begin")
                at = time.time()
                accident(stage)
                stage.wait_until(lambda: _now(folder)[1] > at, "no training after the accident")
                result.recovered_s = round(_first_step(folder, at) - at, 1)
                for index, process in stage.processes.items():
                    code = process.wait(max(stage.deadline - time.monotonic(), 0.1))
                    if code:
                        result.problems.append(f"host {index} ended with {code}")
            except (subprocess.TimeoutExpired, TimeoutError) as error:
                result.hung = True
                result.problems.append(str(error))
        judge(result, journals(folder), epochs)
    finally:
        result.seconds = round(time.monotonic() - began, 1)
        if result.problems:
            _keep(folder, result)
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _first_step(folder: Path, after: float) -> float:
    """When the first training that began later made its first step; the time of the look at it is close enough."""
    return time.time() if any(each[0][0]["began"] > after for each in meetings(journals(folder))) else after


def _keep(folder: Path, result: Run) -> None:
    """What the hosts of a bad run said, at the end of it, on stderr."""
    for path in sorted(folder.glob("host*.txt")):
        print(f"--- {result.scenario} seed {result.seed}: {path.name}", file=sys.stderr)
        print("\n".join(path.read_text(errors="replace").splitlines()[-40:]), file=sys.stderr)


def _command(cluster: Cluster, seed: int, epochs: int, step_ms: float, folder: Path) -> list[str]:
    endpoints = ",".join(f"{host.address}:{PORT}" for host in cluster.hosts)
    return [
        *(sys.executable, "-m", "bagua.cli.main", "run", "--nnodes", f"2:{len(cluster.hosts)}"),
        *("--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoints),
        *("--rdzv-id", f"elastic{seed}", "--rdzv-conf", CONFIG),
        *("examples/elastic_digits.py", "--epochs", str(epochs), "--seed", str(seed), "--step-ms", str(step_ms)),
        *("--commit-every", str(COMMIT_EVERY), "--timeout", "30", "--journal", str(folder)),
    ]


def undisturbed(seed: int, epochs: int) -> float:
    """Test accuracy of the same training in one process, to which nothing happens."""
    with tempfile.TemporaryDirectory(prefix="bagua-elastic-") as folder:
        words = ["examples/elastic_digits.py", "--epochs", str(epochs), "--seed", str(seed), "--journal", folder]
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        subprocess.run([sys.executable, *words], cwd=ROOT, env=env, check=True, capture_output=True, timeout=200)
        return next(line["accuracy"] for journal in journals(Path(folder)) for line in journal if "ended" in line)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print a line for each run.

    Returns:
        0 if all runs were good.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description="Accidents in elastic training.")
    parser.add_argument("--runs", type=int, default=20, help="of each scenario (20)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="may be repeated; default: all")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="a run that takes longer hangs (300)")
    parser.add_argument("--undisturbed", type=int, default=0, metavar="N", help="trainings to compare accuracy with")
    parser.add_argument("--budget", type=float, default=1e9, metavar="S", help="begin no run after that time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the runs to those there, which are not repeated")
    args = parser.parse_args(argv)
    done: dict[str, Any] = {"runs": [], "undisturbed": []}
    if args.json is not None and args.json.exists():
        done = json.loads(args.json.read_text())

    def keep() -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(done, indent=1) + "\n")

    for seed in range(args.undisturbed):
        done["undisturbed"].append(undisturbed(seed, args.epochs))
        keep()
    bad, began = 0, time.monotonic()
    have = {(each["scenario"], each["seed"]) for each in done["runs"]}
    for seed in range(args.first_seed, args.first_seed + args.runs):
        for scenario in args.scenario or SCENARIOS:
            if (scenario, seed) in have or time.monotonic() - began > args.budget:
                continue
            result = run(scenario, seed, epochs=args.epochs, limit_s=args.limit)
            done["runs"].append(asdict(result))
            keep()
            bad += bool(result.problems)
            print(
                f"{scenario:<13} seed {seed:>2}  step {result.step:>3}  {result.seconds:>5.1f} s  went on after "
                f"{result.recovered_s} s  lost {result.lost_steps}  repeated {result.repeated}  "
                f"accuracy {result.accuracy}  {'; '.join(result.problems) or 'good'}",
                flush=True,
            )
    _summary(done)
    return 1 if bad else 0


def _summary(done: dict[str, Any]) -> None:
    for scenario in SCENARIOS:
        runs = [each for each in done["runs"] if each["scenario"] == scenario]
        if runs:
            good = [each for each in runs if not each["problems"]]
            lost = [steps for each in runs for steps in each["lost_steps"]]
            right = [each["accuracy"] for each in runs if each["accuracy"] is not None]
            print(
                f"{scenario}: {len(good)} of {len(runs)} good, {sum(each['hung'] for each in runs)} hung; lost at most "
                f"{max(lost, default=0)} steps of {COMMIT_EVERY}; accuracy {statistics.mean(right or [0]):.4f}"
            )
    if done["undisturbed"]:
        print(f"undisturbed: accuracy {statistics.mean(done['undisturbed']):.4f} of {len(done['undisturbed'])}")


if __name__ == "__main__":
    sys.exit(main())
