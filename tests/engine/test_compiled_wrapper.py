"""What `torch.compile` returns for a distributed module stands for it in functions of Bagua."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.comm.team import Team
from tests.engine.training import seeded
from tests.rank_threads import run_teams


def made(team: Team, algorithm: str, **options: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = seeded(lambda: nn.Linear(8, 4), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    bagua.distribute(model, optimizer, algorithm, process_group=team, **options)
    return model, torch.compile(model, backend="eager"), optimizer


def train(team: Team, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + team.rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(team: Team, algorithm: str, options: dict[str, Any], folder: Path) -> tuple[Tensor, Tensor]:
    found: list[Tensor] = []
    for begin in (0, 5):
        model, compiled, optimizer = made(team, algorithm, **options)
        if begin:
            bagua.checkpoint.load(folder, {"model": compiled, "optimizer": optimizer}, process_group=team)
        else:
            train(team, model, optimizer, range(5))
            bagua.checkpoint.save(folder, {"model": compiled, "optimizer": optimizer}, step=5, process_group=team)
        train(team, model, optimizer, range(5, 9))
        bagua.detach(compiled)
        found.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("algorithm", "options"), [("gradient_allreduce", {"codec": "int4"}), ("local_sgd", {}), ("diloco", {})]
)
def test_a_checkpoint_has_the_state_of_the_algorithm(algorithm: str, options: dict[str, Any], tmp_path: Path) -> None:
    for once, again in run_teams(2, resumed, algorithm, options, tmp_path):
        assert torch.equal(once, again)


def asked(team: Team) -> None:
    model, compiled, optimizer = made(team, "local_sgd", communication_interval=4)
    with bagua.no_sync(compiled):
        pass
    train(team, model, optimizer, range(2))
    bagua.average_parameters(compiled)
    assert bagua.stats(compiled).algorithm == bagua.stats(model).algorithm
    assert bagua.state_dict(compiled).keys() == bagua.state_dict(model).keys()
    with pytest.raises(ValueError, match="already distributed"):
        bagua.distribute(compiled, optimizer, "bytegrad", process_group=team)
    assert bagua.detach(compiled) is compiled
    for module in (model, compiled, nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="is not distributed"):
            bagua.stats(module)


def test_functions_take_the_wrapper() -> None:
    run_teams(2, asked)
