"""Consistent hashing of keys to servers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b

__all__ = ["Ring"]

_POINTS = 256  # of a server; shares then differ by some 6 % (one standard deviation)


class Ring:
    """Servers on a circle, each at many points; a key belongs to the first point after its own.

    When one of n servers joins or leaves, 1/n of the keys move and all others stay. The order of `names` is of no
    consequence.

    Source: Karger et al., "Consistent hashing and random trees", STOC 1997.
    """

    def __init__(self, names: Sequence[str]) -> None:
        points = sorted((_hash(f"{name}#{i}".encode()), name) for name in names for i in range(_POINTS))
        self._hashes = [point for point, _ in points]
        self._names = [name for _, name in points]

    def owner(self, key: bytes) -> str:
        """Return the name of the server that holds `key`."""
        return self._names[bisect_right(self._hashes, _hash(key)) % len(self._names)]


def _hash(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")
