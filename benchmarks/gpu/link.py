"""Part 11: step times over NCCL on emulated networks, beside DDP and its hooks, the ranks on one GPU.

Each rank is a host of `bagua.lab`, with a link of its own. All compute on the one GPU in turns, so a model is chosen
that computes little: what differs between the entrants is the communication. No statement about NVLink or about a GPU
for each rank follows from it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bagua.bench.conditions import parse
from bagua.bench.hosts import LabHosts, LocalHosts, rank_environment
from bagua.lab import LabError
from benchmarks.gpu.record import Record, Skip

__all__ = ["CONDITIONS", "compare", "run"]

CONDITIONS = ("1gbit", "250mbit", "nolimit")
_RANKS = 4
_LIMIT_S = 280.0


def run(record: Record) -> None:
    """A row for each condition and entrant."""
    on_gpu = torch.cuda.is_available() and not record.dry
    record.facts.update(ranks=_RANKS if on_gpu else 2, rounds=2)
    for condition in CONDITIONS if on_gpu else ("1gbit",):
        for network in ("socket", "bagua_net") if condition == "1gbit" and on_gpu else ("socket",):
            with record.check(f"{condition}, {network if on_gpu else 'gloo'}"):
                rows = compare(condition, on_gpu, network, record.facts["ranks"])
                base = next(row["step_ms"] for row in rows if row["entrant"] == "ddp")
                for row in rows:
                    record.row(condition=condition, network=network, **row, speed_up=round(base / row["step_ms"], 3))


def compare(condition: str, on_gpu: bool, network: str, ranks: int) -> list[dict[str, Any]]:
    """Step times of all entrants, in ms: the median over the steps of the slowest rank.

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
                env = {**rank_environment(hosts, ranks), **_network(network), "NCCL_IB_DISABLE": "1"}
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
