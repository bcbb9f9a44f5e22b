"""The systems that are compared: how each is started on a host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import bagua
from bagua.lab import Host

__all__ = ["PRELOADING", "ROOT", "SYSTEMS", "Settings", "algorithms", "command", "environment", "servers", "why_not"]

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = ("bagua", "elastic", "torchelastic", "torchft")
PRELOADING = SYSTEMS[:2]  # those with `bagua run`
_PORT = 29400
_LIGHTHOUSE = 29510
_ELASTIC = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=90,read_timeout=20"


@dataclass(frozen=True)
class Settings:
    """Of a job.

    Attributes:
        system: of `SYSTEMS`: fault-tolerant training, elastic mode, DDP under torchrun, torchft.
        algorithm: of Bagua's systems.
        hosts: one rank each.
        step_ms: emulated compute of a step; the ranks sleep, so that few cores are enough for many hosts.
        table: rows of the model's second embedding, 128 bytes each.
        bandwidth: of each host's link.
        detect_s: of the systems that have such an option.
        seed: of weights, data and links.
        torchft: folder with torchft and its dependencies, or "" if it is installed.
        losses_every: steps between two losses that a rank writes down; 0 for none but at the end. Of Bagua's ranks.
        stage_steps: the length of a training for which optimizers with two stages choose that of the first, a fifth.
        preload: ranks are forked from a process that has imported their modules. Of Bagua's systems.
    """

    system: str = "bagua"
    algorithm: str = "gradient_allreduce"
    hosts: int = 4
    step_ms: float = 100.0
    table: int = 0
    bandwidth: str = "1gbit"
    detect_s: float = 2.0
    seed: int = 0
    torchft: str = ""
    losses_every: int = 0
    stage_steps: int = 200
    preload: bool = False

    @property
    def label(self) -> str:
        """The algorithm, as results name it."""
        return self.algorithm if self.system in ("bagua", "elastic") else "DDP"


def algorithms() -> list[str]:
    """Return Bagua's own algorithms that go on after a loss: those with a rule for the step that is lost."""
    own = bagua.algorithms.available(builtin_only=True)
    return [row.name for row in own if bagua.algorithms.get(row.name).lost_step]


def why_not(system: str, torchft: str = "") -> str:
    """Say why a system cannot run here; "" if it can."""
    if system != "torchft":
        return ""
    code = "import torchft; from torchft.coordination import LighthouseServer"
    path = os.pathsep.join([torchft, os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return "" if done.returncode == 0 else f"torchft cannot be imported ({last}); see --torchft"


def environment(settings: Settings, hosts: Sequence[Host]) -> dict[str, str]:
    """Return what is added to the environment of a host."""
    paths = [str(ROOT), *([settings.torchft] if settings.torchft else [])]
    found = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "BAGUA_FAULTS_SYSTEM": settings.system,
    }
    if settings.system == "torchft":
        found["TORCHFT_LIGHTHOUSE"] = f"http://{hosts[0].address}:{_LIGHTHOUSE}"
    if settings.system == "torchelastic":
        # Otherwise a restart may read the ports of the attempt before from the store, and fail.
        found["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return found


def servers(settings: Settings, hosts: Sequence[Host]) -> list[list[str]]:
    """Return the commands that run on the first host beside the ranks."""
    if settings.system != "torchft":
        return []
    options = {"bind": f"{hosts[0].address}:{_LIGHTHOUSE}", "min_replicas": len(hosts) // 2 + 1}
    options |= {"join_timeout_ms": 1000, "heartbeat_timeout_ms": round(1000 * settings.detect_s)}
    code = f"import time; from torchft.coordination import LighthouseServer as Server; it = Server(**{options!r}); "
    return [[sys.executable, "-c", code + "time.sleep(1e6)"]]


def command(settings: Settings, hosts: Sequence[Host], index: int, folder: Path) -> list[str]:
    """Return the command of a host."""
    everyone = ",".join(f"{host.address}:{_PORT}" for host in hosts)
    first = f"{hosts[0].address}:{_PORT}"
    many, restarts = str(len(hosts)), ("--max-restarts", "1000")
    bagua_run, torchrun = ("-m", "bagua.cli.main", "run"), ("-m", "torch.distributed.run")
    module = "benchmarks.faults.restarting"
    elastic = ("--nnodes", f"2:{many}", "--nproc-per-node", "1", *restarts, "--rdzv-backend", "c10d")
    elastic += ("--rdzv-id", "faults", "--rdzv-conf", _ELASTIC)
    if settings.system == "bagua":
        module = "benchmarks.faults.train"
        launcher = (*bagua_run, "--fault-tolerant", "--nnodes", many, *restarts, "--rdzv-endpoint", everyone)
        launcher += ("--detect-s", str(settings.detect_s))
    elif settings.system == "elastic":
        launcher = (*bagua_run, *elastic, "--rdzv-endpoint", everyone)
    elif settings.system == "torchelastic":
        launcher = (*torchrun, *elastic, "--rdzv-endpoint", first)
    else:
        module = "benchmarks.faults.torchft_rank"
        launcher = (*torchrun, "--nnodes", "1", "--nproc-per-node", "1", *restarts)
        launcher += ("--master-addr", hosts[index].address, "--master-port", str(_PORT))
    launcher += ("--preload", "torch,bagua,benchmarks.faults.task") if settings.preload else ()
    return [
        *(sys.executable, *launcher, "-m", module, "--folder", str(folder), "--algorithm", settings.algorithm),
        *("--seed", str(settings.seed), "--step-ms", str(settings.step_ms), "--table", str(settings.table)),
        *("--losses-every", str(settings.losses_every), "--stage-steps", str(settings.stage_steps)),
    ]
