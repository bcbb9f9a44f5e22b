"""Hierarchical exchange: sums within a node or a site, any exchange between them.

Legend: N = elements of the payload, H = hosts of a site, S = sites, K = encoded tensors, W = bytes of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bagua.codecs import Codec
from bagua.comm.collectives import (
    all_gather_shares,
    broadcast_,
    broadcast_over_hosts_,
    reduce_,
    reduce_over_hosts_,
    reduce_shares_,
)
from bagua.comm.groups import Group, Groups
from bagua.exchanges.base import Exchange, State, check_codec
from bagua.exchanges.site_sums import reduce_encoded_shares_

__all__ = ["Hierarchical"]

_ALIGN = 16  # elements; a share starts where vector loads like it
_TYPICAL = 4096  # elements


@dataclass(frozen=True)
class Hierarchical(Exchange):
    """Sum within each node, run `inner` among the nodes' leaders, broadcast within each node.

    Nodes are weighted by their number of ranks when `inner` is complete (the sum is divided once,
    by the number of all ranks); with a sparse `inner` each node counts once, with its mean.

    Where hosts have a site (BAGUA_SITE), sites take the place of nodes: the sum goes from the ranks of a host to its
    first rank, from the hosts of a site to its first host, and `inner` runs among the sites. With as many hosts at
    every site all of them exchange at once: each sums a share of the payload over its site, `inner` runs on that share
    among the hosts that have it, and the hosts of the site send each other the results, encoded where `inner` can.
    What they send each other for the sum is then in 16 bits, where `inner` sends less.

    Args:
        inner: the exchange between nodes.
        site_codec: of the addends of a sum over the hosts of a site, where hosts have shares. None (default): as
            `inner` has it, "bf16" where it sends less; `codecs.Identity()` leaves them as they are.

    State: the inner exchange's, on leaders; where hosts have shares that of the own share, but what results
        determine, such as running scales, is of all elements.
    Bytes: `inner`'s between the leaders; within a node one copy up and one down per rank. Of the H hosts of a
        site the first sends one copy, each other one up to 2 - 1/(H-1). With shares, each host sends (H-1)/H copies, as
        much of the result, both encoded where that is done, and `inner`'s bytes of 1/H of the payload.
    Source: arXiv:2107.01499 (Bagua), section 3.3; Differs: Bagua 0.9 takes the mean of node means.

    Examples:
        >>> inner = bagua.exchanges.ScatterGather(bagua.codecs.Int4())
        >>> exchange = bagua.exchanges.Hierarchical(inner)
    """

    inner: Exchange
    site_codec: Codec | None = None

    def __post_init__(self) -> None:
        if self.site_codec is not None:
            check_codec("Hierarchical", self.site_codec, "site_codec")
        if self.inner.hierarchical:
            raise ValueError("Hierarchical cannot hold another Hierarchical exchange")

    def __repr__(self) -> str:
        """Without a default `site_codec`: states are saved under it, and older ones know none."""
        codec = f", site_codec={self.site_codec!r}" if self.site_codec is not None else ""
        return f"{type(self).__name__}(inner={self.inner!r}{codec})"

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
    def scales_with_payload(self) -> tuple[str, ...]:
        """As the inner exchange."""
        return self.inner.scales_with_payload

    @property
    def outdated(self) -> tuple[str, ...]:
        """As the inner exchange."""
        return self.inner.outdated

    def shares(self, groups: Groups) -> bool:
        """Whether every host of a site exchanges a share of the payload; else the first one exchanges all of it.

        On ranks that are not the first of a host it is False: they do the same either way.
        """
        return groups.column is not None and self.inner.elementwise and self.complete and not self.two_phases

    @property
    def layout(self) -> tuple[str, ...]:
        """`share`: its first element, the one after its last, the place of the host in its site, that of the site."""
        return ("share", *self.inner.layout)

    def fit(self, name: str, saved: Tensor, made: Tensor, groups: Groups) -> Tensor | None:
        """As the inner exchange, where it runs."""
        among = self.among(groups)
        return self.inner.fit(name, saved, made, among) if among is not None else None

    def init(self, x_N: Tensor, groups: Groups) -> State:
        """The inner exchange's state where it runs, of the elements that it gets; nothing elsewhere.

        What results determine is of all elements, and so it is the same at all hosts.
        """
        among = self.among(groups)
        if among is None:
            return {}
        if self._reads_results(groups) and self.inner.of_results:
            return self.inner.init(x_N, among)
        lo, hi = self._range(x_N.numel(), groups)
        state = self.inner.init(x_N[lo:hi], among)
        hosts = groups.hosts
        if not state or hosts is None or not self.shares(groups):
            return state
        return {**state, "share": torch.tensor([lo, hi, hosts.rank, among.rank], device="cpu")}

    def rebuild(self, x_N: Tensor, state: State, groups: Groups) -> None:
        """The inner exchange's, where it runs."""
        among = self.among(groups)
        if among is not None:
            lo, hi = self._range(x_N.numel(), groups)
            self.inner.rebuild(x_N[lo:hi], state, among)

    def memory(self, state: State, n: int, lo: int, hi: int, groups: Groups) -> Sequence[Tensor]:
        """The inner exchange's, where it runs, of the part of the range that it gets."""
        among = self.among(groups)
        of_all = self._reads_results(groups) and self.inner.of_results
        first, stop = (0, n) if of_all else self._range(n, groups)
        lo, hi = max(lo, first), min(hi, stop)
        if among is None or lo >= hi:
            return []
        inner = {name: tensor for name, tensor in state.items() if name != "share"}
        return self.inner.memory(inner, stop - first, lo - first, hi - first, among)

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Shapes: x_N is [N]."""
        if self.shares(groups):
            self._run_shares(x_N, state, groups, step)
            return
        self._collect(x_N, groups)
        if groups.inter is not None:
            self.inner.run(x_N, state, _among(groups.inter, groups), step)
        _spread(x_N, groups)

    def begin(self, x_N: Tensor, state: State, groups: Groups, held: State) -> None:
        """All but what the leaders send each other."""
        self._collect(x_N, groups)
        if groups.inter is not None:
            self.inner.begin(x_N, state, _among(groups.inter, groups), held)
        _spread(x_N, groups)

    def finish(self, state: State, groups: Groups, held: State) -> None:
        """The inner exchange's second phase, on leaders."""
        if groups.inter is not None:
            self.inner.finish(state, _among(groups.inter, groups), held)

    def _run_shares(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        hosts, own_host = groups.hosts, groups.intra
        assert hosts is not None and own_host is not None and groups.column is not None
        early = self._scale_early(x_N, groups)
        if own_host is not hosts:
            reduce_(own_host, x_N)
        ends = [_share(x_N.numel(), hosts.size, place) for place in range(hosts.size)]
        shares, buffers, among = [x_N[lo:hi] for lo, hi in ends], groups.buffers, _among(groups.column, groups)
        own = shares[hosts.rank]
        codec = self.site_codec or self.inner.addend_codec
        fewer = codec is not None and codec.wire_bytes(_TYPICAL) < _TYPICAL * x_N.element_size()
        if codec is not None and fewer and not codec.lossless:
            reduce_encoded_shares_(hosts, shares, codec, buffers)
        else:
            reduce_shares_(hosts, shares, buffers.get("site", (hosts.size * own.numel(),), x_N.dtype, x_N.device))
        if not early:
            self._scale(own, groups)
        if not self.inner.encodes:
            if own.numel():
                self.inner.run(own, state, among, step)
            all_gather_shares(hosts, [[share] for share in shares])
        else:
            sizes = [self.inner.encoded_shape(share.numel(), among.size) for share in shares]
            flat = buffers.get("results", (sum(k * w for k, w in sizes),), torch.uint8, x_N.device)
            parts = flat.split([k * w for k, w in sizes])
            results = [part.view(*shape) for part, shape in zip(parts, sizes, strict=True)]
            states = [self._state_of(state, lo, hi) for lo, hi in ends]
            encoded = self.inner.run_encoded(own, states[hosts.rank], among, step) if own.numel() else []
            all_gather_shares(hosts, [encoded if r == hosts.rank else list(each) for r, each in enumerate(results)])
            for place, share in enumerate(shares):
                if place != hosts.rank:
                    self.inner.read_encoded(results[place], share, states[place], among.size, buffers)
        if own_host is not hosts:
            broadcast_(own_host, x_N)

    def _reads_results(self, groups: Groups) -> bool:
        """Whether this rank decodes the results of the other hosts' shares."""
        return self.inner.encodes and self.shares(groups)

    def _state_of(self, state: State, lo: int, hi: int) -> State:
        """The state of a share: of tensors of all elements, its range. Else `state`, which may change."""
        of_all = self.inner.of_results
        if not of_all:
            return state
        return {name: tensor[lo:hi] if name in of_all else tensor for name, tensor in state.items()}

    def _collect(self, x_N: Tensor, groups: Groups) -> None:
        """Sum the payloads of a node, or a site, on its leader, and scale the sum for the inner exchange."""
        if groups.intra is None:
            raise ValueError("Hierarchical needs groups that were opened with hierarchical=True")
        early = self._scale_early(x_N, groups)
        for group in (groups.intra, groups.site):
            if group is not None and group.of_hosts:
                enough = (x_N.numel() + group.size,)
                reduce_over_hosts_(group, x_N, groups.buffers.get("site", enough, x_N.dtype, x_N.device))
            elif group is not None:
                reduce_(group, x_N)
        if groups.inter is not None and not early:
            self._scale(x_N, groups)

    def _scale_early(self, x_N: Tensor, groups: Groups) -> bool:
        """Scale what may overflow in a sum before it is summed, on all ranks. Returns whether it was done."""
        early = x_N.dtype in (torch.float16, torch.bfloat16)
        if early:
            self._scale(x_N, groups)
        return early

    def _scale(self, x_N: Tensor, groups: Groups) -> None:
        if not self.inner.complete:
            x_N.mul_(1.0 / groups.num_summed)
        elif self.average:
            x_N.mul_(len(groups.nodes) / groups.world.size)

    def among(self, groups: Groups) -> Groups | None:
        """The groups of the inner exchange; None: it does not run on this rank."""
        group = groups.column if self.shares(groups) else groups.inter
        return _among(group, groups) if group is not None else None

    def _range(self, n: int, groups: Groups) -> tuple[int, int]:
        """The elements of a payload of `n` that the inner exchange gets on this rank."""
        hosts = groups.hosts
        return _share(n, hosts.size, hosts.rank) if hosts is not None and self.shares(groups) else (0, n)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """The inner exchange's, as if every rank were a node of its own: what a leader sends to other nodes."""
        return self.inner.bytes_per_rank(n, size)


def _share(n: int, hosts: int, place: int) -> tuple[int, int]:
    """First and last element, exclusive, of the share of a host; all but the last ones are a multiple of `_ALIGN`."""
    each = -(-n // (hosts * _ALIGN)) * _ALIGN
    return min(place * each, n), min((place + 1) * each, n)


def _spread(x_N: Tensor, groups: Groups) -> None:
    """From the leader to all ranks of its node or site."""
    for group in (groups.site, groups.intra):
        if group is not None:
            (broadcast_over_hosts_ if group.of_hosts else broadcast_)(group, x_N)


def _among(group: Group, groups: Groups) -> Groups:
    return replace(groups, world=group, intra=None, inter=None, site=None, column=None)
