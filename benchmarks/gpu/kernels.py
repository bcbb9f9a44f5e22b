"""Part 3: Triton's kernels give the bits of the torch references, in all operations, sizes, dtypes and layouts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from bagua import codecs
from bagua.codecs import Bf16, Codec, Eden, Fp16, Identity, Int4, MinMaxUInt8, Sign, TopK
from bagua.codecs.blocks import BlockCodec
from benchmarks.gpu.record import Record

__all__ = ["CODECS", "run"]

CODECS: tuple[Codec, ...] = (
    MinMaxUInt8(),
    MinMaxUInt8(block=96),
    MinMaxUInt8(block=None),
    Int4(),
    Int4(block=94),
    Sign(),
    Sign(block=88),
    *(Eden(bits=bits) for bits in (1, 2, 3, 4)),
    Eden(block=64),
    Eden(bits=2, block=4096),
    Eden(states=8),
    Eden(states=32, block=512),
    Eden(bits=2, states=8),
    TopK(ratio=0.02),
    TopK(ratio=0.1, block=96),
    Bf16(),
    Fp16(),
    Identity(),
)
_SIZES = (1, 7, 127, 128, 129, 1000, 1024, 4097, 8193, 100_003, (1 << 20) + 3)
_SEARCHED_SIZES = (1, 7, 127, 256, 4097)  # torch searches a trellis in thousands of small kernels
_DRY_SIZES = (1, 130)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 3
_BAD = "NaN and infinity"


def run(record: Record) -> None:
    """One check for each codec and dtype; on a GPU against torch on the GPU, and against the CPU."""
    on_gpu = torch.cuda.is_available() and not record.dry
    device = torch.device("cuda" if on_gpu else "cpu")
    triton = importlib.util.find_spec("triton") is not None
    ours = "triton" if triton else "torch" if on_gpu else codecs.available_backends()[-1]
    record.facts.update(device=str(device), backend=ours, sizes=list(_SIZES if on_gpu else _DRY_SIZES))
    for codec in CODECS[:: 1 if on_gpu else 3]:
        for dtype in _DTYPES:
            with record.check(f"{codec!r}, {dtype}") as entry:
                searched = isinstance(codec, Eden) and codec.states > 1
                sizes = _DRY_SIZES if not on_gpu else _SEARCHED_SIZES if searched else _SIZES
                entry["compared"] = _compare(codec, dtype, device, ours, sizes)


def _compare(codec: Codec, dtype: torch.dtype, device: torch.device, ours: str, sizes: tuple[int, ...]) -> int:
    count = 0
    for n in sizes:
        for layout, x in _layouts(n, dtype, device):
            with codecs.use_backend("torch"), _quiet():
                want = _results(codec, x)
            with codecs.use_backend(ours), _quiet():
                got = _results(codec, x)
            for name in want:
                assert _same(want[name], got[name]), f"{name}: {n} elements, {layout}: {ours} differs from torch"
                count += 1
            if device.type == "cuda":
                with codecs.use_backend("torch"):
                    cpu = _results(codec, x.cpu())
                names = ("encode", "decode") if isinstance(codec, BlockCodec) or layout != _BAD else ("decode",)
                for name in names:  # where the wire holds plain numbers, a NaN may have other bits
                    assert _same(cpu[name], got[name].cpu()), f"{name}: {n} elements, {layout}: differs from the CPU"
    return count


def _layouts(n: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """[R, n] of different strides and contents."""
    plain = torch.randn((_ROWS, n), generator=torch.Generator().manual_seed(n)).to(device, dtype)
    yield "contiguous", plain
    wide = torch.zeros((_ROWS, n + 5), dtype=dtype, device=device)
    wide[:, 3 : 3 + n] = plain
    yield "rows apart, odd offset", wide[:, 3 : 3 + n]
    special = plain.clone()
    special[0, n // 2], special[1, n // 3] = float("nan"), float("inf")
    yield _BAD, special
    yield "tiny", plain * 2.0**-120
    hardly = plain.abs()
    hardly[:, n // 2] = -1e-40
    yield "hardly negative", hardly
    yield "zero", torch.zeros_like(plain)


def _results(codec: Codec, x_RN: Tensor) -> dict[str, Tensor]:
    """Every operation's result."""
    n = x_RN.shape[1]
    wire = codec.encode(x_RN).clone()
    found = {"encode": wire, "decode": codec.decode(wire, n, dtype=x_RN.dtype)}
    found["decode_mean"] = codec.decode_mean(wire, n, torch.empty(n, dtype=x_RN.dtype, device=x_RN.device), 0.3)
    residual = x_RN.flip(1).nan_to_num(0.0, 0.0, 0.0).contiguous()
    found["encode_with_feedback"] = codec.encode_with_feedback(x_RN, residual).clone()
    found["residual"] = residual
    if x_RN.dtype == torch.float32:
        kept = x_RN[2].nan_to_num(0.0, 0.0, 0.0).clone()
        found["decode_mean_encode"], found["kept"] = codec.decode_mean_encode(wire, n, 0.3, kept), kept
    values, me = x_RN[0].nan_to_num(0.0, 0.0, 0.0).clone(), x_RN[2].clone()
    peers = torch.stack([x_RN[2] * 0.5, x_RN[2] * 0.25])
    found["encode_difference"] = codec.encode_difference(values, me, peers, [0.25, 0.25]).clone()
    found["me"] = me
    found["decode_add"] = codec.decode_add(wire, x_RN.flip(1).contiguous())
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point():  # all NaN count as one
        both = a.isnan() & b.isnan()
        return bool(((a == b) & (a.signbit() == b.signbit()) | both).all())
    return torch.equal(a, b)


def _quiet() -> Any:
    """The interpreter computes with numpy, which warns of overflows."""
    if importlib.util.find_spec("numpy") is None:
        return nullcontext()
    import numpy

    return numpy.errstate(all="ignore")
