"""All algorithms of the library and of `bagua.contrib` keep to the contract, also with other options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import nn

from bagua import optim
from bagua.algorithms import Algorithm
from bagua.testing import ALGORITHM_CHECKS, check_algorithm
from bagua.testing.training import sgd
from tests.contract.members import algorithm_classes


@dataclass(frozen=True)
class Setting:
    """Options that make everything happen within a short run, the optimizer, and what does not apply."""

    options: Any = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    skip: tuple[str, ...] = ()


def slow_sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """For updates that are larger than gradients."""
    return torch.optim.SGD(params, lr=0.01)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def qadam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return optim.QAdam(params, lr=0.01, warmup_steps=3)


def lamb(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return optim.OneBitLamb(params, lr=0.002, warmup_steps=3)


def zero_one(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return optim.ZeroOneAdam(params, lr=0.01, var_freeze_step=3, local_step_scaler=2, local_step_clipper=2)


# What an algorithm that is not here is run with: its defaults, and SGD with momentum.
SETTINGS: dict[str, Setting] = {
    "async": Setting({"sync_interval_ms": 0}),
    "decoupled_diloco": Setting({"communication_interval": 2}, slow_sgd),
    "demo": Setting(optimizer=slow_sgd),
    "diloco": Setting({"communication_interval": 2}, slow_sgd),
    "dion": Setting(optimizer=slow_sgd, skip=("bytes",)),  # its figure is that of 1024 x 1024 matrices
    "local_sgd": Setting({"communication_interval": 2}),
    "one_bit_lamb": Setting(optimizer=lamb),
    "power_sgd": Setting(skip=("bytes",)),  # its figure is that of 1024 x 1024 matrices
    "qadam": Setting(optimizer=qadam),
    "sparse_loco": Setting({"communication_interval": 2}),
    "signsgd": Setting(optimizer=slow_sgd),
    "zero_one_adam": Setting(optimizer=zero_one, skip=("bytes",)),  # how often it sends is the optimizer's choice
}
VARIANTS: dict[str, tuple[str, Setting]] = {
    "local_sgd, scaled": ("local_sgd", Setting({"communication_interval": 2, "scale_second_moment": True}, adamw)),
    "bytegrad, int4": ("bytegrad", Setting({"codec": "int4"})),
    "bytegrad, sign": ("bytegrad", Setting({"codec": "sign"})),
    "decentralized, ring": ("decentralized", Setting({"topology": "ring", "communication_interval": 2})),
    "decentralized, mean moments": ("decentralized", Setting({"mean_moments": True}, adamw)),
    "low_precision_decentralized, scaled": (
        "low_precision_decentralized",
        Setting({"scale_second_moment": True}, adamw),
    ),
    "diloco, delayed": ("diloco", Setting({"communication_interval": 4, "delay": 2, "fragments": 2}, slow_sgd)),
    "low_precision_decentralized, overlap": ("low_precision_decentralized", Setting({"overlap": True})),
    "dion, bf16": ("dion", Setting({"codec": "bf16", "rank_fraction": 1.0}, slow_sgd, skip=("bytes",))),
    "qadam, sign": ("qadam", Setting({"codec": "sign"}, qadam)),
}
CLASSES = algorithm_classes()
CASES = {name: (name, SETTINGS.get(name, Setting())) for name in CLASSES} | VARIANTS
STEPS = 8  # two rounds of the longest interval above, and steps on both sides of every warm-up
QUICK_FOR_VARIANTS = ("replicas", "resumes", "bytes", "unused")
SLOW = set(VARIANTS) - {"bytegrad, int4", "qadam, sign", "diloco, delayed", "low_precision_decentralized, overlap"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES]
)
def test_contract(case: str) -> None:
    name, setting = CASES[case]
    made = CLASSES[name](**(setting.options or {}))
    only = QUICK_FOR_VARIANTS if case in VARIANTS else ()
    check_algorithm(made, optimizer=setting.optimizer, steps=STEPS, only=only, skip=setting.skip)


def test_nothing_is_left_out_for_an_algorithm_that_is_gone() -> None:
    assert set(SETTINGS) <= set(CLASSES)
    assert {name for setting in SETTINGS.values() for name in setting.skip} <= set(ALGORITHM_CHECKS)


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_the_docstring_describes_options_bytes_and_source(cls: type[Algorithm]) -> None:
    text = cls.__doc__ or ""
    missing = [field.name for field in fields(cls) if not re.search(rf"\b{field.name}\b", text)]
    assert not missing, f"{cls.__name__}: options {missing} are not described"
    assert re.search(r"^ *Bytes:", text, re.MULTILINE), f"{cls.__name__}: what does a rank send?"
    assert re.search(r"^ *Source: ", text, re.MULTILINE), f"{cls.__name__}: where does it come from?"
