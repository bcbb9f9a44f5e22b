"""The backends of torch that carry what is not compressed: gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua.comm.backend_kind import backend_kind

__all__ = ["attach", "make_transports"]


def make_transports(
    store: Any, rank: int, size: int, timeout: timedelta, group_name: str, global_ranks: Any, pg_options: Any
) -> dict[str, Any]:
    """Make a backend for each type of device that there is. Collective over the group.

    Where there are GPUs but no NCCL, gloo carries CUDA tensors too.

    Args:
        store: shared by the group.
        rank, size: of the group.
        timeout: of the group.
        group_name: of the group.
        global_ranks: of the members; empty for the default group, whose ranks they are.
        pg_options: options of NCCL, or None.

    Raises:
        TypeError: `pg_options` are not NCCL's, or there is no NCCL that takes them.
    """
    global_ranks = list(global_ranks) or list(range(size))  # gloo reads past the end of an empty list when it splits
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if pg_options is not None and not (nccl and isinstance(pg_options, dist.ProcessGroupNCCL.Options)):
        raise TypeError(
            f"pg_options: backend 'bagua' takes options of NCCL on GPUs only, got {type(pg_options).__name__}"
        )
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), rank, size, timeout)
    _say_whose(gloo.options, group_name, global_ranks)
    made: dict[str, Any] = {"cpu": gloo}
    if nccl:
        options = dist.ProcessGroupNCCL.Options() if pg_options is None else copy.copy(pg_options)
        options._timeout = timeout
        _say_whose(options, group_name, global_ranks)
        made["cuda"] = dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, size, options)
    elif torch.cuda.is_available():
        made["cuda"] = gloo
    return made


def attach(process_group: Any, transports: Mapping[str, Any]) -> None:
    """Let collectives of `process_group` that nobody overrides run on `transports`."""
    kinds = dist.ProcessGroup.BackendType
    types = {"gloo": kinds.GLOO, "nccl": kinds.NCCL}
    for device, backend in transports.items():
        process_group._register_backend(torch.device(device), types[backend_kind(backend)], backend)
    process_group._set_default_backend(types[backend_kind(transports.get("cuda", transports["cpu"]))])


def _say_whose(options: Any, group_name: str, global_ranks: Any) -> None:
    options.group_name = group_name
    options.global_ranks_in_group = global_ranks
