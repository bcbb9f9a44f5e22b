"""Which parameters lie in which bucket, and in which order the buckets leave. Names and sizes; no tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DEFAULT_BUCKET_BYTES", "Entry", "Plan", "default_bucket_bytes", "make_plan"]

DEFAULT_BUCKET_BYTES = 10 * 2**20


def default_bucket_bytes() -> int:
    """`BAGUA_DEFAULT_BUCKET_SIZE` of the environment, or 10 MiB.

    Raises:
        ValueError: the variable is no positive integer.
    """
    text = os.environ.get("BAGUA_DEFAULT_BUCKET_SIZE")
    if text is None:
        return DEFAULT_BUCKET_BYTES
    if not text.strip().isdigit() or int(text) <= 0:
        raise ValueError(f"BAGUA_DEFAULT_BUCKET_SIZE: expected a positive number of bytes, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class Entry:
    """What the plan needs to know of a parameter."""

    name: str
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class Plan:
    """Parameter names of each bucket, in the order of exchange."""

    buckets: tuple[tuple[str, ...], ...]

    def to_json(self) -> list[list[str]]:
        """A JSON-able copy."""
        return [list(names) for names in self.buckets]

    @classmethod
    def from_json(cls, data: Sequence[Sequence[str]]) -> Plan:
        """The inverse of `to_json`."""
        return cls(tuple(tuple(names) for names in data))

    @property
    def order(self) -> tuple[str, ...]:
        """All names, in the order in which their gradients were ready."""
        return tuple(name for names in self.buckets for name in names)


def make_plan(entries: Sequence[Entry], bucket_bytes: int) -> Plan:
    """Fill buckets in the order of `entries`; a bucket has one dtype and is closed once it holds `bucket_bytes`.

    Buckets leave in the order in which their last parameter comes, so that none waits for a later one.
    """
    filling: dict[str, tuple[list[str], int]] = {}
    closed: list[tuple[int, tuple[str, ...]]] = []
    for position, entry in enumerate(entries):
        names, nbytes = filling.get(entry.dtype, ([], 0))
        names.append(entry.name)
        nbytes += entry.nbytes
        if nbytes >= bucket_bytes:
            closed.append((position, tuple(names)))
            filling.pop(entry.dtype, None)
        else:
            filling[entry.dtype] = (names, nbytes)
    position_of = {entry.name: position for position, entry in enumerate(entries)}
    closed += [(position_of[names[-1]], tuple(names)) for names, _ in filling.values()]
    return Plan(tuple(names for _, names in sorted(closed)))
