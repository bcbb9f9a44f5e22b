"""Groups that carry tensors through host memory: gloo sees copies only, and the results are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import bagua
from bagua import codecs
from bagua.codecs import Bf16, Sign
from bagua.comm import primitives
from bagua.comm.collectives import swap
from bagua.comm.groups import Group, Groups
from bagua.comm.staged import Staged
from bagua.comm.team import Team
from bagua.exchanges import AllReduce, Gossip, ScatterGather
from bagua.topologies import Ring
from tests.rank_threads import run_threads

RANKS = 3


class Watch:
    """A backend that refuses tensors in the memory of `forbidden`."""

    def __init__(self, pg: Any, forbidden: list[Tensor]) -> None:
        self._pg, self._forbidden = pg, forbidden

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._pg, name)

        def call(*args: Any) -> Any:
            for tensor in _tensors(args):
                for mine in self._forbidden:
                    assert tensor.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr(), name
            return method(*args)

        return call


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for each in value for t in _tensors(each)] if isinstance(value, list | tuple) else []


EXCHANGES = {
    "all_reduce": AllReduce(),
    "all_reduce bf16": AllReduce(codec=Bf16()),
    "scatter_gather": ScatterGather(Sign(), error_feedback=True),
    "gossip": Gossip(Ring()),
}


def exchange_on(groups: Groups, name: str, staged: bool) -> Tensor:
    generator = torch.Generator().manual_seed(groups.rank)
    x = torch.randn(1003, generator=generator)
    if staged:
        groups.world.pg = Staged(Watch(groups.world.pg, [x]))
    exchange = EXCHANGES[name]
    with torch.no_grad(), codecs.use_backend("torch"):
        state = exchange.init(x, groups)
        for step in range(3):
            exchange.run(x, state, groups, step)
    return x


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_give_the_same_bits(name: str) -> None:
    plain = run_threads(RANKS, exchange_on, name, False)
    staged = run_threads(RANKS, exchange_on, name, True)
    for a, b in zip(plain, staged, strict=True):
        assert torch.equal(a, b)


def every_primitive(groups: Groups, staged: bool) -> list[Tensor]:
    group = groups.world
    rank, size = group.rank, group.size
    x = torch.arange(6 * size, dtype=torch.float32) + 100 * rank
    out = torch.zeros(6 * size)
    if staged:
        group.pg = Staged(Watch(group.pg, [x, out]))
    results = []

    def keep() -> None:
        results.append(out.clone())

    primitives.all_reduce(group, x, out)
    keep()
    primitives.reduce(group, x, out, 1)
    keep()
    primitives.broadcast_(group, out, 1)
    keep()
    primitives.all_gather(group, x[:6], out)
    keep()
    primitives.gather(group, x[:6], out, 2)
    keep()
    primitives.scatter(group, x, out[:6], 0)
    keep()
    primitives.all_to_all(group, x, out)
    keep()
    primitives.reduce_scatter(group, x, out[:6])
    keep()
    if rank == 0:
        primitives.send(group, x, 1)
    elif rank == 1:
        primitives.recv(group, out, 0)
    keep()
    primitives.barrier(group)
    return results


def test_primitives_give_the_same_results() -> None:
    plain, staged = run_threads(RANKS, every_primitive, False), run_threads(RANKS, every_primitive, True)
    for mine, theirs in zip(plain, staged, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_gloo_group_takes_cuda_tensors_through_host_memory() -> None:
    bagua.init_process_group("gloo")
    try:
        assert Team.of(None, torch.device("cuda")).staged and not Team.of(None, torch.device("cpu")).staged
    finally:
        bagua.destroy_process_group()
    found = run_threads(2, lambda groups: type(groups.world.pg).__name__, staged=True)
    assert found == ["Staged", "Staged"]


def test_an_empty_batch_of_nccl_has_no_work_to_wait_for() -> None:
    class Backend:
        def _start_coalescing(self) -> None: ...

        def _end_coalescing(self) -> None:
            """None, as NCCL's backend returns if nothing was sent or received."""

    swap(Group(Backend(), 0, 2, (0, 1), "nccl"), [], [])
