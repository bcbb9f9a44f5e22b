"""Resolves the `exchange` argument, and checks that it is equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bagua import algorithms
from bagua.algorithms import Algorithm, GradientAllReduce, PowerSGD
from bagua.comm.groups import Groups
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.comm.transport import goes_native, why_hook_uses_gloo
from bagua.errors import RankMismatchError
from bagua.exchanges import Exchange

__all__ = ["ExchangeFor", "choose", "open_groups"]

ExchangeFor = Callable[[Sequence[Tensor]], Exchange]
"""The exchange for a flat tensor that holds these gradients, one after the other."""


def choose(exchange: str | Algorithm | Exchange, options: dict[str, Any]) -> Algorithm | Exchange:
    """Return the exchange or algorithm that `exchange` names, if it exchanges gradients.

    Raises:
        TypeError: it is none of the three.
        ValueError: unknown name or option; it does more than exchange gradients, or leaves ranks with different
            ones.
    """
    if isinstance(exchange, Exchange):
        if options:
            raise ValueError(
                f"exchange: got an instance and options {', '.join(options)}; pass the options to {exchange!r} itself"
            )
        if not exchange.complete:
            raise ValueError(
                f"exchange: {exchange.name} leaves a different gradient on each rank, so replicas would diverge"
            )
        return exchange
    if not isinstance(exchange, str | Algorithm):
        raise TypeError(f"exchange: expected a name, an Algorithm or an Exchange, got {type(exchange).__name__}")
    algorithm = algorithms.get(exchange, **options)
    if not isinstance(algorithm, GradientAllReduce | PowerSGD):
        raise ValueError(
            f"exchange: {algorithm.name!r} does more than exchange gradients during the backward pass; "
            "use bagua.distribute() for it"
        )
    return algorithm


def open_groups(
    team: Team, chosen: Algorithm | Exchange, what: str, device: torch.device
) -> tuple[Groups, ExchangeFor]:
    """Make groups for `chosen`, fitted to the nodes of the ranks. Collective.

    Args:
        what: is done, for messages.
        device: of the gradients.

    Raises:
        RankMismatchError: ranks chose differently.
        CommunicationError: a rank did not arrive within the timeout.
        ValueError: BAGUA_TRANSPORT names no transport.
    """
    mine = repr(chosen), team.node, why_hook_uses_gloo(team, device)
    told = [decode(message) for message in team.all_gather_bytes(what, encode(mine))]
    for rank, (other, *_) in enumerate(told):
        if other != told[0][0]:
            raise RankMismatchError(f"{what}: rank {rank} has {other}, rank 0 has {told[0][0]}")
    nodes = team.discover_sites([node for _, node, _ in told])
    native = goes_native(team, [why for _, _, why in told])
    name = f"interop/{team.next_lane()}"
    if isinstance(chosen, Exchange):
        return team.open(name, chosen.hierarchical, nodes, native, or_gloo=True), lambda gradients: chosen
    fitted, _ = chosen.for_nodes(nodes)
    groups = team.open(name, fitted.hierarchical_groups, nodes, native, or_gloo=True)
    if isinstance(fitted, PowerSGD):
        bucket: Any = SimpleNamespace
        return groups, lambda gradients: fitted.exchange_for(bucket(params=tuple(gradients)))
    return groups, lambda gradients: fitted.exchange
