"""A `torch.distributed.ProcessGroup` whose large floating reductions are compressed.

torch calls the methods below from Python, and those that its trampoline class knows from C++ as well (DDP's reducer,
functional collectives). What is not compressed goes to a plain group.
"""

from __future__ import annotations

import functools
import inspect
import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.algorithms.feedback import fit_feedback
from bagua.backend.batches import install
from bagua.backend.compression import Compression, Traffic
from bagua.backend.names import Backend
from bagua.backend.reductions import Reduction, compressed
from bagua.backend.transports import attach, make_transports
from bagua.comm.backend_kind import backend_kind
from bagua.comm.team import Team

__all__ = ["CompressedProcessGroup", "Traffic", "create_process_group"]

_log = logging.getLogger("bagua")
_warned: set[Backend] = set()


def create_process_group(name: str | Backend, options: Any, pg_options: Any = None) -> CompressedProcessGroup:
    """Make a group for `torch.distributed`, which calls this with what it knows of the group. Collective.

    Args:
        name: of the backend.
        options: torch's `_DistributedBackendOptions`: store, ranks, timeout.
        pg_options: options of NCCL, or None.

    Raises:
        ValueError: unknown codec or option.
        TypeError: `pg_options` are not NCCL's.
    """
    spec = Backend.parse(name)
    rank, size, timeout, store = options.group_rank, options.group_size, options.timeout, options.store
    transports = make_transports(
        store, rank, size, timeout, options.group_id, options.global_ranks_in_group, pg_options
    )
    if rank == 0 and spec not in _warned and fit_feedback(None, spec.codec):
        _warned.add(spec)
        _log.warning(
            "backend %s: codec %r is biased, and a process group has no error feedback; use 8 bits, codec 'eden', "
            "or bagua.interop.ddp_hook",
            spec,
            spec.codec.name,
        )
    return CompressedProcessGroup(spec, store, rank, size, options.group_id, transports)


class CompressedProcessGroup(dist.ProcessGroup):
    """Ranks of the backend "bagua". `torch.distributed` makes it; see `bagua.Backend`.

    Compressed are `all_reduce`, `reduce_scatter` and `reduce_scatter_tensor` with SUM, AVG or PREMUL_SUM of one
    float32, float16 or bfloat16 tensor of `min_bytes` or more; all-reduces give all ranks the same bits. There is no
    error feedback. Everything else runs on gloo or NCCL, unchanged.

    Attributes:
        spec: codec and limits.
    """

    def __init__(
        self,
        spec: Backend,
        store: Any,
        rank: int,
        size: int,
        group_name: Any,
        transports: dict[str, Any],
    ) -> None:
        _leave_untraced()
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]  (not in torch's stubs)
        self.spec = spec
        self._store, self._transports = store, transports
        # A call of the base class would come back here, or run with the GIL held, which a thread of gloo may wait for.
        self._plain: Any = dist.ProcessGroup(store, rank, size)
        for group in (self._plain, self):
            attach(group, transports)
        self._plain._set_group_name(group_name)
        install(_plain_of)
        self._compression = Compression(spec, self._team)

    @property
    def traffic(self) -> Traffic:
        """What was compressed so far, on this rank."""
        return self._compression.traffic

    # -- compressed -----------------------------------------------------------------------------------------------

    def allreduce(  # pyright: ignore[reportIncompatibleMethodOverride]  (it has several forms)
        self, tensors: Any, opts: Any = None, **options: Any
    ) -> Any:
        """All-reduce in place; `opts` is an `AllreduceOptions` or a `ReduceOp`."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        opts = _options(dist.AllreduceOptions, opts, options)
        if len(given) == 1:
            reduction = self._compressed(given[0], 1, opts.reduceOp)
            if reduction is not None:
                return self._compression.all_reduce(given, reduction)
        return self._plain.allreduce(given, opts)

    def reduce_scatter(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, outputs: Any, inputs: Any, opts: Any = None, **options: Any
    ) -> Any:
        """Reduce lists of tensors, and scatter the results."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(dist.ReduceScatterOptions, opts, options)
        if len(outputs) == 1 and len(inputs) == 1 and all(_alike(row, outputs[0]) for row in inputs[0]):
            reduction = self._compressed(outputs[0], len(inputs[0]), opts.reduceOp)
            if reduction is not None and len(inputs[0]) == self.size():
                return self._compression.reduce_scatter(outputs[0], list(inputs[0]), list(outputs), reduction)
        return self._plain.reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Any:
        """Reduce a tensor, and scatter the result: `torch.distributed.reduce_scatter_tensor`."""
        opts = _options(dist.ReduceScatterOptions, opts, {})
        out, x = outputTensor, inputTensor
        if out.dtype == x.dtype and out.numel() * self.size() == x.numel():
            reduction = self._compressed(out, self.size(), opts.reduceOp)
            if reduction is not None:
                return self._compression.reduce_scatter(out, [x], [out], reduction)
        return self._plain._reduce_scatter_base(out, x, opts)

    def _reduce_scatter_base(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single(outputTensor, inputTensor, opts)  # its name before torch 2.13

    def _compressed(self, x: Tensor, rows: int, op: Any) -> Reduction | None:
        return compressed(self.spec, x, rows, op) if self.size() > 1 else None

    # -- of the group -----------------------------------------------------------------------------------------------

    def split_group(self, ranks: list[int], *args: Any, **options: Any) -> CompressedProcessGroup | None:
        """Make a group of the same backend for some of the ranks, over connections split off this group's."""
        plain: Any = self._plain.split_group(ranks, *args, **options)
        if plain is None:
            return None
        transports = {device.type: plain._get_backend(device) for device in plain._device_types}
        store, name = plain.get_group_store(), str(plain.group_name)
        return CompressedProcessGroup(self.spec, store, plain.rank(), plain.size(), name, transports)

    def get_group_store(self) -> Any:
        """The store of the group."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._plain._get_sequence_number_for_group() + self._compression.traffic.operations

    def shutdown(self) -> None:
        """Let compressed collectives end, for no longer than the timeout of the group, then close all connections."""
        self._compression.close(self._timeout_now().total_seconds())
        self._plain.shutdown()

    def abort(self) -> None:
        """Close all connections at once."""
        self._compression.abort()
        self._plain.abort()

    def _timeout_now(self) -> timedelta:
        return self._transports["cpu"].options._timeout

    @property
    def supports_reconfigure(self) -> bool:
        """False: torch 2.15 can give a group other ranks, but compressed collectives would keep the old ones."""
        return False

    def reconfigure(self, opts: Any) -> Any:
        """Refused: see `supports_reconfigure`.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("backend 'bagua': its groups cannot be given other ranks; make a new group instead")

    def get_reconfigure_handle(self) -> str:
        """Refused as `reconfigure` is."""
        return self.reconfigure(None)

    def _team(self, device: torch.device) -> Team:
        backend = backend_kind(self._transports[device.type])
        return Team(
            self.rank(),
            self.size(),
            dist.PrefixStore("bagua", self._store),
            self._timeout_now(),
            backend,
            str(self.group_name),
            staged=device.type == "cuda" and backend == "gloo",
        )


def _plain_of(group: Any) -> Any:
    return group._plain if isinstance(group, CompressedProcessGroup) else None


@functools.cache
def _leave_untraced() -> None:
    """Keep the compiler out of the methods, which C++ calls from within compiled functions, too (DDP's reducer).

    To the compiler groups are opaque. Not as a decorator: that imports the compiler.
    """
    for name, method in list(vars(CompressedProcessGroup).items()):
        if inspect.isfunction(method) and name != "__init__":
            setattr(CompressedProcessGroup, name, torch.compiler.disable(method))


def _pass_on(name: str) -> Any:
    def passed_on(self: CompressedProcessGroup, *args: Any, **options: Any) -> Any:
        return getattr(self._plain, name)(*args, **options)

    passed_on.__name__ = name
    passed_on.__qualname__ = f"CompressedProcessGroup.{name}"
    passed_on.__doc__ = "As that of a plain group."
    return passed_on


# All methods of that kind which some torch from 2.11 on has, but for those above.
for _name in (
    *("_allgather_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "allgather"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce_coalesced", "alltoall", "alltoall_base"),
    *("barrier", "broadcast", "gather", "gather_into_tensor", "gather_single", "monitored_barrier", "new_window"),
    *("recv", "recv_anysource", "reduce", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("scatter", "send"),
    # Hooks of torch 2.15, which see the calls that are passed on.
    *("register_abort_hook", "register_post_hook", "register_pre_hook"),
    *("unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook"),
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(CompressedProcessGroup, _name, _pass_on(_name))


def _alike(row: Tensor, out: Tensor) -> bool:
    return row.dtype == out.dtype and row.numel() == out.numel()


def _options(kind: Any, opts: Any, options: dict[str, Any]) -> Any:
    """Options of `kind`: `opts` if it is such, else made from a `ReduceOp` and keywords."""
    if isinstance(opts, kind) and not options:
        return opts
    made = kind()
    op = options.pop("op", opts)
    if op is not None:
        made.reduceOp = op
    if options.get("timeout") is not None:
        made.timeout = options["timeout"]
    return made
