"""Eden against an independent oracle, and the properties that it is there for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bagua import codecs
from bagua.algorithms.feedback import fit_feedback
from bagua.codecs import Eden, Int4, Sign, TopK

BACKENDS = codecs.available_backends()
CENTROIDS = {
    1: [1.0],
    2: [0.4527800346, 1.5104176085],
    3: [0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045],
    4: [0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565, 1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710],
}
# Of a normal distribution: the squared error of an unbiased estimate, relative to the square of the norm.
LOST = {1: math.pi / 2 - 1, 2: 0.13312, 3: 0.035784, 4: 0.0095921}


def mix(h: int) -> int:
    h &= 0xFFFFFFFF
    h = (h ^ h >> 16) * 0x7FEB352D & 0xFFFFFFFF
    h = (h ^ h >> 15) * 0x5E8B4D35 & 0xFFFFFFFF
    return h ^ h >> 16


def signs(seed: int, n: int) -> np.ndarray:
    return np.array([1 - 2 * (mix(seed << 16 | i // 32) >> i % 32 & 1) for i in range(n)], np.float32)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Of halves first, then within each half."""

    def unscaled(y: np.ndarray) -> np.ndarray:
        half = len(y) // 2
        return np.concatenate([unscaled(y[:half] + y[half:]), unscaled(y[:half] - y[half:])]) if half else y

    return unscaled(x) * np.float32(1 / math.sqrt(len(x)))


def total(x: np.ndarray) -> np.float32:
    sums = [np.float32(0)] * 64
    for i, value in enumerate(x):
        sums[i % 64] = sums[i % 64] + value
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[k] + sums[k + half] for k in range(half)]
    return sums[0]


def encode(x: np.ndarray, bits: int) -> tuple[np.uint32, bytes, np.ndarray]:
    """Header, codes and the decoded block."""
    centroids = np.array(CENTROIDS[bits], np.float32)
    middles = (np.array(CENTROIDS[bits][1:]) + CENTROIDS[bits][:-1]) / 2
    size = 1 << (len(x) - 1).bit_length()
    empty = bytes(bits * -(-size // 8))
    if not np.isfinite(x).all():
        return np.uint32(0x7FC00000), empty, np.full_like(x, np.nan)
    most = np.abs(x).max()
    exponent = min(max(int(most.view(np.int32)) >> 23, 27), 247) - 127
    seed = mix(int(x.view(np.uint32).astype(np.uint64).sum())) >> 20
    z = np.zeros(size, np.float32)
    z[: len(x)] = x * np.float32(2.0**-exponent) * signs(seed, len(x))
    z = hadamard(z)
    energy = total(z * z)
    mean = energy / np.float32(size)
    level = sum((z * z > mean * np.float32(m * m)).astype(int) for m in middles) + np.zeros(size, int)
    scale = (energy / total(np.abs(z) * centroids[level]) if energy else np.float32(0)) * np.float32(2.0**exponent)
    word = int(scale.view(np.uint32)) + 0x800 & ~0xFFF
    if not np.isfinite(scale) or word >= 0x7F800000:
        return np.uint32(0x7FC00000), empty, np.full_like(x, np.nan)
    planes = [np.signbit(z), *((level >> bit & 1).astype(bool) for bit in range(bits - 1))]
    codes = b"".join(np.packbits(plane, bitorder="little").tobytes() for plane in planes)
    y = hadamard(np.where(np.signbit(z), -centroids[level], centroids[level]))[: len(x)]
    return np.uint32(word | seed), codes, y * np.uint32(word).view(np.float32) * signs(seed, len(x))


def check(codec: Eden, x: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        blocks = [encode(x[i : i + codec.block], codec.bits) for i in range(0, len(x), codec.block)]
    wire = np.array([b[0] for b in blocks], np.uint32).tobytes() + b"".join(b[1] for b in blocks)
    decoded = np.concatenate([b[2] for b in blocks])
    for backend in BACKENDS:
        with codecs.use_backend(backend):
            got = codec.encode(torch.from_numpy(x)[None])
            y = codec.decode(got, len(x))[0].numpy()
        assert got[0].numpy().tobytes() == wire + bytes(-len(wire) % 4), backend
        np.testing.assert_array_equal(y, decoded, err_msg=backend)


@pytest.mark.parametrize("bits", LOST)
def test_all_backends_are_the_oracle(bits: int):
    rng = np.random.default_rng(bits)
    for n, block in ((1, 8), (3, 8), (200, 32), (451, 256), (1000, 512)):
        for scale in (1e-30, 1.0, 1e30):
            check(Eden(bits=bits, block=block), (rng.standard_normal(n) * scale).astype(np.float32))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), n=st.integers(1, 70), bits=st.integers(1, 4))
def test_all_floats(data: st.DataObject, n: int, bits: int):
    x = data.draw(hnp.arrays(np.float32, n, elements=st.floats(width=32), fill=st.sampled_from([0.0, -2.5])))
    check(Eden(bits=bits, block=16), x)


@pytest.mark.parametrize("bits", LOST)
def test_what_is_lost_hardly_depends_on_the_values(bits: int):
    generator = torch.Generator().manual_seed(7)
    codec, normal = Eden(bits=bits), torch.randn(2**16, generator=generator)
    for x in (normal, normal**3, (normal > 0).float() + 1e-3 * normal):
        y = codec.decode(codec.encode(x[None]), len(x))[0]
        blocks, lost = x.view(-1, 256), (y - x).view(-1, 256)
        share = (lost.square().sum(1) / blocks.square().sum(1)).mean().item()
        assert share == pytest.approx(LOST[bits], rel=0.2)
        torch.testing.assert_close((y * x).view(-1, 256).sum(1), blocks.square().sum(1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("n", [256, 37, 200])
def test_errors_of_many_nearly_equal_rows_average_out(n: int):
    """What makes feedback needless: the seed follows the data, so it is another one in each rank and step."""
    generator = torch.Generator().manual_seed(3)
    codec, rows = Eden(), 2000
    x = torch.randn(n, generator=generator).abs() ** 3  # all positive: signs alone would say nothing
    near = x * (1 + 1e-5 * torch.randn((rows, n), generator=generator))
    mean = codec.decode_mean(codec.encode(near), n, torch.empty(n), 1 / rows)
    assert ((mean - x).norm() / x.norm()).item() < 4 * math.sqrt(LOST[1] / rows)


def test_bytes():
    assert Eden().wire_bytes(2**20) * 8 <= 1.15 * 2**20
    assert Eden(bits=3, block=64).wire_bytes(64 + 9) == 2 * 4 + 3 * (8 + 2) + 2
    assert Eden().wire_bytes(256 + 129) == 2 * 4 + 2 * 32


def test_blocks_are_lost_alone():
    x = torch.ones(1, 600)
    x[0, 300] = math.inf
    y = Eden().decode(Eden().encode(x), 600)
    assert torch.equal(y.isnan()[0], torch.arange(600) // 256 == 1)


@pytest.mark.parametrize("block", [0, 4, -8, 24, 8192, 8.0, None, True])
def test_block_is_checked(block: object):
    with pytest.raises(ValueError, match="block must be a positive power of two"):
        Eden(block=block)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [0, 5, 1.0, None, True])
def test_bits_are_checked(bits: object):
    with pytest.raises(ValueError, match="bits must be 1, 2, 3 or 4"):
        Eden(bits=bits)  # type: ignore[arg-type]


def test_feedback_is_off_by_default_for_what_is_unbiased():
    assert [fit_feedback(None, codec) for codec in (Eden(), Eden(bits=4), Sign(), Int4(), TopK())] == [
        *(False, False),
        *(True, True, True),
    ]
    assert fit_feedback(True, Eden()) and not fit_feedback(False, Sign())
