"""Accidents in an emulated cluster, again and again: does the elastic training go on, and what does it lose?

    python -m benchmarks.elastic --runs 20 --json elastic.json
    python -m benchmarks.elastic --runs 1 --scenario kill-host-0
    python -m benchmarks.elastic --runs 0 --json elastic.json --add more.json --table

Each run trains `examples/elastic_digits.py` on hosts of an emulated cluster (one rank each), lets one thing happen at a
step that the seed decides, and reads what every rank wrote down: which images each step used, what was committed, what
was restored. A run is good if it ends by itself, has lost at most the steps since the last commit, and if the steps
that count used every image of each epoch once (but for the repetitions at the end of an epoch that make ranks equal).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bagua.lab import Cluster
from benchmarks import elastic_report
from benchmarks.elastic_judge import COMMIT_EVERY, Run, journals, judge, meetings

__all__ = ["SCENARIOS", "main", "run"]

ROOT = Path(__file__).resolve().parent.parent
_LOOK_S = 0.25  # between two looks at the journals
PORT = 29400
CONFIG = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=90,read_timeout=20"


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
            time.sleep(_LOOK_S)

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
    (folder / "digits.pt").write_bytes(_data())
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


@cache
def _data() -> bytes:
    """For hosts to start without scikit-learn, made in a process of its own: this one is to stay small."""
    code = "import sys, pathlib, elastic_digits; elastic_digits.save_data(pathlib.Path(sys.argv[1]))"
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    with tempfile.TemporaryDirectory(prefix="bagua-elastic-") as folder:
        path = Path(folder, "digits.pt")
        subprocess.run([sys.executable, "-c", code, str(path)], env=env, check=True, capture_output=True, timeout=100)
        return path.read_bytes()


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
        *("--data", str(folder / "digits.pt")),
    ]


def undisturbed(epochs: int, seed: int) -> float:
    """Test accuracy of the same training in one process, to which nothing happens."""
    with tempfile.TemporaryDirectory(prefix="bagua-elastic-") as folder:
        Path(folder, "digits.pt").write_bytes(_data())
        words = ["examples/elastic_digits.py", "--epochs", str(epochs), "--seed", str(seed), "--journal", folder]
        words += ["--data", str(Path(folder, "digits.pt"))]
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
    parser.add_argument("--undisturbed", type=int, default=0, metavar="N", help="so many trainings to compare with")
    parser.add_argument("--budget", type=float, default=1e9, metavar="S", help="begin no run after that time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the runs to those there, which are not repeated")
    parser.add_argument("--add", type=Path, action="append", default=[], metavar="FILE", help="runs of another --json")
    parser.add_argument("--table", action="store_true", help="sum up as a Markdown table")
    args = parser.parse_args(argv)
    done: dict[str, Any] = {"runs": [], "undisturbed": []}
    if missing := [str(path) for path in args.add if not path.exists()]:
        parser.error(f"--add: no file {', '.join(missing)}")
    for path in [args.json, *args.add]:
        if path is not None and path.exists():
            elastic_report.add(done, json.loads(path.read_text()))

    def keep() -> None:
        if args.json is not None:
            args.json.write_text(json.dumps(done, indent=1) + "\n")

    keep()
    have = {(each["epochs"], each["seed"]) for each in done["undisturbed"]}
    for key in itertools.product((args.epochs, 2 * args.epochs), range(args.undisturbed)):
        if key not in have:
            done["undisturbed"].append({"epochs": key[0], "seed": key[1], "accuracy": undisturbed(*key)})
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
    print("\n".join(elastic_report.table(done, args.epochs) if args.table else elastic_report.summary(done)))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
