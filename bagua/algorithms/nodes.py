"""Default of `hierarchical`, and who encodes, depending on the job's nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bagua.algorithms.base import Context
from bagua.comm.node_keys import Sites

__all__ = ["fit_hierarchy", "num_encoding"]


def fit_hierarchy(algorithm: Any, nodes: tuple[tuple[int, ...], ...], default: bool) -> tuple[Any, str]:
    """Resolve `algorithm.hierarchical`: None becomes `default` where a hierarchy exists, else False. For sites: True.

    Sites have a slow link between them, over which a sum of all ranks goes more often than one of the sites. An
    explicit True is kept, with a remark where it has no or little effect.

    Args:
        algorithm: a dataclass with a field `hierarchical: bool | None`.
        nodes: ranks by node, or `Sites`.
        default: what None means where there are several nodes, one of them with several ranks.
    """
    several_nodes, several_ranks = len(nodes) > 1, any(len(node) > 1 for node in nodes)
    wanted = algorithm.hierarchical
    if wanted is None:
        wanted = default or isinstance(nodes, Sites)
        return replace(algorithm, hierarchical=wanted and several_nodes and several_ranks), ""
    remark = ""
    if wanted and not several_nodes:
        remark = (
            "hierarchical=True, but all ranks are on one node: the exchange between nodes (and its codec) never runs"
        )
    elif wanted and not several_ranks:
        remark = "hierarchical=True, but every node has one rank: the same as hierarchical=False"
    return algorithm, remark


def num_encoding(ctx: Context, hierarchical: bool) -> int:
    """Return how many ranks use the codec; with `hierarchical` one of each node."""
    return len(ctx.groups.nodes) if hierarchical else ctx.groups.size
