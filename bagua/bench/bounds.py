"""Physical bound: the shortest time of a training step on a link, for any schedule.

Legend: N = fp32 elements of the model, R = hosts of one rank each, W = bytes that a host sends in a round,
H = messages of a round that depend on one another, B = bits of payload per second of a link, L = seconds one way,
C = a whole step with communication switched off, F = its forward pass, S = its optimizer step, A = the time from its
start until a layer has its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

from bagua.bench.layers import Layer

__all__ = [
    "Moment",
    "Timing",
    "Traffic",
    "all_to_all_mean",
    "background",
    "bound_s",
    "difference_gossip",
    "gossip",
    "low_rank",
    "payload_bits_per_s",
]

# A full packet of TCP over IPv4 at the usual MTU of 1500 bytes: 20 bytes of IP, 20 of TCP, 12 of its timestamps; on the
# wire 14 of ethernet more.
_PACKET_PAYLOAD, _PACKET_BYTES = 1448, 1514


class Moment(Enum):
    """When what is exchanged is at hand, and who waits for it."""

    GRADIENT = "from the end of the forward pass, before the optimizer step"
    PARAMETER = "from the start of the step, before the optimizer step"
    STEP = "from the start of the step to its end"
    AFTER = "between the optimizer step and the next forward pass"
    BACKGROUND = "nobody waits"


@dataclass(frozen=True)
class Traffic:
    """What a host sends in a round.

    Attributes:
        bytes_per_host: W.
        num_messages: H.
        moment: which bound holds.
        every: steps from one round to the next.
        layer_bytes: W of each layer, from the first to the last. Empty: as the layers' numbers of elements.
    """

    bytes_per_host: float
    num_messages: int
    moment: Moment
    every: int = 1
    layer_bytes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Timing:
    """C, F and S in seconds, measured with communication switched off."""

    step_s: float
    forward_s: float
    optimizer_s: float


def payload_bits_per_s(bits_per_s: float) -> float:
    """What is left of a link's bandwidth once full packets of TCP have their headers."""
    return bits_per_s * _PACKET_PAYLOAD / _PACKET_BYTES


def all_to_all_mean(
    num_elements: int, ranks: int, bits: float, moment: Moment = Moment.GRADIENT, every: int = 1
) -> Traffic:
    """A mean of all ranks with `bits` per element: each rank's part to its owner, the means to all.

    W = 2 N (R-1)/R bits/8, for all-reduce in fp32 8 N (R-1)/R. H = 2: a part's mean leaves its owner only when
    every rank's part has arrived. A ring has more.
    """
    return Traffic(2 * num_elements * (ranks - 1) / ranks * bits / 8, 2 if ranks > 1 else 0, moment, every)


def low_rank(shapes: tuple[tuple[int, ...], ...], ranks: int, rank: int, min_compression: float = 2.0) -> Traffic:
    """PowerSGD: means of P [n, r] and, once they are known, of Q [m, r]; vectors and small matrices uncompressed.

    H = 4: two means of two messages each, the second of factors that depend on the first.
    """
    elements = 0
    for shape in shapes:
        numel = math.prod(shape)
        sides = [side for side in shape if side != 1]
        n = sides[0] if len(sides) > 1 else 1
        m = numel // n
        factors = min(rank, n, m) * (n + m)
        elements += factors if n > 1 and factors * min_compression <= numel else numel
    return Traffic(all_to_all_mean(elements, ranks, 32).bytes_per_host, 4 if ranks > 1 else 0, Moment.GRADIENT)


def gossip(num_elements: int, ranks: int, bits: float = 32) -> Traffic:
    """The weights of the step's start, to one peer. W = 4 N in fp32, H = 1."""
    alone = ranks == 1
    return Traffic(0 if alone else num_elements * bits / 8, 0 if alone else 1, Moment.PARAMETER)


def difference_gossip(num_elements: int, ranks: int, bits: float = 8) -> Traffic:
    """Quantised differences of weights to both neighbours on a ring, beside a step. W = 2 N with 8 bits, H = 1."""
    neighbours = min(2, ranks - 1)
    return Traffic(neighbours * num_elements * bits / 8, 1 if ranks > 1 else 0, Moment.STEP)


def background(num_elements: int, ranks: int, bits: float = 32) -> Traffic:
    """Means of all weights, beside training; W is that of a round, and no step waits for it."""
    return Traffic(all_to_all_mean(num_elements, ranks, bits).bytes_per_host, 0, Moment.BACKGROUND)


def bound_s(
    traffic: Traffic, timing: Timing, bits_per_s: float, latency_s: float, layers: Sequence[Layer] = ()
) -> float:
    """The least seconds of a step, the mean over a period if rounds are rarer than steps.

    max(C, F + 8 W / B + H L + S) for gradients, max(C, 8 W / B + H L + S) for the weights of the step's start,
    max(C, 8 W / B + H L) for what only the end of the step waits for, C + 8 W / B + H L for what is exchanged after the
    optimizer step. With `layers` it is for gradients the largest of
    C and, over all layers, A + 8 W' / B + H L + S, where W' is of the layer and those before it: none of them can have
    left before its gradients are at hand.

    Args:
        bits_per_s: B, see `payload_bits_per_s`; `math.inf` if the link has no limit.
        latency_s: L.
        layers: of the model, which says when gradients are at hand: the backward pass takes the time of a layer's work
            for it. Without them all may be at hand from the end of the forward pass.
    """
    wire_s = 8 * traffic.bytes_per_host / bits_per_s + traffic.num_messages * latency_s
    if traffic.moment is Moment.BACKGROUND:
        return timing.step_s
    if traffic.moment is Moment.AFTER:
        return timing.step_s + wire_s / traffic.every
    if traffic.moment is Moment.STEP:
        return max(timing.step_s, wire_s / traffic.every)
    if traffic.moment is Moment.GRADIENT:
        if layers and traffic.every == 1:
            return max(timing.step_s, *_ends_s(traffic, timing, bits_per_s, latency_s, layers))
        return max(timing.step_s, timing.forward_s + wire_s / traffic.every + timing.optimizer_s)
    # Hidden behind `every` steps, if rounds are rarer than steps.
    return max(timing.step_s, (wire_s + timing.optimizer_s) / traffic.every)


def _ends_s(
    traffic: Traffic, timing: Timing, bits_per_s: float, latency_s: float, layers: Sequence[Layer]
) -> list[float]:
    """For each layer the least time of a step in which it and the layers before it are sent after its backward pass."""
    work = list(accumulate((layer.work for layer in layers), initial=0.0))
    sizes = traffic.layer_bytes or tuple(float(layer.num_elements) for layer in layers)
    left = list(accumulate(sizes))
    backward_s, total = timing.step_s - timing.forward_s - timing.optimizer_s, left[-1] or 1.0
    fixed_s = timing.forward_s + traffic.num_messages * latency_s + timing.optimizer_s
    return [
        fixed_s
        + backward_s * (1 - work[at] / (work[-1] or 1.0))
        + 8 * traffic.bytes_per_host * left[at] / total / bits_per_s
        for at in range(len(layers))
    ]
