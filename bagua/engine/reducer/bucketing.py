"""Assignment of parameters to buckets and the order of their exchange. Names and sizes; no tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from bagua.algorithms.base import Algorithm, Payload
from bagua.algorithms.power_sgd import PowerSGD
from bagua.comm.node_keys import Sites
from bagua.exchanges import Hierarchical, ScatterGather

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "DEFAULT_NUM_LANES",
    "LANES_OF_WIDE",
    "PART_BYTES",
    "WIDE",
    "Entry",
    "Plan",
    "check_bucket_bytes",
    "check_num_lanes",
    "check_plan",
    "chunks_of",
    "default_bucket_bytes",
    "default_num_lanes",
    "fitting_bucket_bytes",
    "lanes_are_given",
    "lanes_of_wide",
    "last_part_bytes",
    "make_plan",
]

DEFAULT_BUCKET_BYTES = 10 * 2**20
DEFAULT_NUM_LANES = 4
WIDE = 4.0  # an exchange that sends a quarter of what fp32 would, or more; LANES_OF_WIDE lanes fill a link with such
LANES_OF_WIDE = 3
PART_BYTES = 8 * 2**20  # payload of 8 bits or more that one lane exchanges at once, where a bucket can be cut
_LEAST_BUCKET_BYTES = 2**20
_LEAST_CHUNK_BYTES = 256 * 2**10
_EARLY_BUCKET_BYTES = 2**20  # of a first bucket that goes early, where buckets are far larger
_LEAST_EARLY_RATIO = 4
_WIDE_BITS = 8
_LAST_PARTS = ((2 * LANES_OF_WIDE, 2 * 2**20), (LANES_OF_WIDE, 2**20))  # parts of a last bucket; least bytes of each
_LEAST_CUT_BYTES = 4 * 2**20  # of a last bucket that is cut in two
_MAX_LANES = 64
_NAMED = 3  # parameters, in an error


def fitting_bucket_bytes(total_bytes: int, chunks: int = 1) -> int:
    """`BAGUA_DEFAULT_BUCKET_SIZE` of the environment, or a tenth of `total_bytes`, from 1 MiB up to 10 MiB.

    With a single bucket no exchange would overlap with the backward pass. Where each bucket is cut into a chunk for
    each rank, a chunk has at least 256 KiB while there are two buckets: a small message costs the CPU as much as a
    large one.

    Args:
        total_bytes: of all parameters.
        chunks: see `chunks_of`.

    Raises:
        ValueError: the variable is not a positive integer.
    """
    if "BAGUA_DEFAULT_BUCKET_SIZE" in os.environ:
        return default_bucket_bytes()
    least = max(_LEAST_BUCKET_BYTES, min(chunks * _LEAST_CHUNK_BYTES, total_bytes // 2))
    return min(max(total_bytes // 10, least), DEFAULT_BUCKET_BYTES)


def chunks_of(algorithm: Algorithm, nodes: Sequence[Sequence[int]]) -> int:
    """Return how many chunks a bucket of gradients is cut into, each of them a compressed message; 1 if it is not.

    Half of the ranks for PowerSGD, which sends few bytes of a bucket, but as many messages.

    Args:
        algorithm: fitted to the nodes.
        nodes: the ranks of each.
    """
    apart = sum(map(len, nodes))
    if isinstance(algorithm, PowerSGD):
        return -(-(len(nodes) if algorithm.hierarchical else apart) // 2)
    try:
        exchange = algorithm.exchange
    except TypeError:  # none, or several
        return 1
    if isinstance(exchange, Hierarchical):
        # Where hosts of a site exchange shares, chunks are as small as among all ranks. And a trial may switch.
        exchange, apart = exchange.inner, apart if isinstance(nodes, Sites) else len(nodes)
    # Buckets of weights are exchanged between steps, where nothing overlaps, and `fragments` are made of them.
    return apart if isinstance(exchange, ScatterGather) and algorithm.payload is Payload.GRAD else 1


def default_bucket_bytes() -> int:
    """`BAGUA_DEFAULT_BUCKET_SIZE` of the environment, or 10 MiB: what large models take.

    Raises:
        ValueError: the variable is not a positive integer.
    """
    text = os.environ.get("BAGUA_DEFAULT_BUCKET_SIZE")
    if text is None:
        return DEFAULT_BUCKET_BYTES
    if not text.strip().isdigit() or int(text) <= 0:
        raise ValueError(f"BAGUA_DEFAULT_BUCKET_SIZE: expected a positive number of bytes, got {text!r}")
    return int(text)


def default_num_lanes() -> int:
    """`BAGUA_NUM_LANES` of the environment, or 4.

    Raises:
        ValueError: the variable is not an integer from 1 to 64.
    """
    text = os.environ.get("BAGUA_NUM_LANES")
    if text is None:
        return DEFAULT_NUM_LANES
    if not text.strip().isdigit():
        raise ValueError(f"BAGUA_NUM_LANES: expected an integer from 1 to {_MAX_LANES}, got {text!r}")
    return check_num_lanes("BAGUA_NUM_LANES", int(text))


def lanes_are_given() -> bool:
    """Whether the environment sets the number of lanes."""
    return "BAGUA_NUM_LANES" in os.environ


def lanes_of_wide(bucket_bytes: int, size: int, held_bytes: float) -> int:
    """Return how many lanes fill a link with exchanges of 8 bits per element.

    An exchange sends 2 (R - 1) / R of its W encoded bytes, and waits for 2 latencies (two ranks that swap rows: 1,
    and have more lanes than they need). While it waits others have to send what the link holds in that time; and since
    those that began together wait together, twice as many.

    Args:
        bucket_bytes: of fp32 gradients.
        size: R, ranks of the exchange.
        held_bytes: what a link holds in one latency.
    """
    sent = min(bucket_bytes, PART_BYTES) * _WIDE_BITS / 32 * 2 * max(size - 1, 1) / size
    return max(LANES_OF_WIDE, 1 + math.ceil(4 * held_bytes / sent))


def check_bucket_bytes(value: int) -> int:
    """Return `value` if it is a size of buckets.

    Raises:
        TypeError: it is no int.
        ValueError: it is not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"bucket_bytes: expected an int, got {type(value).__name__}")
    if value <= 0:
        raise ValueError(f"bucket_bytes: expected a positive number of bytes, got {value}")
    return value


def check_num_lanes(name: str, value: int) -> int:
    """Return `value` if it is a number of lanes.

    Raises:
        ValueError: it is none; names `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_LANES:
        raise ValueError(f"{name}: expected an integer from 1 to {_MAX_LANES}, got {value!r}")
    return value


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


def check_plan(plan: Plan, names: Sequence[str]) -> None:
    """Refuse a plan for other parameters than `names`, which the module trains.

    Raises:
        ValueError: names some of them.
    """
    has, wants = set(plan.order), set(names)
    parts = [f"{what} {_some(odd)}" for what, odd in (("it also has", has - wants), ("it lacks", wants - has)) if odd]
    if parts:
        raise ValueError(
            f"plan: its parameters are not those that the module trains: {'; '.join(parts)}; load the weights before "
            "bagua.distribute(), and the algorithm starts anew"
        )


def _some(names: set[str]) -> str:
    first = ", ".join(map(repr, sorted(names)[:_NAMED]))
    return f"{first} and {len(names) - _NAMED} more" if len(names) > _NAMED else first


def make_plan(entries: Sequence[Entry], bucket_bytes: int, early: bool = False) -> Plan:
    """Fill buckets in the order of `entries`; a bucket has one dtype and is closed once it holds `bucket_bytes`.

    Buckets are ordered by when their last gradient is ready, so that none waits for a later one. Nothing hides
    the exchange of the last one, so where there are several and it is not small, it is cut in two.

    Args:
        entries: in the order in which gradients become ready.
        bucket_bytes: from which a bucket is closed.
        early: close the first bucket once it holds 1 MiB, if others hold 4 MiB or more: the link is busy sooner.
    """
    first_bytes = bucket_bytes
    if early and bucket_bytes >= _LEAST_EARLY_RATIO * _EARLY_BUCKET_BYTES:
        first_bytes = _EARLY_BUCKET_BYTES
    filling: dict[str, tuple[list[str], int]] = {}
    closed: list[tuple[int, tuple[str, ...]]] = []
    for position, entry in enumerate(entries):
        names, nbytes = filling.get(entry.dtype, ([], 0))
        names.append(entry.name)
        nbytes += entry.nbytes
        if nbytes >= (bucket_bytes if closed else first_bytes):
            closed.append((position, tuple(names)))
            filling.pop(entry.dtype, None)
        else:
            filling[entry.dtype] = (names, nbytes)
    position_of = {entry.name: position for position, entry in enumerate(entries)}
    closed += [(position_of[names[-1]], tuple(names)) for names, _ in filling.values()]
    buckets = [names for _, names in sorted(closed)]
    if len(buckets) > 1:
        sizes = {entry.name: entry.nbytes for entry in entries}
        buckets[-1:] = _halves(buckets[-1], [sizes[name] for name in buckets[-1]])
    return Plan(tuple(buckets))


def last_part_bytes(nbytes: int, part_bytes: int) -> int:
    """Return the size of the parts of a last bucket of `nbytes` that plain sums exchange.

    Nothing follows it, so its parts must keep all lanes busy until the end: a lane that remains alone has to widen its
    connection's window first. The result depends on no measured value: the same bits in each run.

    Args:
        nbytes: of the bucket.
        part_bytes: of the parts of other buckets.
    """
    for count, least_bytes in _LAST_PARTS:
        if nbytes >= count * least_bytes:
            return min(part_bytes, -(-nbytes // count))
    return part_bytes


def _halves(names: tuple[str, ...], sizes: Sequence[int]) -> list[tuple[str, ...]]:
    """Split a bucket where the halves differ least, if that is worth one more exchange."""
    total = sum(sizes)
    if len(names) == 1 or total < _LEAST_CUT_BYTES:
        return [names]
    at = min(range(1, len(names)), key=lambda cut: abs(total - 2 * sum(sizes[:cut])))
    if not total / 4 <= sum(sizes[at:]) <= total * 3 / 4:
        return [names]
    return [names[:at], names[at:]]
