"""Ranks that end in many ways, forked from one process that has imported everything: a trial is cheap.

    python -m tests.launch.forked_ranks RANKS SCENARIO [SCENARIO ...]

Prints a JSON object per scenario: the exit codes, the seconds and what was written to stderr. A rank falls
off the end of this module, so its interpreter is torn down as at the end of any script.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import bagua
from bagua.comm import shutdown
from tests.ports import free_port

KEPT: list[object] = []


def rank_main(scenario: str, rank: int, size: int, port: int) -> None:
    """One rank. The words of the scenario are its features; `seed=N` and `timeout=S` are values."""
    words = set(scenario.split())
    values = dict(word.split("=") for word in words if "=" in word)
    dice = random.Random(f"{values.get('seed', 0)}/{rank}")
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    bagua.init_process_group(timeout=timedelta(seconds=60))
    if "plain" in words:
        shutdown.cancel()
    elif "timeout" in values:
        shutdown.install(float(values["timeout"]))
    dist.all_reduce(torch.ones(100))
    last = rank == size - 1
    if "groups" in words:
        KEPT.extend(dist.new_group(list(range(size))) for _ in range(2))
        for group in KEPT[-2:]:
            dist.all_reduce(torch.ones(100), group=group)  # type: ignore[arg-type]
    if "ddp" in words:
        model = nn.parallel.DistributedDataParallel(nn.Linear(50, 50))
        model(torch.ones(2, 50)).sum().backward()
        KEPT.append(model)
    if "hook" in words:
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait, daemon=True)
        thread.start()
        shutdown.before_exit(lambda: (stop.set(), thread.join(), print("hook ran", file=sys.stderr))[-1])
    if "dropped" in words:
        for _ in range(6):
            dist.all_reduce(torch.ones(500_000), async_op=True)
    if "stagger" in words:
        time.sleep(dice.random() * 0.3)
    if "late" in words and last:
        wait_for_the_end_of(0)
    if "destroy" in words or ("maybe-destroy" in words and dice.random() < 0.5):
        bagua.destroy_process_group()
    if "killed" in words and last:
        os.kill(os.getpid(), signal.SIGKILL)
    if "stuck" in words and last:
        # Nobody joins this one.
        KEPT.append(dist.all_reduce(torch.ones(1000), async_op=True))
    if "raise" in words and last:
        raise ValueError("boom")
    if "exit3" in words and last:
        sys.exit(3)
    if "wait" in words and not last:
        # A peer that is busy with something else.
        wait_for_the_end_of(size - 1)


def wait_for_the_end_of(rank: int) -> None:
    """Return when the process of `rank` is gone; end this one with 7 if it is not."""
    if not select.select([ENDS[rank]], [], [], 45)[0]:
        sys.exit(7)


def spawn(scenario: str, size: int) -> int | None:
    """Fork the ranks. In a rank: its number. In the parent, when all have ended: None."""
    port, start = free_port(), time.monotonic()
    outputs = [tempfile.TemporaryFile() for _ in range(size)]  # noqa: SIM115  (closed below)
    pids: list[int] = []
    alive = [os.pipe() for _ in range(size)]  # each rank alone holds the second end of its own
    ENDS[:] = [end for end, _ in alive]
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            for other, (_, held) in enumerate(alive):
                if other != rank:
                    os.close(held)
            os.dup2(outputs[rank].fileno(), 1)
            os.dup2(outputs[rank].fileno(), 2)
            signal.alarm(120)
            rank_main.__globals__["PORT"] = port
            return rank
        pids.append(pid)
    for each in alive:
        os.close(each[1])
    ends: dict[int, tuple[int, float]] = {}
    while len(ends) < size:
        pid, status = os.wait()
        ends[pid] = (os.waitstatus_to_exitcode(status), round(time.monotonic() - start, 2))
    written: list[str] = []
    for each in alive:
        os.close(each[0])
    for output in outputs:
        output.seek(0)
        written.append(output.read().decode(errors="replace"))
        output.close()
    codes, seconds = zip(*(ends[pid] for pid in pids), strict=True)
    print(json.dumps({"scenario": scenario, "codes": codes, "seconds": seconds, "stderr": written}), flush=True)
    return None


PORT = 0
ENDS: list[int] = []  # readable when the rank's process has ended
SIZE = int(sys.argv[1])
MINE: tuple[str, int] | None = None
for scenario in sys.argv[2:]:
    number = spawn(scenario, SIZE)
    if number is not None:
        MINE = (scenario, number)
        break
if MINE is not None:
    rank_main(*MINE, SIZE, PORT)
