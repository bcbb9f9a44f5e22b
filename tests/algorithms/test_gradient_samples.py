"""`gradient_interval` of gossip: a numpy oracle, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import bagua
from bagua import topologies
from bagua.algorithms import Decentralized, LowPrecisionDecentralized, gradient_samples
from bagua.exchanges import mix
from tests.algorithms.momentum import Plain, interrupted
from tests.algorithms.quadratic import N, Quadratic, flat, follow, start, targets
from tests.rank_threads import run_teams

STEPS, LR, B1, B2, EPS, INTERVAL = 20, 0.05, 0.9, 0.9, 1e-8, 3
PARTS = (slice(0, 11), slice(11, N))  # b and w, each in a bucket of its own
TOLERANCE = 2e-4
ALGORITHMS = {
    "ring": Decentralized(topology="ring", gradient_interval=INTERVAL),
    "shift_one": Decentralized(peer_selection_mode="shift_one", gradient_interval=INTERVAL),
    "low_precision": LowPrecisionDecentralized(codec=Plain(), gradient_interval=INTERVAL),
}


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gradients are averaged without loss."""
    gradient_samples.sample_exchange.cache_clear()
    monkeypatch.setattr(gradient_samples, "_CODEC", "identity")
    yield
    gradient_samples.sample_exchange.cache_clear()


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LR, betas=(B1, B2), eps=EPS, weight_decay=0.1)


def adam(params: Any) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr=LR, betas=(B1, B2), eps=EPS, weight_decay=0.1)


def oracle(size: int, topology: str, after: bool, corrected: bool = True) -> np.ndarray:
    """Weights after each step, [STEPS, size, N]. `after`: replicas of before the step pull each other."""
    x = np.tile(start(), (size, 1))
    m, v, seen = np.zeros_like(x), np.zeros_like(x), []
    known = np.zeros((3, size, len(PARTS)))  # sums of squares of the mean and the own gradient, and samples
    sampled: list[tuple[int, np.ndarray]] = []
    for k in range(1, STEPS + 1):
        w = np.array(topologies.get(topology).matrix(size, k - 1))
        gradients = x - targets(size, k - 1)
        before = v
        m, v = B1 * m + (1 - B1) * gradients, B2 * v + (1 - B2) * gradients**2
        mixed = w @ x
        pull = mixed - x if after else 0.0
        x = (x if after else mixed) * (1 - 0.1 * LR) - LR / (1 - B1**k) * m / (np.sqrt(v / (1 - B2**k)) + EPS) + pull
        for part, old in sampled:
            new = np.stack([np.full(size, (old.mean(0) ** 2).sum()), (old**2).sum(1)])
            weight = np.maximum(1 / (known[2, :, part] + 1), 0.2)
            known[:2, :, part] += weight * (new - known[:2, :, part])
            known[2, :, part] += 1
        sampled = []
        for part, place in enumerate(PARTS):
            if corrected and size > 1:
                if known[2, 0, part]:
                    f = np.clip(known[0, :, part] / known[1, :, part], 1 / size, 1)[:, None]
                    v[:, place] = B2 * before[:, place] + (1 - B2) * f * gradients[:, place] ** 2
                if k == 1 or (k - 1 + part) % INTERVAL == 0:
                    sampled.append((part, gradients[:, place]))
        seen.append(x)
    return np.stack(seen)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_is_the_oracles(name: str, size: int) -> None:
    algorithm = ALGORITHMS[name]
    results = run_teams(size, partial(follow, bucket_bytes=8), algorithm, STEPS, adamw)
    topology = "shift_one" if name == "shift_one" else "ring"
    want = partial(oracle, size, topology, name == "low_precision")
    for rank, result in enumerate(results):
        assert np.abs(result[0] - want()[:, rank]).max() < TOLERANCE
    if size > 1:
        assert np.abs(want() - want(corrected=False)).max() > 100 * TOLERANCE, "the oracle would not notice"


@pytest.mark.parametrize("optimizer_last", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_resume_is_bit_identical(name: str, optimizer_last: bool) -> None:
    """With means in flight, and without. Weights differ by rank, so each loads its own."""
    for whole, resumed in run_teams(2, interrupted, adamw, ALGORITHMS[name], [1, 5, 6, 10], 14, optimizer_last):
        for stop, other in resumed.items():
            assert torch.equal(whole, other), stop


def moments(team: Any, algorithm: Any, make: Any, scale: float) -> torch.Tensor:
    """Second moments of b after some steps."""
    model = Quadratic()
    optimizer = make(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    for step in range(6):
        optimizer.zero_grad()
        loss = (flat(model) - torch.tensor(targets(2, step)[team.rank], dtype=torch.float32)).square().sum() * scale
        (loss if step != 3 or team.rank else loss * torch.inf).backward()
        if step == 3:
            for param in model.parameters():
                assert param.grad is not None
                torch.nan_to_num_(param.grad, nan=0.0, posinf=0.0, neginf=0.0)
        optimizer.step()
    bagua.detach(model)
    return optimizer.state[model.b]["exp_avg_sq"]


def in_double(team: Any, algorithm: Any) -> torch.Tensor:
    """The second moment of a parameter in fp64 beside one in fp32, after some steps."""
    model = Quadratic()
    model.b.data = model.b.data.double()
    optimizer = adamw(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.tensor(targets(2, step)[team.rank])).backward()
        optimizer.step()
    bagua.detach(model)
    return optimizer.state[model.b]["exp_avg_sq"]


@pytest.mark.parametrize("name", ["ring", "low_precision"])
def test_parameters_of_two_types(name: str) -> None:
    plain = run_teams(2, in_double, replace(ALGORITHMS[name], gradient_interval=0))
    for corrected, v in zip(run_teams(2, in_double, ALGORITHMS[name]), plain, strict=True):
        assert corrected.dtype is torch.float64 and bool((corrected > 0).all())
        assert corrected.sum() < 0.98 * v.sum()


@pytest.mark.parametrize("make", [adam, adamw])
def test_second_moments_stay_positive(make: Any) -> None:
    """Adam adds weight decay to the gradient; the weights have moved since. One rank's gradient is zero once."""
    for name in ("ring", "low_precision"):
        for v in run_teams(2, moments, ALGORITHMS[name], make, 1e-3):
            assert bool((v >= 0).all()) and bool(v.isfinite().all())


@pytest.mark.parametrize(
    ("algorithm", "interval"),
    [
        (LowPrecisionDecentralized(), 8),
        (LowPrecisionDecentralized(gradient_interval=0), 0),
        (LowPrecisionDecentralized(scale_second_moment=True), None),
        (Decentralized(peer_selection_mode="shift_one"), 8),
        (Decentralized(), None),  # an average of all shows the moments
        (Decentralized(mean_moments=False), None),
        (Decentralized(communication_interval=4), 8),
    ],
)
def test_default(algorithm: Any, interval: int | None) -> None:
    params = [torch.nn.Parameter(torch.zeros(3))]
    assert algorithm.for_optimizers([adamw(params)]).gradient_interval == interval
    plain = algorithm.for_optimizers([torch.optim.SGD(params, lr=0.1)])
    assert not plain.gradient_interval
    assert repr(algorithm).count("gradient_interval") == (algorithm.gradient_interval is not None)


def test_bytes() -> None:
    for make in (LowPrecisionDecentralized, partial(Decentralized, topology="ring")):
        without, sampled = make(gradient_interval=0), make(gradient_interval=4)
        samples = mix("complete", "int4").bytes_per_rank(1000, 4) / 4
        assert sampled.bytes_per_rank(1000, 4) == without.bytes_per_rank(1000, 4) + samples


def test_it_is_told() -> None:
    for _, stats in run_teams(2, follow, LowPrecisionDecentralized(), 2, adamw):
        assert any("gradient_interval" in notice for notice in stats.notices)
    for _, stats in run_teams(2, follow, LowPrecisionDecentralized(), 2):
        assert not stats.notices


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            partial(LowPrecisionDecentralized, gradient_interval=-1),
            "gradient_interval: expected a number of steps >= 0",
        ),
        (partial(Decentralized, gradient_interval=True), "gradient_interval: expected a number of steps >= 0"),
        (partial(LowPrecisionDecentralized, gradient_interval=4, scale_second_moment=True), "contradict"),
        (partial(LowPrecisionDecentralized, gradient_interval=4, scale_second_moment=None), "contradict"),
        (partial(Decentralized, gradient_interval=4, mean_moments=True), "contradict"),
    ],
)
def test_bad_options(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_one_correction_at_a_time() -> None:
    """Where an average of all would show the moments, samples that are asked for take its place."""
    for _, stats in run_teams(2, follow, Decentralized(gradient_interval=4), 3, adamw):
        assert ["gradient_interval" in each for each in stats.notices if "Adam" in each] == [True]


def test_it_needs_adam() -> None:
    def fails(team: Any) -> str:
        model = Quadratic()
        with pytest.raises(ValueError, match="gradient_interval: needs torch.optim.Adam or AdamW, got SGD") as caught:
            bagua.distribute(
                model, torch.optim.SGD(model.parameters(), lr=0.1), LowPrecisionDecentralized(gradient_interval=4),
                process_group=team,
            )  # fmt: skip
        return str(caught.value)

    assert len(run_teams(2, fails)) == 2


def scaled(team: Any, algorithm: Any) -> tuple[torch.Tensor, int]:
    """Second moments of b, and steps of its optimizer, with a GradScaler; once the gradients of rank 0 overflow."""
    model = Quadratic()
    optimizer, scaler = adamw(model.parameters()), bagua.GradScaler("cpu", init_scale=4.0)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    for step in range(8):
        optimizer.zero_grad()
        loss = model(torch.tensor(targets(2, step)[team.rank], dtype=torch.float32))
        scaler.scale(loss * (torch.inf if step == 3 and team.rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    bagua.detach(model)
    state = optimizer.state[model.b]
    return state["exp_avg_sq"], int(state["step"])


@pytest.mark.parametrize("name", ["shift_one", "low_precision"])
def test_a_step_that_is_skipped_leaves_no_trace(name: str) -> None:
    """The gradients of one rank are infinite: nothing is taken back of them."""
    algorithm = replace(ALGORITHMS[name], gradient_interval=1)
    for v, steps in run_teams(2, scaled, algorithm):
        assert bool(v.isfinite().all()) and bool((v > 0).any()) and steps == 7
