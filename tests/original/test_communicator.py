"""Primitives give what torch's collectives give, bit for bit; after an abort they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.rank_pool import RankPool

SIZE = 3


def _primitives() -> None:
    import bagua.torch_api as api
    from bagua.torch_api import ReduceOp

    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    mine = torch.rand(100, generator=generator)

    reduced, expected = torch.zeros(100), mine.clone()
    api.allreduce(mine, reduced)
    dist.all_reduce(expected)
    assert torch.equal(reduced, expected)

    rows, listed = torch.zeros(size, 100), [torch.zeros(100) for _ in range(size)]
    api.allgather(mine, rows)
    dist.all_gather(listed, mine)
    assert torch.equal(rows, torch.stack(listed))

    if rank == 0:
        api.send(mine, dst=1)
    elif rank == 1:
        received = torch.zeros(100)
        api.recv(received, src=0)
        assert torch.equal(received, listed[0])
    api.barrier()

    sent = {"lr": 0.02, "weight_decay": 1e-4, "momentum": 0.9} if rank == 0 else {}
    assert api.broadcast_object(sent, 0) == {"lr": 0.02, "weight_decay": 1e-4, "momentum": 0.9}

    def to_first(tensor: torch.Tensor, out: torch.Tensor, op: Any) -> None:
        api.reduce(tensor, out, 0, op)

    calls: list[Callable[..., Any]] = [to_first, api.allreduce]
    for call in calls:
        mean, total = torch.zeros(100), torch.zeros(100)
        call(mine, mean, op=ReduceOp.AVG)
        call(mine, total, op=ReduceOp.SUM)
        assert torch.allclose(mean, total / size, rtol=1e-6, atol=0)
    for place in (lambda tensor, op: api.reduce_inplace(tensor, 0, op), api.allreduce_inplace):
        mean, total = mine.clone(), mine.clone()
        place(mean, op=ReduceOp.AVG)
        place(total, op=ReduceOp.SUM)
        if rank == 0 or place is api.allreduce_inplace:
            assert torch.allclose(mean, total / size, rtol=1e-6, atol=0)

    whole = torch.rand(100 * size, generator=generator)
    parts = [torch.zeros(100 * size) for _ in range(size)]
    dist.all_gather(parts, whole)
    wanted = torch.stack(parts).mean(0).view(size, 100)[rank]
    part, placed = torch.zeros(100), whole.clone()
    api.reduce_scatter(whole, part, op=ReduceOp.AVG)
    api.reduce_scatter_inplace(placed, op=ReduceOp.AVG)
    assert torch.allclose(part, wanted, rtol=1e-6, atol=0) and torch.equal(placed[:100], part)


def test_primitives(pool: RankPool) -> None:
    pool.run(SIZE, _primitives)


def _abort() -> None:
    from bagua.torch_api.communication import ReduceOp, _get_default_group

    communicator: Any = _get_default_group().get_global_communicator()
    tensor: Any = torch.full((10,), float(dist.get_rank()))
    communicator.allreduce_inplace(tensor.ensure_bagua_tensor().bagua_backend_tensor(), ReduceOp.AVG)
    assert tensor.tolist() == [0.5] * 10
    communicator.barrier()
    communicator.abort()
    assert communicator.check_abort()
    for _ in range(dist.get_rank() + 1):  # not as often on all ranks
        communicator.allreduce_inplace(tensor.bagua_backend_tensor(), ReduceOp.AVG)
    assert tensor.tolist() == [0.5] * 10


def test_after_an_abort_operations_return(pool: RankPool) -> None:
    pool.run(2, _abort)
