"""What settings come to: the pieces that are exchanged, on how many lanes, and who is asked for the sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from bagua.autotune import Settings
from bagua.engine.bucket import part_ranges
from bagua.engine.plan import Entry, make_plan

__all__ = ["Effect", "Effects"]


class Effect(NamedTuple):
    """Equal for settings that make no difference.

    Attributes:
        pieces: bytes of each, in the order of exchange.
        num_lanes: that can be busy.
        direct: for each piece, whether sums go straight between ranks; empty if there is no choice.
        hierarchical: sums are taken within each node first.
    """

    pieces: tuple[int, ...]
    num_lanes: int
    direct: tuple[bool, ...]
    hierarchical: bool


class Effects:
    """Knows the parameters of a module.

    Args:
        entries: in the order in which gradients become ready.
        itemsizes: bytes of an element of each.
        direct: there is a choice between the backend's all-reduce and sends.
    """

    def __init__(self, entries: Sequence[Entry], itemsizes: Mapping[str, int], direct: bool) -> None:
        self._entries, self._itemsizes, self._direct = entries, itemsizes, direct
        self._sizes = {entry.name: entry.nbytes for entry in entries}
        self._pieces = lru_cache(maxsize=4096)(self._cut)

    def __call__(self, settings: Settings) -> Effect:
        """The effect of `settings`."""
        pieces = self._pieces(settings.bucket_bytes, settings.part_bytes)
        direct = tuple(each <= settings.direct_bytes for each in pieces) if self._direct else ()
        return Effect(pieces, min(settings.num_lanes, len(pieces)), direct, settings.hierarchical)

    def _cut(self, bucket_bytes: int, part_bytes: int | None) -> tuple[int, ...]:
        found: list[int] = []
        for names in make_plan(self._entries, bucket_bytes).buckets:
            nbytes, itemsize = sum(self._sizes[name] for name in names), self._itemsizes[names[0]]
            if part_bytes is None:
                found.append(nbytes)
            else:
                found += [itemsize * (hi - lo) for lo, hi in part_ranges(nbytes // itemsize, itemsize, part_bytes)]
        return tuple(found)
