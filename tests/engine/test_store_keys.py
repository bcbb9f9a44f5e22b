"""However long a job runs, it keeps no more keys in the store of the process group."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist

import bagua
from bagua.comm.team import Team
from tests.engine.training import Branches, distributed, train
from tests.rank_pool import RankPool

DEVICE = torch.device("cpu")


def num_keys() -> int:
    """Once all ranks have done with what came before: how many rounds "async" made by then is up to time."""
    team = Team.of(None, DEVICE)
    team.all_gather_bytes("count", b"")
    dist.barrier()
    number = team.store.num_keys()
    dist.barrier()
    return number


def growth(cycle: Callable[[], None]) -> int:
    """By how many keys the store has grown in some cycles, after a first one."""
    cycle()
    before = num_keys()
    for _ in range(3):
        cycle()
    return num_keys() - before


def distribute_and_detach() -> None:
    for algorithm in ("gradient_allreduce", "async"):
        model, optimizer = distributed(algorithm=algorithm, bucket_bytes=100)
        train(model, optimizer, range(2))
        bagua.detach(model)


def switch() -> Callable[[], None]:
    model, optimizer = distributed()

    def cycle() -> None:
        for algorithm in ("bytegrad", "decentralized"):
            bagua.distribute(model, optimizer, algorithm)
            train(model, optimizer, range(2))

    return cycle


def average() -> Callable[[], None]:
    model, optimizer = distributed(algorithm="decentralized")

    def cycle() -> None:
        train(model, optimizer, range(1))
        bagua.average_parameters(model)

    return cycle


def save() -> Callable[[], None]:
    model, optimizer = distributed()
    train(model, optimizer, range(1))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)

    steps = itertools.count()

    def cycle() -> None:
        bagua.checkpoint.save(str(folder[0]), {"model": model, "optimizer": optimizer}, step=next(steps), keep=1)

    return cycle


def use_others() -> Callable[[], None]:
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bagua.distribute(model, optimizer, bucket_bytes=50)

    def cycle() -> None:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 4), [(dist.get_rank() + step) % 4]).backward()
            optimizer.step()

    return cycle


def broadcast() -> Callable[[], None]:
    team = Team.of(None, DEVICE)

    def cycle() -> None:
        for number in range(5):
            payload = str(number).encode()
            assert team.broadcast_bytes("news", payload if team.rank == 0 else None) == payload

    return cycle


def all_of_them() -> dict[str, int]:
    found = {"distribute and detach": growth(distribute_and_detach)}
    for make in (switch, average, save, use_others):
        found[make.__name__] = growth(make())
    return found


def only_broadcast() -> int:
    cycle = broadcast()
    return max(growth(cycle) for _ in range(3))


def test_the_store_does_not_grow(pool: RankPool) -> None:
    for found in pool.run(2, all_of_them):
        assert all(number <= 0 for number in found.values()), found


def test_messages_of_rank_0_are_deleted(pool: RankPool) -> None:
    for grown in pool.run(2, only_broadcast):
        assert grown <= 0
