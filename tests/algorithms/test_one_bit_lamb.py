"""1-bit LAMB equals a plain numpy oracle, with its own scaling and with that of the paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import OneBitLamb
from tests.algorithms.momentum import Plain, interrupted
from tests.algorithms.quadratic import SHAPES, N, follow, simulated, start, targets
from tests.rank_threads import run_teams

STEPS, WARMUP, LR, B1, B2, EPS = 30, 12, 0.05, 0.9, 0.99, 1e-8
BOUNDS = {"max_coeff": 5.0, "min_coeff": 0.2, "coeff_beta": 0.8}
FACTORS = {"factor_max": 1.15, "factor_min": 0.85, "factor_threshold": 0.05}
B = int(np.prod(SHAPES["b"]))
LAYERS = [slice(0, B), slice(B, N)]


def optimizer(params: Any, **options: Any) -> bagua.optim.OneBitLamb:
    defaults = {"lr": LR, "warmup_steps": WARMUP, "betas": (B1, B2), **BOUNDS, **FACTORS}
    return bagua.optim.OneBitLamb(params, **{**defaults, **options})


def within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def oracle(
    size: int, weight_decay: float, decoupled: bool = True, paper: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Weights after each step; with the scaling of the paper the factors of each layer after the warm-up."""
    x, m, v = start(), np.zeros(N), np.zeros(N)
    fixed, coeff, factor = np.zeros(N), [0.0, 0.0], [1.0, 1.0]
    seen, factors = [], []
    for k in range(1, STEPS + 1):
        g = (x - targets(size, k - 1)).mean(0)
        before, m = m, B1 * m + (1 - B1) * g
        if not decoupled:
            m = m + (1 - B1) * weight_decay * x
        reconstructed = (m - B1 * before) / (1 - B1)
        if k == WARMUP + 1:
            fixed = v / (1 - B2**WARMUP)
        v = B2 * v + (1 - B2) * reconstructed**2
        x = x.copy()
        for layer, at in enumerate(LAYERS):
            now = v[at] / (1 - B2**k)
            p = m[at] / (1 - B1**k) / (np.sqrt(fixed[at] if paper and k > WARMUP else now) + EPS)
            u = p + (weight_decay * x[at] if decoupled else 0)
            if k <= WARMUP or not paper:
                c = within(np.linalg.norm(x[at]) / np.linalg.norm(u), BOUNDS["min_coeff"], BOUNDS["max_coeff"])
                coeff[layer] = c if k == 1 else 0.8 * coeff[layer] + 0.2 * c
            else:
                f = ((np.sqrt(fixed[at]) + EPS) / (np.sqrt(now) + EPS)).max()
                share = min(1.0, np.linalg.norm(p) / np.linalg.norm(u))
                f = within(f * share + 1 - share, FACTORS["factor_min"], FACTORS["factor_max"])
                factor[layer] = within(f, factor[layer] * 0.95, factor[layer] * 1.05)
                c = coeff[layer] * factor[layer]
            x[at] -= LR * c * u
        seen.append(x)
        factors.append(list(factor))
    return np.stack(seen), np.array(factors)


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize(
    ("size", "weight_decay", "decoupled"),
    [(1, 0.1, True), (2, 0.0, True), (2, 0.1, True), (3, 0.1, False), (3, 0.1, True), (4, 0.0, True), (8, 0.1, True)],
)
def test_without_loss_it_is_the_oracle(size: int, weight_decay: float, decoupled: bool, paper: bool) -> None:
    algorithm = OneBitLamb(codec=Plain(), error_feedback=False)
    options = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled, "fixed_scaling": paper}
    results = run_teams(size, follow, algorithm, STEPS, lambda p: optimizer(p, **options))
    want, factors = oracle(size, weight_decay, decoupled, paper)
    for seen, _ in results:
        assert np.abs(seen - want).max() < 1e-4
        assert np.array_equal(seen, results[0][0])
    assert not paper or len(np.unique(factors)) > 5, "the bounds of this run let nothing through"


def test_1_bit_follows_lamb() -> None:
    size, steps = 2, 130
    exact, coarse = (
        simulated(size, algorithm, steps, lambda p: optimizer(p, lr=0.01, warmup_steps=40))
        for algorithm in (OneBitLamb(codec="identity"), OneBitLamb())
    )
    assert all(np.array_equal(seen, coarse[0][0]) for seen, _ in coarse)
    apart = np.linalg.norm(coarse[0][0] - exact[0][0], axis=1)[-40:].mean()
    assert apart < 0.15 * np.linalg.norm(start()), apart
    assert coarse[0][1].total.bytes_sent < exact[0][1].total.bytes_sent


def test_the_factor_stays_1_while_gradients_keep_their_size() -> None:
    """After a warm-up far shorter than 1 / (1 - b2): v itself still grows, and must not be taken for gradients."""
    param = nn.Parameter(torch.ones(6))
    own = bagua.optim.OneBitLamb([param], lr=1e-4, warmup_steps=5, fixed_scaling=True)
    for step in range(40):
        param.grad = torch.full((6,), 1.0 if step % 2 else -1.0)
        own.step()
    assert abs(own.state[param]["factor"] - 1) < 0.02


@pytest.mark.parametrize("nodes", [[0, 0, 0, 1], [0, 1, 2]])
def test_hierarchical(nodes: list[int]) -> None:
    algorithm = OneBitLamb(codec=Plain(), error_feedback=False, hierarchical=True)
    results = run_teams(len(nodes), follow, algorithm, STEPS, optimizer, nodes=nodes)
    assert max(np.abs(seen - oracle(len(nodes), 0.0)[0]).max() for seen, _ in results) < 1e-4


@pytest.mark.parametrize("paper", [False, True])
def test_resume_is_bit_identical(paper: bool) -> None:
    stops = (4, WARMUP, WARMUP + 1, WARMUP + 5)
    make = lambda params: optimizer(params, fixed_scaling=paper)  # noqa: E731
    results = run_teams(3, interrupted, make, OneBitLamb(), stops, WARMUP + 9)
    for whole, resumed in results:
        assert [stop for stop in stops if not torch.equal(whole, resumed[stop])] == []
        assert torch.equal(whole, results[0][0])


@pytest.mark.parametrize("paper", [False, True])
def test_zero_weights_and_unused_elements(paper: bool) -> None:
    """A layer of zeros takes steps of its own length; elements without gradients stay after the warm-up."""
    param = nn.Parameter(torch.zeros(6))
    own = optimizer([param], warmup_steps=3, fixed_scaling=paper)
    for step in range(8):
        noise = 0.1 if step > 3 else 0.0  # of a codec
        param.grad = torch.tensor([1.0, -1.0, 0.5, 2.0, noise, -noise])
        own.step()
    assert (param[:4] != 0).all() and torch.equal(param[4:], torch.zeros(2)) and param.isfinite().all()


def test_scaling_follows_the_weights() -> None:
    """Weights that have grown since the warm-up take longer steps, which the paper's scaling does not see."""
    moved = []
    for paper in (False, True):
        param = nn.Parameter(torch.full((8,), 0.2))
        own = optimizer([param], warmup_steps=5, max_coeff=100.0, min_coeff=0.0, fixed_scaling=paper)
        for step in range(12):
            if step == 8:
                param.data.mul_(10)
            before = param.detach().clone()
            param.grad = torch.full((8,), -1.0)
            own.step()
        moved.append(float((param.detach() - before).norm()))
    assert moved[0] > 5 * moved[1] > 0


def test_a_state_with_fixed_scaling_goes_on_without() -> None:
    """The second moment that was followed beside the fixed one takes its place."""

    def steps(own: bagua.optim.OneBitLamb, param: nn.Parameter, begin: int, end: int) -> None:
        for step in range(begin, end):
            param.grad = torch.sin(torch.arange(6.0) + step)
            own.step()

    param = nn.Parameter(torch.ones(6))
    fixed = optimizer([param], warmup_steps=3, fixed_scaling=True)
    steps(fixed, param, 0, 8)
    saved = fixed.state_dict()
    del saved["param_groups"][0]["fixed_scaling"]  # as saved before there was this option
    followed = fixed.state[param]["exp_avg_sq_fresh"].clone()
    own = optimizer([param], warmup_steps=3)
    own.load_state_dict(saved)
    slot = own.state[param]
    assert torch.equal(slot["exp_avg_sq"], followed.clamp(min=float(followed.mean()) * 0.01))
    assert slot["num_updates"] == 8
    assert not {"coeff", "factor", "floor", "exp_avg_sq_fresh"} & set(slot)
    before = param.detach().clone()
    steps(own, param, 8, 9)
    assert param.isfinite().all() and not torch.equal(param, before)
    with pytest.raises(ValueError, match="without fixed_scaling, at step 9, after warmup_steps=3"):
        state = own.state_dict()
        state["param_groups"][0]["fixed_scaling"] = True
        own.load_state_dict(state)


def test_unused_elements_of_a_state_of_adam_stay_too() -> None:
    """Loaded past the warm-up: nothing has raised its second moment yet."""
    param = nn.Parameter(torch.ones(4))
    adam = torch.optim.Adam([param])
    for _ in range(WARMUP + 3):
        param.grad = torch.tensor([1.0, -1.0, 0.5, 0.0])
        adam.step()
    own = optimizer([param])
    own.load_state_dict(adam.state_dict())
    before = param.detach().clone()
    for sign in (1, -1, -1):
        param.grad = torch.tensor([1.0, -1.0, 0.5, 0.1 * sign])
        own.step()
    assert param[3] == before[3] and (param[:3] != before[:3]).all() and param.isfinite().all()


def test_state_of_another_optimizer_past_the_warm_up_is_refused() -> None:
    param = nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([param])
    for _ in range(WARMUP):
        param.grad = torch.ones(3)
        adam.step()
    with pytest.raises(ValueError, match="another optimizer.*step 12.*warmup_steps=12"):
        optimizer([param], fixed_scaling=True).load_state_dict(adam.state_dict())
    optimizer([param]).load_state_dict(adam.state_dict())  # LAMB goes on from Adam's moments


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lr": -1.0}, "lr"),
        ({"warmup_steps": 0}, "warmup_steps"),
        ({"min_coeff": -1.0}, "min_coeff"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "max_coeff"),
        ({"coeff_beta": 1.5}, "coeff_beta"),
        ({"factor_min": 2.0}, "factor_min"),
        ({"factor_max": 0.5}, "factor_max"),
        ({"factor_threshold": 0.0}, "factor_threshold"),
        ({"fixed_scaling": 1}, "fixed_scaling"),
    ],
)
def test_bad_options(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        optimizer([nn.Parameter(torch.ones(2))], **options)
