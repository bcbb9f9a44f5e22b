"""The operations of `BaguaBucket`, each over an exchange of `bagua.exchanges`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from bagua.comm.groups import Groups
from bagua.exchanges import DifferenceGossip, Exchange, Hierarchical, mix

__all__ = [
    "Centralized",
    "Contents",
    "Decentralized",
    "LowPrecisionDecentralized",
    "Operation",
    "Python",
    "check_compression",
]

_TOPOLOGIES = {"all": "complete", "shift_one": "shift_one"}
_CODEC = "minmax_uint8"


def check_compression(compression: str) -> None:
    """Refuse what the original does not know.

    Raises:
        ValueError: it is not "MinMaxUInt8".
    """
    if compression != "MinMaxUInt8":
        raise ValueError(
            f"compression: expected 'MinMaxUInt8', got {compression!r}; other codecs go with a bagua.Algorithm"
        )


class Contents(Protocol):
    """A bucket, as operations know it: see `BaguaBucket`."""

    name: str

    def gather(self) -> Tensor: ...

    def scatter(self) -> None: ...

    def take_over(self, flat: Tensor) -> None: ...


class Operation:
    """One entry of a bucket's list.

    Attributes:
        group: the `BaguaProcessGroup` it was appended with, or None.
        hierarchical: as appended.
        compresses: whether values are encoded on the wire.
    """

    group: Any = None
    hierarchical = False
    compresses = False

    def run(self, bucket: Contents, groups: Groups | None) -> None:
        """Act on the bucket, on the lane.

        Args:
            bucket: whose tensors are exchanged.
            groups: of the lane; None for a single rank.
        """
        raise NotImplementedError


class Python(Operation):
    """A function of the algorithm's."""

    def __init__(self, function: Callable[[str], Any], group: Any) -> None:
        self._function, self.group = function, group

    def run(self, bucket: Contents, groups: Groups | None) -> None:
        """Call it with the bucket's name."""
        self._function(bucket.name)


class Centralized(Operation):
    """Mean or sum of all ranks, in place."""

    def __init__(self, hierarchical: bool, average: bool, compresses: bool, group: Any) -> None:
        self.hierarchical, self.average, self.compresses, self.group = hierarchical, average, compresses, group
        codec = _CODEC if compresses else "identity"
        self._exchange: Exchange = mix("complete", codec, hierarchical=hierarchical, average=average)

    def run(self, bucket: Contents, groups: Groups | None) -> None:
        """Exchange the flat tensor."""
        if groups is not None:
            self._exchange.run(bucket.gather(), {}, groups, 0)
            bucket.scatter()


class Decentralized(Operation):
    """Mean with peers, into a tensor beside the bucket."""

    def __init__(self, peer_weight: Tensor, hierarchical: bool, peer_selection_mode: str, group: Any) -> None:
        if peer_selection_mode not in _TOPOLOGIES:
            expected = ", ".join(_TOPOLOGIES)
            raise ValueError(f"peer_selection_mode: expected one of {expected}, got {peer_selection_mode!r}")
        self.hierarchical, self.group = hierarchical, group
        self._peer_weight, self._rounds = peer_weight, 0
        self._exchange = mix(_TOPOLOGIES[peer_selection_mode], "identity", hierarchical=hierarchical)

    @torch.no_grad()
    def run(self, bucket: Contents, groups: Groups | None) -> None:
        """Copy the flat tensor to the peer weight and mix it there."""
        self._peer_weight.copy_(bucket.gather())
        if groups is not None:
            self._exchange.run(self._peer_weight, {}, groups, self._rounds)
        self._rounds += 1

    def copy_back_peer_weight(self, bucket: Contents) -> None:
        """Copy the result to the bucket's effective tensors. Wait for the exchange before."""
        bucket.take_over(self._peer_weight)


class LowPrecisionDecentralized(Operation):
    """Differences to replicas, gossiped on a ring in 8 bits; see `bagua.exchanges.DifferenceGossip`."""

    compresses = True

    def __init__(self, weight: Tensor, left: Tensor, right: Tensor, hierarchical: bool, group: Any) -> None:
        self.hierarchical, self.group = hierarchical, group
        self._weight, self._left, self._right = weight, left, right
        gossip = mix("ring", _CODEC)
        assert isinstance(gossip, DifferenceGossip)
        self._topology = gossip.topology
        self._exchange: Exchange = Hierarchical(gossip) if hierarchical else gossip

    @torch.no_grad()
    def run(self, bucket: Contents, groups: Groups | None) -> None:
        """Mix the flat tensor in place and move the replicas."""
        if groups is None:
            return
        ring = groups.inter if self.hierarchical else groups.world
        count = 0 if ring is None else len(self._topology.peers(ring.rank, ring.size, 0))
        replicas = (self._left, self._right)[:count]
        peers_PN = torch.stack(replicas) if replicas else self._weight.new_empty(0, self._weight.numel())
        self._exchange.run(bucket.gather(), {"me": self._weight, "peers": peers_PN}, groups, 0)
        bucket.scatter()
        for replica, moved in zip((self._left, self._right), (*peers_PN, *peers_PN[:1]), strict=False):
            replica.copy_(moved)
