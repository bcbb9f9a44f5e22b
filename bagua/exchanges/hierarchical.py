"""Hierarchical exchange: exact within a node or a site, any exchange between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from bagua.comm.collectives import broadcast_, broadcast_over_hosts_, reduce_, reduce_over_hosts_
from bagua.comm.groups import Groups
from bagua.exchanges.base import Exchange, State

__all__ = ["Hierarchical"]


@dataclass(frozen=True)
class Hierarchical(Exchange):
    """Sum within each node, run `inner` among the nodes' leaders, broadcast within each node.

    Nodes are weighted by their number of ranks when `inner` is complete (the sum is divided once,
    by the number of all ranks); with a sparse `inner` each node counts once, with its mean.

    Where hosts have a site (BAGUA_SITE), sites take the place of nodes: the sum goes from the ranks of a host to its
    first rank, from the hosts of a site to its first host, and `inner` runs among the sites.

    Args:
        inner: the exchange between nodes.

    State: the inner exchange's, on leaders.
    Bytes: `inner`'s between the leaders; within a node one copy up and one down per rank. Of the H hosts of a
        site the first sends one copy, each other one up to 2 - 1/(H-1).
    Source: arXiv:2107.01499 (Bagua), section 3.3; Differs: Bagua 0.9 takes the mean of node means.

    Examples:
        >>> inner = bagua.exchanges.ScatterGather(bagua.codecs.Int4())
        >>> exchange = bagua.exchanges.Hierarchical(inner)
    """

    inner: Exchange

    def __post_init__(self) -> None:
        if self.inner.hierarchical:
            raise ValueError("Hierarchical cannot hold another Hierarchical exchange")

    @property
    def name(self) -> str:
        """hierarchical, with the inner exchange."""
        return f"hierarchical[{self.inner.name}]"

    @property
    def hierarchical(self) -> bool:
        """True."""
        return True

    @property
    def complete(self) -> bool:
        """As the inner exchange."""
        return self.inner.complete

    @property
    def lossy(self) -> bool:
        """As the inner exchange."""
        return self.inner.lossy

    @property
    def elementwise(self) -> bool:
        """As the inner exchange."""
        return self.inner.elementwise

    @property
    def streaming(self) -> bool:
        """As the inner exchange."""
        return self.inner.streaming

    @property
    def two_phases(self) -> bool:
        """As the inner exchange. Within a node and a site, ranks wait for each other in the first phase."""
        return self.inner.two_phases

    @property
    def average(self) -> bool:
        """As the inner exchange."""
        return getattr(self.inner, "average", True)

    @property
    def runs_alone(self) -> bool:
        """As the inner exchange."""
        return self.inner.runs_alone

    @property
    def fed_back(self) -> tuple[str, ...]:
        """As the inner exchange, on leaders."""
        return self.inner.fed_back

    @property
    def outdated(self) -> tuple[str, ...]:
        """As the inner exchange."""
        return self.inner.outdated

    def fit(self, name: str, saved: Tensor, made: Tensor, groups: Groups) -> Tensor | None:
        """As the inner exchange, on leaders."""
        return self.inner.fit(name, saved, made, _among_leaders(groups)) if groups.inter is not None else None

    def init(self, x_N: Tensor, groups: Groups) -> State:
        """The inner exchange's state on leaders, nothing elsewhere."""
        return self.inner.init(x_N, _among_leaders(groups)) if groups.inter is not None else {}

    def rebuild(self, x_N: Tensor, state: State, groups: Groups) -> None:
        """The inner exchange's, on leaders."""
        if groups.inter is not None:
            self.inner.rebuild(x_N, state, _among_leaders(groups))

    def memory(self, state: State, n: int, lo: int, hi: int, groups: Groups) -> Sequence[Tensor]:
        """The inner exchange's, on leaders."""
        return self.inner.memory(state, n, lo, hi, _among_leaders(groups)) if groups.inter is not None else []

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Shapes: x_N is [N]."""
        self._collect(x_N, groups)
        if groups.inter is not None:
            self.inner.run(x_N, state, _among_leaders(groups), step)
        _spread(x_N, groups)

    def begin(self, x_N: Tensor, state: State, groups: Groups, held: State) -> None:
        """All but what the leaders send each other."""
        self._collect(x_N, groups)
        if groups.inter is not None:
            self.inner.begin(x_N, state, _among_leaders(groups), held)
        _spread(x_N, groups)

    def finish(self, state: State, groups: Groups, held: State) -> None:
        """The inner exchange's second phase, on leaders."""
        if groups.inter is not None:
            self.inner.finish(state, _among_leaders(groups), held)

    def _collect(self, x_N: Tensor, groups: Groups) -> None:
        """Sum the payloads of a node, or a site, on its leader, and scale the sum for the inner exchange."""
        if groups.intra is None:
            raise ValueError("Hierarchical needs groups that were opened with hierarchical=True")
        for group in (groups.intra, groups.site):
            if group is not None and group.of_hosts:
                enough = (x_N.numel() + group.size,)
                reduce_over_hosts_(group, x_N, groups.buffers.get("site", enough, x_N.dtype, x_N.device))
            elif group is not None:
                reduce_(group, x_N)
        if groups.inter is None:
            return
        if not self.inner.complete:
            x_N.mul_(1.0 / groups.num_summed)
        elif self.average:
            x_N.mul_(groups.inter.size / groups.world.size)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """The inner exchange's, as if every rank were a node of its own: what a leader sends to other nodes."""
        return self.inner.bytes_per_rank(n, size)


def _spread(x_N: Tensor, groups: Groups) -> None:
    """From the leader to all ranks of its node or site."""
    for group in (groups.site, groups.intra):
        if group is not None:
            (broadcast_over_hosts_ if group.of_hosts else broadcast_)(group, x_N)


def _among_leaders(groups: Groups) -> Groups:
    assert groups.inter is not None
    return replace(groups, world=groups.inter, intra=None, inter=None, site=None)
