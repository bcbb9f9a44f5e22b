"""Asynchronous model averaging with few bits: rounds send changes since the last mean, which all ranks know alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import bagua
from bagua import codecs
from bagua.algorithms import AsyncModelAverage, delayed_moments
from bagua.algorithms.async_model_average import _Round, _Rounds
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


@pytest.mark.parametrize(
    ("options", "feedback", "exact"),
    [({}, True, True), ({"codec": "int4"}, True, True), ({"codec": "eden:bits=2"}, False, False)],
)
def test_what_few_bits_lose_is_sent_later(options: dict[str, Any], feedback: bool, exact: bool) -> None:
    """Ranks that rest at different weights: with error feedback they meet at the mean, else nearby."""
    size = 2
    algorithm = AsyncModelAverage(**options)
    assert ("error feedback" in algorithm.exchange.name) == feedback
    rested = events(size)

    def rank_main(team: Team) -> tuple[np.ndarray, np.ndarray]:
        run = Run(team, Quadratic, algorithm)
        bagua.pause(run.model)
        run.optimizer.param_groups[0]["lr"] = 0.0
        with torch.no_grad():
            for param in run.model.parameters():
                param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(team.rank)))
        before = run.x()
        bagua.resume(run.model)
        run.train_rounds(12, rested)
        bagua.pause(run.model)
        return before, run.x()

    found = run_teams(size, rank_main)
    mean = np.mean([before for before, _ in found], axis=0)
    apart = max(float(np.abs(x - mean).max()) for _, x in found)
    assert (apart < 1e-4) == exact, apart


def test_corrected_moments_have_codecs_of_their_own() -> None:
    """8 bits by default, and no feedback: it would be taken for gradients."""
    assert AsyncModelAverage(mean_moments=True).exchange.name == "scatter_gather[minmax_uint8]"
    assert AsyncModelAverage(mean_moments=True, codec="int4").exchange.name == "scatter_gather[int4]"
    assert AsyncModelAverage().exchange.name == "scatter_gather[int4, error feedback]"


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


def test_mean_moments_of_real_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which means come early enough depends on time, so the limits are wide here."""
    monkeypatch.setattr(delayed_moments, "_LONGEST", 1000)
    monkeypatch.setattr(delayed_moments, "_LATEST", 1000)
    last, applied = events(2), []
    apply = delayed_moments._Formulas.apply
    monkeypatch.setattr(delayed_moments._Formulas, "apply", lambda *args: applied.append(1) or apply(*args))

    def rank_main(team: Team) -> torch.Tensor:
        run = Run(team, Quadratic, AsyncModelAverage(mean_moments=True), torch.optim.AdamW)
        run.train_rounds(6, last)
        bagua.pause(run.model)
        bagua.detach(run.model)
        return torch.cat([run.optimizer.state[each]["exp_avg_sq"].reshape(-1) for each in run.model.parameters()])

    for moments in run_teams(2, rank_main):
        assert moments.numel() == N and bool((moments >= 0).all()) and bool(moments.isfinite().all())
    assert len(applied) >= 2 * 6


def test_mean_moments_need_adam() -> None:
    def refused(team: Team) -> str:
        with pytest.raises(ValueError, match="mean_moments: needs torch") as caught:
            Run(team, Quadratic, AsyncModelAverage(mean_moments=True))
        return str(caught.value)

    assert all("SGD" in each for each in run_teams(2, refused))


@pytest.mark.parametrize("on", [True, False])
def test_a_load_forgets_a_round_but_not_that_all_ranks_know_its_mean(on: bool) -> None:
    """The first round of a fault-tolerant job sends the weights themselves; the others have taken it over."""
    algorithm = AsyncModelAverage()
    ticket = SimpleNamespace(done=True, error=None, wait=lambda: None)
    rounds = _Rounds(pending=_Round(0, 0.0, tickets=[ticket], on=on), whole=True)
    context: Any = SimpleNamespace(keep=lambda name, make: rounds)
    algorithm.on_load(context)
    assert rounds.pending is None and rounds.whole == (not on)
