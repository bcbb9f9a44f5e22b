"""Warm-up of QAdam and 1-bit LAMB that ends by a test of the second moment: a numpy oracle, and what the ranks do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import Algorithm, OneBitLamb, QAdam
from bagua.algorithms.qadam import MomentumAverage
from bagua.comm.team import Team
from bagua.optim import WarmedUp
from tests.algorithms.momentum import Plain, interrupted, train
from tests.algorithms.quadratic import Quadratic, flat, follow, start, targets
from tests.rank_threads import run_teams

B1, B2, LR = 0.9, 0.95, 0.005  # a window of 20 steps, tested every second
STEPS = 60
MAKE: dict[str, Callable[..., WarmedUp]] = {"qadam": bagua.optim.QAdam, "one_bit_lamb": bagua.optim.OneBitLamb}
WITH: dict[str, Callable[..., MomentumAverage]] = {"qadam": QAdam, "one_bit_lamb": OneBitLamb}


def optimizer(params: Any, name: str = "qadam", **options: Any) -> WarmedUp:
    return MAKE[name](params, **{"lr": LR, "warmup_steps": "auto", "betas": (B1, B2), **options})


def oracle(size: int, decay: float = 0.0, raised_until: int = 0) -> tuple[np.ndarray, int]:
    """Weights of QAdam after each step [STEPS, N], and the steps of its warm-up."""
    x, seen, tests, end = start(), [], {}, 0
    m, v = np.zeros_like(x), np.zeros_like(x)
    for k in range(1, STEPS + 1):
        rate = LR * min(1.0, k / raised_until) if raised_until else LR
        gradient = (x - targets(size, k - 1)).mean(0)
        m = B1 * m + (1 - B1) * gradient
        if not end:
            v = B2 * v + (1 - B2) * gradient**2
        divisor = np.sqrt(v / (1 - B2 ** (end or k))) + 1e-8
        x = x * (1 - rate * decay) - rate / (1 - B1**k) * m / divisor
        seen.append(x)
        if not end and k % 2 == 0:
            tests[k] = v.sum() / (1 - B2**k), rate
            low, high = sorted((tests[k][0], tests.get(k - 20, (np.inf, 0))[0]))
            if low / high >= 0.96 and tests[k][1] <= tests[k - 2][1]:
                end = k
    return np.stack(seen), end


@pytest.mark.parametrize(("size", "decay"), [(1, 0.0), (3, 0.0), (2, 0.3)])
def test_the_end_is_the_oracles(size: int, decay: float) -> None:
    """And so are the weights after every step; exact momenta."""
    want, end = oracle(size, decay)
    assert 20 < end < STEPS - 5, "the oracle must end its warm-up within the run"

    def run(team: Team) -> tuple[np.ndarray, int | None, tuple[str, ...]]:
        made: list[WarmedUp] = []

        def make(params: Any) -> WarmedUp:
            made.append(optimizer(params, weight_decay=decay, decoupled_weight_decay=True))
            return made[0]

        algorithm = QAdam(codec=Plain(), error_feedback=False)
        seen, stats = follow(team, algorithm, STEPS, make, bucket_bytes=100)
        return seen, made[0].warmup_end, tuple(str(each) for each in stats.notices)

    for seen, found, notices in run_teams(size, run):
        assert found == end
        assert np.abs(seen - want).max() < 5e-5
        assert any(f"after {end} steps" in each for each in notices), notices


def test_not_while_the_learning_rate_grows() -> None:
    _, at_once = oracle(1)
    want, end = oracle(1, raised_until=at_once + 3)
    assert end > at_once + 3
    model = Quadratic()
    own = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda k: min(1.0, (k + 1) / (at_once + 3)))
    for step in range(STEPS):
        own.zero_grad()
        model(torch.tensor(targets(1, step)[0], dtype=torch.float32)).backward()
        own.step()
        schedule.step()
    assert own.warmup_end == end
    assert np.abs(flat(model).detach().numpy() - want[-1]).max() < 5e-5


@pytest.mark.parametrize("name", MAKE)
def test_as_with_the_number_of_steps_that_it_finds(name: str) -> None:
    """Quantised too: the same bits, but for the step in which the ranks agree, whose gradient is exact."""

    def run(team: Team, steps: int | str) -> tuple[np.ndarray, int | None]:
        made: list[WarmedUp] = []

        def make(params: Any) -> WarmedUp:
            made.append(optimizer(params, name, warmup_steps=steps))
            return made[0]

        algorithm: Algorithm = WITH[name](codec="minmax_uint8")
        seen, _ = follow(team, algorithm, STEPS, make)
        return seen, made[0].warmup_end

    (found, end), (other, _) = run_teams(2, run, "auto")
    assert end is not None and np.array_equal(found, other)
    known, _ = run_teams(2, run, end)[0]
    assert np.array_equal(found[:end], known[:end])
    assert 0 < np.abs(found[end] - known[end]).max() < 0.01, "one step with an exact gradient"


@pytest.mark.parametrize("name", MAKE)
def test_saved_and_loaded(name: str) -> None:
    """Before, at and after the step in which the test holds; tests are part of the state dict."""
    end = run_teams(2, _end, name)[0]

    def run(team: Team) -> Any:
        return interrupted(team, lambda p: optimizer(p, name), WITH[name](), [end - 9, end, end + 1, end + 4], end + 8)

    for whole, resumed in run_teams(2, run):
        for stop, other in resumed.items():
            assert torch.equal(whole, other), stop


def _end(team: Team, name: str) -> int:
    model = Quadratic()
    own = optimizer(model.parameters(), name)
    bagua.distribute(model, own, WITH[name](), process_group=team, bucket_bytes=100)
    train(team, model, own, range(STEPS))
    bagua.detach(model)
    assert own.warmup_end is not None
    return own.warmup_end


def test_one_rank_that_does_not_find_so_is_enough() -> None:
    """A rank whose second moment differs at first: the others go on with it, and all end after the same step."""
    end, later = run_teams(2, _end, "qadam")[0], 4

    def run(team: Team) -> tuple[np.ndarray, int | None]:
        model = Quadratic()
        own = optimizer(model.parameters())
        bagua.distribute(model, own, QAdam(codec=Plain()), process_group=team)
        for step in range(end + later):
            train(team, model, own, range(step, step + 1))
            if step + 1 == end:
                assert own.stable
                if team.rank == 1:
                    (*tests, (at, norm, rate)) = own.param_groups[0]["variance_tests"]
                    own.param_groups[0]["variance_tests"] = (*tests, (at, 9 * norm, rate))
            if step == end:
                assert own.warmup_end is None
        bagua.detach(model)
        return flat(model).detach().numpy().copy(), own.warmup_end

    (one, its_end), (other, other_end) = run_teams(2, run)
    assert its_end == other_end and np.array_equal(one, other)


def test_a_step_without_gradients_ends_nothing() -> None:
    model = nn.Linear(2, 1)
    own = optimizer(model.parameters(), betas=(0.5, 0.5))
    for _ in range(40):
        if own.stable and own.awaits_verdict:
            break
        own.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        own.step()
    held, before = own.num_steps, copy.deepcopy(own.state_dict()["param_groups"])
    own.zero_grad()
    own.step()
    assert own.stable and own.warmup_end is None and own.state_dict()["param_groups"] == before
    model(torch.ones(1, 2)).sum().backward()
    own.step()
    assert own.warmup_end == held and not own.awaits_verdict


def test_groups_added_later_share_the_end() -> None:
    model, late = nn.Linear(2, 1), nn.Parameter(torch.ones(2))
    own = optimizer(model.parameters(), betas=(0.5, 0.5))
    for _ in range(40):
        own.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        own.step()
    assert own.warmup_end
    own.add_param_group({"params": [late]})
    assert own.param_groups[1]["warmup_end"] == own.warmup_end


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "soon", None])
@pytest.mark.parametrize("name", MAKE)
def test_bad_lengths(name: str, steps: Any) -> None:
    with pytest.raises(ValueError, match="warmup_steps"):
        optimizer([nn.Parameter(torch.ones(2))], name, warmup_steps=steps)
