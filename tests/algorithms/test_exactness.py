"""The class that an algorithm names is the one that its replicas keep to."""

from __future__ import annotations

import re

import pytest
import torch

import bagua
from bagua.algorithms import Exactness
from tests.algorithms.quadratic import Quadratic
from tests.docs.markdown import ROOT
from tests.simulation.test_simulate import loss

STEPS = 12
OPTIONS = {
    "diloco": {"communication_interval": 4},
    "local_sgd": {"communication_interval": 4},
    "sparse_loco": {"communication_interval": 4, "keep": 0.0},
}
OPTIMIZERS = {
    "qadam": lambda params: bagua.optim.QAdam(params, warmup_steps=3),
    "one_bit_lamb": lambda params: bagua.optim.OneBitLamb(params, warmup_steps=3),
    "zero_one_adam": lambda params: bagua.optim.ZeroOneAdam(params, var_freeze_step=3, local_step_scaler=2),
}
CLASSES = {row.name: bagua.algorithms.get(row.name).exactness for row in bagua.algorithms.available(builtin_only=True)}


@pytest.mark.parametrize("name", [name for name, which in CLASSES.items() if which is not Exactness.ASYNCHRONOUS])
def test_replicas_are_equal_when_the_class_says_so(name: str) -> None:
    consensus = bagua.simulate(
        bagua.algorithms.get(name, **OPTIONS.get(name, {})),
        ranks=3,
        model=Quadratic,
        loss=loss,
        steps=STEPS,
        optimizer=OPTIMIZERS.get(name, lambda params: torch.optim.SGD(params, lr=0.1)),
    ).consensus
    apart = int((consensus > 0).sum())
    if CLASSES[name].replicas_equal:
        assert apart == 0
    elif CLASSES[name] is Exactness.PERIODIC:
        assert 0 < apart < STEPS, "they meet now and then"
    else:
        assert apart > 0


@pytest.mark.parametrize("name", CLASSES)
def test_the_page_of_an_algorithm_names_its_class(name: str) -> None:
    text = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    said = re.search(rf'^Name `"{name}"`, class `bagua\.algorithms\.\w+`; ([^`]*?)\n\n', text, re.MULTILINE)
    assert said is not None and CLASSES[name].value in said[1]


def test_the_guarantee_lists_the_algorithms_whose_replicas_stay_equal() -> None:
    (row,) = [
        line for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines() if "bit for bit, after each" in line
    ]
    assert set(re.findall(r"`(\w+)`", row.split("|")[1])) == {n for n, which in CLASSES.items() if which.replicas_equal}
