"""Who takes part: algorithms of this package with fitting options, and what is there to compare them with."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import bagua
from bagua.bench import bounds, peers
from bagua.bench.bounds import Moment, Traffic
from bagua.bench.compute import EmulatedModel
from bagua.bench.models import Model
from bagua.bench.training import Training, make_optimizer

__all__ = ["ADAMS", "OFF", "Entrant", "available", "get"]

OFF = "off"
INTERVAL, LONG_INTERVAL = 8, 64  # steps between two averages of weights; of DiLoCo
POWER_RANK = 8
ADAMS = ("qadam", "one_bit_lamb", "zero_one_adam")  # optimizers with an update of their own


Amount = Callable[[Model, int], Traffic]  # from model and number of hosts


@dataclass(frozen=True)
class Entrant:
    """One row of the table.

    Attributes:
        name: of the row.
        family: "bagua", or whose it is.
        traffic: what a host sends.
        peer: makes a model ready for training; a collective. None for algorithms of this package.
        algorithm, optimizer, options: for `bagua.distribute`.
        warmup_steps: to be made before the clock runs, so that the steps measured are all alike.
        period: steps after which the pattern of steps repeats.
        synchronous: no rank gets ahead of the others.
        missing: why it cannot run here; empty if it can.
    """

    name: str
    family: str
    traffic: Amount
    peer: Callable[[EmulatedModel], Training] | None = None
    algorithm: str = ""
    optimizer: str = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    warmup_steps: int = 3
    period: int = 1
    synchronous: bool = True
    missing: str = ""

    @property
    def averaged(self) -> bool:
        """Steps differ, so that their mean counts and not their median."""
        return self.period > 1 or (self.family == "bagua" and not self.synchronous)

    def prepare(self, model: EmulatedModel, emulated: bool) -> Training:
        """Make `model` ready for training; a collective.

        Args:
            emulated: optimizers of the Adam kind do the arithmetic of SGD.
        """
        if self.peer is not None:
            return self.peer(model)
        optimizer = make_optimizer(self.optimizer, model, emulated)
        bagua.distribute(model, optimizer, self.algorithm, **self.options)
        return Training.of(model, optimizer, lambda: _detach(model))


def _detach(model: EmulatedModel) -> None:
    bagua.detach(model)


def _mean(bits: float, moment: Moment = Moment.GRADIENT, every: int = 1) -> Amount:
    return lambda model, ranks: bounds.all_to_all_mean(model.num_elements, ranks, bits, moment, every)


def _unknown(algorithm: str, options: Mapping[str, Any]) -> str:
    known = {each.name for each in fields(bagua.algorithms.get(algorithm))}
    known |= {"bucket_bytes", "num_lanes", "hierarchical"} & set(inspect.signature(bagua.distribute).parameters)
    unknown = sorted(set(options) - known)
    return f"algorithm {algorithm!r} has no option {', '.join(unknown)}" if unknown else ""


def _ours(
    name: str, traffic: Amount, algorithm: str = "", how: Mapping[str, Any] | None = None, **options: Any
) -> Entrant:
    """An algorithm of this package with `options`; `how` are other attributes of the entrant."""
    algorithm = algorithm or name
    entrant = Entrant(name, "bagua", traffic, algorithm=algorithm, options=options, **(how or {}))
    return replace(entrant, missing=_unknown(algorithm, options))


def _all() -> list[Entrant]:
    after, param = Moment.AFTER, Moment.PARAMETER

    def gossip(model: Model, ranks: int) -> Traffic:
        return bounds.gossip(model.num_elements, ranks)

    def differences(overlap: bool) -> Callable[[Model, int], Traffic]:
        return lambda model, ranks: bounds.difference_gossip(model.num_elements, ranks, overlap=overlap)

    def nothing(model: Model, ranks: int) -> Traffic:
        return Traffic(0, 0, Moment.BACKGROUND)

    def low_rank(model: Model, ranks: int) -> Traffic:
        return bounds.low_rank(model.shapes, ranks, POWER_RANK)

    def background(model: Model, ranks: int) -> Traffic:
        return bounds.background(model.num_elements, ranks)

    long = LONG_INTERVAL
    seldom: dict[str, Any] = {"warmup_steps": INTERVAL, "period": INTERVAL}
    return [
        Entrant(OFF, "none", nothing, peers.off, warmup_steps=2, synchronous=False),
        *(
            Entrant(f"{OFF}_{kind}", "none", nothing, partial(peers.off, optimizer=kind), synchronous=False)
            for kind in ADAMS
        ),
        Entrant("ddp", "torch", _mean(32), peers.ddp),
        Entrant("ddp_fp16", "torch", _mean(16), peers.ddp_fp16),
        Entrant("ddp_bf16", "torch", _mean(16), peers.ddp_bf16),
        Entrant("ddp_powersgd", "torch", low_rank, peers.ddp_power_sgd, warmup_steps=5),
        Entrant("post_local_sgd", "torch", _mean(32, after, INTERVAL), peers.post_local_sgd, **seldom),
        Entrant("deepspeed", "DeepSpeed", _mean(32), peers.deepspeed, missing=peers.missing("deepspeed")),
        Entrant("accelerate", "Accelerate", _mean(32), peers.accelerate, missing=peers.missing("accelerate")),
        Entrant("horovod", "Horovod", _mean(32), peers.horovod, missing=peers.missing("horovod.torch")),
        _ours("gradient_allreduce", _mean(32)),
        _ours("gradient_allreduce_bf16", _mean(16), "gradient_allreduce", codec="bf16"),
        _ours("bytegrad", _mean(8)),
        _ours("int4", _mean(4), "gradient_allreduce", codec="int4", error_feedback=True),
        _ours("qadam", _mean(8), how=_adam("qadam")),
        _ours("qadam_1bit", _mean(1), "qadam", _adam("qadam"), codec="sign"),
        _ours("one_bit_lamb", _mean(1), how=_adam("one_bit_lamb")),
        _ours("zero_one_adam", _mean(1), how=_adam("zero_one_adam")),
        _ours("power_sgd", low_rank, rank=POWER_RANK),
        _ours("decentralized", _mean(32, param)),
        _ours("decentralized_shift_one", gossip, "decentralized", peer_selection_mode="shift_one"),
        _ours("low_precision_decentralized", differences(False)),
        _ours("low_precision_decentralized_overlap", differences(True), "low_precision_decentralized", overlap=True),
        _ours("async", background, how={"synchronous": False}, sync_interval_ms=0),
        _ours("local_sgd", _mean(32, after, INTERVAL), how=seldom, communication_interval=INTERVAL),
        _ours(
            "diloco",
            _mean(32, param, long),
            how={"warmup_steps": long, "period": long},
            communication_interval=long,
            delay=long // 2,
        ),
    ]


def _off_with(optimizer: str, traffic: Amount) -> Entrant:
    return Entrant(f"{OFF}_{optimizer}", "none", traffic, partial(peers.off, optimizer=optimizer), synchronous=False)


def _adam(optimizer: str) -> dict[str, Any]:
    """Two exact steps, then one that makes buffers, then one more."""
    return {"optimizer": optimizer, "warmup_steps": 4}


def available() -> dict[str, Entrant]:
    """All entrants by name, those that cannot run here included."""
    return {each.name: each for each in _all()}


def get(text: str) -> Entrant:
    """Return the entrant `NAME`, or `NAME:OPTION=VALUE,...` with more options of `bagua.distribute`.

    Raises:
        ValueError: there is no such entrant, or it takes no such option.
    """
    name, _, more = text.partition(":")
    known = available()
    if name not in known:
        raise ValueError(f"entrant {name!r} is unknown; available: {', '.join(known)}")
    entrant = known[name]
    if not more:
        return entrant
    if entrant.family != "bagua":
        raise ValueError(f"entrant {text!r}: only algorithms of this package take options")
    options = {**entrant.options, **dict(_option(text, word) for word in more.split(","))}
    problem = _unknown(entrant.algorithm, options)
    if problem:
        raise ValueError(f"entrant {text!r}: {problem}")
    return replace(entrant, name=text, options=options)


def _option(text: str, word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not equals or not key.isidentifier():
        raise ValueError(f"entrant {text!r}: expected OPTION=VALUE, got {word!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value
