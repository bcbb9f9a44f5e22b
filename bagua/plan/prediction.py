"""The time of a training step on a cluster, by simulating its buckets, lanes and links."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bagua.bench import contenders
from bagua.bench.bounds import Moment
from bagua.comm.transport import FAR_S
from bagua.exchanges import Hierarchical
from bagua.exchanges.gathering import gathers
from bagua.plan.cluster import CPU, GPU, Cluster, Costs
from bagua.plan.events import DELAY, Lanes, Resource, Simulation, Task
from bagua.plan.phases import Phase, phases_of, total_sent
from bagua.plan.recipe import Recipe, recipe_of
from bagua.plan.workload import Workload

__all__ = ["Prediction", "gathered_buckets", "predict"]


@dataclass(frozen=True)
class Prediction:
    """What a step takes with one algorithm.

    Attributes:
        algorithm: name, with options.
        step_s: seconds of a step, the mean over a period where steps differ.
        compute_s: seconds of a step without communication, on the slowest host the others wait for.
        bytes_per_host: that a host sends over its link in a step, the mean over a period.
        efficiency: of scaling: a step on one device alone by a step here.

    Examples:
        >>> found = bagua.plan.Prediction("ddp", step_s=0.5, compute_s=0.3, bytes_per_host=0.0, efficiency=0.6)
        >>> round(found.exposed_s, 3)
        0.2
    """

    algorithm: str
    step_s: float
    compute_s: float
    bytes_per_host: float
    efficiency: float

    @property
    def exposed_s(self) -> float:
        """Seconds of a step in which nothing is computed for communication."""
        return self.step_s - self.compute_s


def predict(algorithm: str, workload: Workload, cluster: Cluster, costs: Costs = CPU) -> Prediction:
    """Predict one step of `workload` with `algorithm` on `cluster`.

    All ranks do the same, so one of them is simulated. Compute takes no CPU from exchanges, as on a GPU.

    Args:
        algorithm: a contender of `bagua bench`: `bytegrad`, `ddp`, `power_sgd:rank=4`.
        costs: of exchanges beside the link; `bagua.plan.CPU` or `bagua.plan.GPU`, or your own.

    Raises:
        ValueError: the algorithm is unknown.

    Examples:
        >>> workload = bagua.plan.Workload.of(bagua.plan.load_model("25m"), compute_s=0.3)
        >>> slow = bagua.plan.Cluster(hosts=4, bandwidth=1e9)
        >>> seconds = [bagua.plan.predict(name, workload, slow).step_s for name in ("bytegrad", "ddp")]
        >>> seconds[0] < seconds[1] / 2
        True
    """
    recipe = recipe_of(algorithm, workload.model, cluster)
    factor = 1 / cluster.slowest if recipe.synchronous else 1.0
    compute = workload.step_s * factor
    known: dict[tuple[int, int, bool], Sequence[Phase]] = {}  # most buckets are alike
    exchanges: list[Sequence[Phase]] = []
    over_nccl = costs == GPU  # which never gathers
    for bucket, gathered in zip(recipe.buckets, gathered_buckets(recipe, cluster, over_nccl), strict=True):
        key = id(bucket.exchange), bucket.numel, gathered
        if key not in known:
            known[key] = phases_of(bucket.exchange, bucket.numel, cluster, costs, recipe.momenta, gathered)
        exchanges.append(known[key])
    sent = sum(total_sent(phases) for phases in exchanges) / recipe.every
    numel = sum(bucket.numel for bucket in recipe.buckets)
    copies_s = 0.0 if cluster.ranks == 1 else recipe.passes * numel * costs.element_s / min(cluster.cores, 1.0)
    step = _step_s(recipe, workload, factor, exchanges, cluster) + copies_s
    return Prediction(algorithm, step, compute, sent, workload.step_s / step if step else 1.0)


def gathered_buckets(recipe: Recipe, cluster: Cluster, over_nccl: bool = False) -> list[bool]:
    """Of which buckets all ranks form the means themselves; see `bagua.exchanges.gathering`."""
    far = cluster.hosts > 1 and 2 * cluster.latency >= FAR_S and math.isfinite(cluster.bandwidth)
    alone = cluster.hosts > 2 or cluster.devices == 1  # two hosts of several ranks do not measure their link
    if not far or not alone or over_nccl or contenders.get(recipe.name).family != "bagua":
        return [False] * len(recipe.buckets)
    bdp_bytes, whole = cluster.bandwidth / 8 * cluster.latency, Counter[tuple[int, int]]()
    for bucket in recipe.buckets:  # of several parts, if it is long
        whole[bucket.layer, id(bucket.exchange)] += bucket.numel
    total, found = whole.total(), []
    for bucket in recipe.buckets:
        exchange, size = bucket.exchange, cluster.ranks
        if isinstance(exchange, Hierarchical):
            exchange, size = exchange.inner, cluster.hosts
        numel, last = whole[bucket.layer, id(bucket.exchange)], bucket.layer == recipe.buckets[-1].layer
        found.append(gathers(exchange, numel, total, last, size, bdp_bytes))
    return found


def _step_s(
    recipe: Recipe, workload: Workload, factor: float, exchanges: Sequence[Sequence[Phase]], cluster: Cluster
) -> float:
    compute = workload.step_s * factor
    if recipe.moment is Moment.BACKGROUND:
        return compute
    if recipe.moment is Moment.GRADIENT:
        return _overlapped_s(recipe, workload, factor, exchanges, cluster)
    if recipe.moment is Moment.STEP:
        # What is summed within a host is waited for, unless all of the exchange works on copies.
        waits = recipe.buckets[0].exchange.hierarchical and not recipe.passes
        near = [[each for each in phases if waits and not each.host_bytes] for phases in exchanges]
        far = [[each for each in phases if not waits or each.host_bytes] for phases in exchanges]
        beside = max(compute, _exchanges_s(recipe, far, cluster))
        return (beside + _exchanges_s(recipe, near, cluster) + (recipe.every - 1) * compute) / recipe.every
    alone = _exchanges_s(recipe, exchanges, cluster)
    if recipe.moment is Moment.AFTER:
        return compute + alone / recipe.every
    beside = max(recipe.delay, 1)  # steps that the exchange has
    hidden = max(beside * compute - workload.optimizer_s * factor, alone) + workload.optimizer_s * factor
    return (hidden + (recipe.every - beside) * compute) / recipe.every


def _overlapped_s(
    recipe: Recipe, workload: Workload, factor: float, exchanges: Sequence[Sequence[Phase]], cluster: Cluster
) -> float:
    """A step whose exchanges begin in the backward pass."""
    simulation = Simulation()
    ready: list[Task] = []
    last = simulation.add(DELAY, workload.forward_s * factor, name="forward")
    for layer, seconds in workload.backward():
        last = simulation.add(DELAY, seconds * factor, [last], f"backward {layer.name}")
        ready.append(last)
    ends = _add_exchanges(simulation, recipe, exchanges, cluster, [ready[bucket.layer] for bucket in recipe.buckets])
    simulation.add(DELAY, workload.optimizer_s * factor, [last, *ends], "optimizer")
    return simulation.run()


def _exchanges_s(recipe: Recipe, exchanges: Sequence[Sequence[Phase]], cluster: Cluster) -> float:
    """All exchanges, with nothing else to wait for."""
    simulation = Simulation()
    start = simulation.add(DELAY, 0.0)
    _add_exchanges(simulation, recipe, exchanges, cluster, [start] * len(recipe.buckets))
    return simulation.run()


def _add_exchanges(
    simulation: Simulation,
    recipe: Recipe,
    exchanges: Sequence[Sequence[Phase]],
    cluster: Cluster,
    ready: Sequence[Task],
) -> list[Task]:
    """Add the exchange of each bucket, from when it is ready; returns their last tasks."""
    cpu = Resource("CPU", capacity=cluster.cores, each=1.0)
    # The flows of lanes differ in speed, so that some send while others wait for an answer.
    link = Resource("link", capacity=cluster.bandwidth / 8, in_turn=True)
    inner = Resource("inner link", capacity=cluster.inner_bandwidth / 8)
    lanes = Lanes(recipe.lanes)
    ends: list[Task] = []
    for number, (phases, at) in enumerate(zip(exchanges, ready, strict=True)):
        name = f"bucket {number}"
        last = simulation.add(DELAY, 0.0, [at], name, takes=lanes)
        for phase in phases:
            last = _add_phase(simulation, phase, last, cpu, link, inner, name)
        ends.append(simulation.add(DELAY, 0.0, [last], name, frees=lanes))
    return ends


def _add_phase(
    simulation: Simulation, phase: Phase, last: Task, cpu: Resource, link: Resource, inner: Resource, name: str
) -> Task:
    """Add what a phase does after `last`; returns its last task."""
    if phase.before_s:
        last = simulation.add(cpu, phase.before_s, [last], name)
    amounts = ((cpu, phase.beside_s), (link, phase.host_bytes), (inner, phase.device_bytes))
    parts = [simulation.add(resource, amount, [last], name) for resource, amount in amounts if amount]
    return simulation.add(DELAY, phase.wait_s, parts or [last], name)
