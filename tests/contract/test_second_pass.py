"""Several backward passes before a step, with algorithms that leave a step in `.grad`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.comm.team import Team
from tests.contract.members import CONTRIB_ALGORITHMS
from tests.rank_threads import run_teams

STEPS_OF_THEIR_OWN = ["demo", "dion", "signsgd"]


def passes(team: Team, algorithm: Any, kind: str) -> torch.Tensor:
    """Weights after two steps with two passes each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    try:
        for step in range(2):
            for number in range(2):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + number + 100 * team.rank))
                if kind == "no_sync" and number == 0:
                    with bagua.no_sync(model):
                        model(x).square().mean().backward()
                elif kind == "own loss":  # the pass is noticed with the first gradient only
                    nn.functional.linear(x, model.weight, model.bias).square().mean().backward()
                else:
                    model(x).square().mean().backward()
                if kind.startswith("zeroed") and number == 0:
                    optimizer.zero_grad(set_to_none=kind == "zeroed to None")
            optimizer.step()
            optimizer.zero_grad()
    finally:
        bagua.detach(model)
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize("kind", ["module", "own loss"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", STEPS_OF_THEIR_OWN)
def test_a_gradient_is_not_added_to_a_step(name: str, ranks: int, kind: str) -> None:
    def refused(team: Team) -> str:
        with pytest.raises(RuntimeError) as error:
            passes(team, CONTRIB_ALGORITHMS[name](), kind)
        return str(error.value)

    for message in run_teams(ranks, refused):
        assert message.startswith(f"'{name}' has made a step") and "bagua.no_sync(module)" in message


@pytest.mark.parametrize("kind", ["no_sync", "zeroed to None", "zeroed"])
@pytest.mark.parametrize("name", STEPS_OF_THEIR_OWN)
def test_accumulated_or_zeroed_gradients_are_fine(name: str, kind: str) -> None:
    first, second = run_teams(2, passes, CONTRIB_ALGORITHMS[name](), kind)
    assert torch.equal(first, second)


def test_means_are_added_to() -> None:
    first, second = run_teams(2, passes, "gradient_allreduce", "module")
    assert torch.equal(first, second)
