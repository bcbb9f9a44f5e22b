"""Gossip with fixed peers through a lossy codec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bagua.codecs import Codec
from bagua.comm.collectives import swap
from bagua.comm.groups import Groups
from bagua.exchanges.base import Exchange, State, check_codec
from bagua.topologies import Topology

__all__ = ["DifferenceGossip"]


@dataclass(frozen=True)
class DifferenceGossip(Exchange):
    """Gossip of quantised differences; every rank keeps a replica of itself and of each peer.

    d = (x - me) + sum over peers j of w_j (y_j - me); all send Q(d); me += Q(d); y_j += Q(d_j); x = me.
    A replica y_j is equal, bit for bit, to rank j's `me`, because both add the same decoded numbers.

    Args:
        topology: with fixed peers; replicas of changing peers would go stale.
        codec: any lossy codec; needs no error feedback, because the replica contains the error.

    State: `me` [N] and `peers` [P, N].
    Bytes: the encoded size once per receiver.
    Source: Bagua 0.9's low-precision decentralized; arXiv:1803.06443 (DCD-PSGD), algorithm 1.

    Examples:
        >>> ring = bagua.topologies.Ring()
        >>> exchange = bagua.exchanges.DifferenceGossip(ring, bagua.codecs.MinMaxUInt8())
    """

    topology: Topology
    codec: Codec

    def __post_init__(self) -> None:
        check_codec("DifferenceGossip", self.codec)
        if not self.topology.fixed:
            raise ValueError(
                f"topology {self.topology.name!r} cannot be combined with codec {self.codec.name!r}: "
                "replicas of peers need the same peers at every step"
            )

    @property
    def name(self) -> str:
        """difference_gossip, with topology and codec."""
        return f"difference_gossip[{self.topology.name}, {self.codec.name}]"

    @property
    def complete(self) -> bool:
        """False: ranks differ by the compression error."""
        return False

    @property
    def elementwise(self) -> bool:
        """True."""
        return True

    @property
    def two_phases(self) -> bool:
        """True: what the peers send changes the replicas now, and the payload in the next exchange."""
        return True

    def init(self, x_N: Tensor, groups: Groups) -> State:
        """Replicas equal to `x_N`: right where all ranks hold the same values, else see `rebuild`."""
        peers = self.topology.peers(groups.rank, groups.size, 0)
        return {"me": x_N.clone(), "peers": x_N.repeat(len(peers), 1)}

    def rebuild(self, x_N: Tensor, state: State, groups: Groups) -> None:
        """Each rank sends `x_N` in full precision to those that keep a replica of it."""
        group = groups.world
        state["me"].copy_(x_N)
        swap(
            group,
            sends=[(peer, state["me"]) for peer in self.topology.receivers(group.rank, group.size, 0)],
            receives=[
                (peer, state["peers"][k]) for k, (peer, _) in enumerate(self.topology.peers(group.rank, group.size, 0))
            ],
        )

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Shapes: x_N is [N]."""
        wire_shape = (1, self.codec.wire_bytes(x_N.numel(), x_N.dtype))
        held = {"wire": groups.buffers.get("wire", wire_shape, torch.uint8, x_N.device)}
        self.begin(x_N, state, groups, held)
        self.finish(state, groups, held)

    def begin(self, x_N: Tensor, state: State, groups: Groups, held: State) -> None:
        """Encode d, and move `me` and `x_N` by what is decoded of it."""
        group, width = groups.world, self.codec.wire_bytes(x_N.numel(), x_N.dtype)
        if "wire" not in held:
            held["wire"] = torch.empty((1, width), dtype=torch.uint8, device=x_N.device)
        weights = [weight for _, weight in self.topology.peers(group.rank, group.size, 0)]
        # The replicas that peers hold of me must stay equal to `me`: it moves by what is decoded, not by d.
        self.codec.encode_difference(x_N, state["me"], state["peers"], weights, out=held["wire"])

    def finish(self, state: State, groups: Groups, held: State) -> None:
        """Swap what is encoded with the peers, and move their replicas."""
        group, peers_PN, mine_W = groups.world, state["peers"], held["wire"][0]
        peers = self.topology.peers(group.rank, group.size, 0)
        peers_PW = groups.buffers.get("peers", (max(1, len(peers)), mine_W.numel()), torch.uint8, mine_W.device)
        swap(
            group,
            sends=[(peer, mine_W) for peer in self.topology.receivers(group.rank, group.size, 0)],
            receives=[(peer, peers_PW[k]) for k, (peer, _) in enumerate(peers)],
        )
        self.codec.decode_add(peers_PW[: len(peers)], peers_PN)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """The encoded size once per receiver."""
        return len(self.topology.receivers(0, size, 0)) * self.codec.wire_bytes(n, torch.float32)
