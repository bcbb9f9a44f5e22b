"""Fused operations are the plain ones, one after the other, bit for bit, on every backend."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from bagua import codecs
from bagua.codecs import Codec, Int4, MinMaxUInt8, Sign, TopK
from bagua.codecs.blocks import BlockCodec

from .conftest import BACKENDS, FEW_BACKENDS
from .test_minmax_uint8 import numbers

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (1, 7, 97, 1024, 5003)


def feedback_by_steps(codec: Codec, x_RN: Tensor, residual_RN: Tensor) -> tuple[Tensor, Tensor]:
    """Wire and new residual, by eager torch and the plain operations."""
    with codecs.use_backend("torch"):
        e_RN = x_RN + residual_RN
        wire_RW = codec.encode(e_RN)
        left_RN = e_RN - codec.decode(wire_RW, x_RN.shape[1], dtype=x_RN.dtype)
        return wire_RW, torch.where(left_RN.isfinite(), left_RN, torch.zeros_like(left_RN))


def mean_by_steps(
    codec: Codec, wire_RW: Tensor, n: int, weight: float, residual_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Wire and new residual (zeros if there is none), by eager torch and the plain operations."""
    with codecs.use_backend("torch"):
        mean_N = codec.decode_mean(wire_RW, n, torch.empty(n, device=wire_RW.device), weight)
    if residual_N is None:
        with codecs.use_backend("torch"):
            return codec.encode(mean_N[None]), torch.zeros_like(mean_N)
    wire_1W, left_1N = feedback_by_steps(codec, mean_N[None], residual_N[None])
    return wire_1W, left_1N[0]


def same(ours: Tensor, reference: Tensor) -> bool:
    """Equal bytes, signs of zeros too."""
    return ours.dtype == reference.dtype and torch.equal(
        ours.contiguous().view(torch.uint8), reference.contiguous().view(torch.uint8)
    )


def same_numbers(codec: Codec, ours: Tensor, reference: Tensor, n: int) -> bool:
    """Equal bytes, but where the wire holds plain numbers a NaN is a NaN."""
    if isinstance(codec, BlockCodec):
        return same(ours, reference)
    decoded = [
        codec.decode(wire, n).nan_to_num(nan=7.0, posinf=float("inf"), neginf=-float("inf"))
        for wire in (ours, reference)
    ]
    return same(*decoded)


@pytest.mark.usefixtures("backend")
def test_encode_with_feedback(codec: Codec, make):
    for dtype, n in itertools.product(DTYPES, SIZES):
        x, residual = make(3, n, dtype), make(3, n, dtype).flip(0) * 0.3
        before = x.clone()
        for _ in range(2):
            wire, left = feedback_by_steps(codec, x, residual)
            got = codec.encode_with_feedback(x, residual)
            assert same(got, wire), (dtype, n)
            assert same(residual, left), (dtype, n)
        assert same(x, before), "the input was changed"


@pytest.mark.usefixtures("backend")
def test_decode_mean_encode(codec: Codec, make):
    for index, (rows, n) in enumerate(itertools.product((1, 8, 70), SIZES)):
        with codecs.use_backend("torch"):
            wires = codec.encode(make(rows, n))
        residual = make(1, n)[0] * 0.3 if index % 2 else None  # every number of rows and every size has both
        wire, left = mean_by_steps(codec, wires, n, 1 / rows, residual)
        assert same(codec.decode_mean_encode(wires, n, 1 / rows, residual), wire), (rows, n)
        assert residual is None or same(residual, left), (rows, n)


def difference_by_steps(
    codec: Codec, x_N: Tensor, me_N: Tensor, peers_PN: Tensor, weights: list[float]
) -> tuple[Tensor, Tensor]:
    """Wire and new `me`, by eager torch and the plain operations."""
    d_N = x_N - me_N
    for peer_N, weight in zip(peers_PN, weights, strict=True):
        d_N = d_N + (peer_N - me_N) * weight
    with codecs.use_backend("torch"):
        wire_1W = codec.encode(d_N[None])
        moved_N = codec.decode_mean(wire_1W, len(x_N), torch.empty_like(x_N), 1.0)
    return wire_1W, me_N + moved_N


@pytest.mark.usefixtures("backend")
def test_encode_difference(codec: Codec, make):
    mixes = itertools.cycle(([], [1 / 3], [0.3, 0.4, 0.1]))  # each meets every dtype and every size
    for (dtype, n), weights in zip(itertools.product(DTYPES, SIZES), mixes, strict=False):
        x, me = make(2, n, dtype)
        peers = make(4, n, dtype)[1 : 1 + len(weights)]
        before, replica = peers.clone(), me.clone()
        wire, moved = difference_by_steps(codec, x, me, peers, weights)
        got = codec.encode_difference(x, me, peers, weights)
        assert same(got, wire), (dtype, n, weights)
        assert same(me, moved), (dtype, n, weights)
        assert same(x, me), "x is what the others will hold"
        assert same(peers, before), "the replicas were changed"
        replicas = torch.stack([torch.zeros_like(me), replica, replica])[1:]
        codec.decode_add(got.expand(2, -1).contiguous(), replicas)
        assert same(replicas[0], me) and same(replicas[1], me), "a peer's replica of me"


@pytest.mark.usefixtures("backend")
def test_wrong_differences_name_the_argument(codec: Codec, device: torch.device):
    x, me, peers = torch.zeros(8, device=device), torch.zeros(8, device=device), torch.zeros(2, 8, device=device)
    for x_, me_, weights, message in (
        (x[None], me, [1, 1], "x_N must have"),
        (x, me[:7], [1, 1], "me_N must be"),
        (x, me, [1.0], "peers_PN must be"),
        (x, me.double(), [1, 1], "me_N must be"),
    ):
        with pytest.raises(ValueError, match=message):
            codec.encode_difference(x_, me_, peers, weights)
    with pytest.raises(ValueError, match="out must be"):
        codec.encode_difference(x, me, peers, [1, 1], out=torch.zeros(1, 3, dtype=torch.uint8, device=device))
    wire = codec.encode(x[None])
    with pytest.raises(ValueError, match="wire_RW must be"):
        codec.decode_add(wire, torch.zeros(2, 8, device=device))
    with pytest.raises(ValueError, match="out must"):
        codec.decode_add(wire, torch.zeros(8, device=device))


@pytest.mark.usefixtures("backend")
def test_what_is_not_finite_leaves_no_residual(codec: Codec, make):
    for bad in (float("nan"), -float("inf"), 3e38):
        for at in (0, 95, 1499):
            x, residual = make(3, 1500), make(3, 1500) * 0.3
            x[1, at] = bad
            residual[1, at] = abs(bad) if bad == 3e38 else 0.0  # this sum overflows
            wire, left = feedback_by_steps(codec, x, residual)
            assert same_numbers(codec, codec.encode_with_feedback(x, residual), wire, 1500)
            assert same(residual, left)
            assert bool(residual.isfinite().all())

            mean, wires = make(1, 1500)[0], codec.encode(x)
            wire, left = mean_by_steps(codec, wires, 1500, 0.5, mean)
            assert same_numbers(codec, codec.decode_mean_encode(wires, 1500, 0.5, mean), wire, 1500)
            assert same(mean, left)


@pytest.mark.parametrize("make_codec", [Sign, Int4, MinMaxUInt8, lambda block: TopK(0.1, block)])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), rows=st.integers(1, 3), n=st.integers(1, 200), block=st.sampled_from([8, 64, 104, 1024]))
def test_all_floats(make_codec, data: st.DataObject, rows: int, n: int, block: int):
    codec = make_codec(block)
    fill = st.sampled_from([0.0, 1.0, -2.5])
    x, residual = (
        torch.from_numpy(data.draw(hnp.arrays(np.float32, (rows, n), elements=numbers(), fill=fill))) for _ in range(2)
    )
    residual.nan_to_num_(0.0, 0.0, 0.0)  # as it always is
    wire, left = feedback_by_steps(codec, x, residual)
    mean = mean_by_steps(codec, wire, n, 0.3, left[0].clone())
    for backend in BACKENDS:
        with codecs.use_backend(backend):
            ours, once = residual.clone(), left[0].clone()
            assert same_numbers(codec, codec.encode_with_feedback(x, ours), wire, n), backend
            assert same(ours, left), backend
            assert same_numbers(codec, codec.decode_mean_encode(wire, n, 0.3, once), mean[0], n), backend
            assert same(once, mean[1]), backend


@pytest.mark.usefixtures("backend")
def test_rows_at_odd_offsets(codec: Codec, make):
    x, buffer = make(4, 1504)[1:3, 1:1502], make(6, 1507).contiguous()
    before = buffer.clone()
    residual = buffer[2:4, 3:1504]
    wire, left = feedback_by_steps(codec, x, residual)
    out = torch.full((4, wire.shape[1] + 8), 77, dtype=torch.uint8, device=x.device)
    view = out[1:3, 4 : 4 + wire.shape[1]]
    assert codec.encode_with_feedback(x, residual, out=view) is view
    assert same(view, wire)
    assert same(residual, left)
    before[2:4, 3:1504] = left
    assert same(buffer, before), "wrote outside of the residual"
    assert bool((out[::3] == 77).all()) and bool((out[:, :4] == 77).all())
    assert bool((out[:, 4 + wire.shape[1] :] == 77).all())

    once = buffer.view(-1)[5:1506]
    wire, left = mean_by_steps(codec, view, 1501, 0.5, once)
    before = buffer.clone()
    before.view(-1)[5:1506] = left
    alone = out.view(-1)[: 4 + wire.shape[1]][4:][None]
    if not alone.data_ptr() % 4:
        assert codec.decode_mean_encode(view.clone(), 1501, 0.5, once, out=alone) is alone
        assert same(alone, wire)
        assert same(buffer, before), "wrote outside of the residual"


@pytest.mark.not_interpreted
@pytest.mark.usefixtures("backend")
def test_long_rows(codec: Codec, make):
    n = 300_001
    x, residual = make(2, n) * (0.1 + make(1, n).abs()), make(2, n).flip(1) * 0.3
    wire, left = feedback_by_steps(codec, x, residual)
    assert same(codec.encode_with_feedback(x, residual), wire)
    assert same(residual, left)


def test_nothing_is_lost_over_time(codec: Codec, make):
    if codec.lossless:
        pytest.skip("a lossless codec leaves no error")
    x, residual = make(1, 3000), make(1, 3000).zero_()
    sent = torch.zeros_like(x)
    for _ in range(20):
        sent += codec.decode(codec.encode_with_feedback(x, residual), 3000)
    torch.testing.assert_close(sent + residual, 20 * x, rtol=1e-4, atol=1e-4)


@pytest.mark.not_interpreted
@pytest.mark.parametrize("backend", FEW_BACKENDS, indirect=True)
@pytest.mark.usefixtures("backend")
def test_many_threads_at_once(codec: Codec, make):
    rows = [make(r, 5000) for r in range(1, 5)]
    expected = [feedback_by_steps(codec, x, x * 0.5) for x in rows]
    good = [False] * len(rows)

    def work(i: int) -> None:
        for _ in range(5):
            residual = rows[i] * 0.5
            wire = codec.encode_with_feedback(rows[i], residual)
            good[i] = same(wire, expected[i][0]) and same(residual, expected[i][1])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(good)


def test_no_elements(codec: Codec, device: torch.device):
    empty = torch.empty((3, 0), device=device)
    assert tuple(codec.encode_with_feedback(empty, empty.clone()).shape) == (3, 0)
    wire = torch.empty((3, 0), dtype=torch.uint8, device=device)
    assert tuple(codec.decode_mean_encode(wire, 0, 0.5, empty[0].clone()).shape) == (1, 0)


def test_arguments_are_checked(codec: Codec, device: torch.device):
    x = torch.zeros((2, 8), device=device)
    wire = codec.encode(x)
    with pytest.raises(ValueError, match="residual_RN must match x_RN"):
        codec.encode_with_feedback(x, torch.zeros((2, 9), device=device))
    with pytest.raises(ValueError, match="residual_RN must match x_RN"):
        codec.encode_with_feedback(x, x.double())
    with pytest.raises(ValueError, match=r"residual_RN.*contiguous"):
        codec.encode_with_feedback(x, torch.zeros((8, 2), device=device).t())
    with pytest.raises(ValueError, match=r"out must be \[2, "):
        codec.encode_with_feedback(x, x.clone(), out=wire[:1])
    with pytest.raises(ValueError, match=r"residual_N must be a contiguous float32 \[8\]"):
        codec.decode_mean_encode(wire, 8, 0.5, torch.zeros(8, device=device, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"residual_N must be a contiguous float32 \[8\]"):
        codec.decode_mean_encode(wire, 8, 0.5, torch.zeros(16, device=device)[::2])
    with pytest.raises(ValueError, match=r"out must be \[1, "):
        codec.decode_mean_encode(wire, 8, 0.5, out=wire)
    with pytest.raises(ValueError, match="at least one row"):
        codec.decode_mean_encode(wire[:0], 8, 0.5)
    with pytest.raises(ValueError, match="wire_RW must be"):
        codec.decode_mean_encode(wire[:, :-4], 8, 0.5)
