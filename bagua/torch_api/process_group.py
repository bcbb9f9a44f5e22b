"""The original's process groups and communicators, over `bagua.comm.communicator`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from bagua.comm import world
from bagua.comm.communicator import Communicator, RankSet, default_rank_set, new_rank_set, rank_set_of
from bagua.torch_api.old_variables import report_old_variables

__all__ = [
    "BaguaCommunicator",
    "BaguaProcessGroup",
    "Comm",
    "CommMember",
    "as_torch_group",
    "comm",
    "communicator_of",
    "from_torch_group",
    "init_process_group",
    "is_initialized",
    "new_group",
]


class comm:
    """`comm.WORLD` stands for the communicator of all processes."""

    WORLD = object()


class CommMember:
    """`WORLD` is all processes. `NON_COMM_MEMBER` is what a process that is no member of a communicator holds instead.

    Primitives do nothing on a process that is no member.
    """

    WORLD = comm.WORLD
    NON_COMM_MEMBER = object()


# Primitives that a communicator has as methods.
_PAIRED = ("allgather", "allreduce", "alltoall", "alltoall_v", "gather", "reduce", "reduce_scatter", "scatter")
_CALLS = frozenset({*_PAIRED, *(f"{name}_inplace" for name in _PAIRED), "broadcast", "recv", "send"})


class BaguaCommunicator:
    """Ranks that talk to each other; the last argument of every primitive. Made by `BaguaProcessGroup`.

    Primitives are methods too, with tensors in the place of the original's backend tensors:
    `communicator.allreduce_inplace(tensor, ReduceOp.SUM)`.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._core = communicator

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in _CALLS:
            return partial(getattr(import_module("bagua.torch_api.primitives"), name), comm=self)
        raise AttributeError(f"BaguaCommunicator has no attribute {name!r}")

    def rank(self) -> int:
        """My rank within the communicator."""
        return self._core.rank

    def nranks(self) -> int:
        """Number of ranks."""
        return self._core.size

    def device_id(self) -> int:
        """Index of the current CUDA device; -1 without one."""
        return torch.cuda.current_device() if torch.cuda.is_available() else -1

    @property
    def cuda_stream(self) -> torch.cuda.Stream | None:
        """The stream for CUDA tensors: the one given, else the current one; None without CUDA."""
        if not torch.cuda.is_available():
            return None
        return self._core.stream or torch.cuda.current_stream()

    def barrier(self) -> None:
        """Barrier: return when all ranks have called it."""
        self._core.barrier()

    def abort(self) -> None:
        """Let all later operations of this process do nothing, and those of its peers fail soon."""
        self._core.abort()

    def check_abort(self) -> bool:
        """Whether `abort` has been called in this process."""
        return self._core.aborted


# What primitives take as `comm`: a BaguaCommunicator, CommMember.NON_COMM_MEMBER, or CommMember.WORLD or None for all.
Comm = Any


class BaguaProcessGroup:
    """Ranks with a communicator of all, one of those on my node and one of the nodes' first ranks.

    Communicators are made, collectively among the members, when first asked for, and kept.

    Attributes:
        ranks: the members as ranks of the default process group, in ascending order.
        stream: the CUDA stream that communication of CUDA tensors runs on; None: the current one.
    """

    def __init__(self, rank_set: RankSet) -> None:
        self._core = rank_set
        self._wrapped: dict[str, BaguaCommunicator] = {}

    @property
    def ranks(self) -> list[int]:
        """The members."""
        return list(self._core.ranks)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream given."""
        return self._core.stream

    def get_global_communicator(self) -> Any:
        """All members; `CommMember.NON_COMM_MEMBER` on other processes."""
        return self._wrap("global", self._core.world())

    def get_inter_node_communicator(self) -> Any:
        """The first member of every node; `CommMember.NON_COMM_MEMBER` on other processes."""
        return self._wrap("inter", self._core.inter())

    def get_intra_node_communicator(self) -> Any:
        """The members on my node; `CommMember.NON_COMM_MEMBER` on processes that are no members."""
        return self._wrap("intra", self._core.intra())

    def _wrap(self, kind: str, core: Communicator | None) -> Any:
        if core is None:
            return CommMember.NON_COMM_MEMBER
        if kind not in self._wrapped:
            self._wrapped[kind] = BaguaCommunicator(core)
        return self._wrapped[kind]


def init_process_group(
    store: dist.Store | None = None, rank: int = -1, world_size: int = -1, local_world_size: int = -1
) -> None:
    """Start `torch.distributed` for this process. Collective.

    Without arguments rank and size come from the launcher's environment; with no such environment the world
    is this one process. With `store`, the other three are needed and RANK, WORLD_SIZE, LOCAL_RANK (`rank`
    modulo `local_world_size`) and LOCAL_WORLD_SIZE are written to the environment.

    Raises:
        ValueError: the arguments or the environment are incomplete or contradict each other, or they
            contradict a process group that exists already.

    Differs: a second call does nothing, in the original it raises; no tuning server is started.
    """
    report_old_variables()
    given = {"rank": rank, "world_size": world_size, "local_world_size": local_world_size}
    if store is None:
        beside = [name for name, value in given.items() if value != -1]
        if beside:
            raise ValueError(
                f"{beside[0]}: needs store, which is None; without a store the rank is read from the environment"
            )
        world.init_process_group()
    else:
        if not isinstance(store, dist.Store):
            raise TypeError(f"store: expected a torch.distributed store, got {type(store).__name__}")
        if world_size < 1 or not 0 <= rank < world_size or not 1 <= local_world_size <= world_size:
            raise ValueError(
                "rank, world_size, local_world_size: a store needs 0 <= rank < world_size and "
                f"1 <= local_world_size <= world_size, got {rank}, {world_size}, {local_world_size}"
            )
        if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ValueError(
                f"rank, world_size: got {rank} of {world_size}, but the process group exists already "
                f"and this is rank {dist.get_rank()} of {dist.get_world_size()}"
            )
        values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % local_world_size}
        os.environ.update({name: str(value) for name, value in values.items()})
        os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
        world.init_process_group(store=store, rank=rank, world_size=world_size)
    default_rank_set().world()  # now, so that `send` and `recv`, in which not all take part, need not open it


def is_initialized() -> bool:
    """Whether `torch.distributed`, and so the default communicator, is there to be used."""
    return dist.is_initialized()


def new_group(ranks: Sequence[int] | None = None, stream: torch.cuda.Stream | None = None) -> BaguaProcessGroup:
    """Return a group of `ranks` (None: all). Every process, member or not, makes groups in the same order.

    Args:
        ranks: ranks of the default process group, in any order.
        stream: the CUDA stream that communication of CUDA tensors runs on; None: the current one.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        ValueError: not ranks of the default process group, or some twice, or none.
    """
    return BaguaProcessGroup(new_rank_set(ranks, stream))


def from_torch_group(group: Any, stream: torch.cuda.Stream | None = None) -> BaguaProcessGroup:
    """Return the ranks of a `torch.distributed` group as a `BaguaProcessGroup`. All members do so in step.

    On a process that is no member the group has no ranks, and its communicators are `CommMember.NON_COMM_MEMBER`.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        TypeError: not a `ProcessGroup`.
    """
    return BaguaProcessGroup(rank_set_of(group, stream))


def as_torch_group(group: Any) -> Any:
    """Return the `torch.distributed` group of a `BaguaProcessGroup`; anything else as it is."""
    return group._core.process_group() if isinstance(group, BaguaProcessGroup) else group


def communicator_of(comm: Comm) -> Communicator | None:
    """Return the communicator that a primitive's `comm` stands for; None if this process is no member of it.

    Raises:
        RuntimeError: `comm` is None and `torch.distributed` is not initialised.
        TypeError: not a communicator.
    """
    if comm is None or comm is CommMember.WORLD:
        return default_rank_set().world()
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    if isinstance(comm, BaguaCommunicator):
        return comm._core
    hint = "; use its get_global_communicator()" if isinstance(comm, BaguaProcessGroup) else ""
    raise TypeError(f"comm: expected a communicator or None, got {type(comm).__name__}{hint}")


def _get_default_group() -> BaguaProcessGroup:
    """All processes.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
    """
    return BaguaProcessGroup(default_rank_set())


def _rank_not_in_group(group: BaguaProcessGroup | None) -> bool:
    """Whether this process is no member of `group`; None is the default group."""
    return group is not None and group._core.rank is None


def _rank_not_in_comm(comm: Comm = None) -> bool:
    """Whether this process is no member of the communicator."""
    return comm is CommMember.NON_COMM_MEMBER
