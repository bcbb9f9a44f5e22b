"""What every codec keeps to, whoever wrote it. Shape suffixes as in `bagua.codecs.base`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import ByteGrad
from bagua.codecs import Codec
from bagua.codecs import get as get_codec
from bagua.testing.checks import require, run_checks
from bagua.testing.specification import check_is_a_value, check_options

__all__ = ["CODEC_CHECKS", "check_codec"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SIZES = (0, 1, 2, 3, 7, 64, 95, 1023, 1024, 1501)
_ROUNDS = 64  # of error feedback


@dataclass(frozen=True)
class _Subject:
    codec: Codec
    bound: Callable[[Tensor], Tensor] | None


def check_codec(
    codec: str | Codec | type[Codec],
    *,
    bound: Callable[[Tensor], Tensor] | None = None,
    only: Collection[str] = (),
    skip: Collection[str] = (),
) -> None:
    """Check that a codec does what exchanges rely on, on CPU tensors with the backend in use.

    Args:
        codec: a name, an instance, or a class, which is made with its defaults. It need not be registered.
        bound: gives for rows [R, N] of fp32 the largest error of each element, |decode(encode(x)) - x|. Without it the
            error of a row may be anything less than the row itself, in the Euclidean norm.
        only: run these checks only; names are the keys of `CODEC_CHECKS`.
        skip: leave these out.

    Raises:
        AssertionError: a check failed; the message names the codec and the check.
        ValueError: an argument is wrong.

    Examples:
        >>> import bagua.testing
        >>> bagua.testing.check_codec("bf16", bound=lambda x: x.abs() / 256)
    """
    made = codec() if isinstance(codec, type) else get_codec(codec)
    run_checks(f"codec {made.name!r}", CODEC_CHECKS, _Subject(made, bound), only, skip)


def _value(subject: _Subject) -> None:
    """A frozen dataclass with a name that says whether it is linear and lossless."""
    codec = subject.codec
    check_is_a_value(codec)
    for name, kind in (("name", str), ("linear", bool), ("lossless", bool)):
        value = getattr(codec, name, None)
        require(isinstance(value, kind), f"class variable {name} is {value!r}, not a {kind.__name__}")
    require(type(codec).__doc__, "the class has no docstring")


def _options(subject: _Subject) -> None:
    check_options("codec", Codec, type(subject.codec))


def _wire_bytes(subject: _Subject) -> None:
    """A wire has exactly the bytes that `wire_bytes` says, a multiple of 4; nothing for nothing."""
    codec = subject.codec
    require(codec.wire_bytes(0) == 0, f"wire_bytes(0) is {codec.wire_bytes(0)}")
    for dtype in _DTYPES:
        for n in _SIZES:
            said, wire = codec.wire_bytes(n, dtype), codec.encode(_rows(2, n, dtype))
            require(said % 4 == 0, f"wire_bytes({n}, {dtype}) is {said}, no multiple of 4")
            require(
                wire.dtype == torch.uint8 and tuple(wire.shape) == (2, said),
                f"{n} elements of {dtype} became {wire.dtype} {list(wire.shape)}; wire_bytes is {said}",
            )
    require(
        tuple(codec.encode(torch.empty(0, 7)).shape) == (0, codec.wire_bytes(7)),
        "encoding zero rows did not return zero rows",
    )
    require(
        tuple(codec.decode(codec.encode(torch.empty(3, 0)), 0).shape) == (3, 0),
        "rows of zero elements did not come back",
    )


def _round_trip(subject: _Subject) -> None:
    """What comes back is within the bound, in every dtype; of a lossless codec it is the same."""
    codec = subject.codec
    for dtype in _DTYPES:
        for n in _SIZES[1:]:
            x_RN = _rows(3, n, dtype)
            y_RN = codec.decode(codec.encode(x_RN), n, dtype=dtype)
            where = f"{n} elements of {dtype}"
            require(y_RN.dtype == dtype and y_RN.shape == x_RN.shape, f"{where} came back as {y_RN.dtype}")
            if codec.lossless:
                require(torch.equal(x_RN, y_RN), f"{where} changed, though it is lossless")
                continue
            error_RN, size_RN = (y_RN.double() - x_RN.double()).abs(), x_RN.double().abs()
            cast_RN = torch.finfo(dtype).eps * size_RN.maximum(y_RN.double().abs())
            if subject.bound is not None:
                over = error_RN - subject.bound(x_RN.float()) - cast_RN
                require(bool((over <= 0).all()), f"{where}: an error is {float(over.max()):.3g} above the bound")
            worst = float((error_RN.norm(dim=1) - cast_RN.norm(dim=1)).div(size_RN.norm(dim=1)).max())
            require(worst < 1 or n == 1, f"{where}: the error is {worst:.3g} times the row; give a smaller code")
    zeros = codec.decode(codec.encode(torch.zeros(2, 1501)), 1501)
    require(not bool(zeros.any()), "zeros did not come back as zeros")


def _pure(subject: _Subject) -> None:
    """The same bytes every time, on any number of threads, one call or several at once; the input stays as it is."""
    codec, x_RN = subject.codec, _rows(4, 5000)
    before = x_RN.clone()
    wire_RW = codec.encode(x_RN)
    codec.decode(wire_RW, 5000)
    require(torch.equal(x_RN, before), "encode or decode changed its input")
    wire_RW = wire_RW.clone()
    same: list[bool] = []

    def work() -> None:
        for _ in range(4):
            again_RW = codec.encode(x_RN)
            mean_N = codec.decode_mean(again_RW, 5000, torch.empty(5000), 0.25)
            same.append(torch.equal(again_RW, wire_RW) and torch.equal(mean_N, expected_N))

    expected_N = codec.decode_mean(wire_RW, 5000, torch.empty(5000), 0.25)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    require(len(same) == 16 and all(same), "concurrent threads encode other bytes, or fail")
    number = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if number > 1 else 2)
        require(torch.equal(codec.encode(x_RN), wire_RW), "the bytes depend on the number of threads")
    finally:
        torch.set_num_threads(number)


def _rows_alone(subject: _Subject) -> None:
    """A row has the same bytes alone and among others; a NaN in one does not reach another."""
    codec, x_RN = subject.codec, _rows(5, 1501)
    x_RN[3, 7] = float("nan")
    wire_RW = codec.encode(x_RN)
    y_RN = codec.decode(wire_RW, 1501)
    for r in range(5):
        alone_1W = codec.encode(x_RN[r : r + 1])
        require(torch.equal(alone_1W[0], wire_RW[r]), f"row {r} has other bytes when it is encoded alone")
        require(_same(codec.decode(alone_1W, 1501)[0], y_RN[r]), f"row {r} decodes to other values when alone")


def _not_finite(subject: _Subject) -> None:
    """NaN and infinities stay visible where they were: gradient scalers and guards look for them."""
    codec = subject.codec
    for bad in (float("nan"), float("inf"), -float("inf")):
        for at in (0, 63, 64, 1498, 1499):
            x_RN = _rows(2, 1500)
            x_RN[1, at] = bad
            wire_RW = codec.encode(x_RN)
            y_RN = codec.decode(wire_RW, 1500)
            require(not bool(y_RN[1, at].isfinite()), f"{bad} at element {at} came back as {float(y_RN[1, at])}")
            require(bool(y_RN[0].isfinite().all()), f"{bad} in one row reached another")
            mean_N = codec.decode_mean(wire_RW, 1500, torch.empty(1500), 0.5)
            require(not bool(mean_N[at].isfinite()), f"{bad} at element {at} is hidden by decode_mean")


def _views(subject: _Subject) -> None:
    """Rows with a stride, at odd offsets, and `out` anywhere in a larger tensor, with nothing written beside it."""
    codec = subject.codec
    for dtype in _DTYPES:
        x_RN = _rows(4, 1504, dtype)[1:3, 1:1502]
        wire_RW = codec.encode(x_RN)
        require(torch.equal(wire_RW, codec.encode(x_RN.clone())), f"a view of {dtype} has other bytes than its copy")
        width = codec.wire_bytes(1501, dtype)
        wires = torch.full((4, width + 8), 77, dtype=torch.uint8)
        out_RW = wires[1:3, 4 : 4 + width]
        require(codec.encode(x_RN, out=out_RW) is out_RW, "encode does not return `out`")
        require(torch.equal(out_RW, wire_RW), "encode fills `out` with other bytes; is the padding written?")
        beside = bool((wires[::3] == 77).all() and (wires[:, :4] == 77).all() and (wires[:, 4 + width :] == 77).all())
        require(beside, "encode wrote outside of `out`")
        target = torch.zeros((4, 1504), dtype=dtype)
        y_RN = codec.decode(out_RW, 1501, out=target[1:3, 1:1502])
        require(_same(y_RN, codec.decode(wire_RW, 1501, dtype=dtype)), f"decode into a view of {dtype} differs")
        target[1:3, 1:1502] = 0
        require(not bool(target.any()), "decode wrote outside of `out`")


def _means(subject: _Subject) -> None:
    """`decode_mean`, `decode_add` and `decode_mean_encode` are what decoding row by row gives."""
    codec = subject.codec
    for rows in (1, 3, 17):
        for n in (1, 97, 1100):
            wire_RW = codec.encode(_rows(rows, n) + 0.5)
            y_RN = codec.decode(wire_RW, n)
            mean_N = codec.decode_mean(wire_RW, n, torch.empty(n), 1 / rows)
            most = 2.0**-21 * (1 + rows / 4) * float(y_RN.abs().max())  # of sums in fp32, in any order
            close = (mean_N.double() - y_RN.double().mean(0)).abs() <= most
            require(bool(close.all()), f"decode_mean of {rows} rows of {n} elements is not the mean of decode")
            one_1W = codec.decode_mean_encode(wire_RW, n, 1 / rows)
            require(
                torch.equal(one_1W, codec.encode(mean_N[None])), "decode_mean_encode has other bytes than its steps"
            )
            sum_RN = torch.ones(rows, n)
            codec.decode_add(wire_RW, sum_RN)
            require(torch.allclose(sum_RN, 1 + y_RN, rtol=1e-6, atol=1e-6), "decode_add does not add what decode gives")


def _feedback(subject: _Subject) -> None:
    """`encode_with_feedback` does what its steps do, and what is lost comes later: the mean of rounds nears the row."""
    codec, x_RN = subject.codec, _rows(2, 1501)
    residual_RN, expected_RN = torch.zeros_like(x_RN), torch.zeros_like(x_RN)
    sum_RN, first = torch.zeros_like(x_RN), 0.0
    error = 0.0
    for number in range(_ROUNDS):
        wire_RW = codec.encode_with_feedback(x_RN, residual_RN)
        e_RN = expected_RN + x_RN
        require(torch.equal(wire_RW, codec.encode(e_RN)), "encode_with_feedback has other bytes than its steps")
        sent_RN = codec.decode(wire_RW, 1501)
        expected_RN = e_RN - sent_RN
        require(torch.equal(residual_RN, expected_RN), "encode_with_feedback keeps another residual than its steps")
        sum_RN += sent_RN
        error = float((sum_RN / (number + 1) - x_RN).norm())
        first = error if number == 0 else first
    require(
        error <= 0.7 * first + 1e-6 * float(x_RN.norm()),
        f"the mean of {_ROUNDS} rounds is {error:.3g} off, the first one {first:.3g}",
    )
    x_RN[0, 5] = float("inf")
    codec.encode_with_feedback(x_RN, residual_RN)
    require(bool(residual_RN.isfinite().all()), "a residual keeps a value that is not finite")


def _parts(subject: _Subject) -> None:
    """A codec that encodes parts of a row gives the bytes of the whole."""
    codec, n = subject.codec, 5003
    align = codec.part_numel(torch.device("cpu"))
    if align is None:
        return
    x_N = _rows(1, n)[0]
    whole_W = codec.encode(x_N[None])[0]
    parts_W, y_N = torch.full_like(whole_W, 77), torch.empty(n)
    middle = n // 2 // align * align
    for lo, hi in ((middle, n), (0, middle)):
        codec.encode_part(x_N[lo:hi], parts_W, lo, n)
        codec.decode_part(whole_W, lo, n, y_N[lo:hi])
    require(torch.equal(parts_W, whole_W), "a row encoded in parts has other bytes than the whole row")
    require(
        torch.equal(y_N, codec.decode(whole_W[None], n)[0]),
        "a row decoded in parts has other values than the whole row",
    )


def _linear(subject: _Subject) -> None:
    """Wires of a linear codec can be summed; another one says that it is not linear."""
    codec, n = subject.codec, 1502
    if not codec.linear:
        try:
            codec.wire_dtype()
        except TypeError as error:
            require(codec.name in str(error), f"the error of wire_dtype does not name the codec: {error}")
            return
        raise AssertionError("it is not linear, yet has a wire_dtype")
    for dtype in _DTYPES:
        x_RN = (_rows(4, n) * 8).round().to(dtype) / 8  # sums are exact in every dtype
        wire_RW, kind = codec.encode(x_RN), codec.wire_dtype(dtype)
        sum_1W = wire_RW.view(kind).sum(0, keepdim=True).to(kind).view(torch.uint8)
        y_N, expected_N = codec.decode(sum_1W, n, dtype=dtype)[0], codec.decode(wire_RW, n, dtype=dtype).double().sum(0)
        require(torch.equal(y_N.double(), expected_N), f"{dtype}: the sum of wires is not the sum of rows")


def _gossip(subject: _Subject) -> None:
    """`encode_difference` moves a replica by what its peers will read from the wire."""
    codec = subject.codec
    x_N, me_N, peers_PN = _rows(1, 1501)[0], _rows(2, 1501)[1], _rows(3, 1501)[:2].clone()
    d_N = x_N - me_N
    for peer_N in peers_PN:
        d_N += (peer_N - me_N) * 0.25
    before_N = me_N.clone()
    wire_1W = codec.encode_difference(x_N, me_N, peers_PN, [0.25, 0.25])
    require(torch.equal(wire_1W, codec.encode(d_N[None])), "encode_difference encodes another difference")
    require(torch.equal(x_N, me_N), "encode_difference: x is not the replica afterwards")
    theirs_1N = codec.decode_add(wire_1W, before_N[None].clone())
    require(torch.equal(theirs_1N[0], me_N), "peers would have another replica than the rank itself")


def _trains(subject: _Subject) -> None:
    """Four ranks train with it and stay equal, bit for bit; it repeats."""
    line_23 = torch.linspace(-1, 1, 6).view(2, 3)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        x_B2 = torch.randn(8, 2, generator=torch.Generator().manual_seed(10 * step + rank))
        return (module(x_B2) - x_B2 @ line_23).square().mean()

    run = partial(bagua.simulate, ByteGrad(codec=subject.codec), ranks=4, model=lambda: nn.Linear(2, 3), loss=loss)
    sgd = partial(torch.optim.SGD, lr=0.1)
    first, second = run(steps=24, optimizer=sgd), run(steps=24, optimizer=sgd)
    require(float(first.consensus.max()) == 0, "ranks that exchange gradients with it do not stay equal")
    require(torch.equal(first.losses, second.losses), "two equal runs differ")
    require(bool(first.losses.isfinite().all()), "the loss is not finite")
    require(float(first.losses[-6:].mean()) < float(first.losses[:6].mean()), "the loss did not fall")


CODEC_CHECKS: dict[str, Callable[[_Subject], None]] = {
    "value": _value,
    "options": _options,
    "wire_bytes": _wire_bytes,
    "round_trip": _round_trip,
    "pure": _pure,
    "rows_alone": _rows_alone,
    "not_finite": _not_finite,
    "views": _views,
    "means": _means,
    "feedback": _feedback,
    "parts": _parts,
    "linear": _linear,
    "gossip": _gossip,
    "trains": _trains,
}
"""The checks of `check_codec`, in the order in which they run."""


def _rows(rows: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian rows, the same every time."""
    return torch.randn((rows, n), generator=torch.Generator().manual_seed(1000 * rows + n)).to(dtype)


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN included."""
    return torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))
