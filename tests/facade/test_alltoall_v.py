"""`alltoall_v` against a numpy oracle, and the calls made on NCCL groups."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from bagua.comm import primitives
from tests.facade.oracle import COUNT, as_array, check, inputs, random_tensor, reduced
from tests.rank_pool import RankPool
from tests.rank_threads import run_threads


def _all_to_all_v(seed: int, in_place: bool, call: Any, n: int, r: int, device: torch.device) -> None:
    """Random counts, among them zeros, at random places with gaps, and more entries than ranks."""
    rng = np.random.default_rng([seed, n])
    counts = rng.integers(0, 4, (n, n))  # [from, to]
    if in_place:
        counts = np.maximum(counts, counts.T)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):

        def places(sizes: np.ndarray) -> tuple[list[int], int]:
            order, gaps = rng.permutation(n), rng.integers(0, 3, n)
            displs, end = [0] * n, 0
            for k, rank in enumerate(order):
                displs[rank] = end + int(gaps[k])
                end = displs[rank] + int(sizes[rank])
            return displs, end + 2

        outward = [places(counts[rank]) for rank in range(n)]
        inward = [places(counts[:, rank]) for rank in range(n)]
        sources = [random_tensor(rng, numel, dtype) for _, numel in outward]
        if in_place:
            inward = outward
            want = as_array(sources[r]).copy()
        else:
            want = np.full(inward[r][1], 7, as_array(sources[r]).dtype)
        for peer in range(n):
            begin, length = outward[peer][0][r], int(counts[peer, r])
            place = inward[r][0][peer]
            want[place : place + length] = as_array(sources[peer])[begin : begin + length]
        source = sources[r].to(device)
        if in_place:
            call(source, [*counts[r], 99], [*outward[r][0], 99])
            check("alltoall_v_inplace", source, want)
        else:
            got = torch.full((inward[r][1],), 7, dtype=dtype, device=device)
            call(source, counts[r].tolist(), outward[r][0], got, [*counts[:, r], 99], [*inward[r][0], 99])
            check("alltoall_v", got, want)
            check("alltoall_v leaves its input", source, as_array(sources[r]))


def _vector_moves(device: torch.device) -> None:
    import bagua.torch_api as bagua

    n, r = bagua.get_world_size(), torch.distributed.get_rank()
    for seed in range(4):
        _all_to_all_v(seed, False, bagua.alltoall_v, n, r, device)
        _all_to_all_v(seed, True, bagua.alltoall_v_inplace, n, r, device)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_alltoall_v(pool: RankPool, size: int) -> None:
    pool.run(size, _vector_moves, torch.device("cpu"))


def _native_collectives(groups: Any) -> None:
    """The calls made on NCCL groups, on a gloo group that says it is one."""
    group = dataclasses.replace(groups.world, backend="nccl")
    n, r = group.size, group.rank
    rows = inputs(n, n * COUNT, torch.int64, 6)
    arrays = [as_array(x) for x in rows]
    part = slice(r * COUNT, (r + 1) * COUNT)
    for op in ("SUM", "BOR", "AVG"):
        got = rows[r][:COUNT].clone()
        primitives.reduce_scatter(group, rows[r], got, op.lower())
        check(op, got, reduced(arrays, op)[part])
        got = rows[r].clone()
        primitives.all_reduce_(group, got, op.lower())
        check(op, got, reduced(arrays, op))
        primitives.reduce(group, rows[r], got.zero_(), 1, op.lower())
        check(op, got, reduced(arrays, op) if r == 1 else np.zeros_like(arrays[r]))
    got = torch.zeros_like(rows[r])
    primitives.all_to_all(group, rows[r], got)
    check("all_to_all", got, np.concatenate([array[part] for array in arrays]))
    primitives.all_gather(group, rows[r][part], got)
    check(
        "all_gather",
        got,
        np.concatenate([array[k * COUNT : (k + 1) * COUNT] for k, array in enumerate(arrays)]),
    )

    def call(*args: Any) -> None:
        primitives.all_to_all_v(group, *args)

    def call_in_place(*args: Any) -> None:
        primitives.all_to_all_v_(group, *args)

    for seed in range(3):
        _all_to_all_v(seed, False, call, n, r, torch.device("cpu"))
        _all_to_all_v(seed, True, call_in_place, n, r, torch.device("cpu"))


def test_calls_made_on_nccl_groups() -> None:
    run_threads(3, _native_collectives)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_rank_on_a_gpu(pool: RankPool) -> None:
    pool.run(1, _vector_moves, torch.device("cuda"))
