"""When each algorithm exchanges what: its exchange, buckets and lanes, and the moment in a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import bagua
from bagua.bench import contenders
from bagua.bench.bounds import Moment
from bagua.bench.models import Model
from bagua.comm.transport import (
    FAR_LANES,
    FAR_LANES_OF_SUMS,
    FAR_S,
    NEAR_LANES_OF_SUMS,
    slow_bytes_per_s,
)
from bagua.engine.reducer.bucketing import (
    DEFAULT_NUM_LANES,
    PART_BYTES,
    WIDE,
    Entry,
    check_bucket_bytes,
    check_num_lanes,
    chunks_of,
    fitting_bucket_bytes,
    lanes_of_wide,
    last_part_bytes,
    make_plan,
)
from bagua.exchanges import AllReduce, Exchange, Hierarchical, PowerSGD
from bagua.plan.cluster import Cluster
from bagua.plan.phases import TorchAverage, TorchPowerSGD, UnknownCourseError

__all__ = ["DEFAULT_NAMES", "Bucket", "Recipe", "recipe_of"]

_DDP_BUCKET_BYTES, _DDP_FIRST_BYTES, _DDP_LANES = 25 * 2**20, 2**20, 2
_INTERVAL = 8
_ELEMENT_BYTES = 4
_TORCH = ("ddp", "ddp_fp16", "ddp_bf16", "ddp_powersgd", "post_local_sgd")
_POWER_RANK = 8
_BUILTIN = {row.name for row in bagua.algorithms.available(builtin_only=True)}
_PASSES_OF_OVERLAP = 3  # of `low_precision_decentralized`: a copy, a difference, a sum
DEFAULT_NAMES = (
    *_TORCH,
    *(name for name, each in contenders.available().items() if each.family == "bagua" and each.algorithm in _BUILTIN),
)


@dataclass(frozen=True)
class Bucket:
    """Elements that are exchanged together.

    Attributes:
        numel: fp32 elements.
        layer: position, in the order of the backward pass, of the layer whose gradients complete it.
        exchange: of this bucket.
    """

    numel: int
    layer: int
    exchange: Exchange


@dataclass(frozen=True)
class Recipe:
    """How one algorithm spends a step.

    Attributes:
        name: as on the command line.
        moment: when buckets are at hand, and who waits for them.
        buckets: in the order of exchange.
        lanes: exchanges that run at once.
        every: steps from one exchange to the next.
        delay: steps beside which an exchange runs, if it is rarer than steps.
        synchronous: a slow rank holds up the others.
        momenta: what is exchanged is made from gradients, and turned back into them.
        passes: over the weights between two steps, to copy them for an exchange that runs beside the next step, and to
            add what it has changed.
    """

    name: str
    moment: Moment
    buckets: tuple[Bucket, ...]
    lanes: int
    every: int = 1
    delay: int = 0
    synchronous: bool = True
    momenta: bool = False
    passes: int = 0


def recipe_of(name: str, model: Model, cluster: Cluster) -> Recipe:
    """Return the recipe of a contender of `bagua bench`: an algorithm with options, or one of torch's own.

    Raises:
        ValueError: there is no such contender, or its `bucket_bytes` or `num_lanes` is wrong.
        UnknownCourseError: it is another library's, or has no single exchange of a known kind.
    """
    contender = contenders.get(name)
    traffic = contender.traffic(model, cluster.ranks)
    if contender.family == "torch":
        return _of_torch(name, traffic.moment, traffic.every, model)
    if contender.family != "bagua":
        raise UnknownCourseError(f"algorithms: how {name!r} spends a step is not known: it is another library's")
    algorithm = _algorithm(contender.algorithm, contender.options)
    nodes = tuple(tuple(range(h * cluster.devices, (h + 1) * cluster.devices)) for h in range(cluster.hosts))
    algorithm, _ = algorithm.for_nodes(nodes)
    delay = int(getattr(algorithm, "delay", 0) or 0)
    options = contender.options
    given_bytes, given_lanes = options.get("bucket_bytes"), options.get("num_lanes")
    try:
        bucket_bytes = None if given_bytes is None else check_bucket_bytes(given_bytes)
    except TypeError as error:  # on the command line a wrong value, as a string
        raise ValueError(str(error)) from error
    try:
        if bucket_bytes is None:
            bucket_bytes = fitting_bucket_bytes(_ELEMENT_BYTES * model.num_elements, chunks_of(algorithm, nodes))
        buckets = _buckets(model, lambda shapes: _exchange(algorithm, shapes), cluster, bucket_bytes)
    except TypeError as error:  # an algorithm with several exchanges has no `exchange`
        raise UnknownCourseError(f"algorithms: how {name!r} spends a step is not known: {error}") from error
    lanes = _lanes(buckets[0].exchange, bucket_bytes, cluster, _ELEMENT_BYTES * model.num_elements)
    if given_lanes is not None:
        lanes = check_num_lanes("num_lanes", given_lanes)
    every = max(int(getattr(algorithm, "communication_interval", 0) or 0) or traffic.every, 1)
    moment = Moment.AFTER if every > 1 and delay == 0 and hasattr(algorithm, "delay") else traffic.moment
    if moment is Moment.STEP and not (buckets[0].exchange.two_phases or getattr(algorithm, "overlap", False)):
        moment = Moment.AFTER
    momenta = contender.optimizer in contenders.ADAMS
    passes = _PASSES_OF_OVERLAP if getattr(algorithm, "overlap", False) else 0
    return Recipe(name, moment, buckets, lanes, every, min(delay, every), contender.synchronous, momenta, passes)


def _algorithm(name: str, options: Any) -> Any:
    known = {each.name for each in fields(bagua.algorithms.get(name))}
    return bagua.algorithms.get(name, **{key: value for key, value in options.items() if key in known})


def _exchange(algorithm: Any, shapes: Sequence[tuple[int, ...]]) -> Exchange:
    if hasattr(algorithm, "exchange_for"):
        return algorithm.exchange_of(_matrices(shapes))
    return algorithm.exchange


def _matrices(shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """Shapes as matrices: the first dimension by all others; vectors as one row."""
    return tuple((shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape)) for shape in shapes)


def _lanes(exchange: Exchange, bucket_bytes: int, cluster: Cluster, model_bytes: int) -> int:
    """Lanes that share the buckets over the native transport, by the rules of `bagua.distribute`."""
    far = 2 * cluster.latency >= FAR_S
    lanes = max(DEFAULT_NUM_LANES, FAR_LANES) if far else DEFAULT_NUM_LANES
    slow = cluster.bandwidth * cluster.ring_share / 8 < slow_bytes_per_s(model_bytes)
    if exchange.streaming and (far or slow):
        lanes = min(lanes, FAR_LANES_OF_SUMS if far else NEAR_LANES_OF_SUMS)
    if exchange.elementwise and _narrowness(exchange, cluster) <= WIDE:
        held_bytes = cluster.bandwidth / 8 * cluster.latency if math.isfinite(cluster.bandwidth) else 0.0
        lanes = min(lanes, lanes_of_wide(bucket_bytes, cluster.ranks, held_bytes))
    return lanes


def _narrowness(exchange: Exchange, cluster: Cluster) -> float:
    inner = exchange.inner if isinstance(exchange, Hierarchical) else exchange
    size = max(cluster.hosts if isinstance(exchange, Hierarchical) else cluster.ranks, 2)
    if isinstance(inner, PowerSGD):
        return math.inf
    n = 1 << 20
    return AllReduce().bytes_per_rank(n, size) / max(inner.bytes_per_rank(n, size), 1.0)


def _buckets(
    model: Model, exchange: Callable[[Sequence[tuple[int, ...]]], Exchange], cluster: Cluster, bucket_bytes: int
) -> tuple[Bucket, ...]:
    """As the engine forms them: parameters in the order of their gradients, large buckets in parts."""
    shapes: dict[str, tuple[int, ...]] = {}
    layer_of: dict[str, int] = {}
    for position, layer in enumerate(reversed(model.layers)):
        for k, shape in enumerate(reversed(layer.shapes)):
            shapes[f"{position}.{k}"], layer_of[f"{position}.{k}"] = shape, position
    entries = [Entry(name, _ELEMENT_BYTES * math.prod(shape), "float32") for name, shape in shapes.items()]
    sums = exchange(list(shapes.values())).streaming
    plan = make_plan(entries, bucket_bytes, early=sums)
    found: list[Bucket] = []
    part_bytes: dict[int, int] = {}  # by the exchange, which most buckets share
    for names in plan.buckets:
        numel, layer = sum(math.prod(shapes[name]) for name in names), max(layer_of[name] for name in names)
        made = exchange([shapes[name] for name in names])
        parts = 1
        if made.elementwise:
            if id(made) not in part_bytes:
                part_bytes[id(made)] = _part_bytes(made, cluster)
            limit = part_bytes[id(made)]
            if made.streaming and names == plan.buckets[-1]:
                limit = last_part_bytes(_ELEMENT_BYTES * numel, limit)
            parts = -(-_ELEMENT_BYTES * numel // limit)
        ends = [numel * k // parts for k in range(parts + 1)]
        found += [Bucket(high - low, layer, made) for low, high in itertools.pairwise(ends)]
    return tuple(found)


def _part_bytes(exchange: Exchange, cluster: Cluster) -> int:
    """As the engine's dispatcher cuts: the narrower an exchange, the larger its parts."""
    if exchange.streaming:
        return 2 * PART_BYTES
    return PART_BYTES * min(max(1, round(_narrowness(exchange, cluster) / 4)), 8)


def _of_torch(name: str, moment: Moment, every: int, model: Model) -> Recipe:
    """DDP: a first bucket of 1 MiB, then 25 MiB, whole parameters. PowerSGD and averages of weights: in one."""
    if name == "ddp_powersgd":
        shapes = [shape for layer in model.layers for shape in layer.shapes]
        whole = TorchPowerSGD(_matrices(shapes), _POWER_RANK)
        return Recipe(name, moment, (Bucket(model.num_elements, len(model.layers) - 1, whole),), 1)
    if name == "post_local_sgd":
        return Recipe(name, moment, (Bucket(model.num_elements, 0, TorchAverage(direct_bytes=0)),), 1, every)
    codec = {"ddp_fp16": "fp16", "ddp_bf16": "bf16"}.get(name)
    exchange = AllReduce(direct_bytes=0) if codec is None else AllReduce(bagua.codecs.get(codec), direct_bytes=0)
    buckets: list[Bucket] = []
    numel, limit = 0, _DDP_FIRST_BYTES
    for position, layer in enumerate(reversed(model.layers)):
        for shape in reversed(layer.shapes):
            numel += math.prod(shape)
            if _ELEMENT_BYTES * numel >= limit:
                buckets.append(Bucket(numel, position, exchange))
                numel, limit = 0, _DDP_BUCKET_BYTES
    if numel:
        buckets.append(Bucket(numel, len(model.layers) - 1, exchange))
    return Recipe(name, moment, tuple(buckets), _DDP_LANES, every)
