"""What a choice goes by: links, candidates and model, and times of steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bagua.algorithms.auto import Auto
from bagua.auto.candidates import Candidate
from bagua.auto.links import Links
from bagua.bench.models import Layer, Model
from bagua.plan import Cluster

__all__ = ["Facts", "StepTimes"]


_ALIKE = 0.8  # of the hosts' rate: ways that have as much are as good as those


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on one rank.

    Attributes:
        step_s: from the first forward pass to the end of the optimizer's step.
        exposed_s: of it, waiting for communication.
        forward_s: until the synchronised backward pass.
        optimizer_s: the optimizer's step.
    """

    step_s: float
    exposed_s: float
    forward_s: float
    optimizer_s: float


@dataclass(frozen=True)
class Facts:
    """What does not change while candidates are tried.

    Attributes:
        auto: the user's options.
        nodes: ranks by node.
        candidates: all of the allowed classes; the first one is exact.
        links: as measured.
        shapes: of parameters, in the order of the forward pass.
        families: of the optimizers.
        cores: of the CPU, that a rank has.
        gpu: ranks train on GPUs.
    """

    auto: Auto
    nodes: tuple[tuple[int, ...], ...]
    candidates: tuple[Candidate, ...]
    links: Links
    shapes: Mapping[str, tuple[int, ...]]
    families: tuple[str, ...]
    cores: float
    gpu: bool = False

    @property
    def cluster(self) -> Cluster:
        """Nodes and links, for the simulation."""
        links, hosts = self.links, len(self.nodes)
        within = Links(links.within, (), 0.0) if links.within else None
        return Cluster(
            hosts=hosts,
            devices=max(len(node) for node in self.nodes),
            bandwidth=links.bandwidth if hosts > 1 else math.inf,
            latency=links.latency_s if hosts > 1 else 0.0,
            inner_bandwidth=within.bandwidth if within is not None else math.inf,
            inner_latency=within.latency_s if within is not None else 0.0,
            cores=max(self.cores, 0.25),
            ring_share=_share(links.ring_bandwidth, links.bandwidth) if hosts > 1 else 1.0,
            mesh_share=_share(links.mesh_bandwidth, links.bandwidth) if hosts > 1 else 1.0,
        )

    def cluster_at(self, share: float) -> Cluster:
        """The same with a share of the rate between hosts, or within one if it is alone."""
        cluster = self.cluster
        if len(self.nodes) > 1:
            return replace(cluster, bandwidth=share * cluster.bandwidth)
        return replace(cluster, inner_bandwidth=share * cluster.inner_bandwidth)

    @property
    def model(self) -> Model:
        """Parameters by the module that holds them; arithmetic in proportion to their number."""
        layers: list[Layer] = []
        for owner, names in itertools.groupby(self.shapes, key=lambda name: name.rpartition(".")[0]):
            shapes = tuple(self.shapes[name] for name in names)
            layers.append(Layer(owner or "module", shapes, max(1, sum(math.prod(shape) for shape in shapes))))
        return Model("module", tuple(layers))


def _share(rate: float, of: float) -> float:
    """Of the hosts' rate that some ways have; 1 where they differ by no more than measurements do."""
    return rate / of if rate < _ALIKE * of else 1.0
