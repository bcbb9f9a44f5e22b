"""A team of two on one GPU, over NCCL of one rank: the second rank does and holds what the first one does.

NCCL refuses two ranks on one GPU, and with one rank the library exchanges nothing. With a mirror, lanes, streams,
codecs and every call of an NCCL backend run as with two ranks whose data is equal. The mean of two equal gradients is
the gradient, so training must give the bits of training alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from bagua.comm.groups import Group
from bagua.comm.team import Team

__all__ = ["MirrorTeam"]


class _Work:
    def __init__(self, work: Any, after: Callable[[], object]) -> None:
        self._work, self._after = work, after

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._after()


class _Mirror:
    """An NCCL backend of rank 0 of 2, made of one of a single rank."""

    def __init__(self, pg: Any) -> None:
        self._pg = pg
        self._rows: int | None = None  # where the rows of the last all-to-all lie
        self._sends: list[Tensor] = []
        self._receives: list[Tensor] = []

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Work:
        """Sums double; of the others only the mean, the least and the largest are used, which stay."""
        doubles = options.reduceOp == dist.ReduceOp.SUM
        return _Work(self._pg.allreduce(tensors, options), lambda: [t.mul_(2) for t in tensors if doubles])

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Work:
        """Rank 0's or its mirror's, which are equal."""
        options.rootRank = 0
        return _Work(self._pg.broadcast(tensors, options), lambda: None)

    def alltoall_base(self, out_RW: Tensor, rows_RW: Tensor, out: Any, rows: Any, options: Any) -> _Work:
        """Both ranks send me their row 0. With splits they swap all of it."""
        if out:
            assert out == rows == [0, len(out_RW)]
            return _Work(None, lambda: out_RW.copy_(rows_RW))
        self._rows = rows_RW.data_ptr()
        work = self._pg.alltoall_base(out_RW[:1], rows_RW[:1], [], [], options)
        return _Work(work, lambda: out_RW[1:].copy_(out_RW[:1]))

    def _allgather_base(self, out_RW: Tensor, mine_1W: Tensor) -> _Work:
        """The other's row is mine; if it is the answer to an all-to-all, it is the mean of what both sent it: row 1."""
        answer = out_RW.data_ptr() == self._rows
        self._rows = None
        work = self._pg._allgather_base(out_RW[:1], mine_1W)
        return _Work(work, lambda: None if answer else out_RW[1:].copy_(out_RW[:1]))

    def _start_coalescing(self) -> None:
        self._sends, self._receives = [], []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        """Noted."""
        self._sends += tensors

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        """Noted."""
        self._receives += tensors

    def _end_coalescing(self) -> _Work:
        """What I send is what the other sends me; of two rows, first mine and then its own, as I send them."""
        pairs = list(zip(self._receives, reversed(self._sends), strict=True))
        return _Work(None, lambda: [receive.copy_(send) for receive, send in pairs])

    def abort(self) -> None:
        self._pg.abort()

    def shutdown(self) -> None:
        self._pg.shutdown()


class MirrorTeam(Team):
    """Goes where a process group goes, in a process of its own.

    Args:
        make: a backend of one rank from a store: NCCL's, or gloo's for a dry run.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__(0, 2, dist.HashStore(), timedelta(seconds=60), "nccl", "mirror", "node")
        self._make = make

    def all_gather_bytes(self, what: str, payload: bytes) -> list[bytes]:
        """The other rank gives the same bytes."""
        return [payload, payload]

    def all_gather_bytes_once(
        self, what: str, name: str, payload: bytes, alert: Callable[[], object] | None = None
    ) -> list[bytes]:
        """The other rank gives the same bytes."""
        return [payload, payload]

    def broadcast_bytes(self, what: str, payload: bytes | None) -> bytes:
        """Rank 0's, which is this one."""
        assert payload is not None
        return payload

    def _find_missing(
        self, key: str, seconds: float, alert: Callable[[], object] | None = None
    ) -> tuple[list[int], None]:
        """Nobody is missing."""
        return [], None

    def _group(self, name: str, ranks: tuple[int, ...], **how: Any) -> Group:
        if len(ranks) == 1:
            return Group(None, 0, 1, ranks, self.backend)
        pg: Any = _Mirror(self._make(dist.HashStore()))
        return Group(pg, 0, len(ranks), ranks, self.backend)


def nccl(store: Any) -> Any:
    """NCCL of one rank."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=60)
    return dist.ProcessGroupNCCL(store, 0, 1, options)


def gloo(store: Any) -> Any:
    """gloo of one rank, with the calls that only NCCL has."""
    return _GlooOfOne(dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60)))


class _GlooOfOne:
    def __init__(self, pg: Any) -> None:
        self._pg = pg

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Any:
        return self._pg.allreduce(tensors, options)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Any:
        return self._pg.broadcast(tensors, options)

    def alltoall_base(self, out: Tensor, rows: Tensor, *_: Any) -> Any:
        return _Work(None, lambda: out.copy_(rows))

    def _allgather_base(self, out: Tensor, mine: Tensor) -> Any:
        return _Work(None, lambda: out.copy_(mine))

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...
