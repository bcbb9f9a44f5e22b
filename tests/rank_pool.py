"""Ranks as processes that live as long as the test session; each job gets a fresh process group.

Importing torch takes seconds of processor time, so processes are kept, and forked from one that has imported it;
whatever a job broke is cleaned up by killing them.
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
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fork_server import ForkServer

#: Set to "nccl", ranks that share a GPU use NCCL: each says that it is a host of its own, or NCCL would refuse them.
SHARE_GPU = "BAGUA_TESTS_SHARE_GPU"


def may_use_nccl(size: int) -> bool:
    """Whether NCCL takes so many ranks here: each has a GPU, or they may share one."""
    gpus = torch.cuda.device_count()
    return gpus >= size or (gpus > 0 and os.environ.get(SHARE_GPU) == "nccl")


def gpu_of(rank: int) -> torch.device:
    """The GPU of a rank."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def host_of_its_own(rank: int) -> dict[str, str]:
    """Environment with which NCCL takes ranks that share a GPU."""
    return {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


class RankPool:
    """`pool.run(size, function, *args)` calls `function(*args)` on `size` ranks with `torch.distributed` ready.

    Args:
        server: forks every second rank, and is left open; None spawns all of them, as CUDA needs.
    """

    def __init__(self, server: ForkServer | None) -> None:
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._shared = server
        self._own: ForkServer | None = None
        self._jobs = itertools.count()

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        nodes: Sequence[int] | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 100,
        group_timeout_s: float = 30,
        init: bool = True,
        dies: Sequence[int] = (),
        backend: str | None = None,
        stops: Sequence[int] = (),
        fresh: bool = False,
    ) -> list[Any]:
        """Return what each rank returned; raise an AssertionError with every rank's traceback if one failed.

        Args:
            nodes: node of each rank, in the environment as the launcher has it.
            env: extra environment for the job.
            timeout_s: after this long, ranks that are not done are killed and their stacks shown.
            group_timeout_s: timeout of the process group.
            init: whether to initialise and destroy the process group around the call.
            dies: ranks that are expected to vanish; their result is None.
            backend: of the process group; default Bagua's own, but gloo where ranks share a GPU, which NCCL refuses.
            stops: ranks that stop themselves with SIGSTOP; they go on when all others are done.
            fresh: on new processes, without threads or objects of earlier jobs; to fork, or to look for leaks.
        """
        if fresh:
            self._kill()
        with self._killed_unless_done():
            while len(self._workers) < size:
                self._workers.append(_Worker(self._server.port, self._next_server()))
            for worker in self._workers[:size]:
                worker.wait_until_ready()
            if backend is None and torch.cuda.is_available() and not may_use_nccl(size):
                backend = "gloo"
            job = next(self._jobs)
            for rank, worker in enumerate(self._workers[:size]):
                alone = host_of_its_own(rank) if os.environ.get(SHARE_GPU) == "nccl" else {}
                extra = {**alone, **({"GROUP_RANK": str(nodes[rank])} if nodes else {})}
                worker.send((job, rank, size, {**(env or {}), **extra}, group_timeout_s, init, backend, function, args))
            deadline = time.monotonic() + timeout_s
            found = {rank: self._workers[rank].receive(deadline) for rank in range(size) if rank not in stops}
            for rank in stops:
                self._workers[rank].go_on()
                found[rank] = self._workers[rank].receive(deadline)
        outcomes = [found[rank] for rank in range(size)]
        problems = [
            f"rank {rank}: {outcome[1]}"
            for rank, outcome in enumerate(outcomes)
            if outcome[0] != "ok" and not (rank in dies and outcome[0] == "gone")
        ]
        if any(outcome[0] in ("gone", "stuck") for outcome in outcomes) or problems:
            self._kill()
        if problems:
            raise AssertionError("\n".join(problems))
        return [outcome[1] if outcome[0] == "ok" else None for outcome in outcomes]

    @contextlib.contextmanager
    def _killed_unless_done(self) -> Iterator[None]:
        """Whatever ends the wait, such as the end of the test's time: ranks that are not done get no other job."""
        try:
            yield
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End all processes."""
        self._kill()
        if self._own is not None:
            self._own.close()

    def _kill(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()

    def _next_server(self) -> ForkServer | None:
        """Two take turns, so that not all ranks hash strings alike: a job that depends on the order of a set fails."""
        if self._shared is None or len(self._workers) % 2 == 0:
            return self._shared
        if self._own is None:
            self._own = ForkServer()
        return self._own


class _Worker:
    """A process that runs jobs, forked by `server` if there is one."""

    def __init__(self, port: int, server: ForkServer | None) -> None:
        self._stacks = tempfile.NamedTemporaryFile(prefix="bagua-stacks-", suffix=".txt")  # noqa: SIM115
        if server is not None:
            self._pipe = server.fork(_worker_main, port, self._stacks.name)
        else:
            self._pipe, child = mp.Pipe()
            context = mp.get_context("spawn")
            self._spawned = context.Process(target=_worker_main, args=(child, port, self._stacks.name), daemon=True)
            self._spawned.start()
            child.close()
        self._pid = 0

    def wait_until_ready(self) -> None:
        """Ranks that still import torch would eat up the group's timeout."""
        if not self._pid:
            if not self._pipe.poll(60):
                raise AssertionError("a rank process did not start within 60 s")
            self._pid = self._pipe.recv()

    def send(self, job: Any) -> None:
        self._pipe.send(job)

    def receive(self, deadline: float) -> tuple[str, Any]:
        try:
            if self._pipe.poll(max(0.1, deadline - time.monotonic())):
                return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return "gone", "the process ended"
        os.kill(self._pid, signal.SIGUSR1)
        return "stuck", "not done in time; stacks:\n" + written_to(Path(self._stacks.name))

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        try:
            with contextlib.suppress(EOFError, ConnectionResetError, ProcessLookupError):
                self.wait_until_ready()
                os.kill(self._pid, signal.SIGKILL)
                while self._pipe.poll(60):  # until it has ended
                    self._pipe.recv()
        finally:
            self._pipe.close()
            self._stacks.close()


def written_to(path: Path, timeout_s: float = 10) -> str:
    """What another process writes to a file at a stroke, such as its stacks; nothing if it does not in time."""
    deadline, found = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        time.sleep(0.3)
        before, found = found, path.read_text(errors="replace")
        if found and found == before:
            break
    return found


def _worker_main(pipe: Connection, port: int, stacks: str) -> None:
    import bagua

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = open(stacks, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    pipe.send(os.getpid())
    while True:
        try:
            job, rank, size, env, group_timeout_s, init, backend, function, args = pipe.recv()
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
                    backend,
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
