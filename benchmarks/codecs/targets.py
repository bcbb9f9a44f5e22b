"""What is measured, and how fast it should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua.codecs import Bf16, Codec, Eden, Identity, Int4, MinMaxUInt8, Sign, TopK

PEERS = 8


@dataclass(frozen=True)
class Case:
    """An operation of a codec and the ratios to memcpy it is to reach, at 10 MB and at 100 MB of fp32.

    The targets are for AVX-512 and one thread; None: only measured. ``headline`` marks those of the roadmap.
    """

    codec: Codec
    operation: str
    cached: float | None = None
    uncached: float | None = None
    headline: bool = False

    def target(self, size_mb: float) -> float | None:
        """The ratio to reach at this size; small ones have none."""
        return self.uncached if size_mb >= 64 else self.cached if size_mb >= 8 else None


DIFFERENCE, STEPS, ADD = "encode_difference 2", "the same by steps", "decode_add 2"
MEAN = f"decode_mean {PEERS}"
FUSED = f"decode_mean_encode {PEERS}"
CASES = (
    Case(MinMaxUInt8(), "encode", 1.2, 1.3, headline=True),
    Case(MinMaxUInt8(), "decode", 1.6, 1.3, headline=True),
    Case(MinMaxUInt8(), MEAN),
    Case(MinMaxUInt8(), FUSED, 0.3, 0.35, headline=True),
    Case(MinMaxUInt8(), "encode_with_feedback"),
    Case(MinMaxUInt8(), DIFFERENCE),
    Case(MinMaxUInt8(), ADD),
    Case(MinMaxUInt8(), STEPS),
    Case(MinMaxUInt8(block=None), "encode", 0.9, 0.8),
    Case(Sign(), "encode"),
    Case(Sign(), "encode_with_feedback", 0.5, 0.7, headline=True),
    Case(Sign(), "decode", 1.8, 1.4),
    Case(Sign(), FUSED),
    Case(Int4(), "encode", 1.2, 1.2, headline=True),
    Case(Int4(), "encode_with_feedback"),
    Case(Int4(), "decode", 1.7, 1.3),
    Case(Int4(), FUSED),
    Case(TopK(ratio=0.01), "encode", 0.5, 1.0, headline=True),
    Case(TopK(ratio=0.001), "encode"),
    Case(TopK(ratio=0.01), "encode_with_feedback"),
    Case(TopK(ratio=0.01), MEAN),
    Case(Bf16(), "encode", 0.9, 1.0),
    Case(Bf16(), MEAN, 0.15, 0.2),
    Case(Identity(), MEAN),
    *(
        Case(Eden(bits=bits, states=states), operation)
        for bits, states in ((1, 1), (1, 8), (1, 32), (2, 1), (2, 8), (4, 1))
        for operation in ("encode", "decode", FUSED)
    ),
)


def calls(codec: Codec, n: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every operation on Gaussian rows of ``n`` fp32 elements; all outputs exist before and are used again."""
    generator = torch.Generator().manual_seed(1)
    x_1N = torch.randn((1, n), generator=generator)
    residual_1N = 0.3 * torch.randn((1, n), generator=generator)
    wire_1W = torch.empty((1, codec.wire_bytes(n)), dtype=torch.uint8)
    codec.encode(x_1N, out=wire_1W)
    wire_RW, sent_1W, y_1N = wire_1W.repeat(PEERS, 1), torch.empty_like(wire_1W), torch.empty_like(x_1N)
    yield "encode", lambda: codec.encode(x_1N, out=sent_1W)
    yield "decode", lambda: codec.decode(wire_1W, n, out=y_1N)
    yield MEAN, lambda: codec.decode_mean(wire_RW, n, y_1N[0], 1 / PEERS)
    yield FUSED, lambda: codec.decode_mean_encode(wire_RW, n, 1 / PEERS, out=sent_1W)
    yield "encode_with_feedback", lambda: codec.encode_with_feedback(x_1N, residual_1N, out=sent_1W)
    yield from _gossip(codec, n, x_1N[0], wire_1W)


def _gossip(codec: Codec, n: int, x_N: Tensor, wire_1W: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A step of gossip of differences with two peers, fused and not. Small weights: differences stay, run by run."""
    generator = torch.Generator().manual_seed(2)
    weights = (0.01, 0.01)
    mine_3N, me_N, d_N = x_N.repeat(3, 1), torch.randn(n, generator=generator), torch.empty_like(x_N)
    peers_2N, wire_2W = torch.randn((2, n), generator=generator), wire_1W.repeat(2, 1)

    def by_steps() -> None:
        torch.sub(mine_3N[0], me_N, alpha=1 + sum(weights), out=d_N)
        for y_N, weight in zip(peers_2N, weights, strict=True):
            d_N.add_(y_N, alpha=weight)
        codec.encode(d_N[None], out=wire_1W)
        codec.decode(wire_1W, n, out=d_N[None])
        mine_3N[0].copy_(me_N.add_(d_N))
        for y_N, peer_W in zip(mine_3N[1:], wire_2W, strict=True):
            codec.decode(peer_W[None], n, out=d_N[None])
            y_N.add_(d_N)

    yield DIFFERENCE, lambda: codec.encode_difference(mine_3N[0], me_N, peers_2N, weights, out=wire_1W)
    yield ADD, lambda: codec.decode_add(wire_2W, mine_3N[1:])
    yield STEPS, by_steps
