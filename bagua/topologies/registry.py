"""Topologies by name."""

from __future__ import annotations

from bagua.topologies.base import Topology
from bagua.topologies.complete import Complete
from bagua.topologies.exponential import Exponential
from bagua.topologies.ring import Ring
from bagua.topologies.shift_one import ShiftOne

__all__ = ["available", "get", "register"]

_topologies: dict[str, type[Topology]] = {}


def register(topology: type[Topology]) -> type[Topology]:
    """Make `topology` known under its `name`; usable as a decorator."""
    known = _topologies.setdefault(topology.name, topology)
    if known is not topology:
        raise ValueError(f"topology {topology.name!r} is already registered as {known.__qualname__}")
    return topology


def available() -> tuple[str, ...]:
    """Return the registered names."""
    return tuple(_topologies)


def get(topology: str | Topology) -> Topology:
    """Return the topology of that name, or `topology` itself if it is one.

    Raises:
        ValueError: no such name.
        TypeError: neither a name nor a topology.
    """
    if isinstance(topology, Topology):
        return topology
    if not isinstance(topology, str):
        raise TypeError(f"topology: expected a name or a Topology, got {type(topology).__name__}")
    if topology not in _topologies:
        raise ValueError(f"topology {topology!r} is unknown; available: {', '.join(_topologies)}")
    return _topologies[topology]()


for _topology in (Complete, Ring, ShiftOne, Exponential):
    register(_topology)
