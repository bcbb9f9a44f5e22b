"""0/1 Adam equals a plain numpy oracle of its paper, policies included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import ZeroOneAdam
from bagua.comm.team import Team
from bagua.exchanges import AllReduce
from bagua.optim.zero_one_adam import StepKind
from tests.algorithms.momentum import Plain, interrupted
from tests.algorithms.quadratic import N, follow, simulated, start, targets
from tests.rank_threads import run_teams

STEPS, LR, B1, B2, EPS = 44, 0.03, 0.9, 0.99, 1e-8
POLICY = {"var_freeze_step": 14, "var_update_scaler": 3, "local_step_scaler": 6, "local_step_clipper": 4}


def optimizer(params: Any, **options: Any) -> bagua.optim.ZeroOneAdam:
    return bagua.optim.ZeroOneAdam(params, **{"lr": LR, "betas": (B1, B2), **POLICY, **options})


def variance_steps(last: int, kappa: int) -> set[int]:
    """k_1 = 1, k_(j+1) = k_j + 2^floor(j / kappa) with j counted from 0, as the paper has it."""
    found, step, j = set(), 1, 0
    while step <= last:
        found.add(step)
        step, j = step + 2 ** (j // kappa), j + 1
    return found


def meetings(last: int) -> set[int]:
    """Steps after var_freeze_step at whose end all ranks are equal."""
    found, step, interval = set(), POLICY["var_freeze_step"], 1
    while step < last:
        for offset in range(1, POLICY["local_step_scaler"] + 1):
            if offset % interval == 0 or offset == POLICY["local_step_scaler"]:
                found.add(step + offset)
        step, interval = step + POLICY["local_step_scaler"], min(2 * interval, POLICY["local_step_clipper"])
    return found


def mean_of_tensor(v: np.ndarray) -> np.ndarray:
    """For each element the mean of its parameter: x is (b, w)."""
    return np.concatenate([np.full(11, v[:11].mean()), np.full(35, v[11:].mean())])


def oracle(size: int, weight_decay: float = 0.0, decoupled: bool = False) -> np.ndarray:
    """Weights of each rank after each step, [steps, size, N].

    Decoupled, what the interval began with and what was summed since decay with the weights.
    """
    x, m, u = np.tile(start(), (size, 1)), np.zeros((size, N)), np.zeros((size, N))
    v, updates, length, anchor, seen = np.zeros(N), 0, 0.0, start(), []
    exact, meet = variance_steps(POLICY["var_freeze_step"], POLICY["var_update_scaler"]), meetings(STEPS)
    for k in range(1, STEPS + 1):
        g = x - targets(size, k - 1) + (0 if decoupled else weight_decay * x)
        left = 1 - LR * weight_decay if decoupled else 1
        x, u, length, anchor = left * x, left * u, left * length, left * anchor
        size_k = LR / (1 - B1**k)
        m = B1 * m + (1 - B1) * g
        if k in exact:
            v, updates = B2 * v + (1 - B2) * g.mean(0) ** 2, updates + 1
        divisor = np.sqrt(np.maximum(v, 0.01 * mean_of_tensor(v)) / (1 - B2**updates)) + EPS
        x, u, length = x - size_k * m / divisor, u + size_k * m, length + size_k
        if k <= POLICY["var_freeze_step"] or k in meet:
            mean = u.mean(0)
            m, x = np.tile(mean / length, (size, 1)), np.tile(anchor - mean / divisor, (size, 1))
            u, length, anchor = np.zeros((size, N)), 0.0, x[0]
        seen.append(x)
    return np.stack(seen)


def test_policies() -> None:
    own = optimizer([nn.Parameter(torch.ones(1))], var_freeze_step=200, var_update_scaler=3)
    assert {k for k in range(1, 201) if own.kind(k) is StepKind.EXACT} == variance_steps(200, 3)
    own = optimizer([nn.Parameter(torch.ones(1))])
    kinds = {k: own.kind(k) for k in range(15, 100)}
    assert {k for k, kind in kinds.items() if kind in (StepKind.MOMENTUM, StepKind.MEET)} == {
        k for k in meetings(99) if k < 100
    }
    assert {k for k, kind in kinds.items() if kind is StepKind.MOMENTUM} == set(range(15, 21))
    assert len(own.kind(10**9).value) > 0
    assert optimizer([nn.Parameter(torch.ones(1))], local_step_clipper=1).kind(10**6) is StepKind.MOMENTUM


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_with_variance_steps_only_it_is_adam_to_the_last_bit(foreach: bool, decoupled: bool) -> None:
    mine = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]
    theirs = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]
    ours = bagua.optim.ZeroOneAdam(mine, weight_decay=0.1, var_update_scaler=1000, decoupled_weight_decay=decoupled)
    adam = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, weight_decay=0.1, foreach=foreach)
    for step in range(30):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        ours.step()
        adam.step()
        assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("size", "weight_decay", "decoupled"),
    [(1, 0.1, True), (2, 0.0, False), (2, 0.1, True), (3, 0.1, False), (3, 0.1, True), (4, 0.0, False), (8, 0.1, True)],
)
def test_without_loss_it_is_the_oracle(size: int, weight_decay: float, decoupled: bool) -> None:
    algorithm = ZeroOneAdam(codec=Plain(), error_feedback=False)
    options = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled}
    results = run_teams(size, follow, algorithm, STEPS, lambda p: optimizer(p, **options))
    want = oracle(size, weight_decay, decoupled)
    for rank, (seen, _) in enumerate(results):
        assert np.abs(seen - want[:, rank]).max() < 1e-4
        for step in range(STEPS):
            together = step + 1 <= POLICY["var_freeze_step"] or step + 1 in meetings(STEPS)
            assert not together or np.array_equal(seen[step], results[0][0][step]), step


@pytest.mark.parametrize("nodes", [[0, 0, 0, 1], [0, 1, 2]])
def test_hierarchical(nodes: list[int]) -> None:
    algorithm = ZeroOneAdam(codec=Plain(), error_feedback=False, hierarchical=True)
    results = run_teams(len(nodes), follow, algorithm, STEPS, optimizer, nodes=nodes)
    want = oracle(len(nodes))
    assert max(np.abs(seen - want[:, rank]).max() for rank, (seen, _) in enumerate(results)) < 1e-4


def test_1_bit_follows_adam_and_sends_little() -> None:
    size, steps = 2, 240
    options = {"lr": 0.01, "var_freeze_step": 80, "var_update_scaler": 16, "local_step_scaler": 40}
    coarse = simulated(size, ZeroOneAdam(), steps, lambda p: optimizer(p, **options))
    exact = simulated(size, ZeroOneAdam(codec="identity"), steps, lambda p: optimizer(p, **options))
    kinds = optimizer([nn.Parameter(torch.ones(1))], **options).kind
    last = max(k for k in range(1, steps) if kinds(k) is StepKind.MEET)
    assert all(np.array_equal(seen[last - 1], coarse[0][0][last - 1]) for seen, _ in coarse)
    apart = np.linalg.norm(coarse[0][0][-60:] - exact[0][0][-60:], axis=1).mean()
    assert apart < 0.2 * np.linalg.norm(start()), apart
    assert coarse[0][1].total.bytes_sent < exact[0][1].total.bytes_sent
    exchanges = [kinds(k) for k in range(1, steps + 1) if kinds(k) is not StepKind.LOCAL]
    assert len(exchanges) < 0.7 * steps
    one = ZeroOneAdam().bytes_per_rank(N, size)
    sent = sum(AllReduce().bytes_per_rank(N, size) if kind is StepKind.EXACT else one for kind in exchanges)
    assert abs(coarse[0][1].total.bytes_sent - sent) <= steps


def decaying(params: Any) -> bagua.optim.ZeroOneAdam:
    return optimizer(params, weight_decay=0.1, decoupled_weight_decay=True)


@pytest.mark.parametrize(("stops", "make"), [((1, 5, 14, 20, 21, 22, 27, 28), optimizer), ((21, 29), decaying)])
def test_resume_is_bit_identical(stops: tuple[int, ...], make: Any) -> None:
    """In the middle of an interval, too: each rank loads what it saved."""
    for whole, resumed in run_teams(3, interrupted, make, ZeroOneAdam(), stops, 36):
        assert [stop for stop in stops if not torch.equal(whole, resumed[stop])] == []


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: torch.Tensor, use: list[int]) -> torch.Tensor:
        return torch.stack([self.parts[index](x) for index in use]).square().sum()


def branches(team: Team, make: Any) -> list[torch.Tensor]:
    """In local steps each rank uses other parts; part 2 is used for the first time after the variance is fixed."""
    torch.manual_seed(0)
    model = Branches()
    own = make(model.parameters())
    bagua.distribute(model, own, ZeroOneAdam(), process_group=team, bucket_bytes=100)
    for step in range(32):
        own.zero_grad()
        use = [0, 1] if step < 20 else [(step + team.rank) % 2, *([2] if team.rank == 1 else [])]
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step)), use).backward()
        own.step()
    weights = [p.detach().clone() for p in model.parameters()]
    bagua.detach(model)
    return weights


@pytest.mark.parametrize("make", [optimizer, decaying])
def test_ranks_that_use_other_parameters_still_meet(make: Any) -> None:
    results = run_teams(3, branches, make)
    for weights in results:
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(weights, results[0], strict=True))


def late(team: Team, first: int, user: int | None, unfreezes: bool) -> tuple[list[torch.Tensor], float, int, bool]:
    """Part 2 gets its first gradient in step `first` + 1, on rank `user` or on all; saved and loaded, too."""
    torch.manual_seed(0)
    model = Branches()
    own = optimizer(model.parameters())
    algorithm = ZeroOneAdam(codec="minmax_uint8")
    model.parts[2].requires_grad_(not unfreezes)
    bagua.distribute(model, own, algorithm, process_group=team, bucket_bytes=100)
    begun = model.get_parameter("parts.2.weight").detach().clone()
    for step in range(60):
        if step == first and unfreezes:
            model.parts[2].requires_grad_(True)
            bagua.distribute(model, own, algorithm, process_group=team, bucket_bytes=100)
        own.zero_grad()
        uses = unfreezes or (step >= first and user in (None, team.rank))
        model(
            torch.randn(3, 4, generator=torch.Generator().manual_seed(step)), [0, 1, *([2] if uses else [])]
        ).backward()
        own.step()
    bagua.average_parameters(model)
    moved = float((model.get_parameter("parts.2.weight").detach() - begun).abs().max())
    other = optimizer(model.parameters())
    other.load_state_dict(own.state_dict())
    same = all(own.kind(step) is other.kind(step) for step in range(60, 100))
    weights = [p.detach().clone() for p in model.parameters()]
    bagua.detach(model)
    return weights, moved, own.param_groups[0]["begun_after"], same


@pytest.mark.parametrize(
    ("first", "user", "unfreezes", "anew"),
    [
        (9, None, False, 0),  # a variance step is left
        (16, None, False, 17),
        (16, None, True, 17),
        (22, 1, False, 24),  # in the interval of steps 23 and 24
        (22, None, True, 24),
        (60, None, False, 0),  # never
    ],
)
def test_parameters_that_come_after_the_last_variance_step(
    first: int, user: int | None, unfreezes: bool, anew: int
) -> None:
    """Their second moment was 0 for good, so they stood still without a word."""
    results = run_teams(2, late, first, user, unfreezes)
    for weights, moved, begun_after, same in results:
        assert begun_after == anew and same
        assert moved > LR if first < 60 else moved == 0
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(weights, results[0][0], strict=True))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lr": -1.0}, "lr"),
        ({"var_freeze_step": 0}, "var_freeze_step"),
        ({"var_update_scaler": 0}, "var_update_scaler"),
        ({"local_step_scaler": 1.5}, "local_step_scaler"),
        ({"local_step_clipper": 3}, "local_step_clipper.*power of two.*3"),
    ],
)
def test_bad_options(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        optimizer([nn.Parameter(torch.ones(2))], **options)


def test_a_decay_that_leaves_nothing_is_refused() -> None:
    """Where the ranks step alone, sums are divided by what is left of the weights."""
    weight = nn.Parameter(torch.ones(2))
    own = optimizer([weight], lr=1.0, weight_decay=1.0, decoupled_weight_decay=True, local_step_scaler=1)
    weight.grad = torch.ones(2)
    with pytest.raises(ValueError, match="weight_decay: decoupled decay of 1 at a learning rate of 1"):
        for _ in range(STEPS):
            own.step()


def test_groups_share_the_policies() -> None:
    with pytest.raises(ValueError, match="var_freeze_step.*same"):
        optimizer([{"params": [nn.Parameter(torch.ones(2))], "var_freeze_step": 7}])
