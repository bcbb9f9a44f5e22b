"""Each communication primitive of `bagua.torch_api` once, on any number of ranks.

python examples/communication_primitives.py                                                    one process
bagua run --nproc-per-node 4 examples/communication_primitives.py                              any number of them
python -m bagua.distributed.launch --nproc_per_node=3 examples/communication_primitives.py

Rank 0 prints what it got; every rank checks its own results.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor

import bagua.torch_api as bagua
from bagua.torch_api.data_parallel import functional


def show(what: str, got: Tensor, want: Sequence[float]) -> None:
    """Print a result on rank 0 and check it on all ranks."""
    if bagua.get_rank() == 0:
        print(f"{what:24} {got.tolist()}", flush=True)
    if got.tolist() != list(want):
        raise SystemExit(f"rank {bagua.get_rank()}: {what} gave {got.tolist()} instead of {list(want)}")


def point_to_point(rank: int, n: int, device: torch.device) -> None:
    """Pass a tensor along the ranks, 0 to 1 to 2 and so on."""
    if n == 1:
        return
    token = torch.tensor([float(rank)], device=device)
    if rank > 0:
        bagua.recv(token, rank - 1)
        show("recv", token, [rank - 1])
    if rank < n - 1:
        bagua.send(torch.tensor([float(rank)], device=device), rank + 1)


def one_to_all(rank: int, n: int, device: torch.device) -> None:
    """Broadcasts and scatters, from the last rank."""
    last = n - 1
    x = torch.full((2,), float(rank), device=device)
    bagua.broadcast(x, src=last)
    show("broadcast", x, [last, last])
    several = [torch.full((1,), float(rank), device=device), torch.full((1,), rank, device=device)]
    bagua.broadcast_coalesced(several, src=last)
    show("broadcast_coalesced", torch.cat(several), [last, last])
    note = bagua.broadcast_object({"rank": rank, "words": ["any", "plain", "data"]}, src=last)
    show("broadcast_object", torch.tensor([float(note["rank"])]), [last])
    parts = torch.arange(float(n), device=device) * 10
    mine = torch.zeros(1, device=device)
    bagua.scatter(parts, mine, src=last)
    show("scatter", mine, [10 * rank])
    bagua.scatter_inplace(parts if rank == last else mine.zero_(), count=1, src=last)
    show("scatter_inplace", parts[rank : rank + 1] if rank == last else mine, [10 * rank])


def all_to_one(rank: int, n: int, device: torch.device) -> None:
    """Reductions to rank 0, and gathers."""
    x, total = torch.tensor([rank + 1.0], device=device), torch.zeros(1, device=device)
    bagua.reduce(x, total, dst=0, op=bagua.ReduceOp.SUM)
    show("reduce SUM", total, [n * (n + 1) / 2 if rank == 0 else 0])
    largest = x.clone()
    bagua.reduce_inplace(largest, dst=0, op=bagua.ReduceOp.MAX)
    show("reduce_inplace MAX", largest, [n if rank == 0 else rank + 1])
    everything = torch.zeros(n, device=device)  # as large on all ranks
    bagua.gather(x, everything, dst=0)
    show("gather", everything, range(1, n + 1) if rank == 0 else [0] * n)
    buffer = torch.zeros(n if rank == 0 else 1, device=device)
    buffer[0] = rank + 1
    bagua.gather_inplace(buffer, count=1, dst=0)
    show("gather_inplace", buffer, range(1, n + 1) if rank == 0 else [rank + 1])


def all_to_all(rank: int, n: int, device: torch.device) -> None:
    """What everyone takes part in alike."""
    x, out = torch.tensor([rank + 1.0], device=device), torch.zeros(1, device=device)
    bagua.allreduce(x, out, op=bagua.ReduceOp.AVG)
    show("allreduce AVG", out, [(n + 1) / 2])
    bits = torch.tensor([1 << rank], device=device)
    bagua.allreduce_inplace(bits, op=bagua.ReduceOp.BOR)
    show("allreduce_inplace BOR", bits, [2**n - 1])
    for op, of_floats in ((bagua.ReduceOp.MIN, 1), (bagua.ReduceOp.PRODUCT, math.factorial(n))):
        bagua.allreduce(x, out, op=op)
        show(f"allreduce {op.name}", out, [of_floats])
    for op, of_bits in ((bagua.ReduceOp.BAND, 0 if n > 1 else 1), (bagua.ReduceOp.BXOR, 2**n - 1)):
        bits = torch.tensor([1 << rank], device=device)
        bagua.allreduce_inplace(bits, op=op)
        show(f"allreduce_inplace {op.name}", bits, [of_bits])
    several = [x.clone(), 2 * x]
    bagua.allreduce_coalesced_inplace(several)
    show("allreduce_coalesced", torch.cat(several), [n * (n + 1) / 2, n * (n + 1)])
    everything = torch.zeros(n, device=device)
    bagua.allgather(x, everything)
    show("allgather", everything, range(1, n + 1))
    mine_only = torch.zeros(n, device=device)
    mine_only[rank] = rank + 1
    bagua.allgather_inplace(mine_only)
    show("allgather_inplace", mine_only, range(1, n + 1))
    table = torch.arange(float(n), device=device) + 100 * rank  # for rank r: 100 rank + r
    bagua.reduce_scatter(table, out)
    show("reduce_scatter", out, [n * rank + 100 * n * (n - 1) / 2])
    received = torch.zeros(n, device=device)
    bagua.alltoall(table, received)
    show("alltoall", received, [100 * peer + rank for peer in range(n)])
    reduced = table.clone()
    bagua.reduce_scatter_inplace(reduced)
    show("reduce_scatter_inplace", reduced[:1], [n * rank + 100 * n * (n - 1) / 2])
    bagua.alltoall_inplace(table)
    show("alltoall_inplace", table, [100 * peer + rank for peer in range(n)])


def parts_of_any_size(rank: int, n: int, device: torch.device) -> None:
    """`alltoall_v`: rank r sends s + 1 elements to rank s, with a gap of one element before each part."""
    send_counts = [peer + 1 for peer in range(n)]
    send_displs = [sum(send_counts[:peer]) + peer + 1 for peer in range(n)]
    x = torch.full((sum(send_counts) + n,), float(rank), device=device)
    recv_counts = [rank + 1] * n
    recv_displs = [peer * (rank + 1) for peer in range(n)]
    out = torch.zeros(n * (rank + 1), device=device)
    bagua.alltoall_v(x, send_counts, send_displs, out, recv_counts, recv_displs)
    show("alltoall_v", out, [peer for peer in range(n) for _ in range(rank + 1)])
    counts = [1 + (rank + peer) % 2 for peer in range(n)]  # in place, both ends agree on the size
    displs = [sum(counts[:peer]) for peer in range(n)]
    x = torch.full((sum(counts),), float(rank), device=device)
    bagua.alltoall_v_inplace(x, counts, displs)
    show("alltoall_v_inplace", x, [peer for peer in range(n) for _ in range(counts[peer])])


def subgroups(rank: int, n: int, device: torch.device) -> None:
    """A communicator of the even ranks; on the others the primitives do nothing."""
    evens = bagua.new_group(list(range(0, n, 2))).get_global_communicator()
    x = torch.ones(1, device=device)
    bagua.allreduce_inplace(x, comm=evens)
    show("allreduce of even ranks", x, [(n + 1) // 2 if rank % 2 == 0 else 1])


def nodes(rank: int, n: int, device: torch.device) -> None:
    """Communicators of the ranks of a node, and of the ranks that have the same place on their nodes."""
    everyone = bagua.new_group()
    intra, inter = everyone.get_intra_node_communicator(), everyone.get_inter_node_communicator()
    x = torch.ones(1, device=device)
    bagua.allreduce_inplace(x, comm=intra)
    show("allreduce in the node", x, [bagua.get_local_size()])
    if bagua.get_local_rank() == 0:  # these are the members; elsewhere it does nothing
        bagua.allreduce_inplace(x, comm=inter)
        show("and among the nodes", x, [n])


def with_gradient(rank: int, n: int, device: torch.device) -> None:
    """An all-reduce within a computation that is differentiated."""
    x = torch.tensor([rank + 1.0], device=device, requires_grad=True)
    total = functional.all_reduce(x)
    (total * (rank + 1)).sum().backward()
    show("functional.all_reduce", total.detach(), [n * (n + 1) / 2])
    assert x.grad is not None
    show("and its gradient", x.grad, [n * (n + 1) / 2])


def main(argv: Sequence[str] | None = None) -> None:
    """Run all of them."""
    parser = argparse.ArgumentParser(description="each communication primitive once")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where the tensors are (%(default)s)")
    device = torch.device(parser.parse_args(argv).device)
    if device.type == "cuda":
        device = torch.device("cuda", bagua.get_local_rank())
        torch.cuda.set_device(device)
    bagua.init_process_group()
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for part in (
        point_to_point,
        one_to_all,
        all_to_one,
        all_to_all,
        parts_of_any_size,
        subgroups,
        nodes,
        with_gradient,
    ):
        part(rank, n, device)
    bagua.barrier()


if __name__ == "__main__":
    main()
    bagua.destroy_process_group()
