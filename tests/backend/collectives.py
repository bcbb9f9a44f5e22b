"""Every collective of torch.distributed as a function of a group and a dtype, for a comparison of two groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

ALL = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8, torch.uint8)
OPS = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")}
N = 6


def values(dtype: torch.dtype, device: torch.device, shift: int = 0, n: int = N) -> Tensor:
    """Small whole numbers that differ by rank."""
    return (torch.arange(n, device=device) % 5 + 1 + dist.get_rank() + shift).to(dtype)


def spaces(x: Tensor, count: int) -> list[Tensor]:
    return [torch.zeros_like(x) for _ in range(count)]


def all_reduce(group: Any, x: Tensor, op: str) -> list[Tensor]:
    dist.all_reduce(x, OPS[op], group=group)
    return [x]


def all_reduce_async(group: Any, x: Tensor) -> list[Tensor]:
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    assert work.wait()
    return [x]


def all_reduce_coalesced(group: Any, x: Tensor) -> list[Tensor]:
    tensors = [x, x.flip(0).contiguous()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def coalescing_manager(group: Any, x: Tensor) -> list[Tensor]:
    tensors = [x, x.flip(0).contiguous()]
    with dist.distributed_c10d._coalescing_manager(group=group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return tensors


def reduce(group: Any, x: Tensor) -> list[Tensor]:
    dist.reduce(x, 1, group=group)
    return [x] if dist.get_rank() == 1 else []


def broadcast(group: Any, x: Tensor) -> list[Tensor]:
    dist.broadcast(x, 1, group=group)
    return [x]


def all_gather(group: Any, x: Tensor) -> list[Tensor]:
    out = spaces(x, 2)
    dist.all_gather(out, x, group=group)
    return out


def all_gather_into_tensor(group: Any, x: Tensor) -> list[Tensor]:
    out = x.new_zeros(2 * N)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_into_tensor(out, x, group=group)
    return [out]


def all_gather_coalesced(group: Any, x: Tensor) -> list[Tensor]:
    out = [spaces(x, 2), spaces(x, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_coalesced([out[0], out[1]], [x, x + 1], group=group)
    return [*out[0], *out[1]]


def gather(group: Any, x: Tensor) -> list[Tensor]:
    out = spaces(x, 2) if dist.get_rank() == 0 else None
    dist.gather(x, out, 0, group=group)
    return out or []


def scatter(group: Any, x: Tensor) -> list[Tensor]:
    out = torch.zeros_like(x)
    dist.scatter(out, [x, x + 1] if dist.get_rank() == 1 else None, 1, group=group)
    return [out]


def reduce_scatter(group: Any, x: Tensor, op: str) -> list[Tensor]:
    out = torch.zeros_like(x)
    dist.reduce_scatter(out, [x, x + 1], OPS[op], group=group)
    return [out]


def reduce_scatter_tensor(group: Any, x: Tensor) -> list[Tensor]:
    out = x.new_zeros(N // 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.reduce_scatter_tensor(out, x, group=group)
    return [out]


def reduce_scatter_coalesced(group: Any, x: Tensor) -> list[Tensor]:
    out = [x.new_zeros(N // 2), x.new_zeros(N // 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with dist.distributed_c10d._coalescing_manager(group=group):
            for tensor in out:
                dist.reduce_scatter_tensor(tensor, x, group=group)
    return out


def all_to_all(group: Any, x: Tensor) -> list[Tensor]:
    out = spaces(x, 2)
    dist.all_to_all(out, [x, x + 1], group=group)
    return out


def all_to_all_single(group: Any, x: Tensor) -> list[Tensor]:
    out = torch.zeros_like(x)
    dist.all_to_all_single(out, x, group=group)
    return [out]


def all_to_all_uneven(group: Any, x: Tensor) -> list[Tensor]:
    rank = dist.get_rank()
    mine = [2, 4] if rank == 0 else [1, 5]
    theirs = [2, 1] if rank == 0 else [4, 5]
    out = x.new_zeros(sum(theirs))
    dist.all_to_all_single(out, x, theirs, mine, group=group)
    return [out]


def send_and_recv(group: Any, x: Tensor) -> list[Tensor]:
    out = torch.zeros_like(x)
    if dist.get_rank() == 0:
        dist.send(x, 1, group=group, tag=3)
        dist.recv(out, 1, group=group)
    else:
        dist.recv(out, 0, group=group, tag=3)
        dist.send(x, 0, group=group)
    return [out]


def recv_any_source(group: Any, x: Tensor) -> list[Tensor]:
    if dist.get_rank() == 0:
        dist.send(x, 1, group=group)
        return []
    out = torch.zeros_like(x)
    assert dist.recv(out, group=group) == 0
    return [out]


def batch_isend_irecv(group: Any, x: Tensor) -> list[Tensor]:
    out, peer = torch.zeros_like(x), 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, out, peer, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [out]


def functional_all_reduce(group: Any, x: Tensor) -> list[Tensor]:
    return [functional.all_reduce(x, "sum", group).clone()]


def functional_all_gather(group: Any, x: Tensor) -> list[Tensor]:
    return [functional.all_gather_tensor(x, 0, group).clone()]


def functional_reduce_scatter(group: Any, x: Tensor) -> list[Tensor]:
    return [functional.reduce_scatter_tensor(x, "sum", 0, group).clone()]


def objects(group: Any, x: Tensor) -> list[Tensor]:
    """All collectives of objects."""
    rank, everyones, mine = dist.get_rank(), [None, None], [None]
    dist.all_gather_object(everyones, {"rank": rank, "x": x.tolist()}, group=group)
    gathered: list[Any] | None = [None, None] if rank == 0 else None
    dist.gather_object(("rank", rank), gathered, 0, group=group)
    told: list[Any] = ["from", rank]
    dist.broadcast_object_list(told, 1, group=group)
    dist.scatter_object_list(mine, ["a", "b"] if rank == 0 else None, 0, group=group)
    sent: list[Any] = [("sent", rank)]
    if rank == 0:
        dist.send_object_list(sent, 1, group=group)
    else:
        dist.recv_object_list(sent, 0, group=group)
    assert everyones == [{"rank": r, "x": (x - rank + r).tolist()} for r in range(2)]
    assert gathered == ([("rank", 0), ("rank", 1)] if rank == 0 else None)
    assert told == ["from", 1] and mine == ["ab"[rank]] and sent == [("sent", 0)]
    return []


def barriers(group: Any, x: Tensor) -> list[Tensor]:
    dist.barrier(group=group)
    group.monitored_barrier(timedelta(seconds=60), wait_all_ranks=True)
    work = dist.barrier(group=group, async_op=True)
    assert work is not None
    work.wait()
    return []


COLLECTIVES: dict[str, Callable[..., list[Tensor]]] = {
    function.__name__: function
    for function in (
        *(all_reduce_async, all_reduce_coalesced, coalescing_manager, reduce, broadcast, all_gather),
        *(all_gather_into_tensor, all_gather_coalesced, gather, scatter, reduce_scatter_tensor),
        *(reduce_scatter_coalesced, all_to_all, all_to_all_single, all_to_all_uneven, send_and_recv, recv_any_source),
        *(
            batch_isend_irecv,
            functional_all_reduce,
            functional_all_gather,
            functional_reduce_scatter,
            objects,
            barriers,
        ),
    )
}
for _op in OPS:
    COLLECTIVES[f"all_reduce {_op}"] = lambda group, x, op=_op: all_reduce(group, x, op)
    COLLECTIVES[f"reduce_scatter {_op}"] = lambda group, x, op=_op: reduce_scatter(group, x, op)
