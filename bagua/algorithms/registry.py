"""Algorithms by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from bagua.algorithms.base import Algorithm

__all__ = ["Available", "available", "get", "register"]

_algorithms: dict[str, type[Algorithm]] = {}
_A = TypeVar("_A", bound=type[Algorithm])


class Available(NamedTuple):
    """A row of `available()`."""

    name: str
    summary: str
    bytes_per_step: float
    exactness: str


def register(algorithm: _A) -> _A:
    """Make `algorithm`, a subclass of `Algorithm`, known under its `name`; usable as a decorator.

    Raises:
        TypeError: not a subclass of `Algorithm`.
        ValueError: it has no name, or the name is taken by another class.
    """
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        raise TypeError(f"register: expected a subclass of bagua.Algorithm, got {algorithm!r}")
    if not algorithm.name:
        raise ValueError(f"register: {algorithm.__qualname__} has no `name`")
    known = _algorithms.get(algorithm.name)
    if known is not None and (known.__module__, known.__qualname__) != (algorithm.__module__, algorithm.__qualname__):
        raise ValueError(f"algorithm {algorithm.name!r} is already registered as {known.__qualname__}")
    _algorithms[algorithm.name] = algorithm
    return algorithm


def available(num_elements: int = 1, size: int = 4) -> tuple[Available, ...]:
    """List the registered algorithms.

    Args:
        num_elements: fp32 elements of the model; with the default, `bytes_per_step` is bytes per element.
        size: number of ranks.

    Returns:
        Rows of (name, summary, bytes a rank sends per step, exactness).
    """
    scale = 1 << 20  # a large model, so that headers and rounding do not show in bytes per element
    return tuple(
        Available(name, cls.summary, cls().bytes_per_rank(scale, size) / scale * num_elements, cls.exactness.value)
        for name, cls in _algorithms.items()
    )


def get(algorithm: str | Algorithm, **options: Any) -> Algorithm:
    """Return the algorithm of that name with `options`, or `algorithm` itself.

    Raises:
        ValueError: unknown name or option, an option of the wrong type, or options beside an instance.
        TypeError: neither a name nor an algorithm.
    """
    if isinstance(algorithm, Algorithm):
        if options:
            raise ValueError(
                f"algorithm: options {', '.join(options)} go into the instance {algorithm!r}, not beside it"
            )
        return algorithm
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm: expected a name or a bagua.Algorithm, got {type(algorithm).__name__}")
    cls = _algorithms.get(algorithm)
    if cls is None:
        raise ValueError(f"algorithm {algorithm!r} is unknown; available: {', '.join(_algorithms)}")
    known = {field.name: field for field in fields(cls) if field.init}
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"algorithm {algorithm!r} has no option {option!r}; it has: {', '.join(known)}")
        if str(known[option].type).startswith("bool") and not isinstance(value, bool | None):
            raise ValueError(f"algorithm {algorithm!r}, option {option!r}: expected a bool, got {value!r}")
    return cls(**options)
