"""The search space: settings that affect speed, and values by no more than rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from bagua.algorithms.base import Algorithm, Exactness
from bagua.algorithms.rounds import interval_of
from bagua.autotune import ALWAYS_DIRECT, Settings, Space
from bagua.engine.reducer.bucket import part_ranges
from bagua.engine.reducer.bucketing import Entry, last_part_bytes, make_plan
from bagua.engine.tuning.tunable import Tunable
from bagua.exchanges import AllReduce, Exchange, Gossip, Hierarchical

__all__ = ["Effect", "Effects", "hierarchy_is_free", "period_of", "space_of", "why_not"]

_LONGEST_PERIOD = 16  # steps; a longer one would make a turn of hundreds of steps
_OCTAVES = range(-5, 3)  # of bucket sizes, around the default
_PART_BYTES = tuple(2**power for power in range(19, 26))
_LANES = (1, 2, 4, 8)
_LEAST_BYTES = 64 * 2**10  # of a bucket


def why_not(engine: Tunable) -> str:
    """Why this run cannot be tuned, the same on all ranks; empty if it can."""
    algorithm = engine.algorithm
    exchanges = {type(each) for each in engine.exchanges}
    if engine.team.size == 1:
        return "there is only one rank"
    if engine.team.backend == "local":
        return "simulated steps cannot be timed"
    if not engine.optimizers:
        return "without optimizers the end of a step is unknown"
    if algorithm.exactness is Exactness.ASYNCHRONOUS:
        return f"no step waits for the exchanges of {algorithm.name!r}"
    if len(exchanges) != 1:
        return f"the steps of {algorithm.name!r} are not all alike"
    if period_of(algorithm) > _LONGEST_PERIOD:
        return f"{algorithm.name!r} exchanges only every {period_of(algorithm)} steps"
    return "no setting has an effect on this module" if space_of(engine).trivial else ""


def period_of(algorithm: Algorithm) -> int:
    """Steps after which the pattern of steps repeats."""
    return interval_of(algorithm)


def space_of(engine: Tunable) -> Space:
    """The space of settings around those in force."""
    default = engine.settings
    entries = engine.plan_entries()
    direct, sums = _sums_directly(engine, engine.tunes_hierarchy), all(each.streaming for each in engine.exchanges)
    effects = Effects(entries, engine.element_bytes, direct, sums, engine.starts_early)
    return Space(default, _axes(engine, engine.tunes_hierarchy), effects)


def hierarchy_is_free(algorithm: Algorithm, nodes: tuple[tuple[int, ...], ...]) -> bool:
    """Whether the user left open if sums are taken within each node first, where that changes their order only.

    Args:
        algorithm: as the user gave it.
    """
    if getattr(algorithm, "hierarchical", True) is not None:
        return False
    try:
        exchange = algorithm.exchange
    except TypeError:
        return False
    return isinstance(exchange, AllReduce) and len(nodes) > 1 and any(len(node) > 1 for node in nodes)


def _axes(engine: Tunable, hierarchy: bool) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {"hierarchical": (False, True)} if hierarchy else {}
    total = sum(bucket.nbytes for bucket in engine.buckets)
    if _cuts_freely(engine):
        found["bucket_bytes"] = _bucket_sizes(engine.settings.bucket_bytes, total)
        if _sums_directly(engine, hierarchy):
            found["direct_bytes"] = (0, ALWAYS_DIRECT)
        if engine.settings.part_bytes is not None:
            found["part_bytes"] = tuple(each for each in _PART_BYTES if each < 2 * total)
    if engine.settings.part_bytes is not None:
        found["num_lanes"] = _LANES
    return found


def _bucket_sizes(default: int, total: int) -> tuple[int, ...]:
    """Octaves around the default, up to the first that makes a single bucket."""
    sizes = sorted({int(default * 2.0**power) for power in _OCTAVES} | {default})
    small = [each for each in sizes if _LEAST_BYTES <= each < total]
    return (*small, *[each for each in sizes if each >= total][:1])


def _cuts_freely(engine: Tunable) -> bool:
    """Whether buckets may be cut anew: nothing is kept for them, and values do not depend on where they are cut."""
    return not engine.keeps_state and all(_is_free(exchange) for exchange in engine.exchanges)


def _is_free(exchange: Exchange) -> bool:
    """Whether cuts change only the order of sums; with a codec, blocks would move and change the compression error."""
    if isinstance(exchange, Hierarchical):
        return _is_free(exchange.inner)
    return isinstance(exchange, AllReduce | Gossip) and exchange.elementwise


def _sums_directly(engine: Tunable, hierarchy: bool) -> bool:
    """Whether there is a choice between the backend's all-reduce and sends."""
    sums = all(_inner(exchange, AllReduce) for exchange in engine.exchanges)
    among = [engine.groups.world.direct]
    if hierarchy or any(isinstance(exchange, Hierarchical) for exchange in engine.exchanges):
        among.append(len(engine.groups.nodes) > 2 and engine.team.backend == "gloo")
    return sums and any(among)


def _inner(exchange: Exchange, kind: type[Exchange]) -> bool:
    return isinstance(exchange.inner if isinstance(exchange, Hierarchical) else exchange, kind)


class Effect(NamedTuple):
    """What settings come to; equal for settings that behave alike.

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
        sums: all exchanges are plain sums.
        early: the first bucket is small.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        itemsizes: Mapping[str, int],
        direct: bool,
        sums: bool = False,
        early: bool = False,
    ) -> None:
        self._sums, self._early = sums, early
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
        plan = make_plan(self._entries, bucket_bytes, self._early)
        for names in plan.buckets:
            nbytes, itemsize = sum(self._sizes[name] for name in names), self._itemsizes[names[0]]
            if part_bytes is not None and self._sums and names is plan.buckets[-1]:
                part_bytes = last_part_bytes(nbytes, part_bytes)
            if part_bytes is None:
                found.append(nbytes)
            else:
                found += [itemsize * (hi - lo) for lo, hi in part_ranges(nbytes // itemsize, itemsize, part_bytes)]
        return tuple(found)
