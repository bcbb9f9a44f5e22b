"""`denoise_second_moment`: a numpy oracle, and that second moments are those of exact gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import ByteGrad, GradientAllReduce
from bagua.algorithms.noise import share_of_noise
from bagua.codecs import Eden, Int4
from bagua.comm.team import Team
from tests.algorithms.defaults import told_and_kept
from tests.algorithms.momentum import interrupted
from tests.daily import one_in
from tests.rank_threads import run_teams

N, WINDOW, STEPS, LR, B1, B2 = 700, 256, 12, 1e-3, 0.9, 0.97
LEFT = {1: 1 - 2 / np.pi, 2: 0.1175, 3: 0.03454}  # of the variance of a normal distribution, with 2, 4 and 8 centroids


def adam(params: Any, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(params, **{"lr": LR, "betas": (B1, B2), **options})


class Wide(nn.Module):
    """Gradients are noise, of other sizes in other elements, about a slope."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(N))
        self.sizes = torch.logspace(-2, 0, N)[torch.randperm(N, generator=torch.Generator().manual_seed(3))]

    def forward(self, rank: int, step: int, slope: float) -> Tensor:
        noise = torch.randn(N, generator=torch.Generator().manual_seed(1000 * rank + step))
        return (self.w * self.sizes * (noise + slope)).sum()


class Seen(NamedTuple):
    """Of each step, [STEPS, N]: the gradient that the optimizer saw, and the moments after the step."""

    gradient: np.ndarray
    first: np.ndarray
    second: np.ndarray


def train(team: Team, algorithm: Any, steps: int = STEPS, slope: float = 0.0, make: Any = adam, **given: Any) -> Seen:
    model = Wide()
    own = make(model.parameters())
    bagua.distribute(model, own, algorithm, process_group=team, **given)
    found: list[list[np.ndarray]] = []
    for step in range(steps):
        own.zero_grad()
        model(team.rank, step, slope).backward()
        own.step()
        assert model.w.grad is not None
        slot = own.state[model.w]
        found.append([each.detach().double().numpy() for each in (model.w.grad, slot["exp_avg"], slot["exp_avg_sq"])])
    bagua.detach(model)
    return Seen(*(np.stack(each) for each in zip(*found, strict=True)))


def means(x: np.ndarray) -> np.ndarray:
    """Of each window, for each of its elements."""
    return np.concatenate([np.full(len(part), part.mean()) for part in np.split(x, range(WINDOW, len(x), WINDOW))])


def scale(magnitude: np.ndarray) -> np.ndarray:
    """As the exchange's: the root of the magnitude and a tenth of its mean, by halving the bits; 1 at first."""
    if not magnitude.any():
        return np.ones_like(magnitude)
    floored = (magnitude + 0.1 * means(magnitude)).astype(np.float32)
    return ((floored.view(np.int32) >> 1) + (0x3F800000 >> 1)).view(np.float32).astype(np.float64)


def oracle(seen: Seen, size: int, bits: int, scaled: bool, mean_bits: int | None = None) -> np.ndarray:
    """Second moments after each step, from the gradients and first moments that were seen."""
    share = 1 - (1 - LEFT[bits]) * (1 if size == 2 else 1 - LEFT[mean_bits or bits])
    v, magnitude, found = np.zeros(N), np.zeros(N), []
    for k, (g, m) in enumerate(zip(seen.gradient, seen.first, strict=True), 1):
        s = scale(magnitude) if scaled else np.ones(N)
        noise = share * s**2 * means(g**2 / s**2) * (g != 0)  # as in rows that nobody uses
        magnitude += 0.01 * (np.abs(g) - magnitude)
        v = B2 * v + (1 - B2) * g**2
        floor = 2 * m**2 * (1 - B2**k) / (1 - B1**k) ** 2
        v = np.maximum(v - (1 - B2) * noise, np.minimum(v, floor))
        found.append(v)
    return np.stack(found)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("mean_bits", [None, 3])
def test_is_the_oracles_and_the_same_on_all_ranks(size: int, scaled: bool, bits: int, mean_bits: int | None) -> None:
    gather_codec = None if mean_bits is None else Eden(bits=mean_bits)
    options: dict[str, Any] = {"running_scale": None if scaled else False, "gather_codec": gather_codec}
    runs = run_teams(size, train, ByteGrad(codec=Eden(bits=bits), denoise_second_moment=True, **options))
    for seen in runs:
        np.testing.assert_allclose(seen.second, oracle(seen, size, bits, scaled, mean_bits), rtol=2e-4, atol=1e-7)
        assert all(np.array_equal(mine, first) for mine, first in zip(seen, runs[0], strict=True))
    others = [(not scaled, mean_bits)] if mean_bits is None or size == 2 else [(scaled, None), (not scaled, mean_bits)]
    for other in others:  # it would notice
        v = oracle(runs[0], size, bits, *other)[-1]
        assert np.mean(abs(runs[0].second[-1] - v) > 0.01 * v) > 0.05


def test_fused_optimizers() -> None:
    algorithm = ByteGrad(codec=Eden(bits=1), denoise_second_moment=True)
    for seen in run_teams(2, partial(train, make=lambda params: bagua.optim.fuse(adam(params))), algorithm):
        np.testing.assert_allclose(seen.second, oracle(seen, 2, 1, scaled=True), rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize(("size", "slope"), one_in(2, [2, 4], [0.0, 0.5]))
def test_second_moments_are_about_those_of_exact_gradients(size: int, slope: float) -> None:
    """With 1 bit they would be half as large again, with two ranks, which encode once, a fifth larger."""
    long = partial(train, steps=120, slope=slope)
    options: dict[str, Any] = {"codec": Eden(bits=1)}
    exact, clean, noisy = (
        run_teams(size, long, each)[0].second[-1].sum()
        for each in ("gradient_allreduce", ByteGrad(**options, denoise_second_moment=True),
                     ByteGrad(**options, denoise_second_moment=False))
    )  # fmt: skip
    assert noisy / exact > {2: 1.15, 4: 1.3}[size], noisy / exact
    assert abs(clean / exact - 1) < 0.2, clean / exact


def test_clipped_and_unscaled_gradients_count_as_the_optimizer_sees_them() -> None:
    """The noise is as much smaller as the gradient."""

    def run(team: Team, factor: float) -> Seen:
        def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
            for param in optimizer.param_groups[0]["params"]:
                param.grad.mul_(factor)

        def make(params: Any) -> torch.optim.Optimizer:
            made = adam(params)
            made.register_step_pre_hook(clip)
            return made

        return train(team, ByteGrad(codec=Eden(bits=1), denoise_second_moment=True), make=make)

    whole, part = (run_teams(2, run, factor)[0] for factor in (1.0, 0.25))
    np.testing.assert_allclose(part.gradient, 0.25 * whole.gradient, rtol=1e-6)
    np.testing.assert_allclose(part.second, whole.second / 16, rtol=1e-3)


@pytest.mark.parametrize("how", ["outside", "assigned"])
def test_gradients_outside_the_buckets_count_as_the_optimizer_sees_them(how: str) -> None:
    """The moments are those of the same gradients in the buckets."""

    def rank_main(team: Team, how: str) -> Tensor:
        model = Wide()
        own, view = adam(model.parameters()), how != "outside"
        bagua.distribute(model, own, ByteGrad(codec=Eden()), process_group=team, gradient_as_bucket_view=view)
        for step in range(STEPS):
            own.zero_grad()
            model(team.rank, step, 0.0).backward()
            assert model.w.grad is not None
            if how == "assigned":
                model.w.grad = model.w.grad * 0.125
            else:
                model.w.grad.mul_(0.125)
            own.step()
        bagua.detach(model)
        return own.state[model.w]["exp_avg_sq"]

    want, found = run_teams(2, rank_main, "inside"), run_teams(2, rank_main, how)
    for expected, second in zip(want, found, strict=True):
        assert torch.equal(expected, second)


def test_resume_is_bit_identical() -> None:
    algorithm = ByteGrad(codec=Eden(bits=1), denoise_second_moment=True)
    for whole, resumed in run_teams(2, interrupted, adam, algorithm, [1, 7], 12):
        for stop, other in resumed.items():
            assert torch.equal(whole, other), stop


def test_parameters_without_gradients_are_left_alone() -> None:
    """Never used, and used until the fifth step."""

    class More(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.never, self.early = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(40))

    def run(team: Team) -> list[Tensor]:
        model = More()
        own = adam(model.parameters())
        bagua.distribute(model, own, ByteGrad(codec=Eden(), denoise_second_moment=True), process_group=team)
        held = []
        for step in range(10):
            own.zero_grad()
            loss = model(team.rank, step, 0.0)
            (loss + model.early.square().sum() if step < 5 else loss).backward()
            own.step()
            if step >= 5:
                held.append(own.state[model.early]["exp_avg_sq"].clone())
        assert not own.state.get(model.never, {}).get("exp_avg_sq", torch.zeros(1)).any()
        bagua.detach(model)
        return held

    for held in run_teams(2, run):
        assert all(torch.equal(each, held[0]) for each in held) and held[0].all()


def test_one_rank_or_one_node_has_no_noise() -> None:
    algorithm = ByteGrad(codec=Eden(bits=1), denoise_second_moment=True, hierarchical=True)
    exact = run_teams(2, train, "gradient_allreduce", nodes=[0, 0])
    for seen, want in zip(run_teams(2, train, algorithm, nodes=[0, 0]), exact, strict=True):
        np.testing.assert_allclose(seen.second, want.second, rtol=1e-5)
    (alone,) = run_teams(1, train, ByteGrad(codec=Eden(bits=1), denoise_second_moment=True))
    (want,) = run_teams(1, train, "gradient_allreduce")
    assert np.array_equal(alone.second, want.second)


def test_the_share_is_that_of_two_encodings() -> None:
    """Of independent errors: normal gradients of four ranks, encoded, averaged and encoded again."""
    generator = torch.Generator().manual_seed(1)
    x_RN = torch.randn(4, 1 << 15, generator=generator)
    for bits, states in ((1, 1), (2, 1), (3, 1), (4, 1), (1, 8), (1, 32), (2, 8)):
        codec = Eden(bits=bits, states=states)
        mean_N = codec.decode(codec.encode(x_RN), x_RN.shape[1]).mean(0)
        twice_N = codec.decode(codec.encode(mean_N[None]), x_RN.shape[1])[0]
        exact = x_RN.mean(0).square().sum()
        assert share_of_noise(codec, num=4) == pytest.approx(float(1 - exact / twice_N.square().sum()), rel=0.1), codec
        for gather_codec in (Eden(bits=2, states=8), Eden(bits=3)):
            other_N = gather_codec.decode(gather_codec.encode(mean_N[None]), x_RN.shape[1])[0]
            share = pytest.approx(float(1 - exact / other_N.square().sum()), rel=0.1)
            assert share_of_noise(codec, 4, gather_codec) == share, (codec, gather_codec)
        assert share_of_noise(codec, 4, Int4()) == share_of_noise(codec, 2, Int4()) == share_of_noise(codec, 2)
        # Two ranks encode once.
        assert share_of_noise(codec, num=2) == pytest.approx(float(1 - exact / mean_N.square().sum()), rel=0.1), codec


@pytest.mark.parametrize(
    ("make", "dtype", "options", "denoises"),
    [
        (adam, torch.float32, {"codec": "eden:bits=2"}, True),
        (torch.optim.AdamW, torch.float32, {"codec": "eden", "running_scale": False}, True),
        (adam, torch.float32, {"codec": "eden", "denoise_second_moment": False}, False),
        (adam, torch.float32, {"codec": "eden", "error_feedback": True}, False),
        (adam, torch.float32, {"codec": "int4"}, False),
        (adam, torch.float32, {}, False),
        (partial(adam, amsgrad=True), torch.float32, {"codec": "eden"}, False),
        (adam, torch.bfloat16, {"codec": "eden"}, False),
        (partial(torch.optim.SGD, lr=LR), torch.float32, {"codec": "eden"}, False),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_default_depends_on_codec_and_optimizer_and_is_told(
    make: Any, dtype: torch.dtype, options: dict[str, Any], denoises: bool
) -> None:
    def run(team: Team) -> tuple[tuple[str, ...], set[str]]:
        def loss(model: nn.Module, step: int) -> torch.Tensor:
            return model(team.rank, step, 0.0)

        return told_and_kept(team, "bytegrad", Wide().to(dtype), make, loss, **options)

    for notices, kept in run_teams(2, run):
        assert ("noise_magnitude" in kept) == denoises
        assert any("(denoise_second_moment)" in each for each in notices) == denoises


@pytest.mark.parametrize("size", [2, 3])
def test_two_ranks_are_told_that_they_encode_no_means(size: int) -> None:
    def run(team: Team) -> tuple[tuple[str, ...], set[str]]:
        def loss(model: nn.Module, step: int) -> torch.Tensor:
            return model(team.rank, step, 0.0)

        return told_and_kept(team, "bytegrad", Wide(), adam, loss, gather_codec="eden")

    for notices, _ in run_teams(size, run):
        assert any("gather_codec has no effect" in each for each in notices) == (size == 2)


def test_state_of_before_the_option_fits() -> None:
    assert "denoise_second_moment" not in repr(ByteGrad(codec=Eden()))
    assert repr(ByteGrad()).startswith("ByteGrad(hierarchical=None, average=True, codec='minmax_uint8', ")
    assert "gather_codec" not in repr(ByteGrad(codec=Eden()))
    shown = ByteGrad(codec=Eden(), denoise_second_moment=False)
    assert repr(shown).endswith("running_scale=None, denoise_second_moment=False)")
    assert repr(ByteGrad(codec=Eden(), gather_codec="int4")).endswith("running_scale=None, gather_codec='int4')")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "int4"}, ("'eden'", "'int4'")),
        ({"codec": "eden", "error_feedback": True}, ("'eden' with error feedback",)),
    ],
)
def test_bad_options(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="denoise_second_moment") as error:
        GradientAllReduce(denoise_second_moment=True, **options)
    assert all(word in str(error.value) for word in words)


def test_other_optimizers_and_16_bits_are_refused() -> None:
    def refused(team: Team, make: Any, dtype: torch.dtype) -> str:
        model = Wide().to(dtype)
        algorithm = ByteGrad(codec=Eden(), denoise_second_moment=True)
        with pytest.raises(ValueError) as error:
            bagua.distribute(model, make(model.parameters()), algorithm, process_group=team)
        return str(error.value)

    for make, dtype, word in (
        (partial(torch.optim.SGD, lr=0.1), torch.float32, "SGD"),
        (torch.optim.NAdam, torch.float32, "NAdam"),
        (partial(adam, amsgrad=True), torch.float32, "amsgrad"),
        (adam, torch.bfloat16, "16 bits"),
    ):
        assert all("denoise_second_moment" in each and word in each for each in run_teams(2, refused, make, dtype))
