"""packed_top_k against an independent oracle, and its special cases; all backends give the same bits."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bagua import codecs
from bagua.codecs import PackedTopK
from tests.codecs.oracle_check import BACKENDS, MAX, numbers
from tests.codecs.oracle_check import check as check_rows


def to_bf16(value: np.float32) -> int:
    """The bits of the nearest bfloat16, half to even; of a finite or infinite number."""
    bits = int(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def from_bf16(bits: int) -> np.float32:
    return np.uint32(bits << 16).view(np.float32)


def lane_mean(sizes: list[np.float32]) -> np.float32:
    """The mean with 64 partial sums; `sizes` has a 0 for each element that is left out, and None is none of them."""
    sums = [np.float32(0)] * 64
    for i, x in enumerate(sizes):
        sums[i % 64] = sums[i % 64] + x
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[k] + sums[k + half] for k in range(half)]
    return sums[0]


def packed(bits: list[bool]) -> bytes:
    return np.packbits(np.array(bits, bool), bitorder="little").tobytes()


def oracle(row: np.ndarray, ratio: float, block: int) -> tuple[bytes, np.ndarray]:
    """The wire and the decoded row, element by element."""
    headers, codes, decoded = b"", b"", np.zeros_like(row)
    for first in range(0, len(row), block):
        part = row[first : first + block]
        m = len(part)
        k = max(1, math.ceil(ratio * m))
        order = np.argsort(-(part.view(np.int32) & 0x7FFFFFFF).astype(np.int64), kind="stable")
        index = np.sort(order[:k])
        size, negative = np.abs(part[index]), np.signbit(part[index])
        mean = lane_mean(list(size)) / np.float32(k)
        high = size > (0 if size.min() == 0 else mean)
        levels = []
        for chosen in (~high, high):
            total = lane_mean([s if c else np.float32(0) for s, c in zip(size, chosen, strict=True)])
            levels.append(to_bf16(total / np.float32(max(1, chosen.sum()))))
        if not np.isfinite(mean) or not all(np.isfinite(from_bf16(level)) for level in levels):
            levels, negative, high = [0x7FC0, 0x7FC0], np.zeros(k, bool), np.zeros(k, bool)
        low_bits = math.floor(math.log2(Fraction(m, k)))
        upper = [False] * (k + (m - 1 >> low_bits))
        for i, at in enumerate(index):
            upper[i + (int(at) >> low_bits)] = True
        headers += np.array(levels, np.uint16).tobytes()
        codes += packed(upper)
        for bit in range(low_bits):
            codes += packed([bool(at >> bit & 1) for at in index])
        codes += packed(list(negative)) + packed(list(high))
        magnitude = np.array([from_bf16(levels[int(h)]) for h in high])
        decoded[first + index] = np.where(negative, -magnitude, magnitude)
    wire = headers + codes
    return wire + bytes(-len(wire) % 4), decoded


def check(codec: PackedTopK, x: np.ndarray) -> None:
    check_rows(codec, lambda row: oracle(row, codec.ratio, codec.block), x)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    x=st.integers(1, 70).flatmap(lambda n: hnp.arrays(np.float32, (2, n), elements=numbers())),
    block=st.integers(1, 40),
    ratio=st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.7, 1.0]),
)
def test_is_the_oracle(x: np.ndarray, block: int, ratio: float) -> None:
    check(PackedTopK(ratio, block), x)


@pytest.mark.parametrize("n", [1, 5, 63, 64, 65, 4095, 4096, 4097, 3 * 4096 + 100])
def test_is_the_oracle_with_its_defaults(n: int) -> None:
    """Whole and short blocks of the default length."""
    x = np.random.default_rng(n).standard_normal((2, n)).astype(np.float32)
    check(PackedTopK(), x)


def test_bytes() -> None:
    """84 bytes for 64 of 4096 elements: below 0.22 bits for each element, headers included."""
    codec = PackedTopK()
    assert codec.wire_bytes(4096) == 84 and codec.wire_bytes(10 * 4096) == 840
    assert 8 * codec.wire_bytes(1 << 24) / (1 << 24) == 0.1640625
    assert codec.wire_bytes(0) == 0
    assert codec.wire_bytes(1) == 8  # header, one bit of the index, sign and magnitude
    assert codec.wire_bytes(4096 + 1) == 84 + 8
    assert codec.wire_bytes(4096, torch.bfloat16) == 84


def test_two_magnitudes_are_the_means() -> None:
    x = torch.zeros(1, 64)
    x[0, [3, 17, 40, 63]] = torch.tensor([1.0, -2.0, 5.0, -7.0])  # the mean magnitude is 3.75
    codec = PackedTopK(ratio=1 / 16, block=64)
    y = codec.decode(codec.encode(x), 64)
    assert y.nonzero()[:, 1].tolist() == [3, 17, 40, 63]
    assert y[0, [3, 17, 40, 63]].tolist() == [1.5, -1.5, 6.0, -6.0]


def test_zeros_that_are_kept_are_exact() -> None:
    """Parameters without a gradient do not move."""
    x = torch.zeros(1, 64)
    x[0, [3, 17]] = torch.tensor([1.0, -2.0])
    codec = PackedTopK(ratio=1 / 8, block=64)
    y = codec.decode(codec.encode(x), 64)
    assert y.nonzero()[:, 1].tolist() == [3, 17] and y[0, [3, 17]].tolist() == [1.5, -1.5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), MAX])
def test_what_is_not_finite_stays_visible_in_its_block(bad: float) -> None:
    """MAX overflows in the sum of magnitudes. Other blocks are not touched."""
    x = torch.randn((1, 192), generator=torch.Generator().manual_seed(0))
    x[0, 70:72] = bad
    codec = PackedTopK(ratio=1 / 8, block=64)
    y = codec.decode(codec.encode(x), 192)[0]
    assert not y[70:72].isfinite().any()
    assert y[64:128].isnan().sum() == 8 and y[:64].isfinite().all() and y[128:].isfinite().all()
    residual = torch.zeros_like(x)
    codec.encode_with_feedback(x, residual)
    assert residual.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 40, 64, 130])
def test_damaged_bytes_are_refused_or_decode_to_something(backend: str, n: int) -> None:
    """Nothing is read or written out of bounds; indices that are not ascending are refused by name."""
    codec = PackedTopK(ratio=1 / 8, block=64)
    generator = torch.Generator().manual_seed(n)
    refused = 0
    with codecs.use_backend(backend):
        good = codec.encode(torch.randn((2, n), generator=generator))
        for _ in range(100):
            wire = torch.randint(0, 256, good.shape, dtype=torch.uint8, generator=generator)
            try:
                assert codec.decode(wire, n).shape == (2, n)
                codec.decode_mean(wire, n, torch.empty(n), 0.5)
            except ValueError as error:
                if "wire_RW" not in str(error) or "ascending" not in str(error):
                    raise
                refused += 1
        for filled in (0, 255):
            with pytest.raises(ValueError, match="wire_RW"):
                codec.decode_mean(torch.full_like(good, filled), n, torch.empty(n), 0.5)
    assert n < 2 or refused > 50


@pytest.mark.parametrize("width", [0, 80, 88])
def test_wires_of_another_length_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match=r"wire_RW must be \[R, 84\]"):
        PackedTopK().decode(torch.zeros((1, width), dtype=torch.uint8), 4096)


@pytest.mark.parametrize(
    ("options", "word"),
    [({"ratio": 0.0}, "ratio"), ({"ratio": 1.5}, "ratio"), ({"block": 0}, "block"), ({"block": None}, "block")],
)
def test_bad_options(options: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        codecs.get("packed_top_k", **options)
