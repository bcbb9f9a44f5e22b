"""Links of pairs of hosts, for sites that are not equally far from each other: checks, and `0-1=50mbit/20ms`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bagua.lab.link import Link

__all__ = ["Pairs", "both_ways", "parse_pair", "parse_pairs"]

Pairs = Mapping[tuple[int, int], Link]  # by sender and receiver
_PAIR = re.compile(r"([0-9]+)-([0-9]+)=([^/]+)(?:/([^/]+))?")


def both_ways(pairs: Pairs, num_hosts: int) -> dict[tuple[int, int], Link]:
    """Return the link of each sender and receiver: that of (a, b) also holds for (b, a), unless it has one of its own.

    Raises:
        TypeError: a link is not a `Link`.
        ValueError: a pair is not two different hosts of the cluster, or its link has more than a bandwidth, a latency
            and a queue.
    """
    for pair, link in pairs.items():
        if not isinstance(link, Link):
            raise TypeError(f"pairs[{pair}] must be a bagua.lab.Link, not {type(link).__name__}")
        if not (isinstance(pair, tuple) and len(pair) == 2 and set(pair) <= set(range(num_hosts))):
            raise ValueError(f"pairs: {pair!r} must be two hosts from 0 to {num_hosts - 1}")
        if pair[0] == pair[1]:
            raise ValueError(f"pairs: {pair!r} must be two different hosts")
        if link.settings()[2:5] != (0, 0.0, 0):
            raise ValueError(f"pairs[{pair}]: a pair has a bandwidth, a latency and a queue, not {link}")
    reverse = {(b, a): link for (a, b), link in pairs.items()}
    return {**reverse, **pairs}


def parse_pair(text: str, name: str = "--link") -> tuple[tuple[int, int], Link]:
    """Read `A-B=RATE[/LATENCY]`.

    Raises:
        ValueError: it is none; names the option.
    """
    match = _PAIR.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{name} must be A-B=RATE[/LATENCY], e.g. 0-1=50mbit/20ms, not {text!r}")
    try:
        return (int(match[1]), int(match[2])), Link(match[3], match[4] or 0.0)
    except ValueError as error:
        raise ValueError(f"{name} {text}: {error}") from None


def parse_pairs(texts: Sequence[str], num_hosts: int, name: str = "--link") -> dict[tuple[int, int], Link]:
    """Read several; a pair may be given once for each way.

    Raises:
        ValueError: one is wrong, or given twice.
    """
    found: dict[tuple[int, int], Link] = {}
    for text in texts:
        pair, link = parse_pair(text, name)
        if pair in found:
            raise ValueError(f"{name} {text}: the link from host {pair[0]} to host {pair[1]} is given twice")
        found[pair] = link
    both_ways(found, num_hosts)
    return found
