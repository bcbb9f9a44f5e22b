"""Who takes part: algorithms of this package with fitting options, and what is there to compare them with."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import bagua
from bagua.bench import baselines, bounds
from bagua.bench.bounds import Moment, Traffic
from bagua.bench.compute import EmulatedModel
from bagua.bench.models import Model
from bagua.bench.training import Training, make_optimizer

__all__ = ["ADAMS", "OFF", "Contender", "available", "get", "split_names"]

OFF = "off"
INTERVAL, LONG_INTERVAL = 8, 64  # steps between two averages of weights; of DiLoCo
POWER_RANK = 8
ADAMS = ("qadam", "one_bit_lamb", "zero_one_adam")  # optimizers with an update of their own


Amount = Callable[[Model, int], Traffic]  # from model and number of hosts


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        name: of the row.
        family: "bagua", or whose it is.
        traffic: what a host sends.
        baseline: makes a model ready for training; a collective. None for algorithms of this package.
        algorithm, optimizer, options: for `bagua.distribute`.
        warmup_steps: to be made before the clock runs, so that the steps measured are all alike.
        period: steps after which the pattern of steps repeats.
        synchronous: no rank gets ahead of the others.
        missing: why it cannot run here; empty if it can.
    """

    name: str
    family: str
    traffic: Amount
    baseline: Callable[[EmulatedModel], Training] | None = None
    algorithm: str = ""
    optimizer: str = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    warmup_steps: int = 3
    period: int = 1
    synchronous: bool = True
    missing: str = ""

    @property
    def averaged(self) -> bool:
        """Steps differ by design, so that all of them count, long ones too."""
        return self.period > 1 or (self.family == "bagua" and not self.synchronous)

    def prepare(self, model: EmulatedModel, emulated: bool) -> Training:
        """Make `model` ready for training; a collective.

        Args:
            emulated: optimizers of the Adam kind do the arithmetic of SGD.
        """
        if self.baseline is not None:
            return self.baseline(model)
        optimizer = make_optimizer(self.optimizer, model, emulated)
        bagua.distribute(model, optimizer, self.algorithm, **self.options)
        return Training.of(model, optimizer, lambda: _detach(model))


def _detach(model: EmulatedModel) -> None:
    bagua.detach(model)


def _mean(bits: float, moment: Moment = Moment.GRADIENT, every: int = 1) -> Amount:
    return lambda model, ranks: bounds.all_to_all_mean(model.num_elements, ranks, bits, moment, every)


_CODECS = {"codec", "gather_codec"}
_LOCAL = ("local_sgd", "diloco", "sparse_loco")  # between rounds nothing is sent
_OF_DISTRIBUTE = {"bucket_bytes", "num_lanes", "hierarchical", "rank_order", "routes", "transport"}
_MANY, _RANKS = 1 << 20, 4  # elements, and ranks among which they are divided


def _unknown(algorithm: str, options: Mapping[str, Any]) -> str:
    known = {each.name for each in fields(bagua.algorithms.get(algorithm))}
    known |= _OF_DISTRIBUTE & set(inspect.signature(bagua.distribute).parameters)
    unknown = sorted(set(options) - known)
    return f"algorithm {algorithm!r} has no option {', '.join(unknown)}" if unknown else ""


def _ours(
    name: str, traffic: Amount, algorithm: str = "", how: Mapping[str, Any] | None = None, **options: Any
) -> Contender:
    """An algorithm of this package with `options`; `how` are other attributes of the contender."""
    algorithm = algorithm or name
    contender = Contender(name, "bagua", traffic, algorithm=algorithm, options=options, **(how or {}))
    return replace(contender, missing=_unknown(algorithm, options))


def _all() -> list[Contender]:
    after, param = Moment.AFTER, Moment.PARAMETER

    def gossip(model: Model, ranks: int) -> Traffic:
        return bounds.gossip(model.num_elements, ranks)

    def differences(model: Model, ranks: int) -> Traffic:
        return bounds.difference_gossip(model.num_elements, ranks)

    def nothing(model: Model, ranks: int) -> Traffic:
        return Traffic(0, 0, Moment.BACKGROUND)

    def low_rank(model: Model, ranks: int) -> Traffic:
        each = [bounds.low_rank(layer.shapes, ranks, POWER_RANK).bytes_per_host for layer in model.layers]
        return replace(bounds.low_rank(model.shapes, ranks, POWER_RANK), layer_bytes=tuple(each))

    def background(model: Model, ranks: int) -> Traffic:
        return bounds.background(model.num_elements, ranks, 8)

    def sparse(model: Model, ranks: int) -> Traffic:
        every_step = bagua.algorithms.get("sparse_loco", communication_interval=1)
        return Traffic(every_step.bytes_per_rank(model.num_elements, ranks), min(ranks - 1, 1), after, long)

    long = LONG_INTERVAL
    seldom: dict[str, Any] = {"warmup_steps": INTERVAL, "period": INTERVAL}
    return [
        Contender(OFF, "none", nothing, baselines.off, warmup_steps=2, synchronous=False),
        *(_off_with(kind, nothing) for kind in ADAMS),
        Contender("ddp", "torch", _mean(32), baselines.ddp),
        Contender("ddp_fp16", "torch", _mean(16), baselines.ddp_fp16),
        Contender("ddp_bf16", "torch", _mean(16), baselines.ddp_bf16),
        Contender("ddp_powersgd", "torch", low_rank, baselines.ddp_power_sgd, warmup_steps=5),
        Contender("post_local_sgd", "torch", _mean(32, after, INTERVAL), baselines.post_local_sgd, **seldom),
        Contender("deepspeed", "DeepSpeed", _mean(32), baselines.deepspeed, missing=baselines.missing("deepspeed")),
        Contender("accelerate", "Accelerate", _mean(32), baselines.accelerate, missing=baselines.missing("accelerate")),
        Contender("horovod", "Horovod", _mean(32), baselines.horovod, missing=baselines.missing("horovod.torch")),
        _ours("gradient_allreduce", _mean(32)),
        _ours("gradient_allreduce_bf16", _mean(16), "gradient_allreduce", codec="bf16"),
        _ours("bytegrad", _mean(8)),
        _ours("int4", _mean(4), "gradient_allreduce", codec="int4", error_feedback=True),
        _ours("qadam", _mean(8), how=_adam("qadam")),
        _ours("qadam_1bit", _mean(1), "qadam", _adam("qadam"), codec="sign"),
        _ours("one_bit_lamb", _mean(1), how=_adam("one_bit_lamb"), codec="sign"),
        _ours("zero_one_adam", _mean(1), how=_adam("zero_one_adam")),
        _ours("power_sgd", low_rank, rank=POWER_RANK),
        _ours("decentralized", _mean(32, param)),
        _ours("decentralized_shift_one", gossip, "decentralized", peer_selection_mode="shift_one"),
        _ours("low_precision_decentralized", differences),
        _ours("low_precision_decentralized_overlap", differences, "low_precision_decentralized", overlap=True),
        _ours("async", background, how={"synchronous": False}, sync_interval_ms=0),
        _ours("local_sgd", _mean(32, after, INTERVAL), how=seldom, communication_interval=INTERVAL),
        _ours(
            "diloco",
            _mean(32, param, long),
            how={"warmup_steps": long, "period": long},
            communication_interval=long,
            delay=long // 2,
            codec="identity",
        ),
        _ours("sparse_loco", sparse, how={"warmup_steps": long, "period": long}, communication_interval=long),
    ]


def _off_with(optimizer: str, traffic: Amount) -> Contender:
    off = partial(baselines.off, optimizer=optimizer)
    return Contender(f"{OFF}_{optimizer}", "none", traffic, off, synchronous=False)


def _adam(optimizer: str) -> dict[str, Any]:
    """Two exact steps, then one that makes buffers, then one more."""
    return {"optimizer": optimizer, "warmup_steps": 4}


def _with_defaults(algorithm: str) -> Contender:
    """A registered algorithm that has no row of its own: its default options, and the bytes that it says it sends."""
    made = bagua.algorithms.get(algorithm)
    exchanges_gradients = made.payload is bagua.algorithms.Payload.GRAD
    moment = Moment.GRADIENT if exchanges_gradients else Moment.AFTER

    def traffic(model: Model, ranks: int) -> Traffic:
        return Traffic(made.bytes_per_rank(model.num_elements, ranks), min(ranks - 1, 2), moment)

    synchronous = made.exactness is not bagua.algorithms.Exactness.ASYNCHRONOUS
    return _ours(algorithm, traffic, how={"synchronous": synchronous})


def available() -> dict[str, Contender]:
    """All contenders by name, those that cannot run here included; each registered algorithm is one at least."""
    found = {each.name: each for each in _all()}
    compared = {each.algorithm for each in found.values()}
    missing = [row.name for row in bagua.algorithms.available() if row.name not in compared]
    return found | {name: _with_defaults(name) for name in missing}


def get(text: str) -> Contender:
    """Return the contender `NAME`, or `NAME:OPTION=VALUE,...` with more options of `bagua.distribute`.

    Raises:
        ValueError: there is no such contender, or it takes no such option or value.
    """
    name, _, more = text.partition(":")
    known = available()
    if name not in known:
        raise ValueError(f"contender {name!r} is unknown; available: {', '.join(known)}")
    contender = known[name]
    if not more:
        return contender
    if contender.family != "bagua":
        raise ValueError(f"contender {text!r}: only algorithms of this package take options")
    given = dict(_option(text, word) for word in more.split(","))
    options = {**contender.options, **given}
    if "communication_interval" in given and "delay" not in given:
        options.pop("delay", None)  # the contender's own belongs to its own interval
    problem = _unknown(contender.algorithm, options)
    if problem:
        raise ValueError(f"contender {text!r}: {problem}")
    try:
        bagua.algorithms.get(contender.algorithm, **_own(options))
    except (TypeError, ValueError) as error:
        raise ValueError(f"contender {text!r}: {error}") from None
    return _with_options(replace(contender, name=text, options=options))


def _with_options(contender: Contender) -> Contender:
    """With the bytes and the period that follow from its options."""
    algorithm, options = contender.algorithm, contender.options
    if algorithm == "power_sgd":
        return replace(contender, traffic=partial(_low_rank, options))
    interval = options.get("communication_interval", 0)
    if interval:
        steps = math.ceil(contender.period / interval) * interval
        local = algorithm in _LOCAL
        return replace(
            contender,
            traffic=partial(_rounds, contender, interval) if local else partial(_seldom, contender.traffic, interval),
            warmup_steps=max(contender.warmup_steps, steps),
            period=steps,
        )
    if options.keys() & _CODECS and bagua.algorithms.get(algorithm).payload is bagua.algorithms.Payload.GRAD:
        return replace(contender, traffic=_mean(_bits(algorithm, options)))
    return contender


def _low_rank(options: Mapping[str, Any], model: Model, ranks: int) -> Traffic:
    """Factors by the shapes of the model, for `rank=None` too."""
    made = bagua.algorithms.PowerSGD(**_own(options))

    def sent(shapes: Sequence[Sequence[int]]) -> float:
        matrices = [(each[0], math.prod(each[1:])) if len(each) > 1 else (1, math.prod(each)) for each in shapes]
        elements = sum(n * m for n, m in matrices)
        return made.exchange_of(tuple(matrices)).bytes_per_rank(elements, ranks)

    hops = 4 if ranks > 1 else 0
    layers = tuple(sent(layer.shapes) for layer in model.layers)
    return Traffic(sent(model.shapes), hops, Moment.GRADIENT, layer_bytes=layers)


def _rounds(contender: Contender, interval: int, model: Model, ranks: int) -> Traffic:
    """One round every `interval` steps, after the step or, with a delay, beside the next ones."""
    made = bagua.algorithms.get(contender.algorithm, **_own(contender.options))
    moment = Moment.PARAMETER if getattr(made, "delay", 0) else Moment.AFTER
    sent = made.bytes_per_rank(model.num_elements, ranks) * interval
    return Traffic(sent, 2 if ranks > 1 else 0, moment, interval)


def _seldom(usual: Amount, interval: int, model: Model, ranks: int) -> Traffic:
    """What is sent in a step, every `interval` steps."""
    return replace(usual(model, ranks), every=interval)


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the algorithm takes, and not `bagua.distribute`."""
    return {key: value for key, value in options.items() if key not in _OF_DISTRIBUTE}


def _bits(algorithm: str, options: Mapping[str, Any]) -> float:
    """Bits of an element on the way to the mean's owner and back, the mean of both ways, with the codecs' headers."""
    named = {key: value for key, value in options.items() if key in _CODECS}
    made = bagua.algorithms.get(algorithm, **named)
    return 8 * made.bytes_per_rank(_MANY, _RANKS) / (2 * _MANY * (_RANKS - 1) / _RANKS)


def _option(text: str, word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not equals or not key.isidentifier():
        raise ValueError(f"contender {text!r}: expected OPTION=VALUE, got {word!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def split_names(text: str) -> tuple[str, ...]:
    """Contenders are separated by commas; by semicolons if one of them has options.

    Raises:
        ValueError: there is none.
    """
    names = tuple(word.strip() for word in text.split(";" if ";" in text or ":" in text else ",") if word.strip())
    if not names:
        raise ValueError(f"--algorithms: expected names, got {text!r}")
    return names
