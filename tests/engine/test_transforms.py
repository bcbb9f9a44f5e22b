"""Forward passes within transforms of `torch.func` and within tracers are not passes of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import bagua
from bagua.comm.team import Team
from tests.rank_threads import run_teams


def made() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model.register_buffer("offset", torch.zeros(3))
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, 0.1 * (number + 1))
    return model


def gradients_of_samples(model: nn.Module, x: Tensor) -> None:
    weights = {name: param.detach() for name, param in model.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (row[None],)).square().mean()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    assert all(found[name].shape == (len(x), *param.shape) for name, param in model.named_parameters())


def jacobian(model: nn.Module, x: Tensor) -> None:
    torch.func.jacrev(model)(x)


def fake(model: nn.Module, x: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(x)).shape == x.shape


def graph(model: nn.Module, x: Tensor) -> None:
    make_fx(lambda x: model(x))(x)


def trace(model: nn.Module, x: Tensor) -> None:
    torch.jit.trace(model, x, check_trace=False)


def trained(team: Team, algorithm: str, options: dict[str, Any], before: Callable[..., None] | None) -> list[Tensor]:
    """Weights after three steps; rank 0 alone begins each with `before`."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, algorithm, process_group=team, **options)
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + team.rank))
        optimizer.zero_grad()
        if before is not None and team.rank == 0:
            before(model, x)
        model(x).square().mean().backward()
        optimizer.step()
    bagua.detach(model)
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("decentralized", {}), ("gradient_allreduce", {"broadcast_buffers": True})],
    ids=["decentralized", "buffers"],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("before", [gradients_of_samples, jacobian, fake, graph, trace])
def test_they_do_not_begin_a_step(algorithm: str, options: dict[str, Any], before: Callable[..., None]) -> None:
    expected = run_teams(2, trained, algorithm, options, None, timeout_s=20)
    found = run_teams(2, trained, algorithm, options, before, timeout_s=20)
    for mine, plain in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))


def vectorised(team: Team, algorithm: str, is_mapped: bool) -> list[Tensor]:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * step + team.rank))
        optimizer.zero_grad()
        out = torch.func.vmap(lambda row: model(row[None])[0])(x) if is_mapped else model(x)
        out.square().mean().backward()
        optimizer.step()
    bagua.detach(model)
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("algorithm", ["decentralized", "gradient_allreduce"])
def test_a_backward_pass_through_vmap_makes_a_step(algorithm: str) -> None:
    expected, found = (run_teams(2, vectorised, algorithm, is_mapped) for is_mapped in (False, True))
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain)
