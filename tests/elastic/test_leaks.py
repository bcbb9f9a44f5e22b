"""However often the members change, a rank holds no more threads, descriptors, sockets and store keys."""

from __future__ import annotations

import gc
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua
from tests.elastic.fault_tolerant_rank import Job, Line, make_model, make_optimizer, open_seat, start_job
from tests.fork_server import ForkServer

pytestmark = pytest.mark.process
CYCLES = 4  # a rank comes and is killed
FOUNDERS = [0, 1, 2]
COUNTS = ("threads", "descriptors", "sockets", "prefixes")
WATCHED = 40  # steps in which what is held for a moment only is let go


def held(store: Any) -> Line:
    """What this process holds; and of the store that it serves, groups and transfers of weights that have keys."""
    files: list[str] = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            files.append(os.readlink(each))
        except OSError:  # the directory itself
            continue
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(files),
        "sockets": sum(each.startswith("socket:") for each in files),
        "prefixes": len({"/".join(key.split("/")[:3]) for key in store.list_keys()}),
    }


def train_and_count(pipe: Connection, job: Line) -> None:
    """Train until the test says that it is enough. Tells the least that was held since the members changed last."""
    gc.disable()  # what ends only when the garbage collector runs may hold memory and connections for hours
    seat, server = open_seat(pipe, job)
    model = make_model()
    optimizer = make_optimizer(job["algorithm"], model)
    tolerance = bagua.FaultTolerance(seat=seat, max_blocked_s=90.0)
    bagua.distribute(model, optimizer, job["algorithm"], fault_tolerant=tolerance, **job["options"])
    epoch, steps, least, told = 0, 0, {}, {}
    while not pipe.poll():
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = bagua.stats(model)
        newest = stats.membership[-1].epoch if stats.membership else 0
        now = held(server)
        if newest != epoch:
            epoch, steps, least = newest, 0, now
        steps += 1
        least = {name: min(count, least.get(name, count)) for name, count in now.items()}
        line = {"size": stats.size, "epoch": epoch, "watched": steps >= WATCHED, **least}
        if line != told:
            told = line
            pipe.send(line)
        time.sleep(0.01)
    pipe.recv()
    bagua.detach(model)
    seat.close()
    pipe.send({"ended": job["place"]})
    del server


def last_epoch(job: Job) -> int:
    """That any founder trains in."""
    return max(line.get("epoch", 0) for place in FOUNDERS for line in job.lines[place])


def await_size(job: Job, size: int, after: int) -> int:
    """Wait until the founders train in groups of that size, which were opened after epoch `after`; return theirs."""
    job.wait_for(FOUNDERS, lambda line: line.get("size") == size and line["epoch"] > after, f"{size} ranks")
    return last_epoch(job)


def come_and_go(job: Job) -> int:
    """A rank joins the founders and is killed. Returns the epoch after that."""
    before = last_epoch(job)
    place = job.arrive()
    joined = await_size(job, len(FOUNDERS) + 1, before)
    job.kill(place)
    return await_size(job, len(FOUNDERS), joined)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("bytegrad", {}),
        ("async", {"sync_interval_ms": 10}),  # its groups are opened in a thread
        *(pytest.param(each, {}, marks=pytest.mark.slow) for each in ("gradient_allreduce", "power_sgd", "qadam")),
        *(pytest.param(each, {}, marks=pytest.mark.slow) for each in ("local_sgd", "diloco", "zero_one_adam")),
        *(pytest.param(each, {}, marks=pytest.mark.slow) for each in ("decentralized", "low_precision_decentralized")),
    ],
)
def test_nothing_is_left_of_former_groups(fork_server: ForkServer, algorithm: str, options: dict[str, Any]) -> None:
    with start_job(fork_server, len(FOUNDERS), train=train_and_count, algorithm=algorithm, options=options) as job:
        epoch = come_and_go(job)
        job.wait_for(FOUNDERS, lambda line: line.get("epoch") == epoch and line["watched"], "settled counts")
        first = [job.lines[place][-1] for place in FOUNDERS]
        for _ in range(CYCLES):
            epoch = come_and_go(job)
        for place, least in zip(FOUNDERS, first, strict=True):
            job.wait_for(
                [place],
                lambda line, least=least: (
                    line.get("epoch") == epoch and all(line[each] <= least[each] for each in COUNTS)
                ),
                f"rank that holds no more than {least}",
            )
        for place in FOUNDERS:
            job.go_on(place)
        job.wait_for(FOUNDERS, lambda line: "ended" in line, "end")
