"""Ranks that line up go on together."""

from __future__ import annotations

import time

import torch
from torch import nn

import bagua
from bagua.comm.team import Team
from bagua.engine.hooks import attachments
from tests.rank_threads import run_teams

LATE_S = 0.3


def arrive(team: Team) -> float:
    net = nn.Linear(4, 4)
    bagua.distribute(net, torch.optim.SGD(net.parameters(), 0.1), process_group=team)
    engine = attachments[net].engine
    engine.dispatcher.line_up()
    started = time.perf_counter()
    if team.rank == 1:
        time.sleep(LATE_S)
    engine.dispatcher.line_up()
    return time.perf_counter() - started


def test_nobody_goes_on_before_the_last_has_come() -> None:
    assert min(run_teams(3, arrive)) > LATE_S / 2


def test_a_single_rank_waits_for_nobody() -> None:
    assert len(run_teams(1, arrive)) == 1
