"""Each check of the contracts fails for something that breaks what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bagua.algorithms import Algorithm, Exactness, GradientAllReduce, LocalSGD
from bagua.codecs import Bf16, Codec, Identity, MinMaxUInt8
from bagua.testing import ALGORITHM_CHECKS, CODEC_CHECKS, check_algorithm, check_codec


def broken_algorithm(check: str) -> Callable[[type[Algorithm]], type[Algorithm]]:
    def note(cls: type[Algorithm]) -> type[Algorithm]:
        ALGORITHMS[check] = cls
        return cls

    return note


ALGORITHMS: dict[str, type[Algorithm]] = {}


@broken_algorithm("value")
@dataclass(frozen=True)
class NoSummary(GradientAllReduce):
    """Says nothing of itself."""

    summary: ClassVar[str] = ""


@broken_algorithm("options")
@dataclass(frozen=True)
class TakesAnything(GradientAllReduce):
    """Checks nothing."""

    limit: Any = None


@broken_algorithm("replicas")
@dataclass(frozen=True)
class SaysEqual(LocalSGD):
    """Its replicas differ."""

    exactness: ClassVar[Exactness] = Exactness.LOSSY


@broken_algorithm("nodes")
@dataclass(frozen=True)
class OneNodeOnly(GradientAllReduce):
    """Forgets the other nodes."""

    def on_ready(self, ctx, bucket) -> None:
        if ctx.groups.rank < len(ctx.groups.nodes[0]):
            bucket.flat.mul_(1.01)
        super().on_ready(ctx, bucket)
        ctx.wait()
        if len(ctx.groups.nodes) > 1 and ctx.groups.rank in ctx.groups.nodes[1]:
            bucket.flat.mul_(0.9)


CALLS = iter(range(10**9))


@broken_algorithm("accumulates")
@broken_algorithm("repeats")
@dataclass(frozen=True)
class CountsCalls(GradientAllReduce):
    """Depends on what ran before it."""

    def on_ready(self, ctx, bucket) -> None:
        flat, factor = bucket.flat, 1 + 1e-3 * next(CALLS)
        ctx.launch(self.exchange, bucket, before=lambda: flat.mul_(factor))


@broken_algorithm("resumes")
@dataclass(frozen=True)
class ForgetsItsState(GradientAllReduce):
    """Keeps a momentum that is not saved."""

    exactness: ClassVar[Exactness] = Exactness.LOSSY

    def on_ready(self, ctx, bucket) -> None:
        flat = bucket.flat
        momentum = ctx.keep(f"momentum{bucket.index}", lambda: torch.zeros_like(flat))
        ctx.launch(self.exchange, bucket, after=lambda: flat.copy_(momentum.lerp_(flat, 0.5)))


@broken_algorithm("single_rank")
@dataclass(frozen=True)
class ClipsAlone(GradientAllReduce):
    """Is not exact."""

    def on_ready(self, ctx, bucket) -> None:
        for param in bucket.params:
            param.grad.clamp_(-0.01, 0.01)
        super().on_ready(ctx, bucket)


@broken_algorithm("mean_gradient")
@dataclass(frozen=True)
class HalfOfTheMean(GradientAllReduce):
    """Is not exact with several ranks."""

    def on_ready(self, ctx, bucket) -> None:
        flat, factor = bucket.flat, 0.5 if ctx.groups.size > 1 else 1.0
        ctx.launch(self.exchange, bucket, after=lambda: flat.mul_(factor))


@broken_algorithm("bytes")
@dataclass(frozen=True)
class SaysLess(GradientAllReduce):
    """Sends more than it says."""

    def bytes_per_rank(self, n: int, size: int) -> float:
        return super().bytes_per_rank(n, size) / 2


@broken_algorithm("detaches")
@dataclass(frozen=True)
class StartsApart(GradientAllReduce):
    """A rank changes its weights when it is set up for a second time."""

    def setup(self, ctx) -> None:
        super().setup(ctx)
        if ctx.groups.rank == 1 and ctx.optimizers[0].state:
            with torch.no_grad():
                ctx.optimizers[0].param_groups[0]["params"][0].add_(0.1)


@broken_algorithm("unused")
@dataclass(frozen=True)
class MovesAll(LocalSGD):
    """Shrinks every weight, whether it was used or not."""

    communication_interval: int = 2

    def on_step_end(self, ctx) -> None:
        for bucket in ctx.buckets:
            bucket.flat.mul_(0.5)
        super().on_step_end(ctx)


@pytest.mark.parametrize("check", ALGORITHM_CHECKS)
def test_the_contract_of_algorithms_notices(check: str) -> None:
    with pytest.raises(AssertionError, match=f"algorithm .*, check '{check}': "):
        check_algorithm(ALGORITHMS[check], only=[check])


@dataclass(frozen=True)
class Wraps(Codec):
    """The identity on fp32, a base for codecs that break one thing each."""

    name: ClassVar[str] = "wraps"
    linear: ClassVar[bool] = False
    lossless: ClassVar[bool] = False

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return 4 * n

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        wire_RW.view(torch.float32).copy_(x_RN)

    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        out_RN.copy_(wire_RW.view(torch.float32))


CODECS: dict[str, type[Codec]] = {}


def broken_codec(check: str) -> Callable[[type[Codec]], type[Codec]]:
    def note(cls: type[Codec]) -> type[Codec]:
        CODECS[check] = cls
        return cls

    return note


@broken_codec("value")
@dataclass(frozen=True)
class HoldsATensor(Wraps):
    """State in a codec."""

    table: Any = field(default_factory=lambda: torch.zeros(3))


@broken_codec("options")
@dataclass(frozen=True)
class TakesAnyBits(Wraps):
    """Checks nothing."""

    bits: Any = 8


@broken_codec("wire_bytes")
@dataclass(frozen=True)
class NotAligned(Wraps):
    """Rows of any length."""

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return 4 * n + 1 if n else 0

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        wire_RW.zero_()


@broken_codec("round_trip")
@dataclass(frozen=True)
class Triples(Wraps):
    """Wrong by twice as much as the row itself."""

    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        out_RN.copy_(wire_RW.view(torch.float32)).mul_(3)


@broken_codec("pure")
@dataclass(frozen=True)
class ByThread(Wraps):
    """Depends on the thread."""

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        wire_RW.view(torch.float32).copy_(x_RN * (1 + (threading.current_thread() is not threading.main_thread())))


@broken_codec("rows_alone")
@dataclass(frozen=True)
class OneRange(Wraps):
    """Looks at the other rows."""

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        wire_RW.view(torch.float32).copy_(x_RN + x_RN.nan_to_num().abs().max() * 0.1)


@broken_codec("not_finite")
@dataclass(frozen=True)
class HidesInfinity(Wraps):
    """Clamps."""

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        wire_RW.view(torch.float32).copy_(x_RN.nan_to_num().clamp(-9, 9))


@broken_codec("views")
@dataclass(frozen=True)
class LeavesPadding(Wraps):
    """Four bytes that it never writes."""

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return 4 * n + 4 if n else 0

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        super()._encode(x_RN, wire_RW[:, :-4])

    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        super()._decode(wire_RW[:, :-4], out_RN)


@broken_codec("means")
@dataclass(frozen=True)
class MeanOfTheFirst(Wraps):
    """Forgets rows."""

    def _decode_mean(self, wire_RW: Tensor, out_N: Tensor, weight: float) -> None:
        super()._decode_mean(wire_RW[:2], out_N, weight)


@broken_codec("feedback")
@dataclass(frozen=True)
class DropsTheResidual(Wraps):
    """Never sends what it lost."""

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        super()._encode(x_RN.clamp(-0.5, 0.5), wire_RW)


@broken_codec("parts")
@dataclass(frozen=True)
class PartsAtTheStart(MinMaxUInt8):
    """Writes each part to the front of the wire."""

    def _encode_part(self, x_M, residual_M, wire_W, start, n, lerp) -> None:
        super()._encode_part(x_M, residual_M, wire_W, 0 if start + x_M.numel() < n else start, n, lerp)
        wire_W[-1] = 1


@broken_codec("linear")
@dataclass(frozen=True)
class SaysLinear(Bf16):
    """Its wires are squares."""

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        super()._encode(x_RN.square(), wire_RW)


@broken_codec("gossip")
@dataclass(frozen=True)
class KeepsItsReplica(Identity):
    """Moves its own replica by something else than what it sends."""

    def _encode_difference(self, x_N, me_N, peers_PN, weights, wire_1W) -> None:
        super()._encode_difference(x_N, me_N, peers_PN, weights, wire_1W)
        me_N.mul_(1.5)
        x_N.copy_(me_N)


@broken_codec("trains")
@dataclass(frozen=True)
class Negates(Wraps):
    """Goes uphill."""

    def _decode_mean_encode(self, wire_RW, n, weight, residual_N, out_1W) -> None:
        super()._decode_mean_encode(wire_RW, n, -weight, residual_N, out_1W)


@pytest.mark.parametrize("check", CODEC_CHECKS)
def test_the_contract_of_codecs_notices(check: str) -> None:
    with pytest.raises(AssertionError, match=f"codec .*, check '{check}': "):
        check_codec(CODECS[check], only=[check])


def test_the_codec_that_they_derive_from_is_sound() -> None:
    check_codec(Wraps, skip=["round_trip"])  # its fp64 goes through fp32
