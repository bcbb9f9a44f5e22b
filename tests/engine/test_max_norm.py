"""Embeddings with `max_norm`: a warning where ranks exchange gradients, and the way that keeps replicas equal."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import Warmup
from bagua.comm.team import Team
from bagua.moe import mark_rank_local
from tests.engine.training import seeded
from tests.rank_threads import run_teams

WORDS, NORM = 20, 0.5


class Words(nn.Module):
    def __init__(self, max_norm: float | None, kind: Any = nn.Embedding) -> None:
        super().__init__()
        self.words, self.last = kind(WORDS, 4, max_norm=max_norm), nn.Linear(4, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.words(words))


def train(team: Team, max_norm: float | None, algorithm: Any) -> tuple[tuple[str, ...], Tensor]:
    """Each rank looks up other words. Without `max_norm` all rows are rescaled after each step."""
    model = seeded(lambda: Words(max_norm), 0)
    assert isinstance(model, Words)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    made = torch.Generator().manual_seed(team.rank)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randint(WORDS, (4,), generator=made)).square().mean().backward()
        optimizer.step()
        if max_norm is None:
            with torch.no_grad():
                model.words.weight.renorm_(2, 0, NORM)
    bagua.average_parameters(model)
    notices = bagua.stats(model).notices
    bagua.detach(model)
    return notices, model.words.weight.detach().clone()


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", Warmup(2, "local_sgd", "bytegrad")])
def test_a_warning_where_gradients_are_exchanged(algorithm: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bagua"):
        results = run_teams(2, train, NORM, algorithm)
    told = [notice for notices, _ in results for notice in notices if "max_norm=0.5" in notice]
    assert len(told) == 2 and "'words.weight'" in told[0] and "weight.renorm_(2, 0, 0.5)" in told[0]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and told[0] in warnings[0]
    assert not torch.equal(results[0][1], results[1][1]), "nothing to warn of"


@pytest.mark.parametrize("algorithm", ["local_sgd", Warmup(2, "gradient_allreduce", "decentralized")])
def test_an_average_of_weights_makes_them_equal(algorithm: Any) -> None:
    (notices, first), (_, second) = run_teams(2, train, NORM, algorithm)
    assert torch.equal(first, second) and not any("max_norm" in notice for notice in notices)


def test_rows_rescaled_on_all_ranks_stay_equal() -> None:
    (notices, first), (_, second) = run_teams(2, train, None, "gradient_allreduce")
    assert torch.equal(first, second) and not notices
    assert float(first.norm(dim=1).max()) <= NORM * (1 + 1e-5)


def others(team: Team) -> list[tuple[str, ...]]:
    """A bag; and weights that Bagua does not exchange."""
    found = []
    for kind, change in (
        (nn.EmbeddingBag, lambda _: None),
        (nn.Embedding, lambda words: words.requires_grad_(False)),
        (nn.Embedding, mark_rank_local),
    ):
        model = Words(NORM, kind)
        change(model.words)
        bagua.distribute(model, torch.optim.SGD(model.last.parameters(), lr=0.1), process_group=team)
        found.append(bagua.stats(model).notices)
        bagua.detach(model)
    return found


def test_bags_too_and_no_weights_that_are_not_exchanged() -> None:
    for bag, frozen, local in run_teams(2, others):
        assert len(bag) == 1 and bag[0].startswith("the EmbeddingBag of 'words.weight' has max_norm")
        assert not frozen and not local
    assert run_teams(1, others) == [[(), (), ()]]
