"""Error feedback and momenta of parameters that no rank used in a pass: they are neither spent nor lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import GradientAllReduce, PowerSGD, QAdam
from bagua.codecs import Int4, TopK
from bagua.comm.team import Team
from tests.contract.members import CONTRIB_ALGORITHMS
from tests.engine.training import equal, seeded
from tests.rank_threads import run_teams

WIDTH = 24
ALGORITHMS = {
    "sign": GradientAllReduce(codec="sign"),
    "top_k": GradientAllReduce(codec=TopK(ratio=0.1)),
    "int4": GradientAllReduce(codec=Int4(), error_feedback=True),
    "power_sgd": PowerSGD(rank=1),
    "hierarchical": GradientAllReduce(codec="sign", hierarchical=True),
}
OWN_MOMENTA = {"demo": CONTRIB_ALGORITHMS["demo"](), "signsgd": CONTRIB_ALGORITHMS["signsgd"]()}
NODES = {"hierarchical": [0, 0, 1, 1]}


class Heads(nn.Module):
    """Gradients are the inputs and depend on no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ParameterList([torch.zeros(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor, use: int) -> Tensor:
        return (self.heads[use] * x).sum()


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)) + 0.3


def distance(team: Team, algorithm: Any, schedule: list[int], bucket_bytes: int) -> float:
    """Between the applied and the true sum of head 0's gradients, as a part of the true one."""
    model = seeded(Heads, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    bagua.distribute(model, optimizer, algorithm, bucket_bytes=bucket_bytes, process_group=team)
    true = torch.zeros(WIDTH, WIDTH)
    for step, use in enumerate(schedule):
        optimizer.zero_grad()
        model(gradient(team.rank, step), use).backward()
        optimizer.step()
        if use == 0:
            true += sum(gradient(rank, step) for rank in range(team.size)) / team.size
    return float((true + next(model.parameters()).detach()).norm() / true.norm())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_alternating_heads_lose_no_feedback(name: str) -> None:
    """Head 0 in every second pass, against as many passes with it alone."""
    size = 4 if name in NODES else 2
    algorithm, nodes = ALGORITHMS[name], NODES.get(name)
    often = run_teams(size, distance, algorithm, [0] * 30, 1 << 20, nodes=nodes)[0]
    for bucket_bytes in (1, 1 << 20):  # a bucket of its own, or one with the other head
        alternating = run_teams(size, distance, algorithm, [0, 1] * 30, bucket_bytes, nodes=nodes)[0]
        assert 0 < alternating < 1.6 * often, (alternating, often)


def states_over_a_pass(team: Team, algorithm: Any, elsewhere: bool) -> list[tuple[Any, Any]]:
    """What is kept of head 0's bucket, before and after passes that use head 1 (on rank 0) or nothing of it."""
    model = seeded(Heads, 0)
    if isinstance(algorithm, QAdam):
        optimizer: torch.optim.Optimizer = bagua.optim.QAdam(model.parameters(), lr=0.01, warmup_steps=2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bagua.distribute(model, optimizer, algorithm, bucket_bytes=1, process_group=team)
    rank, seen = team.rank, []
    for step, use in enumerate([0, 1, 0, 1, 0, 1, 1, 0, 1]):
        before = _kept(model)
        optimizer.zero_grad()
        mine = 0 if elsewhere and rank == 0 else use
        model(gradient(rank, step), mine).backward()
        if use == 1:
            seen.append((before, _kept(model)))
        optimizer.step()
    return seen


def _kept(model: nn.Module) -> list[Any]:
    saved = bagua.state_dict(model)
    if saved["plan"] is None:
        return []
    number = next(i for i, names in enumerate(saved["plan"]) if "heads.0" in names)
    of_exchanges = [(each["exchange"], each["tensors"]) for each in saved["states"] if each["bucket"] == number]
    return of_exchanges + [(each["name"], each["value"]) for each in saved["tensors"] if each["bucket"] == number]


@pytest.mark.parametrize("name", [*ALGORITHMS, *OWN_MOMENTA, "qadam"])
def test_an_unused_parameter_leaves_no_trace(name: str) -> None:
    algorithm = QAdam(codec="sign") if name == "qadam" else (ALGORITHMS | OWN_MOMENTA)[name]
    size, nodes = (4, NODES[name]) if name in NODES else (2, None)
    leaders = [0, 2] if nodes else range(size)
    for rank, seen in enumerate(run_teams(size, states_over_a_pass, algorithm, False, nodes=nodes)):
        for before, after in seen:
            assert equal(before, after)
            assert bool(before) == (rank in leaders)
    for rank, seen in enumerate(run_teams(size, states_over_a_pass, algorithm, True, nodes=nodes)):
        if rank in leaders and name != "qadam":
            assert not any(equal(before, after) for before, after in seen), "another rank used it"
