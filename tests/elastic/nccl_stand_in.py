"""On a CPU, what takes the place of NCCL: gloo, with NCCL's manners where a peer is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.comm import abortable_nccl
from bagua.comm.store import BoundedStore, RendezvousStore
from bagua.engine.recovery import limits
from tests.rank_pool import host_of_its_own

__all__ = ["StandIn", "prepare_nccl"]

_LIMIT_S = 100.0


class StandIn:
    """Without a peer an operation ends only when it is aborted, and without an error: its tensors then hold anything.

    It blocks the thread that waits, as a kernel blocks the stream.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._place = rank, size, timeout
        self._meets = RendezvousStore(BoundedStore(store, _LIMIT_S), range(size), finds=True)
        self._pg: Any = None
        self._batch: list[tuple[Any, Sequence[Tensor]]] | None = None
        self.aborted = threading.Event()

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connect; until then there are no operations."""
        self._pg = dist.ProcessGroupGloo(self._meets, *self._place)
        self._pg.barrier().wait()

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> _Work:
        return self._begin(lambda: self._pg.allreduce(tensors, options), tensors)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> _Work:
        return self._begin(lambda: self._pg.broadcast(tensors, options), tensors)

    def reduce(self, tensors: Sequence[Tensor], options: Any) -> _Work:
        return self._begin(lambda: self._pg.reduce(tensors, options), tensors)

    def alltoall_base(self, target: Tensor, source: Tensor, to: list[int], of: list[int], options: Any) -> _Work:
        return self._begin(lambda: self._pg.alltoall_base(target, source, to, of, options), [target])

    def _allgather_base(self, target: Tensor, source: Tensor) -> _Work:
        return self._begin(lambda: self._pg._allgather_base(target, source.clone()), [target])

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Work:
        return self._begin(lambda: self._pg.send(tensors, peer, tag), [])

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Work:
        return self._begin(lambda: self._pg.recv(tensors, peer, tag), tensors)

    def _start_coalescing(self) -> None:
        assert self._batch is None
        self._batch = []

    def _end_coalescing(self) -> _Work:
        batch, self._batch = self._batch, None
        assert batch
        return _Work(self, batch)

    def abort(self) -> None:
        """End what is in flight."""
        self.aborted.set()
        assert self._meets.connections is not None
        self._meets.connections.shut_down()

    def shutdown(self) -> None:
        """All operations have been waited for."""

    def _begin(self, call: Callable[[], Any], targets: Sequence[Tensor]) -> _Work:
        assert self._pg is not None and not self.aborted.is_set()
        try:
            work = call()
        except RuntimeError:  # gloo notices here what NCCL never would
            work = None
        if self._batch is not None:
            self._batch.append((work, targets))
        return _Work(self, [(work, targets)])


class _Work:
    def __init__(self, group: StandIn, parts: list[tuple[Any, Sequence[Tensor]]]) -> None:
        self._group, self._parts = group, parts

    def wait(self) -> None:
        for work, targets in self._parts:
            try:
                if work is None:
                    raise RuntimeError
                work.wait()
            except RuntimeError:
                assert self._group.aborted.wait(_LIMIT_S), "nobody has aborted"
                for target in targets:
                    target.view(torch.uint8).fill_(0x7F)


def prepare_nccl(device: torch.device, place: int) -> None:
    """In a rank: let it use NCCL on a GPU that it shares with the others, or on a CPU what stands for NCCL."""
    if device.type == "cuda":
        os.environ.update(host_of_its_own(place))
        return
    abortable_nccl.make_nccl = StandIn
    limits.why_no_nccl = lambda _device: None
