"""The registry of algorithms."""

from __future__ import annotations

from typing import NamedTuple

from bagua.algorithms.base import Algorithm
from bagua.registry import Registry

__all__ = ["Available", "available", "get", "register", "registry"]

registry: Registry[Algorithm] = Registry("algorithm", Algorithm)
register = registry.register
get = registry.get


class Available(NamedTuple):
    """A row of `available()`."""

    name: str
    summary: str
    bytes_per_step: float
    exactness: str


def available(num_elements: int = 1, size: int = 4, *, builtin_only: bool = False) -> tuple[Available, ...]:
    """List the registered algorithms.

    Args:
        num_elements: fp32 elements of the model; with the default, `bytes_per_step` is bytes per element.
        size: number of ranks.
        builtin_only: leave out what other packages and `bagua.contrib` have registered.

    Returns:
        Rows of (name, summary, bytes a rank sends per step, exactness).

    Examples:
        >>> {row.name: row.exactness for row in bagua.algorithms.available()}["bytegrad"]
        'lossy synchronous'
        >>> rows = bagua.algorithms.available(num_elements=25_000_000, size=8)
        >>> cheapest = min(rows, key=lambda row: row.bytes_per_step)
    """
    scale = 1 << 20  # a large model, so that headers and rounding do not show in bytes per element
    return tuple(
        Available(name, cls.summary, cls().bytes_per_rank(scale, size) / scale * num_elements, cls.exactness.value)
        for name, cls in ((name, registry[name]) for name in (registry.builtin() if builtin_only else registry))
    )
