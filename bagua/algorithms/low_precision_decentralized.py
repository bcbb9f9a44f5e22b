"""Decentralized SGD on a ring with quantised differences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from bagua import codecs, topologies
from bagua.algorithms.base import Algorithm, Context, Exactness, Payload
from bagua.algorithms.decentralized import check_interval
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.registry import register
from bagua.codecs import Codec
from bagua.exchanges import DifferenceGossip, Exchange, Hierarchical
from bagua.topologies import Topology

__all__ = ["LowPrecisionDecentralized"]


@register
@dataclass(frozen=True)
class LowPrecisionDecentralized(Algorithm):
    """After each optimizer step, gossip with both neighbours on a ring in 8 bits.

    Every rank keeps a replica of itself and of each neighbour and sends only the quantised difference between
    where it wants to be and its own replica (`bagua.exchanges.DifferenceGossip`), so quantisation errors do not
    add up. With one neighbour (two ranks) that one has weight 2/3.

    Args:
        hierarchical: exact average within a node, the ring joins nodes. None (default) does so where there are
            several nodes of which one has several ranks.
        communication_interval: gossip after every so many steps only.
        codec: any lossy, non-linear codec.
        topology: any topology with fixed peers.

    Bytes: the encoded weights once per neighbour and interval.
    Source: the original's low-precision decentralized SGD; arXiv:1803.06443 (DCD-PSGD), algorithm 1.
    """

    name: ClassVar[str] = "low_precision_decentralized"
    summary: ClassVar[str] = "8-bit differences of weights with both neighbours on a ring"
    exactness: ClassVar[Exactness] = Exactness.DECENTRALIZED
    payload_kind: ClassVar[Payload] = Payload.PARAM

    hierarchical: bool | None = None
    communication_interval: int = 1
    codec: str | Codec = "minmax_uint8"
    topology: str | Topology = "ring"

    def __post_init__(self) -> None:
        check_interval("communication_interval", self.communication_interval)
        _ = self.exchange

    @cached_property
    def exchange(self) -> Exchange:
        """Gossip of differences, maybe among leaders only."""
        gossip = DifferenceGossip(topologies.get(self.topology), codecs.get(self.codec))
        return Hierarchical(gossip) if self.hierarchical else gossip

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Hierarchical by default where there is a hierarchy."""
        return fit_hierarchy(self, nodes, default=True)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """The exchange's, spread over the interval."""
        return self.exchange.bytes_per_rank(n, size) / self.communication_interval

    def on_step_end(self, ctx: Context) -> None:
        """Gossip; the next forward pass needs the result."""
        if (ctx.step + 1) % self.communication_interval == 0:
            for bucket in ctx.buckets:
                ctx.launch(self.exchange, bucket)
            ctx.wait()
