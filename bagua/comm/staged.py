"""gloo for CUDA tensors through host memory: for ranks that share a GPU, which NCCL refuses, or without NCCL.

gloo reads and writes host memory only. For sends and receives torch does not look where a tensor is and hands gloo the
device address; so nothing of a CUDA tensor may reach gloo itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Staged"]


class Staged:
    """A gloo backend that takes CUDA tensors: each operation works on a copy in host memory.

    Operations begin when the current stream has made what they read, and block until then. `wait` returns when the
    results are in the tensors, for every stream that is given work afterwards. Nothing is asynchronous for the GPU, so
    no stream has to wait for another and no memory is given back too early.

    Args:
        pg: a gloo backend of `torch.distributed`.
    """

    def __init__(self, pg: Any) -> None:
        self._pg = pg

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> _Arrival:
        """As the backend's."""
        hosts = [_copy(tensor) for tensor in tensors]
        return _Arrival(self._pg.allreduce(hosts, options), tensors, hosts)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> _Arrival:
        """As the backend's."""
        hosts = [_copy(tensor) for tensor in tensors]
        return _Arrival(self._pg.broadcast(hosts, options), tensors, hosts)

    def reduce(self, tensors: Sequence[Tensor], options: Any) -> _Arrival:
        """As the backend's."""
        hosts = [_copy(tensor) for tensor in tensors]
        return _Arrival(self._pg.reduce(hosts, options), tensors, hosts)

    def gather(self, targets: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], options: Any) -> _Arrival:
        """As the backend's."""
        hosts = [[_space(tensor) for tensor in each] for each in targets]
        work = self._pg.gather(hosts, [_copy(tensor) for tensor in tensors], options)
        return _Arrival(work, [t for each in targets for t in each], [t for each in hosts for t in each])

    def scatter(self, tensors: Sequence[Tensor], sources: Sequence[Sequence[Tensor]], options: Any) -> _Arrival:
        """As the backend's."""
        hosts = [_space(tensor) for tensor in tensors]
        work = self._pg.scatter(hosts, [[_copy(tensor) for tensor in each] for each in sources], options)
        return _Arrival(work, tensors, hosts)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Arrival:
        """As the backend's; the tensors may be overwritten at once."""
        hosts = [_copy(tensor) for tensor in tensors]
        return _Arrival(self._pg.send(hosts, peer, tag), (), hosts)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Arrival:
        """As the backend's; the tensors are written by `wait`."""
        hosts = [_space(tensor) for tensor in tensors]
        return _Arrival(self._pg.recv(hosts, peer, tag), tensors, hosts)

    def barrier(self, options: Any) -> Any:
        """As the backend's: of the ranks, not of their streams."""
        return self._pg.barrier(options)

    def abort(self) -> None:
        """As the backend's."""
        self._pg.abort()


class _Arrival:
    """An operation in progress. Holds the host memory that gloo works on, which must outlive the operation."""

    def __init__(self, work: Any, tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
        self._work, self._tensors, self._hosts = work, tensors, hosts

    def wait(self) -> None:
        """Return when the results are in the tensors."""
        self._work.wait()
        for tensor, host in zip(self._tensors, self._hosts, strict=False):
            tensor.copy_(host)


def _space(tensor: Tensor) -> Tensor:
    # Pinned blocks come from torch's cache of them. A blocking copy leaves none in use by a stream.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _copy(tensor: Tensor) -> Tensor:
    return _space(tensor).copy_(tensor)
