"""Sign, int4 and top-k against independent oracles, and their special cases; all backends give the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bagua import codecs
from bagua.codecs import Codec, Int4, Sign, TopK, top_k
from tests.codecs.oracle_check import BACKENDS, check, numbers

BlockOracle = Callable[[np.ndarray, int], tuple[bytes, np.ndarray]]


def pad4(wire: bytes) -> bytes:
    return wire + bytes(-len(wire) % 4)


def blocks_of(row: np.ndarray, block: int) -> list[np.ndarray]:
    return [row[i : i + block] for i in range(0, len(row), block)]


def sign_oracle(row: np.ndarray, block: int) -> tuple[bytes, np.ndarray]:
    """The wire and the decoded row, element by element in fp32."""
    scales, bits, decoded = [], [], []
    for part in blocks_of(row, block):
        sums = [np.float32(0)] * 64
        for i, x in enumerate(part):
            sums[i % 64] = sums[i % 64] + abs(x)
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [sums[k] + sums[k + half] for k in range(half)]
        scale = sums[0] / np.float32(len(part))
        negative = np.signbit(part)
        if not np.isfinite(scale):
            scale, negative = np.float32(np.nan), np.zeros_like(negative)
        scales.append(scale)
        bits.append(np.packbits(negative, bitorder="little"))
        decoded.append(np.where(negative, -scale, scale))
    return pad4(np.array(scales, np.float32).tobytes() + np.concatenate(bits).tobytes()), np.concatenate(decoded)


def int4_oracle(row: np.ndarray, block: int) -> tuple[bytes, np.ndarray]:
    """The wire and the decoded row, in fp32."""
    headers, codes, decoded = [], [], []
    for part in blocks_of(row, block):
        most = np.abs(part).max()
        if not np.isfinite(most):
            most, q = np.float32(np.nan), np.zeros(len(part), np.int32)
        elif most == 0:
            q = np.zeros(len(part), np.int32)
        else:
            up = np.float32(2.0**100 if most < 2.0**-100 else 1.0)
            q = np.rint((part * up) * (np.float32(7) / (most * up))).astype(np.int32)
        half = -(-len(part) // 2)
        high = np.zeros(half, np.int32)
        high[: len(part) - half] = q[half:]
        headers.append(most)
        codes.append((q[:half] & 15 | (high & 15) << 4).astype(np.uint8))
        decoded.append((q.astype(np.float32) * np.float32(1 / 7)) * most)
    return pad4(np.array(headers, np.float32).tobytes() + np.concatenate(codes).tobytes()), np.concatenate(decoded)


def top_k_oracle(row: np.ndarray, block: int, ratio: float = 0.1) -> tuple[bytes, np.ndarray]:
    """The wire and the decoded row, by a stable sort."""
    kept = []
    for first in range(0, len(row), block):
        part = row[first : first + block]
        order = np.argsort(-(part.view(np.int32) & 0x7FFFFFFF).astype(np.int64), kind="stable")
        kept.append(first + np.sort(order[: max(1, math.ceil(ratio * len(part)))]))
    index = np.concatenate(kept)
    decoded = np.zeros_like(row)
    decoded[index] = row[index]
    return index.astype(np.int32).tobytes() + row[index].tobytes(), decoded


CASES: dict[str, tuple[Callable[[int], Codec], BlockOracle]] = {
    "sign": (lambda block: Sign(block=block), sign_oracle),
    "int4": (lambda block: Int4(block=block), int4_oracle),
    "top_k": (lambda block: TopK(ratio=0.1, block=block), top_k_oracle),
}


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), rows=st.integers(1, 3), n=st.integers(1, 200), block=st.sampled_from([8, 24, 64, 104, 1024]))
def test_all_backends_are_the_oracle(name: str, data: st.DataObject, rows: int, n: int, block: int):
    make, oracle = CASES[name]
    fill = st.sampled_from([0.0, 1.0, -2.5])
    x = data.draw(hnp.arrays(np.float32, (rows, n), elements=numbers(), fill=fill))
    check(make(block), partial(oracle, block=block), x)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [2.0**-149, 2.0**-130, 2.0**-101, 1.0, 1e30])
def test_rows_of_many_blocks(name: str, scale: float):
    make, oracle = CASES[name]
    rng = np.random.default_rng(5)
    for n, block in ((2051, 256), (5000, 2048), (385, 128)):
        x = (rng.standard_normal((2, n)) * 8 * scale).astype(np.float32)
        check(make(block), partial(oracle, block=block), x)


@pytest.mark.parametrize("codec", [Sign(block=136), Int4(block=136)], ids=repr)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_is_lost_as_a_whole(codec: Codec, backend: str):
    for at in range(136, 272):
        for bad in (float("nan"), -float("inf")):
            x = torch.linspace(-1, 1, 400).repeat(2, 1)
            x[1, at] = bad
            with codecs.use_backend(backend):
                wire = codec.encode(x)
                y = codec.decode(wire, 400)
            lost = torch.zeros((2, 400), dtype=torch.bool)
            lost[1, 136:272] = True
            assert torch.equal(y.isnan(), lost), at
            assert wire[1, 4:8].tolist() == [0, 0, 0xC0, 0x7F]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", [Sign(), Int4()], ids=repr)
def test_large_outputs_are_streamed_correctly(codec: Codec, backend: str):
    n = 9 * 2**20 + 13
    with codecs.use_backend(backend):
        wire = codec.encode(torch.sin(torch.arange(float(n)))[None])
        whole = codec.decode(wire, n)
        odd = codec.decode(wire, n, out=torch.empty(n + 1)[1:][None])
    assert torch.equal(whole, odd)
    with codecs.use_backend("torch"):
        assert torch.equal(whole, codec.decode(wire, n))


def test_codes_round_half_to_even():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 7.0, -7.0]]) / 8
    for backend in BACKENDS:
        with codecs.use_backend(backend):
            y = Int4(block=8).decode(Int4(block=8).encode(x), 8)
        torch.testing.assert_close(y * 8, torch.tensor([[0.0, 2, 2, 0, -2, -2, 7, -7]]))


def test_of_equal_magnitudes_the_first_are_kept():
    x = torch.tensor([[1.0, -2.0, 2.0, 1.0, -1.0, 2.0, 0.0, 0.0, 0.0, 0.0]])
    for ratio, kept in ((0.1, [1]), (0.2, [1, 2]), (0.4, [0, 1, 2, 5]), (0.5, [0, 1, 2, 3, 5]), (0.7, range(7))):
        y = TopK(ratio=ratio).encode(x)
        assert y[0, : y.shape[1] // 2].view(torch.int32).tolist() == list(kept)


def test_infinities_and_nan_travel_first():
    x = torch.ones((1, 1000))
    x[0, 3], x[0, 700], x[0, 999] = float("inf"), float("nan"), -5.0
    assert TopK(ratio=0.001).encode(x)[0, :4].view(torch.int32).item() == 700
    y = TopK(ratio=0.003).decode(TopK(ratio=0.003).encode(x), 1000)
    assert y[0, 3] == float("inf") and y[0, 700].isnan() and y[0, 999] == -5.0
    assert int((y == 0).sum()) == 997


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.randn(n, generator=torch.Generator().manual_seed(1)),
        lambda n: torch.randint(0, 4, (n,), generator=torch.Generator().manual_seed(2)).float(),
        lambda n: torch.zeros(n),
        lambda n: torch.zeros(n).index_fill_(0, torch.arange(0, n, 5000), float("nan")),
        lambda n: (torch.arange(n) % (n // 32768 | 1) == 0).float() * torch.arange(n),  # the sample misleads
        lambda n: torch.arange(n).float(),
    ],
    ids=["normal", "ties", "zeros", "few", "misleading", "sorted"],
)
def test_long_rows_are_selected_exactly(make: Callable[[int], torch.Tensor]):
    n = 300_001
    x = make(n)
    for ratio in (1e-6, 0.001, 0.01, 0.3, 1.0):
        k = max(1, math.ceil(ratio * n))
        assert torch.equal(top_k._largest_of_long(x, k), top_k._largest_at_once(x, k)), ratio
    wire, decoded = top_k_oracle(x.numpy(), n, 0.01)
    got = TopK(ratio=0.01).encode(x[None])
    assert got[0].numpy().tobytes() == wire
    np.testing.assert_array_equal(TopK(ratio=0.01).decode(got, n)[0].numpy(), decoded)


def test_top_k_sizes():
    for n, ratio, k in ((1, 0.01, 1), (100, 0.01, 1), (101, 0.01, 2), (7, 1.0, 7), (7, 1, 7), (10**9, 0.001, 10**6)):
        assert TopK(ratio=ratio).wire_bytes(n) == 8 * k
    assert TopK(ratio=0.1, block=96).wire_bytes(2 * 96 + 5) == 8 * (10 + 10 + 1)
    with pytest.raises(ValueError, match="fewer than"):
        TopK().wire_bytes(2**31)


@pytest.mark.parametrize("ratio", [0, 0.0, -0.1, 1.01, float("nan"), float("inf"), "0.1", None, True])
def test_ratio_is_checked(ratio: object):
    with pytest.raises(ValueError, match="ratio must be"):
        TopK(ratio=ratio)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [Sign, Int4, lambda block: TopK(block=block)], ids=["sign", "int4", "top_k"])
def test_block_is_checked(make: Callable[..., Codec]):
    bad = [0, -8, 8.0, "128", True]
    bad += [] if make not in (Sign, Int4) else [None, 3]
    bad += [] if make is not Sign else [4, 12]
    for block in bad:
        with pytest.raises(ValueError, match="block must be a positive"):
            make(block=block)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch"])
def test_damaged_indices_are_noticed(backend: str):
    wire = TopK(ratio=0.02).encode(torch.randn((3, 10_000), generator=torch.Generator().manual_seed(1)))
    for at, index in ((0, -1), (0, 10_000), (5, 2**31 - 1), (7, 0)):
        bad = wire.clone()
        bad.view(torch.int32)[1, at] = index
        with codecs.use_backend(backend), pytest.raises(ValueError, match="not ascending in 0..9999"):
            TopK(ratio=0.02).decode_mean(bad, 10_000, torch.empty(10_000), 0.5)
