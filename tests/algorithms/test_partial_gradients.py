"""Moments of mean gradients where some ranks have no gradient for a parameter: all ranks keep their own then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import Algorithm, Decentralized, DiLoCo, GradientAllReduce, LocalSGD
from bagua.comm.team import Team
from benchmarks.convergence.delayed import DelayedAverage
from tests.rank_threads import run_teams

SIZE, NUMEL, LR = 4, 64, 1e-2
Uses = Callable[[int, int], bool]


class Headed(nn.Module):
    """A body that each pass uses, and a head that some do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.zeros(NUMEL))
        self.head = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, body: Tensor, head: Tensor | None) -> Tensor:
        loss = (self.body * body).sum()
        return loss if head is None else loss + (self.head * head).sum()


def gradients(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return 1 + 0.3 * torch.randn(NUMEL, generator=generator), 1 + 0.3 * torch.randn(NUMEL, generator=generator)


def train(team: Team, algorithm: Algorithm, steps: int, uses: Uses) -> list[dict[str, Tensor]]:
    """Moments of the head and the body after each step."""
    module = Headed()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0)
    bagua.distribute(module, optimizer, algorithm, process_group=team)
    seen: list[dict[str, Tensor]] = []
    for step in range(steps):
        optimizer.zero_grad()
        body, head = gradients(team.rank, step)
        module(body, head if uses(team.rank, step) else None).backward()
        optimizer.step()
        found: dict[str, Tensor] = {}
        for name, param in module.named_parameters():
            state: dict[str, Any] = optimizer.state.get(param, {})
            found |= {f"{name} {key}": state[key].clone() for key in ("exp_avg", "exp_avg_sq") if key in state}
        seen.append(found)
    bagua.detach(module)
    return seen


def alone(rank: int, step: int) -> bool:
    """Every fifth step rank 0 alone uses the head."""
    return rank == 0 or step % 5 != 4


def all_but_the_last(rank: int, step: int) -> bool:
    """Every fifth step all but rank 3 use it."""
    return rank != SIZE - 1 or step % 5 != 4


@pytest.mark.parametrize("uses", [alone, all_but_the_last])
@pytest.mark.parametrize(
    "algorithm",
    [
        *(Decentralized(), LocalSGD(communication_interval=1), LocalSGD(), DiLoCo()),
        *(DelayedAverage(1, 1, mean_moments=True), DelayedAverage(1, 2, mean_moments=True)),
    ],
    ids=["decentralized", "each step", "local_sgd", "diloco", "late", "late, two steps"],
)
def test_what_a_rank_has_not_moved_is_no_gradient(algorithm: Algorithm, uses: Uses) -> None:
    """Moments stay as large as gradients of about 1 make them: they grew without bound."""
    steps = 60
    for seen in run_teams(SIZE, train, algorithm, steps, uses):
        last = seen[-1]
        assert last["head exp_avg"].abs().max() < 2
        assert last["head exp_avg_sq"].max() < 2 * steps * 1e-3 * 2
        assert last["body exp_avg"].mean() == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("algorithm", [Decentralized(), LocalSGD(communication_interval=1)], ids=["gossip", "rounds"])
def test_own_moments_stay_in_such_a_step_and_are_inferred_again_later(algorithm: Algorithm) -> None:
    late, steps = 6, 12

    def uses(rank: int, step: int) -> bool:
        return rank == 0 or step != late

    # Gossip sets the moments of a step when its average has come, before the optimizer's next step.
    kept = late if isinstance(algorithm, LocalSGD) else late + 1
    for rank, seen in enumerate(run_teams(SIZE, train, algorithm, steps, uses)):
        m, v = (seen[kept][f"head {name}"] for name in ("exp_avg", "exp_avg_sq"))
        m_before, v_before = (seen[kept - 1][f"head {name}"] for name in ("exp_avg", "exp_avg_sq"))
        g = gradients(rank, kept)[1] if uses(rank, kept) else None
        torch.testing.assert_close(m, m_before if g is None else m_before.lerp(g, 0.1))
        torch.testing.assert_close(v, v_before if g is None else v_before * 0.999 + 0.001 * g * g)
        for name in ("head", "body"):
            assert seen[-1][f"{name} exp_avg"].mean() == pytest.approx(1 - 0.9**steps, rel=0.15)
            assert seen[-1][f"{name} exp_avg_sq"].mean() == pytest.approx(1 - 0.999**steps, rel=0.15)


def test_parameters_that_all_ranks_use_are_inferred_as_before() -> None:
    """With a parameter beside them that nobody uses."""

    def never(rank: int, step: int) -> bool:
        return False

    found, exact = (run_teams(SIZE, train, each, 8, never) for each in (Decentralized(), GradientAllReduce()))
    for rank, (seen, want) in enumerate(zip(found, exact, strict=True)):
        assert "head exp_avg" not in seen[-1]
        # The last step is still that of this rank's own gradient.
        mean = (seen[-1]["body exp_avg"] - 0.1 * gradients(rank, 7)[0]) / 0.9
        assert (mean - want[-2]["body exp_avg"]).abs().mean() < 0.1
