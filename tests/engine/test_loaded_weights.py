"""Weights that are loaded in mid-training: algorithms with state of those before say so."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch

import bagua
from bagua.engine.hooks import attachments
from tests.rank_pool import RankPool
from tests.rank_threads import teams

TEXT = "the model's weights were loaded in mid-training"


def make(algorithm: str, **options: Any) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (team,) = teams(1)
    bagua.distribute(model, optimizer, algorithm, process_group=team, **options)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def told(model: torch.nn.Module) -> int:
    return sum(TEXT in each for each in bagua.stats(model).notices)


@pytest.mark.parametrize(
    ("algorithm", "warns"),
    [("gradient_allreduce", 0), ("bytegrad", 0), ("local_sgd", 1), ("diloco", 1), ("decentralized", 1)],
)
def test_loading_in_mid_training(algorithm: str, warns: int, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = make(algorithm)
    model.load_state_dict(torch.nn.Linear(4, 4).state_dict())
    step(model, optimizer)
    assert told(model) == 0, "before the first step the state is made anew"
    with caplog.at_level(logging.WARNING):
        model.load_state_dict(torch.nn.Linear(4, 4).state_dict())
        step(model, optimizer)
    assert told(model) == caplog.text.count(f"{TEXT}, and {algorithm} keeps") == warns
    model.load_state_dict(model.state_dict())
    step(model, optimizer)
    assert told(model) == warns, "it is said once"


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("diloco", {"communication_interval": 2, "outer_momentum": 0.5}),
        ("sparse_loco", {"communication_interval": 2}),
        ("local_sgd", {"communication_interval": 2}),
        ("low_precision_decentralized", {}),
        ("decentralized", {}),
    ],
)
def test_weights_loaded_before_the_first_step_are_those_that_train(algorithm: str, options: dict[str, Any]) -> None:
    """As scripts for `DistributedDataParallel` load them, after it was made."""
    weights = torch.nn.Linear(4, 4).state_dict()
    found = []
    for when in ("before", "after"):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (team,) = teams(1)
        if when == "before":
            model.load_state_dict(weights)
        bagua.distribute(model, optimizer, algorithm, process_group=team, **options)
        if when == "after":
            model.load_state_dict(weights)
        for _ in range(5):
            step(model, optimizer)
        found.append(model.weight.detach().clone())
        assert told(model) == 0
    assert torch.equal(*found)


def test_async_takes_them_as_its_base(pool: RankPool) -> None:
    pool.run(2, load_and_look_at_the_base)


def load_and_look_at_the_base() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    bagua.distribute(model, optimizer, "async", codec="minmax_uint8")
    weights = torch.nn.Linear(4, 4).state_dict()
    model.load_state_dict(weights)
    engine = attachments[model].engine
    assert engine.buckets
    for bucket in engine.buckets:
        assert torch.equal(engine.memory.scratch("base", bucket), bucket.flat)
    for _ in range(4):
        step(model, optimizer)
    bagua.average_parameters(model)
    torch.testing.assert_close(model.weight.detach(), weights["weight"])
    bagua.detach(model)


def test_with_the_state_of_the_algorithm_nothing_is_said() -> None:
    model, optimizer = make("diloco")
    step(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), bagua.state_dict(model)))
    step(model, optimizer)
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    bagua.load_state_dict(model, before[2])
    step(model, optimizer)
    assert told(model) == 0


def test_copies_are_plain_modules() -> None:
    model, optimizer = make("local_sgd")
    step(model, optimizer)
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        plain.load_state_dict(model.state_dict())
    bagua.detach(model)
    model.load_state_dict(model.state_dict())
    assert not model._load_state_dict_post_hooks
