"""Parameters that no optimizer holds: a warning where they are exchanged as trained weights."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import bagua
from bagua.algorithms import Warmup
from bagua.comm.team import Team
from tests.engine.training import seeded
from tests.rank_threads import run_teams


class Averaged(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.net = nn.Linear(8, 4)
        self.ema = AveragedModel(self.net).requires_grad_(trained)


def notices_of(team: Team, algorithm: Any, trained: bool, whole: bool) -> tuple[str, ...]:
    model = seeded(lambda: Averaged(trained), 0)
    assert isinstance(model, Averaged)
    optimizer = torch.optim.AdamW((model if whole else model.net).parameters(), lr=0.01)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    notices = bagua.stats(model).notices
    bagua.detach(model)
    return tuple(each for each in notices if "no optimizer that was passed holds them" in each)


@pytest.mark.parametrize("algorithm", ["sparse_loco", Warmup(2, "gradient_allreduce", "diloco")])
def test_a_warning_where_weights_are_exchanged(algorithm: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bagua"):
        told = run_teams(2, notices_of, algorithm, True, False)
    assert all(len(each) == 1 and each[0].startswith("2 parameters") for each in told)
    assert "'ema.module.weight'" in told[0][0] and "requires_grad_(False)" in told[0][0]
    assert sum("no optimizer" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("algorithm", "trained", "whole"),
    [("bytegrad", True, False), ("diloco", False, False), ("diloco", True, True)],
)
def test_none_elsewhere(algorithm: str, trained: bool, whole: bool) -> None:
    assert run_teams(2, notices_of, algorithm, trained, whole) == [(), ()]
