"""A training on the hosts of an emulated cluster, with one accident; and the same without."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from bagua.lab import Cluster
from benchmarks.elastic.accidents import SCENARIOS, Stage, now_at
from benchmarks.elastic.judge import COMMIT_EVERY, Run, journals, judge, meetings

__all__ = ["run", "undisturbed"]

ROOT = Path(__file__).resolve().parents[2]
PORT = 29400
CONFIG = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=90,read_timeout=20"


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
                stage.wait_until(lambda: now_at(folder)[0] >= result.step, "the training did not begin")
                at = time.time()
                accident(stage)
                stage.wait_until(lambda: now_at(folder)[1] > at, "no training after the accident")
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
