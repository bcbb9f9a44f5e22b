"""The registry of algorithms."""

from __future__ import annotations

from numbers import Integral, Real
from typing import NamedTuple

from bagua.algorithms.base import Algorithm
from bagua.registry import Registry

__all__ = ["Available", "available", "get", "register", "registry"]

# What papers and other libraries call them.
_CALLED = {
    **dict.fromkeys(("allreduce", "all_reduce", "ddp"), "'gradient_allreduce'"),
    **dict.fromkeys(("1bit_adam", "1-bit_adam", "onebit_adam", "one_bit_adam"), "'qadam' with codec='sign'"),
    **dict.fromkeys(("01_adam", "0/1_adam"), "'zero_one_adam'"),
    **dict.fromkeys(("1bit_lamb", "1-bit_lamb", "onebit_lamb"), "'one_bit_lamb'"),
    **dict.fromkeys(("gossip", "d_psgd", "dpsgd"), "'decentralized'"),
    **dict.fromkeys(("fedavg", "post_local_sgd"), "'local_sgd'"),
}

registry: Registry[Algorithm] = Registry("algorithm", Algorithm, _CALLED)
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

    Raises:
        ValueError: `num_elements` is negative, or `size` is less than 1.

    Examples:
        >>> {row.name: row.exactness for row in bagua.algorithms.available()}["bytegrad"]
        'lossy synchronous'
        >>> rows = bagua.algorithms.available(num_elements=25_000_000, size=8)
        >>> cheapest = min(rows, key=lambda row: row.bytes_per_step)
    """
    if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
        raise ValueError(f"size: expected a number of ranks >= 1, got {size!r}")
    if isinstance(num_elements, bool) or not isinstance(num_elements, Real) or not num_elements >= 0:
        raise ValueError(f"num_elements: expected a number of elements >= 0, got {num_elements!r}")
    scale = 1 << 20  # a large model, so that headers and rounding do not show in bytes per element
    return tuple(
        Available(name, cls.summary, cls().bytes_per_rank(scale, size) / scale * num_elements, cls.exactness.value)
        for name, cls in ((name, registry[name]) for name in (registry.builtin() if builtin_only else registry))
    )
