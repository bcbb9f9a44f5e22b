"""Part 7: NCCL itself: the calls this library makes, with one rank; a mirrored team; two ranks on one GPU.

NCCL refuses two ranks of one host on one GPU. `NCCL_HOSTID` gives each rank a host of its own, so that they count as
two machines and talk through a network transport, on one GPU in turns. That is no setting for work; where NCCL refuses
it, the check is skipped with NCCL's words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import bagua
import bagua.engine.api
import bagua.engine.lanes.pool
from bagua.engine.lanes.lane import InlineLane
from benchmarks.gpu import mirror
from benchmarks.gpu.pair import train_two
from benchmarks.gpu.record import Record, Skip

__all__ = ["inline_if_dry", "run"]

_ALGORITHMS = (
    *("gradient_allreduce", "bytegrad", "bytegrad, 1 bit", "bytegrad, 1 bit, means in 2", "power_sgd"),
    *("decentralized", "local_sgd", "diloco"),
)
_OPTIONS: dict[str, dict[str, Any]] = {
    "local_sgd": {"communication_interval": 2},  # of the weights, not of changes
    "bytegrad, 1 bit": {"codec": "eden"},
    "bytegrad, 1 bit, means in 2": {"codec": "eden", "gather_codec": "eden:bits=2:states=8"},
}
_EXACT = ("gradient_allreduce", "decentralized", "local_sgd")


def run(record: Record) -> None:
    """Checks only."""
    on_gpu = torch.cuda.is_available() and not record.dry
    device = torch.device("cuda" if on_gpu else "cpu")
    for name, call in _calls(device).items():
        with record.check(f"one rank: {name}"):
            if not on_gpu and name not in ("allreduce", "broadcast"):
                raise Skip("gloo has no such call")
            _one_rank(call, on_gpu)
    for algorithm in _ALGORITHMS:
        with record.check(f"a mirrored team of two: {algorithm}"):
            _mirrored(algorithm, device, on_gpu)
    with record.check("a mirrored team of two: the mean of what the codec makes of equal tensors is that"):
        _swapped(device, on_gpu)
    with record.check("two ranks on one GPU, NCCL with NCCL_HOSTID") as entry:
        if not on_gpu:
            raise Skip("dry run")
        entry.update(train_two("nccl", plugin=False))
    with record.check("two ranks on one GPU, gloo by way of host memory") as entry:
        if not on_gpu:
            raise Skip("dry run")
        entry.update(train_two("gloo", plugin=False))


def _calls(device: torch.device) -> dict[str, Callable[..., None]]:
    x = torch.arange(8, dtype=torch.float32, device=device)

    def same(y: torch.Tensor) -> None:
        assert torch.equal(y, torch.arange(8, dtype=torch.float32, device=device)), y

    def allreduce(pg: dist.ProcessGroup) -> None:
        y = x.clone()
        pg.allreduce([y], dist.AllreduceOptions()).wait()
        same(y)

    def broadcast(pg: dist.ProcessGroup) -> None:
        y = x.clone()
        pg.broadcast([y], dist.BroadcastOptions()).wait()
        same(y)

    def reduce(pg: dist.ProcessGroup) -> None:
        y = x.clone()
        pg.reduce([y], dist.ReduceOptions()).wait()
        same(y)

    def alltoall_base(pg: dist.ProcessGroup) -> None:
        y = torch.zeros_like(x)
        pg.alltoall_base(y, x, [], [], dist.AllToAllOptions()).wait()
        same(y)

    def allgather_base(pg: dist.ProcessGroup) -> None:
        y = x.clone()[None]
        pg._allgather_base(y, y[:1]).wait()
        same(y[0])

    def reduce_scatter_base(pg: dist.ProcessGroup) -> None:
        y = torch.zeros_like(x)
        pg._reduce_scatter_base(y, x, dist.ReduceScatterOptions()).wait()
        same(y)

    def empty_batch(pg: dist.ProcessGroup) -> None:
        getattr(pg, "_start_coalescing")()  # noqa: B009 - torch's stubs have it with an argument
        assert getattr(pg, "_end_coalescing")() is None  # noqa: B009

    def barrier(pg: dist.ProcessGroup) -> None:
        options = dist.BarrierOptions()
        options.device_ids = [torch.cuda.current_device()]
        pg.barrier(options).wait()

    return {
        each.__name__: each
        for each in (
            allreduce,
            broadcast,
            reduce,
            alltoall_base,
            allgather_base,
            reduce_scatter_base,
            empty_batch,
            barrier,
        )
    }


def _one_rank(call: Callable[..., None], on_gpu: bool) -> None:
    pg = (mirror.nccl if on_gpu else mirror.gloo)(dist.HashStore())
    call(pg)
    if on_gpu:
        torch.cuda.synchronize()
    pg.shutdown()


def _mirrored(algorithm: str, device: torch.device, on_gpu: bool) -> None:
    alone, mirrored = (_train(algorithm if team else None, device, on_gpu) for team in (False, True))
    for a, b in zip(alone, mirrored, strict=True):
        assert bool(b.isfinite().all())
        if algorithm in _EXACT:  # the mean of two equal tensors is the tensor
            assert torch.equal(a, b), f"differs from training alone by {float((a - b).abs().max()):.3g}"


def _swapped(device: torch.device, on_gpu: bool) -> None:
    """Rows that differ: they must not change places."""
    codec, n = bagua.codecs.MinMaxUInt8(), 4096
    x = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(device)
    want = codec.decode(codec.encode(x.view(2, n // 2)), n // 2).view(-1)
    groups = mirror.MirrorTeam(mirror.nccl if on_gpu else mirror.gloo).open("lane")
    exchange = bagua.exchanges.ScatterGather(codec)
    exchange.run(x, exchange.init(x, groups), groups, 0)
    torch.testing.assert_close(x, want, rtol=1e-6, atol=1e-6)
    groups.leave(abort=False)


def _train(algorithm: str | None, device: torch.device, on_gpu: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    wide = 256 if on_gpu else 12
    model = nn.Sequential(nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, wide)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if algorithm is not None:
        with inline_if_dry(not on_gpu):
            team = mirror.MirrorTeam(mirror.nccl if on_gpu else mirror.gloo)
            options = {"bucket_bytes": 4 * wide * wide, **_OPTIONS.get(algorithm, {})}
            bagua.distribute(model, optimizer, algorithm.split(",")[0], process_group=team, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        optimizer.zero_grad()
        x = torch.randn(16, wide, generator=generator).to(device)
        model(x).square().mean().backward()
        optimizer.step()
    if algorithm is not None:
        bagua.detach(model)
    return [param.detach().clone() for param in model.parameters()]


@contextlib.contextmanager
def inline_if_dry(dry: bool) -> Iterator[None]:
    """Without a GPU there are no streams: what would run on one runs in place."""
    if not dry:
        yield
        return
    inline = lambda groups, _device: InlineLane(groups)  # noqa: E731
    with (
        mock.patch.object(bagua.engine.api, "make_lane", inline),
        mock.patch.object(bagua.engine.lanes.pool, "make_lane", inline),
    ):
        yield
