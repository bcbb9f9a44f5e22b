"""One rank of a benchmark: runs a list of cases in one process. Started by `runner`, never by hand.

    python -m bagua.bench.worker FOLDER

The folder holds `job.json`; answers are written there too. Environment: RANK, WORLD_SIZE, BAGUA_BENCH_ADDRESS (where
rank 0 listens), BAGUA_BENCH_INTERFACE (whose bytes are counted; empty for none).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bagua
from bagua.bench import contenders, results_file
from bagua.bench.measure import Job, measure
from bagua.bench.primitives import Transfers, measure_transfer, open_groups

__all__ = ["TRACE", "await_file", "connect", "main", "run_rank"]

TRACE = "trace-{}.json"
_START_S = 120.0
_POLL_S = 0.01


def await_file(path: Path, timeout_s: float) -> Any:
    """Return the content of a JSON file that another rank or the parent writes.

    Raises:
        TimeoutError: it was not written in that time.
    """
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} was not written within {timeout_s:.0f} s")
        time.sleep(_POLL_S)
    return json.loads(path.read_text())


def connect(folder: Path, rank: int, size: int, timeout_s: float) -> None:
    """Meet the other ranks; rank 0's store listens on the address of its host, its port is in `store.json`."""
    address, timeout = os.environ["BAGUA_BENCH_ADDRESS"], timedelta(seconds=timeout_s)
    if rank == 0:
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        results_file.write(folder / "store.json", store.port, indent=None)
    else:
        store = dist.TCPStore(address, await_file(folder / "store.json", _START_S), timeout=timeout)
    bagua.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _switcher(folder: Path, rank: int, timeout_s: float) -> Callable[[str], None]:
    """Rank 0 asks for another link by a file; all ranks wait for the answer."""
    count = 0

    def switch(phase: str) -> None:
        nonlocal count
        count += 1
        if rank == 0:
            results_file.write(folder / f"want-{count}.json", phase, indent=None)
        await_file(folder / f"done-{count}.json", timeout_s)

    return switch


def _run(folder: Path, rank: int, size: int) -> None:
    content = json.loads((folder / "job.json").read_text())
    kind = content.pop("kind")
    connect(folder, rank, size, content["timeout_s"])
    control: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=content["timeout_s"]))
    run = _transfers(content, control) if kind == Transfers.kind else _steps(content, control, folder, rank)
    for number, name in content["cases"]:
        results_file.write(folder / f"begun-{rank}.json", number, indent=None)
        measured = run(number, name)
        everyone: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object(measured, everyone, group=control)
        if everyone is not None:
            results_file.write(folder / f"result-{number}.json", everyone, indent=None)
    dist.barrier(control)


def _transfers(content: dict[str, Any], control: Any) -> Callable[[int, str], dict[str, Any]]:
    groups = open_groups()
    return lambda number, name: measure_transfer(name, groups, control, content["budget_s"])


def _steps(content: dict[str, Any], control: Any, folder: Path, rank: int) -> Callable[[int, str], dict[str, Any]]:
    job = Job(**content)
    switch = _switcher(folder, rank, job.timeout_s) if job.switches else lambda phase: None

    def run(number: int, name: str) -> dict[str, Any]:
        trace = str(folder / TRACE.format(number)) if job.profile == name and rank == 0 else ""
        return measure(contenders.get(name), job, control, switch, trace).as_dict()

    return run


def run_rank(folder: Path, work: Callable[[Path, int, int], None]) -> None:
    """Run `work(folder, rank, size)` and end the process; status 1 and a file `error-RANK.json` if it failed."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    code = 0
    try:
        work(folder, rank, size)
    except BaseException as error:
        code = 1
        traceback.print_exc()
        where = folder / f"begun-{rank}.json"
        number = json.loads(where.read_text()) if where.exists() else None
        message = f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0]
        results_file.write(
            folder / f"error-{rank}.json", {"case": number, "time": time.time(), "error": message}, indent=None
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # What others left running (threads inside a collective, say) must not keep the process from ending.
    os._exit(code)


def main(argv: list[str] | None = None) -> None:
    """Run the job of the folder that the arguments name."""
    run_rank(Path((sys.argv[1:] if argv is None else argv)[0]), _run)


if __name__ == "__main__":
    main()
