"""`bagua.torch_api.communication`: process groups, communicators and all the primitives."""

from __future__ import annotations

from typing import NoReturn

from bagua.gone import Gone
from bagua.torch_api.primitives import (
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
    gather,
    gather_inplace,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from bagua.torch_api.process_group import (
    BaguaCommunicator,
    BaguaProcessGroup,
    CommMember,
    _get_default_group,
    _rank_not_in_comm,
    _rank_not_in_group,
    comm,
    from_torch_group,
    init_process_group,
    is_initialized,
    new_group,
)

__all__ = [
    "BaguaCommunicator",
    "BaguaProcessGroup",
    "CommMember",
    "ReduceOp",
    "_get_default_group",
    "_rank_not_in_comm",
    "_rank_not_in_group",
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
    "comm",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_communicator",
    "get_hyperparameters_service_client",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
    "start_autotune_server",
]

_NO_SERVER = "no server is needed: bagua.distribute(..., autotune=True) tunes through the process group's store"
get_communicator = Gone("get_communicator", "new_group(ranks).get_global_communicator() makes one and keeps it")
get_hyperparameters_service_client = Gone("get_hyperparameters_service_client", _NO_SERVER)
start_autotune_server = Gone("start_autotune_server", _NO_SERVER)


def get_backend(model_name: str) -> NoReturn:
    """Not offered: there is no scheduler beside the module that could be asked for.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"get_backend({model_name!r}): buckets are scheduled by the engine within the distributed module; "
        "bagua.stats(module) reports on it, module.bagua_buckets holds the buckets"
    )
