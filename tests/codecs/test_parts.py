"""A row that is encoded and decoded in parts is one that is encoded and decoded at once, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from bagua import codecs
from bagua.codecs import Codec, Eden, Identity, Int4, MinMaxUInt8, Sign, TopK

CODECS = (MinMaxUInt8(), MinMaxUInt8(block=64), Int4(), Sign(), Sign(block=8), Eden(bits=2))
CPU = torch.device("cpu")
NATIVE = [name for name in codecs.available_backends() if name.startswith("native")]
LERPING = [name for name in NATIVE if name != "native-baseline"]


def row(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def cuts(n: int, align: int) -> list[tuple[int, int]]:
    """Parts of one, two, three ... blocks, the last one first."""
    ends, at, blocks = [0], 0, 1
    while at < n:
        at, blocks = min(at + blocks * align, n), blocks + 1
        ends.append(at)
    return list(itertools.pairwise(ends))[::-1]


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("n", [1, 63, 2048, 5003, 40000])
def test_parts(codec: Codec, n: int, backend: str) -> None:
    with codecs.use_backend(backend):
        align = codec.part_numel(CPU)
        assert align is not None
        x_N, lost_N = row(n), row(n, 1)
        whole_lost, part_lost = lost_N.clone(), lost_N.clone()
        plain, fed = codec.encode(x_N[None])[0], codec.encode_with_feedback(x_N[None], whole_lost[None])[0]
        plain_parts, fed_parts = torch.full_like(plain, 7), torch.full_like(fed, 7)
        decoded = torch.empty(n)
        for lo, hi in cuts(n, align):
            codec.encode_part(x_N[lo:hi], plain_parts, lo, n)
            codec.encode_part(x_N[lo:hi], fed_parts, lo, n, part_lost[lo:hi])
        for lo, hi in cuts(n, align):
            codec.decode_part(fed_parts, lo, n, decoded[lo:hi])
        assert torch.equal(plain_parts, plain)
        assert torch.equal(fed_parts, fed)
        assert torch.equal(part_lost, whole_lost)
        assert torch.equal(decoded, codec.decode(fed[None], n)[0])


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_parts_that_nobody_reads_soon(codec: Codec, offset: int, backend: str) -> None:
    """From 1 MiB on they are written past the caches, whose instructions want aligned memory."""
    n, begin = (1 << 18) + 2048 + 77, 2048
    with codecs.use_backend(backend):
        wire_W = codec.encode(row(n)[None])[0]
        around = torch.full((offset + n + 16,), 7.0)
        codec.decode_part(wire_W, begin, n, around[offset : offset + n - begin], soon=False)
        assert torch.equal(around[offset : offset + n - begin], codec.decode(wire_W[None], n)[0, begin:])
        assert (around[:offset] == 7).all()
        assert (around[offset + n - begin :] == 7).all()


@pytest.mark.parametrize("backend", LERPING)
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize(
    ("n", "offset"), [(1, 0), (63, 1), (5003, 0), (5003, 3), ((1 << 18) + 77, 0), ((1 << 18) + 77, 1)]
)
def test_parts_that_are_mixed(codec: Codec, n: int, offset: int, backend: str) -> None:
    """As by `torch.lerp` before and after, bit for bit."""
    with codecs.use_backend(backend):
        assert codec.part_lerps(CPU)
        x_N, other_N, lost_N = row(n), row(n + offset, 1)[offset:], row(n, 2)
        for weight, residual in itertools.product((0.9, 0.25, 0.5, -0.5, -9.0), (None, lost_N)):
            mixed_N = torch.lerp(x_N, other_N, weight)
            wires = [torch.empty(codec.wire_bytes(n), dtype=torch.uint8) for _ in range(2)]
            after = [None if residual is None else residual.clone() for _ in range(2)]
            codec.encode_part(x_N, wires[0], 0, n, after[0], (other_N, weight))
            codec.encode_part(mixed_N, wires[1], 0, n, after[1])
            assert torch.equal(*wires), weight
            if after[0] is not None and after[1] is not None:
                assert torch.equal(after[0], after[1]), weight
            want = torch.lerp(codec.decode(wires[0][None], n)[0], other_N, weight)
            for soon in (True, False):
                around = torch.full((offset + n + 16,), 7.0)
                codec.decode_part(wires[0], 0, n, around[offset : offset + n], soon=soon, lerp=(other_N, weight))
                assert torch.equal(around[offset : offset + n], want), weight
                assert (around[:offset] == 7).all()
                assert (around[offset + n :] == 7).all()


@pytest.mark.skipif(not LERPING, reason="needs fused multiply-add and the compiled codecs")
def test_a_mixed_part_of_the_wrong_length() -> None:
    codec, n = MinMaxUInt8(), 2048
    wire_W = torch.zeros(codec.wire_bytes(n), dtype=torch.uint8)
    with codecs.use_backend(LERPING[0]):
        with pytest.raises(ValueError, match="lerp"):
            codec.encode_part(row(n), wire_W, 0, n, None, (row(n - 1), 0.9))
        with pytest.raises(ValueError, match="lerp"):
            codec.decode_part(wire_W, 0, n, row(n), lerp=(row(n).double(), 0.9))


@pytest.mark.skipif("native-baseline" not in NATIVE, reason="needs the compiled codecs")
def test_no_mixing_without_fused_multiply_add() -> None:
    codec, n = MinMaxUInt8(), 2048
    wire_W = torch.zeros(codec.wire_bytes(n), dtype=torch.uint8)
    with codecs.use_backend("native-baseline"):
        assert not codec.part_lerps(CPU)
        with pytest.raises(TypeError, match="cannot mix parts"):
            codec.encode_part(row(n), wire_W, 0, n, None, (row(n), 0.9))


def test_codecs_that_need_whole_rows_say_so() -> None:
    for codec in (Identity(), TopK(0.1), MinMaxUInt8(block=None)):
        assert codec.part_numel(CPU) is None
        with pytest.raises(TypeError, match=codec.name):
            codec.encode_part(row(8), torch.empty(codec.wire_bytes(8), dtype=torch.uint8), 0, 8)
    with codecs.use_backend("torch"):
        assert MinMaxUInt8().part_numel(CPU) is None


@pytest.mark.skipif(not NATIVE, reason="needs the compiled codecs")
@pytest.mark.parametrize(
    ("start", "m", "width", "named"),
    [
        (8, 1024, 0, "not whole blocks of 1024"),
        (0, 1000, 0, "not whole blocks of 1024"),
        (2048, 1024, 0, "elements 2048 to 3072 of 3000"),
        (-1024, 1024, 0, "not whole blocks"),
        (0, 1024, 4, "wire_W must be"),
    ],
)
def test_wrong_parts(start: int, m: int, width: int, named: str) -> None:
    codec, n = MinMaxUInt8(), 3000
    wire_W = torch.zeros(codec.wire_bytes(n) + width, dtype=torch.uint8)
    with codecs.use_backend(NATIVE[0]):
        with pytest.raises(ValueError, match=named):
            codec.encode_part(row(m), wire_W, start, n)
        with pytest.raises(ValueError, match=named):
            codec.decode_part(wire_W, start, n, torch.empty(m))
        with pytest.raises(ValueError, match="residual_M must be"):
            codec.encode_part(row(1024), codec.encode(row(n)[None])[0], 0, n, row(1023))
