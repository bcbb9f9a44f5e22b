"""The facade for scripts written for the original Bagua.

    import bagua.torch_api as bagua
    bagua.init_process_group()
    model = model.with_bagua([optimizer], GradientAllReduceAlgorithm())

Importing it puts `with_bagua` and its properties on `torch.nn.Module`, the methods `bagua_...` on `torch.Tensor`, and
does nothing else. New scripts use `bagua.distribute`. The packages `checkpoint`, `contrib`, `model_parallel` and
`moe` are imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from bagua.comm.world import destroy_process_group
from bagua.torch_api import algorithms, communication, data_parallel, env
from bagua.torch_api.communication import (
    BaguaProcessGroup,
    ReduceOp,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_coalesced_inplace,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    broadcast_coalesced,
    broadcast_object,
    from_torch_group,
    gather,
    gather_inplace,
    get_backend,
    init_process_group,
    is_initialized,
    new_group,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from bagua.torch_api.env import get_local_rank, get_local_size, get_rank, get_world_size
from bagua.torch_api.patch import patch
from bagua.torch_api.tensor import patch_tensor

if TYPE_CHECKING:
    from bagua.torch_api import checkpoint, contrib, model_parallel
    from bagua.torch_api.distributed import BaguaModule
    from bagua.torch_api.model_parallel import moe
    from bagua.torch_api.tensor import BaguaTensor

__all__ = [
    "BaguaModule",
    "BaguaProcessGroup",
    "BaguaTensor",
    "ReduceOp",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "checkpoint",
    "communication",
    "contrib",
    "data_parallel",
    "destroy_process_group",
    "env",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "model_parallel",
    "moe",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
    "version",
]

version = torch.__version__  # as the original: torch's; this package's is `bagua.__version__`
_CLASSES = {"BaguaModule": "distributed", "BaguaTensor": "tensor"}
_LAZY = {name: name for name in ("checkpoint", "contrib", "model_parallel")} | {"moe": "model_parallel.moe"}


if not TYPE_CHECKING:  # with it, type checkers would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name in _CLASSES:
            return getattr(import_module(f"{__name__}.{_CLASSES[name]}"), name)
        if name in _LAZY:
            return import_module(f"{__name__}.{_LAZY[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


patch()
patch_tensor()
