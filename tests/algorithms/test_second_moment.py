"""`scale_second_moment` of local_sgd and diloco: a numpy oracle, what it does to second moments, and its default."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import (
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
    Warmup,
)
from bagua.comm.team import Team
from tests.algorithms.defaults import told_and_kept
from tests.algorithms.momentum import interrupted
from tests.algorithms.quadratic import N, Quadratic, flat, follow, simulated, start, targets
from tests.rank_threads import run_teams

STEPS, LR, B1, B2, EPS, EVERY = 27, 0.05, 0.9, 0.97, 1e-8, 8
TOLERANCE = 2e-4
LOCAL = LocalSGD(communication_interval=3, scale_second_moment=True)
OUTER = DiLoCo(
    communication_interval=6,
    outer_lr=1.0,
    outer_momentum=0.0,
    nesterov=False,
    codec="identity",
    scale_second_moment=True,
)


def adamw(params: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **{"lr": LR, "betas": (B1, B2), "eps": EPS, "weight_decay": 0.1, **options})


def oracle(size: int, interval: int, begin: int = 0, scaled: bool = True) -> np.ndarray:
    """Weights after each step, [STEPS, size, N]: averages every `interval` steps; mean gradients before `begin`."""
    x = np.tile(start(), (size, 1))
    m, v, old, seen = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x), []
    since = begin
    for k in range(1, STEPS + 1):
        gradients = x - targets(size, k - 1)
        if k <= begin:
            gradients = np.tile(gradients.mean(0), (size, 1))
        m, v = B1 * m + (1 - B1) * gradients, B2 * v + (1 - B2) * gradients**2
        x = x * (1 - 0.1 * LR) - LR / (1 - B1**k) * m / (np.sqrt(v / (1 - B2**k)) + EPS)
        if k <= begin:
            old = v.copy()
        elif scaled and k % EVERY == 0:
            kept = B2 ** (k - since)
            new = v - kept * old
            v = kept * old + new / size + (1 - 1 / size) * np.minimum((1 - kept) * m**2, new)
            old, since = v.copy(), k
        if k > begin and k % interval == 0:
            x = np.tile(x.mean(0), (size, 1))
        seen.append(x)
    return np.stack(seen)


def check(results: list, want: np.ndarray) -> None:
    for rank, result in enumerate(results):
        assert np.abs(result[0] - want[:, rank]).max() < TOLERANCE


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("algorithm", "interval"), [(LOCAL, 3), (OUTER, 6)], ids=["local_sgd", "diloco"])
def test_is_the_oracles(size: int, algorithm: LocalSGD | DiLoCo, interval: int) -> None:
    results = run_teams(size, partial(follow, bucket_bytes=8), algorithm, STEPS, adamw)
    check(results, oracle(size, interval))
    if size > 1:
        apart = np.abs(oracle(size, interval) - oracle(size, interval, scaled=False)).max()
        assert apart > 100 * TOLERANCE, "the oracle would not notice"


def test_nothing_is_sent_for_it() -> None:
    plain = LocalSGD(communication_interval=3, scale_second_moment=False, mean_moments=False)
    scaled, without = (run_teams(2, follow, each, STEPS, adamw)[0][1].total.bytes_sent for each in (LOCAL, plain))
    assert scaled == without > 0
    assert LOCAL.bytes_per_rank(N, 2) == plain.bytes_per_rank(N, 2)


@pytest.mark.parametrize("begin", [5, 8])
def test_second_moments_of_a_warmup_are_kept(begin: int) -> None:
    """They come from mean gradients already: only what local gradients add is corrected."""
    check(run_teams(3, follow, Warmup(begin, "gradient_allreduce", LOCAL), STEPS, adamw), oracle(3, 3, begin))


@pytest.mark.parametrize("algorithm", [LOCAL, OUTER], ids=["local_sgd", "diloco"])
def test_resume_is_bit_identical(algorithm: LocalSGD | DiLoCo) -> None:
    """Between two corrections, and right after one. Weights differ by rank, so each loads its own."""
    for whole, resumed in run_teams(2, interrupted, adamw, algorithm, [6, 12, 16], 20):
        for stop, other in resumed.items():
            assert torch.equal(whole, other), stop


def test_second_moments_are_those_of_mean_gradients() -> None:
    """On average over the elements, in a long run at the optimum; without, they are `size` times as large."""
    size, steps = 4, 120
    held: dict[str, list[torch.optim.Optimizer]] = {}

    def make(name: str, params: Any) -> torch.optim.Optimizer:
        held.setdefault(name, []).append(adamw(params, lr=1e-3, weight_decay=0.0))
        return held[name][-1]

    algorithms = {
        "ddp": GradientAllReduce(),
        "scaled": LOCAL,
        "local": LocalSGD(communication_interval=3, scale_second_moment=False, mean_moments=False),
    }
    for name, algorithm in algorithms.items():
        simulated(size, algorithm, steps, partial(make, name))
    mean = {
        name: np.mean([float(slot["exp_avg_sq"].mean()) for each in optimizers for slot in each.state.values()])
        for name, optimizers in held.items()
    }
    assert abs(mean["scaled"] / mean["ddp"] - 1) < 0.25, mean
    assert mean["local"] / mean["ddp"] > 1.25 * mean["scaled"] / mean["ddp"], mean


def test_parameters_without_gradients_are_left_alone() -> None:
    """Never used, and used until the fifth step."""

    class Three(Quadratic):
        def __init__(self) -> None:
            super().__init__()
            self.never, self.early = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))

    def run(team: Team) -> list[torch.Tensor]:
        model = Three()
        own = adamw(model.parameters())
        bagua.distribute(model, own, LOCAL, process_group=team)
        held = []
        for step in range(24):
            own.zero_grad()
            loss = model(torch.tensor(targets(2, step)[team.rank], dtype=torch.float32))
            (loss + model.early.square().sum() if step < 5 else loss).backward()
            own.step()
            if step >= 7:
                held.append(own.state[model.early]["exp_avg_sq"].clone())
        assert model.never not in own.state or not own.state[model.never]["exp_avg_sq"].any()
        bagua.detach(model)
        return held

    for held in run_teams(2, run):
        assert all(torch.equal(each, held[0]) for each in held) and held[0].all()


def test_state_loaded_from_outside_is_taken_as_it_is() -> None:
    """An optimizer's state dict without bagua's: nothing is known of what local gradients have added."""

    def run(team: Team) -> tuple[torch.Tensor, torch.Tensor]:
        trained = adamw(Quadratic().parameters())
        for group in trained.param_groups:
            for param in group["params"]:
                param.grad = torch.full_like(param, 3.0)
        for _ in range(50):
            trained.step()
        model = Quadratic()
        own = adamw(model.parameters())
        bagua.distribute(model, own, LOCAL, process_group=team)
        own.load_state_dict(copy.deepcopy(trained.state_dict()))
        for _ in range(8):
            own.zero_grad()
            flat(model).mul(0).sum().backward()
            own.step()
        bagua.detach(model)
        return own.state[model.w]["exp_avg_sq"], trained.state[next(iter(trained.state))]["exp_avg_sq"]

    for now, before in run_teams(2, run):
        assert torch.allclose(now, before * B2**8, rtol=1e-5)


def test_fused_optimizers() -> None:
    results = run_teams(2, follow, LOCAL, STEPS, lambda params: bagua.optim.fuse(adamw(params)))
    check(results, oracle(2, 3))


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "decentralized", "low_precision_decentralized", "async"])
@pytest.mark.parametrize(
    ("make", "dtype", "option", "scales"),
    [
        (adamw, torch.float32, {}, True),
        (adamw, torch.float32, {"scale_second_moment": False}, False),
        (partial(adamw, amsgrad=True), torch.float32, {}, False),
        (adamw, torch.bfloat16, {}, False),
        (partial(torch.optim.SGD, lr=LR), torch.float32, {}, False),
        (partial(torch.optim.RMSprop, lr=LR), torch.float32, {}, False),
    ],
    ids=["adamw", "refused", "amsgrad", "16 bits", "sgd", "rmsprop"],
)
def test_choice_depends_on_the_optimizer_and_is_told(
    name: str, make: Any, dtype: torch.dtype, option: dict[str, Any], scales: bool
) -> None:
    others: dict[str, Any] = {"mean_moments": False} if name in ("decentralized", "local_sgd", "diloco") else {}
    others["scale_second_moment"] = None  # the choice has to be asked for

    def rank_main(team: Team) -> tuple[tuple[str, ...], set[str]]:
        def loss(model: nn.Module, step: int) -> torch.Tensor:
            return model(torch.tensor(targets(2, step)[team.rank], dtype=dtype))

        return told_and_kept(team, name, Quadratic().to(dtype), make, loss, **{**others, **option})

    for notices, kept in run_teams(2, rank_main):
        assert ("second_moment" in kept) == scales
        assert any("scale_second_moment" in each for each in notices) == scales


@pytest.mark.parametrize(
    "algorithm",
    [LocalSGD(), DiLoCo(), LowPrecisionDecentralized(), Decentralized(peer_selection_mode="shift_one")],
    ids=lambda each: each.name,
)
def test_local_steps_are_those_of_the_optimizer_by_default(algorithm: Any) -> None:
    asked = replace(algorithm, scale_second_moment=False)
    for each, other in zip(*(run_teams(2, follow, one, STEPS, adamw) for one in (algorithm, asked)), strict=True):
        assert np.array_equal(each[0], other[0])
        assert not any("scale_second_moment" in notice for notice in each[1].notices)


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_bad_options(name: str) -> None:
    with pytest.raises(ValueError, match="scale_second_moment.*expected a bool or None, got 1"):
        bagua.algorithms.get(name, scale_second_moment=1)

    def refused(team: Team, make: Any) -> str:
        model = Quadratic()
        with pytest.raises(ValueError) as error:
            bagua.distribute(model, make(model.parameters()), name, process_group=team, scale_second_moment=True)
        return str(error.value)

    for make, word in ((partial(torch.optim.SGD, lr=0.1), "SGD"), (partial(adamw, amsgrad=True), "amsgrad")):
        assert all("scale_second_moment" in each and word in each for each in run_teams(2, refused, make))
