"""Elements are divided by their running scale before they are encoded: against an independent oracle, and its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bagua.algorithms import ByteGrad, GradientAllReduce
from bagua.codecs import Eden, available_backends, use_backend
from bagua.comm.buffers import Buffers
from bagua.comm.groups import Groups
from bagua.exchanges import Exchange, ScatterGather, mix
from bagua.exchanges.running_scale import divide_by_scale
from tests.codecs.conftest import HAS_TRITON, skip_if_interpreter_fails
from tests.codecs.test_eden import encode
from tests.rank_threads import run_threads

WINDOW = 256


def uneven(n: int, rank: int, step: int) -> np.ndarray:
    """Magnitudes over three decades, the same elements large at every step."""
    spread = 10.0 ** np.random.default_rng(5).uniform(-3, 0, n)
    spread[: n // 50] = 0
    return (spread * np.random.default_rng((rank, step)).standard_normal(n)).astype(np.float32)


def total(x: np.ndarray) -> np.float32:
    """Halves are added to halves."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def scale(magnitude: np.ndarray) -> np.ndarray:
    if not magnitude.any():
        return np.ones_like(magnitude)
    starts = range(0, len(magnitude), WINDOW)
    windows = [magnitude[i : i + WINDOW] for i in starts]
    sums = [total(np.pad(window, (0, WINDOW - len(window)))) for window in windows]
    sums[-1] *= np.float32(WINDOW / len(windows[-1]))
    floors = [each * np.float32(0.1 / WINDOW) for each in sums]
    floors = [each if each > 0 else max(floors) for each in floors]
    squares = np.concatenate([window + floor for window, floor in zip(windows, floors, strict=True)])
    return ((squares.view(np.uint32) + 0x3F800000) // 2).view(np.float32)


def test_scale_is_nearly_the_root() -> None:
    squares = np.geomspace(1e-30, 1e30, 10007).astype(np.float32)
    assert np.abs((squares.view(np.uint32) + 0x3F800000) // 2).view(np.float32) / np.sqrt(squares) == pytest.approx(
        np.full(len(squares), 1.03), abs=0.031
    )


def coded(x: np.ndarray, codec: Eden) -> np.ndarray:
    return np.concatenate(
        [encode(x[i : i + codec.block], codec.bits, codec.states)[2] for i in range(0, len(x), codec.block)]
    )


def oracle(n: int, size: int, steps: int, codec: Eden) -> list[np.ndarray]:
    chunk = math.ceil(math.ceil(n / size) / 16) * 16
    magnitude, results = np.zeros(n, np.float32), []
    for step in range(steps):
        s = scale(magnitude)
        rows = [np.pad(uneven(n, rank, step) / s, (0, chunk * size - n)) for rank in range(size)]
        sums = np.zeros(chunk * size, np.float32)
        for row in rows:
            sums += np.concatenate([coded(part, codec) for part in np.split(row, size)])
        mean = sums * np.float32(1 / size)
        if size > 2:  # two ranks swap what they have encoded
            mean = np.concatenate([coded(part, codec) for part in np.split(mean, size)])
        x = mean[:n] * s
        magnitude = magnitude + (np.abs(x) - magnitude) * np.float32(0.01)
        results.append(x)
    return results


def drive(groups: Groups, exchange: Exchange, n: int, steps: int) -> list[np.ndarray]:
    state = exchange.init(torch.zeros(n), groups)
    results = []
    for step in range(steps):
        x = torch.from_numpy(uneven(n, groups.rank, step))
        exchange.run(x, state, groups, step)
        results.append(x.numpy().copy())
    return results


@pytest.mark.parametrize(
    ("n", "size", "codec"),
    [
        (700, 3, Eden(bits=2, block=64)),
        (512, 2, Eden(bits=2, block=64)),
        (40, 2, Eden(bits=2, block=64)),
        (3000, 3, Eden(bits=1, block=64, states=8)),
    ],
)
def test_exchange_is_the_oracle(n: int, size: int, codec: Eden) -> None:
    want = oracle(n, size, 3, codec)
    for got in run_threads(size, drive, mix("complete", codec, running_scale=True), n, 3):
        for step in range(3):
            np.testing.assert_array_equal(got[step], want[step], err_msg=str(step))


def test_less_is_lost_where_magnitudes_differ() -> None:
    n, size, steps = 4096, 2, 60
    lost: dict[bool, tuple[float, float]] = {}
    for running_scale in (False, True):
        last = run_threads(size, drive, mix("complete", Eden(), running_scale=running_scale), n, steps)[0][-20:]
        exact = np.array([[uneven(n, r, step) for r in range(size)] for step in range(steps - 20, steps)]).mean(1)
        errors = np.square(np.array(last) - exact)
        typical = np.square(exact).mean(0)
        seen = typical > 0
        each = float((errors.mean(0)[seen] / typical[seen]).mean())
        lost[running_scale] = errors.sum() / np.square(exact).sum(), each
    assert lost[True][0] < 0.8 * lost[False][0], "of the squared norm"
    assert lost[True][1] < 0.5 * lost[False][1], "relative to each element's own magnitude"


def test_an_overflow_is_seen_and_forgotten() -> None:
    def overflow(groups: Groups) -> list[torch.Tensor]:
        exchange = ScatterGather(Eden(block=64), running_scale=True)
        state = exchange.init(torch.zeros(256), groups)
        seen = []
        for step in range(3):
            x = torch.from_numpy(uneven(256, groups.rank, step))
            if step == 1 and groups.rank == 0:
                x[3] = math.inf
            before = state["magnitude"].clone()
            exchange.run(x, state, groups, step)
            seen += [x, before, state["magnitude"].clone()]
        return seen

    for first, _, _, bad, before, after, good, _, _ in run_threads(2, overflow):
        assert first.isfinite().all() and good.isfinite().all()
        assert bad[:64].isnan().all() and bad[64:].isfinite().all()
        assert torch.equal(before[:64], after[:64]) and not torch.equal(before[64:], after[64:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_payload_types(dtype: torch.dtype) -> None:
    def twice(groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        exchange = ScatterGather(Eden(bits=4), running_scale=True)
        exact = torch.stack([torch.from_numpy(uneven(500, r, 0)) for r in range(2)]).mean(0)
        state = exchange.init(exact.to(dtype), groups)
        start = torch.from_numpy(uneven(500, groups.rank, 0)).to(dtype)
        exchange.run(start.clone(), state, groups, 0)
        x = start.clone()
        exchange.run(x, state, groups, 1)
        assert x.dtype is dtype and state["magnitude"].dtype is torch.float32
        return x, exact

    results = run_threads(2, twice)
    for x, exact in results:
        assert torch.equal(x, results[0][0])
        assert ((x.float() - exact).norm() / exact.norm()).item() < 0.2


def test_what_does_not_mix_is_refused() -> None:
    for options in ({"codec": "bf16"}, {"codec": "identity"}, {"codec": "eden", "error_feedback": True}):
        with pytest.raises(ValueError, match="running_scale=True cannot be combined with"):
            mix("complete", running_scale=True, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="running_scale=True cannot be combined with topology 'ring'"):
        mix("ring", "eden", running_scale=True)
    with pytest.raises(ValueError, match="running_scale=True cannot be combined with error_feedback=True"):
        ByteGrad(codec="sign", running_scale=True)


def test_default() -> None:
    """For a codec that spreads its error, unless errors are fed back."""
    scaled = [
        getattr(GradientAllReduce(codec=codec, error_feedback=feedback).exchange, "running_scale", False)
        for codec, feedback in (("eden", None), ("eden", True), ("minmax_uint8", None), ("sign", None), ("bf16", None))
    ]
    assert scaled == [True, False, False, False, False]
    assert not getattr(ByteGrad(codec="eden", running_scale=False).exchange, "running_scale", True)
    assert mix("complete", "eden", running_scale=True).name == "scatter_gather[eden, running scale]"


def scaled(backend: str, x_N: torch.Tensor, magnitude_N: torch.Tensor) -> list[torch.Tensor]:
    """Elements divided by their scales, the same multiplied again after a change, and the magnitudes then."""
    x_N, magnitude_N = x_N.clone(), magnitude_N.clone()
    with use_backend(backend):
        multiply_back = divide_by_scale(magnitude_N, x_N, Buffers())
    divided = x_N.clone()
    x_N.mul_(1.5)
    multiply_back()
    return [divided, x_N, magnitude_N]


ON_GPU = [pytest.mark.gpu] if torch.cuda.is_available() else []
WITHOUT_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
TRITON = pytest.param("triton", marks=[WITHOUT_TRITON, *ON_GPU])


@pytest.mark.parametrize("backend", [*(name for name in available_backends() if name != "torch"), TRITON])
@pytest.mark.parametrize("n", [1, 15, 255, 256, 257, 511, 1000, 4096 + 37])
def test_compiled_scales_are_those_of_torch(backend: str, n: int) -> None:
    """Triton's on a GPU if there is one, else in its interpreter."""
    if backend == "triton" and not torch.cuda.is_available():
        skip_if_interpreter_fails()
    device = torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(n)
    x_N = torch.randn(n, generator=generator)
    x_N[torch.arange(n) % 89 == 3] = math.inf
    x_N[torch.arange(n) % 97 == 5] = math.nan
    x_N[torch.arange(n) % 101 == 7] = -math.inf
    magnitude_N = torch.rand(n, generator=generator) * 10.0 ** torch.randint(-44, 31, (n,), generator=generator)
    some_zero = magnitude_N.clone()
    some_zero[n // 3 : n // 3 + 600] = 0.0
    for magnitudes in (magnitude_N.clamp(max=1e30), some_zero.clamp(max=1e30), torch.zeros(n), torch.full((n,), 1e30)):
        on_device = scaled(backend, x_N.to(device), magnitudes.to(device))
        for found, eager in zip(on_device, scaled("torch", x_N, magnitudes), strict=True):
            mine = found.cpu()
            # NaN in the same places; their signs and payloads are not promised.
            assert torch.equal(mine.isnan(), eager.isnan())
            assert torch.equal(mine.nan_to_num().view(torch.int32), eager.nan_to_num().view(torch.int32))
