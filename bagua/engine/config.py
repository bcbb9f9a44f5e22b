"""The settings of one engine, after the ranks have agreed on them."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.algorithms.base import Algorithm
from bagua.comm.groups import STRAIGHT_CHUNK_BYTES
from bagua.engine.guard import Guard

__all__ = ["EngineConfig"]


@dataclass(frozen=True)
class EngineConfig:
    """The arguments of `distribute`, with every default filled in.

    Attributes:
        bucket_bytes: payload of a bucket.
        num_lanes: lanes that may share the exchanges.
        lanes_of_sums: number of these lanes used by plain sums; None: all.
        lanes_of_wide: number of these lanes used by exchanges with 8 bits per element or more; None: all.
        straight_chunk_bytes: up to this size chunks of small sums go straight to their owners; see `Group`.
        bdp_bytes: bandwidth-delay product of a link, one way, for `bagua.exchanges.gathering`; 0: ranks are near.
        guard: when to measure the compression error, and what to do about it.
        broadcast_buffers: broadcast rank 0's buffers before every forward pass in training mode.
        static_graph: every pass uses the same parameters as often as the first.
        gradient_as_bucket_view: `.grad` stays a view of its bucket after a backward pass.
        tunes_hierarchy: the lanes have groups for a hierarchy, and the user left it open.
        flat: the algorithm without sums within sites, if that is open; see `site_trial`.
        tries_sites: a start-up benchmark decides between the two.
    """

    bucket_bytes: int
    num_lanes: int = 1
    lanes_of_sums: int | None = None
    lanes_of_wide: int | None = None
    straight_chunk_bytes: int = STRAIGHT_CHUNK_BYTES
    bdp_bytes: int = 0
    guard: Guard | None = None
    broadcast_buffers: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    tunes_hierarchy: bool = False
    flat: Algorithm | None = None
    tries_sites: bool = False
