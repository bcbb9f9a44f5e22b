"""Asynchronous model averaging with few bits: rounds send changes since the last mean, which all ranks know alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import bagua
from bagua import codecs
from bagua.algorithms import AsyncModelAverage
from bagua.comm.team import Team
from tests.algorithms.async_run import Run, events, together
from tests.algorithms.quadratic import N, Quadratic
from tests.rank_threads import run_teams


@pytest.mark.parametrize("codec", [None, "minmax_uint8", "int4", "eden:bits=2", "identity", "bf16"])
@pytest.mark.parametrize("nodes", [None, [0, 0, 1]], ids=["one node", "two nodes"])
def test_replicas_come_together(codec: str | None, nodes: list[int] | None) -> None:
    """Without steps each round brings them closer: with 8 bits to a 255th of what was left, and so on."""
    size = 3
    meet, trained, rested = together(size), events(size), events(size)

    def rank_main(team: Team) -> tuple[float, np.ndarray]:
        run = Run(team, Quadratic, AsyncModelAverage(codec=codec))
        run.train_rounds(8, trained)
        meet()
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        bagua.pause(run.model)
        before = run.x()
        meet()
        bagua.resume(run.model)
        run.train_rounds(8, rested)
        bagua.pause(run.model)
        return float(np.abs(before - run.x()).max()), run.x()

    found = run_teams(size, rank_main, nodes=nodes)
    apart = max(float(np.abs(x - found[0][1]).max()) for _, x in found)
    assert apart < 1e-5 and max(moved for moved, _ in found) > 1e-3


def test_the_codec_is_checked() -> None:
    with pytest.raises(ValueError, match="codec 'sign': what it does not send of a change would be lost"):
        AsyncModelAverage(codec="sign")
    with pytest.raises(ValueError, match="'no'"):
        AsyncModelAverage(codec="no")


def test_bytes() -> None:
    for codec in ("minmax_uint8", "int4", "identity"):
        sent = AsyncModelAverage(codec=codec).bytes_per_rank(1 << 20, 4)
        assert sent == pytest.approx(2 * 3 / 4 * codecs.get(codec).wire_bytes(1 << 20), rel=0.01)
    assert repr(AsyncModelAverage()) == repr(AsyncModelAverage(codec=None, mean_moments=None))
    assert "codec" not in repr(AsyncModelAverage()), "a checkpoint of before has none"


def test_mean_moments_of_real_rounds_change_the_moments_and_nothing_is_lost() -> None:
    last = events(2)

    def rank_main(team: Team) -> tuple[torch.Tensor, int]:
        model = Quadratic()
        own = torch.optim.AdamW(model.parameters(), lr=0.01)
        bagua.distribute(model, own, AsyncModelAverage(mean_moments=True), process_group=team)
        run = Run.__new__(Run)
        run.team, run.steps, run.model, run.optimizer = team, 0, model, own
        run.train_rounds(20, last)
        rounds = run.rounds
        bagua.pause(model)
        moments = torch.cat([own.state[param]["exp_avg_sq"].reshape(-1) for param in model.parameters()])
        bagua.detach(model)
        return moments, rounds

    for moments, rounds in run_teams(2, rank_main):
        assert rounds >= 20 and moments.numel() == N and bool((moments >= 0).all()) and bool(moments.isfinite().all())
