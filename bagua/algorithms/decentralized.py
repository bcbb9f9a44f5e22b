"""Decentralized SGD: average weights with peers, step with local gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from bagua import codecs, topologies
from bagua.algorithms.base import Algorithm, Context, Exactness, LostStep, Payload, Ticket
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.registry import register
from bagua.codecs import Codec
from bagua.exchanges import Exchange, mix
from bagua.topologies import Topology

__all__ = ["Decentralized"]

_MODES = {"all": "complete", "shift_one": "shift_one"}


@register
@dataclass(frozen=True)
class Decentralized(Algorithm):
    """Decentralized SGD: x_i <- (W x)_i - lr * g(x_i). Weights are averaged while the gradient is computed.

    The exchange overlaps with forward and backward pass; its result replaces the weights just before the optimizer's
    step. Ranks hold different weights; average them (or switch to gradient_allreduce) before you save a final model.

    Args:
        hierarchical: exact average within a node, peers are nodes. None (default) does so where there are
            several nodes of which one has several ranks.
        peer_selection_mode: "all" or "shift_one", Bagua 0.9's names for the topologies "complete" and
            "shift_one". Any number of ranks: `bagua.topologies.ShiftOne` says who rests when it is odd.
        communication_interval: steps between two averages.
        topology: any topology, instead of `peer_selection_mode`.
        codec: "identity", or a linear codec ("bf16", "fp16") for the exchanged weights; a lossy one with a
            fixed sparse topology exchanges differences.

    Bytes: the weights once per peer and interval; 2 (R-1)/R times the weights for "all".
    Source: arXiv:1705.09056 (D-PSGD), algorithm 1; Bagua 0.9's decentralized SGD.

    Examples:
        >>> algorithm = bagua.algorithms.Decentralized(topology="exponential")
        >>> model = bagua.distribute(model, optimizer, algorithm)
    """

    name: ClassVar[str] = "decentralized"
    summary: ClassVar[str] = "local gradients; weights averaged with peers during the step"
    exactness: ClassVar[Exactness] = Exactness.DECENTRALIZED
    payload_kind: ClassVar[Payload] = Payload.PARAM
    lost_step: ClassVar[LostStep | None] = LostStep.KEEP

    hierarchical: bool | None = None
    peer_selection_mode: str = "all"
    communication_interval: int = 1
    topology: str | Topology | None = None
    codec: str | Codec = "identity"

    def __post_init__(self) -> None:
        if self.peer_selection_mode not in _MODES:
            raise ValueError(
                f"peer_selection_mode: expected one of {', '.join(_MODES)}, got {self.peer_selection_mode!r}"
            )
        if self.topology is not None and self.peer_selection_mode != "all":
            raise ValueError(
                f"topology={self.topology!r} and peer_selection_mode={self.peer_selection_mode!r} contradict"
            )
        check_interval("communication_interval", self.communication_interval)
        chosen, codec = topologies.get(self.topology or "complete"), codecs.get(self.codec)
        if chosen.complete and not codec.linear:
            raise ValueError(
                f"codec {codec.name!r} cannot be combined with topology {chosen.name!r}: weights would be rounded"
            )
        _ = self.exchange

    @cached_property
    def exchange(self) -> Exchange:
        """Gossip or an average of all."""
        topology = self.topology if self.topology is not None else _MODES[self.peer_selection_mode]
        return mix(topology, self.codec, hierarchical=bool(self.hierarchical))

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Hierarchical by default where there is a hierarchy."""
        return fit_hierarchy(self, nodes, default=True)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """The exchange's, spread over the interval."""
        return self.exchange.bytes_per_rank(n, size) / self.communication_interval

    def on_forward(self, ctx: Context) -> None:
        """Average a copy of the weights, from now until the end of the backward pass."""
        if ctx.step % self.communication_interval:
            return
        for bucket in ctx.buckets:
            mixed, flat = ctx.scratch("mixed", bucket), bucket.flat
            ticket = ctx.launch(
                self.exchange,
                bucket,
                mixed,
                before=lambda mixed=mixed, flat=flat: mixed.copy_(flat),
                step=ctx.step // self.communication_interval,
            )
            _pending(ctx).append(ticket)

    def on_backward_end(self, ctx: Context) -> None:
        """From here on weights may change, by hand too, while a lane that is late still would read them."""
        if _pending(ctx):
            ctx.wait()

    def on_step_begin(self, ctx: Context) -> None:
        """Apply the average, now that no backward pass needs the old weights."""
        pending = _pending(ctx)
        if pending:
            ctx.wait()
            for bucket in ctx.buckets:
                bucket.flat.copy_(ctx.scratch("mixed", bucket))
            pending.clear()

    def on_pause(self, ctx: Context) -> None:
        """Complete the exchange in flight."""
        self.on_step_begin(ctx)

    def on_load(self, ctx: Context) -> None:
        """Drop the exchange in flight: it belongs to other weights."""
        _pending(ctx).clear()


def _pending(ctx: Context) -> list[Ticket]:
    """The launches of this step that have not been applied."""
    return ctx.keep("pending", list)


def check_interval(name: str, value: object) -> None:
    """Check that an option is a positive number of steps.

    Raises:
        ValueError: names the option.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a number of steps >= 1, got {value!r}")
