"""Which ranks are on one node and at one site, from what each of them publishes of itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from bagua.errors import RankMismatchError

__all__ = ["Sites", "by_node", "by_site", "in_site", "node_key", "site_of"]


_ENV = "BAGUA_SITE"
_SITE = "\n"  # between the name of a node and that of its site


class Sites(tuple[tuple[int, ...], ...]):
    """Ranks by site, where sites take the place of nodes.

    Examples:
        >>> from bagua.comm.node_keys import Sites
        >>> Sites([(0, 1), (2, 3)])
        ((0, 1), (2, 3))
    """

    __slots__ = ()


def node_key() -> str:
    """Return a string that is equal on exactly the ranks of one node.

    The launcher's node number where there is one (several nodes may be emulated on one host), else the host name.
    """
    for name in ("GROUP_RANK", "NODE_RANK"):
        if name in os.environ:
            return in_site(f"{name}={os.environ[name]}")
    return in_site(f"host={socket.gethostname()}")


def in_site(key: str) -> str:
    """Return the key of a node with the site that BAGUA_SITE gives it, if any."""
    site = os.environ.get(_ENV, "")
    return f"{key}{_SITE}{site}" if site else key


def site_of(key: str) -> str:
    """The site of a node; "" if it has none."""
    return key.partition(_SITE)[2]


def by_node(keys: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Sort ranks by node: the places of equal keys, in the order in which they come first.

    Examples:
        >>> from bagua.comm.node_keys import by_node
        >>> by_node(["host=a", "host=b", "host=a"])
        ((0, 2), (1,))
    """
    places: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return tuple(tuple(each) for each in places.values())


def by_site(keys: Sequence[str]) -> Sites:
    """Sort ranks by site; empty if there are not several.

    Raises:
        RankMismatchError: some ranks have a site and others none; names the first of each.
    """
    names = [site_of(key) for key in keys]
    if any(names) and not all(names):
        lacks = next(rank for rank, name in enumerate(names) if not name)
        has = next(rank for rank, name in enumerate(names) if name)
        raise RankMismatchError(
            f"{_ENV}: rank {lacks} has none, and rank {has} has {names[has]!r}; give it on all hosts or on none"
        )
    sites = by_node(names)
    return Sites(sites if len(sites) > 1 else ())
