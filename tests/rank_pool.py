"""Ranks as processes that live as long as the test session; each job gets a fresh process group.

Importing torch takes a second or two, so processes are kept; whatever a job broke is cleaned up by killing them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


class RankPool:
    """`pool.run(size, function, *args)` calls `function(*args)` on `size` ranks with `torch.distributed` ready."""

    def __init__(self) -> None:
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._jobs = itertools.count()

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        nodes: Sequence[int] | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 60,
        group_timeout_s: float = 30,
        init: bool = True,
        dies: Sequence[int] = (),
    ) -> list[Any]:
        """Return what each rank returned; raise an AssertionError with every rank's traceback if one failed.

        Args:
            nodes: node of each rank, in the environment as the launcher has it.
            env: extra environment for the job.
            timeout_s: after this long, ranks that are not done are killed and their stacks shown.
            group_timeout_s: timeout of the process group.
            init: whether to initialise and destroy the process group around the call.
            dies: ranks that are expected to vanish; their result is None.
        """
        while len(self._workers) < size:
            self._workers.append(_Worker(self._server.port))
        for worker in self._workers[:size]:
            worker.wait_until_ready()
        job = next(self._jobs)
        for rank, worker in enumerate(self._workers[:size]):
            extra = {"GROUP_RANK": str(nodes[rank])} if nodes else {}
            worker.send((job, rank, size, {**(env or {}), **extra}, group_timeout_s, init, function, args))
        deadline = time.monotonic() + timeout_s
        outcomes = [worker.receive(deadline) for worker in self._workers[:size]]
        problems = [
            f"rank {rank}: {outcome[1]}"
            for rank, outcome in enumerate(outcomes)
            if outcome[0] != "ok" and not (rank in dies and outcome[0] == "gone")
        ]
        if any(outcome[0] in ("gone", "stuck") for outcome in outcomes) or problems:
            self.close()
        if problems:
            raise AssertionError("\n".join(problems))
        return [outcome[1] if outcome[0] == "ok" else None for outcome in outcomes]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


class _Worker:
    def __init__(self, port: int) -> None:
        self._stacks = tempfile.NamedTemporaryFile(prefix="bagua-stacks-", suffix=".txt")  # noqa: SIM115
        self._pipe, child = mp.Pipe()
        context = mp.get_context("spawn")
        self._process = context.Process(target=_worker_main, args=(child, port, self._stacks.name), daemon=True)
        self._process.start()
        child.close()
        self._ready = False

    def wait_until_ready(self) -> None:
        """Ranks that still import torch would eat up the group's timeout."""
        if not self._ready:
            if not self._pipe.poll(120) or self._pipe.recv() != "ready":
                raise AssertionError("a rank process did not start")
            self._ready = True

    def send(self, job: Any) -> None:
        self._pipe.send(job)

    def receive(self, deadline: float) -> tuple[str, Any]:
        try:
            if self._pipe.poll(max(0.1, deadline - time.monotonic())):
                return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            return "gone", f"process ended with code {self._process.exitcode}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        return "stuck", "not done in time; stacks:\n" + open(self._stacks.name).read()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(5)
        self._pipe.close()
        self._stacks.close()


def _worker_main(pipe: Connection, port: int, stacks: str) -> None:
    import bagua

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = open(stacks, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    pipe.send("ready")
    while True:
        try:
            job, rank, size, env, group_timeout_s, init, function, args = pipe.recv()
        except EOFError:
            sys.exit(0)
        before = dict(os.environ)
        for name in (
            "RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "GROUP_RANK",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
        ):
            os.environ.pop(name, None)
        os.environ.update({"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)})
        os.environ.update(env)
        try:
            torch.manual_seed(0)
            if init:
                bagua.init_process_group(
                    store=dist.PrefixStore(f"job{job}", store),
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=group_timeout_s),
                )
            result = ("ok", function(*args))
        except BaseException:
            result = ("error", traceback.format_exc())
        finally:
            if init:
                bagua.destroy_process_group()
            os.environ.clear()
            os.environ.update(before)
        pipe.send(result)
