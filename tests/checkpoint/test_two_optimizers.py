"""Optimizers of different frequency: a step whose end is still to come is saved and resumed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua
from tests.engine.training import Net, batch, equal, seeded, values
from tests.rank_pool import RankPool


class Two:
    """A module with one optimizer that steps always, and one that steps every second time."""

    def __init__(self, algorithm: Any) -> None:
        self.model = seeded(Net, dist.get_rank())
        body = [p for name, p in self.model.named_parameters() if p.requires_grad and not name.startswith("last")]
        self.often = torch.optim.SGD(body, lr=0.05, momentum=0.9)
        self.seldom = torch.optim.SGD(self.model.last.parameters(), lr=0.05, momentum=0.9)
        bagua.distribute(self.model, [self.often, self.seldom], algorithm, bucket_bytes=100)

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            self.model(batch(dist.get_rank(), step)).square().mean().backward()
            self.often.step()
            if step % 2:
                self.seldom.step()
            self.often.zero_grad()
            self.seldom.zero_grad()

    def save(self) -> bytes:
        stream = io.BytesIO()
        states = [each.state_dict() for each in (self.model, self.often, self.seldom)]
        torch.save([*states, bagua.state_dict(self.model)], stream)
        return stream.getvalue()

    def load(self, saved: bytes) -> None:
        *states, algorithm = torch.load(io.BytesIO(saved))
        for each, state in zip((self.model, self.often, self.seldom), states, strict=True):
            each.load_state_dict(state)
        bagua.load_state_dict(self.model, algorithm)


def resumed(algorithm: Any, stop: int, elsewhere: int) -> tuple[bool, list[int]]:
    """Stopped after `stop` steps, loaded into a training that has made `elsewhere` steps of its own."""
    whole = Two(algorithm)
    whole.train(range(stop))
    saved = whole.save()
    whole.train(range(stop, 8))
    other = Two(algorithm)
    other.train(range(elsewhere))
    other.load(saved)
    other.train(range(stop, 8))
    steps = [bagua.stats(each.model).steps for each in (whole, other)]
    return equal(values(whole.model), values(other.model)), steps


@pytest.mark.parametrize(
    "algorithm",
    [
        bagua.algorithms.LocalSGD(communication_interval=2),
        bagua.algorithms.Decentralized(),
        bagua.algorithms.ByteGrad(codec="int4"),
        bagua.algorithms.Warmup(3, "gradient_allreduce", "local_sgd"),
    ],
    ids=["local_sgd", "decentralized", "bytegrad", "warmup"],
)
@pytest.mark.parametrize(("stop", "elsewhere"), [(3, 0), (4, 3)], ids=["pending", "pending elsewhere"])
def test_resuming_between_two_frequencies(pool: RankPool, algorithm: Any, stop: int, elsewhere: int) -> None:
    for same, steps in pool.run(2, resumed, algorithm, stop, elsewhere):
        assert same and steps == [8, 8]
