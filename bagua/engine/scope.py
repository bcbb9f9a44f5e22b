"""What may be tuned: settings that change how fast values are exchanged, and the values by no more than rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagua.algorithms.base import Algorithm, Exactness
from bagua.autotune import ALWAYS_DIRECT, Space
from bagua.engine.effects import Effects
from bagua.exchanges import AllReduce, Exchange, Gossip, Hierarchical

if TYPE_CHECKING:
    from bagua.engine.engine import Engine

__all__ = ["hierarchy_is_free", "period_of", "space_of", "why_not"]

_LONGEST_PERIOD = 16  # steps; a longer one would make a turn of hundreds of steps
_OCTAVES = range(-5, 3)  # of bucket sizes, around the default
_PART_BYTES = tuple(2**power for power in range(19, 26))
_LANES = (1, 2, 4, 8)
_LEAST_BYTES = 64 * 2**10  # of a bucket


def why_not(engine: Engine) -> str:
    """Why nothing can be tuned, the same on all ranks; empty if something can."""
    algorithm = engine.algorithm
    exchanges = {type(each) for each, _, _ in engine._states}
    if engine.team.size == 1:
        return "there is one rank"
    if engine.team.backend == "local":
        return "a simulation takes no time"
    if not engine.optimizers:
        return "without optimizers it is not known where a step ends"
    if algorithm.exactness is Exactness.ASYNCHRONOUS:
        return f"nobody waits for the exchanges of {algorithm.name!r}"
    if len(exchanges) != 1:
        return f"the steps of {algorithm.name!r} are of several kinds"
    if period_of(algorithm) > _LONGEST_PERIOD:
        return f"{algorithm.name!r} exchanges every {period_of(algorithm)} steps only"
    return "nothing here makes a difference" if space_of(engine).trivial else ""


def period_of(algorithm: Algorithm) -> int:
    """Steps after which the pattern of steps repeats."""
    return int(getattr(algorithm, "communication_interval", 1))


def space_of(engine: Engine) -> Space:
    """The space of settings around those in force."""
    default = engine.settings
    entries = engine.plan_entries()
    itemsizes = {entry.name: engine.inventory.trainable[entry.name].element_size() for entry in entries}
    effects = Effects(entries, itemsizes, _sums_directly(engine, engine.tunes_hierarchy))
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


def _axes(engine: Engine, hierarchy: bool) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {"hierarchical": (False, True)} if hierarchy else {}
    total = sum(bucket.nbytes for bucket in engine.buckets)
    if _cuts_freely(engine):
        found["bucket_bytes"] = _bucket_sizes(engine.bucket_bytes, total)
        if _sums_directly(engine, hierarchy):
            found["direct_bytes"] = (0, ALWAYS_DIRECT)
        if engine.part_bytes is not None:
            found["part_bytes"] = tuple(each for each in _PART_BYTES if each < 2 * total)
    if engine.part_bytes is not None:
        found["num_lanes"] = _LANES
    return found


def _bucket_sizes(default: int, total: int) -> tuple[int, ...]:
    """Octaves around the default, up to the first that makes a single bucket."""
    sizes = sorted({int(default * 2.0**power) for power in _OCTAVES} | {default})
    small = [each for each in sizes if _LEAST_BYTES <= each < total]
    return (*small, *[each for each in sizes if each >= total][:1])


def _cuts_freely(engine: Engine) -> bool:
    """Whether buckets may be cut anew: nothing is kept for them, and values do not depend on where they are cut."""
    stateless = not engine._tensors and not any(engine._states.values())
    return stateless and all(_is_free(exchange) for exchange, _, _ in engine._states)


def _is_free(exchange: Exchange) -> bool:
    """Blocks of a codec would move with the cuts, and with them what is lost; sums only change their order."""
    if isinstance(exchange, Hierarchical):
        return _is_free(exchange.inner)
    return isinstance(exchange, AllReduce | Gossip) and exchange.elementwise


def _sums_directly(engine: Engine, hierarchy: bool) -> bool:
    """Whether there is a choice between the backend's all-reduce and sends."""
    sums = all(_inner(exchange, AllReduce) for exchange, _, _ in engine._states)
    among = [engine.groups.world.direct]
    if hierarchy or any(isinstance(exchange, Hierarchical) for exchange, _, _ in engine._states):
        among.append(len(engine.groups.nodes) > 2 and engine.team.backend == "gloo")
    return sums and any(among)


def _inner(exchange: Exchange, kind: type[Exchange]) -> bool:
    return isinstance(exchange.inner if isinstance(exchange, Hierarchical) else exchange, kind)
