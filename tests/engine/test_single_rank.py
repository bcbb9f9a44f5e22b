"""On one rank nothing is exchanged; what an algorithm does before and after an exchange takes place all the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import GradientAllReduce
from bagua.algorithms.base import Bucket, Context
from bagua.comm.team import Team
from tests.rank_threads import run_teams


@dataclass(frozen=True)
class Doubling(GradientAllReduce):
    """Twice the mean, plus one."""

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        ctx.launch(self.exchange, bucket, before=lambda: bucket.flat.mul_(2.0), after=lambda: bucket.flat.add_(1.0))


def gradients(team: Team, algorithm: GradientAllReduce | None) -> list[list[Tensor]]:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    # Ranks are threads, so the global generator is everybody's.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    if algorithm is not None:
        bagua.distribute(net, optimizer, algorithm, process_group=team, bucket_bytes=64)
    found: list[list[Tensor]] = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        net(torch.randn(4, 5, generator=generator)).square().mean().backward()
        found.append([param.grad.clone() for param in net.parameters() if param.grad is not None])
        optimizer.step()
    return found


def test_what_comes_before_and_after_an_exchange_runs_on_one_rank() -> None:
    (plain,), (single,) = run_teams(1, gradients, None), run_teams(1, gradients, Doubling())
    both = run_teams(2, gradients, Doubling())
    for one, alone, two in zip(plain, single, both[0], strict=True):
        for a, b, c in zip(one, alone, two, strict=True):
            torch.testing.assert_close(b, 2 * a + 1)
            torch.testing.assert_close(b, c)
