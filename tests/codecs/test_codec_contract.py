"""What holds for every codec on every backend."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
import re
import threading

import pytest
import torch
from torch import Tensor

from bagua import codecs
from bagua.codecs import Bf16, Codec, Eden, Fp16, Identity, Int4, MinMaxUInt8, PackedTopK, Sign, TopK, chunks
from bagua.codecs.minmax_torch import MinMaxTorch

from .conftest import FEW_BACKENDS

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (1, 2, 3, 5, 31, 95, 96, 97, 1023, 1024, 1025, 3 * 1024 + 17)


def bound(codec: Codec, x_RN: Tensor) -> Tensor:
    """The largest error that a round trip may have, for each element, in float64."""
    x = x_RN.double()
    if codec.lossless:
        return torch.zeros_like(x)
    if not codec.linear:
        block = getattr(codec, "block", None) or max(x.shape[1], 1)
        return torch.cat([bound_of_block(codec, part) for part in x.split(block, dim=1)], 1) + 2.0**-148
    half = torch.finfo(codec.wire_dtype())
    return x.abs() * half.eps / 2 + half.tiny * half.eps


def bound_of_block(codec: Codec, x_RB: Tensor) -> Tensor:
    """`bound` of one block."""
    magnitude = x_RB.abs()
    if isinstance(codec, MinMaxUInt8):
        span = x_RB.amax(1, keepdim=True) - x_RB.amin(1, keepdim=True)
        return (0.51 * span / 255 + magnitude.amax(1, keepdim=True) * 2.0**-22).expand_as(x_RB)
    if isinstance(codec, Int4):
        return (0.51 * magnitude.amax(1, keepdim=True) / 7).expand_as(x_RB)
    if isinstance(codec, Sign):
        mean = magnitude.mean(1, keepdim=True)
        return (magnitude - mean).abs() + mean * 2.0**-20
    if isinstance(codec, Eden):  # of the block's norm; short blocks may be unlucky; the seed's bits of tiny scales
        return (2.0 * x_RB.norm(dim=1, keepdim=True) + 2.0**-135).expand_as(x_RB)
    if not isinstance(codec, TopK):  # of which no bound is known here
        return magnitude.amax(1, keepdim=True).expand_as(magnitude)
    k = max(1, math.ceil(codec.ratio * x_RB.shape[1]))
    return magnitude.scatter(1, magnitude.sort(dim=1, descending=True, stable=True).indices[:, :k], 0.0)


@pytest.mark.usefixtures("backend")
def test_round_trip_is_within_the_bound(codec: Codec, make):
    for n in SIZES:
        x = make(3, n)
        y = codec.decode(codec.encode(x), n)
        assert y.dtype == torch.float32
        assert bool(((y.double() - x.double()).abs() <= bound(codec, x)).all()), n


@pytest.mark.usefixtures("backend")
def test_wire_bytes_is_exact(codec: Codec, make):
    for dtype in DTYPES:
        for n in (0, *SIZES):
            wire = codec.encode(make(2, n, dtype))
            assert wire.dtype == torch.uint8
            assert tuple(wire.shape) == (2, codec.wire_bytes(n, dtype))
            assert wire.shape[1] % 4 == 0


@pytest.mark.usefixtures("backend")
def test_dtypes(codec: Codec, make):
    for dtype in DTYPES:
        x = make(2, 1500, dtype)
        y = codec.decode(codec.encode(x), 1500, dtype=dtype)
        assert y.dtype == dtype
        cast = torch.finfo(dtype).eps * (x.double().abs().maximum(y.double().abs()) + 0.02) if not codec.lossless else 0
        assert bool(((y.double() - x.double()).abs() <= bound(codec, x) + cast).all())


@pytest.mark.usefixtures("backend")
def test_chunks_do_not_show(codec: Codec, make, monkeypatch: pytest.MonkeyPatch):
    def results(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wire = codec.encode(x)
        mean = codec.decode_mean(wire, 1501, torch.empty_like(x[0]), 0.5)
        return wire, codec.decode(wire, 1501, dtype=x.dtype), mean

    rows = [make(2, 1501, dtype) for dtype in DTYPES]
    in_one = [results(x) for x in rows]
    monkeypatch.setattr(chunks, "CPU_CHUNK", 256)
    for x, expected in zip(rows, in_one, strict=True):
        for whole, chunked in zip(expected, results(x), strict=True):
            assert torch.equal(whole, chunked)


@pytest.mark.usefixtures("backend")
def test_constants_are_exact(codec: Codec, device: torch.device):
    for value in (0.0, 1.0, -3.0, 2.0**-20):
        for n in (1, 96, 1500):
            x = torch.full((2, n), value, device=device)
            y = codec.decode(codec.encode(x), n)
            if isinstance(codec, Eden):  # a rotated constant is none
                assert value or not bool(y.any())
                continue
            kept = y != 0 if isinstance(codec, TopK | PackedTopK) else torch.ones_like(x, dtype=torch.bool)
            assert torch.equal(y[kept], x[kept]), value


@pytest.mark.usefixtures("backend")
def test_zeros_among_others_are_exact(codec: Codec, make):
    x = make(2, 1500)
    x[:, ::3] = 0
    x[:, 500:800] = 0
    y = codec.decode(codec.encode(x), 1500)
    block = getattr(codec, "block", 1) or 1500
    if block < 100:
        assert not bool(y[:, 600:700].any()), "whole blocks of zeros"
    if not isinstance(codec, Sign | MinMaxUInt8 | Eden):  # these have no code for zero
        assert not bool(y[:, ::3].any())


@pytest.mark.usefixtures("backend")
def test_scales(codec: Codec, make):
    if isinstance(codec, Fp16):
        pytest.skip("its range is known to be small")
    for scale in (2.0**-149, 2.0**-130, 2.0**-60, 2.0**100):
        x = (make(2, 1500) * 4).clamp(-15, 15) * scale
        y = codec.decode(codec.encode(x), 1500)
        assert bool(((y.double() - x.double()).abs() <= bound(codec, x)).all())


@pytest.mark.not_interpreted
def test_backends_give_the_same_bytes(codec: Codec, make, backend: str):
    for n, rows in ((70_001, 3), (1501, 9), (63, 1)):
        x = make(rows, n) * (0.1 + make(1, n).abs())
        got = []
        for name in (backend, "torch"):
            with codecs.use_backend(name):
                wire = codec.encode(x)
                mean = codec.decode_mean(wire, n, torch.empty_like(x[0]), 0.3)
                got.append((wire, codec.decode(wire, n).view(torch.int32), mean.view(torch.int32)))
        for ours, reference in zip(*got, strict=True):
            assert torch.equal(ours, reference)


@pytest.mark.usefixtures("backend")
def test_what_is_not_finite_stays_visible(codec: Codec, make):
    for bad in (float("nan"), float("inf"), -float("inf")):
        for at in (0, 63, 64, 1498, 1499):
            x = make(2, 1500)
            x[1, at] = bad
            wire = codec.encode(x)
            y = codec.decode(wire, 1500)
            assert not bool(y[1, at].isfinite()), at
            assert bool(y[0].isfinite().all()), at
            mean = codec.decode_mean(wire, 1500, torch.empty_like(x[0]), 0.5)
            assert not bool(mean[at].isfinite()), at


@pytest.mark.usefixtures("backend")
def test_rows_are_independent(codec: Codec, make):
    x = make(5, 1501)
    x[3, 7] = float("nan")
    wire = codec.encode(x)
    for r in range(5):
        alone = codec.encode(x[r : r + 1])
        assert torch.equal(alone[0], wire[r])
        assert torch.equal(codec.decode(alone, 1501)[0].nan_to_num(), codec.decode(wire, 1501)[r].nan_to_num())


@pytest.mark.usefixtures("backend")
def test_views_at_odd_offsets(codec: Codec, make):
    for dtype in DTYPES:
        buffer = make(4, 1504, dtype)
        x = buffer[1:3, 1:1502]
        wire = codec.encode(x)
        assert torch.equal(wire, codec.encode(x.clone()))
        target = torch.zeros((4, 1504), dtype=dtype, device=x.device)
        y = codec.decode(wire, 1501, out=target[1:3, 1:1502])
        assert torch.equal(y, codec.decode(wire, 1501, dtype=dtype))
        target[1:3, 1:1502] = 0
        assert not bool(target.any()), "wrote outside of out"
        mean = codec.decode_mean(wire, 1501, target.view(-1)[1:1502], 0.5)
        assert torch.equal(mean, codec.decode_mean(wire, 1501, torch.empty_like(mean), 0.5))


@pytest.mark.usefixtures("backend")
def test_out_is_honoured(codec: Codec, make):
    for n in (1, 95, 1500):
        x = make(2, n)
        width = codec.wire_bytes(n)
        wires = torch.full((4, width + 8), 77, dtype=torch.uint8, device=x.device)
        out = wires[1:3, 4 : 4 + width]
        result = codec.encode(x, out=out)
        assert result is out
        assert torch.equal(out, codec.encode(x))
        assert bool((wires[::3] == 77).all())
        assert bool((wires[:, :4] == 77).all())
        assert bool((wires[:, 4 + width :] == 77).all())
        y = torch.empty_like(x)
        assert codec.decode(out, n, out=y) is y
        assert torch.equal(y, codec.decode(codec.encode(x), n))
        mean = torch.empty_like(x[0])
        assert codec.decode_mean(out, n, mean, 0.5) is mean


@pytest.mark.usefixtures("backend")
def test_decode_mean_is_the_mean_of_decodes(codec: Codec, make):
    every = itertools.cycle((1, 3, 70))  # each meets every dtype and every size
    for (n, dtype), rows in zip(itertools.product((1, 97, 1100), DTYPES), every, strict=False):
        same = codec.name == "identity"  # its wire holds what was encoded
        wire = codec.encode((make(rows, n) + 0.5).to(dtype if same else torch.float32))
        mean = codec.decode_mean(wire, n, torch.empty(n, dtype=dtype, device=wire.device), 1 / rows)
        exact = codec.decode(wire, n, dtype=dtype if same else torch.float32).double().mean(0)
        eps = max(torch.finfo(dtype).eps, 2.0**-23 * (1 + rows / 4))
        torch.testing.assert_close(mean.double(), exact, rtol=2 * eps, atol=4 * eps)


@pytest.mark.parametrize("codec", [Bf16(), Fp16()], ids=repr)
@pytest.mark.usefixtures("backend")
def test_every_half_is_summed(codec: Bf16 | Fp16, device: torch.device):
    every = torch.arange(-(2**15), 2**15, device=device).to(torch.int16)[None]
    mean = codec.decode_mean(every.view(torch.uint8), 2**16, torch.empty(2**16, device=device), 1.0)
    expected = every.view(codec.half)[0].float()
    assert torch.equal(mean.isnan(), expected.isnan())
    assert torch.equal(mean.nan_to_num(nan=7.0).view(torch.int32), expected.nan_to_num(nan=7.0).view(torch.int32))


@pytest.fixture
def flushing():
    """Denormals of fp32 are zero in this thread; those of fp16 are ordinary numbers in fp32."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("n", [1, 7, 8, 257, 2047])
@pytest.mark.usefixtures("backend", "flushing")
def test_denormal_halves_are_summed_where_denormals_are_flushed(n: int, device: torch.device):
    units = torch.arange(1, n + 1, device=device)  # of 2^-24; denormal below 1024
    wire = torch.zeros(n + n % 2, device=device, dtype=torch.int16)
    wire[:n] = units
    mean = Fp16().decode_mean(wire[None].view(torch.uint8), n, torch.empty(n, device=device), 1.0)
    expected = torch.where(units < 1024, units, 1024 + units % 1024).float() * 2.0**-24
    assert torch.equal(mean, expected)


@pytest.mark.usefixtures("backend")
def test_no_elements_and_no_rows(codec: Codec, device: torch.device):
    wire = codec.encode(torch.empty((3, 0), device=device))
    assert codec.wire_bytes(0) == 0
    assert tuple(codec.decode(wire, 0).shape) == (3, 0)
    assert codec.decode_mean(wire, 0, torch.empty(0, device=device), 1.0).numel() == 0
    none = codec.encode(torch.empty((0, 7), device=device))
    assert tuple(none.shape) == (0, codec.wire_bytes(7))
    assert tuple(codec.decode(none, 7).shape) == (0, 7)


@pytest.mark.not_interpreted
@pytest.mark.parametrize("backend", FEW_BACKENDS, indirect=True)
@pytest.mark.usefixtures("backend")
def test_deterministic_and_independent_of_threads(codec: Codec, make):
    x = make(4, 20_000)
    first = codec.encode(x)
    decoded, mean = codec.decode(first, 20_000), torch.empty_like(x[0])
    codec.decode_mean(first, 20_000, mean, 0.25)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if before > 1 else 2)
        assert torch.equal(codec.encode(x), first)
        assert torch.equal(codec.decode(first, 20_000), decoded)
        assert torch.equal(codec.decode_mean(first, 20_000, torch.empty_like(mean), 0.25), mean)
    finally:
        torch.set_num_threads(before)


@pytest.mark.not_interpreted
@pytest.mark.parametrize("backend", FEW_BACKENDS, indirect=True)
@pytest.mark.usefixtures("backend")
def test_many_threads_at_once(codec: Codec, make):
    rows = [make(r, 5000) for r in range(1, 7)]
    expected = [codec.encode(x) for x in rows]
    same = [False] * len(rows)

    def work(i: int) -> None:
        same[i] = all(torch.equal(codec.encode(rows[i]), expected[i]) for _ in range(5))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread of the codec has not ended"
    assert all(same)


def test_values_of_parameters_are_taken_without_a_graph(codec: Codec, device: torch.device):
    x = torch.nn.Parameter(torch.ones((2, 1), device=device))
    wire = codec.encode(x)
    assert not wire.requires_grad
    expected = codec.decode(wire, 1)
    codec.decode(wire, 1, out=x)
    assert torch.equal(x.detach(), expected)


def test_a_codec_is_a_value(codec: Codec):
    same = dataclasses.replace(codec)
    assert same == codec
    assert hash(same) == hash(codec)
    assert copy.deepcopy(codec) == codec
    assert pickle.loads(pickle.dumps(codec)) == codec
    assert type(codec).__name__ in repr(codec)
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.block = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("codec", [Identity(), Bf16(), Fp16()], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wires_of_linear_codecs_may_be_summed(codec: Codec, make, dtype: torch.dtype):
    n = 1502
    x = (make(4, n) * 8).round().to(dtype) / 8  # sums are exact in every dtype
    wire = codec.encode(x)
    summed = wire.view(codec.wire_dtype(dtype)).sum(0, keepdim=True).to(codec.wire_dtype(dtype))
    total = codec.decode(summed.view(torch.uint8), n, dtype=dtype)
    assert torch.equal(total[0].double(), codec.decode(wire, n, dtype=dtype).double().sum(0))


def test_only_linear_codecs_have_a_wire_dtype(codec: Codec):
    if codec.linear:
        assert codec.wire_dtype(torch.float32).is_floating_point
    else:
        with pytest.raises(TypeError, match=codec.name):
            codec.wire_dtype(torch.float32)


def test_encode_names_what_is_wrong(codec: Codec, device: torch.device):
    cases = (
        (torch.zeros((2, 3), dtype=torch.int32), r"x_RN.*int32"),
        (torch.zeros((2, 3), dtype=torch.complex64), r"x_RN.*complex64"),
        (torch.zeros(3), r"x_RN.*2 dims"),
        (torch.zeros((2, 3, 4)), r"x_RN.*2 dims"),
        (torch.zeros((3, 2)).t(), r"x_RN.*contiguous"),
    )
    for x, message in cases:
        with pytest.raises(ValueError, match=message):
            codec.encode(x.to(device))


def test_wires_and_outputs_are_checked(codec: Codec, device: torch.device):
    x = torch.zeros((2, 8), device=device)
    wire = codec.encode(x)
    width = wire.shape[1]
    flat = torch.zeros(2 * width + 4, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"out must be \[2, "):
        codec.encode(x, out=wire[:1])
    with pytest.raises(ValueError, match="out must be uint8"):
        codec.encode(x, out=wire.to(torch.int8))
    with pytest.raises(ValueError, match=r"out .*4-byte aligned"):
        codec.encode(x, out=flat[1 : 1 + 2 * width].view(2, width))
    with pytest.raises(ValueError, match="wire_RW must be"):
        codec.decode(wire[:, :-4], 8)
    with pytest.raises(ValueError, match=r"wire_RW .*4-byte aligned"):
        codec.decode(flat[1 : 1 + 2 * width].view(2, width), 8)
    with pytest.raises(ValueError, match="out must be"):
        codec.decode(wire, 8, out=torch.empty((3, 8), device=device))
    with pytest.raises(ValueError, match="dtype must be"):
        codec.decode(wire, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match="out must be a contiguous"):
        codec.decode_mean(wire, 8, torch.empty((1, 8), device=device), 1.0)
    with pytest.raises(ValueError, match="at least one row"):
        codec.decode_mean(wire[:0], 8, torch.empty(8, device=device), 1.0)


def test_the_suite_notices_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, make):
    def no_minimum(self, wire, head, codes, block, out):  # forgets step and minimum
        out.copy_(wire[:, codes : codes + out.shape[1]])

    monkeypatch.setattr(MinMaxTorch, "decode", no_minimum)
    with codecs.use_backend("torch"):
        codec = MinMaxUInt8()
        x = make(3, 100)
        wrong = codec.decode(codec.encode(x), 100)
    assert not bool(((wrong.double() - x.double()).abs() <= bound(codec, x)).all())


def test_a_name_may_carry_options():
    assert codecs.get("eden:bits=2:block=64") == Eden(bits=2, block=64)
    assert codecs.get("eden:bits=2", block=64) == Eden(bits=2, block=64)
    for name, said in (
        ("eden:2", "codec 'eden': expected OPTION=VALUE after a colon, got '2'"),
        ("eden:bits=two", "codec 'eden': the value of bits is no number, True or False: 'two'"),
        ("eden:", "codec 'eden': expected OPTION=VALUE after a colon, got ''"),
        ("eden:bits=7", "bits must be 1, 2, 3 or 4, got 7"),
        ("edn:bits=2", "codec 'edn' is unknown"),
        ("eden:bits=2:bits=3", "codec 'eden': option 'bits' is given twice, as 3 and 2"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            codecs.get(name)
    with pytest.raises(ValueError, match="option 'bits' is given twice, as 2 and 3"):
        codecs.get("eden:bits=2", bits=3)
