"""Eden against an independent oracle, and the properties that it is there for."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bagua import codecs
from bagua.algorithms.feedback import fit_feedback
from bagua.algorithms.noise import share_of_noise
from bagua.codecs import Eden, Int4, Sign, TopK
from bagua.codecs.trellis_torch import TRELLISES, trellis_of

BACKENDS = codecs.available_backends()
CENTROIDS = {
    1: [1.0],
    2: [0.4527800346, 1.5104176085],
    3: [0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045],
    4: [0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565, 1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710],
}
# Of a normal distribution: the squared error of an unbiased estimate, relative to the square of the norm.
LOST = {
    (1, 1): math.pi / 2 - 1,
    (2, 1): 0.13312,
    (3, 1): 0.035784,
    (4, 1): 0.0095921,
    (1, 8): 0.440,
    (1, 32): 0.408,
    (2, 8): 0.090,
}


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


def nearest(z: np.ndarray, mean: np.float32, bits: int) -> tuple[list[np.ndarray], np.ndarray, np.float32]:
    """The planes, the centroids and their product with z."""
    centroids = np.array(CENTROIDS[bits], np.float32)
    middles = (np.array(CENTROIDS[bits][1:]) + CENTROIDS[bits][:-1]) / 2
    level = sum((z * z > mean * np.float32(m * m)).astype(int) for m in middles) + np.zeros(len(z), int)
    planes = [np.signbit(z), *((level >> bit & 1).astype(bool) for bit in range(bits - 1))]
    chosen = np.where(np.signbit(z), -centroids[level], centroids[level])
    return planes, chosen, total(np.abs(z) * centroids[level])


def table_of(bits: int, states: int) -> list[int]:
    trellis = trellis_of(bits, states)
    assert trellis is not None
    return list(trellis.table)


def best_path(x: list[int], bits: int, states: int) -> list[int]:
    """The windows of the path of least cost; of equal ones the one with lower windows, from the last one back."""
    table = table_of(bits, states)
    ways: list[tuple[int, list[int]] | None] = [(0, []), *[None] * (states - 1)]
    for value in x:
        after: list[tuple[int, list[int]] | None] = [None] * states
        for window, centroid in enumerate(table):
            way = ways[window >> bits]
            if way is not None:
                cost = way[0] + (centroid * centroid + 2**15 >> 16) - (value * centroid >> 16)
                best = after[window % states]
                if best is None or cost < best[0]:
                    after[window % states] = cost, [*way[1], window]
        ways = after
    return min((way for way in ways if way is not None), key=lambda way: way[0])[1]


def along_path(
    z: np.ndarray, mean: np.float32, bits: int, states: int
) -> tuple[list[np.ndarray], np.ndarray, np.float32]:
    """As `nearest`."""
    unit = np.float32(4096) / np.sqrt(mean) if mean > 0 else np.float32(0)
    x = np.rint(np.clip(z * unit, -16384, 16383)).astype(int).tolist()
    windows = best_path(x, bits, states)
    chosen = np.array(table_of(bits, states), np.float32)[windows] / np.float32(2048)
    return [np.array(windows) >> bit & 1 != 0 for bit in range(bits)], chosen, total(z * chosen)


def encode(x: np.ndarray, bits: int, states: int) -> tuple[np.uint32, bytes, np.ndarray]:
    """Header, codes and the decoded block."""
    size = max(1 << (len(x) - 1).bit_length(), 1 if states == 1 else 8)
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
    planes, chosen, product = nearest(z, mean, bits) if states == 1 else along_path(z, mean, bits, states)
    scale = (energy / product if energy else np.float32(0)) * np.float32(2.0**exponent)
    word = int(scale.view(np.uint32)) + 0x800 & ~0xFFF
    if not np.isfinite(scale) or word >= 0x7F800000:
        return np.uint32(0x7FC00000), empty, np.full_like(x, np.nan)
    codes = b"".join(np.packbits(plane, bitorder="little").tobytes() for plane in planes)
    y = hadamard(chosen)[: len(x)]
    return np.uint32(word | seed), codes, y * np.uint32(word).view(np.float32) * signs(seed, len(x))


def check(codec: Eden, x: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        blocks = [encode(x[i : i + codec.block], codec.bits, codec.states) for i in range(0, len(x), codec.block)]
    wire = np.array([b[0] for b in blocks], np.uint32).tobytes() + b"".join(b[1] for b in blocks)
    decoded = np.concatenate([b[2] for b in blocks])
    for backend in BACKENDS:
        with codecs.use_backend(backend):
            got = codec.encode(torch.from_numpy(x)[None])
            y = codec.decode(got, len(x))[0].numpy()
        assert got[0].numpy().tobytes() == wire + bytes(-len(wire) % 4), backend
        np.testing.assert_array_equal(y, decoded, err_msg=backend)


@pytest.mark.parametrize(("bits", "states"), LOST)
def test_all_backends_are_the_oracle(bits: int, states: int):
    rng = np.random.default_rng(bits)
    short = 8 if states == 1 else 32
    for n, block in ((1, short), (3, short), (200, 32), (451, 256), (1000, 512)):
        for scale in (1e-30, 1.0, 1e30):
            check(Eden(bits=bits, block=block, states=states), (rng.standard_normal(n) * scale).astype(np.float32))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), n=st.integers(1, 70), kind=st.sampled_from(sorted(LOST)))
def test_all_floats(data: st.DataObject, n: int, kind: tuple[int, int]):
    x = data.draw(hnp.arrays(np.float32, n, elements=st.floats(width=32), fill=st.sampled_from([0.0, -2.5])))
    check(Eden(bits=kind[0], states=kind[1], block=16 if kind[1] == 1 else 32), x)


@pytest.mark.parametrize(("bits", "states"), LOST)
def test_what_is_lost_hardly_depends_on_the_values(bits: int, states: int):
    generator = torch.Generator().manual_seed(7)
    codec, normal = Eden(bits=bits, states=states), torch.randn(2**16, generator=generator)
    for x in (normal, normal**3, (normal > 0).float() + 1e-3 * normal):
        y = codec.decode(codec.encode(x[None]), len(x))[0]
        blocks, lost = x.view(-1, 256), (y - x).view(-1, 256)
        share = (lost.square().sum(1) / blocks.square().sum(1)).mean().item()
        assert share == pytest.approx(LOST[bits, states], rel=0.2)
        torch.testing.assert_close((y * x).view(-1, 256).sum(1), blocks.square().sum(1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("n", [256, 37, 200])
def test_errors_of_many_nearly_equal_rows_average_out(n: int):
    """What makes feedback needless: the seed follows the data, so it is another one in each rank and step."""
    generator = torch.Generator().manual_seed(3)
    codec, rows = Eden(), 2000
    x = torch.randn(n, generator=generator).abs() ** 3  # all positive: signs alone would say nothing
    near = x * (1 + 1e-5 * torch.randn((rows, n), generator=generator))
    mean = codec.decode_mean(codec.encode(near), n, torch.empty(n), 1 / rows)
    assert ((mean - x).norm() / x.norm()).item() < 4 * math.sqrt(LOST[1, 1] / rows)


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


@pytest.mark.parametrize(("bits", "states"), [(1, 2), (1, 0), (2, 32), (3, 8), (4, 8), (1, 8.0), (1, None), (1, True)])
def test_states_are_checked(bits: int, states: object):
    with pytest.raises(ValueError, match=rf"states must be one of \[1.* with bits={bits}, got"):
        Eden(bits=bits, states=states)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bits", "states"), TRELLISES)
def test_a_trellis_finds_the_best_of_all_paths(bits: int, states: int):
    trellis, generator = trellis_of(bits, states), torch.Generator().manual_seed(1)
    assert trellis is not None
    n = 8 // bits
    every_PN = torch.cartesian_prod(*[torch.arange(2**bits, dtype=torch.int32)] * n)
    z_PN = trellis.centroids(every_PN)
    for _ in range(20):
        x_N = torch.randn(n, generator=generator)
        best = (z_PN - x_N).square().sum(1).min().item()
        found_N = trellis.centroids(trellis.codes(x_N[None] * 4096))[0]
        assert (found_N - x_N).square().sum().item() <= best + 0.1  # each of 8 costs is rounded to 1/128 of half of it


def block_that_turns_into(z: np.ndarray) -> np.ndarray:
    """A block whose rotation is z, or nearly: its seed is that of the signs with which it was turned back."""
    turned = hadamard(z)
    for exponent in np.arange(1, 1 + 2**-7, 2**-22, dtype=np.float32):
        x = turned * exponent * signs(77, len(z))
        if mix(int(x.view(np.uint32).astype(np.uint64).sum())) >> 20 == 77:
            return x
    raise AssertionError("no such block")


@cache  # the search takes seconds
def blocks_beyond_the_cut() -> list[np.ndarray]:
    """With as many elements there as there can be, one after the other."""
    rng = np.random.default_rng(5)
    found = []
    for pattern in (np.ones(16), np.tile([1, -1], 8), rng.choice([-1, 1], 16)):
        z = np.zeros(256, np.float32)
        z[100:116] = 1.9 * pattern
        z += 0.01 * rng.standard_normal(256).astype(np.float32)
        found.append(block_that_turns_into(z))
        turned = hadamard(found[-1] * signs(77, 256))
        assert (np.abs(turned) > 3.9 * np.sqrt(np.mean(turned**2))).sum() == 16
    return found


@pytest.mark.parametrize(("bits", "states"), TRELLISES)
def test_elements_beyond_the_cut(bits: int, states: int):
    """Costs change as much as they ever do."""
    for x in blocks_beyond_the_cut():
        check(Eden(bits=bits, states=states), x.copy())


def test_a_trellis_needs_longer_blocks():
    with pytest.raises(ValueError, match="block must be 32 or more with states=8, got 16"):
        Eden(states=8, block=16)


@pytest.mark.parametrize(("bits", "states"), TRELLISES)
def test_every_trellis_is_known_elsewhere(bits: int, states: int):
    codec = Eden(bits=bits, states=states)
    assert share_of_noise(codec, num=2) == pytest.approx(LOST[bits, states] / (1 + LOST[bits, states]), rel=0.02)


def test_saved_names_are_those_of_before():
    assert repr(Eden(bits=2)) == "Eden(block=256, bits=2)"
    assert repr(Eden(bits=2, states=8)) == "Eden(block=256, bits=2, states=8)"
    assert codecs.get("eden:bits=2:states=8") == Eden(bits=2, states=8) != Eden(bits=2)


@pytest.mark.parametrize(("bits", "states"), TRELLISES)
def test_costs_fit_16_bits(bits: int, states: int):
    """As compiled code counts on, whatever the elements are."""
    table = table_of(bits, states)
    branches = [(c * c + 2**15 >> 16) - (x * c >> 16) for c in table for x in (-16384, 16383)]
    low, high, depth = min(branches), max(branches), -(-(states.bit_length() - 1) // bits)
    assert 12000 + depth * low > depth * high  # a path that does not begin in state 0 is never the best
    assert max(12000 + depth * (high - low), 0) + 8 * max(high, -low) < 2**15


def test_feedback_is_off_by_default_for_what_is_unbiased():
    assert [fit_feedback(None, codec) for codec in (Eden(), Eden(bits=4), Sign(), Int4(), TopK())] == [
        *(False, False),
        *(True, True, True),
    ]
    assert fit_feedback(True, Eden()) and not fit_feedback(False, Sign())
