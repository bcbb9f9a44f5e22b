"""Asynchronous model averaging with few bits: rounds send changes since the last mean, which all ranks know alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import bagua
from bagua import codecs
from bagua.algorithms import AsyncModelAverage
from bagua.algorithms.async_model_average import _Round, _Rounds
from bagua.comm.team import Team
from bagua.engine.hooks import attachments
from benchmarks.convergence.delayed import DelayedAverage
from tests.algorithms.async_run import Run, events, together
from tests.algorithms.quadratic import Quadratic
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
    meet, begun, rested = together(size), events(size), events(size)

    def rank_main(team: Team) -> tuple[np.ndarray, np.ndarray]:
        run = Run(team, Quadratic, algorithm)
        run.optimizer.param_groups[0]["lr"] = 0.0
        run.train_rounds(1, begun)
        bagua.pause(run.model)
        with torch.no_grad():
            for param in run.model.parameters():
                param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(team.rank)))
        before = run.x()
        meet()
        bagua.resume(run.model)
        run.train_rounds(12, rested)
        bagua.pause(run.model)
        return before, run.x()

    found = run_teams(size, rank_main)
    mean = np.mean([before for before, _ in found], axis=0)
    apart = max(float(np.abs(x - mean).max()) for _, x in found)
    assert (apart < 1e-4) == exact, apart


def test_errors_are_not_fed_back_where_moments_are_corrected() -> None:
    """What is fed back would be taken for gradients."""
    assert AsyncModelAverage(mean_moments=True).exchange.name == "scatter_gather[int4]"
    assert AsyncModelAverage(mean_moments=True, codec="minmax_uint8").exchange.name == "scatter_gather[minmax_uint8]"
    assert AsyncModelAverage().exchange.name == "scatter_gather[int4, error feedback]"


@pytest.mark.parametrize(
    ("options", "optimizer", "on"),
    [
        ({}, torch.optim.AdamW, True),
        ({}, torch.optim.Adam, True),
        ({"codec": "minmax_uint8"}, torch.optim.AdamW, True),
        ({"sync_interval_ms": 0}, torch.optim.AdamW, True),
        ({"warmup_steps": 3}, torch.optim.AdamW, True),
        ({}, torch.optim.SGD, None),
        ({}, torch.optim.Adamax, None),
        ({}, lambda params, lr: torch.optim.AdamW(params, lr=lr, amsgrad=True), None),
        ({"codec": "eden:bits=2"}, torch.optim.AdamW, None),
        ({"sync_interval_ms": 500}, torch.optim.AdamW, None),
        ({"scale_second_moment": True}, torch.optim.AdamW, None),
        ({"scale_second_moment": None}, torch.optim.AdamW, None),
        ({"mean_moments": False}, torch.optim.AdamW, False),
    ],
)
def test_moments_are_corrected_by_default_where_the_optimizer_shows_them(
    options: dict[str, Any], optimizer: Any, on: bool | None
) -> None:
    model = Quadratic()
    fitted = AsyncModelAverage(**options).for_optimizers([optimizer(model.parameters(), lr=0.1)])
    assert isinstance(fitted, AsyncModelAverage) and fitted.mean_moments is on
    short = AsyncModelAverage(**options).for_optimizers([optimizer(model.bfloat16().parameters(), lr=0.1)])
    assert short == AsyncModelAverage(**options), "moments of 16 bits are too coarse"


def test_a_notice_tells_of_corrected_moments() -> None:
    def rank_main(team: Team) -> list[str]:
        run = Run(team, Quadratic, AsyncModelAverage(), torch.optim.AdamW)
        return [str(notice) for notice in bagua.stats(run.model).notices]

    for notices in run_teams(2, rank_main):
        assert any(
            "async: moments of Adam are set to those of mean gradients (mean_moments)" in each for each in notices
        )


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


def test_mean_moments_of_real_rounds() -> None:
    """Ranks that wait for each mean after one step do what rounds of fixed length do."""
    size, rounds = 2, 6
    meet = together(size)

    def rank_main(team: Team, algorithm: Any) -> tuple[list[torch.Tensor], bagua.Stats]:
        run = Run(team, Quadratic, algorithm, torch.optim.AdamW)
        for _ in range(rounds):
            run.train()
            meet()
            if (pending := attachments[run.model].engine.context.keep("rounds", _Rounds).pending) is not None:
                for ticket in pending.tickets:
                    ticket.wait()
        run.train()
        state = [run.optimizer.state[each] for each in run.model.parameters()]
        found = [each.clone() for each in (*run.model.parameters(), *(s["exp_avg"] for s in state))]
        found += [s["exp_avg_sq"].clone() for s in state]
        stats = bagua.stats(run.model)
        bagua.detach(run.model)
        return [each.detach() for each in found], stats

    real = run_teams(size, rank_main, AsyncModelAverage(codec="minmax_uint8"))
    fixed = run_teams(size, rank_main, DelayedAverage(codec="minmax_uint8", mean_moments=True))
    for (ours, stats), (want, _) in zip(real, fixed, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, want, strict=True))
        assert (stats.extra["corrected"].count, stats.extra["corrected"].mean) == (rounds, 1.0)


def test_mean_moments_need_adam() -> None:
    def refused(team: Team) -> str:
        with pytest.raises(ValueError, match="mean_moments: needs torch") as caught:
            Run(team, Quadratic, AsyncModelAverage(mean_moments=True))
        return str(caught.value)

    assert all("SGD" in each for each in run_teams(2, refused))


@pytest.mark.parametrize("options", [{}, {"codec": "eden:bits=4"}, {"codec": "identity"}, {"warmup_steps": 2}], ids=str)
def test_the_first_round_after_a_load_sends_the_weights(options: dict[str, Any]) -> None:
    """What was learnt before the state was saved is no change that few bits could lose."""
    size = 2
    meet, trained = together(size), events(size)

    def rank_main(team: Team) -> tuple[np.ndarray, np.ndarray]:
        run = Run(team, Quadratic, AsyncModelAverage(**options))
        run.train_rounds(3, trained)
        bagua.pause(run.model)
        weights, optimizer, own = run.model.state_dict(), run.optimizer.state_dict(), bagua.state_dict(run.model)
        bagua.detach(run.model)
        meet()
        fresh = Run(team, Quadratic, AsyncModelAverage(**options))
        with torch.no_grad():
            for value in weights.values():
                value.mul_(1000.0).add_(team.rank)
        fresh.model.load_state_dict(weights)
        fresh.optimizer.load_state_dict(optimizer)
        bagua.load_state_dict(fresh.model, own)
        for group in fresh.optimizer.param_groups:
            group["lr"] = 0.0
        before = fresh.x()
        meet()
        fresh.train_rounds(1, rested)
        bagua.pause(fresh.model)
        return before, fresh.x()

    rested = events(size)
    found = run_teams(size, rank_main)
    mean = sum(before for before, _ in found) / size
    assert np.abs(mean).max() > 100
    for _, after in found:
        assert np.allclose(after, mean, rtol=1e-5, atol=0.01)  # what few bits owe of before the state was saved


def test_where_one_rank_alone_sends_its_weights_all_do_in_the_next_round() -> None:
    size = 3
    meet, rested = together(size), events(size)

    def rank_main(team: Team) -> tuple[np.ndarray, np.ndarray, int]:
        run = Run(team, Quadratic, AsyncModelAverage(codec="int4"))
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        if team.rank == 1:
            with torch.no_grad():
                for param in run.model.parameters():
                    param.add_(1000.0)
        before = run.x()
        meet()
        run.train_rounds(1, rested)
        bagua.pause(run.model)
        return before, run.x(), bagua.stats(run.model).extra["round_s"].count

    found = run_teams(size, rank_main)
    mean = sum(before for before, _, _ in found) / size
    for _, after, _ in found:
        assert np.allclose(after, mean, rtol=1e-4)


@pytest.mark.parametrize("on", [True, False])
def test_a_load_forgets_a_round_and_what_changes_are_counted_from(on: bool) -> None:
    algorithm = AsyncModelAverage()
    ticket: Any = SimpleNamespace(done=True, error=None, wait=lambda: None)
    rounds = _Rounds(pending=_Round(0, 0.0, tickets=[ticket], on=on))
    context: Any = SimpleNamespace(keep=lambda name, make: rounds)
    algorithm.on_load(context)
    assert rounds.pending is None and rounds.whole
