"""Links between hosts, for sites that are not equally far from each other: checks, and `0+1-2+3=50mbit/20ms`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from bagua.lab.link import Link

__all__ = ["Ends", "Pairs", "Path", "both_ways", "parse_pair", "parse_pairs", "shared_paths"]

Path = tuple[int, int]
Ends = tuple[int | tuple[int, ...], int | tuple[int, ...]]
Pairs = Mapping[Ends, Link] | Mapping[Path, Link]  # by sender and receiver; several hosts at an end share the link
_HOSTS = r"[0-9]+(?:\+[0-9]+)*"
_PAIR = re.compile(rf"({_HOSTS})-({_HOSTS})=([^/]+)(?:/([^/]+))?")


def both_ways(pairs: Pairs, num_hosts: int) -> dict[Path, Link]:
    """Return the link of each sender and receiver: that of (a, b) also holds for (b, a), unless it has one of its own.

    Raises:
        TypeError: a link is not a `Link`.
        ValueError: an end is no host of the cluster, or a host is at both, or two hosts are given two links, or a link
            has more than a bandwidth, a latency and a queue.
    """
    found: dict[Path, Link] = {}
    for ends, link in pairs.items():
        if not isinstance(link, Link):
            raise TypeError(f"pairs[{ends}] must be a bagua.lab.Link, not {type(link).__name__}")
        for path in _paths(ends, num_hosts):
            if path in found:
                raise ValueError(f"pairs: the link from host {path[0]} to host {path[1]} is given twice")
            found[path] = link
        if link.settings()[2:5] != (0, 0.0, 0):
            raise ValueError(f"pairs[{ends}]: a pair has a bandwidth, a latency and a queue, not {link}")
    reverse = {(b, a): link for (a, b), link in found.items()}
    return {**reverse, **found}


def shared_paths(pairs: Pairs, num_hosts: int) -> dict[Path, Path]:
    """Return, for each path that shares its link with others, the first of these paths.

    Each direction is shared for itself.
    """
    given = {path for ends in pairs for path in _paths(ends, num_hosts)}
    found: dict[Path, Path] = {}
    for ends in pairs:
        paths = list(_paths(ends, num_hosts))
        back = [(b, a) for a, b in paths if (b, a) not in given]
        for alike in (paths, back):
            if len(alike) > 1:
                found |= dict.fromkeys(alike, alike[0])
    return found


def _paths(ends: Ends, num_hosts: int) -> Iterator[Path]:
    """From each host of the first end to each of the second.

    Raises:
        ValueError: they are not hosts of the cluster, or not different ones.
    """
    sides = [(end,) if isinstance(end, int) else tuple(end) for end in ends] if isinstance(ends, tuple) else []
    hosts = [host for side in sides for host in side]
    if len(sides) != 2 or not all(sides) or not set(hosts) <= set(range(num_hosts)):
        raise ValueError(f"pairs: {ends!r} must be two hosts from 0 to {num_hosts - 1}, or two tuples of them")
    if len(set(hosts)) < len(hosts):
        raise ValueError(f"pairs: {ends!r} must be two different hosts, or two tuples of them without a common host")
    return ((a, b) for a in sides[0] for b in sides[1])


def parse_pair(text: str, name: str = "--link") -> tuple[Ends, Link]:
    """Read `A-B=RATE[/LATENCY]`, with hosts that share an end joined by +.

    Raises:
        ValueError: it is none; names the option.
    """
    match = _PAIR.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{name} must be A-B=RATE[/LATENCY], e.g. 0-1=50mbit/20ms or 0+1-2+3=50mbit, not {text!r}")
    try:
        return (_end(match[1]), _end(match[2])), Link(match[3], match[4] or 0.0)
    except ValueError as error:
        raise ValueError(f"{name} {text}: {error}") from None


def _end(text: str) -> int | tuple[int, ...]:
    hosts = tuple(map(int, text.split("+")))
    return hosts[0] if len(hosts) == 1 else hosts


def parse_pairs(texts: Sequence[str], num_hosts: int, name: str = "--link") -> dict[Ends, Link]:
    """Read several; a pair may be given once for each way.

    Raises:
        ValueError: one is wrong, or given twice.
    """
    found: dict[Ends, Link] = {}
    for text in texts:
        ends, link = parse_pair(text, name)
        if ends in found:
            raise ValueError(f"{name} {text}: the link from host {ends[0]} to host {ends[1]} is given twice")
        found[ends] = link
    both_ways(found, num_hosts)
    return found
