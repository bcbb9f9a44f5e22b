"""The registry of topologies."""

from __future__ import annotations

from bagua.registry import Registry
from bagua.topologies.base import Topology
from bagua.topologies.complete import Complete
from bagua.topologies.exponential import Exponential
from bagua.topologies.ring import Ring
from bagua.topologies.shift_one import ShiftOne

__all__ = ["available", "get", "register", "registry"]

registry: Registry[Topology] = Registry("topology", Topology)
register = registry.register
get = registry.get


def available() -> tuple[str, ...]:
    """Return the registered names.

    Examples:
        >>> sorted(bagua.topologies.available())
        ['complete', 'exponential', 'ring', 'shift_one']
    """
    return tuple(registry)


for _topology in (Complete, Ring, ShiftOne, Exponential):
    register(_topology)
