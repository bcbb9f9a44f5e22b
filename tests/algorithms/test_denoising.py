"""Taking noise out of second moments: compiled code and chunks give the bits of eager torch on whole buckets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bagua.algorithms import denoising
from bagua.algorithms.denoising import subtract_noise
from bagua.codecs import available_backends, use_backend
from bagua.codecs.kernels import Moments

COMPILED = [name for name in available_backends() if name != "torch"]
# Elements of each parameter of a bucket; negative: it makes no step.
SIZES = [[1], [255], [256], [257, 1], [100, 0, 412], [700, -300, 24], [0, 3, 5, 1, 600, -7, 0, 4096 + 37], [-600]]
TINY = [0.0, -0.0, 1e-45, -1e-40, 3e-39, 1e-30]
BAD = [math.inf, -math.inf, math.nan, 1e15, 1e25, -3e38]  # squares of some are not finite


def spread(n: int, seed: int, bad: bool) -> Tensor:
    """Normal, over three decades; with tiny numbers, and bad ones in every other window."""
    generator = torch.Generator().manual_seed(seed)
    x_N = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-3, 1, (n,), generator=generator)
    at_N = torch.arange(n)
    for i, value in enumerate(TINY):
        x_N[at_N % 61 == 7 * i + seed % 5] = value
    for i, value in enumerate(BAD if bad else []):
        x_N[(at_N % 89 == 7 * i + seed % 5) & (at_N // 256 % 2 == 1)] = value
    return x_N


class Made:
    """A bucket, its magnitudes and the moments of its parameters."""

    def __init__(self, sizes: list[int], scaled: bool, bad: bool, dtype: torch.dtype = torch.float32) -> None:
        n = sum(map(abs, sizes))
        self.g_N = spread(n, 1, bad).to(dtype)
        self.magnitude_N = spread(n, 2, bad).abs().nan_to_num().clamp(max=1e30) if scaled else None
        if self.magnitude_N is not None:
            self.magnitude_N[n // 3 : n // 3 + 600] = 0.0
        self.first_N = (0.02 * spread(n, 3, bad)).to(dtype)
        self.second_N = (1e-3 * spread(n, 4, bad).square()).to(dtype)
        self.moments: list[Moments] = []
        begin = 0
        for k, size in enumerate(sizes):
            part = slice(begin, begin + abs(size))
            begin = part.stop
            if size >= 0:
                step, b1, b2 = k + 1, 0.9, 0.999
                floor = 2.0 * (1 - b2**step) / (1 - b1**step) ** 2
                place = self.first_N[part], self.second_N[part], self.g_N[part]
                self.moments.append(Moments(*place, 1 - b2, floor))

    def subtract(self, backend: str) -> list[Tensor]:
        """All that is left."""
        with use_backend(backend):
            subtract_noise(self.g_N, self.magnitude_N, 0.59, self.moments)
        held = [self.second_N, self.first_N, self.g_N]
        return held if self.magnitude_N is None else [*held, self.magnitude_N]


def assert_same_bits(mine: list[Tensor], other: list[Tensor]) -> None:
    """NaN in the same places; their signs and payloads are not promised."""
    for a, b in zip(mine, other, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        whole = torch.int32 if a.dtype is torch.float32 else torch.int64
        assert torch.equal(a[~a.isnan()].view(whole), b[~b.isnan()].view(whole))


def whole_buckets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(denoising, "_CHUNK", 1 << 40)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "bad"])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("backend", COMPILED)
def test_compiled_code_has_the_bits_of_torch(
    backend: str, sizes: list[int], scaled: bool, bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_buckets(monkeypatch)
    given = Made(sizes, scaled, bad)
    before_N = given.second_N.clone()
    want = given.subtract("torch")
    if len(before_N) > 600:
        noisy = (want[0] < before_N) & torch.stack(
            [want[0] != each.floor * want[1] ** 2 for each in given.moments]
        ).all(0)
        assert noisy.float().mean() > 0.04, "it would not notice"
    monkeypatch.delattr(denoising, "_noise")  # eager code
    assert_same_bits(Made(sizes, scaled, bad).subtract(backend), want)


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("backend", COMPILED)
def test_compiled_code_in_the_first_steps(backend: str, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From magnitudes of zero; then where only the first window, or only the last, was ever used."""
    n = 5 * 256 + 40
    for used in (slice(0), slice(0, 200), slice(n - 20, n), slice(300, 301)):
        made = {name: Made([n], scaled, bad=False) for name in ("torch", backend)}
        for each in made.values():
            if each.magnitude_N is not None:
                kept = each.magnitude_N[used].clone() + 0.1
                each.magnitude_N.zero_()[used] = kept
        for _ in range(3):
            assert_same_bits(made[backend].subtract(backend), made["torch"].subtract("torch"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("chunk", [256, 1024])
def test_chunks_have_the_bits_of_whole_buckets(
    chunk: int, scaled: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sizes in SIZES:
        monkeypatch.setattr(denoising, "_CHUNK", chunk)
        mine = Made(sizes, scaled, bad=True, dtype=dtype).subtract("torch")
        whole_buckets(monkeypatch)
        assert_same_bits(mine, Made(sizes, scaled, bad=True, dtype=dtype).subtract("torch"))


@pytest.mark.parametrize("backend", available_backends())
def test_strides(backend: str) -> None:
    """Moments in the order of the bucket, whatever that is, and in another one."""

    def run(backend: str, order: Any, kept: Any) -> Tensor:
        made = Made([4 * 3 * 5 * 5 + 400], scaled=True, bad=False)
        lines = made.first_N, made.second_N, made.g_N
        first, second, part = (each[100:400].view(4, 5, 5, 3).permute(0, 3, 1, 2) for each in lines)
        if order is torch.contiguous_format:
            part = made.g_N[100:400].view(4, 3, 5, 5)
        held = first.clone(memory_format=kept), second.clone(memory_format=kept)
        moments = Moments(*held, part, decay_left=1e-3, floor=0.02)
        with use_backend(backend):
            subtract_noise(made.g_N, made.magnitude_N, 0.59, [moments])
        return moments.second.contiguous()

    orders = torch.contiguous_format, torch.channels_last
    seen = []
    for order, other in (orders, orders[::-1]):
        mixed, same = run("torch", order, other), run(backend, order, order)
        assert torch.equal(run(backend, order, other), mixed)
        seen.append(mixed)
        assert torch.equal(mixed, same)
    assert not torch.equal(*seen)


@pytest.mark.parametrize("backend", COMPILED)
def test_what_compiled_code_cannot_do_is_eager(backend: str) -> None:
    made, want = (Made([300, 40], True, False, torch.float64) for _ in range(2))
    assert_same_bits(made.subtract(backend), want.subtract("torch"))


@pytest.mark.parametrize("backend", available_backends())
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
def test_gradients_of_zero_have_no_noise(scaled: bool, backend: str) -> None:
    """Rows that nobody uses are cleared, beside others in the same window."""
    made = Made([700, 300], scaled, bad=False)
    made.g_N[::3] = 0.0
    before = made.second_N.clone()
    made.subtract(backend)
    assert torch.equal(made.second_N[::3], before[::3])
    assert float((made.second_N < before).float().mean()) > 0.3
