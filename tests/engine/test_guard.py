"""Is compression hurting? The guard measures it, and takes over when it does."""

from __future__ import annotations

import itertools
import logging
import math
import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import bagua
from bagua import codecs
from bagua.algorithms import (
    Algorithm,
    AsyncModelAverage,
    Decentralized,
    GradientAllReduce,
    LocalSGD,
    PowerSGD,
    SparseLoCo,
)
from bagua.comm.team import Team
from tests.algorithms.quadratic import Quadratic, flat, start, target, targets
from tests.engine.training import seeded
from tests.rank_threads import run_teams

SIZE, STEPS = 3, 24


@dataclass(frozen=True)
class Noise(codecs.Codec):
    """Deliberately bad: decodes to noise of the right size, unrelated to what was encoded, from its third step on."""

    name: ClassVar[str] = "noise"
    linear: ClassVar[bool] = False
    lossless: ClassVar[bool] = False

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return 4 * n

    def _encode(self, x_RN: Tensor, out_RW: Tensor) -> None:
        out_RW.view(torch.float32).copy_(x_RN)

    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        x = wire_RW.view(torch.float32)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
        out_RN.copy_(noise * x.norm() / math.sqrt(x.numel()))


def follow(team: Team, algorithm: object, guard: bagua.Guard | None) -> tuple[np.ndarray, bagua.Stats, np.ndarray]:
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    bagua.distribute(model, optimizer, algorithm, process_group=team, guard=guard)  # type: ignore[arg-type]
    distance = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.tensor(target(team.rank, step), dtype=torch.float32)).backward()
        optimizer.step()
        distance.append(float(np.linalg.norm(flat(model).detach().double().numpy() - targets(SIZE, step).mean(0))))
    found = bagua.stats(model)
    bagua.detach(model)
    return flat(model).detach().double().numpy(), found, np.array(distance)


@pytest.mark.parametrize(
    ("codec", "feedback", "cosine", "error"),
    [
        ("minmax_uint8", False, 0.999, 0.05),
        ("int4", True, 0.9, 0.4),
        ("sign", True, 0.2, 3.0),
        ("bf16", False, 0.999, 0.02),
    ],
)
def test_measures_what_a_codec_loses(codec: str, feedback: bool, cosine: float, error: float) -> None:
    algorithm = GradientAllReduce(codec=codec, error_feedback=feedback)
    results = run_teams(SIZE, follow, algorithm, bagua.Guard(every=4))
    qualities = [stats.quality for _, stats, _ in results]
    assert all(quality == qualities[0] for quality in qualities), "all ranks see the same numbers"
    quality = qualities[0]
    assert quality is not None
    assert quality.step == 20
    assert cosine < quality.cosine < 1.0 and 0.0 < quality.relative_error < error
    assert (quality.residual > 0) == feedback
    assert not results[0][1].notices


def test_an_exact_algorithm_has_nothing_to_measure() -> None:
    for _, stats, _ in run_teams(SIZE, follow, GradientAllReduce(), bagua.Guard(every=4)):
        assert stats.quality is None


def test_measuring_changes_no_number() -> None:
    algorithm = GradientAllReduce(codec="sign", error_feedback=True)
    with_guard = run_teams(SIZE, follow, algorithm, bagua.Guard(every=1))
    without = run_teams(SIZE, follow, algorithm, None)
    for (ours, _, _), (plain, _, _) in zip(with_guard, without, strict=True):
        assert np.array_equal(ours, plain)


def test_catches_a_bad_codec_and_the_loss_recovers(caplog: pytest.LogCaptureFixture) -> None:
    bad = GradientAllReduce(codec=Noise())
    with caplog.at_level(logging.WARNING, logger="bagua"):
        guarded = run_teams(SIZE, follow, bad, bagua.Guard(every=5))
    alone = run_teams(SIZE, follow, bad, None)
    exact = run_teams(SIZE, follow, GradientAllReduce(), None)
    for rank in range(SIZE):
        weights, stats, distance = guarded[rank]
        assert np.array_equal(weights, guarded[0][0]), "ranks decide alike"
        assert "GradientAllReduce" in stats.notices[0] and "cosine" in stats.notices[0]
        assert distance[-1] < 1.2 * exact[rank][2][-1] + 0.5
        assert alone[rank][2][-1] > 2 * distance[-1], "the codec is not bad enough for this test"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "takes over" in warning.getMessage(), "told once, by rank 0"


def test_report_only() -> None:
    for _, stats, _ in run_teams(SIZE, follow, GradientAllReduce(codec=Noise()), bagua.Guard(every=5, fallback=None)):
        assert stats.quality is not None and stats.quality.step == 20 and stats.quality.cosine < 0.5
        assert len(stats.notices) == 1 and "cosine" in stats.notices[0]


def test_consensus_of_decentralized_weights() -> None:
    for algorithm, apart in ((Decentralized(topology="ring"), False), (LocalSGD(communication_interval=100), True)):
        results = run_teams(4 if not apart else SIZE, follow, algorithm, bagua.Guard(every=4))
        quality = results[0][1].quality
        assert quality is not None and quality.consensus > 0
        stacked = np.stack([weights for weights, _, _ in results])
        now = np.sqrt(np.square(stacked - stacked.mean(0)).sum(1).mean()) / np.linalg.norm(stacked.mean(0))
        assert 0.3 * now < quality.consensus < 3 * now


@pytest.mark.parametrize(("codec", "scale"), [("fp16", 1e7), ("sign", 3e38)])
def test_a_codec_that_overflows_is_not_used_again(codec: str, scale: float) -> None:
    """fp16 ends at 65504, and `sign` sums magnitudes in fp32. Adam does not mind the size of gradients."""

    def overflow(team: Team) -> bagua.Stats:
        model = seeded(lambda: torch.nn.Linear(64, 64), 0)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        algorithm = GradientAllReduce(codec=codec, error_feedback=False)
        guard = bagua.Guard(every=1, min_cosine=-1.0)
        bagua.distribute(model, optimizer, algorithm, process_group=team, guard=guard)
        (model(torch.ones(1, 64)).mean() * scale).backward()
        optimizer.step()
        found = bagua.stats(model)
        bagua.detach(model)
        return found

    for stats in run_teams(2, overflow):
        quality = stats.quality
        assert quality is not None and (quality.relative_error, quality.cosine) == (math.inf, 0.0)
        assert any("infinite or NaN and the exact one is not" in each for each in stats.notices)
        assert any("takes over" in each for each in stats.notices)


@pytest.mark.parametrize("overflows", ["mean", "gradient"])
def test_an_overflow_without_the_codec_is_no_fault_of_it(overflows: str) -> None:
    def overflow(team: Team) -> bagua.Stats:
        model = seeded(lambda: torch.nn.Linear(4, 4), 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        bagua.distribute(model, optimizer, "bytegrad", process_group=team, guard=bagua.Guard(every=1))
        factor = float("inf") if overflows == "gradient" and team.rank == 0 else 3e38
        (model(torch.ones(1, 4)).sum() * factor * (2.0 if overflows == "mean" else 1.0)).backward()
        optimizer.step()
        found = bagua.stats(model)
        bagua.detach(model)
        return found

    for stats in run_teams(2, overflow):
        assert stats.quality is None and not stats.notices


def test_a_step_that_a_scaler_skips_is_not_measured() -> None:
    """The scale begins too high for fp16, and is halved until gradients fit."""

    def follow_scaler(team: Team) -> tuple[bagua.Stats, float]:
        model = seeded(lambda: torch.nn.Linear(4, 4), 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        guard = bagua.Guard(every=1)
        bagua.distribute(model, optimizer, GradientAllReduce(codec="fp16"), process_group=team, guard=guard)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        for _ in range(8):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        found = bagua.stats(model)
        bagua.detach(model)
        return found, scaler.get_scale()

    for stats, scale in run_teams(2, follow_scaler):
        assert scale == 2.0**15 and not stats.notices
        assert stats.quality is not None and stats.quality.cosine > 0.999


@pytest.mark.parametrize(
    "algorithm",
    [PowerSGD(rank=1, min_compression=1.0), SparseLoCo(communication_interval=1), GradientAllReduce(codec="sign")],
    ids=lambda algorithm: algorithm.name,
)
def test_the_residual_is_measured_whoever_keeps_it(algorithm: Algorithm) -> None:
    """It is the first limit that all of them exceed."""
    guard = bagua.Guard(every=1, min_cosine=-1.0, max_residual=1e-3, fallback=None)
    results = run_teams(SIZE, follow, algorithm, guard)
    qualities = [stats.quality for _, stats, _ in results]
    assert qualities[0] is not None and qualities[0].residual > 0.01
    assert all(quality == qualities[0] for quality in qualities)
    for _, stats, _ in results:
        assert any("residual" in each and "is above 0.001" in each for each in stats.notices)


def test_consensus_is_measured_where_a_round_is() -> None:
    """Ranks begin a round of `sparse_loco` with a part of their own residual."""
    results = run_teams(SIZE, follow, SparseLoCo(communication_interval=1), bagua.Guard(every=1, min_cosine=-1.0))
    quality = results[0][1].quality
    assert quality is not None and quality.step == STEPS - 1 and quality.relative_error > 0
    stacked = np.stack([weights for weights, _, _ in results])
    now = np.sqrt(np.square(stacked - stacked.mean(0)).sum(1).mean()) / np.linalg.norm(stacked.mean(0))
    assert quality.consensus == pytest.approx(now, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every.*0"),
        ({"min_cosine": 2}, "min_cosine.*2"),
        ({"max_relative_error": -1}, "max_relative_error.*-1"),
        ({"max_residual": 0}, "max_residual.*0"),
        ({"fallback": "nothing"}, "'nothing'"),
    ],
)
def test_bad_guards(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bagua.Guard(**options)


def test_not_a_guard() -> None:
    def wrong(team: Team) -> None:
        model = Quadratic()
        with pytest.raises(TypeError, match=r"guard: expected a bagua\.Guard or None, got bool"):
            bagua.distribute(model, [], process_group=team, guard=True)  # type: ignore[arg-type]
        assert start().shape == (46,)

    run_teams(2, wrong)


def test_background_rounds_are_not_measured() -> None:
    """Ranks are at different steps in a round: one would measure it and wait in vain for the other to."""

    def follow_one_round(team: Team) -> bagua.Stats:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        algorithm = AsyncModelAverage(codec="minmax_uint8", sync_interval_ms=1e6)
        bagua.distribute(model, optimizer, algorithm, process_group=team, guard=bagua.Guard(every=2))
        deadline = time.monotonic() + 20
        for step in itertools.count():  # rank 1 enters the round one step later than rank 0
            (bagua.pause if step < team.rank else bagua.resume)(model)
            optimizer.zero_grad()
            model(torch.tensor(target(team.rank, step), dtype=torch.float32)).backward()
            optimizer.step()
            found = bagua.stats(model)
            if "round_s" in found.extra or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        bagua.detach(model)
        return found

    for found in run_teams(2, follow_one_round, timeout_s=5):
        assert "round_s" in found.extra, found.notices
        assert found.quality is None
        assert "guard: averages in the background, as of async, are not measured" in found.notices
