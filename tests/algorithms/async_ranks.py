"""Ranks that train with "async" and end in many ways, forked from one process that has imported everything.

    python -m tests.algorithms.async_ranks RANKS SCENARIO [SCENARIO ...]

Prints a JSON object per scenario: exit codes and what was written to stderr. The last rank (with the word "first":
rank 0, which serves the store) is the one that does what the scenario says while the others train on. With the word
"decoupled" the algorithm is "decoupled_diloco".
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import IO

import torch
import torch.distributed as dist
from torch import nn

import bagua
from bagua.contrib import DecoupledDiLoCo
from tests.ports import free_port

KEPT: list[object] = []


def rank_main(scenario: str, rank: int, size: int, port: int) -> None:
    """One rank; it ends as any script does, with rounds in flight."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    words = scenario.split()
    (dist if "plain" in words else bagua).init_process_group("gloo", timeout=timedelta(seconds=20))
    model = nn.Linear(50, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    decoupled = "decoupled" in words
    algorithm = DecoupledDiLoCo(communication_interval=2, max_alone_s=2.0) if decoupled else "async"
    bagua.distribute(model, optimizer, algorithm, **({} if decoupled else {"sync_interval_ms": 0}))
    KEPT.append(model)
    odd = rank == (0 if "first" in words else size - 1)

    def train(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            optimizer.zero_grad()
            model(torch.randn(4, 50)).square().mean().backward()
            optimizer.step()
            time.sleep(0.001)

    deadline = time.monotonic() + 60
    while not {"round_s", "members"} & bagua.stats(model).extra.keys():
        assert time.monotonic() < deadline
        train(0.02)
    if odd and "raise" in words:
        raise ValueError("boom")
    if odd and "killed" in words:
        os._exit(9)
    if odd and "detach" in words:
        bagua.detach(model)
    if "together" in words or not (odd or decoupled):
        train(0.4)
    while not odd and "killed" in words and not bagua.stats(model).notices:
        try:
            train(0.05)
        except bagua.CommunicationError as error:
            print("raised:", error, file=sys.stderr)
            break
    if "plain" in words:
        dist.destroy_process_group()
    print("notices:", bagua.stats(model).notices if not odd else "", file=sys.stderr)


def spawn(size: int) -> tuple[int, int] | tuple[list[int], Sequence[IO[bytes]]]:
    """Fork the ranks. In a rank: its number and the port. In the parent: process ids and what they write to."""
    port = free_port()
    outputs = [tempfile.TemporaryFile() for _ in range(size)]  # noqa: SIM115  (closed in `report`)
    pids: list[int] = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            os.dup2(outputs[rank].fileno(), 1)
            os.dup2(outputs[rank].fileno(), 2)
            signal.alarm(120)
            return rank, port
        pids.append(pid)
    return pids, outputs


def report(scenario: str, pids: list[int], outputs: Sequence[IO[bytes]]) -> None:
    """Wait for the ranks of a scenario and print what became of them."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    written = []
    for output in outputs:
        output.seek(0)
        written.append(output.read().decode(errors="replace"))
        output.close()
    print(json.dumps({"scenario": scenario, "codes": codes, "stderr": written}), flush=True)


def main(size: int, scenarios: list[str]) -> None:
    """All scenarios at once: most of their time is waiting."""
    running = []
    for scenario in scenarios:
        first, second = spawn(size)
        if isinstance(first, int) and isinstance(second, int):
            rank_main(scenario, first, size, second)
            return
        running.append((scenario, first, second))
    for scenario, pids, outputs in running:
        report(scenario, pids, outputs)


torch.optim.SGD(nn.Linear(1, 1).parameters())  # imports a lot on first use
main(int(sys.argv[1]), sys.argv[2:])
