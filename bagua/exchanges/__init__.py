"""Exchanges: collective operations that replace a flat tensor, in place, by its reduction over the ranks."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from bagua.exchanges.all_gather import AllGather
from bagua.exchanges.all_reduce import AllReduce
from bagua.exchanges.base import Exchange, State
from bagua.exchanges.difference_gossip import DifferenceGossip
from bagua.exchanges.elementwise_hook import ElementwiseHook, LerpHook
from bagua.exchanges.gossip import Gossip
from bagua.exchanges.hierarchical import Hierarchical
from bagua.exchanges.mix import mix
from bagua.exchanges.payload_source import PayloadSource, Piece
from bagua.exchanges.power_sgd import PowerSGD
from bagua.exchanges.scatter_gather import ScatterGather

__all__ = [
    "AllGather",
    "AllReduce",
    "DifferenceGossip",
    "ElementwiseHook",
    "Exchange",
    "Gossip",
    "Hierarchical",
    "LerpHook",
    "PayloadSource",
    "Piece",
    "PowerSGD",
    "ScatterGather",
    "State",
    "mix",
]

_OLD_NAMES = {"Lerps": "LerpHook", "Passage": "ElementwiseHook", "Source": "PayloadSource"}


if not TYPE_CHECKING:  # with it, type checkers would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name not in _OLD_NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        warnings.warn(f"bagua.exchanges.{name} is called {_OLD_NAMES[name]} now", FutureWarning, stacklevel=2)
        return globals()[_OLD_NAMES[name]]
