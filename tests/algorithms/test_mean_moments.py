"""`mean_moments` of decentralized: a numpy oracle, and that Adam's moments are then those of the mean gradient."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import Decentralized, Warmup
from bagua.comm.team import Team
from tests.algorithms.defaults import told_and_kept
from tests.algorithms.momentum import interrupted
from tests.algorithms.quadratic import N, Quadratic, follow, start, targets
from tests.rank_threads import run_teams

STEPS, LR, B1, B2, EPS, DECAY = 24, 0.05, 0.9, 0.97, 1e-8, 0.1
TOLERANCE = 2e-4
MEAN = Decentralized(mean_moments=True)
PLAIN = Decentralized(mean_moments=False)


def adamw(params: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **{"lr": LR, "betas": (B1, B2), "eps": EPS, "weight_decay": DECAY, **options})


def oracle(size: int, inferred: bool = True, begin: int = 0, falling: bool = False) -> np.ndarray:
    """Weights after each step, [STEPS, size, N]; mean gradients before `begin`, whose first local step is not inferred.

    Momenta and gradients are inferred from the ranks' displacements, not from their gradients.
    """
    x = np.tile(start(), (size, 1))
    m, v = np.zeros_like(x), np.zeros_like(x)
    m_before, v_before, seen, length, divisor = m.copy(), v.copy(), [], 0.0, np.ones_like(x)
    for k in range(1, STEPS + 1):
        lr = LR * 0.97 ** (k - 1) if falling else LR
        gradients = x - targets(size, k - 1)
        if k <= begin:
            gradients = np.tile(gradients.mean(0), (size, 1))
        else:
            mean = x.mean(0)
            if inferred and length:
                m = m + divisor * (x - mean) / length
                g = (m - B1 * m_before) / (1 - B1)
                v = B2 * v_before + (1 - B2) * g**2
            m_before, v_before, x = m.copy(), v.copy(), np.tile(mean, (size, 1))
        m, v = B1 * m + (1 - B1) * gradients, B2 * v + (1 - B2) * gradients**2
        length, divisor = lr / (1 - B1**k), np.sqrt(v / (1 - B2**k)) + EPS
        x = x * (1 - lr * DECAY) - length * m / divisor
        if begin and k <= begin + 1:
            length = 0.0
        seen.append(x)
    return np.stack(seen)


def check(results: list, want: np.ndarray) -> None:
    for rank, result in enumerate(results):
        assert np.abs(result[0] - want[:, rank]).max() < TOLERANCE


@pytest.mark.parametrize("size", [1, 2, 4])
def test_is_the_oracles(size: int) -> None:
    check(run_teams(size, partial(follow, bucket_bytes=8), MEAN, STEPS, adamw), oracle(size))
    if size > 1:
        apart = np.abs(oracle(size) - oracle(size, inferred=False)).max()
        assert apart > 100 * TOLERANCE, "the oracle would not notice"


def test_the_learning_rate_is_that_of_the_step() -> None:
    """Not the one that a scheduler has set since."""
    size = 3

    def run(team: Team) -> np.ndarray:
        model = Quadratic()
        own = adamw(model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(own, 0.97)
        bagua.distribute(model, own, MEAN, process_group=team)
        seen = []
        for step in range(STEPS):
            own.zero_grad()
            model(torch.tensor(targets(size, step)[team.rank], dtype=torch.float32)).backward()
            own.step()
            schedule.step()
            seen.append(torch.cat([model.b.detach(), model.w.detach().reshape(-1)]).double().numpy())
        bagua.detach(model)
        return np.stack(seen)

    want = oracle(size, falling=True)
    for rank, seen in enumerate(run_teams(size, run)):
        assert np.abs(seen - want[:, rank]).max() < TOLERANCE


def test_after_a_warm_up() -> None:
    """The moments at hand are those of mean gradients; the first local step adds to them as it is."""
    check(run_teams(3, follow, Warmup(6, "gradient_allreduce", MEAN), STEPS, adamw), oracle(3, begin=6))


def test_hierarchical() -> None:
    algorithm = Decentralized(mean_moments=True, hierarchical=True)
    check(run_teams(3, follow, algorithm, STEPS, adamw, nodes=[0, 0, 1]), oracle(3))


def test_fused_optimizers() -> None:
    check(run_teams(2, follow, MEAN, STEPS, lambda params: bagua.optim.fuse(adamw(params))), oracle(2))


def test_little_is_sent_for_it() -> None:
    """A number for each of two parameters and step, in chunks of 16."""
    runs = [run_teams(2, follow, each, STEPS, adamw)[0][1] for each in (MEAN, PLAIN)]
    assert 0 < runs[0].total.bytes_sent - runs[1].total.bytes_sent <= STEPS * 2 * 16 * 4
    assert MEAN.bytes_per_rank(N, 2) == PLAIN.bytes_per_rank(N, 2)


def test_resume_is_bit_identical() -> None:
    """Weights differ by rank, so each loads its own."""
    for whole, resumed in run_teams(2, interrupted, adamw, MEAN, [1, 7, 12], 18):
        for stop, other in resumed.items():
            assert torch.equal(whole, other), stop


def second_moment(team: Team, algorithm: Any) -> float:
    """Mean over the elements, after 80 steps with a small learning rate."""
    model = Quadratic()
    own = adamw(model.parameters(), lr=1e-3, weight_decay=0.0)
    bagua.distribute(model, own, algorithm, process_group=team)
    for step in range(80):
        own.zero_grad()
        model(torch.tensor(targets(4, step)[team.rank], dtype=torch.float32)).backward()
        own.step()
    bagua.detach(model)
    return float(torch.cat([own.state[p]["exp_avg_sq"].reshape(-1) for p in (model.b, model.w)]).mean())


def test_second_moments_are_those_of_mean_gradients() -> None:
    algorithms = ("gradient_allreduce", MEAN, PLAIN)
    exact, mean, local = (np.mean(run_teams(4, second_moment, each)) for each in algorithms)
    assert abs(mean / exact - 1) < 0.15, mean / exact  # the last gradient is still the rank's own
    assert local / exact > 1.4, local / exact


def test_averages_of_weights_in_between_are_not_taken_for_steps() -> None:
    """After `bagua.average_parameters` the next average shows no displacement, which would look like a gradient."""

    def run(team: Team) -> bool:
        model = Quadratic()
        own = adamw(model.parameters())
        bagua.distribute(model, own, MEAN, process_group=team)

        def backward(step: int) -> None:
            own.zero_grad()
            model(torch.tensor(targets(2, step)[team.rank], dtype=torch.float32)).backward()

        for step in range(6):
            backward(step)
            own.step()
        bagua.average_parameters(model)
        before = [own.state[p][name].clone() for p in (model.b, model.w) for name in ("exp_avg", "exp_avg_sq")]
        backward(6)
        bagua.pause(model)  # completes the average
        now = [own.state[p][name] for p in (model.b, model.w) for name in ("exp_avg", "exp_avg_sq")]
        same = all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        bagua.detach(model)
        return same

    assert run_teams(2, run) == [True, True]


def test_steps_that_are_mostly_rounding_are_left_alone() -> None:
    """At the start of a warm-up of the learning rate: the moments are those of plain gossip, bit for bit."""
    size, steps = 3, 12

    def run(team: Team, algorithm: Decentralized, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
        model = Quadratic()
        own = adamw(model.parameters(), lr=lr, weight_decay=0.0)
        bagua.distribute(model, own, algorithm, process_group=team)
        for step in range(steps):
            own.zero_grad()
            model(torch.tensor(targets(size, step)[team.rank], dtype=torch.float32)).backward()
            own.step()
        bagua.detach(model)
        return own.state[model.w]["exp_avg"], own.state[model.w]["exp_avg_sq"]

    for lr, same in ((1e-8, True), (1e-3, False)):
        for mean, plain in zip(run_teams(size, run, MEAN, lr), run_teams(size, run, PLAIN, lr), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mean, plain, strict=True)) is same


def test_a_growing_learning_rate() -> None:
    """From steps that are mostly rounding to large ones: no moment is inferred from an unknown one before it."""
    size = 3

    def run(team: Team) -> float:
        model = Quadratic()
        own = adamw(model.parameters(), weight_decay=0.0)
        bagua.distribute(model, own, MEAN, process_group=team)
        largest = 0.0
        for step in range(20):
            own.param_groups[0]["lr"] = 1e-9 * 2**step
            own.zero_grad()
            model(torch.tensor(targets(size, step)[team.rank], dtype=torch.float32)).backward()
            assert model.w.grad is not None and model.b.grad is not None
            largest = max(largest, float(torch.cat([model.w.grad.flatten(), model.b.grad]).abs().max()))
            own.step()
            assert all(
                torch.isfinite(own.state[p][key]).all() for p in (model.w, model.b) for key in ("exp_avg", "exp_avg_sq")
            )
        bagua.detach(model)
        most = max(float(own.state[p]["exp_avg_sq"].max()) for p in (model.w, model.b))
        return most / largest**2 / (1 - B2**20)

    assert max(run_teams(size, run)) < 1  # no inferred gradient was larger than all gradients


def test_parameters_without_gradients_are_left_alone() -> None:
    """Never used; used on rank 0 only; used until the fifth step."""

    class More(Quadratic):
        def __init__(self) -> None:
            super().__init__()
            self.never, self.early = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
            self.mine = nn.Parameter(torch.ones(2))

    def run(team: Team) -> list[torch.Tensor]:
        model = More()
        own = adamw(model.parameters(), weight_decay=0.0)
        bagua.distribute(model, own, MEAN, process_group=team)
        for step in range(16):
            own.zero_grad()
            loss = model(torch.tensor(targets(2, step)[team.rank], dtype=torch.float32))
            loss = loss + model.early.square().sum() if step < 5 else loss
            (loss + model.mine.square().sum() if team.rank == 0 else loss).backward()
            own.step()
        bagua.average_parameters(model)
        assert not own.state.get(model.never, {}).get("exp_avg", torch.zeros(1)).any()
        bagua.detach(model)
        return [p.detach().clone() for p in model.parameters()]

    one, other = run_teams(2, run)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(one, other, strict=True))


def test_a_parameter_that_is_changed_after_the_step_keeps_its_own_moments() -> None:
    """As by a clamp: bit for bit those of plain gossip. The other parameter's are inferred."""
    size, steps = 3, 12

    def run(team: Team, algorithm: Decentralized) -> dict[str, torch.Tensor]:
        model = Quadratic()
        own = adamw(model.parameters())
        bagua.distribute(model, own, algorithm, process_group=team)
        for step in range(steps):
            own.zero_grad()
            model(torch.tensor(targets(size, step)[team.rank], dtype=torch.float32)).backward()
            own.step()
            model.w.data.mul_(0.99)
        bagua.detach(model)
        return {name: own.state[param]["exp_avg_sq"] for name, param in model.named_parameters()}

    for mean, plain in zip(run_teams(size, run, MEAN), run_teams(size, run, PLAIN), strict=True):
        assert torch.equal(mean["w"], plain["w"])
        assert not torch.allclose(mean["b"], plain["b"], rtol=0.1)


@pytest.mark.parametrize(
    ("make", "dtype", "options", "means"),
    [
        (adamw, torch.float32, {}, True),
        (torch.optim.Adam, torch.float64, {"hierarchical": True}, True),
        (adamw, torch.float32, {"mean_moments": False}, False),
        (adamw, torch.float32, {"scale_second_moment": True}, False),
        (adamw, torch.float32, {"scale_second_moment": False}, True),
        (adamw, torch.float32, {"scale_second_moment": None}, True),
        (adamw, torch.float32, {"topology": "ring"}, False),
        (adamw, torch.float32, {"peer_selection_mode": "shift_one"}, False),
        (adamw, torch.float32, {"communication_interval": 2}, False),
        (adamw, torch.float32, {"codec": "bf16"}, False),
        (partial(adamw, amsgrad=True), torch.float32, {}, False),
        (adamw, torch.bfloat16, {}, False),
        (partial(torch.optim.SGD, lr=LR), torch.float32, {}, False),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_default_depends_on_optimizer_and_options_and_is_told(
    make: Any, dtype: torch.dtype, options: dict[str, Any], means: bool
) -> None:
    def run(team: Team) -> tuple[tuple[str, ...], set[str]]:
        def loss(model: nn.Module, step: int) -> torch.Tensor:
            return model(torch.tensor(targets(2, step)[team.rank], dtype=dtype))

        return told_and_kept(team, "decentralized", Quadratic().to(dtype), make, loss, **options)

    for notices, kept in run_teams(2, run):
        assert ("sums" in kept) == means
        assert any("(mean_moments)" in each for each in notices) == means


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("decentralized", {}),
        ("local_sgd", {"communication_interval": 2}),
        ("diloco", {"communication_interval": 3, "codec": "identity", "outer_lr": 1.0, "outer_momentum": 0.0}),
    ],
    ids=["decentralized", "local_sgd", "diloco"],
)
def test_parameters_in_other_memory_formats(name: str, options: dict[str, Any]) -> None:
    """The moments are those of a model whose weights lie in order, and a change is noticed."""
    start_model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 4, 3))  # here: threads share a seed

    def run(team: Team, memory_format: torch.memory_format) -> list[torch.Tensor]:
        model = copy.deepcopy(start_model).to(memory_format=memory_format)
        own = adamw(model.parameters())
        bagua.distribute(model, own, name, process_group=team, **options)
        generator = torch.Generator().manual_seed(team.rank)
        for step in range(12):
            own.zero_grad()
            model(torch.randn(4, 3, 4, 4, generator=generator)).square().mean().backward()
            own.step()
            if step < 6:
                model[2].weight.data.mul_(0.99)
        bagua.detach(model)
        return [own.state[p][key].contiguous() for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]

    formats = (torch.contiguous_format, torch.channels_last)
    for plain, other in zip(*(run_teams(2, run, each) for each in formats), strict=True):
        for a, b in zip(plain, other, strict=True):
            # Elements out of order would be off by their size. Moments that are inferred from small differences of
            # weights amplify rounding: up to 4e-3 was seen here, depending on the first weights.
            assert float((a - b).norm()) <= 2e-2 * float(a.norm())


def test_one_rank_keeps_no_copies() -> None:
    (whole,) = run_teams(1, follow, Decentralized(), 2, adamw)
    assert not whole[1].notices


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mean_moments": 1}, ("mean_moments", "True, False or None", "1")),
        ({"mean_moments": True, "topology": "ring"}, ("mean_moments", "'complete'", "'ring'")),
        ({"mean_moments": True, "peer_selection_mode": "shift_one"}, ("mean_moments", "'shift_one'")),
        ({"mean_moments": True, "communication_interval": 2}, ("mean_moments", "and 2")),
        ({"mean_moments": True, "codec": "bf16"}, ("mean_moments", "'bf16'")),
    ],
)
def test_bad_options(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        Decentralized(**options)
    assert all(word in str(error.value) for word in words)


def test_other_optimizers_and_16_bits_are_refused() -> None:
    def refused(team: Team, make: Any, dtype: torch.dtype) -> str:
        model = Quadratic().to(dtype)
        with pytest.raises(ValueError) as error:
            bagua.distribute(model, make(model.parameters()), MEAN, process_group=team)
        return str(error.value)

    for make, dtype, word in (
        (partial(torch.optim.SGD, lr=0.1), torch.float32, "SGD"),
        (torch.optim.NAdam, torch.float32, "NAdam"),
        (partial(adamw, amsgrad=True), torch.float32, "amsgrad"),
        (adamw, torch.bfloat16, "16 bits"),
    ):
        assert all("mean_moments" in each and word in each for each in run_teams(2, refused, make, dtype))
