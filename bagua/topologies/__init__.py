"""Topologies: which ranks average with which in a step. Integers and weights only; independent of torch.

A topology is a sequence of doubly stochastic mixing matrices, one a step: row i holds the weights with which rank
i mixes the values of its peers, and the rest of the row is its own weight.
"""

from __future__ import annotations

from bagua.topologies.base import Topology
from bagua.topologies.complete import Complete
from bagua.topologies.exponential import Exponential
from bagua.topologies.registry import available, get, register
from bagua.topologies.ring import Ring
from bagua.topologies.shift_one import ShiftOne

__all__ = ["Complete", "Exponential", "Ring", "ShiftOne", "Topology", "available", "get", "register"]
