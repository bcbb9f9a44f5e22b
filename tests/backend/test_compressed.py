"""Compressed reductions: close to the exact ones, equal on all ranks, in order, and small."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

import bagua
from bagua.backend import CompressedProcessGroup, Traffic
from bagua.backend.names import Backend
from bagua.backend.reductions import Reduction, compressed
from bagua.comm.mesh import why_no_mesh
from tests.rank_pool import RankPool, gpu_of

N = 40_011  # no multiple of anything
OPS: dict[str, Any] = {
    "SUM": lambda: dist.ReduceOp.SUM,
    "AVG": lambda: dist.ReduceOp.AVG,
    "PREMUL_SUM": lambda: dist._make_nccl_premul_sum(0.25),
}
FACTORS = {"SUM": 1.0, "AVG": 0.5, "PREMUL_SUM": 0.25}
# Errors of the result, as part of its norm, on numbers with a normal distribution.
BOUNDS = {"uint8": 0.02, "int4": 0.3, "bf16": 0.01, "fp16": 0.002}


def world() -> CompressedProcessGroup:
    group = dist.group.WORLD
    assert isinstance(group, CompressedProcessGroup)
    return group


def normal(rank: int, n: int = N, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(10 + rank)).to(dtype)


def everyones(device: torch.device, x: Tensor) -> None:
    """All ranks hold the same bits."""
    out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    assert all(torch.equal(each, x) for each in out)


def close(got: Tensor, want: Tensor, bound: float, what: object) -> None:
    error = (got.double().cpu() - want.double()).norm() / want.double().norm()
    assert error < bound, (what, float(error))


def reductions(codec: str, kind: str) -> Traffic:
    device = gpu_of(dist.get_rank()) if kind == "cuda" else torch.device(kind)
    rank, size, bound = dist.get_rank(), dist.get_world_size(), BOUNDS[codec]
    runs = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if codec in ("bf16", "fp16") and dtype != torch.float32:
            continue
        coarse = 0.02 if dtype == torch.bfloat16 else 0.002 if dtype == torch.float16 else 0.0
        total = torch.stack([normal(r, dtype=dtype).double() for r in range(size)]).sum(0)
        for name, op in OPS.items():
            want = total * (FACTORS[name] if name != "AVG" else 1 / size)
            x = normal(rank, dtype=dtype).to(device)
            dist.all_reduce(x, op())
            close(x, want, bound + coarse, (name, dtype))
            everyones(device, x)
            rows = torch.stack([normal(rank, dtype=dtype) * (r + 1) for r in range(size)]).to(device)
            out = torch.empty(N, dtype=dtype, device=device)
            world()._reduce_scatter_base(out, rows, _scatter_options(op())).wait()
            close(out, want * (rank + 1), bound + coarse, ("reduce_scatter_tensor", name, dtype))
            dist.reduce_scatter(out.zero_(), list(rows.unbind()), op())
            close(out, want * (rank + 1), bound + coarse, ("reduce_scatter", name, dtype))
            runs += 3
    assert world().traffic.operations == runs
    return world().traffic


def _scatter_options(op: Any) -> dist.ReduceScatterOptions:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return options


def sums_over(transport: str) -> tuple[list[Tensor], bool]:
    """On a rank: sums of two reductions, and whether they went over the native transport."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGUA_TRANSPORT", transport)
        x, rows = normal(dist.get_rank()), torch.stack([normal(dist.get_rank()) * (r + 1) for r in range(2)])
        out = torch.empty(N)
        dist.all_reduce(x)
        dist.reduce_scatter_tensor(out, rows)
        return [x, out], world()._compression._lanes["cpu"].groups.native


def test_the_transport_changes_no_bit(pool: RankPool) -> None:
    over_gloo = pool.run(2, sums_over, "gloo", backend="bagua:uint8")
    for first, second in zip(over_gloo, pool.run(2, sums_over, "", backend="bagua:uint8"), strict=True):
        assert all(map(torch.equal, first[0], second[0]))
        assert (first[1], second[1]) == (False, not why_no_mesh())


@pytest.mark.parametrize("codec", BOUNDS)
def test_sums_and_means(codec: str, pool: RankPool, device: torch.device) -> None:
    for traffic in pool.run(2, reductions, codec, device.type, backend=f"bagua:{codec}"):
        assert 0 < traffic.bytes_sent < traffic.bytes_exact


@pytest.mark.slow
def test_four_ranks(pool: RankPool) -> None:
    pool.run(4, reductions, "uint8", "cpu", backend="bagua:uint8")


def bytes_of_one() -> Traffic:
    dist.all_reduce(torch.randn(1_000_000))
    return world().traffic


def test_8_bits_send_a_quarter(pool: RankPool) -> None:
    for traffic in pool.run(2, bytes_of_one, backend="bagua"):
        assert traffic.operations == 1
        assert traffic.bytes_exact == 4_000_000
        assert traffic.bytes_exact / traffic.bytes_sent >= 3.9


def shapes() -> None:
    """On a rank: strides with gaps, several dimensions, leaves of a graph, futures, all forms of the call."""
    rank = dist.get_rank()
    total = normal(0, 200 * 150).view(200, 150) + normal(1, 200 * 150).view(200, 150)
    x = normal(rank, 200 * 150).view(200, 150)
    for view in (x.clone(), x.t().contiguous().t(), torch.stack([x, -x], -1)[..., 0], x.clone().requires_grad_()):
        dist.all_reduce(view)
        close(view.detach(), total, 0.02, view.stride())
    for call in (
        lambda y: world().allreduce(y),
        lambda y: world().allreduce([y], dist.ReduceOp.SUM),
        lambda y: world().allreduce([y], op=dist.ReduceOp.SUM, timeout=timedelta(seconds=60)),
    ):
        y = x.clone()
        assert call(y).wait()
        close(y, total, 0.02, "forms")
    close(functional.all_reduce(x, "sum", world()), total, 0.02, "functional")
    work = dist.all_reduce(y := x.clone(), async_op=True)
    assert isinstance(work, dist.Work)
    then = work.get_future().then(lambda future: future.value()[0] * 2)
    assert work.wait(timedelta(seconds=60))
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is y
    close(then.wait(), 2 * total, 0.02, "future")
    work.synchronize()


def test_tensors_and_calls_of_every_form(pool: RankPool) -> None:
    pool.run(2, shapes, backend="bagua")


def in_order() -> int:
    """On a rank: many collectives under way, exact ones in between, waited for in another order on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    works: list[tuple[Any, Tensor, Tensor]] = []
    for i in range(24):
        n = 20_000 + 7 * i
        x = normal(rank, n) + i if i % 3 else torch.full((5,), float(i + rank))
        want = sum((normal(r, n) + i if i % 3 else torch.full((5,), float(i + r)) for r in range(size)), torch.zeros(1))
        works.append((dist.all_reduce(x, async_op=True), x, want))
        if i % 5 == 0:
            dist.barrier()
    for work, x, want in works[:: 1 if rank else -1]:
        work.wait()
        close(x, want, 0.02, len(x))
    return world().traffic.operations


def test_many_are_under_way_at_once(pool: RankPool) -> None:
    assert pool.run(2, in_order, backend="bagua") == [16, 16]


@pytest.mark.parametrize(
    ("x", "op", "taken"),
    [
        (torch.zeros(16_384), dist.ReduceOp.SUM, True),
        (torch.zeros(16_383), dist.ReduceOp.SUM, False),
        (torch.zeros(40_000, dtype=torch.bfloat16), dist.ReduceOp.AVG, True),
        (torch.zeros(40_000, dtype=torch.float64), dist.ReduceOp.SUM, False),
        (torch.zeros(40_000, dtype=torch.int32), dist.ReduceOp.SUM, False),
        (torch.zeros(40_000, dtype=torch.complex64), dist.ReduceOp.SUM, False),
        (torch.zeros(40_000).to_sparse(), dist.ReduceOp.SUM, False),
        (torch.zeros(40_000), dist.ReduceOp.MAX, False),
        (torch.zeros(40_000), dist.ReduceOp.PRODUCT, False),
        (torch.zeros(40_000), dist._make_nccl_premul_sum(0.5), True),
        (torch.zeros(0), dist.ReduceOp.SUM, False),
    ],
)
def test_what_is_compressed(x: Tensor, op: Any, taken: bool) -> None:
    assert (compressed(Backend("uint8"), x, 1, op) is not None) == taken


def test_what_a_codec_does_not_shrink_stays_exact() -> None:
    big = torch.zeros(100_000)
    assert compressed(bagua.Backend("identity"), big, 1, dist.ReduceOp.SUM) is None
    assert compressed(bagua.Backend("fp16"), big.half(), 1, dist.ReduceOp.SUM) is None
    assert compressed(bagua.Backend("fp16"), big, 1, dist.ReduceOp.SUM) == Reduction(False)
    assert compressed(bagua.Backend("uint8", min_bytes=0), big[:1000], 1, dist.ReduceOp.AVG) == Reduction(True)
    half = dist._make_nccl_premul_sum(0.5)
    assert compressed(bagua.Backend(), big[:10_000], 2, half) == Reduction(False, 0.5)
