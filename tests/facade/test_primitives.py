"""Every primitive against a numpy oracle, on 1 to 4 ranks, over all dtypes and operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.facade.oracle import COUNT, DTYPES, INTEGERS, as_array, check, inputs, reduced
from tests.rank_pool import RankPool

SIZES = (1, 2, 3, 4)


def _reductions(device: torch.device) -> None:
    import bagua.torch_api as bagua

    n, r = bagua.get_world_size(), torch.distributed.get_rank()
    ops = bagua.ReduceOp
    for dtype in DTYPES:
        for op in ops:
            small = inputs(n, COUNT, dtype, 1)
            big = inputs(n, n * COUNT, dtype, 2)
            if dtype in (torch.float16, torch.float64) and op not in (ops.SUM, ops.AVG):
                continue  # nothing that the other floating dtypes do not show
            if op in (ops.BOR, ops.BAND, ops.BXOR) and dtype not in INTEGERS:
                with pytest.raises(ValueError, match="op"):
                    bagua.allreduce_inplace(small[r].to(device), op)
                continue
            label = f"{op.name} of {dtype}"
            want = reduced([as_array(x) for x in small], op.name)
            want_big = reduced([as_array(x) for x in big], op.name)
            part = slice(r * COUNT, (r + 1) * COUNT)
            mine, mine_big = small[r].to(device), big[r].to(device)

            out = torch.zeros_like(mine)
            bagua.allreduce(mine, out, op)
            check(f"allreduce {label}", out, want)
            check("allreduce leaves its input", mine, as_array(small[r]))
            bagua.allreduce_inplace(out.copy_(mine), op)
            check(f"allreduce_inplace {label}", out, want)

            dst = (DTYPES.index(dtype) + op) % n
            out = torch.full_like(mine, 7)
            bagua.reduce(mine, out, dst, op)
            check(f"reduce {label}", out, want if r == dst else np.full_like(want, 7))
            check("reduce leaves its input", mine, as_array(small[r]))
            bagua.reduce_inplace(mine, dst, op)
            check(f"reduce_inplace {label}", mine, want if r == dst else as_array(small[r]))

            out = torch.zeros(COUNT, dtype=dtype, device=device)
            bagua.reduce_scatter(mine_big, out, op)
            check(f"reduce_scatter {label}", out, want_big[part])
            check("reduce_scatter leaves its input", mine_big, as_array(big[r]))
            bagua.reduce_scatter_inplace(mine_big, op)
            rest = as_array(big[r])[COUNT:]
            check(f"reduce_scatter_inplace {label}", mine_big, np.concatenate([want_big[part], rest]))
    several = [[x.to(device) for x in inputs(n, COUNT + i, dtype, 3)] for i, dtype in enumerate((*DTYPES, DTYPES[0]))]
    tensors = [xs[r].clone() for xs in several]
    bagua.allreduce_coalesced_inplace(tensors)
    for got, xs in zip(tensors, several, strict=True):
        check("allreduce_coalesced_inplace", got, reduced([as_array(x) for x in xs], "SUM"))


@pytest.mark.parametrize("size", SIZES)
def test_reductions(pool: RankPool, size: int) -> None:
    pool.run(size, _reductions, torch.device("cpu"))


def _moves(device: torch.device) -> None:
    import bagua.torch_api as bagua

    n, r = bagua.get_world_size(), torch.distributed.get_rank()
    for dtype in DTYPES:
        small, big = inputs(n, COUNT, dtype, 4), inputs(n, n * COUNT, dtype, 5)
        arrays, big_arrays = [as_array(x) for x in small], [as_array(x) for x in big]
        everything = np.concatenate(arrays)
        mine, mine_big = small[r].to(device), big[r].to(device)
        part = slice(r * COUNT, (r + 1) * COUNT)
        root = DTYPES.index(dtype) % n

        got = mine.clone()
        bagua.broadcast(got, root)
        check("broadcast", got, arrays[root])
        pair = [mine.clone(), torch.full((3, 2), r, dtype=torch.int64, device=device), mine_big.clone()]
        bagua.broadcast_coalesced(pair, root)
        check("broadcast_coalesced", pair[0], arrays[root])
        check("broadcast_coalesced", pair[1], np.full((3, 2), root))
        check("broadcast_coalesced", pair[2], big_arrays[root])

        got = torch.zeros(n, COUNT, dtype=dtype, device=device)
        bagua.allgather(mine, got)
        check("allgather", got.view(-1), everything)
        got = torch.zeros(n * COUNT, dtype=dtype, device=device)
        got[part] = mine
        bagua.allgather_inplace(got)
        check("allgather_inplace", got, everything)

        got = torch.full((n * COUNT,), 7, dtype=dtype, device=device)
        bagua.gather(mine, got, root)
        check("gather", got, everything if r == root else np.full_like(everything, 7))
        got = torch.zeros(n * COUNT if r == root else COUNT, dtype=dtype, device=device)
        got[part if r == root else slice(COUNT)] = mine
        bagua.gather_inplace(got, COUNT, root)
        check("gather_inplace", got, everything if r == root else arrays[r])

        got = torch.zeros(COUNT, dtype=dtype, device=device)
        bagua.scatter(mine_big, got, root)
        check("scatter", got, big_arrays[root][part])
        got = mine_big.clone() if r == root else torch.zeros(COUNT, dtype=dtype, device=device)
        bagua.scatter_inplace(got, COUNT, root)
        check("scatter_inplace", got, big_arrays[r] if r == root else big_arrays[root][part])

        want = np.concatenate([array[part] for array in big_arrays])
        got = torch.zeros(n * COUNT, dtype=dtype, device=device)
        bagua.alltoall(mine_big, got)
        check("alltoall", got, want)
        bagua.alltoall_inplace(mine_big)
        check("alltoall_inplace", mine_big, want)

        if n > 1:  # around the ring, one after the other
            got = torch.zeros_like(mine)
            if r == 0:
                bagua.send(mine, 1)
                bagua.recv(got, n - 1)
            else:
                bagua.recv(got, r - 1)
                bagua.send(mine, (r + 1) % n)
            check("send and recv", got, arrays[(r - 1) % n])
    flags = torch.tensor([r % 2 == 0, False, True], device=device)
    bagua.broadcast(flags, n - 1)
    assert flags.tolist() == [(n - 1) % 2 == 0, False, True]
    bagua.barrier()


@pytest.mark.parametrize("size", SIZES)
def test_moves(pool: RankPool, size: int) -> None:
    pool.run(size, _moves, torch.device("cpu"))


def _shapes() -> None:
    import bagua.torch_api as bagua

    n, r = bagua.get_world_size(), torch.distributed.get_rank()
    columns = torch.arange(12.0).view(3, 4).t()  # not contiguous
    out = torch.zeros(4, 3).t().contiguous().t()
    bagua.allreduce(columns, out)
    assert torch.equal(out, n * columns)
    strided = torch.zeros(6)[::2]
    bagua.broadcast(strided.fill_(r), 1)
    assert strided.tolist() == [1, 1, 1]
    gathered = torch.zeros(3, n).t()
    bagua.allgather(torch.full((3,), float(r)), gathered)
    assert gathered.tolist() == [[float(k)] * 3 for k in range(n)]
    leaf = torch.full((2,), float(r), requires_grad=True)
    bagua.allreduce_inplace(leaf, bagua.ReduceOp.MAX)
    assert leaf.tolist() == [n - 1] * 2
    assert leaf.grad_fn is None
    chunk = torch.arange(2.0 * n)
    bagua.reduce_scatter(chunk, chunk[2 * r : 2 * r + 2])  # into itself
    assert chunk[2 * r : 2 * r + 2].tolist() == [n * 2.0 * r, n * (2.0 * r + 1)]
    base = torch.arange(2.0 * n)
    bagua.alltoall(base, base)
    assert base.tolist() == [2.0 * r + k for _ in range(n) for k in range(2)]
    scalar = torch.tensor(1)
    bagua.allreduce_inplace(scalar)
    assert scalar.item() == n
    empty = torch.empty(0)
    for call in (bagua.broadcast, bagua.allreduce_inplace, bagua.allgather_inplace, bagua.alltoall_inplace):
        call(empty)
    bagua.gather(empty, torch.empty(0), 0)
    bagua.scatter(empty, torch.empty(0), 0)
    bagua.reduce_scatter(empty, torch.empty(0))
    bagua.reduce(empty, torch.empty(0), 0)
    if r < 2:
        (bagua.send, bagua.recv)[r](empty, 1 - r)
    bagua.broadcast_coalesced([])
    bagua.allreduce_coalesced_inplace([])
    assert bagua.ReduceOp.AVG == 10
    wide = torch.tensor([250, 3], dtype=torch.uint8)
    bagua.allreduce_inplace(wide, torch.distributed.ReduceOp.AVG)  # the sum does not fit, the mean does
    assert wide.tolist() == [250, 3]
    short = torch.tensor([-1 if r else -3], dtype=torch.int16)
    bagua.allreduce_inplace(short, bagua.ReduceOp.AVG)
    assert short.item() == int((-3 - (n - 1)) / n)
    bagua.allreduce_inplace(short.fill_(r + 1), bagua.ReduceOp.MAX)
    assert short.item() == n


def test_strides_aliases_and_emptiness(pool: RankPool) -> None:
    pool.run(3, _shapes)


def _bad_input() -> None:
    import bagua.torch_api as bagua

    x, y = torch.zeros(6), torch.zeros(6)
    rank = torch.distributed.get_rank()

    def refused(error: type[Exception], match: str, call: Any, *args: Any) -> None:
        with pytest.raises(error, match=match):
            call(*args)

    refused(ValueError, "dst: rank 2 is not in the group", bagua.send, x, 2)
    refused(ValueError, "src: rank -1", bagua.recv, x, -1)
    refused(ValueError, "dst: .* is this rank", bagua.send, x, rank)
    refused(TypeError, "dst: expected an integer", bagua.send, x, "1")
    refused(TypeError, "tensor: expected a torch.Tensor, got list", bagua.allreduce_inplace, [1.0])
    refused(ValueError, "op: expected a ReduceOp, got 5", bagua.allreduce_inplace, x, 5)
    refused(ValueError, "op: 'band' needs an integer dtype", bagua.allreduce_inplace, x, bagua.ReduceOp.BAND)
    refused(ValueError, "cannot be reduced", bagua.allreduce_inplace, x > 0)
    refused(ValueError, "recv_tensor: is torch.int64", bagua.allreduce, x, y.long())
    refused(ValueError, "recv_tensor: has 6 elements, expected 12", bagua.allgather, x, y)
    refused(ValueError, "recv_tensor: has 6 elements, expected 12", bagua.gather, x, y, 0)
    refused(ValueError, "send_tensor: has 6 elements, expected 12", bagua.scatter, x, y, 0)
    refused(ValueError, "send_tensor: has 6 elements, expected 12", bagua.reduce_scatter, x, y)
    refused(ValueError, "tensor: has 3 elements, expected a multiple of the 2", bagua.alltoall_inplace, x[:3])
    refused(ValueError, "tensor: has 3 elements, expected a multiple", bagua.reduce_scatter_inplace, x[:3])
    refused(ValueError, "tensor: has 6 elements, expected at least", bagua.gather_inplace, x, 7, 0)
    refused(ValueError, "count: expected 0 or more", bagua.scatter_inplace, x, -1, 0)
    refused(ValueError, "recv_counts: has 1 entries", bagua.alltoall_v, x, [1, 1], [0, 1], y, [1], [0, 1])
    refused(ValueError, r"send_counts\[1\].*5 to 7.*has 6", bagua.alltoall_v, x, [1, 2], [0, 5], y, [1, 2], [0, 1])
    refused(ValueError, r"counts\[0\].*not within tensor", bagua.alltoall_v_inplace, x, [-1, 2], [0, 1])
    refused(TypeError, r"displs\[0\]: expected an integer", bagua.alltoall_v_inplace, x, [1, 2], [0.5, 1])
    refused(ValueError, "tensor: expected a dense tensor", bagua.broadcast, x.to_sparse())
    refused(ValueError, "cannot be communicated", bagua.broadcast, torch.empty(2, device="meta"))
    refused(TypeError, "tensors", bagua.broadcast_coalesced, [x, None])
    refused(TypeError, "comm: .*get_global_communicator", bagua.allreduce_inplace, x, 0, bagua.new_group())
    bagua.barrier()  # all of it was refused before anything was sent


def test_bad_input_names_the_argument(pool: RankPool) -> None:
    pool.run(2, _bad_input)


def _without_process_group() -> None:
    import bagua.torch_api as bagua

    assert not bagua.is_initialized()
    with pytest.raises(RuntimeError, match="init_process_group"):
        bagua.allreduce_inplace(torch.zeros(1))


def test_needs_a_process_group(pool: RankPool) -> None:
    pool.run(1, _without_process_group, init=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_rank_on_a_gpu(pool: RankPool) -> None:
    for job in (_reductions, _moves):
        pool.run(1, job, torch.device("cuda"))
