"""What is compared: algorithms, their options, and the family of optimizers in which they compete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import bagua
import bagua.contrib  # registers what it has, also in worker processes
from bagua import optim
from bagua.algorithms import Algorithm, Exactness, Warmup
from bagua.codecs import Eden

__all__ = ["DDP", "FAMILIES", "Configuration", "all_configurations", "by_name", "make_optimizer", "select"]

DDP = "torch DDP"
FAMILIES = ("sgd", "adam", "lamb")


@dataclass(frozen=True)
class Configuration:
    """A row of the table.

    Attributes:
        name: of the row.
        family: "sgd", "adam" or "lamb": whose DDP it is compared with.
        algorithm: the registered name; "" for DDP itself.
        options: of the algorithm.
        warmup: fraction of the steps made with gradient_allreduce before.
        optimizer: as in `make_optimizer`; the family's own if "".
        processes: run in real processes over gloo rather than in the simulator.
    """

    name: str
    family: str
    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    warmup: float = 0.0
    optimizer: str = ""
    processes: bool = False

    def make(self, steps: int) -> Algorithm:
        """Return the algorithm for a run of `steps` steps."""
        algorithm = bagua.algorithms.get(self.algorithm, **self.options)
        return Warmup(round(self.warmup * steps), "gradient_allreduce", algorithm) if self.warmup else algorithm

    @property
    def exactness(self) -> str:
        """What the algorithm keeps of synchronous SGD."""
        return bagua.algorithms.get(self.algorithm, **self.options).exactness.value if self.algorithm else "exact"

    @property
    def synchronous(self) -> bool:
        """Whether the stricter target holds, and rank 0's weights are everyone's."""
        return Exactness(self.exactness).replicas_equal


def _configurations() -> Iterable[Configuration]:
    def sgd(name: str, algorithm: str, warmup: float = 0.0, **options: Any) -> Configuration:
        return Configuration(name, "sgd", algorithm, options, warmup)

    def adam(name: str, algorithm: str, optimizer: str = "adam", warmup: float = 0.0, **options: Any) -> Configuration:
        return Configuration(name, "adam", algorithm, options, warmup, optimizer)

    for family in FAMILIES:
        yield Configuration(DDP if family == "sgd" else f"{DDP}, {family}", family, "", processes=True)
    yield sgd("gradient_allreduce", "gradient_allreduce")
    yield sgd("gradient_allreduce bf16", "gradient_allreduce", codec="bf16")
    yield sgd("bytegrad", "bytegrad")
    yield sgd("bytegrad + feedback", "bytegrad", error_feedback=True)
    yield sgd("bytegrad int4 + feedback", "bytegrad", codec="int4")
    yield sgd("bytegrad sign + feedback", "bytegrad", codec="sign")
    yield sgd("bytegrad sign, no feedback", "bytegrad", codec="sign", error_feedback=False)  # shows what for
    yield sgd("bytegrad top_k + feedback", "bytegrad", codec="top_k")
    yield sgd("bytegrad eden 1 bit", "bytegrad", codec=Eden(bits=1), error_feedback=False)
    yield sgd("bytegrad eden 2 bits", "bytegrad", codec=Eden(bits=2), error_feedback=False)
    yield sgd("bytegrad eden 1 bit + feedback", "bytegrad", codec=Eden(bits=1))
    yield sgd("bytegrad eden 2 bits + feedback", "bytegrad", codec=Eden(bits=2))
    yield sgd("bytegrad eden 1 bit, trellis + feedback", "bytegrad", codec=Eden(bits=1, states=32))
    yield sgd("bytegrad eden 2 bits, trellis + feedback", "bytegrad", codec=Eden(bits=2, states=8))
    yield sgd("bytegrad eden 4 bits + feedback", "bytegrad", codec=Eden(bits=4))
    yield sgd("power_sgd", "power_sgd", rank=4)
    yield sgd("power_sgd by shape", "power_sgd")
    yield sgd("power_sgd rank 16", "power_sgd", rank=16)
    yield sgd("power_sgd after 10 %", "power_sgd", 0.1, rank=4)
    yield sgd("decentralized all", "decentralized")
    yield sgd("decentralized shift_one", "decentralized", peer_selection_mode="shift_one")
    yield sgd("decentralized ring", "decentralized", topology="ring")
    yield sgd("decentralized exponential", "decentralized", topology="exponential")
    yield sgd("low_precision_decentralized", "low_precision_decentralized")
    yield sgd("low_precision overlapped", "low_precision_decentralized", overlap=True)
    long: dict[str, Any] = {"communication_interval": 8, "codec": "identity"}
    yield sgd("local_sgd", "local_sgd", **long)
    yield sgd("local_sgd after 25 %", "local_sgd", 0.25, **long)
    yield sgd("local_sgd short rounds", "local_sgd")
    yield sgd("diloco", "diloco", communication_interval=16, codec="identity")
    yield sgd("diloco after 25 %", "diloco", 0.25, communication_interval=16, codec="identity")
    yield sgd("diloco short rounds", "diloco")
    yield sgd("sparse_loco", "sparse_loco", communication_interval=16)
    yield Configuration("async", "sgd", "async", {"sync_interval_ms": 0}, processes=True)
    yield Configuration("async after 25 %", "sgd", "async", {"sync_interval_ms": 0}, 0.25, processes=True)
    yield adam("gradient_allreduce, adam", "gradient_allreduce")
    yield adam("gradient_allreduce bf16, adam", "gradient_allreduce", codec="bf16")
    yield adam("bytegrad, adam", "bytegrad")
    yield adam("bytegrad int4 + feedback, adam", "bytegrad", codec="int4")
    yield adam("bytegrad eden 1 bit, adam", "bytegrad", codec=Eden(bits=1), denoise_second_moment=False)
    yield adam("bytegrad eden 2 bits, adam", "bytegrad", codec=Eden(bits=2), denoise_second_moment=False)
    yield adam("bytegrad eden 1 bit, denoised, adam", "bytegrad", codec=Eden(bits=1))
    yield adam("bytegrad eden 2 bits, denoised, adam", "bytegrad", codec=Eden(bits=2))
    yield adam("bytegrad eden 1 bit, trellis, adam", "bytegrad", codec=Eden(bits=1, states=32))
    yield adam("bytegrad eden 2 bits, trellis, adam", "bytegrad", codec=Eden(bits=2, states=8))
    yield adam("bytegrad eden 4 bits, adam", "bytegrad", codec=Eden(bits=4))
    yield adam("power_sgd, adam", "power_sgd", rank=4)
    yield adam("power_sgd by shape, adam", "power_sgd")
    yield adam("power_sgd rank 16, adam", "power_sgd", rank=16)
    yield adam("decentralized all, adam", "decentralized", mean_moments=False)
    yield adam("decentralized all, mean moments, adam", "decentralized")
    yield adam("decentralized shift_one, adam", "decentralized", peer_selection_mode="shift_one")
    yield adam("low_precision_decentralized, adam", "low_precision_decentralized")
    yield adam("low_precision overlapped, adam", "low_precision_decentralized", overlap=True)
    yield adam("qadam", "qadam", "qadam")
    yield adam("qadam sign", "qadam", "qadam", codec="sign")
    yield adam("zero_one_adam", "zero_one_adam", "zero_one_adam")
    yield adam("local_sgd, adam", "local_sgd", **long)
    yield adam("local_sgd after 25 %, adam", "local_sgd", warmup=0.25, **long)
    yield adam("local_sgd short rounds, adam", "local_sgd")
    yield Configuration("async, adam", "adam", "async", {"sync_interval_ms": 0}, processes=True)
    own: dict[str, Any] = {"communication_interval": 16, "codec": "identity"}
    yield adam("diloco, adam", "diloco", **own)
    yield adam("diloco after 25 %, adam", "diloco", warmup=0.25, **own)
    yield adam("diloco short rounds, adam", "diloco")
    one_bit: dict[str, Any] = {"codec": "sign"}
    yield Configuration("one_bit_lamb", "lamb", "one_bit_lamb", optimizer="one_bit_lamb")
    yield Configuration("one_bit_lamb fixed scaling", "lamb", "one_bit_lamb", optimizer="one_bit_lamb_fixed")
    yield Configuration("one_bit_lamb sign", "lamb", "one_bit_lamb", one_bit, 0.0, "one_bit_lamb")
    yield Configuration("one_bit_lamb sign, fixed scaling", "lamb", "one_bit_lamb", one_bit, 0.0, "one_bit_lamb_fixed")


def all_configurations() -> list[Configuration]:
    """Return the rows whose algorithm is registered; one that has no row gets one with SGD and its defaults."""
    known = [row.name for row in bagua.algorithms.available()]
    rows = [each for each in _configurations() if each.algorithm in ("", *known)]
    compared = {each.algorithm for each in rows}
    return rows + [Configuration(name, "sgd", name) for name in known if name not in compared]


def by_name(name: str) -> Configuration:
    """Return the row of that name."""
    return next(each for each in all_configurations() if each.name == name)


def select(words: Iterable[str]) -> list[Configuration]:
    """Return the rows that have one of `words` as name, algorithm or family, and DDP of their families.

    Raises:
        ValueError: a word fits no row.
    """
    rows, chosen = all_configurations(), set[str]()
    for word in words:
        fits = {each.name for each in rows if word in (each.name, each.algorithm, each.family)}
        if not fits:
            raise ValueError(f"{word!r} is no configuration; there are: {', '.join(each.name for each in rows)}")
        chosen |= fits
    families = {each.family for each in rows if each.name in chosen}
    return [each for each in rows if each.name in chosen or (not each.algorithm and each.family in families)]


def make_optimizer(kind: str, params: Iterable[nn.Parameter], lr: float, steps: int) -> torch.optim.Optimizer:
    """Return a new optimizer; those with two stages warm up for a fifth of the steps.

    Raises:
        ValueError: no such kind.
    """
    held, warm = list(params), max(1, steps // 5)
    if kind == "sgd":
        return torch.optim.SGD(held, lr=lr, momentum=0.9)
    if kind == "adam":
        return torch.optim.Adam(held, lr=lr)
    if kind == "lamb":  # in its first stage, which is LAMB, for ever
        return optim.OneBitLamb(held, lr=lr, warmup_steps=steps + 1)
    if kind in ("one_bit_lamb", "one_bit_lamb_fixed"):
        return optim.OneBitLamb(held, lr=lr, warmup_steps=warm, fixed_scaling=kind.endswith("fixed"))
    if kind == "qadam":
        return optim.QAdam(held, lr=lr, warmup_steps=warm)
    if kind == "zero_one_adam":
        return optim.ZeroOneAdam(
            held,
            lr=lr,
            var_freeze_step=warm,
            var_update_scaler=max(1, warm // 4),
            local_step_scaler=max(1, steps // 3),
            local_step_clipper=4,
        )
    raise ValueError(f"optimizer {kind!r} is unknown")
