"""Ranks as threads of this process, each with real gloo groups."""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from bagua.comm.node_keys import in_site
from bagua.comm.team import Team

_jobs = itertools.count()


def teams(size: int, nodes: Sequence[int | str] | None = None, timeout_s: float = 20) -> list[Team]:
    """Teams of `size` ranks that share a store; `nodes[rank]` is the rank's node, or `site:node`."""
    store, name = dist.HashStore(), f"threads{next(_jobs)}"
    return [
        Team(
            rank, size, store, timedelta(seconds=timeout_s), "gloo", f"{name}/{rank}", _key(nodes[rank] if nodes else 0)
        )
        for rank in range(size)
    ]


def _key(node: int | str) -> str:
    site, _, name = str(node).rpartition(":")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGUA_SITE", site)
        return in_site(name)


def run_teams(
    size: int, function: Callable[..., Any], *args: Any, nodes: Sequence[int | str] | None = None, timeout_s: float = 60
) -> list[Any]:
    """Call `function(team, *args)` on `size` ranks at once; `team` goes where a process group goes."""
    return _run(teams(size, nodes, timeout_s), function, args, max(timeout_s, 120))


def run_threads(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    nodes: Sequence[int | str] | None = None,
    hierarchical: bool = False,
    timeout_s: float = 60,
    staged: bool = False,
    native: bool = False,
) -> list[Any]:
    """Call `function(groups, *args)` on `size` ranks at once; returns results by rank, raises with all tracebacks."""
    members = teams(size, nodes, timeout_s)
    for team in members:
        team.staged = staged
    layouts = [team.discover_sites([each.node for each in members]) for team in members]

    def call(team: Team) -> Any:
        return function(team.open("lane", hierarchical, layouts[0], native), *args)

    return _run(members, call, (), max(timeout_s, 120))


def _run(members: Sequence[Team], function: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * len(members)
    errors: dict[int, str] = {}

    def rank_main(rank: int) -> None:
        try:
            results[rank] = function(members[rank], *args)
        except BaseException:
            errors[rank] = traceback.format_exc()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(len(members))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if errors or stuck:
        raise AssertionError("\n".join([f"stuck ranks: {stuck}", *(f"rank {r}:\n{e}" for r, e in errors.items())]))
    return results
