"""Min-max uint8 against an independent oracle, and its special cases; all backends give the same bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bagua import codecs
from bagua.codecs import MinMaxUInt8

BACKENDS = codecs.available_backends()
MAX = float(np.finfo(np.float32).max)


def through_zero(lo: float, hi: float) -> tuple[float, float]:
    """The bounds of levels of which one is zero, where that lies between `lo` and `hi`: steps of 16 binary digits."""
    span = float(np.float32(hi) - np.float32(lo))
    if not (lo < 0 <= hi and 2.0**-100 <= span < 2.0**126):
        return lo, hi
    mantissa, exponent = np.frexp(float(np.float32(span) / np.float32(254)))
    step = np.ldexp(np.ceil(mantissa * 2**16), exponent - 16)
    below = np.ceil(np.float32(-lo) / np.float32(step))
    return -float(below) * step, (255 - float(below)) * step


def oracle(row: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds [K, 2], real-valued codes [N] and the decoded rounding of them [N], in float64."""
    bounds, codes, decoded = [], [], []
    for start in range(0, len(row), block):
        part = row[start : start + block].astype(np.float64)
        with np.errstate(all="ignore"):
            lo, hi = through_zero(part.min(), part.max())
        span = hi - lo
        if not np.isfinite(span) or span > MAX:
            lo = hi = np.nan
            exact = np.zeros_like(part)
        else:
            exact = (part - lo) / span * 255 if span else np.zeros_like(part)
        bounds.append((lo, hi))
        codes.append(exact)
        decoded.append(lo + np.rint(exact) / 255 * (hi - lo))
    return np.array(bounds), np.concatenate(codes), np.concatenate(decoded)


def split(wire: torch.Tensor, n: int, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Header [K, 2], codes [N] and padding of one wire row."""
    row = wire.cpu().numpy()
    end = 8 * -(-n // block)
    return row[:end].copy().view(np.float32).reshape(-1, 2), row[end : end + n], row[end + n :]


def check(x: np.ndarray, block: int, backend: str) -> torch.Tensor:
    """Compares every row with the oracle; returns the wire."""
    n = x.shape[1]
    codec = MinMaxUInt8(block=block)
    with codecs.use_backend(backend), np.errstate(all="ignore"):
        wire = codec.encode(torch.from_numpy(x))
        y = codec.decode(wire, n).numpy()
        for r in range(x.shape[0]):
            bounds, exact, decoded = oracle(x[r], block)
            header, got, padding = split(wire[r], n, block)
            np.testing.assert_array_equal(header, bounds.astype(np.float32))
            assert np.abs(got - exact).max() <= 0.5 + 255 * 2.0**-22
            assert not padding.any()
            span = np.repeat(bounds[:, 1] - bounds[:, 0], block)[:n]
            largest = np.repeat(np.abs(bounds).max(1), block)[:n]
            error = np.abs(y[r] - x[r].astype(np.float64))
            allowed = 0.51 * span / 255 + 2.0**-22 * largest + 2.0**-149
            lost = np.isnan(bounds[:, 0]).repeat(block)[:n]
            assert np.isnan(y[r][lost]).all()
            assert (error[~lost] <= allowed[~lost]).all()
            near = np.abs(y[r] - decoded)[~lost] <= 1.01 * span[~lost] / 255 + allowed[~lost]
            assert near.all()
    return wire


def numbers() -> st.SearchStrategy[float]:
    """All floats, with those that hurt more often."""
    special = st.sampled_from([0.0, -0.0, 1.0, 2.0**-149, -(2.0**-149), 2.0**-126, 1e-37, 1e-30, MAX, -MAX])
    odd = st.sampled_from([float("nan"), float("inf"), -float("inf")])
    return st.one_of(st.floats(width=32), st.floats(-1, 1, width=32), special, special, odd)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    rows=st.integers(1, 3),
    n=st.integers(1, 150),
    block=st.sampled_from([1, 3, 32, 64, 100, 1024]),
)
def test_all_backends_agree_with_the_oracle(data: st.DataObject, rows: int, n: int, block: int):
    fill = st.sampled_from([0.0, 1.0, -2.5])
    x = data.draw(hnp.arrays(np.float32, (rows, n), elements=numbers(), fill=fill))
    wires = [check(x, block, backend) for backend in BACKENDS]
    means = []
    for backend in BACKENDS:
        with codecs.use_backend(backend):
            mean = MinMaxUInt8(block=block).decode_mean(wires[0], n, torch.empty(n), 1 / rows)
            means.append(mean.nan_to_num(nan=7.0).view(torch.int32))
    for wire, mean in zip(wires, means, strict=True):
        assert torch.equal(wire, wires[0])
        assert torch.equal(mean, means[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-140, 1e-38, 7e-37, 2.0**-100, 1e-20, 1.0, 1e20, MAX / 8])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_scales(backend: str, scale: float, offset: float):
    rng = np.random.default_rng(5)
    with np.errstate(over="ignore"):
        x = ((rng.standard_normal((2, 3000)).clip(-3.9, 3.9) + offset * 7) * scale).astype(np.float32)
        x = x.clip(-MAX / 2, MAX / 2)
    wire = check(x, 1024, backend)
    assert split(wire[0], 3000, 1024)[1].max() >= 254


@pytest.mark.parametrize("backend", BACKENDS[1:] or BACKENDS)
def test_large_outputs_are_streamed_correctly(backend: str):
    n = (34 << 20) // 4 + 3  # beyond the size where stores bypass the cache
    x = torch.linspace(-1, 1, n)[None]
    codec = MinMaxUInt8()
    with codecs.use_backend(backend):
        wire = codec.encode(x)
        buffer = torch.zeros(n + 2)
        y = codec.decode(wire, n, out=buffer[1 : n + 1][None])
    assert buffer[0] == 0
    assert buffer[-1] == 0
    assert float((y - x).abs().max()) <= 2.0 * 1024 / n / 255 + 1e-7


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block", [1024, 33, None])
def test_ranges(backend: str, block: int | None):
    codec = MinMaxUInt8(block=block)
    n, inside = 2100, [5, 20]
    cases = {
        "overflow": ([-MAX, MAX], True),
        "just fits": ([0.0, MAX], False),
        "negative": ([-MAX, 0.0], False),
        "one denormal": ([0.0, 2.0**-149], False),
        "two zeros": ([-0.0, 0.0], False),
        "next to one": ([1.0, float(np.nextafter(np.float32(1), np.float32(2)))], False),
    }
    for name, (values, lost) in cases.items():
        x = torch.full((1, n), values[0])
        x[0, inside] = values[1]
        with codecs.use_backend(backend):
            y = codec.decode(codec.encode(x), n)
        size = block or n
        assert bool(y[0, :size].isnan().all()) == lost, name
        if lost:
            assert torch.equal(y[0, size:], x[0, size:])
        else:
            assert torch.equal(y, x), f"{name}: both ends of the range are codes, so they are exact"


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_is_seen_in_every_lane(backend: str):
    for at, bad in itertools.product(range(130), (float("nan"), -float("nan"), float("inf"))):
        x = torch.linspace(-1, 1, 130).repeat(3, 1)
        x[1, at] = bad
        codec = MinMaxUInt8(block=130)
        with codecs.use_backend(backend):
            wire = codec.encode(x)
            y = codec.decode(wire, 130)
        assert bool(y[1].isnan().all())
        assert bool(y[::2].isfinite().all())
        header, codes, _ = split(wire[1], 130, 130)
        assert header.view(np.uint32).tolist() == [[0x7FC00000, 0x7FC00000]]
        assert not codes.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_nan(backend: str):
    with codecs.use_backend(backend):
        y = MinMaxUInt8(block=64).decode(MinMaxUInt8(block=64).encode(torch.full((1, 130), float("nan"))), 130)
    assert bool(y.isnan().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_block_of_the_whole_row_is_that_of_its_length(backend: str):
    x = torch.randn((2, 1234), generator=torch.Generator().manual_seed(1))
    with codecs.use_backend(backend):
        whole = MinMaxUInt8(block=None).encode(x)
        assert torch.equal(whole, MinMaxUInt8(block=1234).encode(x))
        assert torch.equal(whole, MinMaxUInt8(block=9999).encode(x))


@pytest.mark.parametrize("block", [0, -1, 1.5, "1024", True])
def test_block_is_checked(block: object):
    with pytest.raises(ValueError, match="block"):
        MinMaxUInt8(block=block)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 2, 3, 70])
@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_stay_zeros(backend: str, rows: int):
    """In blocks of numbers of both signs, of no positive ones and of no negative ones; in means and errors, too."""
    rng = np.random.default_rng(7)
    x = torch.from_numpy(rng.standard_normal((rows, 40 * 1024)).astype(np.float32))
    x *= torch.from_numpy(10.0 ** rng.uniform(-25, 25, (rows, 40))).float().repeat_interleave(1024, 1)
    x[:, :10240].abs_()
    x[:, 10240:20480].abs_().neg_()
    zero = torch.from_numpy(rng.random(40 * 1024) < 0.3)
    x[:, zero] = 0.0
    codec = MinMaxUInt8()
    with codecs.use_backend(backend):
        wire = codec.encode(x)
        mean = codec.decode_mean(wire, x.shape[1], torch.empty(x.shape[1]), 1 / rows)
        made = codec.decode(codec.decode_mean_encode(wire, x.shape[1], 1 / rows), x.shape[1])[0]
        lost = torch.zeros_like(x)
        codec.encode_with_feedback(x, lost)
        for y in (codec.decode(wire, x.shape[1]), mean[None], made[None], lost):
            assert y.isfinite().all() and not y[:, zero].any()


def test_rounds_half_to_even():
    x = torch.tensor([[0.0, 0.5, 1.5, 2.5, 253.5, 254.5, 255.0]])
    for backend in BACKENDS:
        with codecs.use_backend(backend):
            wire = MinMaxUInt8().encode(x)
        assert split(wire[0], 7, 1024)[1].tolist() == [0, 0, 2, 2, 254, 254, 255]
