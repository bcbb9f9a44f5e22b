"""Part 11: step times over NCCL on emulated networks, beside DDP and its hooks, the ranks on one GPU.

Each rank is a host of `bagua.lab`, with a link of its own. All compute on the one GPU, so a model is chosen that
computes little: what differs between the entrants is the communication. No statement about NVLink or about a GPU for
each rank follows from it.

If NVIDIA's Multi-Process Service (MPS) is installed, it is started for the ranks, which then compute at the same time.
Without it they take turns of some milliseconds, for which each message waits.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from bagua.bench.conditions import parse
from bagua.bench.hosts import LabHosts, LocalHosts, rank_environment
from bagua.lab import LabError
from benchmarks.gpu.record import Record, Skip

__all__ = ["CONDITIONS", "compare", "multi_process_service", "run"]

CONDITIONS = ("1gbit", "250mbit", "nolimit")
_RANKS = 4
_LIMIT_S = 280.0
_PIPES, _SERVICE_S = "CUDA_MPS_PIPE_DIRECTORY", 20.0


def run(record: Record) -> None:
    """A row for each condition and entrant."""
    on_gpu = torch.cuda.is_available() and not record.dry
    with ExitStack() as stack:
        service = stack.enter_context(multi_process_service()) if on_gpu else {}
        record.facts.update(ranks=_RANKS if on_gpu else 2, rounds=2, mps=bool(service) or _PIPES in os.environ)
        for condition in CONDITIONS if on_gpu else ("1gbit",):
            for network in ("socket", "bagua_net") if condition == "1gbit" and on_gpu else ("socket",):
                with record.check(f"{condition}, {network if on_gpu else 'gloo'}"):
                    rows = compare(condition, on_gpu, network, record.facts["ranks"], service)
                    base = next(row["step_ms"] for row in rows if row["entrant"] == "ddp")
                    for row in rows:
                        speed_up = round(base / row["step_ms"], 3)
                        record.row(condition=condition, network=network, **row, speed_up=speed_up)


@contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """The environment of processes that share the GPU through MPS; empty if it is not installed or does not start."""
    if _PIPES in os.environ or (control := shutil.which("nvidia-cuda-mps-control")) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        env = {_PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        begun = subprocess.run([control, "-d"], env={**os.environ, **env}, timeout=_SERVICE_S)
        try:
            yield env if begun.returncode == 0 else {}
        finally:
            if begun.returncode == 0:
                subprocess.run([control], input="quit\n", text=True, env={**os.environ, **env}, timeout=_SERVICE_S)


def compare(
    condition: str, on_gpu: bool, network: str, ranks: int, service: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Step times of all entrants, in ms: the median over the steps of the slowest rank.

    Args:
        service: more of the environment of ranks.

    Raises:
        Skip: this machine cannot emulate the link.
        AssertionError: a rank failed.
    """
    try:
        hosts = LabHosts(ranks, parse(condition)) if condition != "nolimit" else LocalHosts(ranks)
    except (LabError, OSError) as error:
        raise Skip(f"no emulated hosts: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        try:
            with open(f"{folder}/log", "w+") as log:
                env = {**rank_environment(hosts, ranks), **_network(network), **(service or {}), "NCCL_IB_DISABLE": "1"}
                words = [sys.executable, "-m", "benchmarks.gpu.link_rank", folder, *([] if on_gpu else ["--dry"])]
                processes = hosts.start(words, env, log)
                deadline = time.monotonic() + _LIMIT_S
                while any(each.poll() is None for each in processes) and time.monotonic() < deadline:
                    time.sleep(0.05)
                codes = [each.poll() for each in processes]
                hosts.kill()
                log.seek(0)
                assert codes == [0] * ranks, f"exit codes {codes}: {log.read()[-3000:]}"
        finally:
            hosts.close()
        return _rows([json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(ranks)])


def _network(name: str) -> dict[str, str]:
    if name == "socket":
        return {}
    from bagua.net.plugin import environment

    return {key: value for key, value in environment(dict(os.environ)).items() if key.startswith(("NCCL", "BAGUA"))}


def _rows(ranks: Sequence[dict[str, list[float]]]) -> list[dict[str, Any]]:
    rows = []
    for entrant in ranks[0]:
        steps = [max(times) for times in zip(*(each[entrant] for each in ranks), strict=True)]
        rows.append(
            {
                "entrant": entrant,
                "step_ms": round(statistics.median(steps) * 1e3, 2),
                "least_ms": round(min(steps) * 1e3, 2),
                "most_ms": round(max(steps) * 1e3, 2),
                "steps": len(steps),
            }
        )
    return rows
