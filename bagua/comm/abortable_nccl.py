"""NCCL groups of ranks that may be lost: an operation ends, with an error, when the members change.

A kernel of NCCL waits for its peers without limit, and an abort frees it without a word: the tensors then hold
anything. So an operation here is over on the GPU when `wait` returns, and `wait` looks at the members meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.comm.own_threads import start_thread
from bagua.errors import CommunicationError

__all__ = ["AbortableNccl", "make_nccl", "warm_up_nccl", "why_no_nccl"]

# For the watchdog and the monitor that a backend starts: an operation that fails must neither end the process nor hold
# up the backend's end, and here operations fail whenever a rank is lost.
_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
_making = threading.Lock()
_LATER = timedelta(seconds=60)  # the watchdog's own timeout comes after that of `AbortableNccl`
_ALERT_S = 0.05  # between two looks at the members
_SETTLE_S = 5.0  # for NCCL to abort, and for its kernels to end after that
_SHARE = 0.1  # the end of an operation is seen late by that share of the time that it took,
_POLL_S = (20e-6, 1e-3)  # but by no less and no more than these


def why_no_nccl(device: torch.device) -> str | None:
    """Why NCCL cannot carry tensors of `device`; None if it can."""
    if device.type != "cuda":
        return f"it carries CUDA tensors, and these are on {device.type}"
    return None if dist.is_nccl_available() else "this torch has no NCCL"


def make_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return an NCCL backend that is not connected yet, with a watchdog that leaves the process alone."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout + _LATER
    with _making:
        before = {name: os.environ.get(name) for name in _QUIET}
        os.environ.update(_QUIET)
        try:
            return dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def warm_up_nccl(device: torch.device) -> None:
    """Have this process do what NCCL does once: a second or two, which its peers would wait for in its first group.

    Raises:
        RuntimeError: NCCL does not start.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    pg = make_nccl(dist.HashStore(), 0, 1, timedelta(seconds=60))
    with torch.cuda.device(device):
        pg.eager_connect_single_device(device)
        pg.allreduce([torch.zeros(1, dtype=torch.float32, device=device)], dist.AllreduceOptions()).wait()
        torch.cuda.current_stream(device).synchronize()
        pg.shutdown()


class AbortableNccl:
    """An NCCL backend whose operations begin and end in `wait` of what they return, on the current stream.

    Operations of one batch (`_start_coalescing` to `_end_coalescing`) are begun together. One thread at a time uses it;
    `abort` may be called from any.

    Args:
        pg: a backend of `make_nccl`, before it is used.
        device: of the tensors.
        timeout_s: for one operation.
        alert: called now and then while one waits; raises if the members have changed.
    """

    def __init__(self, pg: Any, device: torch.device, timeout_s: float, alert: Callable[[], object]) -> None:
        self._pg: Any = pg  # None after an abort
        self._device, self._timeout_s, self._alert = device, timeout_s, alert
        self._aborted, self._aborting = threading.Event(), threading.Lock()
        self._abort_thread: threading.Thread | None = None
        self._batch: list[Callable[[], Any]] | None = None

    def connect(self) -> None:
        """Connect the ranks. Collective; may block while one is missing, also after an abort.

        Raises:
            CommunicationError: it was aborted meanwhile.
        """
        pg = self._pg
        self._check()
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            pg.eager_connect_single_device(self._device)
        if self._aborted.is_set():
            _abort(pg)  # the communicator may be younger than the abort
        self._check()

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> _Operation:
        """As the backend's."""
        return self._operation(lambda: self._pg.allreduce(tensors, options))

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> _Operation:
        """As the backend's."""
        return self._operation(lambda: self._pg.broadcast(tensors, options))

    def reduce(self, tensors: Sequence[Tensor], options: Any) -> _Operation:
        """As the backend's."""
        return self._operation(lambda: self._pg.reduce(tensors, options))

    def alltoall_base(self, target: Tensor, source: Tensor, to: list[int], of: list[int], options: Any) -> _Operation:
        """As the backend's."""
        return self._operation(lambda: self._pg.alltoall_base(target, source, to, of, options))

    def _allgather_base(self, target: Tensor, source: Tensor) -> _Operation:
        return self._operation(lambda: self._pg._allgather_base(target, source))

    def _reduce_scatter_base(self, target: Tensor, source: Tensor, options: Any) -> _Operation:
        return self._operation(lambda: self._pg._reduce_scatter_base(target, source, options))

    def barrier(self, options: Any) -> _Operation:
        """As the backend's."""
        return self._operation(lambda: self._pg.barrier(options))

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Operation:
        """As the backend's; within a batch part of it."""
        return self._transfer(lambda: self._pg.send(tensors, peer, tag))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Operation:
        """As the backend's; within a batch part of it."""
        return self._transfer(lambda: self._pg.recv(tensors, peer, tag))

    def _start_coalescing(self) -> None:
        self._batch = []

    def _end_coalescing(self) -> _Operation:
        batch, self._batch = self._batch or [], None

        def begin() -> Any:
            self._pg._start_coalescing()
            try:
                for call in batch:
                    call()
            except BaseException:
                with contextlib.suppress(Exception):  # or this thread's next operations would wait for the batch's end
                    self._pg._end_coalescing()
                raise
            return self._pg._end_coalescing()

        return self._operation(begin)

    def abort(self, wait: bool = True) -> None:
        """End what is in flight, which raises then, and refuse all else. Returns soon, also if NCCL does not.

        Args:
            wait: for NCCL, a while. False: return at once.
        """
        with self._aborting:
            if self._abort_thread is None:
                self._aborted.set()
                # The backend ends in that thread too: it waits for its watchdog then.
                self._abort_thread = start_thread(partial(_abort, self._pg), "bagua-nccl-abort")
                self._pg = None
        if wait:
            self._abort_thread.join(
                _SETTLE_S
            )  # also of another thread's abort: kernels may be writing until it is over

    def shutdown(self) -> None:
        """Await what is in flight, on all ranks, and end the communicator."""
        if not self._aborted.is_set():
            self._pg.shutdown()

    def _transfer(self, call: Callable[[], Any]) -> _Operation:
        if self._batch is None:
            return self._operation(call)
        self._batch.append(call)
        return _Operation(lambda: None)  # the batch stands for it

    def _operation(self, begin: Callable[[], Any]) -> _Operation:
        return _Operation(partial(self._run, begin))

    def _run(self, begin: Callable[[], Any]) -> None:
        self._check()
        try:
            begin().wait()  # makes the current stream wait, not this thread
            self._await_stream()
        except CommunicationError:
            raise
        except Exception as error:
            if not self._aborted.is_set():
                self._alert()  # if the members have changed, that is the reason
                raise
            raise CommunicationError(f"NCCL was aborted: {error}") from error
        self._check()

    def _check(self) -> None:
        if self._aborted.is_set():
            raise CommunicationError("NCCL was aborted, as the members have changed")

    def _await_stream(self) -> None:
        """Return when the current stream has come so far, or shortly after an abort."""
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        began = looked = time.monotonic()
        try:
            while not event.query() and not self._aborted.is_set():
                now = time.monotonic()
                if now - began > self._timeout_s:
                    raise CommunicationError(f"the other ranks did not answer over NCCL within {self._timeout_s:g} s")
                if now - looked > _ALERT_S:
                    looked = now
                    self._alert()
                time.sleep(min(max(_SHARE * (now - began), _POLL_S[0]), _POLL_S[1]))
        except RuntimeError:
            self.abort()
            raise
        finally:
            deadline = time.monotonic() + _SETTLE_S  # a kernel that still runs may write to the tensors
            while self._aborted.is_set() and not event.query() and time.monotonic() < deadline:
                time.sleep(_POLL_S[1])


class _Operation:
    """Begins when it is waited for: NCCL may block there, where whoever looks after the thread knows that it waits."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def wait(self) -> None:
        """Return when the results are in the tensors, for every stream that is given work afterwards."""
        self._run()


def _abort(pg: Any) -> None:
    with contextlib.suppress(RuntimeError):  # it has ended all the same
        pg.abort()
