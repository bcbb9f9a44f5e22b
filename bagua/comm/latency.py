"""How long a small message takes from one member of a group to another."""

from __future__ import annotations

import time

import torch

from bagua.comm.collectives import all_reduce_, swap
from bagua.comm.groups import Group

__all__ = ["measure_hop"]

_TRIES = 5


def measure_hop(group: Group) -> float:
    """Return seconds of one message one way, the longest between any two members. Collective; all get the same.

    The shortest of several tries counts on each rank: delays of a busy machine are not the network's. 0 where it
    would not be used (other backends than gloo).
    """
    if group.size == 1 or group.backend != "gloo":
        return 0.0
    size, rank = group.size, group.rank
    mine, theirs = torch.zeros(1, dtype=torch.uint8), torch.zeros((size, 1), dtype=torch.uint8)
    peers = [(rank + k) % size for k in range(1, size)]
    best = float("inf")
    for _ in range(_TRIES):
        started = time.perf_counter()
        swap(group, [(peer, mine) for peer in peers], [(peer, theirs[peer]) for peer in reversed(peers)])
        # A receiver's readiness goes one way, the message the other.
        best = min(best, (time.perf_counter() - started) / 2)
    return float(all_reduce_(group, torch.tensor([best], dtype=torch.float64), "max"))
