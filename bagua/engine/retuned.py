"""An exchange that does the same in another way."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from bagua.exchanges import AllReduce, Exchange, Hierarchical

__all__ = ["with_direct_bytes"]


@lru_cache(maxsize=256)
def with_direct_bytes(exchange: Exchange, direct_bytes: int) -> Exchange:
    """`exchange` with another limit up to which full-precision sums go straight between ranks; others stay as is."""
    if isinstance(exchange, AllReduce):
        return replace(exchange, direct_bytes=direct_bytes)
    if isinstance(exchange, Hierarchical):
        return replace(exchange, inner=with_direct_bytes(exchange.inner, direct_bytes))
    return exchange
