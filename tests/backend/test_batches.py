"""`batch_isend_irecv` on groups of the backend: one batch where the transport takes batches, else as torch does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import bagua
from bagua.backend.batches import in_one_batch
from bagua.backend.process_group import CompressedProcessGroup
from tests.rank_pool import RankPool


class Plain:
    """Stands for a group over NCCL, and notes what it is told."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[Any] = []
        self._fails = fails

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append(("start", device.type))

    def _end_coalescing(self, device: torch.device) -> str:
        self.calls.append(("end", device.type))
        return "work"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        if self._fails:
            raise RuntimeError("no such peer")
        self.calls.append(("send", tensors[0].numel(), peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(("recv", tensors[0].numel(), peer, tag))


class Op:
    """Stands for `dist.P2POp`, which needs a process group."""

    def __init__(self, op: Any, tensor: torch.Tensor, group_peer: int, tag: int = 0) -> None:
        self.op, self.tensor, self.group_peer, self.tag = op, tensor, group_peer, tag


def test_a_batch_is_one_and_complex_tensors_are_pairs() -> None:
    plain = Plain()
    ops: Any = [Op(dist.isend, torch.ones(3), 1, 5), Op(dist.irecv, torch.ones(4, dtype=torch.complex64), 2)]
    assert in_one_batch(plain, ops) == ["work"]
    assert plain.calls == [("start", "cpu"), ("send", 3, 1, 5), ("recv", 8, 2, 0), ("end", "cpu")]


def test_a_batch_that_fails_is_closed() -> None:
    plain = Plain(fails=True)
    ops: Any = [Op(dist.isend, torch.ones(3), 1)]
    with pytest.raises(RuntimeError, match="no such peer"):
        in_one_batch(plain, ops)
    assert plain.calls[-1] == ("end", "cpu")


def batches(coalesces: bool) -> list[Any]:
    """On a rank: exchange with the other rank; what the stand-in for NCCL saw."""
    ours: Any = dist.new_group(backend=bagua.Backend("uint8"))
    assert isinstance(ours, CompressedProcessGroup)
    assert dist.batch_isend_irecv is distributed_c10d.batch_isend_irecv
    seen = Plain()
    if coalesces:
        seen._get_backend = lambda _device: type("B", (), {"supports_coalescing": True})  # type: ignore[attr-defined]
        plain, ours._plain = ours._plain, seen
    rank = dist.get_rank()
    x, out = torch.full((4,), float(rank)), torch.zeros(4)
    ops = [dist.P2POp(dist.isend, x, 1 - rank, ours), dist.P2POp(dist.irecv, out, 1 - rank, ours)]
    works = dist.batch_isend_irecv(ops)
    if coalesces:
        ours._plain = plain
        assert works == ["work"]
        return seen.calls
    for work in works:
        work.wait()
    assert torch.equal(out, torch.full((4,), float(1 - rank)))
    plain_ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)]
    for work in dist.batch_isend_irecv(plain_ops):
        work.wait()
    with pytest.raises(ValueError, match="Invalid ``p2p_op_list``"):
        dist.batch_isend_irecv([1])  # type: ignore[list-item]
    return []


def test_gloo_takes_them_one_by_one(pool: RankPool) -> None:
    pool.run(2, batches, False)


def test_a_transport_that_takes_batches_gets_one(pool: RankPool) -> None:
    for rank, calls in enumerate(pool.run(2, batches, True)):
        peer = 1 - rank
        assert calls == [("start", "cpu"), ("send", 4, peer, 0), ("recv", 4, peer, 0), ("end", "cpu")]
