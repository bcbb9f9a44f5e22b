"""The start-up benchmark between sites: whether the hosts of a site sum first, where the user left it open.

Sums within a site save bytes on the link between sites, and cost bytes, latencies and CPU time within them. Which of
these limits follows from the links, the cores and the codec, so both ways are measured, with exchanges of real buckets.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from bagua.algorithms.base import Algorithm, Payload
from bagua.algorithms.warmup import Warmup
from bagua.comm.node_keys import Sites
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.engine.reducer.bucket import Bucket
from bagua.exchanges import Exchange, Hierarchical

__all__ = ["MOST_BYTES", "MOST_WIRE_BYTES", "Times", "Trial", "flat_of", "run_trial", "tried_parts", "tries"]

_FLAT: dict[str, Any] = {"hierarchical": False}
_ROUNDS = 4
_UNCOUNTED = 1  # round, in which connections find their rate
MOST_WIRE_BYTES = 8 * 2**20  # that a rank sends in one exchange among all ranks: buckets for several lanes
MOST_BYTES = 64 * 2**20  # of payload


class Times(Protocol):
    """What runs exchanges on the lanes of an engine; all ranks make the same calls."""

    def time_s(self, exchange: Exchange, payloads: Mapping[int, Tensor]) -> float:
        """Exchange the first elements of buckets, once all ranks are here; return the seconds it took on this rank."""
        ...


@dataclass(frozen=True)
class Trial:
    """What was measured; the same on all ranks.

    Attributes:
        sites_s: seconds of an exchange with sums within sites.
        flat_s: of one among all ranks.
        nbytes: payload of it.
        name: of the algorithm whose exchange it is, or of several.

    Examples:
        >>> from bagua.engine.tuning.site_trial import Trial
        >>> Trial(sites_s=0.2, flat_s=0.1, nbytes=2**20, name="bytegrad").flat_wins
        True
    """

    sites_s: float
    flat_s: float
    nbytes: int
    name: str

    @property
    def flat_wins(self) -> bool:
        """Whether all ranks exchange with each other."""
        return self.sites_s > self.flat_s

    @property
    def told(self) -> str:
        """What the user is told."""
        chosen = "all ranks exchange with each other" if self.flat_wins else "the ranks of a site sum first"
        return (
            f"sites: {chosen}: {1000 * self.sites_s:.0f} ms with sums within sites, {1000 * self.flat_s:.0f} ms "
            f"without, for {self.nbytes / 2**20:.1f} MiB of gradients; to repeat a run exactly, pass "
            f"hierarchical={not self.flat_wins} to {self.name}"
        )


def tries(team: Team, nodes: Sequence[Sequence[int]], device: torch.device) -> bool:
    """Whether the benchmark can tell: over gloo, with CPU tensors, where a site has several hosts."""
    return team.backend == "gloo" and device.type == "cpu" and len(team.nodes) > len(nodes)


def flat_of(given: Algorithm, fitted: Algorithm, nodes: Sequence[Sequence[int]]) -> Algorithm | None:
    """The algorithm without sums within sites, if that is open; None: it is not.

    It is for compressed gradients over sites, unless the user has decided. Exact sums always gain by sites, and keep
    the order of their additions.

    Args:
        given: the algorithm as the user gave it.
        fitted: to the nodes.
        nodes: ranks by site, or by node.
    """
    if not isinstance(nodes, Sites):
        return None
    if isinstance(given, Warmup) and isinstance(fitted, Warmup):
        first, then = (flat_of(*pair, nodes) for pair in zip(given.parts, fitted.parts, strict=True))
        if first is None and then is None:
            return None
        return replace(fitted, first=first or fitted.first, then=then or fitted.then)
    if getattr(given, "hierarchical", False) is not None or not _compresses_gradients(fitted):
        return None
    flat = replace(fitted, **_FLAT)
    return None if flat.exchange.hierarchical else flat  # as of one that is, whatever the option says


def _compresses_gradients(algorithm: Algorithm) -> bool:
    try:
        exchange = algorithm.exchange
    except TypeError:  # none, or several
        return False
    if not isinstance(exchange, Hierarchical) or algorithm.payloads != {Payload.GRAD}:
        return False
    compresses = exchange.lossy and not exchange.streaming  # bf16 is summed as it is
    return compresses and exchange.complete and exchange.elementwise and not exchange.two_phases


def tried_parts(sites: Algorithm, flat: Algorithm) -> tuple[Algorithm, Algorithm]:
    """The parts that differ; of an algorithm that begins with another one, those that run in the end."""
    return _open_parts(sites, flat)[-1]


def _open_parts(sites: Algorithm, flat: Algorithm) -> list[tuple[Algorithm, Algorithm]]:
    if isinstance(sites, Warmup) and isinstance(flat, Warmup):
        pairs = zip(sites.parts, flat.parts, strict=True)
        return [part for pair in pairs if pair[0] != pair[1] for part in _open_parts(*pair)]
    return [(sites, flat)]


def run_trial(times: Times, team: Team, buckets: Sequence[Bucket], sites: Algorithm, flat: Algorithm) -> Trial:
    """Exchange random numbers both ways, in turns. Collective, between steps; changes nothing of the training.

    Args:
        sites, flat: the two forms of the algorithm.

    Raises:
        CommunicationError: a rank is lost.
    """
    tried, names = tried_parts(sites, flat), " and ".join(each.name for each, _ in _open_parts(sites, flat))
    exchanges = tried[0].exchange, tried[1].exchange
    payloads = _payloads(buckets, exchanges[1], team.size)
    if not payloads:
        return Trial(0.0, 0.0, 0, names)
    generator = torch.Generator().manual_seed(team.rank)
    size = max(each.numel() for each in payloads.values())
    source = torch.empty(size, dtype=torch.float32, device="cpu").normal_(generator=generator)
    own_s: dict[Exchange, list[float]] = {each: [] for each in exchanges}
    for _ in range(_ROUNDS):
        for exchange, seconds in own_s.items():
            for each in payloads.values():  # sums would grow from round to round
                each.copy_(source[: each.numel()])
            seconds.append(times.time_s(exchange, payloads))
    found = [decode(each) for each in team.all_gather_bytes("trial of sites", encode(list(own_s.values())))]
    typical_s = [
        statistics.median([max(seconds) for seconds in zip(*ranks_s, strict=True)][_UNCOUNTED:])
        for ranks_s in zip(*found, strict=True)
    ]
    return Trial(typical_s[0], typical_s[1], sum(each.nbytes for each in payloads.values()), names)


def _payloads(buckets: Sequence[Bucket], flat: Exchange, size: int) -> dict[int, Tensor]:
    """By bucket, as many first elements as neither take too long on a slow link nor much memory."""
    found: dict[int, Tensor] = {}
    wire, memory = float(MOST_WIRE_BYTES), MOST_BYTES
    for bucket in buckets:
        if not bucket.numel:
            continue
        whole = flat.bytes_per_rank(bucket.numel, size)
        share = min(1.0, wire / max(whole, 1.0), memory / bucket.nbytes)
        numel = int(share * bucket.numel)
        if not numel:
            break
        found[bucket.index] = torch.empty_like(bucket.flat[:numel])
        wire, memory = wire - share * whole, memory - found[bucket.index].nbytes
    return found
