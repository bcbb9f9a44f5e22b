"""Sparse buffers, such as the adjacency of a graph network: compared at the start, and each rank's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.comm.team import Team
from bagua.engine.startup.sparse_buffers import content_of
from bagua.errors import RankMismatchError
from tests.engine.training import seeded
from tests.rank_threads import run_teams

NODES = 6
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS")
LAYOUTS = ["sparse_coo", "sparse_csr", "sparse_csc"]


def adjacency(layout: str, weight: float = 1.0) -> Tensor:
    dense = torch.eye(NODES)
    dense[0, 2] = weight
    return dense.to_sparse(layout=getattr(torch, layout))


class Graph(nn.Module):
    adjacency: Tensor

    def __init__(self, made: Tensor) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(2)
        self.register_buffer("adjacency", made)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.adjacency @ self.layer(x))


def train(team: Team, made: Callable[[int], Tensor], ignored: bool, options: dict) -> tuple[list[Tensor], Tensor, str]:
    model = seeded(lambda: Graph(made(team.rank)), 0)
    assert isinstance(model, Graph)
    if ignored:
        setattr(model, "_bagua_params_and_buffers_to_ignore", ["adjacency"])  # noqa: B010
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        bagua.distribute(model, optimizer, process_group=team, **options)
    except RankMismatchError as error:
        return [], model.adjacency, str(error)
    generator = torch.Generator().manual_seed(team.rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(NODES, 4, generator=generator)).square().sum().backward()
        optimizer.step()
    notices = " ".join(bagua.stats(model).notices)
    bagua.detach(model)
    return [param.detach() for param in model.parameters()], model.adjacency, notices


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("broadcast", [True, False])
def test_equal_ones_are_left_as_they_are(layout: str, broadcast: bool) -> None:
    options = {"broadcast_buffers": broadcast}
    first, second = run_teams(2, train, lambda _: adjacency(layout), False, options)
    assert all(map(torch.equal, first[0], second[0]))
    assert torch.equal(first[1].to_dense(), adjacency(layout).to_dense())
    assert ("'adjacency'" in first[2]) == broadcast, "no notice that it is not broadcast, or one without need"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unlike_ones_are_refused_and_may_be_ignored(layout: str) -> None:
    def own(rank: int) -> Tensor:
        return adjacency(layout, 1.0 + rank)

    for _, _, error in run_teams(2, train, own, False, {}):
        assert "sparse buffer 'adjacency' is [6x6] float32" in error and "on rank 1 and" in error
        assert "_bagua_params_and_buffers_to_ignore" in error
    first, second = run_teams(2, train, own, True, {"broadcast_buffers": True})
    assert all(map(torch.equal, first[0], second[0]))
    assert not torch.equal(first[1].to_dense(), second[1].to_dense())


def test_the_content_is_what_the_elements_are() -> None:
    made = adjacency("sparse_coo").coalesce()
    indices, values = made.indices(), made.values()
    twice = torch.sparse_coo_tensor(torch.cat([indices, indices], 1), torch.cat([values, values]) / 2, made.shape)
    assert content_of(twice) == content_of(made)
    assert content_of(adjacency("sparse_coo", 2.0)) != content_of(made)
    assert content_of(made.to_sparse_csr()) != content_of(made), "another layout"
    assert content_of(made.bool()) != content_of(made)
