"""Process groups and communicators of the facade: members, nodes, objects, environment, abort."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bagua.comm.objects import pack, unpack
from bagua.errors import CommunicationError
from tests.rank_pool import RankPool


def _subgroups() -> None:
    import bagua.torch_api as bagua
    from bagua.torch_api import communication

    rank = dist.get_rank()
    odd, even = bagua.new_group([3, 1]), bagua.new_group([0, 2])
    mine, other = (odd, even) if rank % 2 else (even, odd)
    assert odd.ranks == [1, 3]
    assert communication._rank_not_in_group(other)
    assert not communication._rank_not_in_group(mine)
    assert not communication._rank_not_in_group(None)
    outside = other.get_global_communicator()
    assert outside is communication.CommMember.NON_COMM_MEMBER
    assert other.get_intra_node_communicator() is outside
    x = torch.tensor([float(rank)])
    for call in (bagua.allreduce_inplace, bagua.alltoall_inplace, bagua.broadcast):
        call(x, comm=outside)  # nothing happens
    bagua.barrier(outside)
    assert bagua.broadcast_object({"a": 1}, 0, outside) is None
    assert x.item() == rank
    comm = mine.get_global_communicator()
    assert comm is mine.get_global_communicator()
    assert (comm.rank(), comm.nranks()) == (rank // 2, 2)
    assert comm.device_id() == (torch.cuda.current_device() if torch.cuda.is_available() else -1)
    assert comm.cuda_stream is None or torch.cuda.is_available()
    bagua.allreduce_inplace(x, comm=comm)
    assert x.item() == (4.0 if rank % 2 else 2.0)
    y = torch.tensor([rank])
    bagua.broadcast(y, 1, comm)  # rank 1 of the communicator
    assert y.item() == (3 if rank % 2 else 2)
    comm.barrier()
    alone = bagua.new_group([2])
    bagua.allreduce_inplace(y, comm=alone.get_global_communicator())
    assert bagua.new_group().ranks == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="ranks: expected distinct ranks"):
        bagua.new_group([0, 0])
    with pytest.raises(ValueError, match="ranks: expected distinct ranks"):
        bagua.new_group([4])

    torch_group = dist.new_group([1, 2, 3])
    if rank == 0:
        group = bagua.from_torch_group(torch_group)
        assert group.ranks == [] and communication._rank_not_in_group(group)
        for comm in (
            group.get_global_communicator(),
            group.get_intra_node_communicator(),
            group.get_inter_node_communicator(),
        ):
            assert comm is communication.CommMember.NON_COMM_MEMBER
            bagua.allreduce_inplace(torch.ones(1), comm=comm)
    else:
        group = bagua.from_torch_group(torch_group)
        comm = group.get_global_communicator()
        assert (comm.rank(), comm.nranks(), group.ranks) == (rank - 1, 3, [1, 2, 3])
        z = torch.ones(1)
        bagua.allreduce_inplace(z, comm=comm)
        assert z.item() == 3
    with pytest.raises(TypeError, match="group: expected"):
        bagua.from_torch_group("world")
    assert communication._get_default_group().ranks == [0, 1, 2, 3]
    assert communication.is_initialized()


def test_subgroups_and_non_members(pool: RankPool) -> None:
    pool.run(4, _subgroups)


def _nodes() -> tuple[Any, ...]:
    import bagua.torch_api as bagua

    group = bagua.new_group([1, 2, 3])  # rank 1 on node 0; 2 and 3 on node 1
    if dist.get_rank() == 0:
        return ()
    intra, inter = group.get_intra_node_communicator(), group.get_inter_node_communicator()
    x = torch.tensor([dist.get_rank()])
    bagua.allreduce_inplace(x, comm=intra)
    within = int(x)
    bagua.allreduce_inplace(x, comm=inter)
    member = isinstance(inter, type(intra))
    return within, int(x), intra.nranks(), inter.nranks() if member else None


def test_communicators_of_nodes(pool: RankPool) -> None:
    assert pool.run(4, _nodes, nodes=[0, 0, 1, 1]) == [(), (1, 6, 1, 2), (5, 6, 2, 2), (5, 5, 2, None)]


class _Custom:
    pass


OBJECT = {
    "plain": [None, True, -3, 1.5, float("inf"), "wörd", 2 + 1j],
    ("tuple", 1): (1, (2, [3])),
    "bytes": b"\x00\xff" * 5,
    "sets": [{1, 2}, frozenset({"a"}), torch.Size([2, 3])],
    "ordered": OrderedDict(b=1, a=2),
    "empty": [{}, [], (), b"", torch.empty(0, 3)],
}


def test_plain_data_survives() -> None:
    back = unpack(pack(OBJECT | {7: bytearray(b"x")}))
    tensor = back["empty"].pop()
    assert tensor.shape == (0, 3)
    assert back == OBJECT | {7: bytearray(b"x"), "empty": OBJECT["empty"][:-1]}
    assert [type(item) for item in back["sets"]] == [set, frozenset, torch.Size]
    assert isinstance(back["ordered"], OrderedDict)
    for dtype in (torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e5m2):
        x = torch.arange(6).view(2, 3).to(dtype).t()
        y = unpack(pack({"x": x}))["x"]
        assert y.dtype == dtype
        assert torch.equal(y.to(torch.complex64), x.to(torch.complex64))
    for array in (np.arange(6.0).reshape(2, 3).T, np.array(["a", "bcd"]), np.float16(1.5), np.array(3)):
        back = unpack(pack([array]))[0]
        assert type(back) is type(array)
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)


@pytest.mark.parametrize(
    "bad", [_Custom(), _Custom, len, {"deep": [_Custom()]}, np.array([None]), torch.zeros(2).to_sparse()]
)
def test_other_objects_are_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent(; supported types:|, only of numbers, text and times)"):
        pack(bad)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 9, pack([b"abc"])[:-1], pack({"a": 1})[:-2]])
def test_damaged_messages_are_refused(damage: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(damage)


def _objects() -> None:
    import bagua.torch_api as bagua

    n, rank = dist.get_world_size(), dist.get_rank()
    for src in range(n):
        sent = {"from": rank, "x": torch.full((3,), float(rank))}
        got = bagua.broadcast_object(sent, src)
        assert got["from"] == src
        assert got["x"].tolist() == [src] * 3
        assert (got is sent) == (rank == src)
    with pytest.raises(TypeError, match=r"obj\['a'\]: a tests.facade.test_groups._Custom cannot be sent"):
        bagua.broadcast_object({"a": _Custom()}, n - 1)
    bagua.barrier()


@pytest.mark.parametrize("size", [1, 3])
def test_broadcast_object(pool: RankPool, size: int) -> None:
    pool.run(size, _objects)


def _environment() -> dict[str, Any]:
    import bagua.torch_api as bagua
    from bagua.torch_api import env

    before = (bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank(), bagua.get_local_size())
    assert env.get_default_bucket_size() == 10 * 2**20
    os.environ.pop("LOCAL_RANK")
    os.environ.pop("LOCAL_WORLD_SIZE")
    alone = (bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank(), bagua.get_local_size())
    for args, match in (
        ({"rank": 0}, "rank: needs store"),
        ({"store": "x", "rank": 0, "world_size": 1, "local_world_size": 1}, "store: expected"),
        ({"store": dist.HashStore(), "rank": 1, "world_size": 1, "local_world_size": 1}, "world_size"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            bagua.init_process_group(**args)
    bagua.init_process_group(dist.HashStore(), 0, 1, 1)
    bagua.init_process_group()  # again: nothing happens
    with pytest.raises(ValueError, match="exists already"):
        bagua.init_process_group(dist.HashStore(), 1, 2, 1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    written = {name: os.environ.pop(name) for name in names}
    x = torch.ones(2)
    bagua.allreduce_inplace(x)
    bagua.destroy_process_group()
    os.environ.update({"RANK": "5", "GROUP_RANK": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    node = env.get_node_rank()
    del os.environ["RANK"]
    os.environ["NODE_RANK"] = "3"
    os.environ["WORLD_SIZE"] = "four"
    with pytest.raises(ValueError, match="WORLD_SIZE: expected an integer"):
        bagua.get_world_size()
    return {"before": before, "alone": alone, "written": written, "nodes": (node, env.get_node_rank())}


def test_environment(pool: RankPool) -> None:
    [said] = pool.run(1, _environment, init=False)
    assert said["before"] == (0, 1, 0, 1)
    assert said["alone"] == (0, 1, 0, 1)
    assert said["written"] == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert said["nodes"] == (2, 3)


def _abort() -> float:
    import bagua.torch_api as bagua

    comm = bagua.new_group().get_global_communicator()
    bagua.allreduce_inplace(torch.ones(1), comm=comm)
    assert not comm.check_abort()
    started = time.monotonic()
    if dist.get_rank() == 1:
        comm.abort()
        comm.abort()
        assert comm.check_abort()
        mine = torch.full((1,), 5.0)
        bagua.allreduce_inplace(mine, comm=comm)
        comm.allreduce_inplace(mine)
        bagua.barrier(comm)
        assert mine.item() == 5.0, "nothing is done any more"
        with pytest.raises(CommunicationError, match="was aborted"):
            bagua.broadcast_object({}, 0, comm)
    else:
        with pytest.raises(CommunicationError, match="allreduce_inplace on rank 0 of 2"):
            bagua.allreduce_inplace(torch.ones(1), comm=comm)
    bagua.allreduce_inplace(torch.ones(1))  # other communicators go on
    return time.monotonic() - started


def test_abort_ends_the_peers_too(pool: RankPool) -> None:
    assert max(pool.run(2, _abort)) < 15


def _forgets() -> None:
    import bagua.torch_api as bagua
    from bagua.comm import communicator

    bagua.allreduce_inplace(torch.ones(1))
    first = weakref.ref(communicator.default_rank_set())
    bagua.destroy_process_group()
    gc.collect()
    assert first() is None
    bagua.init_process_group()
    x = torch.ones(1)
    bagua.allreduce_inplace(x, bagua.ReduceOp.AVG)
    assert bagua.communication._get_default_group().ranks == [0]


def test_nothing_outlives_the_process_group(pool: RankPool) -> None:
    pool.run(1, _forgets)
