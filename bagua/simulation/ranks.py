"""Call a function on several ranks of this process, which take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from bagua.simulation.switchboard import LocalTeam, Switchboard
from bagua.simulation.turns import Turns

__all__ = ["run_in_turns"]

_R = TypeVar("_R")


def run_in_turns(ranks: int, function: Callable[[LocalTeam], _R], nodes: Sequence[int] | None = None) -> list[_R]:
    """Call `function(team)` on every rank, one rank at a time; the results do not depend on timing.

    Args:
        ranks: how many.
        function: gets the rank's team, which goes where `bagua.distribute` takes a process group.
        nodes: node of each rank; one node by default.

    Returns:
        The results by rank.

    Raises:
        Deadlock: every rank waits for another one.
        BaseException: the first exception of a rank.
    """
    turns, store, boards = Turns(ranks), dist.HashStore(), dict[str, Switchboard]()

    def rank_main(rank: int) -> _R:
        node = str(nodes[rank] if nodes is not None else 0)
        name, timeout = f"simulation/{rank}", timedelta(days=1)
        return function(LocalTeam(rank, ranks, store, timeout, "local", name, node, turns=turns, boards=boards))

    return turns.run(rank_main)
