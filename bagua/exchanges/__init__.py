"""Replace a flat tensor, in place, by a mix of everyone's."""

from __future__ import annotations

from bagua.exchanges.all_reduce import AllReduce
from bagua.exchanges.base import Exchange, State
from bagua.exchanges.difference_gossip import DifferenceGossip
from bagua.exchanges.gossip import Gossip
from bagua.exchanges.hierarchical import Hierarchical
from bagua.exchanges.mix import mix
from bagua.exchanges.power_sgd import PowerSGD
from bagua.exchanges.scatter_gather import ScatterGather
from bagua.exchanges.source import Lerps, Passage, Piece, Source

__all__ = [
    "AllReduce",
    "DifferenceGossip",
    "Exchange",
    "Gossip",
    "Hierarchical",
    "Lerps",
    "Passage",
    "Piece",
    "PowerSGD",
    "ScatterGather",
    "Source",
    "State",
    "mix",
]
