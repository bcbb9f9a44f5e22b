"""Gossip: averaging with a few peers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bagua.codecs import Codec, Identity
from bagua.comm.collectives import swap
from bagua.comm.groups import Groups
from bagua.exchanges.base import Exchange, State, check_codec
from bagua.topologies import Topology

__all__ = ["Gossip"]


@dataclass(frozen=True)
class Gossip(Exchange):
    """Gossip step: x_i = w_ii x_i + sum over peers j of w_ij x_j, with this step's mixing matrix W.

    Args:
        topology: selects the peers.
        codec: identity, or a linear codec for the exchanged values (the rank's own value is never encoded).

    Bytes: the encoded size once per receiver.
    Source: arXiv:1705.09056 (D-PSGD), algorithm 1.

    Examples:
        >>> exchange = bagua.exchanges.Gossip(bagua.topologies.ShiftOne())
    """

    topology: Topology
    codec: Codec = field(default_factory=Identity)

    def __post_init__(self) -> None:
        check_codec("Gossip", self.codec)
        if not self.codec.linear:
            raise ValueError(
                f"Gossip of values does not converge through codec {self.codec.name!r}; use DifferenceGossip"
            )

    @property
    def name(self) -> str:
        """gossip, with the topology and the codec unless it is the identity."""
        return f"gossip[{self.topology.name}{'' if self.codec.lossless else ', ' + self.codec.name}]"

    @property
    def complete(self) -> bool:
        """As the topology."""
        return self.topology.complete

    @property
    def elementwise(self) -> bool:
        """True."""
        return True

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Shapes: x_N is [N]."""
        group, buffers, codec, n = groups.world, groups.buffers, self.codec, x_N.numel()
        peers = self.topology.peers(group.rank, group.size, step)
        receivers = self.topology.receivers(group.rank, group.size, step)
        if codec.lossless:
            values_PN = buffers.get("values", (max(1, len(peers)), n), x_N.dtype, x_N.device)
            swap(
                group,
                sends=[(receiver, x_N) for receiver in receivers],
                receives=[(peer, values_PN[k]) for k, (peer, _) in enumerate(peers)],
            )
            if peers:
                x_N.mul_(1.0 - sum(weight for _, weight in peers))
            for (_, weight), value_N in zip(peers, values_PN, strict=False):
                x_N.add_(value_N, alpha=weight)
            return
        width = codec.wire_bytes(n, x_N.dtype)
        mine_1W = buffers.get("wire", (1, width), torch.uint8, x_N.device)
        peers_PW = buffers.get("peers", (max(1, len(peers)), width), torch.uint8, x_N.device)
        if receivers:
            codec.encode(x_N.view(1, n), out=mine_1W)
        swap(
            group,
            sends=[(receiver, mine_1W[0]) for receiver in receivers],
            receives=[(peer, peers_PW[k]) for k, (peer, _) in enumerate(peers)],
        )
        if peers:
            x_N.mul_(1.0 - sum(weight for _, weight in peers))
        value_1N = buffers.get("value", (1, n), x_N.dtype, x_N.device)
        for k, (_, weight) in enumerate(peers):
            codec.decode(peers_PW[k : k + 1], n, out=value_1N)
            x_N.add_(value_1N[0], alpha=weight)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """The encoded size once per receiver, averaged over the topology's period."""
        period = self.topology.period(size)
        sends = sum(len(self.topology.receivers(0, size, step)) for step in range(period)) / period
        return sends * self.codec.wire_bytes(n, torch.float32)
