"""Buckets follow the order in which gradients become ready, as rank 0 saw it, and leave in that order everywhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from bagua.engine.api import live_engines
from bagua.engine.reducer.bucketing import Entry, Plan, make_plan
from bagua.exchanges import AllReduce
from tests.engine.training import Branches, batch, distributed, train
from tests.rank_pool import RankPool


class Shuffled(nn.Module):
    """Layers are used in another order than registered; on odd ranks in yet another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for index in (2, 0, 3, 1) if dist.get_rank() % 2 == 0 else (0, 1, 2, 3):
            x = self.layers[index](x)
        return x


launched: list[list[str]] = []


class Recording(AllReduce):
    """An all-reduce that notes what it was given; equality must not see the difference."""

    def run(self, x_N, state, groups, step) -> None:
        launched.append([step, x_N.numel()])
        super().run(x_N, state, groups, step)


class Records(bagua.algorithms.GradientAllReduce):
    """Uses `Recording`."""

    exchange = Recording()


def order_of_buckets() -> tuple[list[tuple[str, ...]], list, bool]:
    launched.clear()
    model, optimizer = distributed(Shuffled, Records(), bucket_bytes=1)
    assert bagua.stats(model).num_buckets == 0, "no order is known before the first pass"
    train(model, optimizer, range(3))
    engine = live_engines()[-1]
    total = model.layers[0].weight.detach().clone()
    dist.all_reduce(total)
    return (
        [b.names for b in engine.buckets],
        list(launched),
        torch.allclose(total, dist.get_world_size() * model.layers[0].weight),
    )


def test_order_is_rank_0s(pool: RankPool) -> None:
    results = pool.run(3, order_of_buckets)
    for names, steps, in_sync in results:
        assert [name for (name,) in names] == [f"layers.{index}.weight" for index in (1, 3, 0, 2)]
        assert len(steps) == 12 and steps == results[0][1]
        assert in_sync


def overlap() -> list[str]:
    """From the second pass on a bucket leaves while the backward pass still runs."""
    events: list[str] = []
    model, optimizer = distributed(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), bucket_bytes=1)
    for step in range(2):
        handle = model[0].weight.register_hook(
            lambda grad: events.append(
                f"first layer, {sum(t.done or True for t in live_engines()[-1].dispatcher._tickets)} away"
            )
        )
        model(batch(dist.get_rank(), step)).sum().backward()
        handle.remove()
        optimizer.step()
    return events


def test_buckets_leave_during_the_backward_pass(pool: RankPool) -> None:
    for events in pool.run(2, overlap):
        assert events[0] == "first layer, 0 away"
        assert events[1] in ("first layer, 2 away", "first layer, 3 away")


M = 2**20


def entries(*sizes: int, dtypes: str = "") -> list[Entry]:
    return [Entry(str(i), size, (dtypes or "f" * len(sizes))[i]) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("given", "limit", "want"),
    [
        (entries(4, 4, 4, 4), 8, (("0", "1"), ("2", "3"))),
        (entries(4, 4, 4), 8, (("0", "1"), ("2",))),
        (entries(100, 4, 4), 8, (("0",), ("1", "2"))),
        (entries(4, 4, 4), 1, (("0",), ("1",), ("2",))),
        (entries(4, 4, 4), 1000, (("0", "1", "2"),)),
        (entries(4, 2, 4, 2, dtypes="fhfh"), 8, (("0", "2"), ("1", "3"))),
        (entries(4, 2, 2, 4, dtypes="fhhf"), 4, (("0",), ("1", "2"), ("3",))),
        (entries(4 * M, 2 * M, 2 * M), 4 * M, (("0",), ("1",), ("2",))),
        (entries(4 * M, 1 * M, 1 * M, 3 * M), 4 * M, (("0",), ("1", "2"), ("3",))),
        (entries(4 * M, 1 * M, 1 * M), 4 * M, (("0",), ("1", "2"))),
        (entries(4 * M, 3 * M + 9, 9, M // 2), 4 * M, (("0",), ("1", "2", "3"))),
        (entries(3 * M, 3 * M), 6 * M, (("0", "1"),)),
        ([], 8, ()),
    ],
)
def test_plan(given: list[Entry], limit: int, want: tuple) -> None:
    plan = make_plan(given, limit)
    assert plan.buckets == want
    assert Plan.from_json(plan.to_json()) == plan


def test_branches_not_seen_in_the_first_step_come_last(pool: RankPool) -> None:
    assert pool.run(2, first_step_partial) == [["2", "3", "1", "0"]] * 2


def first_step_partial() -> list[str]:
    model, _ = distributed(Branches, bucket_bytes=1)
    model(torch.randn(2, 4), [2]).backward()
    seen: list[str] = []
    for bucket in live_engines()[-1].buckets:
        for name in bucket.names:
            index = name.split(".")[1]
            if index not in seen:
                seen.append(index)
    return seen
