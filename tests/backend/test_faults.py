"""A peer that dies, backends that differ, groups that are closed: errors that say so, within the group's timeout."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua
from tests.rank_pool import RankPool


def lose_a_peer() -> tuple[str, str, bool, float]:
    x = torch.ones(500_000)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    with pytest.raises(bagua.CommunicationError) as first:
        work.wait()
    seconds = time.monotonic() - started
    failed = work.is_completed() and not work.is_success() and isinstance(work.exception(), bagua.CommunicationError)
    with pytest.raises(RuntimeError) as later:  # of the future, as C++ sees it
        dist.distributed_c10d._get_default_group().allreduce([x]).get_future().wait()
    return str(first.value), str(later.value), failed, seconds


def test_a_peer_that_died_is_named(pool: RankPool) -> None:
    first, later, failed, seconds = pool.run(2, lose_a_peer, dies=[1], backend="bagua", group_timeout_s=30)[0]
    assert failed
    assert "all_reduce 2 with bagua:uint8: rank 0 of 2" in first
    assert "no response from rank 1" in first
    assert "all_reduce 2 with bagua:uint8" in later
    assert seconds < 90


def lose_a_peer_of_ddp() -> str:
    model = DistributedDataParallel(nn.Linear(300, 300))
    for _ in range(2):  # DDP has collectives of its own until its buckets are final
        model(torch.ones(2, 300)).sum().backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 300)).sum().backward()
    return str(error.value)


def test_ddp_raises_it_too(pool: RankPool) -> None:
    assert "no response from rank 1" in pool.run(2, lose_a_peer_of_ddp, dies=[1], backend="bagua")[0]


def stop() -> str:
    """On a rank: a peer that is stopped is an error after the timeout of one wait, and of the group."""
    x = torch.ones(500_000)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    with pytest.raises(bagua.CommunicationError, match="all_reduce 2 with bagua:uint8: not done within 0.5 s"):
        work.wait(timedelta(seconds=0.5))
    with pytest.raises(bagua.CommunicationError) as error:
        work.wait()
    return str(error.value)


def test_a_peer_that_hangs(pool: RankPool) -> None:
    told = pool.run(2, stop, backend="bagua", stops=[1], group_timeout_s=4)[0]
    assert "no response from rank 1" in told


def differ() -> str:
    codec = "int4" if dist.get_rank() else "uint8"
    group: Any = dist.new_group(backend=bagua.Backend(codec))
    with pytest.raises(bagua.CommunicationError) as error:
        dist.all_reduce(torch.ones(500_000), group=group)
    return str(error.value)


def test_ranks_with_different_codecs(pool: RankPool) -> None:
    for told in pool.run(2, differ):
        assert "RankMismatchError: backend: rank 1 has 'bagua:int4', rank 0 has 'bagua:uint8'" in told


def close() -> list[str]:
    """On a rank: a destroyed and an aborted group refuse; the destroyed one ended what was under way."""
    messages = []
    x = torch.ones(500_000)
    first: Any = dist.new_group(backend="bagua")
    work = dist.all_reduce(x, group=first, async_op=True)
    dist.destroy_process_group(first)
    assert work is not None
    assert work.wait() and float(x[0]) == 2
    second: Any = dist.new_group(backend="bagua")
    dist.all_reduce(x, group=second)
    dist.barrier()
    second.abort()
    for group in (first, second):
        with pytest.raises(bagua.CommunicationError) as error:
            group.allreduce([x])
        messages.append(str(error.value))
    return messages


def test_closed_groups_refuse(pool: RankPool) -> None:
    wanted = ["all_reduce: the process group was shut down", "all_reduce: the process group was aborted"]
    assert pool.run(2, close) == [wanted, wanted]
